"""What flags mean on several hosts: which one this is, which have servers, and what does not work there so far."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.cli import is_count
from paceline.errors import StrategyError
from paceline.split.values import Split
from paceline.strategy import Strategy


class HostRange(argparse.Action):
    """`--nnodes 4`, or `--nnodes 2:4`: how many hosts may be there, and how many have to be (`fewest`)."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        text = str(values)
        fewest, colon, most = text.rpartition(":")
        if not is_count(most) or int(most) < 1 or (colon and not (is_count(fewest) and 1 <= int(fewest) <= int(most))):
            expected = "give how many hosts there are, such as 4, or from how many on and up to how many, such as 2:4"
            raise StrategyError("nnodes", text, expected)
        namespace.hosts = int(most)
        if colon:
            namespace.fewest = int(fewest)


def check_joining(given: Mapping[str, Any], fewest: int, hosts: int, strategy: Strategy, on_failure: str) -> None:
    """In what kind of run hosts can join."""
    field, value = ("emulate", given["emulate"]) if "emulate" in given else ("nnodes", f"{fewest}:{hosts}")
    why = why_no_death_is_survived(given, strategy)
    if strategy.server_processes:
        why = "with servers"
    if "on" in given:
        why = f"on {given['on']}, which has as many nodes as are asked for"
    if why is None and on_failure == "stop":
        why = "with --on-failure stop, where nobody goes on without the others"
    if hosts == 1:
        why = "of one host"
    if why is not None:
        raise StrategyError(field, value, f"no host can join a run {why}, give one number")


def check_hosts(given: Mapping[str, Any], hosts: int, strategy: Strategy, on_failure: str) -> None:
    """What does not work between several hosts so far."""
    field, value = ("emulate", given["emulate"]) if "emulate" in given else ("nnodes", hosts)
    if strategy.in_graph:
        expected = f"one process has all replicas, but there are {hosts} hosts, leave it out"
        raise StrategyError("in-graph", "set", expected)
    if strategy.devices > 1 and strategy.on_servers:
        raise StrategyError(field, value, "a cut model with servers works on one host so far")
    if strategy.replicas < hosts and strategy.wire != "fp32":
        expected = "between stages activations go as they are, and gradients stay, give fp32"
        raise StrategyError("wire", strategy.wire, expected)
    if strategy.server_processes and not strategy.on_servers:
        raise StrategyError(field, value, "tables on servers work on one host so far, leave out --only sparse")
    if strategy.server_processes and "join" in given and "emulate" in given:
        raise StrategyError(field, value, "emulated hosts reach no server outside, leave out --join")
    if strategy.server_processes and not {"join", "emulate", "on", "token", "keys"} & given.keys():
        expected = "say how servers tell friends from strangers, --token with a secret file on every host, or --keys"
        raise StrategyError("servers", strategy.server_processes, expected)
    if on_failure != "stop" and (why := why_no_death_is_survived(given, strategy)) is not None:
        raise StrategyError("on-failure", on_failure, f"between several hosts no death is survived {why}, give stop")
    if on_failure == "restart" and not strategy.on_servers:
        raise StrategyError("on-failure", on_failure, "mirrored replicas of several hosts are not started again so far")


def check_spread(replicas: int, hosts: int, split: Split | None) -> None:
    """Not every host has replicas of its own: then there is one, and its stages are on all of them."""
    expected = f"give a multiple of {hosts}, as many to each of the {hosts} hosts"
    if replicas != 1 or split is None:
        raise StrategyError("replicas", replicas, expected)
    if not split.over_hosts:
        expected = f"{split.words} on several hosts would exchange too much, only --stages can be there, {expected}"
        raise StrategyError("replicas", replicas, expected)
    if split.devices % hosts:
        expected = f"one replica on {hosts} hosts has as many stages on each, give a multiple of {hosts}"
        raise StrategyError("stages", split.devices, expected)


def why_no_death_is_survived(given: Mapping[str, Any], strategy: Strategy) -> str | None:
    """In what kind of run on several hosts a death ends all; None: in no such run."""
    if "join" in given:
        return "with servers that run already"
    if strategy.on_servers:
        return None
    if strategy.devices > 1:
        return "of a cut model, which needs all its devices"
    if strategy.steps_locally:
        return f"with {'--gossip' if strategy.gossip else '--every'}, where each host has steps of its own"
    if strategy.overlap:
        return "with --overlap, where a step returns before it is complete"
    if strategy.exchange == "collective":
        return "with --exchange collective"
    return None


def check_secure(given: Mapping[str, Any], hosts: int) -> None:
    """TLS is for servers of a run on several hosts; and `--secure` for hosts that have a secret in common."""
    flag = next((name for name in ("secure", "keys") if name in given), None)
    if flag is None:
        return
    value = "set" if flag == "secure" else given[flag]
    if hosts == 1:
        raise StrategyError(flag, value, "nothing leaves this host, leave it out, or give --nnodes")
    if "servers" not in given:
        expected = "gradients of mirrored replicas travel by torch.distributed, which has no TLS, it needs --servers"
        raise StrategyError(flag, value, expected)
    if flag == "keys":
        return
    if "keys" in given:
        raise StrategyError("secure", "set", "these --keys are used, and it would make others, give only one")
    if not {"token", "emulate", "on"} & given.keys():
        raise StrategyError("secure", "set", "its keys are made of a secret that every host has, give it with --token")


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
    if hosts > 1 and not {"host", "emulate", "on"} & given.keys():
        raise StrategyError("nnodes", hosts, f"give every host its number, --node-rank 0 to {hosts - 1}")
    host: int = given.get("host", 0)
    if host >= hosts:
        raise StrategyError("node-rank", host, f"give a number below --nnodes, which is {hosts}")
    return host
