"""A container that comes back from its journal is the one that was there: bits, books, and what waits in it."""

from __future__ import annotations

import shutil
import socket
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace
from torch import nn

from paceline.central.chief.tasks import EvaluationTask
from paceline.central.chief.tickets import Accepted, Close
from paceline.central.container.container import Container
from paceline.central.container.journal import Journal
from paceline.central.container.runs import ContainerRuns, Share
from paceline.central.container.training import ContainerTraining
from paceline.central.durability.log_journal import LogJournal
from paceline.central.durability.recovery import keep, recover
from paceline.central.durability.snapshot import save, waiting, whole
from paceline.central.messages.notes import ShareNotes
from paceline.central.messages.records import AnyRecord, Made, MembersChanged, PulledCopy, Pushed, RowsPut
from paceline.central.messages.replies import Settled, Ticket
from paceline.central.messages.requests import Ask, Report, Task, TaskDone
from paceline.central.messages.settings import Settings
from paceline.central.server.server import Server
from paceline.central.shards import describe, plain_options
from paceline.central.tables.tables import Rows, TableSpec
from paceline.errors import CheckpointError, PacelineError
from paceline.evaluations import EvaluationKey
from paceline.loss_value import LossPart, MeanPart
from paceline.rules import Async, Rule, Sync

TABLE = TableSpec("words", 50, 4, 0, True)
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
}


