"""`python -m paceline.serve.template_process CHANNEL LIFELINE`: the template, from inside (`template.py` is outside).

It runs the script until there is a model, tells what it found, and forks a process of the model whenever it is asked
to. It computes with one thread: what is forked from it can then have threads of its own.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from paceline.errors import CheckpointError, PacelineError
from paceline.forked import fork_to_compute
from paceline.launch.on_import import when_imported
from paceline.launch.quick_start import load_compiler_late
from paceline.launch.resting_collector import rest_while_loading
from paceline.serve.answering import AnswerFunction, ProcessEnds, be_model_process, end_with_owner
from paceline.serve.shared_values import SharedValues
from paceline.serve.short_slice import USUAL, run_in_slices
from paceline.serve.template import StartRequest, TemplateFound, TemplateRequest

_MOST_REQUEST = 1 << 17
_DESCRIPTORS = 5  # channel, requests, answers, lifeline, checkpoint


def be_template(channel: socket.socket) -> None:
    """Finds the model, says so, and forks until the owner closes its end of the channel."""
    request = msgspec.msgpack.decode(channel.recv(_MOST_REQUEST), type=TemplateRequest)
    from paceline.serve.named_call import NamedCall, describe
    from paceline.serve.script_model import find_model

    try:
        found = find_model(request.script, request.arguments, with_call=request.with_call, trial=request.trial)
        call = NamedCall(found.model, found.call)
        told = TemplateFound(describe(found.model, call))
    except PacelineError as error:
        channel.send(msgspec.msgpack.encode(TemplateFound(None, str(error))))
        return
    channel.send(msgspec.msgpack.encode(told))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those who end are nobody's to wait for
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, _MOST_REQUEST, _DESCRIPTORS)
        if not message:
            return
        start = msgspec.msgpack.decode(message, type=StartRequest)
        if not (process := fork_to_compute()):
            _answer(start, descriptors, found, call, request)
        for descriptor in descriptors:
            os.close(descriptor)
        pidfd = os.pidfd_open(process)
        socket.send_fds(channel, [msgspec.msgpack.encode(process)], [pidfd])
        os.close(pidfd)


def _answer(start: StartRequest, descriptors: Sequence[int], found: Any, call: Any, request: TemplateRequest) -> None:
    """Makes this process, just forked, one that answers for a version of the model."""
    channel, requests, answers, lifeline, checkpoint = descriptors
    ends = ProcessEnds(socket.socket(fileno=channel), SharedValues(requests), SharedValues(answers), lifeline)

    def factory() -> AnswerFunction:
        from paceline.serve.named_call import named_outputs
        from paceline.serve.predictor import load

        copy = f"/proc/self/fd/{checkpoint}"
        try:
            predictor = load(copy, found.model, split=request.split, dims=found.dims)
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(copy, start.path)) from None
        model: Any = predictor
        if (whole := predictor.whole_model) is not None:  # it is this process's alone, and stays as it is
            model = whole.eval()

        def answer(given: dict[str, Any]) -> dict[str, Any]:
            args, kwargs = call(given)
            return named_outputs(model(*args, **kwargs))

        if call.tensors:  # the first request takes longer than others: it is nobody's
            answer(call.some_rows(1))
        return answer

    be_model_process(ends, factory, start.cores, kept=[checkpoint])


if __name__ == "__main__":
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    end_with_owner(int(sys.argv[2]))
    run_in_slices(USUAL)  # the owner has short ones
    load_compiler_late()
    rest_while_loading()
    when_imported("torch", lambda torch: torch.set_num_threads(1))
    be_template(socket.socket(fileno=int(sys.argv[1])))
