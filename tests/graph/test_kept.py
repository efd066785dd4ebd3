"""A graph that was kept is the one that would be captured, or it is not used; and files of others are left alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.cache_folder import CACHE
from paceline.errors import InvalidInput
from paceline.graph.call_graph import CallGraph
from paceline.graph.content import Content, NotKnown
from paceline.graph.kept import FOLDER, MOST_ENTRIES, KeptGraph
from paceline.graph.proof import compare
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
    found = KeptGraph(function, model or Net(), batch_of(count), AllShapes())
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
    second = KeptGraph(function, model, batch_of(), AllShapes())
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
    found = KeptGraph(loss, model, batch_of(), AllShapes())
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
    return Content(function, model or Net(), batch_of() if batch is None else batch).key


def with_closure(value: Any) -> Callable[..., Any]:
    return lambda model, batch: model(batch["x"]).sum() * value


def set_global(name: str, value: Any) -> Callable[[pytest.MonkeyPatch, Net], None]:
    return lambda patch, _: patch.setattr(sys.modules[__name__], name, value)


def on_model(change: Callable[[Net], Any]) -> Callable[[pytest.MonkeyPatch, Net], None]:
    def apply(_: pytest.MonkeyPatch, model: Net) -> None:
        change(model)

    return apply


@pytest.mark.parametrize(
    "change",
    [
        set_global("DEPTH", 3),
        set_global("CLASS_WEIGHTS", torch.ones(3, dtype=torch.float64)),
        set_global("CLASS_WEIGHTS", torch.tensor([1.0, 2.0, 0.25])),
        set_global("scaled", lambda x: x * 0.5),
        lambda patch, _: patch.setattr(scaled, "__defaults__", (0.25,)),
        lambda patch, _: patch.setattr(Net, "forward", lambda self, x: self.last(self.first(x))),
        on_model(lambda model: model.eval()),
        on_model(lambda model: model.drop.eval()),
        on_model(lambda model: setattr(model.drop, "p", 0.1)),
        on_model(lambda model: setattr(model.settings, "scale", 3.0)),
        on_model(lambda model: model.settings.kinds.add("c")),
        on_model(lambda model: model.first.weight.requires_grad_(False)),
        on_model(lambda model: setattr(model.first, "bias", model.last.bias)),
        on_model(lambda model: model.first.register_forward_hook(lambda *given: given[-1] * 2)),
        on_model(lambda model: setattr(model, "mask", torch.ones(1))),
        on_model(lambda model: model.double()),
        lambda patch, _: patch.setattr(torch.backends.mkldnn, "enabled", False),
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


NET = """
import enum, functools, torch, types
from torch import nn
{}
class Net(nn.Module):
    factors = (1.0, 2.0)
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
    def forward(self, x):
        return self.layer(x) * {}
def loss(model, batch):
    return model(batch["x"]).sum()
"""


def loaded(before: str, factor: str, name: str = "users_model") -> ModuleType:
    """Returns a module of the user's, in which a forward multiplies by something."""
    module = ModuleType(name)
    module.__file__ = "/nowhere/users_model.py"
    sys.modules[name] = module
    exec(NET.format(before, factor), vars(module))
    return module


@pytest.mark.parametrize(
    ("before", "factor", "one", "other"),
    [
        ("class Config: pairs = (1.0, HERE)", "Config.pairs[1]", "2.0", "3.0"),
        ("class Config: pairs = [1.0, HERE]", "Config.pairs[1]", "2.0", "3.0"),
        ("class Config: pairs = {'a': HERE}", "Config.pairs['a']", "2.0", "3.0"),
        ("class Config:\n  class Inner: gain = HERE", "Config.Inner.gain", "2.0", "3.0"),
        ("class Config:\n  @functools.cached_property\n  def gain(self): return HERE", "Config().gain", "2.0", "3.0"),
        ("class Config:\n  @property\n  def gain(self): return HERE", "Config().gain", "2.0", "3.0"),
        ("class Config:\n  @staticmethod\n  def gain(): return HERE", "Config.gain()", "2.0", "3.0"),
        (
            "class Config:\n  def __init__(self): self.num_hashes = HERE\nconfig = Config()",
            "config.num_hashes",
            "2",
            "4",
        ),
        ("class Config(dict):\n  def gain(self): return HERE\nconfig = Config()", "config.gain()", "2.0", "3.0"),
        ("class Number(float):\n  def gain(self): return self * HERE\none = Number(1)", "one.gain()", "2.0", "3.0"),
        ("class Kind(enum.Enum): A = HERE", "Kind.A.value", "2.0", "3.0"),
        (
            "class Scale(torch.autograd.Function):\n  forward = staticmethod(lambda ctx, x: x.clone())\n"
            "  backward = staticmethod(lambda ctx, g: g * HERE)",
            "Scale.apply(x)",
            "2.0",
            "3.0",
        ),
        ("tensor = torch.tensor(HERE)", "float(tensor)", "2.0", "3.0"),
        ("def scaled(x, HERE): return x * mul + add", "scaled(x, mul=2.0, add=3.0)", "mul, add", "add, mul"),
        ("def gain(): return gain.factor\ngain.factor = HERE", "gain()", "2.0", "3.0"),
        (
            "package = types.ModuleType('package'); package.inner = types.ModuleType('package.inner')\n"
            "exec('def gain(): return HERE', vars(package.inner))",
            "package.inner.gain()",
            "2.0",
            "3.0",
        ),
    ],
)
def test_sources_that_compute_something_else_have_other_keys(before: str, factor: str, one: str, other: str) -> None:
    def key_of(given: str, name: str = "users_model") -> str:
        module = loaded(before.replace("HERE", given), factor, name)
        return key(module.loss, module.Net())

    assert key_of(one) == key_of(one)
    assert key_of(one) != key_of(other)
    assert key_of(one, "antigravity") != key_of(other, "antigravity")  # a module of Python's has that name


