"""Gradients are sent while backward still runs, each chunk once everything in it has arrived."""

from __future__ import annotations

import threading

import pytest
import torch
from conftest import Start
from torch import nn

from paceline.central.client.arrival import Arrival, StepAbandoned
from paceline.central.shards import Shards, describe


def shards(servers: int = 1) -> Shards:
    """Several chunks: the first layers lie in the last ones."""
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300), nn.Linear(300, 10))
    named = [(name, parameter, 0) for name, parameter in model.named_parameters()]
    return Shards(describe(named, torch.optim.SGD(model.parameters(), lr=0.1), servers))


def parameters_in(found: Shards, server: int, chunk: int) -> set[int]:
    slots = {piece.slot for piece in found.layouts[server].chunks[chunk].pieces}
    return {
        number
        for number, name in enumerate(found.names)
        if any(part.server == server and part.slot in slots for part in found.parts[name])
    }


@pytest.mark.parametrize("servers", [1, 2])
def test_a_chunk_goes_when_everything_in_it_has_arrived(servers: int) -> None:
    found = shards(servers)
    arrival = Arrival(found)
    arrival.begin()
    sent: list[int] = []
    went = threading.Semaphore(0)

    def send() -> None:
        for chunk in range(len(found.layouts[0].chunks)):
            arrival.wait(0, chunk)
            sent.append(chunk)
            went.release()

    sender = threading.Thread(target=send)
    sender.start()
    arrived: set[int] = set()
    for number in range(len(found.names)):  # as backward finishes them
        complete = [
            chunk
            for chunk in range(len(found.layouts[0].chunks))
            if parameters_in(found, 0, chunk) <= arrived | {number}
        ]
        arrival.arrived(number)
        arrived.add(number)
        while len(sent) < len(complete):
            assert went.acquire(timeout=10)
        assert sent == complete
    sender.join(timeout=10)
    assert len(sent) == len(found.layouts[0].chunks) > 1


def test_what_backward_did_not_use_goes_when_it_is_over() -> None:
    arrival = Arrival(shards())
    arrival.begin()
    arrival.finish()
    arrival.wait(0, 0)
    arrival.wait_for_all()


def test_a_step_that_is_given_up_is_not_sent() -> None:
    arrival = Arrival(shards())
    arrival.begin()
    arrival.give_up()
    with pytest.raises(StepAbandoned, match="given up"):
        arrival.wait(0, 0)
    arrival.begin()
    arrival.finish()
    arrival.wait(0, 0)


FAILS_IN_BACKWARD = """
import torch
from torch import nn
import paceline as pl

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

def fail(gradient):
    raise ValueError("backward has failed")

def loss(model, x):
    first = model[0](x)
    first.register_hook(fail)  # the last layer's gradients have arrived, and are on their way
    return model[1](first).square().mean()

trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
for batch in trainer.batches(torch.randn(8, 4), 4):
    trainer.step(batch)
"""


@pytest.mark.timeout(60)
def test_a_backward_that_fails_ends_the_run_at_once_with_its_own_error(start: Start) -> None:
    run = start(FAILS_IN_BACKWARD, "--replicas 2 --servers 2 --exchange tcp --timeout 500").end(40)
    assert run.code == 1
    assert "ValueError: backward has failed" in run.err
