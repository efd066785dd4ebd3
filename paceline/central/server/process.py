"""`python -m paceline.central.server.process`: a server that a supervisor has started."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from paceline.errors import PacelineError
from paceline.launch.host_messages import ReplicaEnded, ReplicaNews
from paceline.launch.quick_start import load_compiler_late
from paceline.launch.resting_collector import rest_while_loading
from paceline.launch.server_process import SERVER_VARIABLE, KeepModels, ServerSetting
from paceline.launch.with_parent import die_with_parent
from paceline.memory.heap import keep_memory
from paceline.net.secure import Keys, read_token

if TYPE_CHECKING:
    from paceline.central.server.server import Server

SWITCH_EVERY_S = 0.0005  # a thread that has the answer should not wait for one that computes


def main() -> None:
    load_compiler_late()
    rest_while_loading()
    begin()


def begin() -> None:
    """Be the server that was asked for, in a process that may have torch already."""
    die_with_parent()
    keep_memory()
    from paceline.central.server.server import Server

    setting = msgspec.json.decode(os.environ.pop(SERVER_VARIABLE), type=ServerSetting)
    sys.setswitchinterval(SWITCH_EVERY_S)
    server = Server(
        socket.socket(fileno=setting.descriptor),
        token=read_token(Path(setting.token_folder)),
        keys=Keys.load(Path(setting.keys)) if setting.keys is not None else None,
        folder=Path(setting.folder) if setting.folder is not None else None,
    )
    listen = partial(_listen_to_supervisor, server, partial(_keep_models, server, setting))
    threading.Thread(target=listen, name="paceline-supervisor", daemon=True).start()
    # SIGTERM kills it as SIGKILL does: to end in good order would shut the listening socket, which the next one needs.
    try:
        server.run(recover=True)
    except PacelineError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # threads may be inside torch, and one reads what the supervisor says


def _listen_to_supervisor(server: Server, keep_models: Callable[[Path], None]) -> None:
    """Take in which replicas have ended or were started again, a line each, until the supervisor is gone."""
    decoder: msgspec.json.Decoder[ReplicaNews | KeepModels] = msgspec.json.Decoder(ReplicaNews | KeepModels)
    for line in sys.stdin.buffer:
        news = decoder.decode(line)
        if isinstance(news, KeepModels):
            keep_models(Path(news.folder))
        elif isinstance(news, ReplicaEnded):
            server.expect_no_more(news.replica, news.incarnation)
        else:
            server.expect_again(news.replica)


def _keep_models(server: Server, setting: ServerSetting, folder: Path) -> None:
    """Write every container that was trained and whose chief this is, and end: nobody else will come."""
    from paceline.central.client.reader import Reader

    token, keys = read_token(Path(setting.token_folder)), Keys.load(Path(setting.keys)) if setting.keys else None
    try:
        for listed in server.listing():
            if listed.rule and listed.step:
                folder.mkdir(exist_ok=True)
                with Reader([server.address], listed.name, token=token, keys=keys) as reader:
                    reader.save(folder / f"{listed.name}.safetensors")
    except (PacelineError, OSError) as error:
        server.say(f"the model could not be kept: {error}")
    os._exit(0)


if __name__ == "__main__":
    main()
