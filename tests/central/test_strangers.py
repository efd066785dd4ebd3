"""Whoever is no friend gets a closed connection and a line in the log; whoever is one cannot bring a server down."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from conftest import Run, Start
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raw_frames import PROTOCOL, prelude, raw_frame
from servers_here import TOKEN, Running, last_words, running, write_token
from torch import nn

from paceline import __version__
from paceline.central.chief.chief import Chief
from paceline.central.chief.tasks import EvaluationTask
from paceline.central.chief.tickets import Accepted, Close
from paceline.central.client.client import Client, ServerAddresses
from paceline.central.client.reader import Reader
from paceline.central.container import presence as presence_module
from paceline.central.container import runs as runs_module
from paceline.central.container import training as training_module
from paceline.central.container.container import Container
from paceline.central.container.runs import ContainerRuns, Share
from paceline.central.durability.snapshot import whole
from paceline.central.messages import replies, requests
from paceline.central.messages.coding import Coding
from paceline.central.messages.connection import GREETINGS, Connection
from paceline.central.messages.records import Made, MembersChanged, PulledCopy, Pushed, RowsPut, RuleSet, TaskResult
from paceline.central.messages.settings import Settings
from paceline.central.messages.tensor_bytes import entries_of
from paceline.central.server import welcome as welcome_module
from paceline.central.shards import Shards, describe
from paceline.central.tables.tables import TableSpec
from paceline.cli.keys import make_certificate, make_keys
from paceline.errors import PacelineError, SecurityError, Stalled
from paceline.evaluations import EvaluationKey
from paceline.loss_value import LossPart, MeanPart
from paceline.net import strangers as strangers_module
from paceline.net.frames import MAGIC, Channel
from paceline.net.secure import Keys, proof_of, wrap_server
from paceline.net.strangers import Strangers
from paceline.rules import Sync

EVALUATION = EvaluationTask(EvaluationKey(0, 1, 0, 0))


def request(asked: Any, body: bytes = b"") -> bytes:
    return raw_frame(msgspec.msgpack.encode(asked), body)


def hello(version: str = __version__) -> bytes:
    return request(requests.Hello(version=version))


# What a stranger sends, and a word of the line that tells about it.
STRANGERS: dict[str, tuple[bytes, str]] = {
    "a wrong proof": (hello() + request(requests.Proof(proof=bytes(32))), "the token is not this server's"),
    "no proof": (hello() + request(requests.Proof(proof=b"")), "the token is not this server's"),
    "a request instead of a proof": (hello() + request(requests.Containers()), "is not a proof"),
    "another version of Paceline": (hello(version="0.0.1"), f"this server runs Paceline {__version__}"),
    "a version for the terminal": (hello(version="9\x1b[2J\n"), r"and the client 9\x1b[2J\n: use"),
    "another version of the protocol": (
        raw_frame(b"", version=PROTOCOL + 1),
        f"speaks version {PROTOCOL + 1} of the protocol",
    ),
    "garbage": (os.urandom(64), "not a frame of this protocol"),
    "a browser": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "not a frame of this protocol"),
    "half a frame": (hello()[:20], "has gone"),
    "a header that is too long": (prelude(1 << 30, 0), "is larger than the"),
    "a body that is too long": (prelude(8, 1 << 60), "is larger than the"),
    "a request without a greeting": (request(requests.Containers()), "is not a greeting"),
    "a header of no schema": (raw_frame(b"\xc1\xc1"), "does not fit its schema"),
    "a greeting with a body": (request(requests.Hello(version=__version__), b"more"), "too long"),
    "a damaged greeting": (hello()[:-1] + b"\0", "the header of a frame was damaged"),
}


def knock(at: Running, sent: bytes, *, leaves: bool) -> bytes:
    """What a stranger is answered until its connection is closed."""
    with at.connect() as connection:
        connection.sendall(sent)
        if leaves:
            connection.shutdown(socket.SHUT_WR)
        answered = b""
        with contextlib.suppress(ConnectionResetError):
            while more := connection.recv(4096):
                answered += more
        return answered


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_is_sent_away_with_a_line_in_the_log(stranger: str) -> None:
    sent, words = STRANGERS[stranger]
    with running() as server:
        answered = knock(server, sent, leaves=stranger == "half a frame")
        assert server.said_soon(words), server.said
        assert answered[:3] in (b"", MAGIC)  # at most a sentence
        with Reader([server.address], token=TOKEN) as reader:
            assert reader.listing() == []


def test_who_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(welcome_module, "HELLO_WITHIN_S", 0.2)
    with running() as server, server.connect() as connection:
        assert connection.recv(1) == b""
        assert server.said_soon("did not answer within 0.2 s")


@pytest.mark.parametrize("limit", ["MOST_STRANGERS", "MOST_OF_ONE_ADDRESS"])
@pytest.mark.parametrize("secure", [False, True])
def test_strangers_lock_nobody_out(keys: Path, monkeypatch: pytest.MonkeyPatch, limit: str, secure: bool) -> None:
    monkeypatch.setattr(strangers_module, limit, 3)
    monkeypatch.setattr(welcome_module, "HELLO_WITHIN_S", 300.0)  # so long a stranger could stay
    monkeypatch.setattr(wrap_server, "__defaults__", (300.0,))
    ours = Keys.load(keys / "ours") if secure else None
    with running(ours) as server, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(server.connect()) for _ in range(3)]
        for _ in range(2):  # there is a place for whoever comes, and it is free again afterwards
            with Reader([server.address], token=TOKEN, keys=ours, timeout_s=5) as reader:
                assert reader.listing() == []
        assert idle[0].recv(1) == b""  # the oldest made room
        idle[2].setblocking(False)
        with pytest.raises(BlockingIOError):
            idle[2].recv(1)


def test_a_crowd_of_one_address_takes_no_place_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers_module, "MOST_STRANGERS", 3)
    strangers, pairs = Strangers(), [socket.socketpair() for _ in range(4)]
    with contextlib.ExitStack() as stack:
        for (here, there), address in zip(pairs, ("10.0.0.1", "10.0.0.2", "10.0.0.2", "10.0.0.3"), strict=True):
            stack.enter_context(there)
            stack.enter_context(here)
            strangers.add(here, address)
            stack.callback(strangers.remove, here)
        for number, (_, there) in enumerate(pairs):
            there.setblocking(False)
            if number == 1:  # the oldest of the largest crowd
                assert there.recv(1) == b""
            else:
                with pytest.raises(BlockingIOError):
                    there.recv(1)


# ── what a client is told ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of keys: of ours, of another CA, and with the roles exchanged."""
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder / "ours", "here")
    make_keys(folder / "theirs", "there")
    make_certificate(folder / "ours", "server", "x", to=folder / "swapped")
    make_certificate(folder / "ours", "client", "x", to=folder / "swapped")
    for end in ("pem", "key"):
        server, client = (folder / "swapped" / f"{role}.{end}" for role in ("server", "client"))
        held = server.read_bytes(), client.read_bytes()
        server.write_bytes(held[1])
        client.write_bytes(held[0])
    return folder


