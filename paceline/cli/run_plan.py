"""From flags to a plan: everything that was decided, and whether it was given or is the default.

What contradicts is refused here, with a sentence; what has no effect is in `paceline/cli/unused.py`, what the machine
must have in `paceline/cli/checks.py`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from paceline.cli import is_count, is_port, was_given
from paceline.cli.cut import CUT_FLAGS, read_split
from paceline.cli.engine_flags import ENGINE_FLAGS, check_engine, hosts_by_default
from paceline.cli.run_hosts import (
    check_hosts,
    check_joining,
    check_secure,
    check_spread,
    hosts_of_servers,
    which_host,
    why_no_death_is_survived,
)
from paceline.cli.run_rendezvous import by_collectives, free_port, refuse, rendezvous_of
from paceline.errors import StrategyError
from paceline.exchange.board import MOST_HOSTS, MOST_REPLICAS
from paceline.launch.emulate import Emulation
from paceline.launch.job import POLICIES, RunJob
from paceline.launch.meeting_door import HostsSetting
from paceline.net.secure import Keys, read_token
from paceline.rules import Async, Rule, Sync
from paceline.run_place import Place, ServersPlace, check_container
from paceline.slow_replicas import parse_slow
from paceline.split.values import Split
from paceline.strategy import Centralized, Mirrored, Strategy, limited, one_of
from paceline.watch.target import Target

LOST_AFTER_S = 20.0
# Flags that are not named as the setting they lead to.
_SETTINGS = {
    "nproc_per_node": "replicas",
    **dict.fromkeys(("rdzv_endpoint", "master_addr", "master_port"), "rendezvous"),
    **dict.fromkeys(("accept", "async", "bounded", "stale", "stale_lr"), "rule"),
    **dict.fromkeys(CUT_FLAGS, "split"),
}
LOCAL_STEPS = ("every", "gossip", "outer_momentum", "outer_lr")  # of hosts that each make steps of their own
BETWEEN_HOSTS = ("overlap", *LOCAL_STEPS)
_OF_RULES = ("accept", "async", "bounded", "stale", "stale_lr")
_OF_SERVERS = (*_OF_RULES, "durability", "warmup_epochs", "warmup_steps", "in_graph")
_JOINED = ("join", "container", "token", "keys")
_SEEN = ("module", "run_folder", "plain", "quiet", "json")  # say nothing about how the script is trained
# How a plan's own fields are typed; those of its strategy, that knows.
_FLAGS = {
    "hosts": "--nnodes",
    "host": "--node-rank",
    "rendezvous": "--rdzv-endpoint",
    "module": "-m",
    "longest_s": "--longest",
    "lost_after_s": "--lost-after",
}
_AS_GIVEN = ("lost_after_s", "secure", "slow", "no_checkpoints")
_STOPS = ("until", "goes_on", "longest_s", "most_steps")
# Of these every host may have its own.
_OF_ONE_HOST = ("script", "arguments", "host", "rendezvous", "save_on_stop", "token", "keys")
_NOT_FLAGS = ("script", "arguments", "strategy", "given", "fewest")


@dataclass(frozen=True)
class RunPlan:
    """Everything that was decided before the start."""

    script: str
    arguments: tuple[str, ...]
    strategy: Strategy
    on_failure: str
    max_restarts: int
    save_on_stop: str | None
    operation_timeout_s: float | None
    hosts: int
    host: int
    rendezvous: str | None
    emulate: str | None
    fewest: int | None = None  # hosts that are enough, and others may join; None: all have to be there at the start
    join: str | None = None  # addresses of servers that run already
    container: str | None = None  # the run folder's name, if it is not given
    token: str | None = None
    keys: str | None = None
    servers_on: str | None = None  # hosts, such as 0,2
    lost_after_s: float = LOST_AFTER_S  # of silence
    secure: bool = False  # TLS between hosts
    no_checkpoints: bool = False  # are written, or gone on from
    until: str | None = None  # a target, such as accuracy>=0.97
    goes_on: bool = False  # after it was reached
    longest_s: float | None = None
    most_steps: int | None = None
    slow: str | None = None  # replicas that are made stragglers, such as 2:5x
    devices: str | None = None  # of torch's, one a replica of a host in turn, such as cuda:0,cuda:1
    on: str | None = None  # the engine that has the hosts, such as ray:10.0.0.1:6379
    cores_per_node: int | None = None  # to ask of it
    gpus_per_node: int | None = None
    runtime_env: str | None = None
    srun: str | None = None
    image: str | None = None
    manifest: str | None = None
    module: bool = False  # `script` is the name of a module, as with `python -m`
    run_folder: str | None = None
    plain: bool = False
    quiet: bool = False
    json: bool = False
    given: Mapping[str, object] = field(default_factory=dict, compare=False)  # flags that were typed, by name

    @property
    def settings(self) -> dict[str, object]:
        """What a person may want to know of it, by name."""
        without = (name for name in _JOINED if self.join is None and getattr(self, name) is None)
        hidden = {"strategy", "given", "fewest", *_SEEN, *ENGINE_FLAGS, *without}
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in hidden}
        own |= {name: own[name] or None for name in ("goes_on", "secure", "no_checkpoints")}
        own["hosts"] = self._nnodes
        return {**own, **self.strategy.settings}

    @property
    def _nnodes(self) -> int | str:
        """How many hosts there are, as it is typed."""
        return self.hosts if self.fewest is None else f"{self.fewest}:{self.hosts}"

    @property
    def given_settings(self) -> set[str]:
        """Those settings that were not left to their default."""
        tables = {"servers": "table_servers"} if "only" in self.given else {}
        return {{**_SETTINGS, **tables}.get(name, name) for name in self.given}

    def flags(self) -> list[str]:
        """What `paceline run` is given to resolve to this plan: its strategy's flags, and its own that were given."""
        words = self.strategy.flags()
        for own in (f.name for f in fields(self) if f.name not in _NOT_FLAGS):
            value, flag = getattr(self, own) if own != "hosts" else self._nnodes, _flag(own)
            if own in self.given_settings and was_given(value):
                words += [flag] if value is True else [flag, str(value)]
        return words

    @property
    def name(self) -> str:
        """What to call the run: the script's file or module."""
        return self.script.rpartition(".")[2] if self.module else Path(self.script).name

    def command(self) -> list[str]:
        """The arguments of `paceline` that resolve to this plan."""
        return ["run", *self.flags(), self.script, "--", *self.arguments]

    def on_host(self, host: int, rendezvous: str, run_folder: str) -> RunPlan:
        """The plan of one emulated host: all of this one, of which the first host speaks to the user."""
        own: dict[str, Any] = {"host": host, "rendezvous": rendezvous, "run_folder": run_folder}
        if self.meets and self.keys is None:
            own["token"] = self.token or run_folder
        own |= {"json": False} if host == 0 else {"json": False, "quiet": True}
        return replace(self, **own, given={**self.given, **own})

    def on_engine_host(self, host: int, rendezvous: str, run_folder: str | None) -> RunPlan:
        """The plan of one host on an engine: all of this one, of which the first host speaks to the user."""
        own: dict[str, Any] = {**dict.fromkeys(ENGINE_FLAGS), "run_folder": run_folder}
        own |= {"hosts": self.hosts, "host": host, "rendezvous": rendezvous} if self.hosts > 1 else {}
        own |= {"json": False, "quiet": True} if host else {}
        return replace(self, **own, given={**self.given, **own})

    def job(self, place: Place, container: str = "") -> RunJob:
        """What is started on this host; `place`: of its first replica."""
        return RunJob(
            script=self.script,
            arguments=self.arguments,
            place=place,
            on_failure=self.on_failure,
            max_restarts=self.max_restarts,
            shown=self.host == 0,
            server_hosts=self.server_hosts,
            hosts=self._meeting() if self.meets else None,
            token=read_token(Path(self.token)) if self.token is not None and self.meets else None,
            keys=str(Path(self.keys).resolve()) if self.keys is not None and self.meets else None,
            container=container,
            module=self.module,
            until=Target.parse(self.until) if self.until is not None else None,
            goes_on=self.goes_on,
            longest_s=self.longest_s,
        )

    @property
    def meets(self) -> bool:
        """Whether the supervisors of several hosts meet; not if all they share is servers that run already."""
        return self.hosts > 1 and (bool(self.server_hosts) or not self.strategy.on_servers)

    @property
    def server_hosts(self) -> tuple[int, ...]:
        """By server that the run starts: on which host. Dealt in turn, so that neighbours are on different ones."""
        if self.join is not None:
            return ()
        on = [int(host) for host in self.servers_on.split(",")] if self.servers_on is not None else range(self.hosts)
        return tuple(on[number % len(on)] for number in range(self.strategy.server_processes))

    def _meeting(self) -> HostsSetting:
        assert self.rendezvous is not None
        own = {name: value for name, value in self.settings.items() if name not in _OF_ONE_HOST}
        if self.save_on_stop is not None:  # where to is every host's own, but all save together
            own["save_on_stop"] = "given"
        versions = {package: importlib.metadata.version(package) for package in ("paceline", "torch")}
        return HostsSetting(
            host=self.host,
            hosts=self.hosts,
            rendezvous=self.rendezvous,
            token=read_token(Path(self.token)) if self.token is not None else "",
            keys=Keys.load(Path(self.keys)) if self.keys is not None else None,
            settings={_flag(name).lstrip("-"): str(value) for name, value in own.items()} | versions,
            timeout_s=self.strategy.timeout_s,
            lost_after_s=self.lost_after_s,
            fewest=self.fewest,
        )

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
            master=self._master(),
            run_folder=str(run_folder.resolve()),
            save_on_stop=os.path.abspath(self.save_on_stop) if self.save_on_stop is not None else None,
            most_steps=self.most_steps,
            checkpoints=not self.no_checkpoints,
            operation_timeout_s=self.operation_timeout_s,
            restarts=self.on_failure == "restart",
            slow=parse_slow(self.slow, self.strategy.replicas) if self.slow is not None else {},
            accelerators=self.devices.split(",") if self.devices is not None else [],
            strategy=self.strategy,
            servers=servers,
        )

    def _master(self) -> str:
        """Where a process group of the script's own may meet: at the given address, but for the port where ours do."""
        if self.rendezvous is None:
            return f"127.0.0.1:{free_port()}"
        address, _, port = self.rendezvous.rpartition(":")
        if self.hosts == 1:
            return f"{address}:{free_port()}" if by_collectives(self.strategy) else self.rendezvous
        return f"{address}:{int(port) + (1 if int(port) < 65535 else -1)}"  # all hosts have to know it


