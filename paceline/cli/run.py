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
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import msgspec

from paceline.cli.checks import check, check_script
from paceline.cli.run_flags import add_arguments
from paceline.cli.run_keys import with_keys
from paceline.cli.run_plan import RunPlan, resolve
from paceline.cli.run_rendezvous import DEFAULT_PORT, by_collectives
from paceline.cli.run_words import in_words, of_target, of_unsaved, summary
from paceline.cli.unused import unused
from paceline.launch.cores import allowed_cores, share_of_cores
from paceline.launch.emulate import EmulatedHosts, Emulation, is_emulated_host
from paceline.launch.hosts import supervise_hosts
from paceline.launch.signals import signals_as_bytes
from paceline.launch.supervisor import Supervisor
from paceline.launch.with_parent import PARENT_VARIABLE, die_with_parent
from paceline.machine import installed_version, shared_words_work
from paceline.net.secure import write_token
from paceline.plan.after_run import SideBySide, compare_with_prediction
from paceline.watch.display import choose_display
from paceline.watch.output import put
from paceline.watch.run_folder import EVENTS, RunFolder, choose_run_folder
from paceline.watch.target import NOT_REACHED

__all__ = ["add_arguments", "execute"]


def execute(options: argparse.Namespace) -> int:
    started = PARENT_VARIABLE in os.environ  # by another command of ours
    if started:
        die_with_parent()
    inside = None not in (options.emulate, options.rdzv_endpoint, options.host) and (started or is_emulated_host())
    check_script(options.script, module=options.module)
    if options.auto:
        from paceline.cli.auto import by_plan  # which loads what plans need

        options = by_plan(options)
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
            display.say(f"paceline: {summary(outcome, plan, began)}; run folder {path}")
            if (unsaved := of_unsaved(outcome, plan, path)) is not None:
                display.say(f"paceline: {unsaved}")
            if compared is not None:
                display.say(f"paceline: {compared.words}")
        elif outcome.exit_code == NOT_REACHED and outcome.target is not None:
            display.say(f"paceline: {of_target(outcome, outcome.target)}; run folder {path}")
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
