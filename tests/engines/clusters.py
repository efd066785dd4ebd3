"""Real clusters on this machine, of three nodes each: Ray's own, and Slurm's daemons as Debian has them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

NODES = 3
CORES = 4  # that each node says it has
AGENT = "paceline.engines.agent"


def until(ready: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def agents(run_folder: Path) -> list[psutil.Process]:
    """The agents of the run with this folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if AGENT in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                below = [child.cmdline() for child in process.children()]
                if any(str(run_folder) in words for words in below):
                    found.append(process)
        except psutil.Error:
            continue
    return found


class RayCluster:
    """Ray's nodes live in a process of their own, which is told by lines what to do."""

    flags = "--on ray"

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("ray_cluster.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.environment = {"RAY_ADDRESS": self._answer()}

    def _answer(self) -> str:
        assert self._process.stdout is not None
        while not (line := self._process.stdout.readline()).startswith("{"):
            assert line, "the cluster has ended"
        return str(json.loads(line)["said"])

    def kill_node_of(self, run_folder: Path) -> int:
        """Kill a node that has a host of this run, but not host 0; which host that was."""
        assert self._process.stdin is not None
        pids = {int(agent.cmdline()[-1]): agent.pid for agent in agents(run_folder)}
        print(json.dumps(pids), file=self._process.stdin, flush=True)
        return int(self._answer())

    def await_nodes(self) -> None:
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        assert self._answer() == "ready"

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
            assert self._process.stdout is not None
            self._process.stdout.close()


class SlurmCluster:
    """munged, slurmctld, and a slurmd for each of three node names, all on this machine."""

    flags = "--on slurm"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o600)
        (folder / "slurm.conf").write_text(self._configuration())
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        munge = [f"--{name}={folder}/munge.{name.partition('-')[0]}" for name in ("key-file", "socket", "pid-file")]
        munge += [f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"]
        self._start("munged", "--force", "-F", *munge)
        until(lambda: (folder / "munge.socket").exists())
        self._start("slurmctld", "-D", "-c", "-f", f"{folder}/slurm.conf")
        for node in range(NODES):
            self.start_node(node)
        self.await_nodes()

    def start_node(self, node: int) -> None:
        self._start("slurmd", "-D", "-N", f"n{node}", "-f", f"{self._folder}/slurm.conf", name=f"n{node}")

    def await_nodes(self) -> None:
        until(lambda: self.asked("sinfo", "-h", "-N", "-o", "%t").split() == ["idle"] * NODES)

    def _start(self, tool: str, *arguments: str, name: str = "") -> None:
        with (self._folder / f"{name or tool}.out").open("ab") as log:
            self._daemons[name or tool] = subprocess.Popen(
                [found(tool), *arguments],
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def asked(self, *command: str) -> str:
        asked = subprocess.run(command, env={**os.environ, **self.environment}, capture_output=True, text=True)
        return asked.stdout

    def kill_node_of(self, run_folder: Path) -> int:
        """Kill all of the last node: its daemon, what that has started, and what we have started there."""
        node = f"n{NODES - 1}"
        (agent,) = (one for one in agents(run_folder) if one.environ()["SLURMD_NODENAME"] == node)
        host = int(agent.environ()["SLURM_PROCID"])
        killed = [psutil.Process(self._daemons[node].pid), agent.parent(), agent]
        for process in killed:
            assert process is not None
            process.kill()
        self._daemons[node].wait()
        self.start_node(NODES - 1)  # for the tests that follow; the job's part of it is gone
        return host

    def close(self) -> None:
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _configuration(self) -> str:
        here, folder = socket.gethostname(), self._folder
        for name in ("state", *(f"spool-n{node}" for node in range(NODES))):
            (folder / name).mkdir()
        ports = free_ports(NODES + 1)
        nodes = "\n".join(
            f"NodeName=n{node} NodeHostname={here} NodeAddr=127.0.0.1 Port={ports[node]} CPUs={CORES} State=UNKNOWN"
            for node in range(NODES)
        )
        return f"""\
ClusterName=paceline
SlurmctldHost={here}(127.0.0.1)
SlurmctldPort={ports[-1]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdTimeout=10
InactiveLimit=0
KillWait=5
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def found(tool: str) -> str:
    return shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") or tool


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
