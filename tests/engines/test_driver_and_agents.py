"""The driver and its agents, as processes of this machine: what is printed, who ends when, and that nothing stays."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from conftest import MAIN, Run

from paceline.cli import main
from paceline.engines.driver import Driver
from paceline.engines.line_reader import LineReader
from paceline.engines.messages import FROM_AGENT, AgentReady, FromAgent, FromDriver, HostGone, line_of
from paceline.engines.setting import EngineSetting
from paceline.errors import LaunchError
from paceline.net.secure import new_token

SCRIPT = """
import os, sys, time
from paceline.run_place import find_place
place = find_place()
print(f"out of {place.rank}, {sys.argv[1:]}", flush=True)
print(f"err of {place.rank}", file=sys.stderr, flush=True)
if "fail" in sys.argv and place.rank == 1:
    while not os.path.exists("waits-0"):
        time.sleep(0.01)
    raise ValueError("a mistake")
if "wait" in sys.argv:
    open(f"waits-{place.rank}", "w").close()
    time.sleep(100)
"""


class LocalHosts:
    """An engine whose nodes are this machine."""

    def __init__(self, hosts: int) -> None:
        self.agents = [
            subprocess.Popen(
                [sys.executable, "-m", "paceline.engines.agent", str(host)],
                env={**os.environ, "PACELINE_NODE_ADDRESS": "127.0.0.1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
            )
            for host in range(hosts)
        ]
        self._inbox: queue.SimpleQueue[FromAgent | HostGone] = queue.SimpleQueue()
        self._readable, self._wake = os.pipe()
        os.set_blocking(self._readable, False)
        self._threads = [threading.Thread(target=self._follow, args=(host,)) for host in range(hosts)]
        for thread in self._threads:
            thread.start()

    def _follow(self, host: int) -> None:
        lines, stdout = LineReader(), self.agents[host].stdout
        assert stdout is not None
        while data := os.read(stdout.fileno(), 4096):
            for line in lines.read(data):
                self._inbox.put(FROM_AGENT.decode(line))
                os.write(self._wake, b"\0")
        self._inbox.put(HostGone(host=host, why="its agent has ended"))
        os.write(self._wake, b"\0")

    def fileno(self) -> int:
        return self._readable

    def read(self) -> list[FromAgent | HostGone]:
        taken = []
        while not self._inbox.empty():
            taken.append(self._inbox.get())
        return taken

    def send(self, message: FromDriver) -> None:
        stdin = self.agents[message.host].stdin
        assert stdin is not None
        stdin.write(line_of(message))

    def close(self) -> None:
        for agent in self.agents:
            assert agent.stdin is not None
            agent.stdin.close()
        for agent, thread in zip(self.agents, self._threads, strict=True):
            agent.wait(60)
            thread.join()
            assert agent.stdout is not None
            agent.stdout.close()
        os.close(self._readable)
        os.close(self._wake)


Drive = Callable[..., int]


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Drive]:
    hosts = LocalHosts(2)
    (tmp_path / "script.py").write_text(SCRIPT)
    setting = EngineSetting(engine="ray", address=None, hosts=2, cores=1, timeout_s=60)

    def commands(host: int, rendezvous: str) -> list[str]:
        words = f"run script.py --nnodes 2 --replicas 2 --node-rank {host} --rdzv-endpoint {rendezvous}"
        return [*words.split(), "--on-failure", "stop", "--run-folder", "run", "--quiet", "--"]

    def drive(*arguments: str, meanwhile: Callable[[LocalHosts], None] = lambda hosts: None) -> int:
        driver = Driver(hosts, setting, lambda host, at: [*commands(host, at), *arguments], meet=True)
        thread = threading.Thread(target=meanwhile, args=(hosts,))
        thread.start()
        try:
            return driver.run(folder=str(tmp_path), token=new_token())
        finally:
            thread.join()

    yield drive
    hosts.close()


def await_both(folder: Path) -> None:
    end = time.monotonic() + 60
    while not all((folder / f"waits-{host}").exists() for host in range(2)):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_what_host_0_prints_is_here_and_a_failure_of_another_ends_all(
    drive: Drive, capfd: pytest.CaptureFixture[str]
) -> None:
    assert drive("fail", "wait") == 1
    out, err = capfd.readouterr()
    assert out == "out of 0, ['fail', 'wait']\n"
    assert err.count("\nValueError: a mistake\n") == 1
    assert "err of 0" in err
    assert "err of 1" not in err  # of several hosts the first one speaks


def test_a_signal_reaches_all_hosts(drive: Drive, tmp_path: Path) -> None:
    ended: list[bool] = []

    def interrupt(hosts: LocalHosts) -> None:
        await_both(tmp_path)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
        ended.append(any(agent.poll() is not None for agent in hosts.agents))
        if not ended[0]:  # the script is no training, which would stop by itself after the first
            os.kill(os.getpid(), signal.SIGINT)

    assert drive("wait", meanwhile=interrupt) == 130
    assert ended == [False], "the first is a request"


def test_an_agent_that_is_killed_takes_all_of_its_host_along_and_ends_the_others(
    drive: Drive, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def kill(hosts: LocalHosts) -> None:
        await_both(tmp_path)
        below = psutil.Process(hosts.agents[1].pid).children(recursive=True)
        assert len(below) >= 2
        hosts.agents[1].kill()
        _, alive = psutil.wait_procs(below, timeout=30)
        assert not alive

    assert drive("wait", meanwhile=kill) == 1
    said = capfd.readouterr().err
    assert "host 1 (" in said
    assert ") is gone: its agent has ended\n" in said
    assert "; the run ends\n" in said


def test_other_versions_on_a_host_are_refused_in_a_sentence() -> None:
    ready = [
        AgentReady(host=host, node=f"n{host}", address="127.0.0.1", port=1, versions={"torch": f"2.{host}"})
        for host in range(2)
    ]

    class Told(LocalHosts):
        def __init__(self) -> None:
            self._readable, self._wake = os.pipe()
            os.write(self._wake, b"\0")

        def read(self) -> list[FromAgent | HostGone]:
            return list(ready)

    hosts = Told()
    setting = EngineSetting(engine="ray", address=None, hosts=2, cores=1)
    with pytest.raises(LaunchError) as caught:
        Driver(hosts, setting, lambda host, at: [], meet=False).run(folder=None, token=None)
    sentence = "torch is 2.1 on host 1 (n1) and 2.0 on host 0 (n0): install the same everywhere"
    assert str(caught.value) == sentence
    os.close(hosts._readable)
    os.close(hosts._wake)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--on rya", "on is 'rya': give one of ray, slurm, kubernetes"),
        ("--on slurm:a", "on is 'slurm:a': an address belongs to Ray"),
        ("--on slurm --node-rank 1", "on is 'slurm': the engine says which host is where, leave out --node-rank"),
        ("--on slurm --emulate hosts=2,link=1gbit", "on is 'slurm': the engine says which host is where, leave out"),
        ("--srun exclusive", "srun is 'exclusive': it is asked of an engine, add --on slurm, or leave it out"),
        ("--on ray --srun exclusive", "srun is 'exclusive': it is for --on slurm, and this is ray, leave it out"),
        ("--on ray --runtime-env {", "runtime-env is '{': that is no JSON"),
        ("--on ray --runtime-env nowhere.json", "runtime-env is 'nowhere.json': it cannot be read (No such file"),
        ("--on kubernetes", "on is 'kubernetes': say what the containers are made of, --image NAME"),
        ("--on kubernetes --image a:1 --manifest job", "manifest is 'job': give one of jobset, trainjob"),
        ("--devices gpu0", "devices is 'gpu0': 'gpu0' is no device of torch's, give such as cuda:0,cuda:1"),
        ("--devices cuda:0 --stages 2", "devices is 'cuda:0': a model that is cut is computed by processes on cores"),
    ],
)
def test_what_contradicts_is_refused_in_a_sentence(
    flags: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").write_text("")
    assert main(["run", str(tmp_path / "script.py"), *flags.split()]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        ("slurm", "--on slurm needs the command srun, which is missing here: run it where Slurm is installed"),
        ("ray", "--on ray needs Ray, which is not installed: pip install 'paceline[ray]'"),
    ],
)
def test_an_engine_that_is_not_here_is_one_sentence(engine: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    hidden = "import sys; sys.modules['ray'] = None; import os; os.environ['PATH'] = '';"
    command = [
        sys.executable,
        "-c",
        hidden + MAIN,
        "run",
        "script.py",
        "--on",
        engine,
        "--nnodes",
        "2",
        "--replicas",
        "2",
    ]
    run = Run(tmp_path, *command).end()
    assert run.code == 2
    assert run.err == f"paceline: {sentence}\n"
    assert not list((tmp_path / "runs").iterdir())


def test_lines_are_read_whatever_pieces_they_come_in() -> None:
    text = b"".join(json.dumps({"line": number}).encode() + b"\n" for number in range(50))
    for size in (1, 7, 100, len(text)):
        reader = LineReader()
        lines = [line for at in range(0, len(text), size) for line in reader.read(text[at : at + size])]
        assert [json.loads(line)["line"] for line in lines] == list(range(50))
