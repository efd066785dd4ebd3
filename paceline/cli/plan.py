"""`paceline plan`: which strategy for a script, on how many devices, where that saturates, and why."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from paceline.cli import complain, number, seconds, whole
from paceline.cli.checks import check_script
from paceline.errors import InvalidInput
from paceline.launch.cores import allowed_cores
from paceline.launch.emulate import Emulation
from paceline.plan.calibration import Calibration, default_path, fingerprint, read
from paceline.plan.cluster import LINKS, Cluster, described
from paceline.plan.devices import DEVICES
from paceline.plan.kept_profiles import kept_profile, profile_script
from paceline.plan.plot import check_plot, draw
from paceline.plan.report import few, make_report
from paceline.plan.shown import as_json, in_words
from paceline.plan.trace import with_trace
from paceline.profile.values import Profile

BUDGET_S = 10.0  # to measure a step
EXAMPLES = f"""\
examples:
  paceline calibrate                                   once for this machine
  paceline plan train.py
  paceline plan train.py --check                       run the best few for some steps, and rank them by that
  paceline plan train.py --hosts 8 --link 10gbit       as many machines like this one
  paceline plan train.py --hosts 4 --device a100 --devices 8 --link 100gbit    an estimate
  paceline plan train.py --plot speedup.png --json
  paceline run train.py --auto                         does what the plan says

links: {", ".join(LINKS)}, or any rate in mbit or gbit
devices: {", ".join(DEVICES)}

The script runs until its first step, in one process; that step is measured and not made: nothing is trained.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "paceline plan SCRIPT [flags] [-- the script's own arguments]"
    parser.description = "Say how to run a script: the strategy, how many devices, where it saturates, and why."
    parser.epilog = EXAMPLES
    parser.add_argument("script", metavar="SCRIPT", help="a Python file that uses pl.Trainer")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as with python -m")
    where = parser.add_argument_group("the machines, if not this one")
    where.add_argument("--hosts", type=whole("hosts", 1), metavar="N", help="how many, default 1")
    where.add_argument("--link", metavar="RATE", help="of each machine, such as 1gbit")
    where.add_argument("--cores", type=whole("cores", 1), metavar="N", help="of each machine, default those here")
    where.add_argument("--memory", type=whole("memory", 1), metavar="GIB", help="of each machine, default that here")
    where.add_argument("--emulate", metavar="hosts=2,link=1gbit", help="hosts emulated on this machine")
    where.add_argument("--device", metavar="NAME", help=f"described, an estimate: {', '.join(DEVICES)}")
    where.add_argument("--devices", type=whole("devices", 1), metavar="N", help="described devices of each machine")
    where.add_argument("--calibration", metavar="FILE", help="default what paceline calibrate wrote")
    what = parser.add_argument_group("what is planned")
    what.add_argument("--trace", metavar="FILE", help="of torch.profiler, from the device that is planned for")
    what.add_argument("--budget", type=seconds("budget"), metavar="SECONDS", help="to measure a step, default 10")
    what.add_argument("--again", action="store_true", help="profile the script anew, even if it has not changed")
    what.add_argument("--price", type=number("price"), metavar="X", help="of a device's hour, to show what a run costs")
    what.add_argument(
        "--check", nargs="?", const=3, type=whole("check", 1), metavar="N", help="run the best N, default 3"
    )
    seen = parser.add_argument_group("what you see")
    seen.add_argument("--top", type=whole("top", 1), default=5, metavar="N", help="plans to show, default 5")
    seen.add_argument("--layers", action="store_true", help="what each layer costs")
    seen.add_argument("--plot", metavar="FILE", help="speed-up against devices, .png or .svg")
    seen.add_argument("--json", action="store_true", help="everything as JSON")


