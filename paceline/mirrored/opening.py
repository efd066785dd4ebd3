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
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.optim import Optimizer

from paceline.errors import LaunchError, ReplicaDied, StrategyError
from paceline.exchange.board import Board
from paceline.exchange.far_mailboxes import UNLIMITED, FarMailboxes
from paceline.exchange.host_views import HostViews
from paceline.exchange.links import Links, Store, open_store, serve_store
from paceline.exchange.mailboxes import Peers
from paceline.exchange.members import MemberLost
from paceline.exchange.together import Together
from paceline.exchange.words import HostWord, Word
from paceline.loop.training_loop import Training
from paceline.machine import shared_words_work
from paceline.memory import segment
from paceline.memory.heap import keep_memory
from paceline.mirrored.between_hosts import BetweenHosts
from paceline.mirrored.engine import MirroredEngine
from paceline.mirrored.gossip import Gossip
from paceline.mirrored.link_maker import GivenLinks, LinkMaker, made_in
from paceline.mirrored.local_steps import LocalSteps
from paceline.mirrored.one_host import OneHost
from paceline.mirrored.overlapped_hosts import OverlappedHosts
from paceline.mirrored.spread_replica import SpreadReplica
from paceline.mirrored.step_parts import StepPart
from paceline.optim.host_copy import HOST, HostCopy, device_of
from paceline.optim.models import own_state
from paceline.run_place import PLACE_VARIABLE, Place
from paceline.split.cut import open_cut
from paceline.strategy import Strategy
from paceline.torch_private import gloo_group

OpenTables = Callable[[nn.Module, Optimizer, Place, int, int], StepPart]  # number of the trainer, incarnation


def open_mirrored(training: Training, tables: OpenTables) -> MirroredEngine:
    """Returns the engine of this process. `tables` opens those that are on servers, if any are."""
    model, optimizer = training.model, training.optimizer
    if training.place.is_spread:
        own_state(model).state_dict()  # an earlier trainer's may refuse it, since it has old values here
    if not training.place.strategy.on_servers and training.place.strategy.overlap:
        _check_overlap(training)
    copy = _copy_of(model, optimizer, training.place.strategy)
    place, together, links = find_others(model if copy is None else copy.model, training.place)
    strategy, row, board = place.strategy, place.row, together.board
    joining = place.restarted and not board.alive(row)  # an earlier trainer of this process may have joined
    host_joins = place.joins and not board.host_get(HostWord.VIEW)  # the same
    board.announce(row)
    board.host_set(HostWord.FIRST_REPLICA, place.host * place.rows)
    cut, hosts = None, None
    if (split := strategy.split) is not None:
        far, asked = _far_devices(place, together) if place.is_spread else (None, None)
        peers = Peers.meet(together, place.device, split.devices, far)
        cut = open_cut(split, peers, place.dims)
        if far is not None and asked is not None:
            assert links is not None
            hosts = SpreadReplica(together, links, peers, far, asked)
    elsewhere = None
    if place.servers is not None:
        number, incarnation = board.get(row, Word.ARENAS) + 1, board.get(row, Word.INCARNATION)
        elsewhere = tables(model, optimizer, place, number, incarnation)
    return MirroredEngine(
        model,
        optimizer,
        together,
        hosts=hosts or _hosts(together, links, strategy),
        replica=training.place.replica,
        clip_norm=training.clip_norm,
        batchnorm=strategy.batchnorm,
        cut=cut,
        copy=copy,
        elsewhere=elsewhere,
        joining=joining,
        host_joins=host_joins,
        most_steps=place.most_steps,
    )


def _check_overlap(training: Training) -> None:
    """What is known of the script only."""
    why = None
    if training.clip_norm is not None:
        why = "the length of the gradient is known only when all of it is back, leave it out, or clip_norm"
    elif (device := device_of(training.model)) != HOST:
        why = f"the model is on {device}, and forward waits for parameters in main memory so far, leave it out"
    if why is not None:
        raise StrategyError("overlap", "set", why)


def _copy_of(model: nn.Module, optimizer: Optimizer, strategy: Strategy) -> HostCopy | None:
    """Returns the copy that owners know of a model that is on an accelerator; None: they know the model itself."""
    device = device_of(model)
    if device == HOST:
        return None
    if strategy.split is not None:
        expected = f"the model is on {device}, and one that is cut is computed by processes on cores, leave it there"
        raise StrategyError("split", strategy.settings["split"], expected)
    if strategy.server_processes:
        expected = f"the model is on {device}, and tables on servers are for models on a CPU so far"
        raise StrategyError("only", "sparse", expected)
    if strategy.exchange == "collective":
        if device.type != "cuda":
            expected = f"the model is on {device}, and collectives are for CPUs and for GPUs by NCCL, leave it out"
            raise StrategyError("exchange", strategy.exchange, expected)
        return None
    return HostCopy(model, optimizer)


