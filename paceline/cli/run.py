"""`paceline run`: from what a user typed to a checked plan, and from there to the supervisor.

Everything that can be wrong is looked at before anything is started. Of each setting the plan remembers whether it
was given or is the default; both are printed, and stored with the run.

With `--emulate` this process only makes the hosts and starts one more `paceline run` on each of them, exactly as
people would on as many machines.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import importlib.metadata
import os
import platform
import shlex
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from paceline.cli import seconds, whole
from paceline.errors import InvalidInput, StrategyError
from paceline.exchange.board import MOST_REPLICAS
from paceline.launch.cores import allowed_cores, share_of_cores
from paceline.launch.emulate import EmulatedHosts, Emulation, check_permission
from paceline.launch.place import Place
from paceline.launch.replica import PARENT_VARIABLE, die_with_parent
from paceline.launch.supervisor import INTERRUPTED, POLICIES, Job, Outcome, Supervisor, supervise_hosts
from paceline.strategy import Mirrored, one_of
from paceline.watch.display import choose_display, put
from paceline.watch.run_folder import EVENTS, RunFolder, choose_run_folder

DEFAULT_PORT = 29500
# Flags that are not named as the setting they lead to.
_SETTINGS = {
    "nproc_per_node": "replicas",
    "rdzv_endpoint": "rendezvous",
    "master_addr": "rendezvous",
    "master_port": "rendezvous",
}
_MAIN = "import sys; from paceline.cli import main; sys.exit(main())"

EXAMPLES = """\
examples:
  paceline run train.py --replicas 4
  paceline run train.py --replicas 4 -- --lr 0.1             --lr is train.py's own argument
  paceline run train.py --replicas 4 --on-failure restart    a killed replica is started again
  paceline run train.py --save-on-stop last.safetensors      Ctrl-C ends after the step, and saves
  paceline run train.py --replicas 4 --emulate hosts=2,link=1gbit --wire bf16
                                                             as on two machines (needs root)
on two machines, with torchrun's flags; this is the first of them, the other is --node-rank 1:
  paceline run train.py --nnodes 2 --nproc-per-node 2 --node-rank 0 --rdzv-endpoint 10.0.0.1:29500
"""


# ── what can be typed ────────────────────────────────────────────────────────────────────────────────────────


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "paceline run SCRIPT [flags] [-- the script's own arguments]"
    parser.description = "Train a script on one or many replicas, on this machine or several."
    parser.epilog = EXAMPLES
    add_strategy_arguments(parser)
    faults = parser.add_argument_group("when something happens")
    faults.add_argument("--on-failure", metavar="POLICY", help="of a killed replica: continue (default), restart, stop")
    faults.add_argument("--max-restarts", type=whole("max-restarts", 0), metavar="N", help="default 10")
    faults.add_argument("--save-on-stop", metavar="PATH", help="a checkpoint to write when stopped by Ctrl-C")
    hosts = parser.add_argument_group("several machines")
    hosts.add_argument("--nnodes", dest="hosts", type=whole("nnodes", 1), metavar="N", help="how many, default 1")
    hosts.add_argument(
        "--node-rank", dest="host", type=whole("node-rank", 0), metavar="K", help="which one this is, from 0"
    )
    hosts.add_argument("--rdzv-endpoint", metavar="ADDRESS:PORT", help="where machine 0 can be reached")
    hosts.add_argument("--master-addr", metavar="ADDRESS", help="the same, in two flags")
    hosts.add_argument("--master-port", type=whole("master-port", 1), metavar="PORT", help=f"default {DEFAULT_PORT}")
    hosts.add_argument("--emulate", metavar="hosts=2,link=1gbit", help="several machines on this one (root)")
    seen = parser.add_argument_group("what you see")
    seen.add_argument("--run-folder", metavar="PATH", help="default runs/<date-time>-<script>")
    seen.add_argument("--plain", action="store_true", help="lines instead of the live table")
    seen.add_argument("--quiet", action="store_true", help="only the script's output, and what goes wrong")
    seen.add_argument("--json", action="store_true", help="a summary as the last line on stdout")


def add_strategy_arguments(parser: argparse.ArgumentParser) -> None:
    """The script, and how it is distributed."""
    parser.add_argument("script", metavar="SCRIPT", help="a Python file that uses pl.Trainer or pl.distribute")
    group = parser.add_argument_group("replicas")
    group.add_argument("--replicas", type=whole("replicas", 1), metavar="N", help="on all machines together, default 1")
    group.add_argument(
        "--nproc-per-node", type=whole("nproc-per-node", 1), metavar="N", help="the same, for one machine"
    )
    group.add_argument("--wire", metavar="FORMAT", help="gradients on a link: fp32 (default), bf16, fp16, int8")
    group.add_argument("--batchnorm", metavar="HOW", help="exact (whole batch, default) or local (as DDP)")
    group.add_argument("--exchange", metavar="HOW", help="auto (default), shared or collective")
    group.add_argument(
        "--timeout", dest="timeout_s", type=seconds("timeout"), metavar="SECONDS", help="longest wait, default 600"
    )


# ── what it means ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Plan:
    """Everything that was decided before the start."""

    script: str
    arguments: tuple[str, ...]
    strategy: Mirrored
    on_failure: str
    max_restarts: int
    save_on_stop: str | None
    hosts: int
    host: int
    rendezvous: str | None
    emulate: str | None
    given: frozenset[str]  # settings that were not left to their default

    @property
    def settings(self) -> dict[str, object]:
        own = {name: value for name, value in asdict(self).items() if name not in ("strategy", "given")}
        return {**own, **msgspec.structs.asdict(self.strategy)}

    def place(self, run_folder: Path) -> Place:
        """Replica 0's on this host."""
        return Place(
            replica=0,
            replicas=self.strategy.replicas // self.hosts,
            host=self.host,
            hosts=self.hosts,
            rendezvous=self.rendezvous,
            run_folder=str(run_folder.resolve()),
            save_on_stop=self.save_on_stop,
            strategy=self.strategy,
        )


