"""Secure connections: who may speak to whom, and unheard by others.

On one machine a secret *token* in a file only its owner can read tells friends from strangers. Between machines there
are *keys*: an authority (CA) of the user's own signs a certificate for each side, and TLS 1.3 has both prove theirs.

    folder/  ca.pem                    whose signatures count                       on every machine
             ca.key                    signs more certificates                      stays where it was made
             server.pem, server.key    role server                                  on machines with servers
             client.pem, client.key    role client                                  on all: the chief is a client too

A role is in a certificate twice: as the purpose OpenSSL looks at (extended key usage), and as organizational unit
"paceline server" or "paceline client", so that with a company's authority in ca.pem not all of its certificates count.
Host names are not compared: a server is reached by whatever address its machine has on that link.

A folder is checked by a handshake with itself in memory, so what is found wrong here is what the other side would find.
Using keys needs nothing beyond Python; `paceline keys` makes them (`paceline/cli/keys.py`).

Of the cipher suites OpenSSL's order stays, AES-256-GCM first: Python cannot choose among those of TLS 1.3, and AES-128
is a thirtieth faster here. One connection carries about 0.8 GB/s on loopback, a quarter of what it does in plain.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import os
import secrets
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from paceline.errors import SecurityError
from paceline.net.frames import ConnectionLost

Role = Literal["server", "client"]

TOKEN = "token"
HANDSHAKE_S = 10.0
LINGER_S = 1.0
_WELCOME = b"\x06"
_MOST_TOKEN_BYTES = 1024
_MOST_FILE_BYTES = 1 << 20

# What OpenSSL finds about a certificate (X509_V_ERR_…), and what the other side may say of ours (alerts).
_FOUND = {
    7: "is signed by another CA",
    9: "is not valid yet: are the clocks right?",
    10: "has expired",
    18: "is signed by itself and not by our CA",
    19: "is signed by another CA",
    20: "is signed by another CA",
    21: "is signed by another CA",
    26: "is of the wrong role",
}
_TOLD = {
    "TLSV1_ALERT_UNKNOWN_CA": "is signed by another CA than its own",
    "TLSV1_ALERT_DECRYPT_ERROR": "is signed by another CA than its own",
    "SSLV3_ALERT_BAD_CERTIFICATE": "is not valid to it",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "has expired",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "is of the wrong role",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "is missing",
}
_NOT_TLS = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "UNKNOWN_PROTOCOL", "RECORD_TOO_SMALL"}
_OLD_TLS = {"UNSUPPORTED_PROTOCOL", "NO_PROTOCOLS_AVAILABLE", "TLSV1_ALERT_PROTOCOL_VERSION"}


# ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────────


def new_token() -> str:
    """A secret nobody can guess: 256 bits.

    >>> len(new_token()), new_token() == new_token()
    (43, False)
    """
    return secrets.token_urlsafe(32)


def write_token(folder: Path) -> str:
    """A new token, into a file that only its owner can read; replaces an older one."""
    token = new_token()
    write_secret(folder / TOKEN, token.encode())
    return token


def read_token(given: Path) -> str:
    """The token in a file, or in the folder of a server."""
    path = given if os.path.isfile(given) else given / TOKEN
    data = _read(path, secret=True)[: _MOST_TOKEN_BYTES + 1].strip()
    if not (16 <= len(data) <= _MOST_TOKEN_BYTES and data.isascii() and data.decode().isprintable()):
        hint = "give the file that does, or a server's --dir" if path is given else "remove it, and a new one is made"
        raise SecurityError(f"{path} does not hold a token: {hint}")
    return data.decode()


def proof_of(token: str, nonce: bytes) -> bytes:
    """What only somebody who knows the token can make of a number that was never used before.

    >>> proof_of("secret", b"1") == proof_of("secret", b"2")
    False
    """
    return hmac.digest(token.encode("utf-8", "surrogatepass"), nonce, "sha256")


def same_proof(a: bytes, b: bytes) -> bool:
    """Takes as long for a nearly right one as for any other, so that nobody can feel the way to the right one."""
    return hmac.compare_digest(a, b)


def write_secret(path: Path, data: bytes, mode: int = 0o600) -> None:
    """All of it or nothing, and at no moment readable by more than `mode` says."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        number = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            with open(number, "wb") as file:
                os.fchmod(number, mode)  # whatever the umask
                file.write(data)
                file.flush()
                os.fsync(number)
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise SecurityError(f"{path} cannot be written: {error.strerror}") from error


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Keys:
    """What is in a folder of keys: for one role or both. Each context is made once and serves all connections."""

    folder: Path

    @classmethod
    def load(cls, folder: Path) -> Keys:
        """The keys of a folder, all of which must be right."""
        keys = cls(Path(folder))
        keys.check_folder()
        roles: list[Role] = [role for role in ("server", "client") if (keys.folder / f"{role}.pem").exists()]
        for role in roles or ["server"]:
            keys.check(role)
        return keys

    def check_folder(self) -> None:
        if not os.path.isdir(self.folder):
            raise SecurityError(
                f"there is no folder {self.folder} with keys: paceline keys make {self.folder} makes one"
            )

    def server_context(self) -> ssl.SSLContext:
        """For the side that accepts connections."""
        return self._server_context

    def client_context(self) -> ssl.SSLContext:
        """For the side that connects."""
        return self._client_context

    @cached_property
    def _server_context(self) -> ssl.SSLContext:
        return self._context(ssl.PROTOCOL_TLS_SERVER, shows="server", demands=True)

    @cached_property
    def _client_context(self) -> ssl.SSLContext:
        return self._context(ssl.PROTOCOL_TLS_CLIENT, shows="client", demands=True)

    def _context(self, protocol: int, *, shows: Role | None, demands: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED if demands else ssl.CERT_NONE
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # nobody resumes; and bytes nobody reads would reset a connection when it is closed
        path = self.folder / "ca.pem"
        try:
            context.load_verify_locations(cadata=_read(path).decode())
            self._check_expiry(context)
            if shows is not None:
                path, key = self.folder / f"{shows}.pem", self.folder / f"{shows}.key"
                _read(path)
                _read(key, secret=True)
                # A password is not asked for at a terminal nobody sits at.
                context.load_cert_chain(path, key, password=lambda: b"")
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise SecurityError(f"{path} and {shows}.key do not belong together") from error
            raise SecurityError(f"{path} or its key is damaged or not in PEM format") from error
        except ValueError as error:
            raise SecurityError(f"{path} or its key is damaged or not in PEM format") from error
        return context

    def check_authority(self) -> None:
        """Whether ca.pem is a CA's and still valid."""
        self._context(ssl.PROTOCOL_TLS_CLIENT, shows=None, demands=True)

    def _check_expiry(self, context: ssl.SSLContext) -> None:
        path, ends = self.folder / "ca.pem", [str(ca["notAfter"]) for ca in context.get_ca_certs()]
        if not ends:
            raise SecurityError(f"{path} is not the certificate of a CA")
        if max(map(ssl.cert_time_to_seconds, ends)) < time.time():
            raise SecurityError(f"{path} has expired")

    def check(self, role: Role) -> None:
        """A handshake in memory, in which only this role's certificate is looked at."""
        accepting = self._context(ssl.PROTOCOL_TLS_SERVER, shows=role, demands=role == "client")
        connecting = self._context(
            ssl.PROTOCOL_TLS_CLIENT, shows=role if role == "client" else None, demands=role == "server"
        )
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = connecting.wrap_bio(back, there)
        server = accepting.wrap_bio(there, back, server_side=True)
        path = self.folder / f"{role}.pem"
        try:
            for side in (client, server, client, server):
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
        except ssl.SSLCertVerificationError as error:
            raise SecurityError(
                f"{path} {_FOUND.get(error.verify_code, f'is refused: {error.verify_message}')}"
            ) from error
        except ssl.SSLError as error:
            raise SecurityError(f"{path} cannot be used ({error.reason})") from error
        unit = _unit((client if role == "server" else server).getpeercert())
        if unit != unit_of(role):
            raise SecurityError(
                f"{path} is of the wrong role: its organizational unit is {unit!r}, not {unit_of(role)!r}"
            )


# ── connections ──────────────────────────────────────────────────────────────────────────────────────────────


def wrap_server(connection: socket.socket, keys: Keys, timeout_s: float = HANDSHAKE_S) -> ssl.SSLSocket:
    """TLS on a connection that was accepted, with a client of ours at its other end.

    In TLS 1.3 a client believes the handshake to be over before the server has seen its certificate. So the server
    says one byte of welcome, for which `wrap_client` waits: who is refused learns it there, and learns why.
    """
    return _wrap(connection, keys.server_context(), "client", time.monotonic() + timeout_s)


def wrap_client(connection: socket.socket, keys: Keys, timeout_s: float = HANDSHAKE_S) -> ssl.SSLSocket:
    """TLS on a connection that was made, with a server of ours at its other end that has accepted us."""
    return _wrap(connection, keys.client_context(), "server", time.monotonic() + timeout_s)


def _wrap(connection: socket.socket, context: ssl.SSLContext, other: Role, deadline: float) -> ssl.SSLSocket:
    current, accepted = connection, False
    try:
        connection.settimeout(_left(deadline))  # for all of the handshake, in however many pieces it comes
        connection.getpeername()  # Python leaks the socket if it finds out by itself that the other side is gone
        current = wrapped = context.wrap_socket(
            connection, server_side=other == "client", do_handshake_on_connect=False, suppress_ragged_eofs=True
        )
        wrapped.do_handshake()
        unit = _unit(wrapped.getpeercert())
        if unit != unit_of(other):
            raise SecurityError(f"the certificate of the {other} is of the wrong role: its unit is {unit!r}")
        wrapped.settimeout(_left(deadline))
        if other == "client":
            wrapped.sendall(_WELCOME)
        elif (said := wrapped.recv(1)) != _WELCOME:
            raise SecurityError("the server refused the connection" if not said else "the server is none of ours")
        wrapped.settimeout(None)
        accepted = True
        return wrapped
    except (OSError, ValueError) as error:
        sentence = _in_words(error, other)
        if isinstance(sentence, SecurityError):
            _part(current)
        raise sentence from error
    except SecurityError:
        _part(current)
        raise
    finally:
        if not accepted:
            current.close()


def _left(deadline: float) -> float:
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return left


def _part(connection: socket.socket) -> None:
    """Lets the other side read why: with bytes unread here, the close that follows would be a reset."""
    deadline = time.monotonic() + LINGER_S
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_WR)
        for _ in range(64):
            socket.socket.settimeout(connection, _left(deadline))
            if not socket.socket.recv(connection, 4096):
                break


