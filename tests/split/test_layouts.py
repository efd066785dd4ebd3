"""Layouts: dims get their names, and a model cut along any of them computes what it does whole."""

from __future__ import annotations

import copy
import itertools
import json
import math
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import MAIN, Start
from devices import on_devices
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import paceline as pl
from paceline.errors import PacelineError
from paceline.exchange.mailboxes import Peers
from paceline.loop.returned_loss import read_loss
from paceline.loss_value import Weight
from paceline.split.layout import LayoutCut
from paceline.split.layout.atoms import Atom, join, leaves, regroup, size
from paceline.split.layout.on_parts import WholeMask, attend
from paceline.split.layout.show import dims_of
from paceline.split.values import Layout

# ── atoms ────────────────────────────────────────────────────────────────────────────────────────────────────

SIZES = st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=4)


@given(SIZES, st.randoms(use_true_random=False))
def test_a_reshape_keeps_the_product_and_the_order_of_atoms(sizes: list[int], random: object) -> None:
    dims = [[Atom(extent)] for extent in sizes]
    merged = regroup(dims, [math.prod(sizes)])
    assert merged is not None
    assert [leaf.size for leaf in leaves(merged[0])] == ([s for s in sizes if s != 1] or [1])
    again = regroup(merged, sizes)
    assert again is not None
    for before, after in zip(dims, again, strict=True):
        assert size(after) == size(before)
        assert before[0].size == 1 or leaves(after) == leaves(before)


@given(SIZES, SIZES)
def test_joined_dims_are_the_same_atoms(one: list[int], other: list[int]) -> None:
    a, b = [Atom(extent) for extent in one], [Atom(extent) for extent in other]
    assert join(a, b) <= (math.prod(one) == math.prod(other))
    if join(a, b):
        assert leaves(a) == leaves(b)
        assert size(leaves(a)) == math.prod(one)


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────


