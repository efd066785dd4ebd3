"""What can be typed after `paceline run`; other commands that start runs take groups of the same flags.

What the flags mean together is worked out in `run_plan.py`, which of them have no effect in `unused.py`.
"""

from __future__ import annotations

import argparse
from functools import partial

from paceline.cli import number, seconds, whole
from paceline.cli.cut import add_cut_arguments
from paceline.cli.engine_flags import add_engine_arguments
from paceline.cli.run_hosts import HostRange
from paceline.cli.run_rendezvous import DEFAULT_PORT
from paceline.watch.target import read_time

EXAMPLES = """\
examples:
  paceline run train.py --replicas 4
  paceline run train.py --replicas 4 -- --lr 0.1             --lr is train.py's own argument
  paceline run train.py --auto                               by the strategy that paceline plan says
  paceline run -m package.train --replicas 4                 a module, as with python -m
  paceline run train.py --replicas 4 --on-failure restart    a killed replica is started again
  paceline run train.py --save-on-stop last.safetensors      Ctrl-C ends after the step, and saves
  paceline run train.py --until "accuracy>=0.97" --longest 5m  stops when trainer.evaluate(…, name="accuracy") says so
  paceline run train.py --stages 2 --micro-batches 8         one model, cut by layers over two processes
  paceline run train.py --replicas 4 --servers 2 --accept 3  parameters on servers; the last replica is not waited for
  paceline run train.py --replicas 4 --emulate hosts=2,link=1gbit --wire bf16
                                                             as on two machines (needs root)
  paceline run train.py --replicas 2 --join 127.0.0.1:7070 --token servers/0 --container digits
                                                             parameters stay on a server that runs already
  paceline run train.py --on ray --nnodes 3 --replicas 6     on three nodes of a Ray cluster; --on slurm the same there
on two machines, with torchrun's flags; this is the first of them, the other is --node-rank 1:
  paceline run train.py --nnodes 2 --nproc-per-node 2 --node-rank 0 --rdzv-endpoint 10.0.0.1:29500
  paceline run train.py --nnodes 2 --replicas 1 --stages 4 --node-rank 0 --rdzv-endpoint 10.0.0.1:29500
                                                             two stages on each of two hosts
  paceline run train.py --nnodes 2 --replicas 4 --servers 2 --token secret --node-rank 0 --rdzv-endpoint 10.0.0.1:29500
                                                             a server on each, and the same secret file
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "paceline run SCRIPT [flags] [-- the script's own arguments]"
    parser.description = "Train a script on one or many replicas, on this machine or several."
    parser.epilog = EXAMPLES
    add_strategy_arguments(parser)
    parser.add_argument("--auto", action="store_true", default=None, help="by the strategy that `paceline plan` says")
    parser.add_argument(
        "--devices", metavar="cuda:0,cuda:1", help="that replicas of a host compute on, pl.place().accelerator"
    )
    add_cut_arguments(parser)
    add_server_arguments(parser)
    joined = add_join_arguments(parser)
    joined.add_argument("--container", metavar="NAME", help="of the parameters, default the run folder's name")
    faults = add_fault_arguments(parser)
    faults.add_argument(
        "--operation-timeout",
        dest="operation_timeout_s",
        type=seconds("operation-timeout"),
        metavar="SECONDS",
        help="of every step and evaluation, as pl.deadline around each",
    )
    faults.add_argument("--save-on-stop", metavar="PATH", help="a checkpoint to write when stopped by Ctrl-C")
    faults.add_argument(
        "--no-checkpoints",
        action="store_true",
        help="trainer.save writes nothing and trainer.resume finds nothing: for a run that is a trial",
    )
    add_stop_arguments(parser)
    hosts = parser.add_argument_group("several machines")
    hosts.add_argument(
        "--nnodes",
        dest="hosts",
        action=HostRange,
        metavar="N",
        help="how many, default 1; 2:4: from two on, and up to four, which may join later",
    )
    hosts.add_argument(
        "--node-rank", dest="host", type=whole("node-rank", 0), metavar="K", help="which one this is, from 0"
    )
    hosts.add_argument("--rdzv-endpoint", metavar="ADDRESS:PORT", help="where machine 0 can be reached")
    hosts.add_argument("--master-addr", metavar="ADDRESS", help="the same, in two flags")
    hosts.add_argument("--master-port", type=whole("master-port", 1), metavar="PORT", help=f"default {DEFAULT_PORT}")
    hosts.add_argument(
        "--secure", action="store_true", default=None, help="TLS between hosts, with keys made of the --token on each"
    )
    hosts.add_argument("--servers-on", metavar="0,2", help="hosts that the --servers are on, default all in turn")
    hosts.add_argument(
        "--lost-after",
        dest="lost_after_s",
        type=partial(read_time, "lost-after"),
        metavar="TIME",
        help="of silence, that a machine is gone: 60s, default 20s",
    )
    hosts.add_argument("--emulate", metavar="hosts=2,link=1gbit", help="several machines on this one (root)")
    add_engine_arguments(parser)
    seen = parser.add_argument_group("what you see")
    seen.add_argument("--run-folder", metavar="PATH", help="default runs/<date-time>-<script>")
    seen.add_argument("--plain", action="store_true", help="lines instead of the live table")
    seen.add_argument("--quiet", action="store_true", help="only the script's output, and what goes wrong")
    seen.add_argument("--json", action="store_true", help="a summary as the last line on stdout")


def add_stop_arguments(parser: argparse.ArgumentParser) -> None:
    """When a run has done enough."""
    group = parser.add_argument_group("when it has done enough")
    group.add_argument(
        "--until", metavar="TARGET", help='stop when a metric the script tells is there, such as "accuracy>=0.97"'
    )
    group.add_argument("--goes-on", action="store_true", help="note when the target is reached, and do not stop")
    add_bound_arguments(group)


def add_join_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Where servers are, and how to be let in."""
    group = parser.add_argument_group("servers that run already (paceline server), or on several machines")
    group.add_argument("--join", metavar="ADDRESSES", help="where they are, such as 127.0.0.1:7070,127.0.0.1:7071")
    group.add_argument("--token", metavar="PATH", help="their token: the file, or the folder it is in")
    group.add_argument("--keys", metavar="FOLDER", help="instead of a token, on other machines (paceline keys)")
    return group