def told(server: Running, *, token: str = TOKEN, keys: Keys | None = None) -> str:
    began = time.monotonic()
    with pytest.raises(PacelineError) as caught, Reader([server.address], token=token, keys=keys) as reader:
        reader.listing()
    assert time.monotonic() - began < 10
    assert server.address in str(caught.value)
    return str(caught.value)


def test_a_client_learns_what_is_wrong(keys: Path) -> None:
    ours, theirs, swapped = Keys.load(keys / "ours"), Keys.load(keys / "theirs"), Keys(keys / "swapped")
    with running() as plain, running(ours) as secure, running(swapped) as wrong_role:
        assert "the token is not this server's" in told(plain, token="another token")
        assert "does not speak TLS" in told(plain, keys=ours)
        assert "as one with keys does to a client without" in told(secure)
        assert "signed by another CA" in told(secure, keys=theirs)
        assert "of the wrong role" in told(secure, keys=swapped)
        assert "of the wrong role" in told(wrong_role, keys=ours)
        with Reader([secure.address], keys=ours) as reader:  # the keys are enough
            assert reader.listing() == []
        assert plain.said_soon("is TLS")
        assert secure.said_soon("does not speak TLS")


def test_a_peer_of_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as server:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("paceline.central.messages.connection.__version__", "9.9")
            assert f"this server runs Paceline {__version__} and the client 9.9" in told(server)
        with socket.create_server(("127.0.0.1", 0)) as listener:  # a server that speaks the next protocol

            def answer() -> None:
                for _ in range(GREETINGS):
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(4096)
                        connection.sendall(raw_frame(b"\x80", version=PROTOCOL + 1))

            thread = threading.Thread(target=answer)
            thread.start()
            connection = Connection(
                f"127.0.0.1:{listener.getsockname()[1]}", token="", keys=None, who="x", name="server 0", timeout_s=5
            )
            with pytest.raises(
                SecurityError,
                match=f"speaks version {PROTOCOL + 1} of the protocol and this one {PROTOCOL}; use the same",
            ):
                connection.call(requests.Containers(), replies.Listed)
            thread.join()


