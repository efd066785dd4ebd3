"""Replicas and views: ops of one host alone, one consistent look, whom a sentence names, and a store that is gone."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
import torch

from paceline.errors import Stalled
from paceline.exchange.board import Board
from paceline.exchange.host_views import HostViews, propose_view
from paceline.exchange.links import LinkLost, Links, open_store
from paceline.exchange.members import HostsView, Members
from paceline.exchange.other_hosts import OtherHosts
from paceline.exchange.together import Together
from paceline.exchange.words import HostWord, Kind, Phase, Word


def views_of(board: Board, row: int) -> HostViews:
    return HostViews(board, row, 0, 2, 20.0, lambda: "nowhere:1")


def test_who_has_arrived_at_an_op_of_its_host_goes_on_whatever_happens_on_others() -> None:
    """One has arrived and waits when the view changes, the other arrives later: neither leaves the op for a new try."""
    board = Board.create(2, supervised=True)
    propose_view(board, HostsView(1, (2, 2)), [0, 1])
    board.host_set(HostWord.OPENED, 1)
    both = [Together(board, row, 20.0, views_of(board, row)) for row in range(2)]
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(both[0].meet, Kind.BUILD, Phase.AWAITING_ARENA)
        while board.get(0, Word.PHASE) != Phase.AWAITING_ARENA:
            pass
        propose_view(board, HostsView(2, (2, 0)), [0, 1])  # nobody will enter it before this op is over
        second = threads.submit(both[1].meet, Kind.BUILD, Phase.AWAITING_ARENA)
        assert [done.result(timeout=20).op for done in (first, second)] == [1, 1]
    assert [board.get(row, Word.RETRIES) for row in range(2)] == [0, 0]


def test_rows_and_counts_are_of_one_view_also_while_the_next_is_written() -> None:
    board, over = Board.create(2, supervised=True), threading.Event()

    def propose() -> None:
        for number in itertools.count(1):
            propose_view(board, HostsView(number, (1 + number % 2, 1)), range(1 + number % 2))
            if over.is_set():
                return

    views = views_of(board, 0)
    writer = threading.Thread(target=propose)
    writer.start()
    seen: set[int] = set()
    try:
        while len(seen) < 20:  # however seldom this thread has its turn
            members = views.coming(1)
            assert members.view is not None
            assert (len(members.ranks), members.view.counts[0]) == (1 + members.epoch % 2,) * 2
            seen.add(members.epoch)
    finally:
        over.set()
        writer.join()


class Told:
    """Links over which the other host has told that it evaluates."""

    def __init__(self, host: int, hosts: int) -> None:
        self.host, self.hosts, self.look = host, hosts, lambda: None
        self.said: list[tuple[int, str]] = []

    def tell(self, lane: int, what: str) -> None:
        self.said.append((lane, what))

    def told(self, lane: int) -> list[tuple[int, str]]:
        return [(1 - self.host, f"3 {Kind.EVALUATE:d}")]


@pytest.mark.parametrize(
    ("counts", "other"), [((1, 0, 1), "replica 2"), ((1, 1, 1), "replica 1"), ((2, 0, 1), "a replica of host 2")]
)
def test_a_sentence_names_the_replica_that_is_meant_though_a_host_between_is_gone(
    counts: tuple[int, ...], other: str
) -> None:
    board = Board.create(max(counts), supervised=True)
    members = Members(3, 4, tuple(range(counts[0])), 0, HostsView(4, counts))
    board.work_on(members, Kind.STEP, Phase.COMPUTING)
    links = Told(0, 2)
    others = OtherHosts(Together(board, 0, 20.0), cast(Links, links), members)
    with pytest.raises(Stalled, match=f"^replica 0 takes a step while {other} evaluates"):
        others.look()


def test_the_like_on_another_host_hears_it_whichever_row_it_has() -> None:
    """This host has lost its row 0: row 1 has the first lane, as row 0 has elsewhere."""
    board = Board.create(2, supervised=True)
    members = Members(3, 4, (1,), 1, HostsView(4, (1, 2)))
    board.work_on(members, Kind.EVALUATE, Phase.COMPUTING)
    links = Told(0, 2)
    OtherHosts(Together(board, 1, 20.0), cast(Links, links), members).look()
    assert links.said == [(0, f"3 {Kind.EVALUATE:d}")]


SERVES = "from paceline.exchange.links import serve_store; print(serve_store('127.0.0.1'), flush=True); input()"


def test_a_store_that_is_gone_is_a_link_that_is_lost() -> None:
    """It is served by a replica, which may die at any moment: the others find out before they are told."""
    with subprocess.Popen([sys.executable, "-c", SERVES], stdin=-1, stdout=-1, text=True) as serving:
        assert serving.stdout is not None
        store = open_store(serving.stdout.readline().strip(), serve=False, timeout_s=20)
        links = Links(store, "links", 0, 1, 20.0, torch.device("cpu"))
        links.hosts = 2  # of whom the other has told nothing
        links.tell(0, "here")
        serving.kill()
        serving.wait()
        with contextlib.suppress(LinkLost):
            links.tell(0, "still here")  # which may find its way into a buffer
        with pytest.raises(LinkLost):
            links.told(0)