class Training:
    """A chief without other servers, and what its replicas would do."""

    name, durability, servers, timeout_s = "main one", "log", 1, 600.0
    shapes: tuple[tuple[int, ...], ...] = ((300, 40), (7,))

    def __init__(self, folder: Path, rule: Rule, optimizer: str = "SGD", *, tables: bool = False, **how: Any) -> None:
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in self.shapes]
        self.optimizer = OPTIMIZERS[optimizer](parameters)
        named = [(f"p{number}", parameter, 0) for number, parameter in enumerate(parameters)]
        spec = describe(named, self.optimizer, self.servers, [TABLE] if tables else [])
        settings = Settings(replicas=2, rule=rule, durability=self.durability, timeout_s=self.timeout_s)
        self.folder = folder
        container = Container(self.name, spec, 0, settings)
        self.share = Share(container, ContainerRuns(container, []))
        self.keep(**how)
        self.runs.extras.describe([("mean", torch.zeros(3)), ("count", torch.zeros((), dtype=torch.int64))], [])
        self.chance = torch.Generator().manual_seed(3)
        self.container.arena.parameters.view(torch.float32).normal_(generator=self.chance)
        self.container.fill()
        save(self.share, wait=True)
        self.container.journal.flush()
        for replica in range(2):
            self.join(replica)
        self.mean = 0.0

    @property
    def container(self) -> Container:
        return self.share.container

    @property
    def training(self) -> ContainerTraining:
        return self.runs.latest

    @property
    def runs(self) -> ContainerRuns:
        assert self.share.runs is not None
        return self.share.runs

    def keep(self, **how: Any) -> None:
        self.container.addresses = ["127.0.0.1:1"]
        keep(self.share, self.folder)
        journal = self.container.journal
        assert isinstance(journal, LogJournal)
        if how:
            self.container.journal = LogJournal(journal.folder, **how)
            self.container.journal.renew = journal.renew

    def join(self, replica: int, incarnation: int = 1) -> None:
        self.container.admit(replica, incarnation)
        self.training.presence.join(replica, incarnation)

    def ask(self, replica: int) -> Ticket:
        if isinstance(self.container.settings.rule, Async):
            self.container.pull(replica)
        request = Ask(
            container="", replica=replica, incarnation=1, chapter=0, length=40, batch_size=4, left_out=0, stop_epoch=9
        )
        answer = self.training.ask(request)
        assert isinstance(answer, Ticket)
        return answer

    def push(self, replica: int, ticket: Ticket, incarnation: int = 1) -> None:
        gradient = torch.empty(self.container.bytes, dtype=torch.uint8)
        gradient.view(torch.float32).normal_(generator=self.chance)
        rows = []
        if self.container.tables:
            ids = torch.randint(TABLE.rows // self.servers, (6,), generator=self.chance).unique()
            rows = [Rows(ids, torch.randn(len(ids), 4, generator=self.chance))]
        pushed = Pushed(
            replica=replica,
            incarnation=incarnation,
            ticket=ticket.ticket,
            untouched=[0] if ticket.step % 3 == 0 else [],
            rows=[len(given.ids) for given in rows],
        )
        self.container.connect(replica, incarnation, self, shared=False)
        self.container.push(pushed, gradient, rows, self)

    def supersede(self) -> None:
        """It has pushed over another connection."""

    def report(self, replica: int, ticket: Ticket) -> Settled:
        self.mean += 1.5
        buffers = torch.full((3,), self.mean).numpy().tobytes() + torch.tensor(ticket.ticket).numpy().tobytes()
        request = Report(
            container="",
            replica=replica,
            incarnation=1,
            ticket=ticket.ticket,
            pulled=ticket.step,
            loss=LossPart(MeanPart(0.5)),
            options=[plain_options(group) for group in self.optimizer.param_groups],
        )
        answer = self.training.report(request, buffers)
        assert isinstance(answer, Settled)
        return answer

    def train(self, rounds: int) -> None:
        """Replica 1 is always stale by one."""
        for _ in range(rounds):
            first, second = self.ask(0), self.ask(1)
            self.push(0, first)
            self.report(0, first)
            self.push(1, second)
            self.report(1, second)

    def state(self) -> list[Any]:
        copy = self.container.copy()
        tables = [(bits(table.weight), {k: bits(v) for k, v in table.state.items()}) for table in copy.tables]
        optimizer = {slot: {k: bits(torch.as_tensor(v)) for k, v in of.items()} for slot, of in copy.state.items()}
        buffers = [tensor.tolist() for _, tensor in self.runs.extras.buffers.tensors]
        books = msgspec.structs.replace(self.training.books(), next_ticket=0)
        return [copy.step, bits(copy.parameters), optimizer, tables, buffers, books, self.training.state.chief.rule]

    def killed(self) -> None:
        """All that is left is on disk: go on from there."""
        (self.share,) = recover(self.folder, lambda addresses, timeout_s: [])
        keep(self.share, self.folder)


def bits(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.contiguous().numpy().tobytes())


def killed_at_once(training: Training) -> None:
    before = training.state()
    training.killed()
    assert training.state() == before


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("tables", [False, True], ids=["dense", "tables"])
def test_every_bit_comes_back(tmp_path: Path, optimizer: str, *, tables: bool) -> None:
    training = Training(tmp_path, Async(stale="scale"), optimizer, tables=tables)
    training.train(4)
    killed_at_once(training)
    training.train(3)
    killed_at_once(training)
    killed_at_once(training)


def test_corrections_for_staleness_come_out_the_same(tmp_path: Path) -> None:
    training = Training(tmp_path, Async(stale="compensate:0.5"))
    training.train(5)
    assert training.training.state.chief.open_books.staleness[1] == 5
    killed_at_once(training)


def test_what_corrected_one_step_does_not_correct_the_next(tmp_path: Path) -> None:
    training = Training(tmp_path, Async(stale="compensate:0.5"))
    training.train(2)
    training.killed()
    first, second = training.ask(0), training.ask(1)
    training.container.forget_pulled()  # they have pulled from the process before
    for replica, ticket in ((0, first), (1, second)):
        training.push(replica, ticket)
        training.report(replica, ticket)
    assert training.training.state.chief.open_books.staleness[1] == 3
    killed_at_once(training)


def test_a_training_that_was_killed_goes_on_as_one_that_was_not(tmp_path: Path) -> None:
    killed, unkilled = (Training(tmp_path / name, Async()) for name in ("killed", "unkilled"))
    for training in (killed, unkilled):
        training.train(6)
    killed.killed()
    for training in (killed, unkilled):
        training.train(4)
    assert killed.state()[:2] == unkilled.state()[:2]


def test_snapshots_in_between_change_nothing(tmp_path: Path) -> None:
    training = Training(tmp_path, Async(), log_steps=3)
    training.train(8)
    journal = training.container.journal
    assert isinstance(journal, LogJournal)
    journal.close()  # threads of one that was killed would not go on either
    killed_at_once(training)
    assert len(list(journal.folder.glob("*"))) == 3


def test_a_gradient_that_waits_is_there_again_also_over_a_snapshot(tmp_path: Path) -> None:
    for snapshot in (False, True):
        training = Training(tmp_path / str(snapshot), Async(), tables=True)
        training.train(2)
        ticket = training.ask(1)
        training.push(1, ticket)
        if snapshot:
            save(training.share, wait=True)
        gradient = training.container.arena.gradients[1].clone()
        ((pushed, rows),) = waiting(training.container)
        training.killed()
        assert torch.equal(training.container.arena.gradients[1], gradient)
        ((again, rows_again),) = waiting(training.container)
        assert again == pushed
        assert [part.tolist() for part in rows_again[0].tensors] == [part.tolist() for part in rows[0].tensors]


def test_a_ticket_is_accepted_once_and_the_answer_is_not_forgotten(tmp_path: Path) -> None:
    training = Training(tmp_path, Async())
    ticket = training.ask(0)
    training.push(0, ticket)
    told = training.report(0, ticket)
    held = training.ask(1)
    training.push(1, held)
    training.killed()
    assert training.report(0, ticket).accepted == told.accepted == 0
    assert training.report(1, held).accepted is None  # it was not in a step: its samples are free again
    assert training.container.step == 1
    assert training.ask(1).following == (0, held.runs)  # after those that are reserved for the other
    assert training.ask(0).ticket > held.ticket + 2


def test_results_rules_and_members_come_back(tmp_path: Path) -> None:
    training = Training(tmp_path, Sync())
    who = {"container": "", "replica": 0, "incarnation": 1, "key": EvaluationTask(EvaluationKey(0, 1, 0, 0))}
    training.training.leave(1, 1)
    training.training.task(Task(**who, length=1))  # type: ignore[arg-type]
    training.training.task_done(TaskDone(**who, part=0, values=[2.5]))  # type: ignore[arg-type]
    training.training.set_rule(Async(bound=2))
    training.killed()
    assert training.training.presence.members == [0]
    assert training.training.state.chief.rule == Async(bound=2)
    assert training.training.state.chief.tasks.results[EvaluationTask(EvaluationKey(0, 1, 0, 0))] == [2.5]


def test_a_process_that_was_followed_by_another_is_not_listened_to(tmp_path: Path) -> None:
    training = Training(tmp_path, Async())
    ticket = training.ask(0)
    training.join(0, incarnation=3)
    training.push(0, ticket, incarnation=3)
    training.killed()
    with pytest.raises(PacelineError, match="replica 0 was started again since"):
        training.push(0, ticket, incarnation=1)


def test_a_container_that_had_not_begun_is_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "main").mkdir()
    (tmp_path / "main" / "log-1").touch()
    assert list(recover(tmp_path, lambda addresses, timeout_s: [])) == []