def resolve(options: argparse.Namespace) -> Plan:
    """The plan behind the flags; a sentence for whatever is wrong with them."""
    given = {name: value for name, value in vars(options).items() if value is not None}
    hosts = Emulation.parse(given["emulate"]).hosts if "emulate" in given else given.get("hosts", 1)
    strategy = Mirrored(
        replicas=_count_replicas(given, hosts),
        **{name: given[name] for name in ("wire", "batchnorm", "exchange", "timeout_s") if name in given},
    )
    on_failure = one_of("on-failure", given.get("on_failure", "continue" if hosts == 1 else "stop"), POLICIES)
    if hosts > 1 and on_failure != "stop":
        raise StrategyError("on-failure", on_failure, "between several hosts no death is survived yet: give stop")
    return Plan(
        script=options.script,
        arguments=tuple(options.arguments or ()),
        strategy=strategy,
        on_failure=on_failure,
        max_restarts=given.get("max_restarts", 10),
        save_on_stop=given.get("save_on_stop"),
        hosts=hosts,
        host=_which_host(given, hosts),
        rendezvous=_rendezvous(given, hosts, strategy),
        emulate=given.get("emulate"),
        given=frozenset(_SETTINGS.get(name, name) for name in given),
    )


def _count_replicas(given: Mapping[str, Any], hosts: int) -> int:
    on_host = given.get("nproc_per_node", 1)
    replicas: int = given.get("replicas", on_host * hosts)
    if "nproc_per_node" in given and replicas != on_host * hosts:
        expected = f"on {hosts} host(s) that makes {on_host * hosts} but --replicas says {replicas}, give only one"
        raise StrategyError("nproc-per-node", on_host, expected)
    if replicas % hosts:
        raise StrategyError("replicas", replicas, f"give a multiple of {hosts}, as many to each of the {hosts} hosts")
    if replicas // hosts > MOST_REPLICAS:
        raise StrategyError("replicas", replicas, f"give at most {MOST_REPLICAS} a host")
    return replicas


def _which_host(given: Mapping[str, Any], hosts: int) -> int:
    if hosts > 1 and "host" not in given and "emulate" not in given:
        raise StrategyError("nnodes", hosts, f"give every host its number, --node-rank 0 to {hosts - 1}")
    host: int = given.get("host", 0)
    if host >= hosts:
        raise StrategyError("node-rank", host, f"give a number below --nnodes, which is {hosts}")
    return host