def _check_operation_timeout(limit_s: float, strategy: Strategy, hosts: int, on_failure: str) -> None:
    """Refuse a limit of calls that cannot be given up without leaving something half done."""
    if (why := limited(strategy, hosts, restarts=on_failure == "restart")) is not None:
        raise StrategyError("operation-timeout", limit_s, f"calls {why} cannot be given up halfway, leave it out")


def _flag(setting: str) -> str:
    return _FLAGS.get(setting, f"--{setting.removesuffix('_s').replace('_', '-')}")


# ── what was typed ───────────────────────────────────────────────────────────────────────────────────────────


def resolve(options: argparse.Namespace) -> RunPlan:
    """The plan behind the flags; a sentence for whatever is wrong with them."""
    given = {name: value for name, value in vars(options).items() if value is not None and value is not False}
    check_engine(given)
    fewest: int | None = given.get("fewest")
    if "emulate" in given:
        emulation = Emulation.parse(given["emulate"], may_join=True)
        hosts, fewest = emulation.hosts, emulation.fewest
    else:
        hosts = given.get("hosts", hosts_by_default(given))
    if hosts > MOST_HOSTS:
        raise StrategyError("nnodes", hosts, f"give at most {MOST_HOSTS}")
    _check_join(given, hosts)
    split = read_split(given)
    strategy = _strategy(given, _count_replicas(given, hosts, split), split)
    survives = (
        (hosts == 1 or why_no_death_is_survived(given, strategy) is None)
        and split is None
        and not by_collectives(strategy)
    )
    on_failure = one_of("on-failure", given.get("on_failure", "continue" if survives else "stop"), POLICIES)
    if by_collectives(strategy) and on_failure != "stop":
        raise StrategyError("on-failure", on_failure, "replicas that use collectives survive no death: give stop")
    if split is not None and on_failure == "continue":
        raise StrategyError("on-failure", on_failure, "a cut model needs all its devices: give stop or restart")
    if fewest is not None:
        check_joining(given, fewest, hosts, strategy, on_failure)
    if hosts > 1:
        check_hosts(given, hosts, strategy, on_failure)
    elif given.get("every") != 1 and not by_collectives(strategy):
        expected = "replicas of one host share memory and send nothing, it is for several hosts, leave it out"
        refuse(given, BETWEEN_HOSTS, expected)
    if "operation_timeout_s" in given:
        _check_operation_timeout(given["operation_timeout_s"], strategy, hosts, on_failure)
    if "slow" in given:
        parse_slow(given["slow"], strategy.replicas)
    if "no_checkpoints" in given and "save_on_stop" in given:
        raise StrategyError("no-checkpoints", "set", "--save-on-stop writes one, give only one of them")
    if "goes_on" in given and "until" not in given:
        raise StrategyError("goes-on", "set", "it is about a target, add --until")
    as_given = (*_JOINED[1:], *_STOPS[1:], *_AS_GIVEN, *ENGINE_FLAGS, *_SEEN)
    return RunPlan(
        script=options.script,
        arguments=tuple(options.arguments or ()),
        strategy=strategy,
        on_failure=on_failure,
        max_restarts=given.get("max_restarts", 10),
        save_on_stop=given.get("save_on_stop"),
        operation_timeout_s=given.get("operation_timeout_s"),
        hosts=hosts,
        host=which_host(given, hosts),
        rendezvous=rendezvous_of(given, hosts, strategy),
        emulate=given.get("emulate"),
        fewest=fewest,
        join=",".join(addresses("join", given["join"])) if "join" in given else None,
        until=str(Target.parse(given["until"])) if "until" in given else None,
        servers_on=hosts_of_servers(given, hosts, strategy),
        devices=_devices(given, strategy),
        **{name: given[name] for name in as_given if name in given},
        given=given,
    )