def test_a_log_without_its_gradients_is_refused(tmp_path: Path) -> None:
    training = Training(tmp_path, Async())
    training.train(2)
    journal = training.container.journal
    assert isinstance(journal, LogJournal)
    journal.append(Pushed(replica=0, incarnation=1, ticket=99, untouched=[]), [memoryview(b"short")])
    with pytest.raises(CheckpointError, match="5 bytes instead of"):
        training.killed()


# ── nonsense with right checksums ────────────────────────────────────────────────────────────────────────────

CLOSE = Close(4, 0, 4, 0.5, [Accepted(1, 0, 1.0, 4, 0, 0, [(0, 4)])])
OPTIONS = [{"lr": 0.1, "momentum": 0.9}]
PUSHED = Pushed(replica=0, incarnation=1, ticket=99, untouched=[])
ROWS_PUT = RowsPut(table=0, key="", start=0, steps=None)
MADE = Made(close=CLOSE, options=OPTIONS, scale=1.0, chapter=(40, 4, 0))
FORGED_RECORDS: list[tuple[AnyRecord, bytes]] = [
    (replace(PUSHED, replica=-1), b""),
    (replace(PUSHED, replica=7), b""),
    (replace(PUSHED, incarnation=-1), b""),
    (replace(PUSHED, untouched=[99]), b"\0" * 48028),
    (replace(PUSHED, untouched=[-1]), b"\0" * 48028),
    (replace(PUSHED, rows=[-1]), b""),
    (replace(PUSHED, rows=[1, 2, 3]), b""),
    (replace(PUSHED, rows=[1 << 60]), b""),
    (PUSHED, b"short"),
    (PulledCopy(replica=9), b""),
    (PulledCopy(replica=0), b"short"),
    (replace(ROWS_PUT, table=5), b""),
    (replace(ROWS_PUT, table=-1), b""),
    (replace(ROWS_PUT, start=-1), b"\0" * 16),
    (replace(ROWS_PUT, start=50), b"\0" * 16),
    (replace(ROWS_PUT, steps=-3), b"\0" * 16),
    (ROWS_PUT, b"\0" * 5),
    (replace(MADE, close=replace(CLOSE, accepted=[])), b""),
    (replace(MADE, close=replace(CLOSE, accepted=[Accepted(1, 9, 1.0, 4, 0, 0, [])])), b""),
    (replace(MADE, close=replace(CLOSE, step=99)), b""),
    (replace(MADE, options=[]), b""),
    (replace(MADE, options=[{"lr": "much"}]), b""),
    (replace(MADE, chapter=None), b""),
    (replace(MADE, chapter=(-1, 4, 0)), b""),
    (replace(MADE, chapter=(40, 0, 0)), b""),
    (MADE, b"no buffers"),
    (MembersChanged(members={9: 1}), b""),
    (MembersChanged(members={0: -1}), b""),
]


