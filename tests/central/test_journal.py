"""The journal alone: what was written is read again, torn ends are cut, damage is refused, disks fill."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_mutations import records_of

from paceline.central.chief.tasks import OnceTask
from paceline.central.chief.tickets import Accepted, Close
from paceline.central.durability.log_journal import LogJournal
from paceline.central.messages.notes import ShareNotes
from paceline.central.messages.records import AnyRecord, Made, MembersChanged, Pushed, RuleSet, TaskResult
from paceline.central.messages.settings import Settings
from paceline.central.shards import OptimizerSpec, Spec
from paceline.errors import CheckpointError, PacelineError
from paceline.rules import Async

NOTES = ShareNotes(
    name="main",
    server=0,
    addresses=[],
    spec=Spec([], OptimizerSpec("SGD", []), 1),
    settings=Settings(replicas=1),
    step=7,
    numbers=[(0, "step", float("nan"))],
    table_steps=[],
    waiting=[],
    incarnations={},
    used={},
)
CLOSE = Close(3, 0, 12, float("nan"), [Accepted(5, 1, 0.5, 6, 2, 0, [(0, 6)])], compensation=0.04)
RECORDS: list[tuple[AnyRecord, bytes]] = [
    (Pushed(replica=1, incarnation=3, ticket=5, untouched=[2, 4], rows=[7]), b"gradient" * 100),
    (Made(close=CLOSE, options=[{"lr": 0.1, "betas": [0.9, None]}], scale=0.25, chapter=(60, 12, 0)), b""),
    (TaskResult(key=OnceTask(1), values=[1.5, float("inf")]), b""),
    (RuleSet(rule=Async(bound=3, stale="scale")), b""),
    (MembersChanged(members={0: 1, 3: 5}), b""),
]


BEGUN: list[LogJournal] = []


@pytest.fixture(scope="module", autouse=True)
def _close() -> Iterator[None]:
    """Most journals here are those of a process that was killed: nobody closes them."""
    yield
    for journal in BEGUN:
        journal.close()


def begun(folder: Path, **how: object) -> LogJournal:
    journal = LogJournal(folder, **how)  # type: ignore[arg-type]
    BEGUN.append(journal)
    snapshot(journal, 0.0)
    return journal


def snapshot(journal: LogJournal, value: float, *, wait: bool = True) -> None:
    with journal.lock:
        journal.snapshot({"parameters": torch.full((3,), value)}, NOTES, wait=wait)


def append(journal: LogJournal, records: list[tuple[AnyRecord, bytes]]) -> None:
    for record, body in records:
        journal.append(record, [memoryview(body)] if body else [])


def read(folder: Path) -> tuple[float, list[tuple[AnyRecord, bytes]]]:
    journal = LogJournal(folder)
    found = journal.read_snapshot()
    assert found is not None
    records = [(record, bytes(body)) for record, body in journal.records()]
    journal.close()
    return float(found[0]["parameters"][0]), records


def same(found: list[tuple[AnyRecord, bytes]], expected: list[tuple[AnyRecord, bytes]]) -> bool:
    return repr(found) == repr(expected)  # a loss that is no number equals none


def only_log(folder: Path) -> Path:
    (path,) = folder.glob("log-*")
    return path


def test_everything_is_read_as_it_was_written(tmp_path: Path) -> None:
    journal = begun(tmp_path)
    append(journal, RECORDS)
    value, records = read(tmp_path)  # the process before was killed: nothing was closed
    assert value == 0.0
    assert same(records, RECORDS)


def test_what_is_written_after_a_restart_follows_what_was_there(tmp_path: Path) -> None:
    append(begun(tmp_path), RECORDS[:2])
    again = LogJournal(tmp_path)
    again.read_snapshot()
    assert len(list(again.records())) == 2
    append(again, RECORDS[2:])
    assert same(read(tmp_path)[1], RECORDS)


def test_nothing_is_written_before_there_is_a_snapshot(tmp_path: Path) -> None:
    journal = LogJournal(tmp_path / "none")
    append(journal, RECORDS)
    assert journal.read_snapshot() is None
    assert not (tmp_path / "none").exists()


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(1, 400), whole=st.integers(0, 4))
def test_a_record_that_the_file_ends_in_the_middle_of_is_cut_off(
    tmp_path_factory: pytest.TempPathFactory, cut: int, whole: int
) -> None:
    folder = tmp_path_factory.mktemp("torn")
    journal = begun(folder)
    append(journal, RECORDS[:whole])
    length, mark = only_log(folder).stat().st_size, (folder / "mark").read_bytes()
    append(journal, RECORDS[whole : whole + 1])
    torn = min(cut, only_log(folder).stat().st_size - length - 1)
    os.truncate(only_log(folder), length + torn)
    (folder / "mark").write_bytes(mark)  # which follows a record that is whole
    assert same(read(folder)[1], RECORDS[:whole])
    assert only_log(folder).stat().st_size == length


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damage_anywhere_is_refused_with_the_name_of_the_file(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    append(begun(folder), RECORDS)
    path = only_log(folder)
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"log-1 is damaged at byte \d+"):
        read(folder)


def test_a_damaged_snapshot_is_refused_with_its_name(tmp_path: Path) -> None:
    """A flipped bit anywhere, in its notes or in its numbers; or something else altogether."""
    begun(tmp_path)
    path = tmp_path / "snapshot-1"
    whole = path.read_bytes()
    damaged = [bytearray(whole) for _ in range(0, len(whole), 7)]
    for number, content in enumerate(damaged):
        content[7 * number] ^= 1
    for content in (b"nonsense", *damaged, whole[:-1]):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"snapshot-1 is damaged"):
            read(tmp_path)


@pytest.mark.parametrize("how", ["removed", "emptied", "without its last record"])
def test_a_log_that_lacks_what_was_acknowledged_is_refused(tmp_path: Path, how: str) -> None:
    journal = begun(tmp_path)
    append(journal, RECORDS[:3])
    log = only_log(tmp_path)
    shorter = log.stat().st_size
    append(journal, RECORDS[3:])
    if how == "removed":
        log.unlink()
    else:
        os.truncate(log, shorter if how == "without its last record" else 0)
    with pytest.raises(CheckpointError, match="log-1"):
        read(tmp_path)


@pytest.mark.parametrize("how", ["exchanged", "there twice, and another not at all"])
def test_whole_records_in_the_place_of_others_are_refused(tmp_path: Path, how: str) -> None:
    append(begun(tmp_path), RECORDS)
    one, two, *others = records_of(only_log(tmp_path))
    first = [two, one] if how == "exchanged" else [one, one]
    only_log(tmp_path).write_bytes(b"".join([*first, *others]))
    with pytest.raises(CheckpointError, match=r"log-1 is damaged at byte \d+: record \d is there, and \d should be"):
        read(tmp_path)


# ── snapshots ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_snapshot_takes_the_place_of_the_log(tmp_path: Path) -> None:
    journal = begun(tmp_path)
    append(journal, RECORDS[:3])
    snapshot(journal, 1.0)
    append(journal, RECORDS[3:])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log-2", "mark", "snapshot-2"]
    value, records = read(tmp_path)
    assert value == 1.0
    assert same(records, RECORDS[3:])


def test_a_death_before_the_snapshot_is_there_costs_nothing(tmp_path: Path) -> None:
    journal = begun(tmp_path)
    append(journal, RECORDS[:3])
    kept = {path: path.read_bytes() for path in tmp_path.iterdir()}
    snapshot(journal, 1.0)
    append(journal, RECORDS[3:])
    # As if it had died while the snapshot was written.
    (tmp_path / "snapshot-2").rename(tmp_path / "snapshot-2.tmp")
    for path, content in kept.items():
        path.write_bytes(content)
    value, records = read(tmp_path)
    assert value == 0.0
    assert same(records, RECORDS)


def test_a_log_that_others_follow_must_be_whole(tmp_path: Path) -> None:
    journal = begun(tmp_path)
    append(journal, RECORDS[:3])
    kept = {path: path.read_bytes() for path in tmp_path.iterdir()}
    snapshot(journal, 1.0)
    (tmp_path / "snapshot-2").unlink()
    for path, content in kept.items():
        path.write_bytes(content[:-1] if path.name == "log-1" else content)
    with pytest.raises(CheckpointError, match=r"log-1 is damaged .* newer log"):
        read(tmp_path)


def test_a_snapshot_is_due_by_bytes_and_by_steps(tmp_path: Path) -> None:
    by_bytes = begun(tmp_path / "bytes", log_bytes=1000)
    append(by_bytes, RECORDS[:1])
    assert not by_bytes.due
    append(by_bytes, RECORDS[:1])
    assert by_bytes.due
    snapshot(by_bytes, 1.0, wait=False)
    assert not by_bytes.due
    by_bytes.close()
    by_steps = begun(tmp_path / "steps", log_steps=2)
    append(by_steps, [*RECORDS, RECORDS[1]])
    assert by_steps.due


# ── disks ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_full_disk_is_one_sentence_and_loses_nothing_that_was_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = begun(tmp_path)
    append(journal, RECORDS[:2])
    write = os.pwrite

    def full(descriptor: int, content: memoryview, offset: int) -> int:
        if len(content) > 300:
            return write(descriptor, content[:300], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(PacelineError, match=r"cannot be written \(No space left on device\): make room there"):
            append(journal, [(RECORDS[0][0], b"x" * 1000)])
    append(journal, RECORDS[2:])  # there is room again
    assert same(read(tmp_path)[1], RECORDS)


@contextlib.contextmanager
def disk_of(room: int) -> Iterator[None]:
    """No file of this process becomes longer than that."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_after_a_snapshot_that_had_to_be_there_and_is_not_nothing_is_acknowledged(tmp_path: Path) -> None:
    journal = begun(tmp_path)
    append(journal, RECORDS[:2])
    with disk_of(100), pytest.raises(PacelineError, match=r"cannot be written \(File too large\)"):
        snapshot(journal, 1.0)  # as a checkpoint that is loaded: no record has what is in it
    with pytest.raises(PacelineError, match=r"cannot be written \(File too large\)"):
        append(journal, RECORDS[2:])
    value, records = read(tmp_path)
    assert value == 0.0
    assert same(records, RECORDS[:2])
    snapshot(journal, 2.0)  # there is room again
    append(journal, RECORDS[2:])
    value, records = read(tmp_path)
    assert value == 2.0
    assert same(records, RECORDS[2:])


