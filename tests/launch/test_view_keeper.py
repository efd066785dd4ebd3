"""How supervisors come from one view to the next: what they say to each other, and what is on their boards then."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from paceline.exchange.board import Board
from paceline.exchange.host_views import read_view
from paceline.exchange.words import HostWord, Word
from paceline.launch.host_messages import ViewMessage, ViewOpened, ViewProposed
from paceline.launch.view_keeper import MOST_FUTILE, ViewKeeper


class Hosts:
    """Supervisors that hear each other at once, with two rows each, and no processes."""

    def __init__(self, count: int, begin: int = 0, fewest: int = 1) -> None:
        """`begin`: with how many the run begins, if not with all."""
        self.count, self.mail = count, deque[tuple[int, Any]]()
        self.there = set(range(count))
        self.given_up: list[str] = []
        self.refused: list[tuple[int, str]] = []
        self.boards = [Board.create(2, supervised=True) for _ in range(count)]
        self.keepers = [
            ViewKeeper(host, count, 2, self._to_all(host), self._to_first, self.given_up.append, self._refuse, fewest)
            for host in range(count)
        ]
        for keeper, board in zip(self.keepers[: begin or count], self.boards, strict=False):
            keeper.begin(board, range(begin or count))

    def _to_all(self, sender: int) -> Any:
        return lambda message: self.mail.extend((host, message) for host in range(self.count) if host != sender)

    def _refuse(self, host: int, why: str) -> None:
        self.refused.append((host, why))

    def _to_first(self, message: ViewMessage) -> None:
        self.mail.append((0, message))

    def enter(self, *rows: tuple[int, int]) -> None:
        """These replicas enter the newest view they see."""
        for host, row in rows:
            self.boards[host].set(row, Word.ENTERED, self.boards[host].host_get(HostWord.VIEW))

    def kill(self, host: int, row: int) -> None:
        self.boards[host].declare_ended(row)
        self.keepers[host].look(self.boards[host], died=[row])
        self.settle()

    def settle(self) -> None:
        for host in self.there:
            self.keepers[host].look(self.boards[host])
        while self.mail:
            host, message = self.mail.popleft()
            if host in self.there:
                self.keepers[host].hear(message, self.boards[host])

    def counts(self, host: int) -> tuple[int, ...]:
        return read_view(self.boards[host], self.count)[0].counts

    def opened(self) -> list[int]:
        return [self.boards[host].host_get(HostWord.OPENED) for host in sorted(self.there)]


ALL = [(host, row) for host in range(3) for row in range(2)]


@pytest.fixture
def hosts() -> Hosts:
    """All are in the first view."""
    made = Hosts(3)
    made.enter(*ALL[:-1])
    made.settle()
    assert made.opened() == [0, 0, 0]  # one replica has not come yet
    made.enter(ALL[-1])
    made.settle()
    assert made.opened() == [1, 1, 1]
    return made


def test_a_view_without_the_dead_opens_when_all_others_have_left_the_one_before(hosts: Hosts) -> None:
    hosts.kill(1, 0)
    assert [hosts.counts(host) for host in range(3)] == [(2, 1, 2)] * 3
    assert hosts.opened() == [1, 1, 1]
    hosts.enter(*(row for row in ALL if row != (1, 0)))
    hosts.settle()
    assert hosts.opened() == [2, 2, 2]


def test_what_any_host_knows_to_be_decided_all_know_when_the_view_opens(hosts: Hosts) -> None:
    hosts.there.discard(2)
    hosts.keepers[0].lost(2, hosts.boards[0])
    hosts.boards[1].host_set(HostWord.DECIDED, 17)  # just before its replicas leave
    hosts.boards[2].host_set(HostWord.DECIDED, 18)  # it is gone, and so is what it knew
    hosts.settle()
    hosts.enter(*ALL[:4])
    hosts.settle()
    assert hosts.opened() == [2, 2]
    assert [hosts.boards[host].host_get(HostWord.DECIDED) for host in range(2)] == [17, 17]


def test_one_that_dies_while_others_enter_is_in_no_view_that_opens(hosts: Hosts) -> None:
    hosts.kill(1, 0)
    hosts.enter((0, 0), (0, 1), (1, 1), (2, 0))
    hosts.kill(2, 1)
    hosts.settle()
    assert hosts.opened() == [1, 1, 1]
    hosts.enter((0, 0), (0, 1), (1, 1), (2, 0))
    hosts.settle()
    assert hosts.opened() == [3, 3, 3]
    assert hosts.counts(0) == (2, 1, 1)


def test_a_host_whose_replicas_die_at_the_same_moment_is_in_no_view_that_opens(hosts: Hosts) -> None:
    for row in range(2):  # each was still alive when the one before was told of
        hosts.boards[1].declare_ended(row)
        hosts.keepers[1].look(hosts.boards[1], died=[row])
    hosts.settle()
    assert [hosts.counts(host) for host in range(3)] == [(2, 0, 2)] * 3
    hosts.enter((0, 0), (0, 1), (2, 0), (2, 1))
    hosts.settle()
    assert hosts.opened() == [3, 3, 3]


def test_one_whose_death_is_noticed_after_the_broken_link_is_in_no_view_that_opens(hosts: Hosts) -> None:
    hosts.boards[1].set(0, Word.VIEW_FAILED, 1)
    hosts.keepers[1].look(hosts.boards[1])
    hosts.kill(1, 1)
    assert [hosts.counts(host) for host in range(3)] == [(2, 1, 2)] * 3


def test_what_is_late_changes_nothing(hosts: Hosts) -> None:
    hosts.kill(1, 0)
    before = [hosts.counts(host) for host in range(3)]
    hosts.keepers[1].hear(ViewOpened(number=1, decided=99, store="elsewhere"), hosts.boards[1])
    assert hosts.boards[1].host_get(HostWord.DECIDED) == 0
    hosts.keepers[1].hear(ViewProposed(number=1, rows={0: [0]}), hosts.boards[1])
    assert [hosts.counts(host) for host in range(3)] == before


def test_links_that_break_again_and_again_though_nobody_dies_end_the_run(hosts: Hosts) -> None:
    for number in range(1, MOST_FUTILE + 2):
        assert not hosts.given_up
        hosts.boards[2].set(0, Word.VIEW_FAILED, number)
        hosts.settle()
        hosts.enter(*ALL)
        hosts.settle()
    assert ["do not reach each other" in sentence for sentence in hosts.given_up] == [True]


# ── joining ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def two_of_three() -> Hosts:
    """Hosts 0 and 1 are in the first view, at their first trainer; host 2 has come, and its replicas are ready."""
    made = Hosts(3, begin=2, fewest=2)
    made.enter(*ALL[:4])
    for board in made.boards:
        for row in range(2):
            board.set(row, Word.ARENAS, 1)
        board.host_set(HostWord.MODEL, 7)
    made.settle()
    assert [board.host_get(HostWord.HOSTS_READY) for board in made.boards] == [0, 0, 0]
    for row in range(2):
        made.boards[2].set(row, Word.JOINING, 1)
    return made


def let_in(hosts: Hosts, op: int) -> None:
    """A step of the view that hosts 0 and 1 are in is complete, and they leave it to let somebody in."""
    number = hosts.boards[0].host_get(HostWord.VIEW)
    for host, row in ALL[:4]:
        hosts.boards[host].set(row, Word.LETS_IN, op << 20 | number)
    hosts.settle()


def test_a_host_that_is_ready_is_in_the_view_after_a_step_and_knows_where_it_joins(two_of_three: Hosts) -> None:
    hosts = two_of_three
    hosts.settle()
    hosts.settle()
    assert [board.host_get(HostWord.HOSTS_READY) for board in hosts.boards[:2]] == [1, 1]
    let_in(hosts, 17)
    assert [hosts.counts(host) for host in range(3)] == [(2, 2, 2)] * 3
    assert hosts.boards[2].host_get(HostWord.JOIN_AT) == 18
    assert hosts.opened() == [1, 1, 0]
    hosts.enter(*ALL)
    hosts.settle()
    assert hosts.opened() == [2, 2, 2]
    assert hosts.keepers[0].take_joined() == [2]


def test_one_that_joins_is_still_new_in_the_view_after_if_somebody_dies_meanwhile(two_of_three: Hosts) -> None:
    hosts = two_of_three
    hosts.settle()
    hosts.settle()
    let_in(hosts, 17)
    hosts.boards[2].declare_ended(1)
    hosts.keepers[2].look(hosts.boards[2], died=[1])
    hosts.settle()
    assert [hosts.counts(host) for host in range(3)] == [(2, 2, 1)] * 3
    assert hosts.boards[2].host_get(HostWord.JOIN_AT) == 18
    hosts.enter(*ALL[:-1])
    hosts.settle()
    assert hosts.opened() == [3, 3, 3]


def test_one_that_dies_before_it_is_let_in_changes_nothing_but_the_number(two_of_three: Hosts) -> None:
    hosts = two_of_three
    hosts.settle()
    hosts.settle()
    hosts.there.discard(2)
    hosts.keepers[0].lost(2, hosts.boards[0])
    let_in(hosts, 17)
    hosts.enter(*ALL[:4])
    hosts.settle()
    assert hosts.opened() == [2, 2]
    assert hosts.counts(0) == (2, 2, 0)
    assert not hosts.given_up


@pytest.mark.parametrize(
    ("word", "why"),
    [
        (HostWord.CALLED, "the script calls pl.barrier, pl.mean, pl.gather or pl.broadcast"),
        (HostWord.MODEL, "its model or optimizer is another than that of the others"),
    ],
)
def test_one_that_never_can_be_let_in_is_sent_away(two_of_three: Hosts, word: HostWord, why: str) -> None:
    hosts = two_of_three
    hosts.boards[0].host_set(word, 1)
    hosts.settle()
    hosts.settle()
    ((host, sentence),) = hosts.refused
    assert (host, sentence.startswith(why)) == (2, True)
    assert hosts.boards[0].host_get(HostWord.HOSTS_READY) == 0


def test_a_run_with_fewer_hosts_than_it_asks_for_ends_with_a_sentence(two_of_three: Hosts) -> None:
    hosts = two_of_three
    hosts.there.discard(1)
    hosts.keepers[0].lost(1, hosts.boards[0])
    assert hosts.given_up == ["1 host is left, and --nnodes asks for 2 at least"]
