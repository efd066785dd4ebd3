"""Secure connections: friends get through, strangers cost only their own connection, and each is told why."""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from paceline.cli.keys import make_certificate, make_keys
from paceline.errors import PacelineError, SecurityError
from paceline.net.frames import Channel, ConnectionLost, FrameError
from paceline.net.secure import (
    Keys,
    is_loopback,
    new_token,
    proof_of,
    read_token,
    same_proof,
    wrap_client,
    wrap_server,
    write_token,
)

SOON_S = 30.0


class Hello(msgspec.Struct):
    text: str


DECODER = msgspec.msgpack.Decoder(Hello)


# ── keys of every kind ───────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="session")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ours")
    make_keys(folder, "node0")
    return folder


@pytest.fixture(scope="session")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another CA that has the same name."""
    folder = tmp_path_factory.mktemp("others")
    make_keys(folder, "node0")
    return folder


def sign(
    folder: Path, authority: Path, stem: str, *, unit: str | None, purposes: list[Any], days: tuple[float, float]
) -> None:
    """A certificate as somebody else's tools might make it, into `folder` as that of role `stem`."""
    ca = x509.load_pem_x509_certificate((authority / "ca.pem").read_bytes())
    key = serialization.load_pem_private_key((authority / "ca.key").read_bytes(), None)
    own = serialization.load_pem_private_key((folder / f"{stem}.key").read_bytes(), None)
    now = datetime.datetime.now(datetime.timezone.utc)
    units = [x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, unit)] if unit else []
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([*units, x509.NameAttribute(NameOID.COMMON_NAME, "x")]))
        .issuer_name(ca.subject)
        .public_key(own.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + datetime.timedelta(days=days[0]))
        .not_valid_after(now + datetime.timedelta(days=days[1]))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    )
    if purposes:
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    signed = builder.sign(key, hashes.SHA256())  # type: ignore[arg-type]
    (folder / f"{stem}.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))


PURPOSE = {"server": ExtendedKeyUsageOID.SERVER_AUTH, "client": ExtendedKeyUsageOID.CLIENT_AUTH}


def spoil(folder: Path, ours: Path, others: Path, role: str, how: str) -> None:
    """Makes the certificate of a role in a copy of our keys a bad one."""
    other = "client" if role == "server" else "server"
    if how == "of another CA":
        for end in ("pem", "key"):
            shutil.copy(others / f"{role}.{end}", folder)
    elif how == "of the other role":
        for end in ("pem", "key"):
            shutil.copy(ours / f"{other}.{end}", folder / f"{role}.{end}")
    else:
        unit, purposes, days = f"paceline {role}", [PURPOSE[role]], (-10.0, 10.0)
        if how == "expired":
            days = (-10, -1)
        elif how == "of tomorrow":
            days = (1, 10)
        elif how == "of another purpose":
            purposes = [PURPOSE[other]]
        elif how == "of another unit":
            unit = f"paceline {other}"
        elif how == "of a web site":
            unit, purposes = None, list(PURPOSE.values())
        else:
            assert how == "of no purpose and unit"
            unit, purposes = None, []
        sign(folder, ours, role, unit=unit, purposes=purposes, days=days)


BAD = {
    "of another CA": "is signed by another CA",
    "of the other role": "is of the wrong role",
    "expired": "has expired",
    "of tomorrow": "is not valid yet",
    "of another purpose": "is of the wrong role",
    "of another unit": "is of the wrong role",
    "of a web site": "is of the wrong role",
    "of no purpose and unit": "is of the wrong role",
}


@pytest.fixture
def copy(ours: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ours, tmp_path / "keys"))


# ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_token_is_secret(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        token = write_token(tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert read_token(tmp_path) == token
    assert write_token(tmp_path) != token
    assert os.listdir(tmp_path) == ["token"]
    assert len({new_token() for _ in range(100)}) == 100


def test_a_token_is_read_from_any_file(tmp_path: Path) -> None:
    token = write_token(tmp_path)
    copied = tmp_path / "of-the-cluster.txt"
    copied.touch(0o600)
    copied.write_text(f"{token}\n")
    assert read_token(copied) == read_token(tmp_path / "token") == token
    copied.write_text("short")
    with pytest.raises(SecurityError, match=r"of-the-cluster.txt does not hold a token: give the file that does"):
        read_token(copied)
    copied.write_text(token)
    copied.chmod(0o644)
    with pytest.raises(SecurityError, match="can be read by everybody"):
        read_token(copied)


