"""Containers: parameters outlive the runs that train them, and can be read, copied and dropped meanwhile."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import paceline as pl
from paceline.central.client.reader import Reader
from paceline.central.server.server import Server
from paceline.errors import PacelineError
from paceline.optim.models import evaluating
from paceline.rules import Async, Rule, Sync
from paceline.run_place import PLACE_VARIABLE, Place, ServersPlace
from paceline.strategy import Centralized

ALL = Sync()
TOKEN = "a token that nobody can guess"
DATA = torch.randn(24, 6, generator=torch.Generator().manual_seed(5))


class Servers:
    """Two servers as threads of this process, and the folder their token is in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "token").write_text(TOKEN)
        (folder / "token").chmod(0o600)
        self.said: list[str] = []
        self._listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        self.servers = [Server(listener, token=TOKEN, say=self.said.append) for listener in self._listeners]
        self._threads = [threading.Thread(target=server.run) for server in self.servers]
        for thread in self._threads:
            thread.start()

    @property
    def addresses(self) -> list[str]:
        return [server.address for server in self.servers]

    def reader(self, container: str | None = None) -> Reader:
        return Reader(self.addresses, container, token=TOKEN)

    def close(self) -> None:
        for server in self.servers:
            server.stop()
        for thread in self._threads:
            thread.join()
        for server, listener in zip(self.servers, self._listeners, strict=True):
            server.close()
            listener.close()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with contextlib.closing(Servers(tmp_path)) as found:
        yield found


class Tied(nn.Module):
    """Two names for one weight, a part that is not trained, buffers that are saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(6, 6, bias=False)
        self.frozen = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.decode = nn.Linear(6, 6)
        self.decode.weight = self.encode.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.norm(self.frozen(self.encode(x))))


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), x)


@contextlib.contextmanager
def training(
    servers: Servers,
    container: str,
    *,
    run: str = "first",
    seed: int = 0,
    model: nn.Module | None = None,
    replicas: int = 1,
    rule: Rule = ALL,
    lr: float = 0.1,
    nesterov: bool = False,
    durability: str = "none",
) -> Iterator[pl.Trainer]:
    """The trainer of a run that has come to the servers."""
    place = Place(
        row=0,
        rows=1,
        strategy=Centralized(replicas=replicas, servers=2, rule=rule, durability=durability),
        servers=ServersPlace(
            addresses=servers.addresses, container=container, token_folder=str(servers.folder), run=run
        ),
    )
    torch.manual_seed(seed)
    model = model if model is not None else Tied()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PLACE_VARIABLE, msgspec.json.encode(place).decode())
        trainer = pl.Trainer(model, torch.optim.SGD(trained, lr=lr, momentum=0.9, nesterov=nesterov), loss)
    with contextlib.closing(trainer):
        yield trainer


def train(trainer: pl.Trainer, epochs: int) -> None:
    for batch in trainer.batches(DATA, 8, epochs=epochs, seed=1):
        trainer.step(batch)


def gone(servers: Servers, container: str) -> None:
    """Wait until the run's replicas have left."""
    end = time.monotonic() + 10
    with servers.reader() as reader:
        while any(listed.replicas for listed in reader.listing() if listed.name == container):
            assert time.monotonic() < end
            time.sleep(0.01)


def refused(servers: Servers, container: str, sentence: str, model: nn.Module | None = None) -> None:
    """Another run is not let in."""
    with pytest.raises(PacelineError, match=sentence), training(servers, container, run="second", model=model):
        pass


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_saved_loads_strictly_in_plain_torch(servers: Servers, tmp_path: Path) -> None:
    with training(servers, "tied") as trainer:
        train(trainer, 2)
        expected = {key: value.clone() for key, value in trainer.model.state_dict().items()}
        with servers.reader("tied") as reader:
            assert reader.save(tmp_path / "saved.safetensors") == 6
    plain = Tied()
    plain.load_state_dict(load_file(tmp_path / "saved.safetensors"))
    assert {"encode.weight", "decode.weight", "frozen.bias", "norm.running_mean"} <= expected.keys()
    for key, value in plain.state_dict().items():
        assert torch.equal(value, expected[key]), key
    assert not list(tmp_path.glob(".*"))