@pytest.mark.parametrize(
    ("before", "factor"),
    [
        ("import os", "float(os.environ['FACTOR'])"),
        ("from os import getenv", "float(getenv('FACTOR'))"),
        ("def gain():\n  from users_other import gain\n  return gain", "gain()"),
        ("def gain():\n  from . import random\n  return random.gain", "gain()"),
        ("class Lazy(dict):\n  def items(self): raise OSError('gone')\nlazy = Lazy()", "lazy.gain"),
        ("class Shy:\n  __slots__ = ('a',)\n  def __getattr__(self, name): raise OSError\nshy = Shy()", "shy.a"),
        ("class Shy:\n  def __repr__(self): raise OSError\nshy = {Shy(), Shy()}", "len(shy)"),
        ("large = torch.empty(1).expand(1 << 27)", "large[0]"),
    ],
)
def test_where_something_cannot_be_known_there_is_no_key(before: str, factor: str) -> None:
    module = loaded(before, factor)
    with pytest.raises(NotKnown):
        key(module.loss, module.Net())


def test_what_is_given_and_what_a_function_keeps_make_another_key() -> None:
    given = [batch_of(), batch_of(4), {**batch_of(), "more": 1}, {**batch_of(), "more": 2}, tuple(batch_of().values())]
    functions = [loss, both, with_closure(1.0), with_closure(2.0)]
    with torch.no_grad():
        without = key()
    keys = [*(key(batch=batch) for batch in given), *(key(function) for function in functions[1:]), without]
    assert len(set(keys)) == len(keys)
    assert key(with_closure(2.0)) == key(with_closure(2.0))


def test_what_cannot_be_looked_into_is_not_kept(folder: Path) -> None:
    unknown = (n for n in range(3))
    function = with_closure(1.0)
    with pytest.raises(NotKnown, match="generator"):
        key(lambda model, batch: function(model, batch) * (unknown is not None))
    assert kept(lambda model, batch: function(model, batch) * (unknown is not None)).graph.nodes
    assert not folder.exists()


def test_a_size_that_follows_from_values_is_not_kept(folder: Path) -> None:
    def chosen(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch["x"])[batch["y"] > 0].sum()

    assert kept(chosen).graph.nodes
    assert not folder.exists()


# ── the proof ────────────────────────────────────────────────────────────────────────────────────────────────


def hidden(model: nn.Module, batch: Any) -> torch.Tensor:
    """Reads a global by a way that no key sees, and which changes gradients only."""
    found = loss(model, batch)
    return (found.detach() if globals()["DETACHED"] else found) + model.last.bias.sum()


def test_a_kept_graph_of_something_else_is_dropped_and_captured_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "DETACHED", True, raising=False)
    before = key(hidden)
    first = kept(hidden)
    first.add_note("operators", b"of the old graph")
    assert KeptGraph(hidden, Net(), batch_of(), AllShapes()).is_proven
    monkeypatch.setattr(sys.modules[__name__], "DETACHED", False)
    assert key(hidden) == before
    trusting = KeptGraph(hidden, Net(), batch_of(), AllShapes(), proven=first.entry)
    assert trusting.is_proven  # by another device
    model = Net()
    again = KeptGraph(hidden, model, batch_of(), AllShapes())
    assert not again.is_proven
    assert list(folder.iterdir()) == []
    compare(hidden, model, batch_of(), again.graph, gradients=True)
    again.keep()
    third = KeptGraph(hidden, model, batch_of(), AllShapes())
    assert third.is_proven
    assert third.entry == again.entry != first.entry
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
        found = KeptGraph(loss, Net(), batch_of(), AllShapes())
        assert not found.is_proven
        if at > 200:
            break
    entry.write_bytes(whole[:-1])
    assert not KeptGraph(loss, Net(), batch_of(), AllShapes()).is_proven
    entry.write_bytes(whole)
    assert KeptGraph(loss, Net(), batch_of(), AllShapes()).is_proven


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
    again = KeptGraph(loss, Net(), batch_of(), AllShapes())
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
    again = KeptGraph(loss, Net(), batch_of(), AllShapes())
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
        return KeptGraph(loss, Net(), batch_of(), AllShapes()).is_proven

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
