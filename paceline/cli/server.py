"""`paceline server`: one server in the foreground, for as long as it is wanted.

It keeps *containers*: parameters under a name, with their optimizer, that outlive the runs which train them. Runs come
to it with `paceline run … --join`, people with `paceline container`. On one machine a token in its folder tells friends
from strangers; beyond that both sides show keys.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from paceline.cli import is_count
from paceline.errors import InvalidInput, SecurityError
from paceline.net.secure import TOKEN, Keys, is_loopback, read_token, write_secret, write_token
from paceline.watch.output import put

if TYPE_CHECKING:
    from paceline.central.server.server import Server

DEFAULT_LISTEN = "127.0.0.1:7070"
CONTAINERS = "containers"  # what is to survive this process (--durability log or replica)
LOCK = "lock"
BACKLOG = 1024

EXAMPLES = """\
examples:
  paceline server --dir servers/0                                   at 127.0.0.1:7070
  paceline server --dir servers/1 --listen 127.0.0.1:7071 --token servers/0
                                                                    a second one, which the same runs can use
  paceline run train.py --replicas 2 --join 127.0.0.1:7070,127.0.0.1:7071 --token servers/0
                                                                    train on both
  paceline container list --at 127.0.0.1:7070 --token servers/0     what they keep
for other machines, with keys on both sides (paceline keys --help):
  paceline server --dir servers/0 --listen 0.0.0.0:7070 --keys keys
  paceline run train.py --replicas 2 --join 10.0.0.1:7070 --keys keys

Ctrl-C or SIGTERM ends it. All servers of one run need the same token, or keys of the same CA.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "paceline server --dir FOLDER [flags]"
    parser.description = "Run one server that keeps parameters, until Ctrl-C."
    parser.epilog = EXAMPLES
    parser.add_argument("--dir", dest="folder", type=_folder, required=True, metavar="FOLDER", help="token and logs")
    parser.add_argument("--listen", default=DEFAULT_LISTEN, metavar="ADDRESS:PORT", help=f"default {DEFAULT_LISTEN}")
    parser.add_argument("--token", metavar="PATH", help="use this token (file, or another server's --dir)")
    parser.add_argument("--keys", type=Path, metavar="FOLDER", help="keys to show and to demand (paceline keys make)")
    parser.add_argument("--json", action="store_true", help="say where it is, and what it held, as lines of JSON")


def _folder(text: str) -> Path:
    if not text:
        raise InvalidInput("dir", text, "give the name of a folder")
    return Path(text)


def execute(options: argparse.Namespace) -> int:
    host, port = _split(options.listen)
    if not is_loopback(host) and options.keys is None:
        raise SecurityError(
            f"listen is {options.listen!r}: beyond this machine give --keys FOLDER, which paceline keys make makes"
        )
    keys = Keys.load(options.keys) if options.keys is not None else None
    if keys is not None:
        keys.check("server")
    folder: Path = options.folder
    with _folder_of_our_own(folder), _listening(host, port, options.listen) as listener:
        token = _token(folder, options.token)
        from paceline.central.server.process import SWITCH_EVERY_S
        from paceline.central.server.server import Server

        sys.setswitchinterval(SWITCH_EVERY_S)
        server = Server(listener, token=token, keys=keys, folder=folder / CONTAINERS)

        def stop(number: int, frame: FrameType | None) -> None:
            server.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        _say_where(server, folder, options)
        server.run(recover=True)
        _say_what(server, options)
        sys.stdout.flush()
        os._exit(0)  # threads may be inside torch


def _split(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not (host and is_count(port) and int(port) < 65536):
        raise InvalidInput("listen", listen, f"give address:port, such as {DEFAULT_LISTEN}")
    return host.strip("[]"), int(port)


@contextlib.contextmanager
def _folder_of_our_own(folder: Path) -> Iterator[None]:
    """Two servers that write to one folder would mix what they keep."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (folder / LOCK).open("ab")
    except OSError as error:
        raise InvalidInput("dir", str(folder), f"it cannot be written ({error.strerror}), give another") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InvalidInput("dir", str(folder), "another server uses it, give this one its own") from error
        yield


@contextlib.contextmanager
def _listening(host: str, port: int, listen: str) -> Iterator[socket.socket]:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else str(error)
        raise InvalidInput("listen", listen, f"{why}, give another address or port") from error
    with listener:
        yield listener


def _token(folder: Path, given: str | None) -> str:
    """The token of the folder: as it is there, as it was given, or a new one."""
    if given is not None:
        token = read_token(Path(given))
        write_secret(folder / TOKEN, token.encode())
        return token
    return read_token(folder) if (folder / TOKEN).exists() else write_token(folder)


def _say_where(server: Server, folder: Path, options: argparse.Namespace) -> None:
    let_in = f"keys in {options.keys}" if options.keys is not None else f"token in {folder / TOKEN}"
    if options.json:
        said = {"address": server.address, "token": str(folder / TOKEN), "keys": options.keys, "pid": os.getpid()}
        put(sys.stdout, msgspec.json.encode(said, enc_hook=str) + b"\n")
    else:
        put(sys.stdout, f"paceline: server at {server.address}, {let_in}; Ctrl-C ends it\n".encode())


def _say_what(server: Server, options: argparse.Namespace) -> None:
    held = server.listing()
    if options.json:
        put(sys.stdout, msgspec.json.encode({"held": held}) + b"\n")
        return
    words = [f"{listed.name} (step {listed.step}, {listed.bytes / 1e6:.1f} MB)" for listed in held]
    put(sys.stdout, f"paceline: server ended, it held {', '.join(words) or 'no container'}\n".encode())
