"""A graph that was kept is the one that would be captured, or it is not used; and files of others are left alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.cache_folder import CACHE
from paceline.errors import InvalidInput
from paceline.graph.call_graph import CallGraph
from paceline.graph.kept import FOLDER, MOST_ENTRIES, KeptGraph
from paceline.graph.proof import GraphProof, compare
from paceline.graph.shapes import AllShapes
from paceline.plan.calibration import default_path
from paceline.split.stages.measure import measure

DEPTH = 2
CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 0.5])


class Net(nn.Module):
    """What a graph can have: a buffer that changes, dropout, no_grad, autocast, constants, a tensor of its own."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, width), nn.Linear(width, 3)
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(0.5)
        self.settings = SimpleNamespace(scale=2.0, kinds={"a", "b"})
        self.mask = torch.ones(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x)) * self.settings.scale * self.mask
        with torch.no_grad():
            gate = torch.sigmoid(hidden.mean())
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.drop(hidden) @ torch.eye(hidden.size(1))
        for _ in range(DEPTH):
            hidden = scaled(hidden.float())
        return self.last(hidden[..., 0:4:1]) * gate + torch.tensor([0.0, 1.0, float("inf")]).clamp(max=3)


def scaled(x: torch.Tensor, by: float = 0.5) -> torch.Tensor:
    return x * by


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], CLASS_WEIGHTS)


def both(model: nn.Module, batch: Any) -> dict[str, Any]:
    found = loss(model, batch)
    return {"loss": (found, 3), "logged": [found * 2, 1.5, "words", None]}


def batch_of(count: int = 5) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(count, 3), "y": torch.arange(count) % 3}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE, str(tmp_path / "kept"))
    return tmp_path / "kept" / FOLDER


def kept(function: Callable[..., Any] = loss, model: nn.Module | None = None, count: int = 5) -> KeptGraph:
    found = KeptGraph(GraphProof(function, model or Net(), batch_of(count)), AllShapes())
    found.keep()
    return found


def code(call: CallGraph) -> list[str]:
    """Returns all that a graph says."""
    of_node = [(node.name, node.op, str(node.target), node.args, node.kwargs, node.meta) for node in call.graph.nodes]
    return [*map(repr, of_node), repr(call.inputs), repr(call.tensors), repr(list(call.constants)), repr(call.returned)]


# ── the same graph ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("function", [loss, both])
def test_a_graph_is_the_same_when_it_was_kept(function: Callable[..., Any]) -> None:
    first = kept(function)
    model = Net()
    second = KeptGraph(GraphProof(function, model, batch_of()), AllShapes())
    assert (first.is_proven, second.is_proven) == (False, True)
    assert code(second.graph) == code(first.graph)
    batch = batch_of()
    if function is loss:
        compare(loss, model, batch, second.graph, gradients=True)
    assert repr(second.graph.structure.fill([torch.ones(())] * 2)) == repr(
        first.graph.structure.fill([torch.ones(())] * 2)
    )
    for one, other in zip(first.graph.values.values(), second.graph.values.values(), strict=True):
        assert getattr(one, "shape", one) == getattr(other, "shape", other)
        assert getattr(one, "dtype", None) == getattr(other, "dtype", None)


def test_tensors_of_the_users_are_those_of_this_run() -> None:
    kept()
    model = Net()
    found = KeptGraph(GraphProof(loss, model, batch_of()), AllShapes())
    live = [tensor for tensor in found.graph.constants.values() if tensor is model.mask or tensor is CLASS_WEIGHTS]
    assert found.is_proven
    assert len(live) == 2


def test_a_second_process_finds_it(folder: Path) -> None:
    script = folder.parents[1] / "script.py"
    script.write_text("from test_kept import kept\nprint(kept().is_proven)\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    answers = [
        subprocess.run(
            [sys.executable, script], env={**environment, "PYTHONHASHSEED": seed}, capture_output=True, text=True
        ).stdout.strip()
        for seed in ("1", "2")
    ]
    assert answers == ["False", "True"]


# ── what makes it another ────────────────────────────────────────────────────────────────────────────────────


def key(function: Callable[..., Any] = loss, model: nn.Module | None = None, batch: Any = None) -> str:
    found = GraphProof(function, model or Net(), batch_of() if batch is None else batch).content
    assert found is not None
    return found


def with_closure(value: Any) -> Callable[..., Any]:
    return lambda model, batch: model(batch["x"]).sum() * value


def set_global(name: str, value: Any) -> Callable[[pytest.MonkeyPatch, Net], None]:
    return lambda patch, _: patch.setattr(sys.modules[__name__], name, value)


def on_model(change: Callable[[Net], Any]) -> Callable[[pytest.MonkeyPatch, Net], None]:
    def apply(_: pytest.MonkeyPatch, model: Net) -> None:
        change(model)

    return apply


