"""Habits of real scripts, each told by what it came to: `test_script_habits.py` compares one process with several.

All is in float64. The number of samples is given: with 13 the last batch is a single one, of which one of two replicas
has no part.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import paceline as pl

COUNT = int(sys.argv[1]) if __name__ == "__main__" else 13
X = torch.randn(COUNT, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.randint(3, (COUNT,), generator=torch.Generator().manual_seed(2))
Loss = Callable[[Any, Any], Tensor]


def mlp(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for size, following in pairwise(sizes):
        layers += [nn.Linear(size, following), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def trained(
    model: nn.Module, loss: Loss, dataset: Any = (X, Y), batch_size: int = 4, accumulate: int = 1, **options: Any
) -> list[float]:
    """Losses of two epochs, and a sum over everything the model holds afterwards."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trainer = pl.Trainer(model, torch.optim.SGD(parameters, lr=0.2, momentum=0.9), loss, accumulate=accumulate)
    found = [trainer.step(batch) for batch in trainer.batches(dataset, batch_size, epochs=2, seed=5, **options)]
    ledger = trainer.ledger.check()
    assert ledger == f"epochs 0 to 1: {COUNT} samples, each once", ledger
    if not isinstance(dataset, Stream):

        @torch.enable_grad()  # type: ignore[untyped-decorator]
        def loss_now(model: nn.Module, batch: Any) -> float:
            return loss(model, batch).item()

        collate = options.get("collate")
        sizes = {} if isinstance(dataset, DataLoader) else {"batch_size": 5}
        found.append(trainer.evaluate(dataset, loss_now, collate=collate, workers=options.get("workers"), **sizes))
    trainer.close()
    return [*found, float(sum(value.double().abs().sum() for value in model.state_dict().values()))]


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


# ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────


class Encoding(UserDict[str, Any]):
    """As tokenizers return it."""

    def __init__(self, data: dict[str, Any], encoder: str) -> None:
        super().__init__(data)
        self.encoder = encoder


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Sample:
    x: Tensor
    y: int | Tensor
    name: str | list[str]
    mask: Tensor | None = None


class Samples(Dataset[Any]):
    """Of whatever class `make(index)` returns."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Stream:
    def __iter__(self) -> Iterator[Any]:
        for index in range(COUNT):
            yield Sample(X[index], int(Y[index]), f"sample {index}")


def of_mapping(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def of_fields(model: nn.Module, batch: Any) -> Tensor:
    assert len(getattr(batch, "name", batch.x)) == len(batch.x)
    return F.cross_entropy(model(batch.x), batch.y)


def of_encoding(model: nn.Module, batch: Any) -> Tensor:
    assert (type(batch), batch.encoder) == (Encoding, "fast")
    return of_mapping(model, batch)


def looked_at(batch: Any) -> int:
    """What scripts do with a batch between drawing it and training on it."""
    return len(batch["x"])


def a_dict_of_tensors() -> Any:
    model = mlp(6, 8, 3)
    trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.2), of_mapping)
    found = []
    for batch in trainer.batches({"x": X, "y": Y}, 4):
        looked_at(batch)
        found.append(trainer.step(batch))
    trainer.close()
    return found


def dicts() -> Any:
    return trained(mlp(6, 8, 3), of_mapping, Samples(lambda at: {"x": X[at], "y": Y[at], "name": "a"}))


def encodings() -> Any:
    data = Samples(lambda at: Encoding({"x": X[at], "y": Y[at]}, "fast"))
    return [trained(mlp(6, 8, 3), of_encoding, data, accumulate=passes) for passes in (1, 3)]


def named_tuples() -> Any:
    return trained(mlp(6, 8, 3), of_fields, Samples(lambda at: Pair(X[at], Y[at])))


def dataclasses() -> Any:
    data = Samples(lambda at: Sample(X[at], int(Y[at]), str(at)))
    return [trained(mlp(6, 8, 3), of_fields, data, accumulate=passes) for passes in (1, 3)]


def a_collate_that_pads() -> Any:
    def collate(rows: list[Tensor]) -> Encoding:
        padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return Encoding({"x": padded, "lengths": [len(row) for row in rows]}, "fast")

    def loss(model: nn.Module, batch: Encoding) -> Tensor:
        rows = zip(batch["x"], batch["lengths"], strict=True)
        return torch.stack([model(row[:length, None]).square().mean() for row, length in rows]).mean()

    return trained(mlp(1, 4, 1), loss, Samples(lambda at: X[at, : at % 5 + 1]), collate=collate)


# ── workers and loaders ──────────────────────────────────────────────────────────────────────────────────────


def augmented(index: int) -> tuple[Tensor, Tensor]:
    return X[index] + 0.5 * torch.randn(6, dtype=torch.float64), Y[index]


def random_augmentation_by_workers() -> Any:
    two = trained(mlp(6, 8, 3), cross_entropy, Samples(augmented), workers=2)
    one = trained(mlp(6, 8, 3), cross_entropy, Samples(augmented), workers=1)
    assert one == two
    return two


def a_loader() -> Any:
    data: Dataset[Any] = Samples(lambda at: Sample(X[at], int(Y[at]), str(at)))
    return trained(mlp(6, 8, 3), of_fields, DataLoader(data, 4, shuffle=True, num_workers=2), batch_size=4)


def a_loader_with_its_own_size_and_collate() -> Any:
    def collate(samples: list[Any]) -> dict[str, Tensor]:
        return {"x": torch.stack([x for x, _ in samples]), "y": torch.stack([y for _, y in samples])}

    loader = DataLoader(Samples(augmented), 4, collate_fn=collate, num_workers=1)
    return trained(mlp(6, 8, 3), of_mapping, loader, None)  # type: ignore[arg-type]


# ── models and losses ────────────────────────────────────────────────────────────────────────────────────────


def a_gan() -> Any:
    """Two trainers, and each loss uses the other's model."""
    generator, critic = mlp(2, 8, 6), mlp(6, 8, 1)
    noise = torch.randn(COUNT, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def critic_loss(model: nn.Module, batch: Any) -> Tensor:
        x, z = batch
        return F.softplus(-model(x)).mean() + F.softplus(model(generator(z).detach())).mean()

    def generator_loss(model: nn.Module, batch: Any) -> Tensor:
        return F.softplus(-critic(model(batch[1]))).mean()

    critics = pl.Trainer(critic, torch.optim.Adam(critic.parameters(), lr=0.01), critic_loss)
    generators = pl.Trainer(generator, torch.optim.Adam(generator.parameters(), lr=0.01), generator_loss)
    found = []
    pairs = zip(critics.batches((X, noise), 4, epochs=2), generators.batches((X, noise), 4, epochs=2), strict=True)
    for one, other in pairs:
        found += [critics.step(one), generators.step(other)]
    return found


def gradient_penalty() -> Any:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return output.square().mean() + (slope.norm(dim=1) - 1).square().mean()

    return trained(mlp(6, 8, 8, 1), loss)


class Checkpointed(nn.Module):
    """Segments that are computed again in backward; one layer is in both of them."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.other, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.reentrant = reentrant
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        one = partial(checkpoint, use_reentrant=self.reentrant)
        if self.reentrant:
            x = x.clone().requires_grad_()
        x = one(lambda x: self.shared(x).tanh(), x)
        x = one(lambda x: self.other(self.shared(x)).tanh(), x)
        return self.last(self.shared(x))  # type: ignore[no-any-return]


def checkpointing() -> Any:
    return trained(Checkpointed(False), cross_entropy)


def reentrant_checkpointing() -> Any:
    return [trained(Checkpointed(True), cross_entropy, accumulate=passes) for passes in (1, 2)]


class Adapted(nn.Module):
    """A frozen layer, and a product of two thin matrices beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features, dtype=torch.float64) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, 2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()  # type: ignore[no-any-return]


