"""Where a process stands: which replica it is, on which host, and what its supervisor gave it.

A process learns its place once, at the first `Trainer` or `distribute`, from one of three sources:

- `paceline run` hands every replica one JSON value in `PACELINE_PLACE` (and the board as an open descriptor);
- `torchrun` sets RANK, WORLD_SIZE, LOCAL_RANK …;
- plain `python train.py` sets nothing: the process is alone.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from typing import Literal

import msgspec

from paceline.errors import InvalidInput, LaunchError, StrategyError
from paceline.profile.values import ProfileRequest
from paceline.strategy import Mirrored, Strategy, difference

PLACE_VARIABLE = "PACELINE_PLACE"
INTERRUPTED = 130  # exit code of a run that was asked to stop
MOST_NAME = 100  # letters of a container's name


class Recording(msgspec.Struct, frozen=True):
    """What `paceline verify` asks of a run: dump every tensor of the first steps, then end."""

    folder: str
    steps: int
    dtype: Literal["float64", "float32"] = "float32"  # float32: whatever the script computes in
    asks: bool = False  # after the last step, for the loss in eval mode
    calls: bool = False  # and then for what the model answers to the call that the loss makes
    tables: bool = False  # the strategy has sparse embeddings on servers


MODELS = "models"  # in a run folder: what a script has forgotten to save


class ServersPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where the servers are, and how to be let in."""

    addresses: list[str]
    container: str
    token_folder: str | None = None  # where the token is: the folder, or the file
    keys: str | None = None  # folder with keys for TLS
    run: str = ""  # which of those that come to running servers this is


def check_container(name: str) -> str:
    """A container's name: it is shown in lists, and files are named after it."""
    if not (0 < len(name) <= MOST_NAME and name.isprintable() and "/" not in name and not name.startswith(".")):
        raise InvalidInput(
            "container", name[:MOST_NAME], f"give up to {MOST_NAME} letters without /, the first of them not a dot"
        )
    return name


class EvaluationWanted(msgspec.Struct, frozen=True):
    """What `paceline ensemble` asks of a script: to go to a named evaluation without training, and to end there."""

    name: str | None = None  # None: the first that has one


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Which of the run's processes this is: a replica, or one device of a replica that is cut over several."""

    row: int  # of this process on the board of its host, from 0
    rows: int  # processes on this host
    host: int = 0
    hosts: int = 1
    board: int | None = None  # descriptor of the host's board; None: agree on one through the rendezvous
    rendezvous: str | None = None  # address:port of the store that joins the hosts, or where their supervisors meet
    address: str = "127.0.0.1"  # of this machine, at which the other hosts reach it, if their supervisors have met
    master: str | None = None  # address:port for a process group that the script itself makes, as torchrun gives it
    findings: int | None = None  # descriptor of the pipe in which this process tells what it found
    run_folder: str | None = None
    restarts: bool = False  # replicas that die are started again, and join
    operation_timeout_s: float | None = None  # of every call of the script's
    restarted: bool = False  # a new process in the place of one that died
    joins: bool = False  # its host has come to a run in progress
    save_on_stop: str | None = None
    most_steps: int | None = None  # of the whole run, after which it stops
    checkpoints: bool = True  # are written, and gone on from
    slow: dict[int, float] = {}  # by replica: how many times as long its computing is made to take
    accelerators: list[str] = []  # devices of torch's on this host, which its replicas take in turn; [] : not said
    strategy: Strategy = Mirrored()
    servers: ServersPlace | None = None
    recording: Recording | None = None
    # "reference": one process that something else is compared with, whatever strategy the script names
    started_by: Literal["paceline run", "torchrun", "python", "reference"] = "paceline run"
    dims: dict[str, str] = {}  # names of parameters' dims, as the script gives them
    dims_to: str | None = None  # write down what dims the model has, in this file, and end (`paceline dims`)
    serving: Literal["trainer", "batch"] | None = None  # hand the model over there, instead of training it (`serve`)
    profiling: ProfileRequest | None = None  # measure the first step instead of making it, and end (`paceline plan`)
    reaching: EvaluationWanted | None = None  # train nothing, and end where this is evaluated (`paceline ensemble`)

    @property
    def accelerator(self) -> str:
        """The device of torch's for this replica, such as cuda:1: one of those that were given, or this host's in turn;
        cpu, if it has none."""
        return self.accelerator_of(self.row)

    def accelerator_of(self, number: int) -> str:
        """The device of the replica with that number on this host."""
        if self.accelerators:
            return self.accelerators[number % len(self.accelerators)]
        import torch  # whoever asks has it

        if not torch.accelerator.is_available():
            return "cpu"
        found, count = torch.accelerator.current_accelerator(), torch.accelerator.device_count()
        return f"{found.type}:{number % count}" if found is not None else "cpu"

    @property
    def rank(self) -> int:
        """Number of this process among all hosts'."""
        return self.host * self.rows + self.row

    @property
    def world(self) -> int:
        """Processes on all hosts."""
        return self.hosts * self.rows

    @property
    def is_spread(self) -> bool:
        """Whether the one replica that there is has devices on every host."""
        return self.hosts > self.strategy.replicas

    @property
    def replica(self) -> int:
        """Number of the replica that this process is, or is a device of, among all hosts'."""
        return self.rank // self.strategy.devices

    @property
    def device(self) -> int:
        """Which of its replica's devices this process is; 0 unless the model is cut."""
        return self.rank % self.strategy.devices


