"""The board: what all replicas conclude from a few shared words."""

import time

import pytest

from paceline.errors import Stalled
from paceline.exchange.board import Board
from paceline.exchange.members import MemberLost
from paceline.exchange.together import Together
from paceline.exchange.words import HostWord, Kind, Phase, Word


@pytest.fixture
def board() -> Board:
    return Board.create(3, supervised=True)


def test_members_are_the_living_under_an_even_epoch(board: Board) -> None:
    members = board.members(0, 1)
    assert (members.ranks, members.epoch, members.first) == ((0, 1, 2), 0, 0)
    board.declare_ended(0)
    members = board.members(1, 1)
    assert (members.ranks, members.epoch, members.first) == ((1, 2), 2, 1)


def test_a_later_epoch_of_the_same_op_has_a_larger_tag_and_a_later_op_a_larger_one_still(board: Board) -> None:
    first = board.members(0, 7)
    board.declare_ended(2)
    second = board.members(0, 7)
    third = board.members(0, 8)
    assert first.tag < second.tag < third.tag


def test_who_arrived_before_it_died_has_done_its_part(board: Board) -> None:
    everybody = [board.members(rank, 1) for rank in range(3)]
    for members in everybody:
        board.work_on(members, Kind.STEP, Phase.COMPUTING)
        board.arrive(members)
    board.declare_ended(2)
    board.await_arrivals(everybody[0], Phase.AWAITING_GRADIENTS, timeout_s=1)


def test_who_died_before_it_arrived_is_lost_to_all_alike(board: Board) -> None:
    everybody = [board.members(rank, 1) for rank in range(3)]
    for members in everybody:
        board.work_on(members, Kind.STEP, Phase.COMPUTING)
    for members in everybody[:2]:
        board.arrive(members)
    board.declare_ended(2)
    for members in everybody[:2]:
        with pytest.raises(MemberLost):
            board.await_arrivals(members, Phase.AWAITING_GRADIENTS, timeout_s=1)


def test_who_works_under_a_later_epoch_takes_the_others_along(board: Board) -> None:
    old = [board.members(rank, 1) for rank in range(2)]
    for members in old:
        board.work_on(members, Kind.STEP, Phase.COMPUTING)
    board.declare_ended(2)
    board.work_on(board.members(1, 1), Kind.STEP, Phase.COMPUTING)
    board.arrive(board.members(1, 1))
    with pytest.raises(MemberLost):
        board.await_arrivals(old[0], Phase.AWAITING_GRADIENTS, timeout_s=1)


def test_a_replica_started_again_takes_part_from_the_op_after_it_was_admitted(board: Board) -> None:
    board.declare_ended(1)
    assert board.declare_started_again(1) == 3
    assert board.members(0, 5).ranks == (0, 2), "a process that has only been started does not count"
    assert not board.any_joining(0, 5)
    board.set(1, Word.JOINING, 3)
    assert board.any_joining(0, 5)
    board.admit_joining(0, 5)
    assert board.members(0, 5).ranks == (0, 2)
    assert board.members(0, 6).ranks == (0, 1, 2)
    assert board.any_joining(0, 5), "a second try of the same op must write the notes again"
    assert not board.any_joining(0, 6), "notes were overwritten while they were being read"


def test_one_that_was_admitted_speaks_when_all_others_have_died_before_it_took_part(board: Board) -> None:
    board.declare_ended(1)
    board.set(1, Word.JOINING, board.declare_started_again(1))
    board.admit_joining(0, 5)
    board.set(1, Word.OP, 5)  # as it has read in the notes
    together = Together(board, 1, timeout_s=1)
    assert not together.is_first()
    for rank in (0, 2):
        board.declare_ended(rank)
    assert together.is_first()


def test_a_joining_process_that_died_again_is_not_admitted(board: Board) -> None:
    board.declare_ended(1)
    board.set(1, Word.JOINING, board.declare_started_again(1))
    board.declare_ended(1)
    board.admit_joining(0, 5)
    assert board.members(0, 6).ranks == (0, 2)


def test_one_at_another_trainer_of_the_script_is_not_admitted(board: Board) -> None:
    board.declare_ended(1)
    board.set(1, Word.JOINING, board.declare_started_again(1))
    board.set(0, Word.ARENAS, 2)
    board.set(1, Word.ARENAS, 1)
    assert not board.any_joining(0, 5)


def test_replicas_that_make_different_calls_are_told_at_once(board: Board) -> None:
    mine, theirs = board.members(0, 4), board.members(1, 4)
    board.work_on(mine, Kind.STEP, Phase.COMPUTING)
    board.arrive(mine)
    board.work_on(theirs, Kind.EVALUATE, Phase.EVALUATING)
    with pytest.raises(Stalled, match="replica 0 takes a step while replica 1 evaluates"):
        board.await_arrivals(mine, Phase.AWAITING_GRADIENTS, timeout_s=5)


def test_a_wait_that_passes_its_deadline_says_who_waits_for_whom(board: Board) -> None:
    board.enter(1, Phase.COMPUTING)
    board.set(1, Word.STEP, 12)
    board.enter(2, Phase.LOADING)
    with pytest.raises(Stalled) as stalled:
        board.wait(0, Phase.AWAITING_GRADIENTS, lambda: False, timeout_s=0.05)
    assert "replica 0 gave up after 0.05 s: replica 0 waits for gradients" in str(stalled.value)
    assert "replica 1 is computing step 12" in str(stalled.value)


def test_a_long_wait_sleeps_instead_of_burning_its_core(board: Board) -> None:
    cpu, wall = time.process_time(), time.monotonic()
    with pytest.raises(Stalled):
        board.wait(0, Phase.AWAITING_GRADIENTS, lambda: False, timeout_s=0.5)
    assert time.monotonic() - wall >= 0.5
    assert time.process_time() - cpu < 0.2


def test_a_wait_leaves_the_phase_as_it_was(board: Board) -> None:
    board.enter(0, Phase.COMPUTING)
    looks = iter([False, False, True])
    board.wait(0, Phase.AWAITING_STATISTICS, lambda: next(looks), timeout_s=1)
    assert board.get(0, Word.PHASE) == Phase.COMPUTING


def test_one_row_can_be_a_board_of_its_own(board: Board) -> None:
    own = Board(board.descriptor, only_row=2)
    assert (own.replicas, own.members(0, 1).ranks) == (1, (0,))
    own.set(0, Word.STEP, 9)
    assert board.get(2, Word.STEP) == 9
    assert own.host_get(HostWord.REPLICAS) == 3
