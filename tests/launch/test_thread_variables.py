"""How many threads a new process's torch has, and how they wait for work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.launch.cores import thread_variables

SCRIPT = """
import json, os, torch, paceline as pl
model = torch.nn.Linear(1, 1)
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x).mean())
for batch in trainer.batches(torch.ones(2, 1), 1):
    trainer.step(batch)
spins = os.environ.get("GOMP_SPINCOUNT")
print(json.dumps([spins, torch.get_num_threads()]))
"""


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_what_the_user_says_of_waiting_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "passive")
    assert thread_variables(3) == {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3"}


@pytest.mark.parametrize("given", [None, "77"])
def test_idle_threads_of_replicas_leave_cores_to_servers_soon(given: str | None, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_"))}
    environment |= {"GOMP_SPINCOUNT": given} if given else {}
    command = [sys.executable, "-m", "paceline", "run", "train.py", "--servers", "1", "--replicas", "1", "--quiet"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    spins, threads = json.loads(done.stdout.strip().splitlines()[0])
    assert threads == len(os.sched_getaffinity(0))
    assert spins == given if given else 0 < int(spins) < 300_000