def test_a_server_that_is_not_there_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.central.client.reader.FIRST_CONTACT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(Stalled, match=r"waited 0.5 s for the server at .*: it cannot be reached \(Connection refused"):
        Reader([address], token=TOKEN).listing()


# ── a training is not disturbed ──────────────────────────────────────────────────────────────────────────────

TRAIN = """
import json, time, torch, torch.nn.functional as F, paceline as pl
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(10, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
x = torch.randn(400, 10, generator=torch.Generator().manual_seed(1))
def loss(model, batch):
    time.sleep(0.01)
    return F.mse_loss(model(batch), batch.sum(1, keepdim=True))
trainer = pl.Trainer(model, torch.optim.Adam(model.parameters(), lr=0.01), loss)
for batch in trainer.batches(x, 20, epochs=2, seed=2):
    trainer.step(batch)
print(json.dumps({"sum": sum(p.double().sum().item() for p in model.parameters()), "counted": trainer.ledger.check()}))
"""


@pytest.fixture(scope="module")
def alone(start: Start) -> Run:
    """The same training on servers of its own."""
    return start(TRAIN, "--replicas 2 --servers 1").fine()


def test_strangers_do_not_disturb_a_training(start: Start, alone: Run, tmp_path: Path) -> None:
    token = write_token(tmp_path)
    with running() as server:
        run = start(TRAIN, f"--replicas 2 --join {server.address} --token {token} --container quiet")
        with Reader([server.address], token=TOKEN) as reader:
            while not any(listed.step > 2 for listed in reader.listing()):
                assert run.process.poll() is None
                time.sleep(0.02)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        while run.process.poll() is None:
            for sent, _ in STRANGERS.values():
                knock(server, sent, leaves=True)
            with pytest.raises(ssl.SSLError), server.connect() as raw:
                context.wrap_socket(raw)
        run.fine()
    assert run.told("sum") == alone.told("sum")
    assert run.told("counted") == alone.told("counted")
    assert sum("closed the connection" in line for line in server.said) > 10


def test_training_over_mutual_tls(start: Start, alone: Run, keys: Path) -> None:
    ours = Keys.load(keys / "ours")
    with running(ours) as first, running(ours) as second:
        at = f"{first.address},{second.address}"
        run = start(TRAIN, f"--replicas 2 --join {at} --keys {keys / 'ours'} --container secret --exchange tcp").fine()
        assert run.told("sum") == pytest.approx(alone.told("sum"), rel=1e-6)
        with Reader([first.address], "secret", keys=ours) as reader:
            step, tensors = reader.parameters()
        assert step == 40
        assert sum(tensor.double().sum().item() for tensor in tensors.values()) == pytest.approx(run.told("sum"))


# ── friends with bugs ────────────────────────────────────────────────────────────────────────────────────────

EXTREMES = [-(1 << 63), -(1 << 31), -1, 0, 1, 2, 3, 7, 1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1]
NAMES = [
    *["fuzz"] * 12,
    "other",
    "new",
    "..",
    "a/b",
    "",
    "x" * 500,
    "float32",
    "SGD",
    "parameters",
    "state",
    "fp32",
]


