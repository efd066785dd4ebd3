"""Frames: every byte arrives where it belongs, and whatever a stranger sends costs only its own connection."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st
from raw_frames import PROTOCOL, prelude, raw_frame

from paceline.net.frames import (
    MANY_BYTES,
    MOST_HEADER_BYTES,
    MOST_STRANGERS_HEADER_BYTES,
    RECEIVED_AT_ONCE_BYTES,
    SLICE_BYTES,
    SMALL_BYTES,
    Channel,
    ConnectionLost,
    FrameDamaged,
    FrameError,
    tune,
)

SOON_S = 30.0  # longer than anything here takes: a hang is an error and not a wait


class Push(msgspec.Struct, tag="push"):
    step: int
    names: list[str] = []
    weights: dict[str, float] = {}


class Pull(msgspec.Struct, tag="pull"):
    step: int
    nested: Any = None


class Tree(msgspec.Struct, tag="tree"):
    """As deep as somebody likes."""

    below: list[Tree] = []


Message = Push | Pull | Tree
DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        a = socket.create_connection(listener.getsockname())
        return a, listener.accept()[0]


PAIRS: dict[str, Callable[[], tuple[socket.socket, socket.socket]]] = {"tcp": tcp_pair, "unix": socket.socketpair}


@pytest.fixture(params=PAIRS)
def channels(request: pytest.FixtureRequest) -> Iterator[tuple[Channel[Message], Channel[Message]]]:
    a, b = (Channel[Message](connection, DECODER) for connection in PAIRS[request.param]())
    yield a, b
    a.close()
    b.close()


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, Channel[Message]]]:
    """A stranger's socket, and the channel at its other end."""
    stranger, connection = tcp_pair()
    channel = Channel[Message](connection, DECODER)
    with stranger:
        yield stranger, channel
    channel.close()


@pytest.fixture
def beside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def frame(header: Any, body: bytes = b"") -> bytes:
    encoded = msgspec.msgpack.encode(header)
    return raw_frame(encoded, body)


def done(future: Future[Any]) -> Any:
    return future.result(timeout=SOON_S)


# ── what arrives ─────────────────────────────────────────────────────────────────────────────────────────────

AROUND = [0, 1, 3, SMALL_BYTES - 60, SMALL_BYTES, SLICE_BYTES - 1, SLICE_BYTES, SLICE_BYTES + 1, 5 * SLICE_BYTES + 17]


@pytest.mark.parametrize("timeout_s", [None, SOON_S])
@pytest.mark.parametrize("size", AROUND)
def test_a_body_goes_from_tensor_to_array(
    channels: tuple[Channel[Message], Channel[Message]],
    beside: ThreadPoolExecutor,
    size: int,
    timeout_s: float | None,
) -> None:
    a, b = channels
    sent = torch.randint(0, 256, (size,), dtype=torch.uint8)
    sending = beside.submit(a.send, Push(7, ["x"]), [memoryview(sent.numpy())], timeout_s=timeout_s)
    header, length = b.receive(timeout_s)
    got = np.zeros(size + 2, np.uint8)
    b.read_body(memoryview(got)[1:-1], timeout_s)
    b.end_body()
    done(sending)
    assert (header, length) == (Push(7, ["x"]), size)
    assert (got[1:-1] == sent.numpy()).all()
    assert (got[0], got[-1]) == (0, 0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int64, np.bool_, np.uint8])
@pytest.mark.parametrize("shape", [(), (5,), (3, 4, 5), (0,), (3, 0)])
def test_any_shape_and_dtype_is_bytes(
    channels: tuple[Channel[Message], Channel[Message]], dtype: type, shape: tuple[int, ...]
) -> None:
    a, b = channels
    sent = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    sent = np.asarray(sent)
    a.send(Push(1), [memoryview(sent)])
    _, length = b.receive(SOON_S)
    got = np.asarray(np.zeros(shape, dtype))
    b.read_body(memoryview(got), SOON_S)
    b.end_body()
    assert length == sent.nbytes
    assert (got == sent).all()