def test_a_file_of_others_is_not_reused_for_a_token(tmp_path: Path) -> None:
    """Who was there first must not be able to read what is written: not by an open file, not by a link."""
    (tmp_path / "elsewhere").write_text("")
    (tmp_path / "token").symlink_to("elsewhere")
    write_token(tmp_path)
    assert not (tmp_path / "token").is_symlink()
    assert (tmp_path / "elsewhere").read_text() == ""


def test_tokens_are_compared_whole() -> None:
    token = new_token()
    proof = proof_of(token, b"number")
    assert same_proof(proof, proof_of(token, b"number"))
    assert not same_proof(proof, proof_of(token, b"another"))
    for wrong in ("", token[:-1], token + "x", token.swapcase(), "é" * len(token), "\ud800"):
        assert not same_proof(proof, proof_of(wrong, b"number"))


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 43, b"with\x00zero" * 4, b"x" * 5000, b"two\nlines" * 5])
def test_a_file_that_holds_no_token(tmp_path: Path, content: bytes) -> None:
    write_token(tmp_path)
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(SecurityError, match="does not hold a token"):
        read_token(tmp_path)


def test_tokens_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SecurityError, match="there is no token in"):
        read_token(tmp_path)
    with pytest.raises(SecurityError, match="cannot be written: No such file"):
        write_token(tmp_path / "none")
    write_token(tmp_path)
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(SecurityError, match="can be read by everybody: chmod 600"):
        read_token(tmp_path)


# ── folders ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_contexts_are_strict(ours: Path) -> None:
    keys = Keys.load(ours)
    for context in (keys.server_context(), keys.client_context()):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3
        assert context.verify_mode == ssl.CERT_REQUIRED
        assert len(context.get_ca_certs()) == 1
    assert keys.server_context() is keys.server_context()


@pytest.mark.parametrize("role", ["server", "client"])
@pytest.mark.parametrize("how", BAD)
def test_a_bad_certificate_is_found_in_ones_own_folder(
    copy: Path, ours: Path, others: Path, role: str, how: str
) -> None:
    spoil(copy, ours, others, role, how)
    with pytest.raises(SecurityError, match=rf"{role}\.pem {BAD[how]}"):
        Keys.load(copy)


def test_a_folder_needs_keys_of_one_role_only(copy: Path) -> None:
    for file in ("ca.key", "server.pem", "server.key"):
        (copy / file).unlink()
    keys = Keys.load(copy)
    keys.client_context()
    with pytest.raises(SecurityError, match=r"there is no server\.pem in"):
        keys.server_context()
    (copy / "client.pem").unlink()
    with pytest.raises(SecurityError, match=r"there is no server\.pem in"):
        Keys.load(copy)


def test_what_can_be_wrong_with_a_folder(copy: Path, others: Path) -> None:
    def refused(file: str, change: Callable[[Path], object]) -> str:
        before, mode = (copy / file).read_bytes(), (copy / file).stat().st_mode
        change(copy / file)
        with pytest.raises(SecurityError) as refusal:
            Keys.load(copy)
        (copy / file).unlink(missing_ok=True)
        (copy / file).write_bytes(before)
        (copy / file).chmod(mode)
        Keys.load(copy)
        return str(refusal.value).replace(f"{copy}", "KEYS")

    with pytest.raises(SecurityError, match="there is no folder"):
        Keys.load(copy / "none")
    for file in ("ca.pem", "server.key", "client.key"):
        assert refused(file, Path.unlink) == f"there is no {file} in KEYS"
    for file in ("ca.pem", "server.pem", "server.key", "client.pem"):
        for content in (
            b"",
            b"nonsense",
            b"\xff\x00",
            b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        ):
            assert "is damaged or not in PEM format" in refused(file, lambda path, data=content: path.write_bytes(data))
    swapped = refused("server.key", lambda path: path.write_bytes((others / "server.key").read_bytes()))
    assert swapped == "KEYS/server.pem and server.key do not belong together"
    no_ca = refused("ca.pem", lambda path: path.write_bytes((copy / "server.pem").read_bytes()))
    assert no_ca == "KEYS/ca.pem is not the certificate of a CA"
    readable = refused("client.key", lambda path: path.chmod(0o604))
    assert readable.startswith("KEYS/client.key can be read by everybody: chmod 600 KEYS/client.key")