def add_bound_arguments(group: argparse._ActionsContainer) -> None:
    """How long a run may be."""
    group.add_argument(
        "--longest", dest="longest_s", type=partial(read_time, "longest"), metavar="TIME", help="of training: 60s, 5m"
    )
    group.add_argument("--most-steps", type=whole("most-steps", 1), metavar="N", help="updates, of the whole run")


def add_fault_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """What happens to replicas, and what then."""
    group = parser.add_argument_group("when something happens")
    group.add_argument(
        "--on-failure",
        metavar="POLICY",
        help="of a killed replica: continue, restart, stop; default continue, or stop where nobody could",
    )
    group.add_argument("--max-restarts", type=whole("max-restarts", 0), metavar="N", help="at most, default 10")
    group.add_argument("--slow", metavar="2:5x", help="make replica 2 a straggler: it takes 5 times as long a step")
    return group


def add_strategy_arguments(parser: argparse.ArgumentParser) -> None:
    """The script, and how it is distributed."""
    parser.add_argument("script", metavar="SCRIPT", help="a Python file that uses pl.Trainer or pl.distribute")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as with python -m")
    group = parser.add_argument_group("replicas")
    group.add_argument("--replicas", type=whole("replicas", 1), metavar="N", help="on all machines together, default 1")
    group.add_argument(
        "--nproc-per-node", type=whole("nproc-per-node", 1), metavar="N", help="the same, for one machine"
    )
    group.add_argument(
        "--wire",
        metavar="FORMAT",
        help="of gradients between hosts: fp32 (default), bf16, fp16, int8, topk:0.01, powersgd:4",
    )
    group.add_argument(
        "--overlap",
        action="store_true",
        default=None,
        help="of hosts: the next forward runs while gradients still travel; a lost host then ends the run",
    )
    group.add_argument(
        "--every", type=whole("every", 1), metavar="N", help="hosts exchange after every N steps, default 1"
    )
    group.add_argument(
        "--outer-momentum", type=number("outer-momentum"), metavar="X", help="of the step that hosts make of --every"
    )
    group.add_argument("--outer-lr", type=number("outer-lr"), metavar="X", help="its length, default 1: to the mean")
    group.add_argument(
        "--gossip", action="store_true", default=None, help="hosts exchange parameters, each with one other at a time"
    )
    group.add_argument("--batchnorm", metavar="HOW", help="exact (whole batch, default) or local (as DDP)")
    group.add_argument(
        "--exchange", metavar="HOW", help="auto (default), shared or collective; with servers auto or tcp"
    )
    group.add_argument(
        "--timeout", dest="timeout_s", type=seconds("timeout"), metavar="SECONDS", help="longest wait, default 600"
    )


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Parameters on servers, and when they are updated."""
    group = parser.add_argument_group("parameters on servers")
    group.add_argument("--servers", type=whole("servers", 1), metavar="N", help="processes that own the parameters")
    group.add_argument("--only", metavar="WHAT", help="sparse: only nn.Embedding(sparse=True), the rest is mirrored")
    group.add_argument("--accept", metavar="K", help="close a step with the first K replicas; auto: by measurement")
    group.add_argument("--async", action="store_true", default=None, help="update at each replica's report")
    group.add_argument(
        "--bounded", type=whole("bounded", 0), metavar="S", help="async, but at most S steps ahead of the slowest"
    )
    group.add_argument("--stale", metavar="HOW", help="of stale gradients: keep, drop:N, scale, compensate[:LAMBDA]")
    group.add_argument("--stale-lr", type=number("stale-lr"), metavar="X", help="factor on the learning rate")
    group.add_argument("--warmup-steps", type=whole("warmup-steps", 0), metavar="N", help="made by one replica alone")
    group.add_argument("--warmup-epochs", type=whole("warmup-epochs", 0), metavar="N", help="the same in epochs")
    group.add_argument(
        "--durability", metavar="HOW", help="what a killed server comes back from: none, log (a file), replica (a peer)"
    )
    group.add_argument(
        "--in-graph",
        action="store_true",
        default=None,
        help="all replicas as threads of one process, which without --servers has the parameters too",
    )