def adapters_on_a_frozen_base() -> Any:
    model = mlp(6, 8, 3)
    model.requires_grad_(False)
    model[0], model[2] = Adapted(model[0]), Adapted(model[2])  # type: ignore[arg-type]
    frozen = model[0].base.weight.clone()  # type: ignore[union-attr]
    found = trained(model, cross_entropy)
    assert torch.equal(model[0].base.weight, frozen)  # type: ignore[union-attr, arg-type]
    return found


def normed(norm: Callable[[nn.Module], nn.Module]) -> list[float]:
    model = mlp(6, 8, 8, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model[0], model[2] = norm(model[0]), norm(model[2])
    return trained(model, cross_entropy)


def weight_norm() -> Any:
    return normed(parametrizations.weight_norm)


def weight_norm_of_old() -> Any:
    return normed(nn.utils.weight_norm)  # type: ignore[arg-type]


def spectral_norm() -> Any:
    return normed(parametrizations.spectral_norm)


def spectral_norm_of_old() -> Any:
    return normed(nn.utils.spectral_norm)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(3, 6)
        self.layer = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3, bias=False)
        self.last.weight = self.table.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x).tanh())  # type: ignore[no-any-return]


def tied_weights_and_several_losses() -> Any:
    def loss(model: Any, batch: Any) -> Tensor:
        x, y = batch
        predicted = F.cross_entropy(model(x), y)
        embedded = F.mse_loss(model.table(y), x)
        decay = sum(parameter.square().sum() for parameter in model.parameters())
        return predicted + 0.5 * embedded + 1e-3 * decay

    return trained(Tied(), loss)


class ModelOutput(OrderedDict[str, Any]):
    """As models of the well-known library return it: items that are attributes too."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


@dataclass
class Answer:
    loss: Tensor
    logits: Tensor
    hidden: tuple[Tensor, ...] = ()


class Answering(nn.Module):
    def __init__(self, answers: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.answers = mlp(6, 8, 3), answers

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.inner(x)
        return self.answers(loss=F.cross_entropy(logits, labels), logits=logits)


def models_that_return_more_than_a_tensor() -> Any:
    def output(**items: Any) -> ModelOutput:
        made = ModelOutput()
        for name, item in items.items():
            made[name] = item
        return made

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0], labels=batch[1]).loss  # type: ignore[no-any-return]

    return [trained(Answering(answers), loss) for answers in (Answer, output)]


CASES: dict[str, Callable[[], Any]] = {
    act.__name__: act
    for act in (
        a_dict_of_tensors,
        dicts,
        encodings,
        named_tuples,
        dataclasses,
        a_collate_that_pads,
        random_augmentation_by_workers,
        a_loader,
        a_loader_with_its_own_size_and_collate,
        a_gan,
        gradient_penalty,
        checkpointing,
        reentrant_checkpointing,
        adapters_on_a_frozen_base,
        weight_norm,
        weight_norm_of_old,
        spectral_norm,
        spectral_norm_of_old,
        tied_weights_and_several_losses,
        models_that_return_more_than_a_tensor,
    )
}


if __name__ == "__main__":
    for name in sys.argv[2:] or CASES:
        try:
            told = CASES[name]()
        except pl.PacelineError as error:
            told = str(error)
        print(json.dumps({name: told}))
