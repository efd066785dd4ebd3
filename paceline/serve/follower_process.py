"""`python -m paceline.serve.follower_process CHANNEL LIFELINE`: reads a container for `followed_container`."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import msgspec

from paceline.errors import PacelineError
from paceline.launch.on_import import when_imported
from paceline.launch.quick_start import load_compiler_late
from paceline.launch.resting_collector import rest_while_loading
from paceline.memory import segment
from paceline.net.secure import Keys
from paceline.serve.answering import end_with_owner
from paceline.serve.followed_container import FollowQuestion, FollowReply, FollowRequest
from paceline.serve.short_slice import USUAL, run_in_slices

TIMEOUT_S = 5.0  # that servers may take to answer
_MOST_REQUEST = 1 << 17


def follow(channel: socket.socket) -> None:
    """Answers its owner's questions until that closes its end."""
    request = msgspec.msgpack.decode(channel.recv(_MOST_REQUEST), type=FollowRequest)
    from paceline.central.client.reader import Reader

    keys = Keys.load(Path(request.keys)) if request.keys is not None else None
    reader: Reader | None = None
    while message := channel.recv(_MOST_REQUEST):
        question = msgspec.msgpack.decode(message, type=FollowQuestion)
        copies: list[int] = []
        try:
            if reader is None:
                reader = Reader(
                    request.addresses, request.container, token=request.token, keys=keys, timeout_s=TIMEOUT_S
                )
            if question.take:
                copies = [segment.make("version", 0)]
                with os.fdopen(copies[0], "wb", closefd=False) as file:
                    reply = FollowReply(reader.save_into(file))
            else:
                reply = FollowReply(reader.step())
        except (PacelineError, OSError) as error:
            reply = FollowReply(problem=str(error))
            if reader is not None:
                reader.close()
            reader = None
        socket.send_fds(channel, [msgspec.msgpack.encode(reply)], copies if not reply.problem else [])
        for copy in copies:
            os.close(copy)


if __name__ == "__main__":
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner decides
    end_with_owner(int(sys.argv[2]))
    run_in_slices(USUAL)  # the owner has short ones
    load_compiler_late()
    rest_while_loading()
    when_imported("torch", lambda torch: torch.set_num_threads(1))
    follow(socket.socket(fileno=int(sys.argv[1])))
