"""What flags mean on several hosts: which one this is, which have servers, and what does not work there so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.cli import is_count
from paceline.errors import StrategyError
from paceline.strategy import Strategy


def check_hosts(given: Mapping[str, Any], hosts: int, strategy: Strategy, on_failure: str) -> None:
    """What does not work between several hosts so far."""
    field, value = ("emulate", given["emulate"]) if "emulate" in given else ("nnodes", hosts)
    if strategy.in_graph:
        expected = f"one process has all replicas, but there are {hosts} hosts, leave it out"
        raise StrategyError("in-graph", "set", expected)
    if strategy.devices > 1 and strategy.on_servers:
        raise StrategyError(field, value, "a cut model with servers works on one host so far")
    if strategy.server_processes and not strategy.on_servers:
        raise StrategyError(field, value, "tables on servers work on one host so far, leave out --only sparse")
    if strategy.server_processes and "join" in given and "emulate" in given:
        raise StrategyError(field, value, "emulated hosts reach no server outside, leave out --join")
    if strategy.server_processes and not {"join", "emulate", "token", "keys"} & given.keys():
        expected = "say how servers tell friends from strangers, --token with a secret file on every host, or --keys"
        raise StrategyError("servers", strategy.server_processes, expected)
    if on_failure != "stop" and ("join" in given or not strategy.on_servers):
        raise StrategyError("on-failure", on_failure, "between several hosts no death is survived yet: give stop")


def hosts_of_servers(given: Mapping[str, Any], hosts: int, strategy: Strategy) -> str | None:
    """The hosts that the servers are on, as they were given; each must be there, and have one."""
    text = given.get("servers_on")
    if text is None:
        return None
    if hosts == 1 or "join" in given or not strategy.server_processes:
        raise StrategyError("servers-on", text, "it is about servers that are started on several hosts, leave it out")
    named = [host.strip() for host in text.split(",")]
    for host in named:
        if not is_count(host) or int(host) >= hosts:
            raise StrategyError("servers-on", text, f"{host!r} is no host, give numbers from 0 to {hosts - 1}")
    if len(set(map(int, named))) < len(named):
        raise StrategyError("servers-on", text, "a host is there twice, give each once")
    if len(named) > strategy.server_processes:
        expected = f"that is {len(named)} hosts for {strategy.server_processes} server(s), name at most as many"
        raise StrategyError("servers-on", text, expected)
    return ",".join(str(int(host)) for host in named)


def which_host(given: Mapping[str, Any], hosts: int) -> int:
    if hosts > 1 and "host" not in given and "emulate" not in given:
        raise StrategyError("nnodes", hosts, f"give every host its number, --node-rank 0 to {hosts - 1}")
    host: int = given.get("host", 0)
    if host >= hosts:
        raise StrategyError("node-rank", host, f"give a number below --nnodes, which is {hosts}")
    return host