def _rendezvous(given: Mapping[str, Any], hosts: int, strategy: Mirrored) -> str | None:
    """Where the processes find each other; None if shared memory is all they need."""
    in_two = None
    if "master_addr" in given or ("master_port" in given and hosts == 1):
        in_two = f"{given.get('master_addr', '127.0.0.1')}:{given.get('master_port', DEFAULT_PORT)}"
    endpoint: str | None = given.get("rdzv_endpoint", in_two)
    if in_two is not None and endpoint != in_two:
        raise StrategyError("rdzv-endpoint", endpoint, f"--master-addr says {in_two}, give only one")
    if endpoint is None:
        if hosts > 1 and "emulate" not in given:
            raise StrategyError("nnodes", hosts, f"say where host 0 is, --rdzv-endpoint 10.0.0.1:{DEFAULT_PORT}")
        if hosts == 1 and strategy.exchange == "collective" and strategy.replicas > 1:
            with socket.create_server(("127.0.0.1", 0)) as server:
                return f"127.0.0.1:{server.getsockname()[1]}"
        return None
    address, colon, port = endpoint.rpartition(":")
    if not colon:
        return f"{endpoint}:{DEFAULT_PORT}"
    if not address or not port.isdigit() or not 0 < int(port) < 65536:
        raise StrategyError("rdzv-endpoint", endpoint, f"give address:port, such as 10.0.0.1:{DEFAULT_PORT}")
    return endpoint


# ── what has to be so before the start ───────────────────────────────────────────────────────────────────────


def check_script(script: str) -> None:
    path = Path(script)
    if path.is_dir():
        raise InvalidInput("script", script, "this is a folder, give the Python file")
    if not path.is_file():
        names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=1)
        hint = f", did you mean {path.parent / near[0]}?" if near else ", give the path of a Python file"
        raise InvalidInput("script", script, f"there is no such file{hint}")
    if not os.access(path, os.R_OK):
        raise InvalidInput("script", script, "it is not readable, give the path of a Python file")


def _check(plan: Plan, *, inside: bool) -> None:
    if plan.save_on_stop is not None and not Path(plan.save_on_stop).absolute().parent.is_dir():
        raise InvalidInput("save-on-stop", plan.save_on_stop, "its folder does not exist, make it first")
    if plan.rendezvous is not None and plan.host == 0:
        _check_port(plan.rendezvous)
    if plan.emulate is not None and not inside:
        if numbered := sorted(plan.given & {"hosts", "host", "rendezvous"}):
            raise StrategyError("emulate", plan.emulate, f"it sets {', '.join(numbered)} itself, leave its flag out")
        check_permission()


def _check_port(rendezvous: str) -> None:
    port = int(rendezvous.rpartition(":")[2])
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        why = "in use" if error.errno == errno.EADDRINUSE else "not allowed"
        expected = f"port {port} is {why} on this host, give another"
        raise StrategyError("rdzv-endpoint", rendezvous, expected) from error


# ── doing it ─────────────────────────────────────────────────────────────────────────────────────────────────


def execute(options: argparse.Namespace) -> int:
    inside = PARENT_VARIABLE in os.environ  # on an emulated host
    if inside:
        die_with_parent()
    check_script(options.script)
    plan = resolve(options)
    _check(plan, inside=inside)
    folder = choose_run_folder(options.run_folder, plan.script, host=plan.host)
    if plan.emulate is not None and not inside:
        return _run_on_emulated_hosts(plan, Emulation.parse(plan.emulate), folder, options)
    return _run_here(plan, folder, options)


def _run_here(plan: Plan, path: Path, options: argparse.Namespace) -> int:
    quiet = options.quiet or plan.host > 0  # of several hosts, the first one speaks
    display = choose_display(Path(plan.script).name, plain=options.plain, quiet=quiet)
    folder = RunFolder(path, lambda line: display.say(f"paceline: {line}"), host=plan.host)
    job = Job(
        script=plan.script,
        arguments=plan.arguments,
        place=plan.place(path),
        on_failure=plan.on_failure,
        max_restarts=plan.max_restarts,
        shown=plan.host == 0,
    )
    began = time.time()
    try:
        folder.write_config(_config(plan, job.place.replicas))
        if not quiet:
            display.say(f"paceline: {_in_words(plan)}")
        outcome = Supervisor(job, folder, display).run()
        if not quiet:
            display.say(f"paceline: {_summary(outcome, plan, began)}; run folder {path}")
    finally:
        display.close()
        folder.close()
    if options.json:
        put(sys.stdout, _as_json(path, asdict(outcome)))
    return outcome.exit_code


