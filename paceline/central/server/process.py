"""`python -m paceline.central.server.process`: a server that a supervisor has started."""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from paceline.errors import PacelineError
from paceline.launch.host_messages import ReplicaEnded, ReplicaNews
from paceline.launch.quick_start import load_compiler_late
from paceline.launch.replica import die_with_parent
from paceline.launch.resting_collector import rest_while_loading
from paceline.launch.servers import SERVER_VARIABLE, ServerSetting
from paceline.memory.heap import keep_memory
from paceline.net.secure import Keys, read_token

if TYPE_CHECKING:
    from paceline.central.server.server import Server

SWITCH_EVERY_S = 0.0005  # a thread that has the answer should not wait for one that computes


def main() -> None:
    die_with_parent()
    keep_memory()
    load_compiler_late()
    rest_while_loading()
    from paceline.central.server.server import Server

    setting = msgspec.json.decode(os.environ.pop(SERVER_VARIABLE), type=ServerSetting)
    sys.setswitchinterval(SWITCH_EVERY_S)
    server = Server(
        socket.socket(fileno=setting.descriptor),
        token=read_token(Path(setting.token_folder)),
        keys=Keys.load(Path(setting.keys)) if setting.keys is not None else None,
        folder=Path(setting.folder) if setting.folder is not None else None,
    )
    threading.Thread(target=_listen_to_supervisor, args=(server,), name="paceline-supervisor", daemon=True).start()
    # SIGTERM kills it as SIGKILL does: to end in good order would shut the listening socket, which the next one needs.
    try:
        server.run(recover=True)
    except PacelineError as error:
        sys.exit(str(error))
    sys.stdout.flush()
    os._exit(0)  # threads may be inside torch


def _listen_to_supervisor(server: Server) -> None:
    """Take in which replicas have ended or were started again, a line each, until the supervisor is gone."""
    decoder: msgspec.json.Decoder[ReplicaNews] = msgspec.json.Decoder(ReplicaNews)
    for line in sys.stdin.buffer:
        news = decoder.decode(line)
        if isinstance(news, ReplicaEnded):
            server.expect_no_more(news.replica, news.incarnation)
        else:
            server.expect_again(news.replica)


if __name__ == "__main__":
    main()