def find_place(environment: Mapping[str, str] = os.environ) -> Place:
    """The place of this process.

    >>> find_place({}).world
    1
    >>> find_place({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    ...             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}).host
    1
    """
    if given := environment.get(PLACE_VARIABLE):
        return msgspec.json.decode(given, type=Place)
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _from_torchrun(environment)
    return Place(row=0, rows=1, started_by="python")


def settle(place: Place, strategy: Strategy | None) -> Place:
    """The place, with the strategy that the script itself names, if it does: that must be what was started."""
    if strategy is None or place.started_by == "reference":
        return place
    if place.started_by == "paceline run":
        if (differs := difference(strategy, place.strategy)) is not None:
            name, wanted, started, how = differs
            raise StrategyError(name, wanted, f"this run was started with {started!r}, start it {how}")
        return place
    name = "servers" if strategy.server_processes else "split" if strategy.devices > 1 else "replicas"
    value = strategy.server_processes or strategy.settings[name]
    if place.started_by == "torchrun":
        if strategy.server_processes or strategy.devices > 1:
            raise StrategyError(name, value, f"torchrun starts replicas alone, start it with `{_command(strategy)}`")
        if strategy.replicas != place.world:
            expected = f"torchrun has started {place.world}, give it as many processes, or `{_command(strategy)}`"
            raise StrategyError(name, value, expected)
    elif strategy.processes > 1 or strategy.server_processes:
        raise StrategyError(name, value, f"this is one process, start it with `{_command(strategy)}`")
    return msgspec.structs.replace(place, strategy=strategy)


def _command(strategy: Strategy) -> str:
    """What to type to run this script by that strategy."""
    script, *arguments = sys.argv
    return shlex.join(["paceline", "run", script, *strategy.flags(), *(["--", *arguments] if arguments else [])])


def _from_torchrun(environment: Mapping[str, str]) -> Place:
    try:
        rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local = int(environment.get("LOCAL_RANK", rank))
        on_host = int(environment.get("LOCAL_WORLD_SIZE", world))
        rendezvous = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    except (KeyError, ValueError) as error:
        raise LaunchError(
            f"RANK and WORLD_SIZE are set but {error} is missing or not a number: "
            "start the script with torchrun, or with `paceline run`"
        ) from error
    if world % on_host:
        raise LaunchError(
            f"WORLD_SIZE is {world} and LOCAL_WORLD_SIZE {on_host}: every host must run equally many replicas"
        )
    return Place(
        row=local,
        rows=on_host,
        host=rank // on_host,
        hosts=world // on_host,
        rendezvous=rendezvous,
        started_by="torchrun",
        strategy=Mirrored(replicas=world),
    )