def _in_words(plan: Plan) -> str:
    said: dict[bool, list[str]] = {True: [], False: []}
    for name, value in plan.settings.items():
        if value not in (None, ()):
            said[name in plan.given].append(f"{name.removesuffix('_s').replace('_', '-')} {_shown(value)}")
    return f"given: {', '.join(said[True])}; by default: {', '.join(said[False])}"


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return shlex.join(value)
    return f"{value:g} s" if isinstance(value, float) else str(value)


def _config(plan: Plan, replicas: int) -> dict[str, object]:
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": ["paceline", *sys.argv[1:]],
        "folder": str(Path.cwd()),
        "settings": {
            name: {"value": value, "from": "flag" if name in plan.given else "default"}
            for name, value in plan.settings.items()
        },
        "versions": {
            "python": platform.python_version(),
            **{package: importlib.metadata.version(package) for package in ("torch", "paceline")},
        },
        "machine": {"name": platform.node(), "system": platform.platform(), "cores": allowed_cores()},
        "cores_by_replica": [share_of_cores(row, replicas, allowed_cores()) for row in range(replicas)],
    }


def _summary(outcome: Outcome, plan: Plan, began: float) -> str:
    if outcome.exit_code == INTERRUPTED:
        stopped = f"stopped at step {outcome.steps}"
        if plan.save_on_stop is None:
            return f"{stopped}, nothing was saved (--save-on-stop PATH does)"
        path = Path(plan.save_on_stop)
        saved = path.exists() and path.stat().st_mtime >= began
        return f"{stopped}, {'saved to' if saved else 'nothing was saved to'} {path}"
    if outcome.exit_code == 128 + signal.SIGQUIT:
        return f"told to end at once at step {outcome.steps}"
    if outcome.exit_code:
        return f"ended with exit code {outcome.exit_code} at step {outcome.steps}"
    if not outcome.steps:
        return f"ended after {outcome.seconds:.1f} s"
    words = [f"{outcome.steps} steps in {outcome.seconds:.1f} s", f"{outcome.samples_per_second:.0f} samples/s"]
    if outcome.loss is not None:
        words.append(f"loss {outcome.loss:.4g}")
    if outcome.deaths:
        words.append(f"deaths {outcome.deaths}, restarts {outcome.restarts}")
    return ", ".join(words)


def _as_json(run_folder: Path, outcome: Mapping[str, object]) -> bytes:
    return msgspec.json.encode({"run_folder": str(run_folder), **outcome}) + b"\n"


# ── emulated hosts ───────────────────────────────────────────────────────────────────────────────────────────


def _run_on_emulated_hosts(plan: Plan, emulation: Emulation, folder: Path, options: argparse.Namespace) -> int:
    """One more `paceline run` on each host."""
    with EmulatedHosts(emulation) as hosts:
        commands = [
            hosts.command(host, [sys.executable, "-c", _MAIN, *_arguments_on_host(plan, host, hosts, folder, options)])
            for host in range(emulation.hosts)
        ]
        exit_code = supervise_hosts(commands, {**os.environ, "GLOO_SOCKET_IFNAME": hosts.interface})
    if options.json:
        put(sys.stdout, _as_json(folder, {**_last_event(folder), "exit_code": exit_code}))
    return exit_code


def _arguments_on_host(
    plan: Plan, host: int, hosts: EmulatedHosts, folder: Path, options: argparse.Namespace
) -> list[str]:
    flags = {
        "replicas": plan.strategy.replicas,
        "wire": options.wire,
        "batchnorm": options.batchnorm,
        "exchange": options.exchange,
        "timeout": options.timeout_s,
        "save-on-stop": options.save_on_stop,
        "emulate": plan.emulate,
        "node-rank": host,
        "rdzv-endpoint": f"{hosts.addresses[0]}:{DEFAULT_PORT}",
        "run-folder": folder,
    }
    typed = [word for name, value in flags.items() if value is not None for word in (f"--{name}", str(value))]
    switches = [f"--{name}" for name in ("plain", "quiet") if host > 0 or getattr(options, name)]
    return ["run", plan.script, *typed, *switches, "--", *plan.arguments]


def _last_event(folder: Path) -> dict[str, object]:
    """How the run ended, as host 0 wrote it down."""
    with contextlib.suppress(OSError, IndexError, msgspec.DecodeError):
        event = msgspec.json.decode((folder / EVENTS).read_bytes().splitlines()[-1], type=dict[str, object])
        return {name: value for name, value in event.items() if name not in ("time", "event")}
    return {}
