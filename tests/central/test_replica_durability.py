"""`--durability replica`: a share that is lost with its process comes back from the server that keeps its copy."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from checksum import largest_difference
from conftest import Run, Start
from test_recovery import Training, killed_at_once
from test_server_faults import END_S, SCRIPT, check_end, check_nothing_left, kills

from paceline.central.chief.tickets import Accepted, Close
from paceline.central.durability import peer_journal
from paceline.central.durability.backup import Backup, KeptShare
from paceline.central.durability.peer_journal import KeptBy, Link, PeerJournal
from paceline.central.durability.recovery import keep, recover
from paceline.central.durability.snapshot import save, waiting, whole
from paceline.central.messages import replies, requests
from paceline.central.messages.records import Made, Pushed
from paceline.central.server.server import Server
from paceline.central.shards import plain_options
from paceline.errors import CheckpointError, PacelineError, StrategyError
from paceline.rules import Async, Sync
from paceline.strategy import Centralized

TOKEN = "a token that nobody can guess"


class Next:
    """The next server of the ring, as a thread of this process; its memory can be lost."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.server = Server(self._listener, token=TOKEN, say=lambda line: None)
        self._thread = threading.Thread(target=self.server.run)
        self._thread.start()

    def forgets(self) -> None:
        self.server.backup = Backup()

    def close(self) -> None:
        self.server.stop()
        self._thread.join()
        self._listener.close()


class Kept(Training):
    """A chief whose share is kept by another server, and what its replicas would do."""

    name, durability, servers = "main", "replica", 2
    shapes = ((300, 1000), (7,))  # something for both
    address = ""  # of the other one

    def keep(self, **how: Any) -> None:
        self.said: list[str] = []
        self.container.addresses = ["127.0.0.1:1", self.address]
        keep(self.share, self.folder, self.connect, self.said.append)

    @property
    def journal(self) -> PeerJournal:
        assert isinstance(self.container.journal, PeerJournal)
        return self.container.journal

    def connect(self, address: str, who: str, name: str, timeout_s: float) -> Link:
        return Link(address, token=TOKEN, keys=None, who=who, name=name, timeout_s=timeout_s)

    def killed(self) -> None:
        """All that is left is with the other server: go on from there."""
        (self.share,) = recover(self.folder, lambda *_: [], self.connect, self.said.append)
        keep(self.share, self.folder, self.connect, self.said.append)


@pytest.fixture
def next_one() -> Iterator[Next]:
    with contextlib.closing(Next()) as server:
        yield server


@pytest.fixture
def train(next_one: Next, tmp_path: Path) -> Iterator[Callable[..., Kept]]:
    with contextlib.ExitStack() as links:

        class Here(Kept):
            address = next_one.server.address

            def connect(self, *given: Any) -> Link:
                return links.enter_context(contextlib.closing(super().connect(*given)))

        yield lambda *given, **how: Here(tmp_path, *given, **how)


# ── what comes back ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("rule", "optimizer", "tables"), [("scale", "Adam", True), ("compensate:0.5", "SGD", False)])
def test_every_bit_comes_back(train: Callable[..., Kept], rule: str, optimizer: str, *, tables: bool) -> None:
    training = train(Async(stale=rule), optimizer, tables=tables)
    training.train(4)
    killed_at_once(training)
    training.train(3)
    training.training.set_rule(Async(bound=2))
    killed_at_once(training)
    killed_at_once(training)
    assert training.container.step == 14


def test_a_gradient_that_waits_is_there_again_and_nothing_is_accepted_twice(train: Callable[..., Kept]) -> None:
    training = train(Async(), tables=True)
    training.train(2)
    done, held = training.ask(0), training.ask(1)
    training.push(0, done)
    told = training.report(0, done)
    training.push(1, held)
    gradient = training.container.arena.gradients[1].clone()
    ((pushed, _),) = waiting(training.container)
    training.killed()
    assert torch.equal(training.container.arena.gradients[1], gradient)
    assert [found for found, _ in waiting(training.container)] == [pushed]
    assert training.report(0, done).accepted == told.accepted == 4
    assert training.report(1, held).accepted is None  # it was in no step: its samples are free again
    assert training.container.step == 5


def test_a_copy_that_was_lost_is_sent_again_before_a_push_is_acknowledged(
    train: Callable[..., Kept], next_one: Next
) -> None:
    training = train(Async(), tables=True)
    training.train(2)
    next_one.forgets()
    ticket = training.ask(0)
    training.push(0, ticket)
    assert next_one.server.backup.held == [("main", 0)]
    assert [line.split(":")[0] for line in training.said] == [
        "server 1 was lost, or started again",
        "a copy of server 0's share of container 'main' is on server 1 again",
    ]
    assert "is not protected, and no push is acknowledged" in training.said[0]
    killed_at_once(training)
    training.train(2)
    killed_at_once(training)