def _hosts(together: Together, links: LinkMaker | None, strategy: Strategy) -> OneHost:
    assert not strategy.on_servers
    if links is None:
        if strategy.steps_locally and strategy.replicas > 1:
            field, value = ("gossip", "set") if strategy.gossip else ("every", strategy.every)
            expected = "replicas of one host share memory and send nothing, it is for several hosts, leave it out"
            raise StrategyError(field, value, expected)
        if strategy.overlap and strategy.replicas > 1:
            raise StrategyError("overlap", "set", "replicas of one host send nothing, it is for several hosts")
        return OneHost()
    if strategy.gossip:
        return Gossip(together, links, strategy.wire, strategy.every)
    if strategy.steps_locally:
        outer = (strategy.outer_lr, strategy.outer_momentum) if strategy.makes_outer_steps else None
        return LocalSteps(together, links, strategy.wire, strategy.every, outer)
    if strategy.overlap:
        return OverlappedHosts(together, links, strategy.wire)
    return BetweenHosts(together, links, strategy.wire, strategy.devices)


def _far_devices(place: Place, together: Together) -> tuple[FarMailboxes, FarMailboxes]:
    """Returns the mailboxes to those devices of this replica that are on other hosts: for what all do together, and for
    what one asks the others."""
    assert together.views is not None
    members = together.views.members(together.coming().op)
    name = f"devices/{together.board.get(place.row, Word.ARENAS)}"
    far = [device for device in range(place.world) if device // place.rows != place.host]

    def make(store: Store) -> tuple[FarMailboxes, FarMailboxes]:
        group = gloo_group(PrefixStore(name, store), place.device, place.world, UNLIMITED, _gloo_address(place))
        mailboxes = FarMailboxes(group, far)
        return mailboxes, FarMailboxes(group, far, beside=mailboxes)

    try:
        return made_in(members, together, make)
    except MemberLost:
        raise ReplicaDied("another host was lost before all stages had met: see its output") from None


def meet(model: nn.Module, place: Place) -> tuple[Place, Together, Links | None]:
    """Find the others: this replica's place among those who share its memory, what it does together with them, the
    links to the rest, which are of the hosts that the run has now."""
    if place.joins:
        raise ReplicaDied("only a Trainer can join the other hosts in the middle of a run: start them all again")
    place, together, links = find_others(model, place)
    if links is None:
        return place, together, None
    members = together.coming()
    if together.views is not None:
        members = together.views.members(members.op)
        if members.view is not None and members.view.total < place.world:
            raise ReplicaDied(
                "not all replicas of all hosts are there, and only the Trainer goes on without: start it again with all"
            )
    return place, together, links.open(members)


def find_others(model: nn.Module, place: Place, purpose: str = "owner") -> tuple[Place, Together, LinkMaker | None]:
    """The same, but for the links how to come to them, of whatever hosts the run has then. Those of another `purpose`
    are others."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    timeout_s = place.strategy.timeout_s
    apart = place.strategy.exchange == "collective" or device.type != "cpu" or not shared_words_work()
    views = _views(place)
    store = None
    if place.hosts > 1 or place.board is None or (apart and place.world > 1):
        store = _store(place, views) if views is None or apart else None
    if place.board is None:
        assert store is not None
        place = _share_board(place, store)
    assert place.board is not None
    board = Board(place.board) if not apart else Board(place.board, only_row=place.row)

    def make(store: Store, name: str, host: int, hosts: int) -> Links:
        return Links(store, name, host, hosts, timeout_s, device, _gloo_address(place) if views is not None else None)

    if not apart:
        together, arenas = Together(board, place.row, timeout_s, views), board.get(place.row, Word.ARENAS)
        if place.hosts == 1:
            return place, together, None
        if views is not None:
            return place, together, LinkMaker(together, f"{purpose}/{arenas}", place.host, place.hosts, make)
        assert store is not None
        return place, together, GivenLinks(make(store, f"{purpose}-{place.row}/{arenas}", place.host, place.hosts))
    alone = msgspec.structs.replace(place, row=0, rows=1)
    together = Together(board, 0, timeout_s)
    if place.world == 1:
        return alone, together, None
    assert store is not None
    name = f"{purpose}/replicas/{board.get(0, Word.ARENAS)}"
    return alone, together, GivenLinks(make(store, name, place.rank, place.world))


def _gloo_address(place: Place) -> str | None:
    """Returns where Gloo should listen: by itself it takes the interface that the host's name leads to, which may be
    another one. None: as the user says."""
    return place.address if "GLOO_SOCKET_IFNAME" not in os.environ else None


def _views(place: Place) -> HostViews | None:
    """The views of a run whose hosts' supervisors have met."""
    if place.hosts == 1 or place.board is None:
        return None
    board = Board(place.board)
    if not place.joins and not board.host_get(HostWord.VIEW):
        return None
    board.announce(place.row)
    return HostViews(
        board, place.row, place.host, place.hosts, place.strategy.timeout_s, lambda: serve_store(place.address)
    )


def _store(place: Place, views: HostViews | None) -> Store:
    if place.rendezvous is None:
        raise LaunchError("the replicas have no address to find each other at: start them with `paceline run`")
    timeout_s = min(place.strategy.timeout_s, 300.0)
    if views is not None:  # the supervisors are at that port
        assert place.board is not None
        views.members(0)
        return open_store(Board(place.board).read_text(HostWord.STORE), serve=False, timeout_s=timeout_s)
    # torchrun's agent may already serve a store at this address.
    serve = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return open_store(place.rendezvous, serve=serve, timeout_s=timeout_s)


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