def execute(options: argparse.Namespace) -> int:
    check_script(options.script, module=options.module)
    picture = check_plot(options.plot) if options.plot else None
    calibration = find_calibration(options.calibration)
    cluster = _cluster(options, calibration)
    if options.check and cluster.hosts > 1 and not cluster.emulated:
        raise InvalidInput(
            "check", options.check, "plans for machines that are not here cannot be run here, leave it out"
        )
    if options.check and cluster.device is not None:
        raise InvalidInput("check", options.check, f"{cluster.device} is not here, leave it out")
    given = options.arguments or []
    profile = find_profile(
        options.script,
        given,
        cluster,
        module=options.module,
        again=options.again or options.budget is not None,
        budget_s=options.budget or BUDGET_S,
        mailbox_s=calibration.mailbox_s,
    )
    if options.trace:
        profile = with_trace(profile, Path(options.trace))
    report = make_report(profile, calibration, cluster)
    checked = None
    if options.check:
        from paceline.plan.checking import check_plans

        can_run = [plan for plan in report.ordered if plan.hosts == 1 or not plan.strategy.on_servers]
        plans = few(can_run, report.best, options.check)
        checked = check_plans(plans, options.script, given, cluster, module=options.module)
    if picture is not None:
        draw(report.curves, picture, f"{options.script}, {cluster.words}", estimate=report.best.estimate)
    if options.json:
        print(as_json(report, given, module=options.module, price=options.price, checked=checked))
    else:
        print(
            in_words(
                report,
                given,
                module=options.module,
                top=options.top,
                price=options.price,
                layers=options.layers,
                checked=checked,
            )
        )
        if picture is not None:
            print(f"paceline: drawn into {picture}")
    return 0


def find_calibration(path: str | None) -> Calibration:
    """Returns the calibration to plan with; a warning if it is another machine's, or was made on a busy one."""
    if path is None and not default_path().exists():
        raise InvalidInput(
            "calibration",
            str(default_path()),
            "this machine was not measured yet: run `paceline calibrate` once, two minutes",
        )
    found = read(Path(path) if path else default_path())
    if not found.made_up and found.machine != fingerprint():
        complain(
            f"the calibration is of another machine ({found.machine}; this is {fingerprint()}): figures will be off, "
            "measure this one with `paceline calibrate`"
        )
    if found.disturbed:
        complain(found.disturbed)
    return found


def find_profile(
    script: str,
    arguments: list[str],
    cluster: Cluster,
    *,
    module: bool,
    again: bool = False,
    mailbox_s: float,
    budget_s: float = BUDGET_S,
) -> Profile:
    """Returns the profile of a script: the one that is kept, or a new one."""
    found = None if again else kept_profile(script, arguments, module=module)
    cores = len(allowed_cores())
    devices = [count for count in (2, 4, 8) if count <= max(2, min(cluster.cores, 8))]
    if found is None:
        if sys.stderr.isatty():
            complain(f"measuring a step of {script}, up to {budget_s:g} s; nothing is trained")
        found = profile_script(script, arguments, cores, devices, module=module, budget_s=budget_s, mailbox_s=mailbox_s)
    return found


def _cluster(options: argparse.Namespace, calibration: Calibration) -> Cluster:
    here = len(allowed_cores()) if not calibration.made_up else calibration.cores
    if options.emulate is not None:
        for name in ("hosts", "link", "cores", "device"):
            if getattr(options, name) is not None:
                raise InvalidInput(name, getattr(options, name), "--emulate says that, leave it out")
        emulation = Emulation.parse(options.emulate)
        return Cluster(
            hosts=emulation.hosts,
            link=emulation.link,
            cores=max(1, here // emulation.hosts),
            memory_bytes=calibration.memory_bytes // emulation.hosts,
            emulated=True,
            hosts_a_core=max(1.0, emulation.hosts / here),
        )
    if options.devices is not None and options.device is None:
        raise InvalidInput("devices", options.devices, "say which, --device with one of " + ", ".join(DEVICES))
    if options.link is not None and (options.hosts or 1) == 1:
        raise InvalidInput("link", options.link, "one host has nobody to send to, give --hosts 2 or more")
    cores = options.cores or here
    memory = options.memory * 2**30 if options.memory else calibration.memory_bytes
    if options.device is not None:
        memory = described(options.device).memory_bytes * (options.devices or 1)
    return Cluster(
        hosts=options.hosts or 1,
        link=options.link,
        cores=cores,
        memory_bytes=memory,
        device=options.device,
        devices_a_host=(options.devices or 1) if options.device is not None else None,
    )