def _check_join(given: Mapping[str, Any], hosts: int) -> None:
    if "join" not in given:
        spread = hosts > 1
        for flag in ("container",) if spread else ("container", "token", "keys"):
            if flag in given:
                also = ", or to servers of a run on several hosts" if flag != "container" else ""
                expected = f"it belongs to servers that run already{also}, give --join ADDRESSES"
                raise StrategyError(flag, given[flag], expected)
        if spread and "emulate" not in given and "token" in given and "keys" in given:
            raise StrategyError(
                "token", given["token"], "certificates tell who comes, give only one of --token, --keys"
            )
        check_secure(given, hosts)
        return
    refuse(given, ("secure",), "servers that run already have keys of their own, give --keys")
    if given.get("servers", count := len(addresses("join", given["join"]))) != count:
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
        host, _, port = address.rpartition(":")
        if not (host and is_port(port)):
            raise StrategyError(field, text, "give addresses with ports, such as 127.0.0.1:7070,127.0.0.1:7071")
    if len(set(found)) < len(found):
        raise StrategyError(field, text, "an address is there twice, give every server once")
    return found


def _strategy(given: Mapping[str, Any], replicas: int, split: Split | None) -> Strategy:
    common = {name: given[name] for name in ("wire", "exchange", "timeout_s") if name in given}
    mirrored = {name: given[name] for name in ("batchnorm", *BETWEEN_HOSTS) if name in given}
    if "only" in given:
        one_of("only", given["only"], ("sparse",))
        if "servers" not in given:
            raise StrategyError("only", given["only"], "say how many servers hold the tables, --servers 1 or more")
        if split is not None:
            raise StrategyError("only", given["only"], "a cut model has no tables on servers so far, leave it out")
        refuse(given, (*_OF_SERVERS, "join"), "with --only sparse replicas are mirrored, leave it out")
        return Mirrored(replicas=replicas, table_servers=given["servers"], **common, **mirrored)
    if not {"servers", "join", "in_graph"} & given.keys():
        refuse(given, _OF_SERVERS, "it needs servers, give --servers 1 or more")
        return Mirrored(replicas=replicas, split=split, **common, **mirrored)
    refuse(given, BETWEEN_HOSTS, "with servers replicas push at each step, leave it out")
    if given.get("batchnorm", "local") != "local":
        raise StrategyError("batchnorm", given["batchnorm"], "with servers statistics are local, leave it out")
    servers = len(addresses("join", given["join"])) if "join" in given else given.get("servers", 0)
    own = {name: given[name] for name in _OF_SERVERS if name in given and name not in _OF_RULES}
    return Centralized(replicas=replicas, servers=servers, rule=_rule(given), split=split, **common, **own)


