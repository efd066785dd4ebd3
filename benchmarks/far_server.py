"""Replicas on emulated hosts that train on a server on a host of its own: with keys, over its link."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from paceline.launch.emulate import EmulatedHosts, Emulation
from paceline.plan.checking import CheckedPlan, step_times, undisturbed
from paceline.plan.prediction import Prediction

PORT, RENDEZVOUS = 7070, 29500
LONGEST_S = 100.0
STEPS = 6
_PACELINE = [sys.executable, "-m", "paceline"]


def on_far_server(plan: Prediction, script: str, arguments: Sequence[str], link: str) -> CheckedPlan:
    """Runs a script on as many emulated hosts as the plan has replicas, and one more for the server."""
    hosts = plan.hosts
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-bench-")))
        net = stack.enter_context(EmulatedHosts(Emulation(hosts + 1, link)))
        keys, address = str(scratch / "keys"), f"{net.addresses[0]}:{PORT}"
        subprocess.run([*_PACELINE, "keys", "make", keys, "--name", "bench"], check=True, capture_output=True)
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": net.interface}
        said = stack.enter_context((scratch / "said").open("wb"))

        def start(host: int, words: Sequence[str]) -> None:
            process = subprocess.Popen(
                net.command(host, [*_PACELINE, *words]), env=environment, stdout=said, stderr=said, cwd=scratch
            )
            stack.callback(_end, process)

        start(0, ["server", "--dir", str(scratch / "server"), "--listen", address, "--keys", keys])
        time.sleep(2.0)
        for host in range(hosts):
            flags = ["--replicas", str(hosts), "--join", address, "--keys", keys, "--container", "bench", "--quiet"]
            flags += ["--run-folder", str(scratch / "run")]
            if hosts > 1:
                endpoint = f"{net.addresses[1]}:{RENDEZVOUS}"
                flags += ["--nnodes", str(hosts), "--node-rank", str(host), "--rdzv-endpoint", endpoint]
            start(host + 1, ["run", script, *flags, "--", *arguments])
        give_up = time.monotonic() + LONGEST_S
        while len(lasted := sorted(step_times(scratch / "run"))) < STEPS and time.monotonic() < give_up:
            time.sleep(0.1)
        if len(lasted) < 3:
            lines = (scratch / "said").read_text(errors="replace").strip().splitlines()
            return CheckedPlan(plan=plan, seconds=None, why_not=lines[-1] if lines else "no steps were made")
    return CheckedPlan(plan=plan, seconds=undisturbed(lasted), low=lasted[0], high=lasted[-1])


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
