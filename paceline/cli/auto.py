"""`paceline run --auto`: plan the script first, and run it as the plan says."""

from __future__ import annotations

import argparse

from paceline.cli import Parser, complain, was_given
from paceline.cli.cut import CUT_FLAGS
from paceline.cli.plan import find_calibration, find_profile
from paceline.cli.run_flags import add_arguments
from paceline.cli.run_plan import BETWEEN_HOSTS
from paceline.errors import StrategyError
from paceline.plan.after_run import cluster_here
from paceline.plan.report import make_report

# What a plan decides, by the names of flags; nobody else may.
_DECIDED = (
    *("replicas", "nproc_per_node", "wire", "batchnorm", "exchange", "servers", "only", "accept", "async", "bounded"),
    *("stale", "stale_lr", "warmup_steps", "warmup_epochs", "durability", "in_graph", "join", "devices"),
    *BETWEEN_HOSTS,
    *CUT_FLAGS,
)
_OF_HOSTS = ("hosts", "host", "rdzv_endpoint", "master_addr", "master_port", "emulate", "on")


def by_plan(options: argparse.Namespace) -> argparse.Namespace:
    """Returns the options with the flags of the best plan; says which that is, and why."""
    for name in (*_DECIDED, *_OF_HOSTS):
        value = getattr(options, name, None)
        if was_given(value):
            flag = name.replace("_", "-")
            why = "plans are for this machine, see `paceline plan --hosts`" if name in _OF_HOSTS else "it decides that"
            raise StrategyError("auto", "set", f"{why}, leave out --{flag}, or --auto")
    calibration = find_calibration(None)
    cluster = cluster_here(calibration, None)
    assert cluster is not None  # on one host there is one
    given = options.arguments or []
    profile = find_profile(options.script, given, cluster, module=options.module, mailbox_s=calibration.mailbox_s)
    report = make_report(profile, calibration, cluster)
    best = report.best
    if not options.quiet:
        step = f"{1000 * best.step.seconds:.3g} ms a step"
        complain(f"auto: {best.name}, predicted {step}, {best.speedup:.2f}× one device")
        complain(f"auto: {report.why[-2] if len(report.why) > 1 else report.why[0]}")
    parser = Parser("paceline run")
    add_arguments(parser)
    planned = parser.parse([options.script, *best.flags()])
    typed = {name: value for name, value in vars(options).items() if was_given(value)}
    return argparse.Namespace(**{**vars(planned), **typed, "arguments": options.arguments, "auto": None})
