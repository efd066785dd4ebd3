"""`python -m paceline.central.server.process`: a server that a supervisor has started."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import msgspec

from paceline.errors import PacelineError
from paceline.launch.quick_start import load_compiler_late
from paceline.launch.replica import die_with_parent
from paceline.launch.resting_collector import rest_while_loading
from paceline.launch.servers import SERVER_VARIABLE, ServerSetting
from paceline.memory.heap import keep_memory
from paceline.net.secure import read_token

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
        folder=Path(setting.folder) if setting.folder is not None else None,
    )
    # SIGTERM kills it as SIGKILL does: to end in good order would shut the listening socket, which the next one needs.
    try:
        server.run(recover=True)
    except PacelineError as error:
        sys.exit(str(error))
    sys.stdout.flush()
    os._exit(0)  # threads may be inside torch


if __name__ == "__main__":
    main()