def test_a_snapshot_that_nobody_waits_for_may_fail_and_nothing_is_lost(tmp_path: Path) -> None:
    journal = begun(tmp_path)
    append(journal, RECORDS[:2])
    with disk_of(100):
        snapshot(journal, 0.0, wait=False)
        assert journal._writer is not None
        journal._writer.join()
    append(journal, RECORDS[2:])
    value, records = read(tmp_path)
    assert value == 0.0
    assert same(records, RECORDS)
    assert not list(tmp_path.glob("*.tmp"))


def test_many_threads_write_and_each_finds_its_records(tmp_path: Path) -> None:
    journal = begun(tmp_path)

    def write(number: int) -> None:
        for ticket in range(20):
            append(journal, [(Pushed(replica=number, incarnation=1, ticket=ticket, untouched=[]), b"g" * 5000)])

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    written = [(record.replica, record.ticket) for record, _ in read(tmp_path)[1] if isinstance(record, Pushed)]
    assert sorted(written) == [(number, ticket) for number in range(8) for ticket in range(20)]
    for number in range(8):
        assert [ticket for replica, ticket in written if replica == number] == list(range(20))


def test_a_snapshot_that_is_waited_for_comes_after_one_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, go_on, plain = begun(tmp_path), threading.Event(), os.fsync

    def slow(descriptor: int) -> None:
        go_on.wait(30)
        plain(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    snapshot(journal, 1.0, wait=False)
    waits = threading.Thread(target=lambda: snapshot(journal, 2.0), daemon=True)  # which holds the journal's lock
    waits.start()
    time.sleep(0.1)
    go_on.set()
    waits.join(10)
    assert not waits.is_alive(), "each waits for the other"
    assert read(tmp_path)[0] == 2.0
