"""The book's algebra: a sample is free, out or counted, and only ever one of these."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.book import Book, ChapterBook, Runs, cut, merged, without

quick = settings(max_examples=80, deadline=None)
spots = st.sets(st.integers(0, 40), max_size=30)


def give_back_all(book: Book) -> None:
    """Whatever is out: those who had it are gone."""
    for epoch, runs in list(book._out.items()):
        book.give_back(epoch, runs)


def as_runs(positions: set[int]) -> list[range]:
    """Runs of one position each, which is as cut up as can be."""
    return [range(position, position + 1) for position in positions]


def again(state: ChapterBook) -> ChapterBook:
    """As it comes out of a file."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=ChapterBook)


def flat(runs: Runs | list[range]) -> list[int]:
    return [position for run in runs for position in run]


# -------------------------------------------------------------------------------- runs


@quick
@given(spots)
def test_merged_runs_are_few_and_in_order(positions: set[int]) -> None:
    runs = merged(as_runs(positions))
    assert flat(runs) == sorted(positions)
    assert all(before.stop < after.start for before, after in pairwise(runs))


@quick
@given(spots, spots)
def test_without_takes_away_exactly_what_is_there(positions: set[int], removed: set[int]) -> None:
    runs = as_runs(positions)
    if removed <= positions:
        assert flat(without(runs, merged(as_runs(removed)))) == sorted(positions - removed)
    else:
        with pytest.raises(ValueError, match="are not all there"):
            without(runs, merged(as_runs(removed)))


def test_an_empty_run_takes_nothing_away() -> None:
    assert without([range(10)], [range(5, 5), range(4, 6), range(50, 50)]) == [range(4), range(6, 10)]


def test_positions_that_are_there_twice_are_named() -> None:
    with pytest.raises(ValueError, match="positions 3 to 4 are there twice"):
        merged([range(10), range(3, 5)])


@quick
@given(spots, st.integers(1, 8))
def test_pieces_are_even_in_order_and_larger_first(positions: set[int], pieces: int) -> None:
    found = cut(merged(as_runs(positions)), pieces)
    sizes = [len(flat(piece)) for piece in found]
    assert len(found) == pieces
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    assert [position for piece in found for position in flat(piece)] == sorted(positions)
    assert all(run for piece in found for run in piece)


# -------------------------------------------------------------------------------- free, out, counted


@quick
@given(
    st.integers(0, 30),
    st.integers(0, 5),
    st.integers(0, 3),
    st.lists(st.tuples(st.sampled_from(["take", "take", "back", "commit", "load"]), st.integers(1, 12)), max_size=60),
)
def test_whatever_is_given_back_every_sample_is_counted_once(
    length: int, left_out: int, epochs: int, events: list[tuple[str, int]]
) -> None:
    left_out = min(left_out, length)
    book, out = Book(length, left_out=left_out), []
    counted: list[tuple[int, int]] = []

    def take(samples: int) -> bool:
        free = set(range(length - left_out)) if epochs else set()
        taken = book.take(samples, epochs)
        if taken is None:
            return False
        epoch, runs = taken
        gone = {at for other, held in out if other == epoch for at in flat(held)}
        gone |= {at for other, at in counted if other == epoch}
        assert flat(runs) == sorted(free - gone)[:samples]  # the first that are free
        out.append(taken)
        return True

    for kind, number in events:
        if kind == "take":
            take(number)
        elif kind == "load":
            give_back_all(book)
            out.clear()
            state = again(book.state())
            book = Book.load(state)
            assert book.state() == state
        elif out:
            epoch, runs = out.pop(number % len(out))
            if kind == "back":
                book.give_back(epoch, runs)
            else:
                book.commit(epoch, runs)
                counted.extend((epoch, at) for at in flat(runs))
        assert book.counted == len(counted)
        assert book.left(epochs) == (length - left_out) * epochs - len(counted)
        assert book.finished(epochs) == (book.left(epochs) == 0)
    give_back_all(book)
    out.clear()
    while take(7):
        epoch, runs = out.pop()
        book.commit(epoch, runs)
        counted.extend((epoch, at) for at in flat(runs))
    assert sorted(counted) == [(epoch, at) for epoch in range(epochs) for at in range(length - left_out)]
    assert book.finished(epochs)
    assert all(book.finished(epoch + 1) for epoch in range(epochs))
    assert book.rows() == [(epoch, 0, length - left_out) for epoch in range(epochs) if length > left_out]


def test_what_is_given_back_is_handed_out_before_the_next_epoch() -> None:
    book = Book(6)
    first, second = book.take(4, 2), book.take(4, 2)
    assert (first, second) == ((0, (range(4),)), (0, (range(4, 6),)))
    assert book.take(4, 1) is None
    assert book.take(4, 2, only_epoch=1) is None  # nobody has begun it
    assert book.take(4, 2) == (1, (range(4),))
    book.give_back(0, (range(4),))
    assert (book.free(0), book.free(1)) == (4, 2)
    assert book.take(2, 2, only_epoch=1) == (1, (range(4, 6),))
    assert book.take(2, 2) == (0, (range(2),))
    assert not book.finished(1)


def test_a_sample_cannot_be_counted_or_given_back_by_one_who_does_not_have_it() -> None:
    book = Book(10)
    book.take(4, 1)
    with pytest.raises(ValueError, match="positions 4 to 5 are not all there"):
        book.commit(0, [range(4, 6)])
    with pytest.raises(ValueError, match="positions 2 to 4 are not all there"):
        book.give_back(0, [range(2, 5)])
    with pytest.raises(ValueError, match="positions 3 to 4 are not all there"):
        book.take_these(0, [range(3, 5)])
    book.take_these(2, [range(3, 5)])
    assert book.take(10, 3) == (0, (range(4, 10),))


def test_what_is_left_out_may_change_in_epochs_that_are_not_finished() -> None:
    book = Book(10, left_out=2)
    for _ in range(2):
        taken = book.take(8, 2)
        assert taken is not None
        book.commit(*taken)
    book.take(4, 3)
    book.leave_out(0)
    assert book.finished(2)
    assert book.left(4) == 20
    assert book.take(10, 3) == (2, (range(4, 10),))
    state = again(book.state())
    assert Book.load(state).finished(2)
    assert Book.load(state).left(4) == 20
    book.commit(2, [range(9)])
    book.leave_out(1)
    book.give_back(2, [range(9, 10)])  # it was handed out, and counts as it would have
    assert book.left(4) == 1 + 9


def test_a_book_of_a_thousand_epochs_is_as_quick_as_that_of_one() -> None:
    book = Book(2)
    for epoch in range(1000):
        assert book.take(2, 5000) == (epoch, (range(2),))
        book.commit(epoch, [range(2)])
    assert book._finished == 1000
    assert book.finished(1000)
    assert not book.finished(1001)
