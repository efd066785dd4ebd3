"""Hosts that are nodes of a Slurm cluster: one srun, with one task a node, which is an agent.

Inside an allocation (salloc, sbatch) that is a step of it; otherwise srun asks for the nodes, and waits in the queue.
srun hands our lines to all tasks, and theirs to us, a whole line at a time; what it has to say itself, such as that the
job is queued, goes to the user. An agent ends when its stdin does, so nothing stays if this process is killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys

import msgspec

from paceline.engines.line_reader import LineReader
from paceline.engines.messages import FROM_AGENT, FromAgent, FromDriver, HostEnded, HostGone, line_of
from paceline.engines.setting import EngineSetting, allocated_cores, allocated_nodes, read_srun
from paceline.errors import LaunchError, StrategyError

END_S = 20.0  # for all agents, once they have been told to end
PIECE_BYTES = 1 << 16


class SlurmHosts:
    """Hosts on the nodes of a Slurm cluster."""

    def __init__(self, setting: EngineSetting) -> None:
        self._lines = LineReader()
        self._waiting_for = set(range(setting.hosts))  # those that have not told of their end
        self._srun = subprocess.Popen(
            srun_command(setting),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C is for this process, which tells the agents
            bufsize=0,
        )
        assert self._srun.stdout is not None
        os.set_blocking(self._srun.stdout.fileno(), False)

    def fileno(self) -> int:
        assert self._srun.stdout is not None
        return self._srun.stdout.fileno()

    def read(self) -> list[FromAgent | HostGone]:
        messages: list[FromAgent | HostGone] = []
        ended = False
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.fileno(), PIECE_BYTES):
                for line in self._lines.read(data):
                    with contextlib.suppress(msgspec.DecodeError):  # what a node's own start-up scripts print
                        messages.append(FROM_AGENT.decode(line))
            ended = True
        self._waiting_for -= {message.host for message in messages if isinstance(message, HostEnded)}
        if ended and self._waiting_for:
            code = self._srun.wait()
            why = f"srun has ended with code {code}"
            messages += [HostGone(host=host, why=why) for host in sorted(self._waiting_for)]
            self._waiting_for.clear()
        return messages

    def send(self, message: FromDriver) -> None:
        assert self._srun.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._srun.stdin.write(line_of(message))

    def close(self) -> None:
        """Have all agents end, and with the last of them srun."""
        assert self._srun.stdin is not None
        assert self._srun.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._srun.stdin.close()
        self._srun.stdout.close()
        try:
            self._srun.wait(END_S)
        except subprocess.TimeoutExpired:
            self._srun.terminate()  # which ends the tasks
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._srun.wait(END_S)
            self._srun.kill()
            self._srun.wait()


def srun_command(setting: EngineSetting) -> list[str]:
    """What starts an agent on every node."""
    srun = shutil.which("srun")
    if srun is None:
        raise LaunchError("--on slurm needs the command srun, which is missing here: run it where Slurm is installed")
    allocated = allocated_nodes()
    if allocated is not None and allocated < setting.hosts:
        raise StrategyError("nnodes", setting.hosts, f"this job has {allocated} nodes, give at most that")
    # In an allocation a step may use all that the job has on its nodes; otherwise it has what it asks for.
    cores = setting.cores if setting.cores_given else (allocated_cores() or setting.cores)
    gpus = [f"--gpus-per-node={setting.gpus}"] if setting.gpus else []
    return [
        srun,
        f"--nodes={setting.hosts}",
        f"--ntasks={setting.hosts}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={cores}",
        *gpus,
        "--kill-on-bad-exit=0",
        "--no-kill",  # a node's death is for the hosts themselves to judge
        "--wait=0",
        "--job-name=paceline",
        *(read_srun(setting.srun) if setting.srun is not None else ()),
        sys.executable,
        "-m",
        "paceline.engines.agent",
        "SLURM_PROCID",
    ]
