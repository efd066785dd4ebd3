"""From flags to a plan: everything that was decided, and whether it was given or is the default.

Whatever can be wrong is found here, before anything is started.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.cli.cut import CUT_FLAGS, read_split
from paceline.errors import InvalidInput, StrategyError
from paceline.exchange.board import MOST_REPLICAS
from paceline.launch.cores import allowed_cores
from paceline.launch.emulate import Emulation, check_permission
from paceline.launch.supervisor import POLICIES
from paceline.machine import free_memory
from paceline.net.secure import Keys, is_loopback, read_token
from paceline.rules import Async, Rule, Sync
from paceline.run_place import Place, ServersPlace, check_container
from paceline.split.values import Split
from paceline.strategy import Centralized, Mirrored, Strategy, one_of

DEFAULT_PORT = 29500
MOST_DEVICES_A_CORE = 4
REPLICA_BYTES = 180 << 20  # a process that has imported torch, before it has a model
# Flags that are not named as the setting they lead to.
_SETTINGS = {
    "nproc_per_node": "replicas",
    "rdzv_endpoint": "rendezvous",
    "master_addr": "rendezvous",
    "master_port": "rendezvous",
    **dict.fromkeys(CUT_FLAGS, "split"),
}

_OF_SERVERS = (
    "accept",
    "async",
    "bounded",
    "stale",
    "stale_lr",
    "durability",
    "warmup_epochs",
    "warmup_steps",
    "in_graph",
)


@dataclass(frozen=True)
class Plan:
    """Everything that was decided before the start."""

    script: str
    arguments: tuple[str, ...]
    strategy: Strategy
    on_failure: str
    max_restarts: int
    save_on_stop: str | None
    hosts: int
    host: int
    rendezvous: str | None
    emulate: str | None
    given: frozenset[str]  # settings that were not left to their default
    join: str | None = None  # addresses of servers that run already
    container: str | None = None  # the run folder's name, if it is not given
    token: str | None = None
    keys: str | None = None

    @property
    def settings(self) -> dict[str, object]:
        hidden = ("strategy", "given", *(() if self.join is not None else ("join", "container", "token", "keys")))
        own = {name: value for name, value in asdict(self).items() if name not in hidden}
        return {**own, **self.strategy.settings}

    def place(self, run_folder: Path) -> Place:
        """Replica 0's on this host."""
        servers = None
        if self.join is not None:
            servers = ServersPlace(
                addresses=self.join.split(","),
                container=check_container(self.container or run_folder.name),
                token_folder=str(Path(self.token).resolve()) if self.token is not None else None,
                keys=str(Path(self.keys).resolve()) if self.keys is not None else None,
                # Hosts of one run have their rendezvous in common, and nothing else.
                run=self.rendezvous if self.rendezvous is not None else secrets.token_hex(8),
            )
        return Place(
            row=0,
            rows=self.strategy.processes // self.hosts,
            host=self.host,
            hosts=self.hosts,
            rendezvous=self.rendezvous,
            run_folder=str(run_folder.resolve()),
            save_on_stop=self.save_on_stop,
            strategy=self.strategy,
            servers=servers,
        )


def resolve(options: argparse.Namespace) -> Plan:
    """The plan behind the flags; a sentence for whatever is wrong with them."""
    given = {name: value for name, value in vars(options).items() if value is not None}
    hosts = Emulation.parse(given["emulate"]).hosts if "emulate" in given else given.get("hosts", 1)
    _check_join(given, hosts)
    split = read_split(given)
    strategy = _strategy(given, _count_replicas(given, hosts, split), split)
    if hosts > 1 and given.get("in_graph"):
        raise StrategyError(
            "in-graph", "set", f"one process has all replicas, but there are {hosts} hosts, leave it out"
        )
    survives = hosts == 1 and split is None
    on_failure = one_of("on-failure", given.get("on_failure", "continue" if survives else "stop"), POLICIES)
    if split is not None and on_failure == "continue":
        raise StrategyError("on-failure", on_failure, "a cut model needs all its devices: give stop or restart")
    if split is not None and hosts > 1 and (strategy.replicas % hosts or "emulate" in given):
        raise StrategyError("nnodes", hosts, "a model is cut over devices of one host, and replicas on one host so far")
    if split is not None and hosts > 1 and strategy.on_servers:
        raise StrategyError("nnodes", hosts, "a cut model with servers works on one host so far")
    if hosts > 1 and on_failure != "stop":
        raise StrategyError("on-failure", on_failure, "between several hosts no death is survived yet: give stop")
    return Plan(
        script=options.script,
        arguments=tuple(options.arguments or ()),
        strategy=strategy,
        on_failure=on_failure,
        max_restarts=given.get("max_restarts", 10),
        save_on_stop=given.get("save_on_stop"),
        hosts=hosts,
        host=_which_host(given, hosts),
        rendezvous=_rendezvous(given, hosts, strategy),
        emulate=given.get("emulate"),
        join=",".join(addresses("join", given["join"])) if "join" in given else None,
        container=given.get("container"),
        token=given.get("token"),
        keys=given.get("keys"),
        given=frozenset(_SETTINGS.get(name, name) for name in given),
    )