def _devices(given: Mapping[str, Any], strategy: Strategy) -> str | None:
    """The devices that replicas compute on, as they were given."""
    text: str | None = given.get("devices")
    if text is None:
        return None
    named = [device.strip() for device in text.split(",")]
    for device in named:
        if not re.fullmatch(r"[a-z]+(:[0-9]{1,4})?", device):
            raise StrategyError("devices", text, f"{device!r} is no device of torch's, give such as cuda:0,cuda:1")
    if strategy.split is not None:
        raise StrategyError("devices", text, "a model that is cut is computed by processes on cores, leave it out")
    return ",".join(named)


def _rule(given: Mapping[str, Any]) -> Rule:
    if "async" in given or "bounded" in given:
        refuse(given, ("accept",), "it belongs to sync updates, leave out --async and --bounded")
        return Async(given.get("bounded"), given.get("stale", "keep"), given.get("stale_lr", 1.0))
    refuse(given, ("stale", "stale_lr"), "gradients are stale with --async only, add it")
    accept = given.get("accept")
    return Sync(int(accept) if accept is not None and is_count(accept) else accept)


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
        check_spread(replicas, hosts, split)
    if replicas // hosts > MOST_REPLICAS:
        raise StrategyError("replicas", replicas, f"give at most {MOST_REPLICAS} a host")
    return replicas