def _in_words(error: OSError | ValueError, other: Role) -> SecurityError | ConnectionLost:
    """Why a handshake failed, seen from the side opposite to `other`."""
    if isinstance(error, ssl.SSLCertVerificationError):
        found = _FOUND.get(error.verify_code, f"is refused: {error.verify_message}")
        return SecurityError(f"the certificate of the {other} {found}")
    if isinstance(error, TimeoutError):
        return ConnectionLost(f"the {other} did not finish the TLS handshake in time")
    if isinstance(error, ssl.SSLError) and not isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
        reason = str(error.reason)
        if reason in _NOT_TLS:
            return SecurityError(f"the {other} does not speak TLS: give it keys too, or none to either side")
        if reason in _OLD_TLS:
            return SecurityError(f"the {other} speaks an older TLS than 1.3")
        if reason in _TOLD:
            return SecurityError(f"the {other} refused our certificate: it {_TOLD[reason]}")
        if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
            return SecurityError(f"the {other} showed no certificate")
        return SecurityError(f"the TLS handshake with the {other} failed ({reason})")
    return ConnectionLost(f"the {other} closed the connection during the TLS handshake")


def unit_of(role: Role) -> str:
    return f"paceline {role}"


def _unit(certificate: Mapping[str, Any] | None) -> str | None:
    """The organizational unit in a certificate, as `getpeercert` tells it."""
    for relative_name in (certificate or {}).get("subject", ()):
        for field, value in relative_name:
            if field == "organizationalUnitName":
                return str(value)
    return None


# ── files and addresses ──────────────────────────────────────────────────────────────────────────────────────


def _read(path: Path, *, secret: bool = False) -> bytes:
    try:
        with path.open("rb") as file:
            if secret and os.fstat(file.fileno()).st_mode & 0o007:
                raise SecurityError(f"{path} can be read by everybody: chmod 600 {path}, or better make a new one")
            return file.read(_MOST_FILE_BYTES)
    except FileNotFoundError as error:
        raise SecurityError(f"there is no {path.name} in {path.parent}") from error
    except OSError as error:
        raise SecurityError(f"{path} cannot be read: {error.strerror}") from error


def is_loopback(address: str) -> bool:
    """Whether only processes of this machine can come from, or get to, an address.

    >>> [is_loopback(a) for a in ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost")]
    [True, True, True, True, True]
    >>> [is_loopback(a) for a in ("0.0.0.0", "10.0.0.1", "::", "", "example.org", "127.0.0.1.example.org")]
    [False, False, False, False, False, False]
    """
    if address.lower() == "localhost":
        return True
    try:
        parsed = ipaddress.ip_address(address.removeprefix("[").removesuffix("]").partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return bool((mapped or parsed).is_loopback)