def _check_join(given: Mapping[str, Any], hosts: int) -> None:
    if "join" not in given:
        for flag in ("container", "token", "keys"):
            if flag in given:
                raise StrategyError(flag, given[flag], "it belongs to servers that run already, give --join ADDRESSES")
        return
    if "servers" in given:
        raise StrategyError("servers", given["servers"], "--join uses servers that run already, leave it out")
    if "token" not in given and "keys" not in given:
        raise StrategyError(
            "join", given["join"], "say how to be let in, --token with the servers' folder, or --keys with keys"
        )
    if hosts > 1 and "container" not in given:
        raise StrategyError("nnodes", hosts, "give every host the same name of a container, --container NAME")
    if "container" in given:
        check_container(given["container"])


def addresses(field: str, text: str) -> list[str]:
    """
    >>> addresses("join", "127.0.0.1:7070, node1:7070")
    ['127.0.0.1:7070', 'node1:7070']
    """
    found = [address.strip() for address in text.split(",")]
    for address in found:
        host, colon, port = address.rpartition(":")
        if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise StrategyError(field, text, "give addresses with ports, such as 127.0.0.1:7070,127.0.0.1:7071")
    if len(set(found)) < len(found):
        raise StrategyError(field, text, "an address is there twice, give every server once")
    return found


def _strategy(given: Mapping[str, Any], replicas: int, split: Split | None) -> Strategy:
    common = {name: given[name] for name in ("wire", "exchange", "timeout_s") if name in given}
    if "only" in given:
        if split is not None:
            raise StrategyError("only", given["only"], "a cut model has no tables on servers so far, leave it out")
        return _with_tables_on_servers(given, replicas)
    if "servers" in given or "join" in given:
        if "batchnorm" in given and given["batchnorm"] != "local":
            raise StrategyError("batchnorm", given["batchnorm"], "with servers statistics are local, leave it out")
        centralized = ("servers", "durability", "warmup_steps", "warmup_epochs", "in_graph")
        joined: dict[str, Any] = {"servers": len(addresses("join", given["join"]))} if "join" in given else {}
        return Centralized(
            replicas=replicas,
            rule=_rule(given),
            split=split,
            **common,
            **joined,
            **{name: given[name] for name in centralized if name in given},
        )
    for flag in _OF_SERVERS:
        if given.get(flag) not in (None, False):
            value = "set" if given[flag] is True else given[flag]
            raise StrategyError(flag.replace("_", "-"), value, "it needs servers, give --servers 1 or more")
    batchnorm = {"batchnorm": given["batchnorm"]} if "batchnorm" in given else {}
    return Mirrored(replicas=replicas, split=split, **common, **batchnorm)


def _with_tables_on_servers(given: Mapping[str, Any], replicas: int) -> Mirrored:
    one_of("only", given["only"], ("sparse",))
    if "servers" not in given:
        raise StrategyError("only", given["only"], "say how many servers hold the tables, --servers 1 or more")
    for flag in (*_OF_SERVERS, "join"):
        if given.get(flag) not in (None, False):
            value = "set" if given[flag] is True else given[flag]
            raise StrategyError(flag.replace("_", "-"), value, "with --only sparse replicas are mirrored, leave it out")
    if given.get("hosts", 1) > 1 or "emulate" in given:
        raise StrategyError("only", given["only"], "tables on servers work on one host so far")
    common = {name: given[name] for name in ("wire", "exchange", "timeout_s", "batchnorm") if name in given}
    return Mirrored(replicas=replicas, table_servers=given["servers"], **common)


def _rule(given: Mapping[str, Any]) -> Rule:
    asynchronous = given.get("async") or "bounded" in given
    if asynchronous and "accept" in given:
        raise StrategyError("accept", given["accept"], "it belongs to sync updates, leave out --async and --bounded")
    if not asynchronous:
        for flag in ("stale", "stale_lr"):
            if flag in given:
                raise StrategyError(
                    flag.replace("_", "-"), given[flag], "gradients are stale with --async only, add it"
                )
        accept = given.get("accept")
        if accept is None or accept == "auto":
            return Sync(accept)
        if not accept.isdigit():
            raise StrategyError("accept", accept, "give a number of replicas, or auto")
        return Sync(int(accept))
    return Async(given.get("bounded"), given.get("stale", "keep"), given.get("stale_lr", 1.0))


def _count_replicas(given: Mapping[str, Any], hosts: int, split: Split | None) -> int:
    on_host = given.get("nproc_per_node", 1)
    replicas: int = given.get("replicas", on_host * hosts)
    if split is not None and split.parts_of_batch is not None:
        if "replicas" in given and replicas != split.parts_of_batch:
            expected = f"the batch lies along an axis of {split.parts_of_batch}, give that or leave it out"
            raise StrategyError("replicas", replicas, expected)
        replicas = split.parts_of_batch
    if "nproc_per_node" in given and replicas != on_host * hosts:
        expected = f"on {hosts} host(s) that makes {on_host * hosts} but --replicas says {replicas}, give only one"
        raise StrategyError("nproc-per-node", on_host, expected)
    if replicas % hosts:
        raise StrategyError("replicas", replicas, f"give a multiple of {hosts}, as many to each of the {hosts} hosts")
    if replicas // hosts > MOST_REPLICAS:
        raise StrategyError("replicas", replicas, f"give at most {MOST_REPLICAS} a host")
    return replicas