def test_a_key_with_a_password_is_refused_and_not_asked_for(copy: Path) -> None:
    key = serialization.load_pem_private_key((copy / "server.key").read_bytes(), None)
    secret = serialization.BestAvailableEncryption(b"password")
    data = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret)
    (copy / "server.key").write_bytes(data)
    with pytest.raises(SecurityError, match="damaged"):
        Keys.load(copy)


# ── connections ──────────────────────────────────────────────────────────────────────────────────────────────


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        a = socket.create_connection(listener.getsockname())
        return a, listener.accept()[0]


def both(server: Callable[[socket.socket], Any], client: Callable[[socket.socket], Any]) -> tuple[Any, Any]:
    """What each side returns or raises."""

    def outcome(side: Callable[[socket.socket], Any], connection: socket.socket) -> Any:
        try:
            return side(connection)
        except PacelineError as error:
            return error

    connecting, accepted = tcp_pair()
    with ThreadPoolExecutor(2) as pool:
        sides = pool.submit(outcome, server, accepted), pool.submit(outcome, client, connecting)
        found = tuple(side.result(timeout=SOON_S) for side in sides)
    connecting.close()
    accepted.close()
    return found  # type: ignore[return-value]


@pytest.fixture
def channels(ours: Path) -> Iterator[tuple[Channel[Hello], Channel[Hello]]]:
    keys = Keys.load(ours)
    server, client = both(lambda c: wrap_server(c, keys), lambda c: wrap_client(c, keys))
    a, b = Channel[Hello](server, DECODER), Channel[Hello](client, DECODER)
    yield a, b
    a.close()
    b.close()


def test_channels_over_tls(channels: tuple[Channel[Hello], Channel[Hello]]) -> None:
    a, b = channels
    body = np.random.default_rng(0).integers(0, 256, (5 << 20) + 3, dtype=np.uint8)

    def send() -> None:
        for step in range(3):
            a.send(Hello(f"step {step}"), [memoryview(body)], timeout_s=SOON_S)

    with ThreadPoolExecutor(1) as pool:
        for timeout_s in (None, SOON_S):
            sending = pool.submit(send)
            for step in range(3):
                assert b.receive(timeout_s) == (Hello(f"step {step}"), body.nbytes)
                got = np.zeros_like(body)
                b.read_body(memoryview(got), timeout_s)
                b.end_body()
                assert (got == body).all()
            sending.result(timeout=SOON_S)
        b.send(Hello("thanks"))
        assert a.receive(SOON_S) == (Hello("thanks"), 0)


def test_the_last_frame_before_a_close_arrives(channels: tuple[Channel[Hello], Channel[Hello]]) -> None:
    a, b = channels
    a.send(Hello("last"), [memoryview(b"words")])
    a.close()
    assert b.receive(SOON_S) == (Hello("last"), 5)
    assert b.read_whole_body(5, SOON_S) == b"words"
    with pytest.raises(ConnectionLost, match="the other side closed the connection"):
        b.receive(SOON_S)


def test_timeouts_over_tls(channels: tuple[Channel[Hello], Channel[Hello]]) -> None:
    a, b = channels
    with pytest.raises(ConnectionLost, match=r"did not answer within 0\.05 s"):
        b.receive(0.05)
    with pytest.raises(ConnectionLost, match=r"took nothing for 0\.1 s"):
        a.send(Hello("much"), [memoryview(bytes(64 << 20))], timeout_s=0.1)


@pytest.mark.parametrize("what", ["receive", "send"])
def test_interrupt_over_tls(channels: tuple[Channel[Hello], Channel[Hello]], what: str) -> None:
    a, _ = channels
    with ThreadPoolExecutor(1) as pool:
        if what == "receive":
            waiting: Any = pool.submit(a.receive)
        else:
            waiting = pool.submit(a.send, Hello("much"), [memoryview(bytes(64 << 20))])
        time.sleep(0.05)
        a.interrupt()
        with pytest.raises(ConnectionLost):
            waiting.result(timeout=SOON_S)


