"""Hosts that are nodes of a Ray cluster.

A placement group has one bundle a host, each on a node of its own (STRICT_SPREAD): all are there, or none. In each
bundle an actor starts an agent, and is the pipe to it: Ray carries lines there and back, and tells when a node has
died. An agent ends when its actor does, since that holds its stdin. Actors end with the process that has asked for
them, so a driver that was killed leaves nothing behind.

A method call at a time waits for what an agent has to say, in a thread a host; the driver finds a byte in a pipe.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import msgspec

from paceline.engines.agent import ADDRESS_VARIABLE
from paceline.engines.line_reader import LineReader
from paceline.engines.messages import FROM_AGENT, FromAgent, FromDriver, HostGone, line_of
from paceline.engines.setting import EngineSetting, read_runtime_env
from paceline.errors import LaunchError, StrategyError

CONNECT_S = 20.0
END_S = 15.0  # for an agent that was told to end
PIECE_BYTES = 1 << 16
READS, WRITES = "reads", "writes"  # calls of each kind are made one after another


class AgentActor:
    """In a process of Ray's on a node: starts the agent there, and passes lines on."""

    def __init__(self, host: int) -> None:
        import ray

        self._agent = subprocess.Popen(
            [sys.executable, "-m", "paceline.engines.agent", str(host)],
            env={**os.environ, ADDRESS_VARIABLE: ray.util.get_node_ip_address()},
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
        )

    def read(self) -> bytes:
        """What the agent says next, as soon as it does; nothing at its end."""
        assert self._agent.stdout is not None
        return os.read(self._agent.stdout.fileno(), PIECE_BYTES)

    def write(self, line: bytes) -> None:
        assert self._agent.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # whoever reads finds that it has ended
            self._agent.stdin.write(line)

    def end(self) -> None:
        """Have the agent end what it runs, and wait for that."""
        assert self._agent.stdin is not None
        self._agent.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._agent.wait(END_S)


class RayHosts:
    """Hosts on the nodes of a Ray cluster."""

    def __init__(self, setting: EngineSetting) -> None:
        self._ray = ray = _ray()
        self._inbox: queue.SimpleQueue[FromAgent | HostGone] = queue.SimpleQueue()
        self._readable, self._wake = os.pipe()
        os.set_blocking(self._readable, False)
        self._actors: list[Any] = []
        runtime_env = read_runtime_env(setting.runtime_env) if setting.runtime_env is not None else None
        _connect(ray, setting.address, runtime_env)
        bundle = {"CPU": float(setting.cores), **({"GPU": float(setting.gpus)} if setting.gpus else {})}
        try:
            _check_room(ray, setting, bundle)
            self._group = ray.util.placement_group([bundle] * setting.hosts, strategy="STRICT_SPREAD")
            self._start(setting)
        except BaseException:
            self.close()
            raise

    def _start(self, setting: EngineSetting) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor = self._ray.remote(concurrency_groups={READS: 1, WRITES: 1})(AgentActor)  # a thread for each
        for host in range(setting.hosts):
            one = actor.options(
                num_cpus=setting.cores,
                num_gpus=setting.gpus,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=host
                ),
            ).remote(host)
            self._actors.append(one)
            threading.Thread(target=self._follow, args=(host, one), name=f"paceline-ray-{host}", daemon=True).start()

    def _follow(self, host: int, actor: Any) -> None:
        """Take in what an agent says, until it ends or its node does."""
        lines = LineReader()
        why = "its agent has ended"
        strange = b""
        try:
            while data := self._ray.get(actor.read.options(concurrency_group=READS).remote()):
                for line in lines.read(data):
                    try:
                        self._put(FROM_AGENT.decode(line))
                    except msgspec.DecodeError:  # Python itself, about what keeps the agent from starting
                        strange = line
            if strange:
                why += f" ({strange.decode(errors='replace')})"
        except Exception as error:  # Ray has a tree of them, and says in all the same that the actor is no more
            why = _in_words(error)
        self._put(HostGone(host=host, why=why))

    def _put(self, message: FromAgent | HostGone) -> None:
        self._inbox.put(message)
        with contextlib.suppress(OSError):  # the end has come
            os.write(self._wake, b"\0")

    def fileno(self) -> int:
        return self._readable

    def read(self) -> list[FromAgent | HostGone]:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._readable, 4096):
                pass
        taken = []
        with contextlib.suppress(queue.Empty):
            while True:
                taken.append(self._inbox.get_nowait())
        return taken

    def send(self, message: FromDriver) -> None:
        self._actors[message.host].write.options(concurrency_group=WRITES).remote(line_of(message))

    def close(self) -> None:
        """End all agents, and give the nodes back."""
        with contextlib.suppress(Exception):  # some are gone
            ended = [actor.end.options(concurrency_group=WRITES).remote() for actor in self._actors]
            self._ray.wait(ended, num_returns=len(ended), timeout=END_S) if ended else None
        with contextlib.suppress(Exception):
            self._ray.util.remove_placement_group(self._group)
        self._ray.shutdown()
        os.close(self._wake)
        os.close(self._readable)


def _ray() -> Any:
    try:
        import ray
        import ray.util
    except ImportError as error:
        raise LaunchError("--on ray needs Ray, which is not installed: pip install 'paceline[ray]'") from error
    return ray


def _connect(ray: Any, address: str | None, runtime_env: dict[str, Any] | None) -> None:
    where = address if address is not None else os.environ.get("RAY_ADDRESS", "auto")
    try:
        _check_answers(where)  # Ray itself would try for minutes
        ray.init(
            address=where,
            runtime_env=runtime_env,
            log_to_driver=False,
            logging_level=logging.CRITICAL,
            configure_logging=True,
        )
    except ValueError as error:  # of the runtime_env
        raise StrategyError(
            "runtime-env", runtime_env, f"Ray does not take it ({_in_words(error)}), give another"
        ) from error
    except Exception as error:
        if address is None and "RAY_ADDRESS" not in os.environ:
            why = "no Ray cluster runs here: start one with `ray start --head`, or give its address, ray:10.0.0.1:6379"
            raise StrategyError("on", "ray", why) from error
        expected = f"that Ray cluster cannot be reached ({_in_words(error)}), give the address of one that runs"
        raise StrategyError("on", f"ray:{where}", expected) from error


def _check_answers(where: str) -> None:
    """That somebody listens at an address that has a port; what else Ray takes for one it looks at itself."""
    if where == "auto":  # that of the last cluster on this machine, which stays in a file when the cluster is gone
        with contextlib.suppress(FileNotFoundError):
            where = (Path(tempfile.gettempdir()) / "ray" / "ray_current_cluster").read_text().strip()
    host, _, port = where.rpartition(":")
    if host and port.isdigit() and "//" not in where:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()


def _check_room(ray: Any, setting: EngineSetting, bundle: dict[str, float]) -> None:
    """That the cluster has as many nodes that are large enough; whether they are free is another question."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fit = [node for node in nodes if all(node.get(name, 0.0) >= count for name, count in bundle.items())]
    if len(fit) < setting.hosts:
        wanted = " and ".join(f"{count:g} {name}" for name, count in bundle.items())
        expected = f"the Ray cluster has {len(fit)} nodes with {wanted} (of {len(nodes)}), give at most that"
        raise StrategyError("nnodes", setting.hosts, expected)


def _in_words(error: BaseException) -> str:
    """One line of what Ray says, which often is a page."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "ModuleNotFoundError" in line or "died" in line or "dead" in line]
    return (telling or lines or [type(error).__name__])[0][:300]