def test_a_copy_that_was_lost_is_sent_again_also_when_nobody_pushes(
    train: Callable[..., Kept], next_one: Next, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = train(Async())
    training.train(1)
    next_one.forgets()
    monkeypatch.setattr(peer_journal, "ASK_EVERY_S", 0.0)
    end = time.monotonic() + 20
    while not next_one.server.backup.held:
        training.journal.look()  # as the server does
        assert time.monotonic() < end
        time.sleep(0.01)
    killed_at_once(training)


@pytest.mark.parametrize("lost", ["before", "after"])
def test_a_step_that_was_decided_is_not_forgotten_by_a_new_copy(
    train: Callable[..., Kept], next_one: Next, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """The new copy may be taken between a step's decision, which other servers act on, and its making here."""
    monkeypatch.setattr(peer_journal, "MOST_BYTES_AT_ONCE", 1)
    training = train(Async(stale="compensate:0.5"))
    training.train(1)
    ticket = training.ask(0)
    training.push(0, ticket)
    accepted = Accepted(ticket.ticket, 0, 1.0, 4, 1, ticket.epoch, list(ticket.runs))
    close = Close(training.container.step, 0, 4, 0.5, [accepted], compensation=0.5)
    made = Made(
        close=close,
        options=[plain_options(group) for group in training.optimizer.param_groups],
        scale=1.0,
        chapter=(40, 4, 0),
    )
    buffers = [memoryview(bytes(part)) for part in training.runs.extras.buffers.packed()]
    if lost == "before":
        next_one.forgets()
    training.container.note(made, buffers)
    training.journal.flush()
    if lost == "after":
        next_one.forgets()
        training.journal.write(Pushed(replica=1, incarnation=1, ticket=99, untouched=[]), _gradient(training))
        training.journal.flush()
    training.container.apply(close, made.options, noted=True)
    expected = training.container.copy()
    training.killed()
    assert training.container.step == training.training.state.chief.step == close.step + 1
    assert torch.equal(training.container.arena.parameters, expected.parameters)


def test_a_step_that_was_made_is_not_made_again_after_a_checkpoint_was_loaded(train: Callable[..., Kept]) -> None:
    training = train(Async())
    training.train(2)
    training.container.fill(3)  # as a checkpoint of one step before
    save(training.share, wait=True)
    training.journal.flush()
    training.killed()
    assert training.container.step == 3


def _gradient(training: Kept) -> list[memoryview]:
    return [training.container.arena.gradients[1].numpy().data]


def test_what_was_acknowledged_is_given_back_also_if_the_copy_has_not_gone_through_it(
    train: Callable[..., Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = train(Async())
    training.train(2)
    ticket = training.ask(1)
    monkeypatch.setattr(KeptShare, "settle", lambda self: None)
    training.push(1, ticket)
    gradient = training.container.arena.gradients[1].clone()
    training.killed()
    assert [pushed.ticket for pushed, _ in waiting(training.container)] == [ticket.ticket]
    assert torch.equal(training.container.arena.gradients[1], gradient)


def test_the_last_step_comes_back_for_servers_that_may_lack_it(train: Callable[..., Kept]) -> None:
    training = train(Async())
    training.train(2)
    training.killed()
    last = training.runs.closer.last
    assert last is not None
    assert last.close.step == 3


# ── who may write ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_process_that_was_followed_by_another_cannot_write(train: Callable[..., Kept]) -> None:
    training = train(Async())
    training.train(1)
    stale = training.journal
    training.killed()
    before = training.state()
    stale.write(Pushed(replica=0, incarnation=1, ticket=99, untouched=[]), _gradient(training))
    with pytest.raises(PacelineError, match="server 0 was started again since: this process no longer takes part"):
        stale.flush()
    with stale.lock:
        stale.snapshot(*whole(training.share), wait=True)
    with pytest.raises(PacelineError):
        stale.flush()
    training.killed()
    assert training.state() == before


def test_records_that_are_sent_twice_are_taken_once(train: Callable[..., Kept]) -> None:
    training = train(Async())
    training.train(2)
    kept_by = training.journal._kept_by
    whose: dict[str, Any] = {"container": "main", "server": 0, "incarnation": kept_by.incarnation}
    link = kept_by.connect(training.connect)
    pushed = Pushed(replica=1, incarnation=1, ticket=98, untouched=[])
    body = _gradient(training)
    position = training.journal._position
    later = msgspec.structs.replace(pushed, ticket=99)
    for before, record in ((0, pushed), (1, later), (0, pushed), (1, later), (0, pushed)):
        sent = requests.Keep(**whose, position=position + before, records=[record], lengths=[body[0].nbytes])
        link.call(sent, replies.Done, body=lambda: body)
    gap = requests.Keep(**whose, position=position + 3, records=[pushed], lengths=[body[0].nbytes])
    link.call(gap, replies.Missing, body=lambda: body)
    kept: replies.Kept = link.call(
        requests.Fetch(**whose), replies.Kept, read=lambda channel, length: channel.skip_body()
    )
    assert kept.position == position + 2
    assert 99 in [waits.ticket for waits in kept.notes.waiting]
    link.close()


# ── what cannot go on ────────────────────────────────────────────────────────────────────────────────────────


def test_without_its_copy_a_share_is_gone_and_that_is_one_sentence(train: Callable[..., Kept], next_one: Next) -> None:
    training = train(Async())
    next_one.forgets()
    with pytest.raises(PacelineError, match=r"the share of server 0 of container 'main' is gone: server 1, which"):
        training.killed()


def test_any_change_of_the_note_where_the_copy_is_is_found(tmp_path: Path) -> None:
    KeptBy("main", 0, ["127.0.0.1:1", "127.0.0.1:2"], 600.0, 1234).write(tmp_path)
    path = tmp_path / "kept-by"
    content = path.read_bytes()
    assert KeptBy.read(tmp_path).incarnation == 1234
    changed = [content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :] for place in range(len(content))]
    for damaged in (*changed, *(content[:length] for length in range(len(content)))):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"kept-by is damaged: "):
            KeptBy.read(tmp_path)


def test_a_wait_for_the_other_server_ends_and_says_who_waits_for_whom(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = listener.getsockname()[1]

    class Alone(Kept):
        address, timeout_s = f"127.0.0.1:{free}", 0.3

    with pytest.raises(PacelineError, match=r"server 0 waited 0.27 s for server 1, which keeps its copy, at 127.0.0.1"):
        Alone(tmp_path, Async())


def test_a_container_that_is_dropped_leaves_no_copy(train: Callable[..., Kept], next_one: Next) -> None:
    training = train(Async())
    assert next_one.server.backup.held
    training.journal.remove()
    assert not next_one.server.backup.held
    assert not list(training.folder.iterdir())


def test_one_server_has_nobody_to_keep_its_copy() -> None:
    with pytest.raises(StrategyError, match="durability is 'replica': it needs another server, give --servers 2"):
        Centralized(replicas=2, servers=1, durability="replica", rule=Sync())


# ── runs, and kills ──────────────────────────────────────────────────────────────────────────────────────────

REPLICA = "--servers 2 --durability replica --max-restarts 100"
# No kill comes before the copies are there again: no push is acknowledged without.
CASES = {
    "servers in turn, and a replica": (
        "--on-failure restart",
        [("server 0", 2, "after push"), ("server 1", 6, "forward"), ("replica 1", 9, "forward")],
    ),
    "servers over tcp": ("--exchange tcp", [("server 1", 3, "after push"), ("server 0", 7, "forward")]),
    "servers before a push": ("", [("server 0", 3, "before push"), ("server 1", 8, "before push")]),
    "servers in an evaluation": ("", [("server 0", 5, "evaluation"), ("server 1", 10, "evaluation")]),
    "servers at the start": ("", [("server 0", 0, "forward"), ("server 1", 2, "between")]),
    "a replica and the chief": ("--on-failure restart", [("replica 0,server 0", 6, "after push")]),
}
IN_EVERY_TEST_RUN = ("servers in turn, and a replica",)


@pytest.fixture(scope="module")
def unkilled(start: Start) -> Run:
    """In one process: a sync run comes to the same."""
    return start(SCRIPT, None).fine(END_S)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "case", [case if case in IN_EVERY_TEST_RUN else pytest.param(case, marks=pytest.mark.soak) for case in CASES]
)
def test_a_sync_run_ends_as_if_nobody_had_been_killed(start: Start, unkilled: Run, case: str) -> None:
    flags, given = CASES[case]
    run = start(SCRIPT, f"--replicas 2 {REPLICA} {flags}", kills(*given)).fine(END_S)
    for replica in check_end(run, len(given)):
        assert run.told("evaluations", replica) == pytest.approx(unkilled.told("evaluations"), rel=1e-4)
        assert run.told("steps", replica) == 15
    assert largest_difference(unkilled.folder / "last.safetensors", run.folder / "last.safetensors") < 1e-4
    logs = [(run.path / f"server-{server}.log").read_text() for server in range(2)]
    for server in {name for names, _, _ in given for name in names.split(",") if name.startswith("server")}:
        other = logs[1 - int(server[-1])]
        assert f"{server} was lost, or started again" in other
        assert f"is on {server} again" in other


SOME = [("server 0", 2, "forward"), ("server 1", 5, "after push"), ("replica 1", 8, "forward")]


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("flags", ["--replicas 3 --accept 2", "--replicas 2 --async --exchange tcp --stale compensate"])
def test_other_rules_count_every_sample_once_and_learn_the_same(start: Start, unkilled: Run, flags: str) -> None:
    run = start(SCRIPT, f"{flags} {REPLICA} --on-failure restart", kills(*SOME)).fine(END_S)
    for replica in check_end(run, len(SOME)):
        assert run.told("evaluations", replica)[-1] == pytest.approx(unkilled.told("evaluations")[-1], rel=0.1)


def test_when_both_die_the_run_ends_and_says_that_the_state_is_gone(start: Start) -> None:
    run = start(SCRIPT, f"--replicas 2 {REPLICA}", kills(("server 0,server 1", 2, "forward"))).end(END_S)
    assert run.code == 1
    assert "is gone: server" in run.err
    assert "which had its copy, has ended as well; remove" in run.err
    assert "Traceback" not in run.err
    check_nothing_left(run)
