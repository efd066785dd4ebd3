"""Hosts of mirrored replicas meet before anything is started: what is wrong on one is said on every one, in one
sentence, also on those that come later, and nothing keeps running.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import MAIN, Start

from paceline.launch.emulate import EmulatedHosts, Emulation

NEVER = "raise AssertionError('it was started')"
END_S = 60.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


DIFFERENT = {
    "wire": ("--wire bf16", "wire is 'bf16': that is host 1's, and host 0 has 'fp32', give every host the same"),
    "failures": (
        "--on-failure stop",
        "on-failure is 'stop': that is host 1's, and host 0 has 'continue', give every host the same",
    ),
    "saves": (
        "--save-on-stop last.safetensors",
        "save-on-stop is 'given': that is host 1's, and host 0 has 'not given', give every host the same",
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_hosts_that_disagree_are_told_so_and_one_that_comes_later_too(case: str, start: Start, tmp_path: Path) -> None:
    given, sentence = DIFFERENT[case]
    flags = f"--nnodes 3 --replicas 3 --rdzv-endpoint 127.0.0.1:{free_port()}"
    runs = []
    for host, own in ((0, ""), (1, given), (2, "")):
        (folder := tmp_path / str(host)).mkdir()
        runs.append(start(NEVER, f"{flags} --node-rank {host} {own}", folder=folder))
        if host == 1:
            runs[-1].end(END_S)
    for run in runs:
        run.end(END_S) if run.process.returncode is None else None
        assert (run.code, run.err) == (2, f"paceline: {sentence}\n")


OTHER = """
import sys
import paceline.launch.host_greeting as greeting

greeting.__version__ = "0.0.1"
from paceline.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_host_of_another_version_is_told_so_and_so_is_the_first(start: Start, tmp_path: Path) -> None:
    flags = f"--nnodes 2 --replicas 2 --rdzv-endpoint 127.0.0.1:{free_port()}"
    first = start(NEVER, f"{flags} --node-rank 0", folder=tmp_path)
    given = [*flags.split(), "--node-rank", "1", "--run-folder", "other"]
    command = [sys.executable, "-c", OTHER, "run", "train.py", *given]
    other = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=END_S, check=False)
    first.end(END_S)
    assert (first.code, other.returncode) == (2, 2)
    assert first.err.startswith("paceline: host 0 runs Paceline ")
    assert first.err.endswith(" and another host 0.0.1: use the same\n")
    assert first.err.removeprefix("paceline: ").strip() in other.stderr


TRAINS = """
import json
import torch
import paceline as pl

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch[0]).mean())
for batch in trainer.batches((torch.ones(8, 4),), 4):
    trainer.step(batch)
print(json.dumps({"steps": trainer.steps}))
"""


@pytest.mark.soak
@pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root")
def test_replicas_of_several_hosts_use_the_network_of_the_rendezvous(tmp_path: Path) -> None:
    """The names of these hosts lead to loopback, where none finds another; nobody says which interface is right."""
    (tmp_path / "train.py").write_text(TRAINS)
    environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    with EmulatedHosts(Emulation(2, "1gbit")) as hosts:
        started = []
        for host in range(2):
            given = (
                f"--nnodes 2 --replicas 2 --node-rank {host} --rdzv-endpoint {hosts.addresses[0]}:29500 --timeout 60"
            )
            command = [sys.executable, "-c", MAIN, "run", "train.py", *given.split(), "--run-folder", f"run-{host}"]
            started.append(subprocess.Popen(hosts.command(host, command), cwd=tmp_path, env=environment))
        assert [process.wait(100) for process in started] == [0, 0]
    logs = [path.read_text() for path in tmp_path.rglob("replica-?.log")]
    assert [json.loads(line)["steps"] for log in logs for line in log.splitlines() if line[0] == "{"] == [2, 2]