class Scale(torch.autograd.Function):
    """Whose backward alone depends on something that is reached by no name."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * float(os.environ.get("FACTOR", "2"))


@pytest.mark.parametrize(
    "change",
    [
        set_global("DEPTH", 3),
        set_global("CLASS_WEIGHTS", torch.ones(3, dtype=torch.float64)),
        set_global("CLASS_WEIGHTS", torch.tensor([1.0, 2.0, 0.25])),
        lambda patch, _: patch.setattr(scaled, "__defaults__", (0.25,)),
        lambda patch, _: patch.setattr(Net, "forward", lambda self, x: self.last(self.first(x))),
        on_model(lambda model: model.eval()),
        on_model(lambda model: model.drop.eval()),
        on_model(lambda model: setattr(model.drop, "p", 0.1)),
        on_model(lambda model: setattr(model.settings, "scale", 3.0)),
        on_model(lambda model: model.first.weight.requires_grad_(False)),
        on_model(lambda model: setattr(model.norm, "bias", model.norm.weight)),
        on_model(lambda model: model.first.register_forward_hook(lambda *given: given[-1] * 2)),
        on_model(lambda model: setattr(model, "mask", torch.ones(1))),
        on_model(lambda model: model.double()),
        on_model(lambda model: setattr(model, "norm", nn.Sequential(model.norm))),
    ],
)
def test_a_change_makes_another_key(
    change: Callable[[pytest.MonkeyPatch, Net], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key()
    assert key() == before
    model = Net()
    change(monkeypatch, model)
    assert key(model=model) != before


def test_what_no_name_leads_to_makes_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(model: nn.Module, batch: Any) -> torch.Tensor:
        return Scale.apply(loss(model, batch))  # type: ignore[no-any-return, no-untyped-call]

    before = key(hidden)
    assert key(hidden) == before
    monkeypatch.setenv("FACTOR", "3")
    assert key(hidden) != before


def test_what_is_given_and_returned_and_what_a_function_keeps_make_another_key() -> None:
    given = [batch_of(), batch_of(4), {**batch_of(), "x": torch.randn(3, 5).t()}]
    said: list[Callable[..., Any]] = [
        lambda model, batch: {"loss": loss(model, batch)},
        lambda model, batch: {"loss": loss(model, batch), "said": "one"},
        lambda model, batch: {"loss": loss(model, batch), "said": "other"},
    ]
    functions = [loss, both, with_closure(1.0), with_closure(2.0), *said]
    with torch.no_grad():
        without = key()
    keys = [*(key(batch=batch) for batch in given), *(key(function) for function in functions[1:]), without]
    assert len(set(keys)) == len(keys)
    assert key(with_closure(2.0)) == key(with_closure(2.0))


def test_what_follows_from_values_is_not_kept(folder: Path) -> None:
    def chosen(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch["x"])[batch["y"] > 0].sum()

    large = torch.empty(1).expand(1 << 27)
    assert kept(chosen).graph.nodes
    assert GraphProof(lambda model, batch: loss(model, batch) * large[0], Net(), batch_of()).content is None
    assert not folder.exists()


# ── the proof ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_kept_graph_of_something_else_is_dropped_and_captured_anew(folder: Path) -> None:
    def doubled(model: nn.Module, batch: Any) -> torch.Tensor:
        return loss(model, batch) * 2

    kept(doubled)
    (other,) = folder.iterdir()
    first = kept()
    (mine,) = set(folder.iterdir()) - {other}
    mine.write_bytes(other.read_bytes())
    first.add_note("operators", b"of the graph before")
    digest = other.read_bytes()[:20].hex()
    trusting = KeptGraph(GraphProof(loss, Net(), batch_of()), AllShapes(), proven=f"{mine.stem} {digest}")
    assert trusting.is_proven  # by another device
    again = KeptGraph(GraphProof(loss, Net(), batch_of()), AllShapes())
    assert not again.is_proven
    assert list(folder.iterdir()) == [other]
    again.prove()
    again.keep()
    third = KeptGraph(GraphProof(loss, Net(), batch_of()), AllShapes())
    assert third.is_proven
    assert third.entry == again.entry == first.entry
    assert third.note("operators") is None


def test_timings_taken_beside_others_are_not_kept() -> None:
    model = Net()
    found = kept(model=model)
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: time.sleep(0.1))  # as if another program had the core
    measured = measure(model, found, list(batch_of().values()))
    assert len(measured.seconds) == len(found.graph.nodes)
    assert found.note("operators") is None


# ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_damaged_entry_is_as_good_as_none(folder: Path) -> None:
    kept()
    (entry,) = folder.iterdir()
    whole = entry.read_bytes()
    for at in range(0, len(whole), max(1, len(whole) // 50)):
        entry.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        found = KeptGraph(GraphProof(loss, Net(), batch_of()), AllShapes())
        assert not found.is_proven
        if at > 200:
            break
    entry.write_bytes(whole[:-1])
    assert not KeptGraph(GraphProof(loss, Net(), batch_of()), AllShapes()).is_proven
    entry.write_bytes(whole)
    assert KeptGraph(GraphProof(loss, Net(), batch_of()), AllShapes()).is_proven


@pytest.mark.parametrize(
    "name", ["load_library.__call__.__call__", "aten.no_such.default", "aten.relu", "import_module"]
)
def test_an_entry_that_somebody_made_up_runs_no_code(folder: Path, name: str) -> None:
    first = kept()
    content = first.note("graph")
    assert content is not None
    graph = msgspec.msgpack.decode(content)
    graph[0][-1][1:3] = [name, ["tuple", "libnothing.so"]]
    first.add_note("graph", msgspec.msgpack.encode(graph))
    again = KeptGraph(GraphProof(loss, Net(), batch_of()), AllShapes())
    assert not again.is_proven
    assert code(again.graph) == code(first.graph)


def made_up(change: Callable[[list[Any]], None]) -> bool:
    """Returns whether a graph is used that somebody has changed."""
    first = kept()
    content = first.note("graph")
    assert content is not None
    graph = msgspec.msgpack.decode(content)
    change(graph[0])
    first.add_note("graph", msgspec.msgpack.encode(graph))
    again = KeptGraph(GraphProof(loss, Net(), batch_of()), AllShapes())
    assert code(again.graph) == code(first.graph)
    return again.is_proven


def test_names_of_an_entry_do_not_become_code(folder: Path) -> None:
    mark = folder.parent / "ran"
    run = f"open({str(mark)!r}, 'w')"

    def argument(nodes: list[Any]) -> None:
        nodes[-1][3] = ["dict", [f"dtype=None if {run} else None, **{{}}) #", 0]]

    def placeholder(nodes: list[Any]) -> None:
        nodes[0][0] = f"x={run}"

    def value(nodes: list[Any]) -> None:
        nodes[-1][0] = f"x = {run}; y"

    assert not any(map(made_up, (argument, placeholder, value)))
    assert not mark.exists()


@pytest.mark.parametrize("name", ["aten.from_file.default", "profiler._record_function_enter_new.default"])
def test_an_operator_that_touches_files_or_is_not_torchs_own_is_not_read(folder: Path, name: str) -> None:
    def exchange(nodes: list[Any]) -> None:
        nodes[-1][1:3] = [name, ["tuple", str(folder / "file"), True, 4]]

    assert not made_up(exchange)
    assert not (folder / "file").exists()


def test_what_others_could_have_written_is_not_read(folder: Path) -> None:
    def found() -> bool:
        return KeptGraph(GraphProof(loss, Net(), batch_of()), AllShapes()).is_proven

    kept()
    (entry,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, entry.stat().st_mode & 0o777, found()) == (0o700, 0o600, True)
    for path, mode in ((entry, 0o620), (entry, 0o602), (folder, 0o770), (folder, 0o703)):
        before = path.stat().st_mode
        path.chmod(mode)
        assert not found()
        path.chmod(before)
    assert found()
    if os.geteuid() == 0:
        for path in (entry, folder):
            os.chown(path, 54321, -1)
            assert not found()
            os.chown(path, 0, -1)
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))
    assert not found()


def test_a_folder_that_cannot_be_written_ends_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE, str(tmp_path / "file"))
    assert kept().graph.nodes
    monkeypatch.setenv(CACHE, "")
    assert kept().graph.nodes
    monkeypatch.delenv(CACHE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert kept().graph.nodes
    with pytest.raises(InvalidInput, match="PACELINE_CACHE is 'not set': this user has no home"):
        default_path()


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_the_entries_used_last_are_kept(folder: Path) -> None:
    first = kept()
    others = [folder.parent / "calibration.json", folder / "thesis.txt", folder / f"{'0' * 40}.folder"]
    others[0].write_text("{}")
    others[1].write_text("mine")
    others[2].mkdir()
    for path in others:
        os.utime(path, (0, 0))
    (begun := folder / ".begun-by_a_run_that_was_killed").write_bytes(b"")
    os.utime(begun, (0, 0))
    for number in range(MOST_ENTRIES + 5):
        first.add_note(str(number), b"")
    assert all(path.exists() for path in others)
    assert not begun.exists()
    names = {path.suffix for path in folder.iterdir() if path not in others}
    assert len(names) == MOST_ENTRIES
    assert f".{MOST_ENTRIES + 4}" in names
    assert ".graph" not in names