def any_of(described: Any) -> st.SearchStrategy[Any]:
    """Values that fit a schema and make no sense, or some."""
    match described:
        case msgspec.inspect.IntType():
            return st.sampled_from(EXTREMES) | st.integers(-2, 4)
        case msgspec.inspect.FloatType():
            return st.sampled_from([0.0, 0.05, 1.0, -1.0, 1e300, float("nan"), float("inf")])
        case msgspec.inspect.StrType():
            return st.sampled_from(NAMES) | st.text(max_size=8)
        case msgspec.inspect.LiteralType():
            return st.sampled_from(described.values)
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.BytesType():
            return st.sampled_from([b"", b"{}", b"[" * 5000, b'{"step": 1, "chapters": {"0": {"began": 1e18}}}'])
        case msgspec.inspect.ListType() | msgspec.inspect.VarTupleType():
            made = st.lists(any_of(described.item_type), max_size=3)
            return made.map(tuple) if isinstance(described, msgspec.inspect.VarTupleType) else made
        case msgspec.inspect.TupleType():
            return st.tuples(*map(any_of, described.item_types))
        case msgspec.inspect.DictType():
            keys = any_of(described.key_type) | st.sampled_from(["lr", "momentum", "maximize", "betas"])
            return st.dictionaries(keys, any_of(described.value_type), max_size=3)
        case msgspec.inspect.UnionType():
            return st.one_of([any_of(one) for one in described.types])
        case msgspec.inspect.StructType():
            return any_struct(described.cls)
    raise AssertionError(described)


def any_struct(kind: type) -> st.SearchStrategy[Any]:
    described = msgspec.inspect.type_info(kind)
    assert isinstance(described, msgspec.inspect.StructType)
    fields = {field.encode_name: any_of(field.type) for field in described.fields}
    # As plain data: what a constructor would refuse comes over a wire as well.
    tag = {described.tag_field: st.just(described.tag)} if described.tag_field is not None else {}
    if described.array_like:
        return st.tuples(*fields.values())
    return st.fixed_dictionaries({**tag, **fields})


REQUESTS = [kind for kind in requests.Request.__args__ if kind not in (requests.Hello, requests.Proof)]  # type: ignore[attr-defined]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(10, 4, sparse=True)
        self.last = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)


def sensible(address: str) -> list[tuple[Any, int]]:
    """One request of each kind that makes sense, and how long its body is, in an order that makes sense too."""
    last = nn.Linear(4, 3)
    named = [(name, parameter, 0) for name, parameter in last.named_parameters()]
    optimizer = torch.optim.SGD(last.parameters(), lr=0.1, momentum=0.9)
    spec = describe(named, optimizer, 1, [TableSpec("rows", 10, 4, 0, True)])
    layout = Shards(spec).layouts[0]
    elements = [slot.elements for slot in layout.slots]
    about: dict[str, Any] = {"container": "fuzz", "replica": 0, "incarnation": 1}
    books = Chief(Sync(), 2)
    books.begin(0, 8, 4, 0)
    made = Close(0, 0, 4, 0.5, [Accepted(1, 0, 1.0, 4, 0, 0, [(0, 4)])])
    setting = Settings(replicas=2, rule=Sync(1), clip_norm=1.0, timeout_s=0.2)
    place: dict[str, Any] = {"addresses": [address], "server": 0, "machine": "apart", "checks": [1, 2]}
    return [
        (requests.Open(**about, spec=spec, settings=setting, **place), 0),
        (requests.Fill(container="fuzz", buffers=[("b", "float32", (2,))], keys=[("w", "weight")]), layout.bytes + 8),
        (requests.Ask(**about, chapter=0, length=8, batch_size=4, left_out=0, stop_epoch=2), 0),
        (
            requests.Push(**about, ticket=1, wire="fp32", untouched=[1], rows=[2]),
            Coding(layout, "fp32").bytes + 16 + 32,
        ),
        (requests.Push(**about, ticket=1, wire="int8", rows=[0]), Coding(layout, "int8").bytes),
        (requests.Report(**about, ticket=1, pulled=0, loss=LossPart(MeanPart(0.5)), options=spec.optimizer.groups), 8),
        (requests.Apply(container="fuzz", close=made, options=spec.optimizer.groups), 0),
        (requests.Apply(container="fuzz", close=made, options=spec.optimizer.groups, measure=True), 0),
        (requests.Pull(container="fuzz", replica=0, at_least=0, wire="bf16"), 0),
        (requests.Look(container="fuzz", at_least=0, known=1), 0),
        (requests.PullRows(container="fuzz", table=0), 16),
        (requests.PutRows(container="fuzz", table=0, start=1, rows=2, key="momentum_buffer", steps=3), 32),
        (requests.Task(**about, key=EVALUATION, length=7), 0),
        (requests.TaskDone(**about, key=EVALUATION, part=0, values=[1.0]), 0),
        (requests.ReadBuffers(container="fuzz"), 0),
        (requests.Describe(container="fuzz"), 0),
        (requests.Freeze(container="fuzz"), 0),
        *(
            (requests.ReadFrozen(container="fuzz", number=1, what=what), 0)
            for what in ("parameters", "state", "extras", "table")
        ),
        (requests.Thaw(container="fuzz", number=1), 0),
        (
            requests.Restore(
                container="fuzz",
                step=3,
                entries=[(0, "momentum_buffer", "float32", (elements[0],))],
                numbers=[(1, "step", 2.0)],
                born=[0, 1],
                books=books.books(),
            ),
            layout.bytes + 4 * elements[0],
        ),
        (requests.ReadBooks(container="fuzz"), 0),
        (requests.SetRule(container="fuzz", rule=Sync(2)), 0),
        (requests.Stop(container="fuzz"), 0),
        (requests.Leave(**about), 0),
        (requests.Copy(container="fuzz", to="copied"), 0),
        (requests.Vacate(container="fuzz", places=[1]), 0),
        (requests.Drop(container="fuzz"), 0),
        (requests.Containers(), 0),
        *kept(named, optimizer),
    ]


