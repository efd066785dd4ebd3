"""What an owner does when another host is gone in the middle of an exchange, and with parameters that nobody has used.

There is one process, and its links are to a host that never answers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from paceline.exchange.board import Board
from paceline.exchange.coded_sums import Round
from paceline.exchange.links import LinkLost, Links
from paceline.exchange.members import HostsView, MemberLost, Members
from paceline.exchange.sums import SharedSums
from paceline.exchange.together import Together
from paceline.exchange.words import HostWord
from paceline.memory.model_arena import ModelArena, Sizes
from paceline.mirrored.between_hosts import BetweenHosts
from paceline.mirrored.gossip import Gossip
from paceline.mirrored.link_maker import LinkMaker
from paceline.mirrored.local_steps import LocalSteps
from paceline.mirrored.owner import Owner
from paceline.mirrored.step_parts import DecidedStep
from paceline.optim.model_in_arena import ModelInArena

VIEW = HostsView(1, (1, 1))
LOST = "host 0 lost its link to another host (connection closed): see that host's output"


class Silent:
    """Links to a host that is gone."""

    host, hosts = 0, 2

    def __init__(self, *, is_noticed: bool) -> None:
        """`is_noticed`: whether the connection ends, or what is waited for just never comes."""
        self._is_noticed, self.aborted = is_noticed, threading.Event()

    def exchange(self, one_round: Round, tag: int) -> None:
        if not self._is_noticed:
            self.aborted.wait(8)  # --timeout
        raise LinkLost(LOST)

    def abort(self) -> None:
        self.aborted.set()

    def tell(self, lane: int, what: str) -> None: ...

    def told(self, lane: int) -> list[tuple[int, str]]:
        return []


class Here:
    """One process of host 0, of two."""

    def __init__(self, make: Callable[[Together, LinkMaker], BetweenHosts], *, is_noticed: bool = False) -> None:
        self.board = Board.create(1, supervised=True)
        self.board.host_set(HostWord.VIEW, 1)
        self.links = Silent(is_noticed=is_noticed)
        maker = SimpleNamespace(host=0, hosts=2, open=lambda members: cast(Links, self.links))
        together = Together(self.board, 0, 60.0)
        self.hosts = make(together, cast(LinkMaker, maker))
        model = nn.Linear(6, 3)
        made = ModelInArena(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
        self.arena = ModelArena.private(
            made.layout, Sizes(1, (0,), 64, 0, self.hosts.keeps(made.layout)), torch.device("cpu")
        )
        owner: Any = SimpleNamespace(chunks=lambda rank: [0])
        self.hosts.open(self.arena, cast(Owner, owner), SharedSums(together, self.arena), [])
        self.members = Members(1, 1, (0,), 0, VIEW)
        self.hosts.enter(self.members)

    def leave_view_soon(self) -> None:
        """The supervisor hears that the other host is gone."""
        threading.Timer(0.3, lambda: self.board.host_set(HostWord.VIEW, 2)).start()


def test_a_save_is_tried_again_as_soon_as_a_host_is_known_to_be_gone() -> None:
    here = Here(lambda together, links: BetweenHosts(together, links, "int8"))
    here.leave_view_soon()
    began = time.monotonic()
    with pytest.raises(MemberLost):
        here.hosts.collect(first=True)
    assert time.monotonic() - began < 6
    here.links.abort()


def step_by_themselves(together: Together, links: LinkMaker) -> LocalSteps:
    return LocalSteps(together, links, "fp32", every=1)


def gossip(together: Together, links: LinkMaker) -> LocalSteps:
    return Gossip(together, links, "fp32", every=1)


@pytest.mark.parametrize("make", [step_by_themselves, gossip])
@pytest.mark.parametrize("is_noticed", [True, False])
def test_hosts_that_step_by_themselves_say_which_link_was_lost(
    make: Callable[[Together, LinkMaker], LocalSteps], is_noticed: bool
) -> None:
    here = Here(make, is_noticed=is_noticed)
    if not is_noticed:
        here.leave_view_soon()
    with pytest.raises(LinkLost) as lost:
        here.hosts.closed()
    assert (LOST if is_noticed else "when one of them lost a link") in str(lost.value)
    here.links.abort()


@pytest.mark.parametrize("wire", ["int8", "topk:0.05", "powersgd:1"])
def test_what_is_owed_of_a_parameter_that_nobody_used_is_still_owed_after_the_step(wire: str) -> None:
    here = Here(lambda together, links: BetweenHosts(together, links, wire))
    bias, weight = here.arena.layout.slots
    owed, proposed = here.arena.owed
    owed.fill_(3.0)
    proposed.fill_(1.0)  # if it was sent
    here.hosts.decided(DecidedStep(here.members, 0, touched=[1, 0]))
    here.hosts.arrived(0)
    here.hosts.closed()
    first = weight.offset // 4
    assert (proposed[first : first + weight.elements] == 3).all()
    assert (proposed[: bias.elements] == 1).all()