def test_bfloat16_of_torch(channels: tuple[Channel[Message], Channel[Message]]) -> None:
    a, b = channels
    sent, got = torch.randn(1001).bfloat16(), torch.zeros(1001).bfloat16()
    a.send(Push(1), [memoryview(sent.view(torch.uint8).numpy())])
    b.receive(SOON_S)
    b.read_body(memoryview(got.view(torch.uint8).numpy()), SOON_S)
    assert torch.equal(got, sent)


def test_many_frames_in_a_row_with_bodies_in_parts(
    channels: tuple[Channel[Message], Channel[Message]], beside: ThreadPoolExecutor
) -> None:
    a, b = channels
    bodies = [os.urandom(size) for size in (0, 10, 100_000, 0, 3 << 20, 1)]

    def send() -> None:
        for step, body in enumerate(bodies):
            third = len(body) // 3
            parts = [memoryview(body)[:third], memoryview(body)[third:]]
            if step % 2:
                a.send(Push(step), iter(parts), body_bytes=len(body))  # made while they are sent
            else:
                a.send(Push(step), parts)

    sending = beside.submit(send)
    for step, body in enumerate(bodies):
        header, length = b.receive(SOON_S)
        assert (header, length) == (Push(step), len(body))
        half = bytearray(len(body) // 2)
        b.read_body(memoryview(half), SOON_S)
        assert half + b.read_whole_body(most=4 << 20, timeout_s=SOON_S) == body
        b.end_body()
    done(sending)


def test_both_ways(channels: tuple[Channel[Message], Channel[Message]]) -> None:
    a, b = channels
    for step in range(100):
        a.send(Push(step))
        assert b.receive(SOON_S) == (Push(step), 0)
        b.send(Pull(step))
        assert a.receive(SOON_S) == (Pull(step), 0)


def test_a_time_limit_of_one_who_sends_is_none_of_one_who_waits(
    channels: tuple[Channel[Message], Channel[Message]],
) -> None:
    """Of one socket, which has one time limit."""
    a, b = channels

    def answer() -> None:
        for step in range(2000):
            assert b.receive() == (Push(step), 0)
            b.send(Pull(step))

    with ThreadPoolExecutor(2) as beside:
        answering = beside.submit(answer)
        heard = beside.submit(lambda: [a.receive()[0].step for _ in range(2000)])  # type: ignore[union-attr]
        for step in range(2000):
            a.send(Push(step), timeout_s=SOON_S)
        done(answering)
        assert done(heard) == list(range(2000))


def test_nor_if_it_began_to_wait_while_the_other_was_sending(
    raw: tuple[socket.socket, Channel[Message]], beside: ThreadPoolExecutor
) -> None:
    stranger, channel = raw
    channel._connection.settimeout(0.05)  # as by another thread that sends at this moment
    heard = beside.submit(channel.receive)
    time.sleep(0.3)
    stranger.sendall(frame(Push(3)))
    assert done(heard) == (Push(3), 0)


def test_nan_and_infinity_survive_in_headers(channels: tuple[Channel[Message], Channel[Message]]) -> None:
    a, b = channels
    a.send(Push(1, weights={"nan": float("nan"), "inf": float("inf")}))
    header, _ = b.receive(SOON_S)
    assert isinstance(header, Push)
    assert np.isnan(header.weights["nan"])
    assert header.weights["inf"] == float("inf")


def test_a_frame_that_comes_byte_by_byte(
    raw: tuple[socket.socket, Channel[Message]], beside: ThreadPoolExecutor
) -> None:
    stranger, channel = raw
    stranger.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data = frame(Push(3, ["a", "b"]), b"body") * 2

    def trickle() -> None:
        for byte in data:
            stranger.sendall(bytes([byte]))
            time.sleep(0.001)

    trickling = beside.submit(trickle)
    for _ in range(2):
        assert channel.receive(SOON_S) == (Push(3, ["a", "b"]), 4)
        assert channel.read_whole_body(10, SOON_S) == b"body"
    done(trickling)


def test_a_sender_that_pauses_is_waited_for(
    raw: tuple[socket.socket, Channel[Message]], beside: ThreadPoolExecutor
) -> None:
    stranger, channel = raw
    data = frame(Push(3), bytes(100))

    def pause() -> None:
        for part in (data[:5], data[5:20], data[20:-3], data[-3:]):
            stranger.sendall(part)
            time.sleep(0.05)

    pausing = beside.submit(pause)
    assert channel.receive() == (Push(3), 100)
    assert channel.read_whole_body(100) == bytes(100)
    done(pausing)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("room", [16384, 65536, None])
@pytest.mark.parametrize("timeout_s", [None, SOON_S])
def test_many_bytes_that_are_waited_for_together_come_through_any_window(
    room: int | None, timeout_s: float | None, beside: ThreadPoolExecutor
) -> None:
    """Also where fewer fit into the kernel's buffer, and where they come in pieces of any size, with pauses."""
    sender, taker = tcp_pair()
    if room is not None:
        taker.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    channel = Channel[Message](taker, DECODER)
    body = os.urandom(3 * RECEIVED_AT_ONCE_BYTES + MANY_BYTES + 1)
    whole = memoryview(frame(Push(step=1), body) + frame(Pull(step=2)))
    random = np.random.default_rng(0)

    def send() -> None:
        at = 0
        while at < len(whole):
            some = int(random.choice([1, 1000, MANY_BYTES - 1, MANY_BYTES + 1, RECEIVED_AT_ONCE_BYTES]))
            sender.sendall(whole[at : at + some])
            at += some
            if random.random() < 0.3:
                time.sleep(0.003)

    sending = beside.submit(send)
    header, size = channel.receive(timeout_s)
    into = bytearray(size)
    for part in (slice(0, MANY_BYTES + 7), slice(MANY_BYTES + 7, size)):
        channel.read_body(memoryview(into)[part], timeout_s)
    assert (header, bytes(into)) == (Push(step=1), body)
    assert channel.receive(timeout_s) == (Pull(step=2), 0)
    assert taker.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1  # who polls it is told of every byte again
    done(sending)
    sender.close()
    channel.close()


def test_a_silence_where_many_bytes_are_waited_for_together_is_a_lost_connection(
    raw: tuple[socket.socket, Channel[Message]],
) -> None:
    sender, channel = raw
    sender.sendall(frame(Push(step=1), bytes(2 * MANY_BYTES))[:-MANY_BYTES])
    _, size = channel.receive(SOON_S)
    with pytest.raises(ConnectionLost, match=r"did not answer within 0\.2 s"):
        channel.read_body(memoryview(bytearray(size)), 0.2)


def test_small_frames_leave_in_one_piece() -> None:
    """Else a request would be two packets, and the second would wait for the first one's acknowledgement."""
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps the seams of writes
    channel = Channel[Message](a, DECODER)
    with b:
        channel.send(Push(1), [memoryview(b"tensor"), memoryview(b"bias")])
        assert b.recv(1000) == frame(Push(1), b"tensorbias")
        channel.close()


def test_connections_are_tuned() -> None:
    a, b = tcp_pair()
    with a, b:
        a.settimeout(5)
        for _ in range(2):
            tune(a)
        assert a.gettimeout() is None
        assert a.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert a.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    with pytest.raises(ConnectionLost, match="the connection broke"):
        tune(a)


# ── the end of a connection ──────────────────────────────────────────────────────────────────────────────────

WHOLE = frame(Push(5, ["weight"]), b"0123456789")


def receive_whole(channel: Channel[Message], timeout_s: float | None) -> None:
    channel.receive(timeout_s)
    channel.read_whole_body(10, timeout_s)


@pytest.mark.parametrize("arrived", range(len(WHOLE)))
@pytest.mark.parametrize("timeout_s", [None, SOON_S])
def test_an_end_at_any_byte_is_a_lost_connection(arrived: int, timeout_s: float | None) -> None:
    stranger, connection = socket.socketpair()
    channel = Channel[Message](connection, DECODER)
    stranger.sendall(WHOLE[:arrived])
    stranger.close()
    with pytest.raises(ConnectionLost, match="the other side closed the connection"):
        receive_whole(channel, timeout_s)
    channel.close()


@pytest.mark.parametrize("arrived", [0, 1, 16, 20, len(WHOLE) - 10, len(WHOLE) - 1])
def test_a_silence_at_any_byte_is_a_lost_connection(arrived: int) -> None:
    stranger, connection = socket.socketpair()
    channel = Channel[Message](connection, DECODER)
    with stranger:
        stranger.sendall(WHOLE[:arrived])
        with pytest.raises(ConnectionLost, match=r"did not answer within 0\.05 s"):
            receive_whole(channel, 0.05)
        stranger.sendall(WHOLE[arrived:] + WHOLE)
        with pytest.raises(ConnectionLost, match="cannot be used any more"):  # not in the middle of something
            channel.receive(0.05)
    channel.close()


def test_a_byte_now_and_then_does_not_stretch_the_timeout(
    raw: tuple[socket.socket, Channel[Message]], beside: ThreadPoolExecutor
) -> None:
    stranger, channel = raw
    ended = threading.Event()

    def trickle() -> None:
        with contextlib.suppress(OSError):
            for byte in prelude(60_000, 0) + bytes(60_000):
                stranger.sendall(bytes([byte]))
                if ended.wait(0.0005):
                    return

    trickling = beside.submit(trickle)
    began = time.monotonic()
    with pytest.raises(ConnectionLost, match=r"within 0\.3 s"):
        channel.receive(0.3)
    took = time.monotonic() - began
    ended.set()
    done(trickling)
    assert took < 5


def test_a_reset_is_a_lost_connection(raw: tuple[socket.socket, Channel[Message]]) -> None:
    stranger, channel = raw
    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stranger.close()
    with pytest.raises(ConnectionLost, match="reset"):
        channel.receive()


def test_sending_to_somebody_who_has_gone(raw: tuple[socket.socket, Channel[Message]]) -> None:
    stranger, channel = raw
    stranger.close()
    with pytest.raises(ConnectionLost, match="broke while sending"):
        channel.send(Push(1), [memoryview(bytes(SLICE_BYTES))] * 100)
    with pytest.raises(ConnectionLost):
        channel.send(Push(1))


def test_sending_to_somebody_who_takes_nothing(raw: tuple[socket.socket, Channel[Message]]) -> None:
    _, channel = raw
    with pytest.raises(ConnectionLost, match=r"took nothing for 0\.1 s"):
        channel.send(Push(1), [memoryview(bytes(64 << 20))], timeout_s=0.1)
    with pytest.raises(ConnectionLost):  # the frame is incomplete: no other may follow it
        channel.send(Push(1))


@pytest.mark.parametrize("timeout_s", [None, SOON_S])
@pytest.mark.parametrize("what", ["receive", "send"])
def test_interrupt_wakes_the_thread_that_waits(
    raw: tuple[socket.socket, Channel[Message]], beside: ThreadPoolExecutor, what: str, timeout_s: float | None
) -> None:
    _, channel = raw

    def wait() -> None:
        if what == "receive":
            channel.receive(timeout_s)
        else:
            channel.send(Push(1), [memoryview(bytes(64 << 20))], timeout_s=timeout_s)

    waiting = beside.submit(wait)
    time.sleep(0.05)
    channel.interrupt()
    with pytest.raises(ConnectionLost):
        done(waiting)


def test_what_had_arrived_before_an_interrupt_is_not_used(raw: tuple[socket.socket, Channel[Message]]) -> None:
    stranger, channel = raw
    stranger.sendall(frame(Push(1)))
    channel.interrupt()
    with pytest.raises(ConnectionLost, match="given up"):
        channel.receive()


def test_a_closed_channel_is_a_lost_connection(raw: tuple[socket.socket, Channel[Message]]) -> None:
    _, channel = raw
    channel.close()
    channel.close()
    for timeout_s in (None, 1.0):
        with pytest.raises(ConnectionLost):
            channel.receive(timeout_s)
        with pytest.raises(ConnectionLost):
            channel.send(Push(1), timeout_s=timeout_s)


def test_an_error_while_a_body_is_made_ends_the_connection(raw: tuple[socket.socket, Channel[Message]]) -> None:
    stranger, channel = raw

    def parts() -> Iterator[memoryview]:
        yield memoryview(b"half")
        raise ValueError("disk")

    with pytest.raises(ValueError, match="disk"):  # and not a lost connection
        channel.send(Push(1), parts(), body_bytes=8)
    with pytest.raises(ConnectionLost):
        channel.send(Push(2))
    assert stranger.makefile("rb").read() == frame(Push(1), b"half----")[:-12]


@pytest.mark.parametrize(("parts", "sentence"), [([b"123"], "1 bytes short"), ([b"123", b"45"], "longer than")])
def test_a_body_is_as_long_as_announced(
    raw: tuple[socket.socket, Channel[Message]], parts: list[bytes], sentence: str
) -> None:
    stranger, channel = raw
    with pytest.raises(AssertionError, match=sentence):
        channel.send(Push(1), map(memoryview, parts), body_bytes=4)
    assert stranger.makefile("rb").read() == frame(Push(1), b"123-")[:-9]


# ── what is no frame ─────────────────────────────────────────────────────────────────────────────────────────

encode = msgspec.msgpack.encode
WRONG = {
    "http": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "something else and not a frame"),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(20), "what arrived is TLS"),
    "version": (raw_frame(b"\x80", version=9), "speaks version 9 of the protocol and this one 3"),
    "long header": (prelude((64 << 10) + 1, 0), r"a frame of 65537 \+ 0 bytes is larger"),
    "longest header": (prelude(2**32 - 1, 0), "is larger than"),
    "longest body": (prelude(1, 2**64 - 1), "is larger than"),
    "empty header": (raw_frame(b""), "does not fit its schema"),
    "no map": (frame([1, 2]), "does not fit its schema"),
    "unknown tag": (frame({"type": "exec", "step": 1}), "does not fit its schema"),
    "missing field": (frame({"type": "push"}), "does not fit its schema"),
    "wrong type": (frame({"type": "push", "step": "one"}), "does not fit its schema"),
    "not UTF-8": (raw_frame(encode({"type": "push", "step": 1, "names": ["aa"]}).replace(b"aa", b"\xff\xff")), "fit"),
    "more after the header": (raw_frame(encode({"type": "pull", "step": 1}) + bytes(15)), "fit"),
    "list of 4 billion": (
        raw_frame(b"\x83\xa4type\xa4push\xa5names\xdd\xff\xff\xff\xff" + bytes(9)),
        "does not fit its schema",
    ),
    "deep list": (
        raw_frame(b"\x83\xa4type\xa4pull\xa6nested" + b"\x91" * 60_000),
        "does not fit its schema",
    ),
    "deep list of no field": (
        raw_frame(b"\x83\xa4type\xa4pull\xa6unused" + b"\x91" * 60_000),
        "does not fit its schema",
    ),
    "deep tree": (
        raw_frame(b"\x82\xa4type\xa4tree\xa5below\x91" * 3000),
        "does not fit its schema",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_frame_is_told_in_a_sentence(raw: tuple[socket.socket, Channel[Message]], name: str) -> None:
    stranger, channel = raw
    data, sentence = WRONG[name]
    stranger.sendall(data)
    with pytest.raises(FrameError, match=sentence):
        channel.receive(SOON_S)
    with pytest.raises(ConnectionLost, match="cannot be used any more"):
        channel.receive(SOON_S)
    channel.send(Push(1))  # there may still be something to say
    assert stranger.recv(100) == frame(Push(1))


def test_who_is_trusted_may_send_longer_headers(
    channels: tuple[Channel[Message], Channel[Message]], beside: ThreadPoolExecutor
) -> None:
    a, b = channels
    b.trusted = True
    long = Push(1, ["x" * 1000] * 2000)
    sending = beside.submit(a.send, long)
    assert b.receive(SOON_S) == (long, 0)
    done(sending)
    a.trusted = True
    b.send(Push(1))
    a.receive(SOON_S)
    b._connection.sendall(prelude(MOST_HEADER_BYTES + 1, 0))
    with pytest.raises(FrameError, match="is larger than"):
        a.receive(SOON_S)


def test_bodies_are_read_neither_short_nor_long(raw: tuple[socket.socket, Channel[Message]]) -> None:
    for misuse, sentence in (
        (lambda channel: channel.read_body(memoryview(bytearray(11))), "a body is 1 bytes too short"),
        (lambda channel: channel.read_whole_body(9), "a body of 10 bytes is larger than the 9"),
        (lambda channel: channel.end_body(), "a body is 10 bytes too long"),
        (lambda channel: channel.receive(), "10 bytes of a body were left unread"),
    ):
        stranger, connection = socket.socketpair()
        channel = Channel[Message](connection, DECODER, most_body_bytes=10)
        with stranger:
            stranger.sendall(WHOLE)
            channel.receive(SOON_S)
            with pytest.raises(FrameError, match=sentence):
                misuse(channel)
        channel.close()
    stranger, channel = raw
    small = Channel[Message](channel._connection, DECODER, most_body_bytes=9)
    stranger.sendall(WHOLE)
    with pytest.raises(FrameError, match=r"\+ 10 bytes is larger than the 65536 \+ 9"):
        small.receive(SOON_S)


def test_a_refused_body_can_be_skipped_so_that_the_answer_arrives(
    channels: tuple[Channel[Message], Channel[Message]], beside: ThreadPoolExecutor
) -> None:
    a, b = channels
    sending = beside.submit(a.send, Push(1), [memoryview(bytes(20 << 20))])
    b.receive(SOON_S)
    b.read_body(memoryview(bytearray(1000)), SOON_S)
    b.skip_body(SOON_S)
    b.end_body()
    b.send(Pull(1))
    b.close()
    done(sending)
    assert a.receive(SOON_S) == (Pull(1), 0)


def test_what_a_stranger_sends_does_not_get_to_the_terminal(raw: tuple[socket.socket, Channel[Message]]) -> None:
    stranger, channel = raw
    stranger.sendall(frame({"type": "\x1b[2J\nall is well\n" + "x" * 10_000}))
    with pytest.raises(FrameError) as refusal:
        channel.receive(SOON_S)
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 300


def test_announcing_much_costs_little() -> None:
    """The most a stranger may announce is small; the most a friend may is allocated as it arrives."""
    announced = prelude(MOST_HEADER_BYTES, 1 << 38)
    most = prelude(MOST_STRANGERS_HEADER_BYTES, 1 << 38)
    tracemalloc.start()
    try:
        for trusted, data in [(False, announced), (False, most), (True, announced)]:
            stranger, connection = socket.socketpair()
            channel = Channel[Message](connection, DECODER)
            channel.trusted = trusted
            with stranger:
                stranger.sendall(data)
                tracemalloc.reset_peak()
                before = tracemalloc.get_traced_memory()[0]
                with pytest.raises((FrameError, ConnectionLost)):
                    channel.receive(0.05)
                assert tracemalloc.get_traced_memory()[1] - before < MOST_STRANGERS_HEADER_BYTES + 40_000
            channel.close()
    finally:
        tracemalloc.stop()


# ── anything at all ──────────────────────────────────────────────────────────────────────────────────────────

anything = settings(max_examples=300, deadline=None)
VALID = [
    frame(Push(5, ["weight", "bias"], {"w": 0.5, "b": float("nan")}), b"0123456789"),
    frame(Pull(2**40, {"a": [1, None, b"x", {"b": -1.5}]})),
    frame(Tree([Tree([Tree()]), Tree()]), bytes(100)),
]
announcements = st.builds(
    prelude,
    st.integers(0, 2**32 - 1) | st.integers(0, 200),
    st.integers(0, 2**64 - 1) | st.integers(0, 200),
    version=st.sampled_from([PROTOCOL, PROTOCOL, PROTOCOL, 0, 1, 255]),
)
# Pieces of msgpack, put together in any order: deep, truncated, of the wrong type, with lengths that lie.
pieces = st.lists(
    st.sampled_from([b"\xa4type", b"\xa4push", b"\xa4pull", b"\xa4tree", b"\xa4step", b"\xa5names", b"\xa6nested"])
    | st.sampled_from([b"\x81", b"\x82", b"\x91", b"\x92", b"\xc0", b"\x01", b"\x91" * 5000, b"\x81\xa1a" * 5000])
    | st.sampled_from([b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"]).flatmap(
        lambda code: st.integers(0, 2**32 - 1).map(lambda count: code + count.to_bytes(4, "big"))
    )
    | st.binary(max_size=5),
    max_size=12,
).map(b"".join)


def swallow(data: bytes, *, trusted: bool) -> list[tuple[Message, bytes]]:
    """Receives until the end of what a stranger sent; anything but the two errors is a failure, and so is a wait."""
    stranger, connection = socket.socketpair()
    channel = Channel[Message](connection, DECODER, most_body_bytes=1 << 20)
    channel.trusted = trusted
    received = []
    with stranger:
        stranger.sendall(data)
        stranger.shutdown(socket.SHUT_WR)
        began = time.monotonic()
        try:
            while True:
                header, length = channel.receive(SOON_S)
                body = channel.read_whole_body(1 << 20, SOON_S)
                assert len(body) == length
                channel.end_body()
                received.append((header, bytes(body)))
        except (FrameError, ConnectionLost):
            pass
        assert time.monotonic() - began < SOON_S / 2
    channel.close()
    return received


@anything
@given(st.binary(max_size=300), st.booleans())
def test_random_bytes(data: bytes, trusted: bool) -> None:
    swallow(data, trusted=trusted)


@anything
@given(announcements, st.binary(max_size=300), st.booleans())
@example(prelude(0, 0), b"", True)
def test_random_announcements(begin: bytes, rest: bytes, trusted: bool) -> None:
    swallow(begin + rest, trusted=trusted)


@anything
@given(pieces, st.integers(-2, 2), st.booleans())
def test_random_headers(header: bytes, lie: int, trusted: bool) -> None:
    told = max(0, len(header) + lie)
    swallow(prelude(told, 0, header_sum=xxhash.xxh3_64_intdigest((header + bytes(2))[:told])) + header, trusted=trusted)


@anything
@given(st.lists(st.sampled_from(VALID), min_size=1, max_size=3), st.data())
def test_flipped_bits_and_truncated_frames_are_never_taken_for_others(frames: list[bytes], draw: st.DataObject) -> None:
    whole = b"".join(frames)
    changed = bytearray(whole)
    for bit in draw.draw(st.lists(st.integers(0, 8 * len(whole) - 1), max_size=4)):
        changed[bit // 8] ^= 1 << bit % 8
    del changed[draw.draw(st.integers(0, len(changed))) :]
    received = [raw_frame(encode(header), body) for header, body in swallow(bytes(changed), trusted=True)]
    assert whole.startswith(b"".join(received))


@pytest.mark.parametrize("place", range(len(WHOLE)))
def test_a_flip_at_any_byte_is_found(place: int) -> None:
    changed = bytearray(WHOLE)
    changed[place] ^= 1 + place % 255
    assert swallow(bytes(changed), trusted=True) == []
    assert len(swallow(WHOLE + bytes(changed), trusted=True)) == 1


def test_a_body_in_which_parts_have_changed_places_is_found(raw: tuple[socket.socket, Channel[Message]]) -> None:
    stranger, channel = raw
    body = os.urandom(1 << 20)
    sent = frame(Push(1), body).replace(body, body[1 << 19 :] + body[: 1 << 19])
    with ThreadPoolExecutor(1) as beside:
        beside.submit(stranger.sendall, sent)
        channel.receive(SOON_S)
        with pytest.raises(FrameDamaged, match="the body of a frame was damaged on the way"):
            channel.read_body(memoryview(bytearray(len(body))), SOON_S)


@settings(max_examples=60, deadline=None)
@given(announcements | pieces.map(lambda header: raw_frame(header, bytes(9))[:-9]))
def test_nothing_makes_a_stranger_cost_more_than_the_bound(data: bytes) -> None:
    tracemalloc.start()
    try:
        swallow(data, trusted=False)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The header, what is decoded from it (at most a few objects a byte), and Python's own.
    assert peak < 2 << 20, peak


def test_valid_frames_of_the_fuzz_tests_are_valid() -> None:
    for data in VALID:
        stranger, connection = socket.socketpair()
        channel = Channel[Message](connection, DECODER)
        with stranger:
            stranger.sendall(data)
            _, length = channel.receive(SOON_S)
            channel.read_whole_body(length, SOON_S)
        channel.close()
