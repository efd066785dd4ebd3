"""How mirrored replicas find each other: that follows from the place of a process.

- under `paceline run`: the supervisor's board is an open descriptor;
- under `torchrun`: the first replica of a host makes a board, and the others open it through the rendezvous.

`exchange` says who shares memory. With `shared` all replicas of a host do. With `collective` none do: each is a host of
its own to the others, which is also how replicas on GPUs work.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from paceline.errors import LaunchError, StrategyError
from paceline.exchange.board import Board
from paceline.exchange.links import Links, Store, open_store
from paceline.exchange.mailboxes import Peers
from paceline.exchange.together import Together
from paceline.exchange.wire import wire
from paceline.exchange.words import HostWord, Word
from paceline.loop.training_loop import Training
from paceline.machine import shared_words_work
from paceline.memory import segment
from paceline.memory.heap import keep_memory
from paceline.mirrored.between_hosts import BetweenHosts, OneHost
from paceline.mirrored.engine import MirroredEngine
from paceline.mirrored.local_steps import LocalSteps
from paceline.mirrored.step_parts import StepPart
from paceline.run_place import PLACE_VARIABLE, Place
from paceline.split.cut import open_cut
from paceline.strategy import Strategy

OpenTables = Callable[[nn.Module, Optimizer, Place, int, int], StepPart]  # number of the trainer, incarnation


def open_mirrored(training: Training, tables: OpenTables) -> MirroredEngine:
    """Returns the engine of this process. `tables` opens those that are on servers, if any are."""
    model, optimizer = training.model, training.optimizer
    place, board, links = meet(model, training.place)
    strategy, row = place.strategy, place.row
    together = Together(board, row, strategy.timeout_s)
    joining = place.restarted and not board.alive(row)  # an earlier trainer of this process may have joined
    board.announce(row)
    board.host_set(HostWord.FIRST_REPLICA, place.host * place.rows)
    cut = None
    if (split := strategy.split) is not None:
        cut = open_cut(split, Peers.meet(together, split.devices), place.dims)
    elsewhere = None
    if place.servers is not None:
        number, incarnation = board.get(row, Word.ARENAS) + 1, board.get(row, Word.INCARNATION)
        elsewhere = tables(model, optimizer, place, number, incarnation)
    return MirroredEngine(
        model,
        optimizer,
        together,
        hosts=_hosts(together, links, strategy),
        replica=training.place.replica,
        clip_norm=training.clip_norm,
        batchnorm=strategy.batchnorm,
        cut=cut,
        elsewhere=elsewhere,
        joining=joining,
    )


def _hosts(together: Together, links: Links | None, strategy: Strategy) -> OneHost:
    assert not strategy.on_servers
    if links is None:
        if strategy.every > 1 and strategy.replicas > 1:
            expected = "replicas of one host share memory and send nothing, it is for several hosts, leave it out"
            raise StrategyError("every", strategy.every, expected)
        return OneHost()
    if strategy.every > 1:
        return LocalSteps(together, links, strategy.every)
    return BetweenHosts(together, links, strategy.devices)


def meet(model: nn.Module, place: Place, *, purpose: str = "owner") -> tuple[Place, Board, Links | None]:
    """Find the others: this replica's place among those who share its memory, their board, the links to the rest.
    Links of another `purpose` are others."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    apart = place.strategy.exchange == "collective" or device.type != "cpu" or not shared_words_work()
    store = _store(place) if place.hosts > 1 or place.board is None or (apart and place.world > 1) else None
    if place.board is None:
        assert store is not None
        place = _share_board(place, store)
    assert place.board is not None
    if not apart:
        board = Board(place.board)
        name = f"{purpose}-{place.row}/{board.get(place.row, Word.ARENAS)}"
        return place, board, _links(place, store, name, place.host, place.hosts, device)
    board = Board(place.board, only_row=place.row)
    name = f"{purpose}/replicas/{board.get(0, Word.ARENAS)}"
    links = _links(place, store, name, place.rank, place.world, device)
    return msgspec.structs.replace(place, row=0, rows=1), board, links


def _links(place: Place, store: Store | None, name: str, host: int, hosts: int, device: torch.device) -> Links | None:
    if hosts == 1:
        return None
    assert store is not None
    return Links(store, name, host, hosts, wire(place.strategy.wire), place.strategy.timeout_s, device)


def _store(place: Place) -> Store:
    if place.rendezvous is None:
        raise LaunchError("the replicas have no address to find each other at: start them with `paceline run`")
    # torchrun's agent may already serve a store at this address.
    serve = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return open_store(place.rendezvous, serve=serve, timeout_s=min(place.strategy.timeout_s, 300.0))


def _share_board(place: Place, store: Store) -> Place:
    """Without a supervisor the first replica of each host makes the board."""
    key = f"board-{place.host}"
    if place.row == 0:
        descriptor = Board.create(place.rows, supervised=False).descriptor
        store.set(key, f"{os.getpid()}/{descriptor}")
        # This process may be the one that serves the store: it stays until all have what they came for.
        store.wait([f"{key}/{replica}" for replica in range(1, place.rows)])
    else:
        process, held = store.get(key).decode().split("/")
        descriptor = segment.open_held(int(process), int(held))
        store.set(f"{key}/{place.row}", "opened")
    keep_memory()
    if "OMP_NUM_THREADS" not in os.environ:
        # Each replica with threads for all cores would make them fight for the cores.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.rows))
    place = msgspec.structs.replace(place, board=descriptor)
    # The next trainer of this process finds it there.
    os.environ[PLACE_VARIABLE] = msgspec.json.encode(place).decode()
    return place