def forged_notes(notes: ShareNotes) -> Iterator[ShareNotes]:
    spec, chief = notes.spec, notes.chief
    assert chief is not None
    (run,) = chief.runs
    for change in (
        {"step": -1},
        {"server": 3},
        {"server": -1},
        {"name": "another"},
        {"addresses": []},
        {"table_steps": []},
        {"table_steps": [-1]},
        {"numbers": [(99, "step", 1.0)]},
        {"waiting": [replace(PUSHED, replica=9)]},
        {"waiting": [PUSHED]},
        {"incarnations": {9: 1}},
        {"incarnations": {0: -1}},
        {"used": {-1: 1}},
        {"chief": None},
        {"settings": replace(notes.settings, replicas=0)},
        {"settings": replace(notes.settings, replicas=1 << 40)},
        {"settings": replace(notes.settings, timeout_s=float("nan"))},
        {"spec": replace(spec, servers=0)},
        {"spec": replace(spec, servers=1 << 40)},
        {"spec": replace(spec, tensors=[])},
        {"spec": replace(spec, tensors=[replace(spec.tensors[0], shape=(1 << 35,))])},
        {"spec": replace(spec, tensors=[replace(spec.tensors[0], shape=(1 << 60, 1 << 60))])},
        {"spec": replace(spec, tables=[])},
        {"spec": replace(spec, optimizer=replace(spec.optimizer, name="Nonsense"))},
        {"spec": replace(spec, optimizer=replace(spec.optimizer, groups=[]))},
        {"chief": replace(chief, runs=[replace(run, books=replace(run.books, step=-1))])},
        {"chief": replace(chief, runs=[replace(run, books=replace(run.books, next_ticket=-1))])},
        {"chief": replace(chief, runs=[replace(run, members={9: 1})])},
        {"chief": replace(chief, runs=[replace(run, first=1)])},
        {"chief": replace(chief, runs=[replace(run, first=1 << 40)])},
        {"chief": replace(chief, runs=[])},
        {"chief": replace(chief, buffers=["nowhere"])},
        {"chief": replace(chief, frozen=["nowhere"])},
    ):
        yield replace(notes, **change)  # type: ignore[arg-type]


def forged_tensors(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    for name in tensors:
        if "momentum" not in name:  # without it, it has not begun
            yield {key: value for key, value in tensors.items() if key != name}
        if "buffer/" not in name:  # nothing else says what shape a model's buffers have
            yield {**tensors, name: torch.zeros(1, dtype=tensors[name].dtype)}
    for name in ("parameters", "table/0/"):
        yield {**tensors, name: tensors[name].double()}
    for name in ("state/99/momentum_buffer", "state/x/y", "table/9/momentum_buffer", "table/x/y"):
        yield {**tensors, name: torch.zeros(1)}


def test_nonsense_with_right_checksums_is_one_sentence_with_the_name_of_the_file(tmp_path: Path) -> None:
    training = Training(tmp_path, Async(), tables=True)
    training.train(2)
    folder = tmp_path / "main%20one"
    kept = shutil.copytree(folder, tmp_path.with_name("kept"))
    tensors, notes = whole(training.share)

    def refused(write: Callable[[LogJournal], None]) -> str:
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
        journal = LogJournal(folder)
        journal.read_snapshot()
        for _ in journal.records():
            pass
        write(journal)
        journal.close()
        with pytest.raises(CheckpointError) as caught:
            training.killed()
        assert "\n" not in str(caught.value)
        return str(caught.value)

    for record, body in FORGED_RECORDS:
        said = refused(partial(LogJournal.append, record=record, body=[memoryview(body)]))
        assert str(folder / "log-1") in said, (record, said)
    snapshots = [(tensors, forged) for forged in forged_notes(notes)]
    snapshots += [(forged, notes) for forged in forged_tensors(tensors)]
    for given, noted in snapshots:
        said = refused(partial(LogJournal.snapshot, tensors=given, notes=noted, wait=True))
        assert str(folder / "snapshot-2") in said, (noted, said)


def test_a_server_that_cannot_recover_ends_and_says_why(tmp_path: Path) -> None:
    """Before, the thread that recovers died, and the server accepted connections that it never answered."""
    training = Training(tmp_path, Async())
    tensors, notes = whole(training.share)
    del tensors["parameters"]
    training.container.journal.snapshot(tensors, notes, wait=True)
    ended: list[BaseException] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Server(listener, token="", folder=tmp_path, say=lambda line: None)

        def run() -> None:
            try:
                server.run(recover=True)
            except BaseException as error:
                ended.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(20)
        server.stop()
        thread.join()
    assert [type(error) for error in ended] == [CheckpointError]
    assert "snapshot-2 cannot be gone on from" in str(ended[0])


def test_a_step_that_was_another_is_not_taken_for_the_last_one_again(tmp_path: Path) -> None:
    """As a chief would tell it that came back with an older log."""
    training = Training(tmp_path, Async())
    training.train(2)
    last = training.runs.closer.last
    assert last is not None
    container, before = training.container, training.state()
    container.apply(last.close, last.options, last.scale)  # an answer was lost on the way
    other = replace(last.close.accepted[0], ticket=99)
    for close in (replace(last.close, accepted=[other]), replace(last.close, step=2)):
        with pytest.raises(PacelineError, match="the chief's log has lost what came after it"):
            container.apply(close, last.options, last.scale)
    container.staged.clear()  # a gradient that was acknowledged, and is not here
    with pytest.raises(PacelineError, match="is not on server 0"):
        container.apply(replace(last.close, step=4), last.options, last.scale)
    assert training.state() == before


def test_durability_without_a_folder_is_one_sentence(tmp_path: Path) -> None:
    share = Training(tmp_path, Async()).share
    share.container.journal = Journal()
    with pytest.raises(PacelineError, match="this server has no folder"):
        keep(share, None)