def kept(named: list[tuple[str, nn.Parameter, int]], optimizer: torch.optim.Optimizer) -> list[tuple[Any, int]]:
    """What another server says of its share of a container."""
    spec = describe(named, optimizer, 2, [TableSpec("rows", 10, 4, 0, True)])
    container = Container("fuzz", spec, 0, Settings(replicas=2, durability="replica"))
    container.addresses = ["127.0.0.1:1", "127.0.0.1:2"]
    runs = ContainerRuns(container, [])
    runs.latest.state.chief.begin(0, 8, 4, 0)
    tensors, notes = whole(Share(container, runs))
    whose: dict[str, Any] = {"container": "fuzz", "server": 0, "incarnation": 5}
    close = Close(0, 0, 4, 0.5, [Accepted(1, 0, 1.0, 4, 0, 0, [(0, 4)])])
    records = [
        Pushed(replica=0, incarnation=1, ticket=1, untouched=[], rows=[1]),
        RowsPut(table=0, key="", start=1, steps=3),
        PulledCopy(replica=0),
        Made(close=close, options=spec.optimizer.groups, scale=1.0, chapter=(8, 4, 0)),
        TaskResult(key=EVALUATION, values=[1.0]),
        RuleSet(rule=Sync(2)),
        MembersChanged(members={0: 1}),
    ]
    lengths = [container.bytes + 8 + 16, 32, container.bytes, 0, 0, 0, 0]
    snapshot = requests.KeepWhole(**whose, entries=entries_of(tensors.items()), notes=notes)
    container.close()
    return [
        (snapshot, sum(tensor.nbytes for tensor in tensors.values())),
        (requests.Keep(**whose, position=0, records=records, lengths=lengths), sum(lengths)),
        (requests.Keep(**whose, position=7), 0),
        (requests.Fetch(**whose), 0),
        (requests.Forget(**whose), 0),
    ]


