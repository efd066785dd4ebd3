"""Runs that are forked from a template: as good as those of a new process, and gone with whoever wanted them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from paceline.launch.run_template import RunTemplate
from paceline.launch.started_run import StartedRun

SCRIPT = """
import json, os, sys, time
from pathlib import Path
print(json.dumps({"argv": sys.argv[1:], "cores": sorted(os.sched_getaffinity(0)), "given": os.environ.get("GIVEN")}))
Path(sys.argv[1]).write_text(str(os.getpid()))
if sys.argv[2] == "wait":
    time.sleep(300)
sys.exit(int(sys.argv[2]))
"""
LONG_S = 60.0


@pytest.fixture(scope="module")
def template() -> Iterator[RunTemplate]:
    made = RunTemplate()
    yield made
    made.close()


def start(folder: Path, template: RunTemplate | None, end: str, name: str = "a", **how: object) -> StartedRun:
    (folder / "script.py").write_text(SCRIPT)
    words = ["run", "--quiet", "--run-folder", str(folder / name), str(folder / "script.py")]
    words += ["--", str(folder / f"{name}.pid"), end]
    return StartedRun(words, folder / f"{name}.out", template=template, **how)  # type: ignore[arg-type]


def process_of(folder: Path, name: str = "a") -> psutil.Process:
    end = time.monotonic() + LONG_S
    while not ((path := folder / f"{name}.pid").exists() and path.read_text()):
        assert time.monotonic() < end, (folder / f"{name}.out").read_text()
        time.sleep(0.01)
    return psutil.Process(int(path.read_text()))


def test_a_run_has_its_arguments_cores_variables_output_and_code(template: RunTemplate, tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    run = start(tmp_path, template, "3", cores=[core], environment={"GIVEN": "this"})
    assert run.wait(LONG_S) == 3
    said = (tmp_path / "a.out").read_text().splitlines()
    assert json.loads(said[0]) == {"argv": [str(tmp_path / "a.pid"), "3"], "cores": [core], "given": "this"}
    config = json.loads((tmp_path / "a/config.json").read_text())
    assert config["command"][:3] == ["paceline", "run", "--quiet"]
    assert config["machine"]["cores"] == [core]
    assert start(tmp_path, template, "0", "b").wait(LONG_S) == 0
    assert json.loads((tmp_path / "b.out").read_text())["given"] is None, "nothing of the run before is left"


def test_a_killed_run_is_told_with_its_signal_and_the_next_one_works(template: RunTemplate, tmp_path: Path) -> None:
    run = start(tmp_path, template, "wait")
    replica = process_of(tmp_path)
    supervisor = replica.parent()
    assert supervisor is not None
    assert os.getpgid(supervisor.pid) == supervisor.pid, "a group of its own"
    supervisor.kill()
    assert run.wait(LONG_S) == -signal.SIGKILL
    psutil.wait_procs([replica], LONG_S)
    assert not replica.is_running()
    stopped = start(tmp_path, template, "wait", "b")
    process_of(tmp_path, "b")
    stopped.end()
    assert stopped.wait(LONG_S) == 128 + signal.SIGQUIT


def test_runs_die_with_a_killed_template_and_another_takes_its_place(tmp_path: Path) -> None:
    template = RunTemplate()
    run = start(tmp_path, template, "wait")
    replica = process_of(tmp_path)
    family = [replica, *replica.parents()[:2]]
    assert "run_template_process" in " ".join(family[2].cmdline())
    family[2].kill()
    assert run.wait(LONG_S) == -signal.SIGKILL
    _, alive = psutil.wait_procs(family, LONG_S)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]
    assert start(tmp_path, template, "0", "b").wait(LONG_S) == 0
    template.close()


OWNER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_run_template import start, RunTemplate
template = RunTemplate()
run = start(Path(sys.argv[2]), template, "wait")
time.sleep(300)
"""


def test_runs_and_template_die_with_their_owner(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(Path(__file__).parent), str(tmp_path)])
    try:
        replica = process_of(tmp_path)
        family = [replica, *replica.parents()[:2]]
    finally:
        owner.kill()
        owner.wait()
    _, alive = psutil.wait_procs(family, LONG_S)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]