def test_an_interrupted_channel_sends_nothing_in_plain(ours: Path) -> None:
    keys = Keys.load(ours)
    heard = bytearray()

    def listen(connection: socket.socket, to: socket.socket, into: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := connection.recv(1 << 16):
                into += data
                to.sendall(data)
        with contextlib.suppress(OSError):
            to.shutdown(socket.SHUT_WR)

    client, between = tcp_pair()
    beyond, server = tcp_pair()
    with ThreadPoolExecutor(4) as pool, between, beyond:
        pool.submit(listen, between, beyond, heard)
        pool.submit(listen, beyond, between, bytearray())
        accepting = pool.submit(wrap_server, server, keys)
        channel = Channel[Hello](wrap_client(client, keys), DECODER)
        accepted = Channel[Hello](accepting.result(timeout=SOON_S), DECODER)
        channel.send(Hello("a secret"))
        accepted.receive(SOON_S)
        channel.interrupt()
        with pytest.raises(ConnectionLost):
            channel.send(Hello("a secret"))
        channel.close()
        with pytest.raises(ConnectionLost):
            channel.send(Hello("a secret"))
        accepted.close()
    assert len(heard) > 500
    assert b"secret" not in heard


def test_a_changed_byte_is_noticed(ours: Path) -> None:
    keys = Keys.load(ours)
    server, client = both(lambda c: wrap_server(c, keys), lambda c: wrap_client(c, keys))
    channel = Channel[Hello](server, DECODER)
    socket.socket.sendall(client, b"\x17\x03\x03\x00\x20" + bytes(32))  # a record by somebody without the key
    with pytest.raises(ConnectionLost, match="the connection broke"):
        channel.receive(SOON_S)
    channel.close()
    client.close()


@pytest.mark.parametrize("role", ["server", "client"])
@pytest.mark.parametrize("how", BAD)
def test_a_bad_certificate_is_refused_and_both_sides_know(
    copy: Path, ours: Path, others: Path, role: str, how: str
) -> None:
    spoil(copy, ours, others, role, how)
    good, bad = Keys.load(ours), Keys(copy)
    if role == "client":
        finds, told = both(lambda c: wrap_server(c, good), lambda c: wrap_client(c, bad))
    else:
        told, finds = both(lambda c: wrap_server(c, bad), lambda c: wrap_client(c, good))
    assert isinstance(finds, SecurityError)
    assert f"the certificate of the {role} {BAD[how]}" in str(finds)
    if isinstance(told, ssl.SSLSocket):  # a server does not learn that its client found its unit to be wrong
        assert role == "server"
        assert told.recv(1) == b""
        told.close()
    else:
        assert isinstance(told, (SecurityError, ConnectionLost))
        if role == "client":
            assert "the server refused" in str(told)


def test_another_authority_on_both_sides(ours: Path, others: Path) -> None:
    server, client = both(lambda c: wrap_server(c, Keys.load(ours)), lambda c: wrap_client(c, Keys.load(others)))
    assert str(client) == "the certificate of the server is signed by another CA"
    assert str(server) == "the client refused our certificate: it is signed by another CA than its own"


def test_a_client_without_a_certificate(ours: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(ours / "ca.pem")

    def curious(connection: socket.socket) -> bytes:
        with context.wrap_socket(connection) as wrapped, contextlib.suppress(ssl.SSLError):
            return wrapped.recv(1)
        return b""

    server, seen = both(lambda c: wrap_server(c, Keys.load(ours)), curious)
    assert str(server) == "the client showed no certificate"
    assert seen == b""


def test_an_older_tls_is_refused(ours: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(ours / "ca.pem")
    context.load_cert_chain(ours / "client.pem", ours / "client.key")

    def old(connection: socket.socket) -> str:
        with pytest.raises(ssl.SSLError):
            context.wrap_socket(connection)
        return "refused"

    server, seen = both(lambda c: wrap_server(c, Keys.load(ours)), old)
    assert str(server) == "the client speaks an older TLS than 1.3"
    assert seen == "refused"


def test_one_side_without_keys(ours: Path) -> None:
    keys = Keys.load(ours)

    def plain(connection: socket.socket) -> None:
        channel = Channel[Hello](connection, DECODER)
        try:
            channel.send(Hello("I have no keys"))
            channel.receive(SOON_S)
        finally:
            channel.close()

    server, client = both(lambda c: wrap_server(c, keys), plain)
    assert str(server) == "the client does not speak TLS: give it keys too, or none to either side"
    assert isinstance(client, ConnectionLost)

    def accept_plain(connection: socket.socket) -> None:
        channel = Channel[Hello](connection, DECODER)
        try:
            channel.receive(SOON_S)
        finally:
            channel.close()

    server, client = both(accept_plain, lambda c: wrap_client(c, keys))
    assert isinstance(server, FrameError)
    assert str(server) == "what arrived is TLS and not a frame of this protocol"
    assert isinstance(client, ConnectionLost)

    def plain_server(connection: socket.socket) -> None:
        with connection:
            connection.sendall(b"220 mail.example.org ready\r\n" * 3)
            connection.recv(1000)

    _, client = both(plain_server, lambda c: wrap_client(c, keys))
    assert str(client) == "the server does not speak TLS: give it keys too, or none to either side"


STRANGERS: dict[str, bytes | None] = {
    "closes at once": b"",
    "says nothing": None,
    "speaks HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "sends zeros": bytes(1000),
    "sends noise": os.urandom(4096),
    "begins a handshake and closes": b"\x16\x03\x01\x02\x00\x01\x00",
    "announces a long record": b"\x16\x03\x01\xff\xff",
}


@pytest.mark.parametrize("side", [wrap_server, wrap_client])
@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_costs_only_its_connection(ours: Path, name: str, side: Callable[..., Any]) -> None:
    keys, data = Keys.load(ours), STRANGERS[name]
    stranger, connection = tcp_pair()
    number = connection.fileno()
    if data is not None:
        stranger.sendall(data)
        stranger.shutdown(socket.SHUT_WR)
    began = time.monotonic()
    with pytest.raises((SecurityError, ConnectionLost)) as refusal:
        side(connection, keys, timeout_s=0.3 if data is None else SOON_S)
    assert time.monotonic() - began < 10
    assert "\n" not in str(refusal.value)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    stranger.close()
    # The same contexts serve the next one as before.
    server, client = both(lambda c: wrap_server(c, keys), lambda c: wrap_client(c, keys))
    assert isinstance(server, ssl.SSLSocket)
    server.close()
    client.close()


def test_a_reset_during_the_handshake(ours: Path) -> None:
    stranger, connection = tcp_pair()
    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stranger.close()
    with pytest.raises(ConnectionLost, match="the client closed the connection during the TLS handshake"):
        wrap_server(connection, Keys.load(ours))


def test_a_handshake_in_drops_does_not_stretch_the_timeout(ours: Path) -> None:
    stranger, connection = tcp_pair()
    ended = threading.Event()

    def trickle() -> None:
        with contextlib.suppress(OSError):
            for byte in b"\x16\x03\x01\x3f\xff\x01\x00\x3f\xfb\x03\x03" + bytes(16_000):
                stranger.sendall(bytes([byte]))
                if ended.wait(0.001):
                    return

    with ThreadPoolExecutor(1) as pool, stranger:
        trickling = pool.submit(trickle)
        began = time.monotonic()
        with pytest.raises(ConnectionLost, match="did not finish the TLS handshake in time"):
            wrap_server(connection, Keys.load(ours), timeout_s=0.3)
        took = time.monotonic() - began
        ended.set()
        trickling.result(timeout=SOON_S)
    assert took < 10


def test_keys_of_several_machines(ours: Path, tmp_path: Path) -> None:
    """A server and a replica that share nothing but the authority."""
    make_certificate(ours, "server", "10.0.0.7", to=tmp_path / "a")
    make_certificate(ours, "client", "laptop", to=tmp_path / "b")
    server, client = both(
        lambda c: wrap_server(c, Keys.load(tmp_path / "a")), lambda c: wrap_client(c, Keys.load(tmp_path / "b"))
    )
    assert server.version() == client.version() == "TLSv1.3"
    assert server.gettimeout() is None
    server.close()
    client.close()


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.255.255.254", True),
        ("::1", True),
        ("[::1]", True),
        ("LocalHost", True),
        ("::ffff:127.0.0.1", True),
        ("::1%lo", True),
        ("", False),
        ("0.0.0.0", False),
        ("::", False),
        ("128.0.0.1", False),
        ("192.168.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("127.0.0.1.example.org", False),
        ("localhost.example.org", False),
    ],
)
def test_loopback(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback
