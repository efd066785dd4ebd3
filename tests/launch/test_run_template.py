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
from paceline.launch.starter import modules_of
from paceline.strategy import Mirrored

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


LOOK = """
import json, os, sys
before = "torch" in sys.modules
import torch
import paceline as pl
print(json.dumps({"before": before, "seed": torch.initial_seed(), "threads": torch.get_num_threads(),
                  "found": torch.__spec__.origin == torch.__file__, "leads": os.getsid(0) == os.getpid(),
                  "loaded": b"paceline.trainer" in open("/proc/self/cmdline", "rb").read(),
                  "command": sys.argv, "folder": os.getcwd(), "starter": os.environ.get("PACELINE_STARTER")}))
"""


def test_runs_of_a_template_that_has_torch_find_what_they_would_find_in_a_new_python(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LOOK)
    (tmp_path / "sets.py").write_text("import os\nos.environ['OMP_PLACES'] = 'cores'\n" + LOOK)
    template = RunTemplate(modules_of(Mirrored()))
    found = []
    for name, script in (("a", "script.py"), ("b", "script.py"), ("c", "sets.py")):
        words = ["run", "--quiet", "--run-folder", str(tmp_path / name), str(tmp_path / script), "--", "--x", "1"]
        assert StartedRun(words, tmp_path / f"{name}.out", template=template).wait(LONG_S) == 0
        found.append(json.loads((tmp_path / f"{name}.out").read_text()))
    template.close()
    for one in found:
        assert not one["before"], "torch is loaded when the script asks for it, as far as that can tell"
        assert one["found"]
        assert one["leads"]
        assert one["threads"] == len(os.sched_getaffinity(0))
        assert one["command"][1:] == ["--x", "1"]
        assert one["folder"] == os.getcwd()
        assert one["starter"] is None
    assert found[0]["seed"] != found[1]["seed"], "as two processes that nobody has seeded"


def test_torch_is_not_handed_on_where_it_would_have_been_loaded_otherwise(tmp_path: Path) -> None:
    """A variable that torch reads when it is loaded is this run's own: its replicas are new Pythons."""
    (tmp_path / "script.py").write_text("import os, time\nbegan = time.process_time()\nimport torch\n" + LOADING)
    template = RunTemplate(modules_of(Mirrored()))
    seconds = {}
    for name, environment in (("same", {}), ("other", {"OMP_WAIT_POLICY": "passive"})):
        words = ["run", "--quiet", "--run-folder", str(tmp_path / name), str(tmp_path / "script.py")]
        run = StartedRun(words, tmp_path / f"{name}.out", template=template, environment=environment)
        assert run.wait(LONG_S) == 0
        seconds[name] = float((tmp_path / f"{name}.out").read_text())
    template.close()
    assert seconds["same"] < seconds["other"] / 4


LOADING = "print(time.process_time() - began)\n"