class Attention(nn.Module):
    def __init__(self, embed: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(embed, 3 * embed)
        self.out = nn.Linear(embed, embed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, embed = x.shape
        parts = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (part.view(batch, length, self.heads, embed // self.heads).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).contiguous().view(batch, length, embed))


class Block(nn.Module):
    def __init__(self, embed: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention = Attention(embed, heads)
        self.norm1, self.norm2 = nn.LayerNorm(embed), nn.LayerNorm(embed)
        self.fc1, self.fc2 = nn.Linear(embed, hidden), nn.Linear(hidden, embed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Language(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 12)
        self.blocks = nn.ModuleList([Block(12, 3, 17) for _ in range(2)])
        self.head = nn.Linear(12, 20, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class InPlace(nn.Module):
    """As torchvision writes them: what a BatchNorm gives is changed at once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(5, 5, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(5) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norms[0](self.first(x)), inplace=True)
        found = self.norms[1](self.second(x))
        found += x
        return F.relu(found, inplace=True).mean((2, 3))


class Residual(nn.Module):
    """A weight both of whose dims are one: what a layer gives is added to what it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.square, self.last = nn.Linear(6, 9), nn.Linear(9, 9), nn.Linear(9, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.last(x + self.square(x))


class Deciding(nn.Module):
    """Between two layers, something that decides by values and has weights and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.kept, self.last = nn.Linear(6, 9), pl.whole(Chosen()), nn.Linear(9, 9)
        self.average = nn.BatchNorm1d(9, momentum=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.kept(F.gelu(self.average(self.first(x)))))


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(9, 9), nn.BatchNorm1d(9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.inner(x)
        return self.norm(found if found.sum() > 0 else found.square())


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 8, 3, stride=2, padding=1, padding_mode="reflect")
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
        self.out = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        return self.out(self.depthwise(self.second(x)).mean((2, 3)))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(12, 3, 17, dropout=0.0, batch_first=True)
    return nn.Sequential(
        nn.Embedding(20, 12), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(12, 20)
    )


def mlp(widths: list[int], *, norms: bool = False) -> nn.Module:
    layers: list[nn.Module] = []
    for one, other in itertools.pairwise(widths):
        layers += [nn.Linear(one, other), *([nn.LayerNorm(other)] if norms else []), nn.GELU()]
    return nn.Sequential(*layers[:-1])


TOKENS = torch.randint(0, 20, (4, 5), generator=torch.Generator().manual_seed(0))
PICTURES = torch.randn(3, 3, 13, 13, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


def answered(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)  # type: ignore[no-any-return]


def test_dims_have_names() -> None:
    found = {row["parameter"]: row["dims"] for row in dims_of(answered, Language(), TOKENS, {})["parameters"]}
    assert found["tokens.weight"] == "vocab embed"
    assert found["blocks.1.attention.qkv.weight"] == "parts·heads·width embed"
    assert found["blocks.0.attention.out.weight"] == "embed heads·width"
    assert found["blocks.0.fc1.weight"] == found["blocks.1.fc1.weight"] == "hidden embed"
    assert found["blocks.0.norm1.weight"] == "embed"
    assert found["head.weight"] == "out embed"


class Grouped(nn.Module):
    """Attention as published models write it: fewer keys than queries, a cache that is empty, a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(30, 16), nn.Parameter(torch.randn(1, 5, 16))
        self.norm = nn.LayerNorm(16)
        self.q, self.kv, self.o = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.gate_up, self.down = nn.Linear(16, 40), nn.Linear(20, 16)
        self.head = nn.Linear(16, 30, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.tokens(words) + self.places)
        k, v = (part.view(2, 5, 2, 4).transpose(1, 2) for part in self.kv(x).chunk(2, -1))
        k, v = (torch.cat([torch.tensor([]), part], -2) for part in (k, v))
        k, v = (part[:, :, None].expand(2, 2, 2, 5, 4).reshape(2, 4, 5, 4) for part in (k, v))
        q = self.q(x).view(2, 5, 4, 4).transpose(1, 2)
        scores = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        x = self.norm(x + self.o(scores.transpose(1, 2).reshape(2, 5, 16)))
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.head(x + self.down(F.silu(gate) * up))


def told_words(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), x.flatten())


def test_dims_of_an_attention_as_published_have_the_names_a_person_would_choose() -> None:
    rows = dims_of(told_words, Grouped(), torch.randint(30, (2, 5)), {})["parameters"]
    found = {row["parameter"]: row["dims"] for row in rows}
    assert found["tokens.weight"] == found["head.weight"] == "vocab embed"
    assert found["places"] == "1 length embed"
    assert found["q.weight"] == "heads·groups·width embed"
    assert found["kv.weight"] == "parts·heads·width embed"
    assert found["o.weight"] == "embed heads·groups·width"
    assert found["gate_up.weight"] == "parts·hidden embed"
    assert found["down.weight"] == "embed hidden"


def test_names_can_be_given_by_pattern() -> None:
    patterns = {"blocks.*.fc1.weight": "inner model", "head.weight": "words model"}
    found = {row["parameter"]: row["dims"] for row in dims_of(answered, Language(), TOKENS, patterns)["parameters"]}
    assert found["blocks.1.fc2.weight"] == "model inner"
    assert found["head.weight"] == "words model"
    assert found["tokens.weight"] == "vocab model"


@pytest.mark.parametrize(
    ("patterns", "sentence"),
    [
        ({"block.*.fc1.weight": "a b"}, "no parameter is called so"),
        ({"head.weight": "a"}, "head.weight has 2 dims, name each"),
        ({"blocks.0.attention.qkv.weight": "a b"}, "that dim of blocks.0.attention.qkv.weight is 3·3·4"),
        ({"blocks.0.fc1.weight": "a b", "blocks.0.fc2.weight": "c a"}, "is called b already"),
    ],
)
def test_patterns_that_do_not_fit_are_told(patterns: dict[str, str], sentence: str) -> None:
    with pytest.raises(PacelineError, match=sentence):
        dims_of(answered, Language(), TOKENS, patterns)


# ── what people write ────────────────────────────────────────────────────────────────────────────────────────


class LookedAtTwice(nn.Module):
    """The same layer without gradients first, and then with."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.fc1, self.fc2 = nn.Linear(6, 6), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.first(x))
        with torch.no_grad():
            gate = torch.sigmoid(self.fc1(h)).mean()
        return self.fc2(torch.relu(self.fc1(h))) * gate


class MovingMean(nn.Module):
    """A buffer that is written in training, and read along a dim that is cut."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc1(x)
        if self.training:
            self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return self.fc2(torch.relu(h - self.mean))


class SharedByHeads(nn.Module):
    """Every head goes through one layer, and what it gives is cut along the axis of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.feature, self.last = nn.Linear(6, 12), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.feature(self.q(x).view(-1, 2, 6))).mean(1))


class NormedPlaces(nn.Module):
    """A BatchNorm whose statistics go over a dim that is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(5), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.up(x[:, None] * torch.arange(1.0, 6.0)[:, None])))).mean(1)


class Pairs(nn.Module):
    """One dim that is added up over twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.u, self.v = nn.Parameter(torch.randn(8, 3)), nn.Parameter(torch.randn(8, 3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,ir,jr,bj->b", self.table(ids[:, 0]), self.u, self.v, self.table(ids[:, 1]))


class Squeezed(nn.Module):
    """As many outputs as devices: a part of one is no dim of one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.last = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.last(torch.relu(self.fc(x))).squeeze() - x[:, :2]).narrow(1, 0, 2)


class TwoFactorsOfClasses(nn.Module):
    """Classes that are pairs of something, in a loss over them."""

    def __init__(self) -> None:
        super().__init__()
        self.coarse, self.fine = nn.Linear(6, 4), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = (self.coarse(x)[:, :, None] + self.fine(x)[:, None]).flatten(1)
        return F.cross_entropy(scores, torch.arange(len(x)) % 12, reduction="none")


# ── cutting ──────────────────────────────────────────────────────────────────────────────────────────────────


def compare(build: object, x: torch.Tensor, mesh: dict[str, int], layout: dict[str, str]) -> None:
    """Output, gradients and (by them) everything else are those of the whole model, on every device."""

    def made() -> nn.Module:
        torch.manual_seed(1)
        return build()  # type: ignore[operator, no-any-return]

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        output = model(x)
        return (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum()

    whole = made()
    torch.manual_seed(2)
    wanted = loss(whole, x)
    wanted.backward()  # type: ignore[no-untyped-call]
    split = Layout(mesh=mesh, layout=layout)
    one_by_one, ready = threading.Lock(), threading.Barrier(split.devices)

    def device(peers: Peers) -> tuple[float, dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        cut = LayoutCut(split, peers)
        with one_by_one:  # the random generator is one
            model = made()
            cut.prepare(loss, model, x)
        parts = {}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            parts[name] = cut.part_of(name).of(tensor.detach()).clone().requires_grad_(tensor.requires_grad)
        cut.take(parts)
        ready.wait(60)
        torch.manual_seed(2)
        found = cut.train(loss, model, x, Weight.whole(), lambda found: read_loss(found, "")).loss
        gradients = {}
        for name, parameter in model.named_parameters():
            part, gradient = cut.part_of(name), parts[name].grad
            gradients[name] = torch.zeros_like(parameter)
            if part.adds and gradient is not None:
                part.of(gradients[name]).copy_(gradient)
        model.eval()
        with torch.no_grad():
            answer = cut.call(answered, model, x)
            alone = model(x)  # on this device, for itself
        assert found is not None
        return found.mean, gradients, answer, alone

    results = on_devices(split.devices, device)
    buffers = made()
    for found, _, answer, alone in results:
        assert found == pytest.approx(float(wanted.detach()), rel=1e-4, abs=1e-4)
        whole.eval()
        torch.testing.assert_close(answer, whole(x).detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(alone, buffers.eval()(x).detach(), rtol=1e-4, atol=1e-5)
    for name, parameter in whole.named_parameters():
        total = torch.stack([gradients[name] for _, gradients, _, _ in results]).sum(0)
        assert parameter.grad is not None
        torch.testing.assert_close(total, parameter.grad, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(
    ("build", "x", "mesh", "layout"),
    [
        (Language, TOKENS, {"model": 2}, {"hidden": "model", "heads": "model"}),
        (Language, TOKENS, {"model": 3}, {"hidden": "model", "vocab": "model"}),
        (lambda: Language(tied=True), TOKENS, {"model": 2}, {"vocab": "model", "heads": "model"}),
        (Language, TOKENS, {"a": 2, "b": 2}, {"embed": "a", "hidden": "b", "out": "b"}),
        (encoder, TOKENS, {"model": 3}, {"hidden": "model", "heads": "model", "out": "model"}),
        (Images, PICTURES, {"model": 2}, {"channels": "model"}),
        (Images, PICTURES, {"a": 2, "b": 2}, {"channels": "a", "channels2": "b"}),
        (InPlace, PICTURES, {"model": 2}, {"channels": "model"}),
        (Residual, ROWS, {"model": 2}, {"hidden": "model"}),
        (Deciding, ROWS, {"model": 2}, {"out": "model"}),
        (LookedAtTwice, ROWS, {"model": 2}, {"hidden2": "model"}),
        (MovingMean, ROWS, {"model": 2}, {"hidden": "model"}),
        (SharedByHeads, ROWS, {"model": 2}, {"factor": "model", "hidden": "model"}),
        (NormedPlaces, ROWS, {"model": 2}, {"hidden": "model"}),
        (Pairs, TOKENS, {"model": 2}, {"embed": "model"}),
        (Squeezed, ROWS, {"model": 2}, {"out": "model"}),
        (TwoFactorsOfClasses, ROWS, {"model": 2}, {"out": "model"}),
    ],
    ids=[
        "heads",
        "uneven",
        "tied vocab",
        "two axes",
        "torch's encoder",
        "channels",
        "channels on two axes",
        "in place",
        "a square weight",
        "kept whole",
        "without gradients first",
        "a buffer that is written",
        "a layer that heads share",
        "statistics over a dim that is cut",
        "one dim added up twice",
        "a part of one",
        "classes of two factors",
    ],
)
@pytest.mark.filterwarnings("ignore:layout")  # what stays whole is told
def test_a_cut_model_computes_the_same(
    build: object, x: torch.Tensor, mesh: dict[str, int], layout: dict[str, str]
) -> None:
    compare(build, x, mesh, layout)


def test_attention_of_rows_that_may_look_at_nothing_is_torchs() -> None:
    q, k, v = torch.randn(3, 2, 4, 5, 6, generator=torch.Generator().manual_seed(0)).unbind()
    seen = (torch.arange(5) > 0) & torch.ones(5, 5, dtype=torch.bool).tril()
    every = WholeMask((2, 4, 5, 5), torch.empty(2, 4, 5, 5).stride(), ())
    found = attend(q, k, v, seen, 0.0, is_causal=False, scale=None, mask=every)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v, seen))
    assert not every.draw(1.0, torch.float32).any(), "all is dropped, and none of it is divided by nothing"


def test_a_dropout_module_on_parts_drops_nothing_in_an_evaluation() -> None:
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    whole = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    one_by_one = threading.Lock()

    def device(peers: Peers) -> torch.Tensor:
        cut = LayoutCut(Layout(mesh={"model": 2}, layout={"hidden": "model"}), peers)
        with one_by_one:
            model = copy.deepcopy(whole)
            cut.prepare(lambda model, x: model(x).mean(), model, x)  # in train mode
        cut.take({name: cut.part_of(name).of(parameter) for name, parameter in model.named_parameters()})
        model.eval()
        with torch.no_grad():
            return cut.call(answered, model, x)  # type: ignore[no-any-return]

    answers = on_devices(2, device)
    for answer in answers:
        torch.testing.assert_close(answer, whole.eval()(x).detach())


@pytest.mark.filterwarnings("ignore:layout")
@settings(max_examples=10, deadline=None)
@given(
    widths=st.lists(st.integers(2, 9), min_size=2, max_size=5),
    norms=st.booleans(),
    devices=st.integers(2, 3),
    data=st.data(),
)
def test_any_mlp_along_any_dim(widths: list[int], norms: bool, devices: int, data: st.DataObject) -> None:
    x = torch.randn(3, widths[0], generator=torch.Generator().manual_seed(0))
    names = dims_of(answered, mlp(widths, norms=norms), x, {})["dims"]
    wide = [name for name, entry in names.items() if min(entry["sizes"]) >= devices]
    if not wide:
        return
    compare(lambda: mlp(widths, norms=norms), x, {"model": devices}, {data.draw(st.sampled_from(wide)): "model"})


# ── from outside ─────────────────────────────────────────────────────────────────────────────────────────────

SCRIPT = """
import torch, torch.nn as nn, torch.nn.functional as F
import paceline as pl

torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 11), nn.Linear(11, 3)
    def forward(self, x):
        return self.fc2(F.dropout(F.relu(self.fc1(x)), DROPOUT, self.training))
x, y = torch.randn(24, 6), torch.randint(0, 3, (24,))
model = Net()
trainer = pl.Trainer(model, torch.optim.AdamW(model.parameters(), lr=0.01),
                     lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), clip_norm=0.5)
for batch in trainer.batches((x, y), batch_size=8, epochs=2):
    trainer.step(batch)
print(trainer.evaluate((x, y), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])))
trainer.save("model.safetensors")
"""


@pytest.mark.parametrize(
    ("flags", "dropout"),
    [
        pytest.param("--mesh data=2,model=2 --layout batch=data,hidden=model", "0.0", marks=pytest.mark.soak),
        ("--mesh model=2 --layout hidden=model", "0.3"),
    ],
)
def test_a_run_and_its_checkpoint_are_those_of_one_process(start: Start, flags: str, dropout: str) -> None:
    from safetensors.torch import load_file

    alone = start(SCRIPT.replace("DROPOUT", dropout), None).fine()
    cut = start(SCRIPT.replace("DROPOUT", dropout), flags).fine()
    one, other = (load_file(run.folder / "model.safetensors") for run in (alone, cut))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-6)
    (loss,) = (float(line) for line in alone.out.splitlines())
    assert float(cut.log(0).splitlines()[-1]) == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--mesh model=2 --layout hiden=model", "there are hidden"),
        ("--mesh model=2 --layout hidden=modle", "the mesh has no axis 'modle', it has model"),
        ("--mesh model=2", "--layout"),
        ("--mesh model=0 --layout hidden=model", "give axes with sizes"),
        ("--mesh model=99 --layout hidden=model", "needs 99 devices"),
        ("--mesh a=2,b=2 --layout hidden=a,hidden=b", "dim hidden lies along a already"),
        ("--mesh data=2 --layout batch=data,hidden=data", "that axis divides the batch"),
        pytest.param("--mesh model=4 --layout out=model", "that dim has 3 elements", marks=pytest.mark.soak),
        pytest.param("--mesh model=2 --layout hidden=model,in=model", "two dims along model", marks=pytest.mark.soak),
        ("--mesh model=2 --layout hidden=model --stages 2", "the model is cut by --mesh already"),
        ("--mesh model=2 --layout hidden=model --on-failure continue", "a cut model needs all its devices"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(start: Start, flags: str, sentence: str) -> None:
    run = start(SCRIPT.replace("DROPOUT", "0.0"), flags).end()
    assert run.code != 0
    assert sentence in run.err
    assert "Traceback" not in run.err


def test_a_loop_of_ones_own_is_not_cut(start: Start) -> None:
    script = "import torch, paceline as pl\nm = torch.nn.Linear(4, 4)\n"
    run = start(script + "pl.distribute(m, torch.optim.SGD(m.parameters(), lr=1))\n", "--tiles 2").end()
    assert run.code != 0
    assert "a loop of one's own is not cut" in run.err


def test_a_loss_that_uses_parameters_itself_sees_whole_ones(start: Start) -> None:
    from safetensors.torch import load_file

    script = SCRIPT.replace("DROPOUT", "0.0").replace(
        "F.cross_entropy(model(batch[0]), batch[1]), clip",
        "F.cross_entropy(model(batch[0]), batch[1]) + model.fc1.weight.norm(), clip",
    )
    alone = start(script, None).fine()
    cut = start(script, "--mesh model=2 --layout hidden=model").fine()
    one, other = (load_file(run.folder / "model.safetensors") for run in (alone, cut))
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-6)


def test_dims_are_shown(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("DROPOUT", "0.0"))
    command = [sys.executable, "-c", MAIN, "dims", "train.py"]
    shown = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=90, check=True).stdout
    assert "fc1.weight  11×6   hidden in" in shown
    as_json = subprocess.run([*command, "--json"], cwd=tmp_path, text=True, capture_output=True, timeout=90, check=True)
    assert json.loads(as_json.stdout)["dims"]["hidden"]["sizes"] == [11]
    assert not (tmp_path / "model.safetensors").exists()
