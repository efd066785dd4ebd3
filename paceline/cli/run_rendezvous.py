"""Where the processes of a run find each other, as flags say it or as it is by itself."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from paceline.cli import is_port
from paceline.errors import StrategyError
from paceline.machine import shared_words_work
from paceline.strategy import Strategy

DEFAULT_PORT = 29500


def rendezvous_of(given: Mapping[str, Any], hosts: int, strategy: Strategy) -> str | None:
    """Where the processes find each other; None if shared memory is all they need."""
    endpoint: str | None = given.get("rdzv_endpoint")
    if endpoint is not None:
        refuse(given, ("master_addr", "master_port"), f"--rdzv-endpoint says {endpoint}, give only one")
    elif "master_addr" in given or "master_port" in given:
        endpoint = f"{given.get('master_addr', '127.0.0.1')}:{given.get('master_port', DEFAULT_PORT)}"
        if hosts > 1 and "master_addr" not in given:
            raise StrategyError("master-port", given["master_port"], "say where host 0 is, --master-addr 10.0.0.1")
    if endpoint is None:
        if hosts > 1 and not {"emulate", "on"} & given.keys():
            raise StrategyError("nnodes", hosts, f"say where host 0 is, --rdzv-endpoint 10.0.0.1:{DEFAULT_PORT}")
        return f"127.0.0.1:{free_port()}" if hosts == 1 and by_collectives(strategy) and "on" not in given else None
    address, colon, port = endpoint.rpartition(":")
    if not colon:
        return f"{endpoint}:{DEFAULT_PORT}"
    if not address or not is_port(port):
        raise StrategyError("rdzv-endpoint", endpoint, f"give address:port, such as 10.0.0.1:{DEFAULT_PORT}")
    return endpoint


def by_collectives(strategy: Strategy) -> bool:
    """Whether the replicas of one host share no memory: they were told not to, or this machine cannot."""
    apart = strategy.exchange == "collective" or not shared_words_work()
    return apart and strategy.replicas > 1 and not strategy.on_servers


def free_port() -> int:
    """A port of this machine that nobody uses at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def refuse(given: Mapping[str, Any], flags: tuple[str, ...], expected: str) -> None:
    """A sentence about the first of these flags that was given."""
    for flag in flags:
        if flag in given:
            raise StrategyError(flag.replace("_", "-"), "set" if given[flag] is True else given[flag], expected)