def _which_host(given: Mapping[str, Any], hosts: int) -> int:
    if hosts > 1 and "host" not in given and "emulate" not in given:
        raise StrategyError("nnodes", hosts, f"give every host its number, --node-rank 0 to {hosts - 1}")
    host: int = given.get("host", 0)
    if host >= hosts:
        raise StrategyError("node-rank", host, f"give a number below --nnodes, which is {hosts}")
    return host


def _rendezvous(given: Mapping[str, Any], hosts: int, strategy: Strategy) -> str | None:
    """Where the processes find each other; None if shared memory is all they need."""
    in_two = None
    if "master_addr" in given or ("master_port" in given and hosts == 1):
        in_two = f"{given.get('master_addr', '127.0.0.1')}:{given.get('master_port', DEFAULT_PORT)}"
    endpoint: str | None = given.get("rdzv_endpoint", in_two)
    if in_two is not None and endpoint != in_two:
        raise StrategyError("rdzv-endpoint", endpoint, f"--master-addr says {in_two}, give only one")
    if endpoint is None:
        if hosts > 1 and "emulate" not in given:
            raise StrategyError("nnodes", hosts, f"say where host 0 is, --rdzv-endpoint 10.0.0.1:{DEFAULT_PORT}")
        if hosts == 1 and strategy.exchange == "collective" and strategy.replicas > 1:
            with socket.create_server(("127.0.0.1", 0)) as server:
                return f"127.0.0.1:{server.getsockname()[1]}"
        return None
    address, colon, port = endpoint.rpartition(":")
    if not colon:
        return f"{endpoint}:{DEFAULT_PORT}"
    if not address or not port.isdigit() or not 0 < int(port) < 65536:
        raise StrategyError("rdzv-endpoint", endpoint, f"give address:port, such as 10.0.0.1:{DEFAULT_PORT}")
    return endpoint


# ── what has to be so before the start ───────────────────────────────────────────────────────────────────────


def check_script(script: str) -> None:
    path = Path(script)
    if path.is_dir():
        raise InvalidInput("script", script, "this is a folder, give the Python file")
    if not path.is_file():
        names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=1)
        hint = f", did you mean {path.parent / near[0]}?" if near else ", give the path of a Python file"
        raise InvalidInput("script", script, f"there is no such file{hint}")
    if not os.access(path, os.R_OK):
        raise InvalidInput("script", script, "it is not readable, give the path of a Python file")


def check(plan: Plan, *, inside: bool) -> None:
    if plan.save_on_stop is not None and not Path(plan.save_on_stop).absolute().parent.is_dir():
        raise InvalidInput("save-on-stop", plan.save_on_stop, "its folder does not exist, make it first")
    if plan.token is not None:
        read_token(Path(plan.token))
    if plan.keys is not None:
        Keys.load(Path(plan.keys)).check("client")
    if plan.join is not None and plan.keys is None:
        for address in plan.join.split(","):
            if not is_loopback(address.rpartition(":")[0]):
                raise StrategyError("join", address, "beyond this machine give --keys, made by paceline keys make")
    _check_devices(plan)
    _check_memory(plan.strategy.processes // (1 if plan.emulate else plan.hosts))
    if plan.rendezvous is not None and plan.host == 0:
        _check_port(plan.rendezvous)
    if plan.emulate is not None and not inside:
        if numbered := sorted(plan.given & {"hosts", "host", "rendezvous"}):
            raise StrategyError("emulate", plan.emulate, f"it sets {', '.join(numbered)} itself, leave its flag out")
        check_permission()


def _check_devices(plan: Plan) -> None:
    """A cut that has less than a core for a device would be slower than no cut, and is a slip more often than not."""
    devices, cores = plan.strategy.devices, len(allowed_cores())
    if devices > 1 and devices > cores * MOST_DEVICES_A_CORE:
        split = plan.strategy.settings.get("split")
        raise StrategyError("split", split, f"that needs {devices} devices and this machine has {cores} cores")


def _check_memory(replicas: int) -> None:
    """More processes than fit would bring down the machine before any of them could say what is wrong."""
    fit = free_memory() // REPLICA_BYTES
    if replicas > max(1, fit):
        need, free = (size / 2**30 for size in (replicas * REPLICA_BYTES, free_memory()))
        expected = f"torch alone takes {need:.0f} GiB in that many and {free:.0f} GiB is free, give at most {fit}"
        raise StrategyError("replicas", replicas, expected)


def _check_port(rendezvous: str) -> None:
    port = int(rendezvous.rpartition(":")[2])
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        why = "in use" if error.errno == errno.EADDRINUSE else "not allowed"
        expected = f"port {port} is {why} on this host, give another"
        raise StrategyError("rdzv-endpoint", rendezvous, expected) from error