def leaves(plain: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to everything inside of plain data."""
    inside = plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list) else ()
    found = [path] if path and path != ("type",) else []
    for key, value in inside:
        found += leaves(value, (*path, key))
    return found


def another(value: Any) -> st.SearchStrategy[Any]:
    """Something of the same type, or nearly."""
    match value:
        case bool():
            return st.booleans()
        case int():
            return st.sampled_from(EXTREMES)
        case float():
            return st.sampled_from([0.0, 0.05, -1.0, 1e300, float("nan"), float("inf")])
        case str():
            return st.sampled_from(NAMES) | st.text(max_size=8)
        case bytes():
            return st.sampled_from([b"", b"{}", b"[" * 5000, value.replace(b"8", b"9" * 18), value[:-9], value * 2])
        case list():
            return st.sampled_from([[], value + value, value[:1] * 3, value[1:]])
        case None:
            return st.sampled_from([None, 1, 0.5, "auto"])
    return st.just({})


@st.composite
def nearly_sensible(draw: st.DrawFn, known: list[tuple[Any, int]]) -> tuple[Any, int]:
    """A sensible request in which something is not."""
    request, length = draw(st.sampled_from(known))
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(request))
    for _ in range(draw(st.integers(0, 2))):
        paths = leaves(plain)
        if not paths:
            break
        *way, key = draw(st.sampled_from(paths))
        at = plain
        for step in way:
            at = at[step]
        at[key] = draw(another(at[key]))
    return plain, draw(st.just(length) | st.just(length) | st.integers(0, 600))


class FuzzSession:
    """A connection that has shown the token; made anew when the server has closed it."""

    def __init__(self, server: Running) -> None:
        self._server = server
        self._channel: Channel[Any] | None = None

    def ask(self, header: bytes, body: bytes) -> Any:
        """The reply, or None if the connection was closed; any longer than a few seconds is too long."""
        self._connect()
        try:
            return self._exchange(raw_frame(header, body))
        except PacelineError as error:
            if "did not answer" in str(error):
                raise
            self.close()
            return None

    def end_with(self, sent: bytes) -> None:
        """The last that is said on this connection, which may be anything; wait for its end."""
        last_words(self._connect(), sent)
        self.close()

    def _connect(self) -> socket.socket:
        if self._channel is None:
            self._channel = Channel(self._server.connect(), replies.REPLIES)
            self._channel.trusted = True
            challenge = self._exchange(hello())
            self._exchange(request(requests.Proof(proof=proof_of(TOKEN, challenge.nonce))))
        return self._channel._connection

    def _exchange(self, sent: bytes) -> Any:
        assert self._channel is not None
        with contextlib.suppress(ConnectionError):
            self._channel._connection.sendall(sent)
        reply, _ = self._channel.receive(15)
        self._channel.skip_body(15)
        return reply

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


@pytest.mark.timeout(300)
@pytest.mark.parametrize("examples", [120, pytest.param(400, marks=pytest.mark.soak)])
def test_no_request_brings_a_server_down(examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_module, "ANSWER_WITHIN_S", 0.01)
    monkeypatch.setattr(presence_module, "GRACE_S", 0.01)
    for patience in ("LEAVE_WITHIN_S", "FILL_WITHIN_S", "RETURN_WITHIN_S"):
        monkeypatch.setattr(runs_module, patience, 0.01)
    process = psutil.Process()
    with running() as server, contextlib.closing(FuzzSession(server)) as session:
        model = Model()
        client = Client(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            ServerAddresses([server.address], "untouched", TOKEN),
            Settings(replicas=1),
            replica=0,
            incarnation=1,
        )
        with Reader([server.address], "untouched", token=TOKEN) as reader:
            before = reader.parameters()
        used = process.memory_info().rss
        known = sensible(server.address)
        wrong_ones = st.tuples(st.one_of([any_struct(kind) for kind in REQUESTS]), st.integers(0, 600))
        almost_right = nearly_sensible(known)

        @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.integers(0, len(known)), st.lists(wrong_ones | almost_right, max_size=5))
        def wrong(begin: int, sent: list[tuple[Any, int]]) -> None:
            for asked, length in [*known[:begin], *sent]:
                session.ask(msgspec.msgpack.encode(asked), bytes(length))
            for name in ("fuzz", "copied"):
                session.ask(msgspec.msgpack.encode(requests.Drop(container=name, force=True)), b"")
            with Reader([server.address], token=TOKEN) as reader:
                assert "untouched" in [listed.name for listed in reader.listing()]

        wrong()
        with Reader([server.address], "untouched", token=TOKEN) as reader:
            after = reader.parameters()
        client.close()
    assert before[0] == after[0]
    for key, value in before[1].items():
        assert torch.equal(value, after[1][key]), key
    assert process.memory_info().rss - used < 500 << 20
    failed = [line for line in server.said if "failed:" in line]
    assert not failed, failed[0]