class Steady(nn.Module):
    """All elements fall by the learning rate at every step: a version is consistent if they are all equal."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(40_000)) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((part.sum() for part in self.parts), torch.zeros(())) + 0 * x.sum()


def test_a_version_read_while_training_goes_on_is_of_one_step(servers: Servers) -> None:
    place = Place(
        row=0,
        rows=1,
        strategy=Centralized(servers=2, rule=Async()),
        servers=ServersPlace(addresses=servers.addresses, container="steady", token_folder=str(servers.folder)),
    )
    model = Steady()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PLACE_VARIABLE, msgspec.json.encode(place).decode())
        trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=1.0), lambda model, x: model(x))
    stop = threading.Event()

    def go_on() -> None:
        for batch in trainer.batches(DATA, 8, epochs=10_000):
            trainer.step(batch)
            if stop.is_set():
                break

    thread = threading.Thread(target=go_on)
    thread.start()
    seen = []
    try:
        with servers.reader("steady") as reader:
            while len(seen) < 20:
                step, tensors = reader.parameters()
                for name, tensor in tensors.items():
                    assert torch.equal(tensor, torch.full_like(tensor, -step)), (name, step)
                seen.append(step)
            assert len(reader.summary().tensors) == 4
            assert reader.summary().tensors[0].servers != reader.summary().tensors[-1].servers
    finally:
        stop.set()
        thread.join()
        trainer.close()
    assert seen == sorted(seen)
    assert len(set(seen)) > 10


def test_one_address_in_any_order_is_enough(servers: Servers) -> None:
    with training(servers, "found") as trainer:
        train(trainer, 1)
    for given in (servers.addresses[1:], servers.addresses[:1], servers.addresses[::-1]):
        with Reader(given, "found", token=TOKEN) as reader:
            assert reader.parameters()[0] == 3
            assert reader.summary().addresses == servers.addresses


def test_what_is_not_there_is_named(servers: Servers) -> None:
    sentence = r"container 'two' does not exist on this server: there is one"
    with training(servers, "one"), servers.reader("two") as reader, pytest.raises(PacelineError, match=sentence):
        reader.parameters()


def test_books_tell_what_was_counted(servers: Servers) -> None:
    with training(servers, "books") as trainer:
        train(trainer, 2)
        with servers.reader("books") as reader:
            summary = reader.summary()
            (listed,) = reader.listing()
    assert (summary.step, summary.replicas, summary.accepting) == (6, [0], 1)
    assert summary.books.staleness == {0: 6}
    assert summary.books.chapters[0].counted == [(0, 0, 24), (1, 0, 24)]
    assert (listed.step, listed.replicas, listed.optimizer, listed.rule) == (6, 1, "SGD", "sync")
    assert listed.bytes == sum(summary.bytes_by_server)


# ── another run ──────────────────────────────────────────────────────────────────────────────────────────────


def test_another_run_goes_on_where_the_first_ended(servers: Servers, tmp_path: Path) -> None:
    with training(servers, "whole") as trainer:
        train(trainer, 4)
        whole = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    with training(servers, "halves") as trainer:
        train(trainer, 2)
        first = trainer.evaluate(DATA, loss)
        trainer.save(tmp_path / "once.safetensors")
    with training(servers, "halves", run="second", seed=7) as trainer:  # other values at the start: they do not count
        train(trainer, 2)
        assert trainer.steps == 6
        assert trainer.evaluate(DATA, loss) == first  # the books answer
        train(trainer, 2)
        trainer.save(tmp_path / "twice.safetensors")  # was done before, but by another run
        for key, value in trainer.model.state_dict().items():
            assert torch.equal(value, whole[key]), key
    saved = load_file(tmp_path / "twice.safetensors")
    for key, value in whole.items():
        assert torch.equal(saved[key], value), key


def test_another_run_may_have_more_replicas_and_other_options(servers: Servers) -> None:
    with training(servers, "grown") as trainer:
        train(trainer, 1)
    with training(servers, "grown", run="second", replicas=3, rule=Async(), lr=0.01) as trainer:
        train(trainer, 2)
        assert trainer.steps == 6
    with training(servers, "grown", run="third", rule=Sync()) as trainer:
        train(trainer, 3)
        assert trainer.steps == 9


def test_two_sync_runs_are_never_in_one_container_at_a_time(servers: Servers) -> None:
    with training(servers, "busy") as trainer:
        train(trainer, 1)
        refused(servers, "busy", r"'busy' is being trained by another run, replicas 0")
        train(trainer, 1)
        assert trainer.steps == 6


def test_a_step_that_is_late_gives_its_ticket_back(servers: Servers) -> None:
    with training(servers, "plain") as trainer:
        train(trainer, 2)
        expected = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    with training(servers, "late") as trainer:
        inner, calls, given_up = trainer.model.forward, iter(range(1000)), []

        def forward(x: torch.Tensor) -> torch.Tensor:
            out = inner(x)
            if next(calls) == 2:
                time.sleep(2.2)
            return out

        trainer.model.forward = forward  # type: ignore[method-assign]
        for batch in trainer.batches(DATA, 8, epochs=2, seed=1):
            try:
                with pl.deadline(2.0):
                    trainer.step(batch)
            except pl.DeadlineExceeded as late:
                given_up.append(late.who)
        assert given_up
        assert set(given_up) == {"replica 0"}
        assert trainer.steps == 6
        for key, value in trainer.model.state_dict().items():
            assert torch.equal(value, expected[key]), key


def test_an_evaluation_that_is_late_is_given_back_and_can_be_made_again(servers: Servers) -> None:
    with training(servers, "late-evaluation", replicas=2, rule=Async()) as trainer:
        trainer.step(next(trainer.batches(DATA, 8, epochs=1)))
        slow = True

        def metric(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            out = model(x)
            if slow:
                time.sleep(2.2)
            return out.square().mean()

        with pl.deadline(2.0), pytest.raises(pl.DeadlineExceeded, match=r"replica 0 was not done within 2 s"):
            trainer.evaluate(DATA, metric, batch_size=6, name="value")
        assert trainer.model.training
        slow = False
        found = trainer.evaluate(DATA, metric, batch_size=6, name="value")
        with pl.deadline(60.0):
            assert trainer.evaluate(DATA, metric, batch_size=6) == found
        with torch.no_grad(), evaluating(trainer.model):
            assert found == pytest.approx(metric(trainer.model, DATA).item())


def test_trainings_in_two_containers_do_not_meet(servers: Servers) -> None:
    with training(servers, "alone") as trainer:
        train(trainer, 2)
        alone = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    with training(servers, "left") as left, training(servers, "right", seed=3) as right:
        batches = zip(left.batches(DATA, 8, epochs=2, seed=1), right.batches(DATA, 6, epochs=2, seed=2), strict=False)
        for mine, theirs in batches:
            left.step(mine)
            right.step(theirs)
        for key, value in left.model.state_dict().items():
            assert torch.equal(value, alone[key]), key


def test_another_model_is_refused(servers: Servers) -> None:
    with training(servers, "shape") as trainer:
        train(trainer, 1)
    model = nn.Sequential(nn.Linear(6, 6))
    refused(servers, "shape", r"holds another model: 0.weight of shape \(6, 6\) is encode.weight", model)
    with servers.reader("shape") as reader:
        assert reader.parameters()[0] == 3


def test_addresses_in_another_order_are_refused(servers: Servers) -> None:
    with training(servers, "order") as trainer:
        train(trainer, 1)
    servers.servers.reverse()
    refused(servers, "order", r"this is server 1 of container 'order' and not 0: give the addresses")


# ── copies and drops ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_copy_goes_its_own_way(servers: Servers) -> None:
    with training(servers, "origin") as trainer:
        train(trainer, 2)
        with servers.reader("origin") as reader:
            reader.copy("fork")
        train(trainer, 1)
    with servers.reader("fork") as reader:
        assert reader.summary().replicas == []
        step, forked = reader.parameters()
    assert step == 6
    with training(servers, "fork", run="second", seed=9) as trainer:  # one that goes on as the origin did
        train(trainer, 3)
    with servers.reader("origin") as origin, servers.reader("fork") as fork:
        assert origin.parameters()[0] == fork.parameters()[0] == 9
        for key, value in origin.parameters()[1].items():
            assert torch.equal(fork.parameters()[1][key], value), key
    assert not torch.equal(forked["encode.weight"], value)


def test_a_copy_replaces_nothing(servers: Servers) -> None:
    with training(servers, "a") as trainer:
        train(trainer, 1)
        with training(servers, "b"), servers.reader("a") as reader:
            with pytest.raises(PacelineError, match=r"container 'b' is there already"):
                reader.copy("b")
            with pytest.raises(PacelineError, match=r"give up to 100 letters without /"):
                reader.copy("../b")
            assert [listed.name for listed in reader.listing()] == ["a", "b"]


def memory_files() -> int:
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += "memfd:paceline" in os.readlink(f"/proc/self/fd/{name}")
    return found


def test_drop_gives_the_memory_back_but_not_under_living_replicas(servers: Servers) -> None:
    gc.collect()
    before = memory_files()
    with training(servers, "dropped") as trainer:
        train(trainer, 1)
        with servers.reader("dropped") as reader:
            with pytest.raises(PacelineError, match=r"'dropped' is being trained, replicas 0: end that run"):
                reader.drop()
            train(trainer, 1)
            assert trainer.steps == 6
    del trainer
    gone(servers, "dropped")
    gc.collect()  # the trainer's own
    assert memory_files() > before
    with servers.reader("dropped") as reader:
        reader.drop()
        assert reader.listing() == []
    end = time.monotonic() + 5
    while memory_files() > before:  # threads may be about to end
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_forced_drop_ends_its_training_with_a_sentence(servers: Servers) -> None:
    with training(servers, "forced") as trainer:
        train(trainer, 1)
        with servers.reader("forced") as reader:
            reader.drop(force=True)
        with pytest.raises(PacelineError, match=r"container 'forced'"):
            train(trainer, 1)
