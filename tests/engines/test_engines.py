"""`paceline run --on ray` and `--on slurm`, on real clusters of three nodes: the same results, and the same ends."""

from __future__ import annotations

import importlib.util
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from clusters import RayCluster, SlurmCluster, agents, found, until
from conftest import MAIN, Run, Start

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).with_name("engine_training.py")
CLUSTERS = {"ray": RayCluster, "slurm": SlurmCluster}
Begin = Callable[..., Run]


def missing(name: str) -> str | None:
    if name == "ray":
        return None if importlib.util.find_spec("ray") else "Ray is not installed (make engines)"
    tools = [tool for tool in ("srun", "slurmctld", "slurmd", "munged") if shutil.which(found(tool)) is None]
    if tools:
        return f"{', '.join(tools)} not installed (apt-get install slurmctld slurmd slurm-client munge)"
    return None if os.geteuid() == 0 else "daemons of several nodes on one machine need root"


@pytest.fixture(scope="module", params=sorted(CLUSTERS))
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    if (why := missing(request.param)) is not None:
        pytest.skip(why)
    cluster = CLUSTERS[request.param](tmp_path_factory.mktemp(request.param))
    yield cluster
    cluster.close()


@pytest.fixture
def begin(cluster: RayCluster | SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Start the script on three hosts of the cluster, in a folder that all of them see."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    started: list[Run] = []

    def begin(flags: str, arguments: str = "") -> Run:
        words = f"{cluster.flags} --nnodes 3 --run-folder {tmp_path / 'run'} {flags}".split()
        run = Run(tmp_path, sys.executable, "-c", MAIN, "run", str(SCRIPT), *words, "--", *arguments.split())
        started.append(run)
        return run

    yield begin
    for run in started:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGQUIT)
        run.process.communicate(timeout=60)
        until(lambda: not left_of(tmp_path))
    cluster.await_nodes()


def left_of(folder: Path) -> list[int]:
    """Processes of ours that are still there: those that name the folder, and all agents of the run."""
    left = [agent.pid for agent in agents(folder)]
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if process.status() != psutil.STATUS_ZOMBIE and str(folder / "run") in " ".join(words):
                left.append(process.pid)
        except psutil.Error:
            continue
    return left


@pytest.fixture(scope="module")
def alone(start: Start) -> Run:
    return start(SCRIPT, None).fine()


@pytest.mark.parametrize("flags", ["--replicas 3", "--replicas 6 --servers 2", "--replicas 3 --stages 2"])
def test_three_hosts_train_as_one_process_does(begin: Begin, alone: Run, flags: str) -> None:
    run = begin(flags).fine(400)
    for key in ("losses", "parameters"):
        assert run.told(key) == pytest.approx(alone.told(key), rel=1e-12)
    assert '"losses"' in run.out  # which is in the terminal too
    assert "steps in" in run.err


def test_a_mistake_of_the_script_on_another_host_is_shown_once_and_ends_all(begin: Begin) -> None:
    run = begin("--replicas 3 --quiet", "--epochs 1000 --mistake 2").end(400)
    assert run.code == 1
    assert run.err.count("RuntimeError: a mistake of the script") == 1
    assert run.err.count("Traceback") == 1


def test_ctrl_c_ends_all_hosts_after_the_step_and_saves(begin: Begin, tmp_path: Path) -> None:
    run = begin(f"--replicas 3 --save-on-stop {tmp_path}/last.safetensors", f"--epochs 1000 --slowly {tmp_path}/third")
    until((tmp_path / "third").exists, 300)
    run.process.send_signal(signal.SIGINT)
    run.end(120)
    assert run.code == 130
    assert "saved to" in run.err
    assert (tmp_path / "last.safetensors").exists()


def test_a_driver_that_is_killed_leaves_nothing_behind(begin: Begin, tmp_path: Path) -> None:
    run = begin("--replicas 3", f"--epochs 1000 --slowly {tmp_path}/third")
    until((tmp_path / "third").exists, 300)
    run.process.kill()
    until(lambda: not left_of(tmp_path))


def test_a_node_that_dies_ends_mirrored_replicas_with_a_sentence(
    begin: Begin, cluster: RayCluster | SlurmCluster, tmp_path: Path
) -> None:
    run = begin("--replicas 3 --on-failure stop", f"--epochs 1000 --slowly {tmp_path}/third")
    until((tmp_path / "third").exists, 300)
    host = cluster.kill_node_of(tmp_path / "run")
    run.end(150)
    assert run.code not in (0, 130)
    assert "Traceback" not in run.err
    assert f"host {host} (" in run.err or "lost its link to another host" in run.err


def test_a_node_with_replicas_alone_dies_and_the_others_go_on_with_servers(
    begin: Begin, cluster: RayCluster | SlurmCluster, tmp_path: Path
) -> None:
    run = begin("--replicas 3 --servers 1", f"--epochs 40 --slowly {tmp_path}/third")
    until((tmp_path / "third").exists, 300)
    host = cluster.kill_node_of(tmp_path / "run")
    run.end(400)
    assert run.code == 0, run.err
    assert f"host {host} is gone" in run.err
    assert run.told("steps") == 40 * 5


def test_a_killed_replica_of_another_host_is_started_again(begin: Begin) -> None:
    run = begin("--replicas 3 --servers 1 --on-failure restart", "--epochs 20 --killed 2").fine(400)
    assert "replica 2 was killed by SIGKILL" in run.err
    assert "it is started again" in run.err
    assert run.told("steps") == 20 * 5


def test_more_hosts_than_there_are_nodes_is_one_sentence_or_a_place_in_the_queue(
    cluster: RayCluster | SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    words = f"{cluster.flags} --nnodes 9 --replicas 9".split()
    run = Run(tmp_path, sys.executable, "-c", MAIN, "run", str(SCRIPT), *words)
    if isinstance(cluster, SlurmCluster):
        until(lambda: "PENDING" in cluster.asked("squeue", "-h", "-o", "%T"))
        run.process.send_signal(signal.SIGINT)
    run.end(60)
    if isinstance(cluster, RayCluster):
        assert run.err.strip().removeprefix("paceline: ") == (
            "nnodes is 9: the Ray cluster has 3 nodes with 1 CPU (of 3), give at most that"
        )
        assert run.code == 2
    else:
        assert run.code == 130
        until(lambda: not cluster.asked("squeue", "-h"))
    assert "Traceback" not in run.err
    assert not list((tmp_path / "runs").iterdir())


def test_the_live_table_is_drawn_on_the_terminal_of_the_driver(
    cluster: RayCluster | SlurmCluster, tmp_path: Path
) -> None:
    ours, theirs = pty.openpty()
    words = f"{cluster.flags} --nnodes 2 --replicas 2".split()
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, "run", str(SCRIPT), *words, "--", "--epochs", "40", "--slowly", "third"],
        cwd=tmp_path,
        env={**os.environ, **cluster.environment, "TERM": "xterm-256color"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    seen, end = b"", time.monotonic() + 400
    try:
        while data := os.read(ours, 1 << 16):
            seen += data
            assert time.monotonic() < end
    except OSError:  # so a terminal ends
        pass
    assert process.wait(30) == 0
    assert b"\x1b[" in seen
    assert b"compute" in seen  # a column of the table
    assert b'"parameters"' in seen
