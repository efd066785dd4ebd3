"""`paceline run`: from what a user typed to a checked plan, and from there to the supervisor.

Everything that can be wrong is looked at before anything is started. Of each setting the plan remembers whether it
was given or is the default; both are printed, and stored with the run.

With `--emulate` this process only makes the hosts and starts one more `paceline run` on each of them, exactly as
people would on as many machines.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import msgspec

from paceline.cli import number, seconds, whole
from paceline.cli.checks import check, check_script
from paceline.cli.cut import add_cut_arguments
from paceline.cli.engine_flags import add_engine_arguments
from paceline.cli.run_hosts import HostRange
from paceline.cli.run_keys import with_keys
from paceline.cli.run_plan import RunPlan, resolve
from paceline.cli.run_rendezvous import DEFAULT_PORT, by_collectives
from paceline.cli.unused import unused
from paceline.launch.cores import allowed_cores, share_of_cores
from paceline.launch.emulate import EmulatedHosts, Emulation, is_emulated_host
from paceline.launch.hosts import supervise_hosts
from paceline.launch.outcome import RunOutcome
from paceline.launch.signals import signals_as_bytes
from paceline.launch.supervisor import Supervisor
from paceline.launch.with_parent import PARENT_VARIABLE, die_with_parent
from paceline.machine import installed_version, shared_words_work
from paceline.net.secure import write_token
from paceline.plan.after_run import SideBySide, compare_with_prediction
from paceline.run_place import INTERRUPTED
from paceline.watch.display import MOST_FOUND, choose_display
from paceline.watch.found import TargetSeen
from paceline.watch.output import put
from paceline.watch.run_folder import EVENTS, RunFolder, choose_run_folder
from paceline.watch.target import NOT_REACHED, Target, read_time

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


# ── what can be typed ────────────────────────────────────────────────────────────────────────────────────────


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


# ── doing it ─────────────────────────────────────────────────────────────────────────────────────────────────


def execute(options: argparse.Namespace) -> int:
    started = PARENT_VARIABLE in os.environ  # by another command of ours
    if started:
        die_with_parent()
    inside = None not in (options.emulate, options.rdzv_endpoint, options.host) and (started or is_emulated_host())
    check_script(options.script, module=options.module)
    if options.auto:
        from paceline.cli.auto import by_plan  # which loads what plans need

        options = by_plan(options, add_arguments)
    plan = resolve(options)
    if plan.on is not None:
        from paceline.cli.run_engine import run_on_engine  # each node checks what it has

        return run_on_engine(plan)
    check(plan, inside=inside)
    if inside:  # an emulated host has cores of its own, as far as they go
        os.sched_setaffinity(0, share_of_cores(plan.host, plan.hosts, allowed_cores()))
    folder = choose_run_folder(plan.run_folder, plan.name, host=plan.host, again=plan.fewest is not None)
    if plan.emulate is not None and not inside:
        return _run_on_emulated_hosts(plan, Emulation.parse(plan.emulate, may_join=True), folder)
    return _run_here(plan, folder)


def _run_here(plan: RunPlan, path: Path) -> int:
    with with_keys(plan, path) as plan:
        return _supervise(plan, path)


def _supervise(plan: RunPlan, path: Path) -> int:
    quiet = plan.quiet or plan.host > 0  # of several hosts, the first one speaks
    display = choose_display(plan.name, path, plain=plan.plain, quiet=quiet)
    folder = RunFolder(path, lambda line: display.say(f"paceline: {line}"), host=plan.host)
    job = plan.job(plan.place(path), container=path.name)
    began, waits = time.time(), True
    try:
        folder.write_config(_config(plan, job.place.rows))
        if not quiet:
            display.say(f"paceline: {in_words(plan)}")
            if by_collectives(plan.strategy) and not shared_words_work():
                why = f"shared memory is for x86-64 so far and this is {platform.machine()}"
                display.say(f"paceline: {why}: replicas exchange by collectives")
        outcome = Supervisor(job, folder, display).run()
        compared = _compared(plan, path) if outcome.exit_code == 0 and plan.host == 0 else None
        if not quiet:
            display.say(f"paceline: {_summary(outcome, plan, began)}; run folder {path}")
            if (unsaved := _of_unsaved(outcome, plan, path)) is not None:
                display.say(f"paceline: {unsaved}")
            if compared is not None:
                display.say(f"paceline: {compared.words}")
        elif outcome.exit_code == NOT_REACHED and outcome.target is not None:
            display.say(f"paceline: {_of_target(outcome, outcome.target)}; run folder {path}")
        if plan.json:
            beside = msgspec.structs.asdict(compared) if compared is not None else {}
            display.pass_on(_as_json(path, {**asdict(outcome), **beside}), error=False)
    except KeyboardInterrupt:  # the run is over: who asks for the end once more does not wait for readers
        waits = False
        raise
    finally:
        folder.close()
        display.close(wait=waits)
    return outcome.exit_code


def _compared(plan: RunPlan, path: Path) -> SideBySide | None:
    """A step beside its prediction, if the script was planned."""
    return compare_with_prediction(
        path,
        plan.strategy,
        plan.hosts,
        plan.script,
        plan.arguments,
        module=plan.module,
        emulate=plan.emulate,
    )


def in_words(plan: RunPlan) -> str:
    """What was given, what is so by default, and what changes nothing here."""
    idle, given = unused(plan), plan.given_settings
    said: dict[bool, list[str]] = {True: [], False: []}
    for name, value in plan.settings.items():
        if value not in (None, ()) and name not in idle:
            said[name in given].append(f"{_typed(name)} {_shown(name, value)}")
    words = f"given: {', '.join(said[True])}; by default: {', '.join(said[False])}"
    ignored = not_used(plan)
    return f"{words}; {ignored}" if ignored else words


def not_used(plan: RunPlan) -> str:
    """What was given and changes nothing in this plan, and why; empty if there is no such thing."""
    idle = [
        f"{_typed(name)}{'' if value is True else f' {_shown(name, value)}'} ({why})"
        for name, why in unused(plan).items()
        if (value := plan.given.get(name)) is not None
    ]
    return f"not used: {', '.join(idle)}" if idle else ""


def _typed(name: str) -> str:
    return name.removesuffix("_s").replace("_", "-")


def _shown(name: str, value: object) -> str:
    if isinstance(value, tuple):
        return shlex.join(value)
    unit = " s" if name.endswith("_s") else ""
    return f"{value:g}{unit}" if isinstance(value, float) else str(value)


def _config(plan: RunPlan, replicas: int) -> dict[str, object]:
    idle = {name: {"not_used": why} for name, why in unused(plan).items()}
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": ["paceline", *sys.argv[1:]],
        "folder": str(Path.cwd()),
        "settings": {
            name: {"value": value, "from": "flag" if name in plan.given_settings else "default", **idle.get(name, {})}
            for name, value in plan.settings.items()
        },
        "versions": {
            "python": platform.python_version(),
            **{package: installed_version(package) for package in ("torch", "paceline")},
        },
        "machine": {"name": platform.node(), "system": platform.platform(), "cores": allowed_cores()},
        "cores_by_replica": [share_of_cores(row, replicas, allowed_cores()) for row in range(replicas)],
    }


def _summary(outcome: RunOutcome, plan: RunPlan, began: float) -> str:
    if outcome.exit_code == INTERRUPTED:
        stopped = f"stopped at step {outcome.steps}"
        if plan.save_on_stop is None:
            return f"{stopped}, nothing was saved (--save-on-stop PATH does)"
        path = Path(plan.save_on_stop)
        saved = path.exists() and path.stat().st_mtime >= began
        return f"{stopped}, {'saved to' if saved else 'nothing was saved to'} {path}"
    if outcome.exit_code == 128 + signal.SIGQUIT:
        return f"told to end at once at step {outcome.steps}"
    if outcome.exit_code not in (0, NOT_REACHED):
        return f"ended with exit code {outcome.exit_code} at step {outcome.steps}"
    if not outcome.steps:
        return f"ended after {outcome.seconds:.1f} s"
    words = [f"{outcome.steps - outcome.resumed_at} steps in {outcome.seconds:.1f} s"]
    if outcome.resumed_at:
        words.append(f"after {outcome.resumed_at} of an earlier run")
    if outcome.samples_per_second:
        words.append(f"{outcome.samples_per_second:.0f} samples/s")
    if outcome.cutting_s is not None:
        words.append(f"cut in {outcome.cutting_s:.1f} s")
    if outcome.loss is not None:
        words.append(f"loss {outcome.loss:.4g}")
    words += [f"{name} {found.value:.4g}" for name, found in list(outcome.found.items())[-MOST_FOUND:]]
    if outcome.target is not None:
        words.append(_of_target(outcome, outcome.target))
    elif outcome.stopped_by is not None:
        words.append(f"stopped by --{outcome.stopped_by}")
    if outcome.deaths:
        words.append(f"deaths {outcome.deaths}, restarts {outcome.restarts}")
    return ", ".join(words)


def _of_unsaved(outcome: RunOutcome, plan: RunPlan, path: Path) -> str | None:
    """That the script has saved nothing of what it has trained, and how the model can still be had."""
    if outcome.saved is not None or outcome.steps <= outcome.resumed_at or plan.no_checkpoints:
        return None
    if plan.join is not None:
        how = f"--keys {plan.keys}" if plan.keys is not None else f"--token {plan.token}"
        name = plan.container or path.name
        save = f"paceline container save {name} model.safetensors --at {plan.join} {how}"
        return f"the script never called trainer.save; the model is still with the servers: {save}"
    if outcome.kept:
        save = f"paceline container save {path} model.safetensors"
        return f"the script never called trainer.save; the model is kept in the run folder: {save}"
    return "the script never called trainer.save, and its model is gone"


def _of_target(outcome: RunOutcome, seen: TargetSeen) -> str:
    if seen.reached is not None:
        after = f" after {seen.reached.seconds:.2f} s of training" if seen.reached.seconds is not None else ""
        return f"{seen.target} reached at step {seen.reached.step}{after}"
    if seen.best is None:
        return f"{seen.target} not reached: {Target.parse(seen.target).never_seen(outcome.found)}"
    limit = f" (stopped by --{outcome.stopped_by})" if outcome.stopped_by is not None else ""
    return f"{seen.target} not reached{limit}, the best was {seen.best:.4g}"


def _as_json(run_folder: Path, outcome: Mapping[str, object]) -> bytes:
    return msgspec.json.encode({"run_folder": str(run_folder), **outcome}) + b"\n"


# ── emulated hosts ───────────────────────────────────────────────────────────────────────────────────────────


def _run_on_emulated_hosts(plan: RunPlan, emulation: Emulation, folder: Path) -> int:
    """One more `paceline run` on each host."""
    if plan.meets and plan.token is None and plan.keys is None:
        write_token(folder)  # all hosts see this folder
    with signals_as_bytes() as signals, EmulatedHosts(emulation) as hosts:  # whoever is told to end removes them first
        rendezvous = f"{hosts.addresses[0]}:{DEFAULT_PORT}"
        commands = [
            hosts.command(
                host, [sys.executable, "-m", "paceline", *plan.on_host(host, rendezvous, str(folder)).command()]
            )
            for host in range(emulation.hosts)
        ]
        begin = emulation.fewest or emulation.hosts
        for host, command in enumerate(commands[begin:], begin):
            put(sys.stderr, f"paceline: host {host} may join: {shlex.join(command)}\n".encode())
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": hosts.interface}
        exit_code = supervise_hosts(commands[:begin], environment, signals, meet=plan.meets)
    if plan.json:
        put(sys.stdout, _as_json(folder, {**_last_event(folder), "exit_code": exit_code}))
    return exit_code


def _last_event(folder: Path) -> dict[str, object]:
    """How the run ended, as host 0 wrote it down."""
    with contextlib.suppress(OSError, IndexError, msgspec.DecodeError):
        event = msgspec.json.decode((folder / EVENTS).read_bytes().splitlines()[-1], type=dict[str, object])
        return {name: value for name, value in event.items() if name not in ("time", "event")}
    return {}
