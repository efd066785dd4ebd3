"""torch's private parts are used in one file, and nothing depends on those that a torch may not have."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroupGloo

import paceline
from paceline import torch_private
from paceline.errors import PacelineError
from paceline.optim import direct_gradients
from paceline.optim.gradients import GradientCollector, IntoBuffer
from paceline.split.wavefront.packed_matrix import PackedMatrix
from tests.conftest import Start

PACKAGE = Path(paceline.__file__).parent
OF_PYTHON = {
    *("_exit", "_fields", "_asdict", "_operator", "_bootstrap", "_bootstrap_external", "_abc_impl"),
    *("_option_string_actions", "_ActionsContainer", "_ArgumentGroup"),
}
PRIVATE = re.compile(r"_[a-zA-Z]\w+|_C")
Nodes = Sequence[ast.AST]


def nodes_of(text: str) -> Nodes:
    return list(ast.walk(ast.parse(text)))


def on_own_object(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def defined_names(nodes: Nodes) -> set[str]:
    """What a file gives a name itself: functions, classes, variables, and attributes of its own objects."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and on_own_object(node):
            found.add(node.attr)
    return found


def torch_names() -> set[str]:
    """Private names that objects of torch have; that ours may have too does not make them ours on theirs."""
    kinds = [torch.Tensor, nn.Module(), nn.LSTM(1, 1), nn.Conv1d(1, 1, 1), nn.BatchNorm1d(1), torch.fx.Tracer()]
    others = [torch.optim.SGD([torch.zeros(1)]), ProcessGroupGloo._Options]
    return {name for kind in (torch, torch._C, nn, F, *kinds, *others) for name in dir(kind)}


def private_uses(nodes: Nodes, own: set[str], of_torch: set[str]) -> set[str]:
    """What a file uses that begins with an underscore, and is neither ours nor Python's."""
    sentences = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    found = set()
    for node in nodes:
        if isinstance(node, ast.Attribute):
            if node.attr not in own or (node.attr in of_torch and not on_own_object(node)):
                found.add(node.attr)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            modules = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            if any(module.partition(".")[0] == "torch" for module in modules):
                found |= {part for module in modules for part in module.split(".")}
        elif isinstance(node, ast.Constant) and id(node) not in sentences and re.fullmatch(r"[\w.]+", str(node.value)):
            found |= set(str(node.value).split(".")) - own  # a name, for getattr or as the beginning of others
    return {name for name in found if PRIVATE.fullmatch(name)} - OF_PYTHON


def test_private_names_of_torch_are_in_one_file() -> None:
    files = {str(path.relative_to(PACKAGE)): nodes_of(path.read_text()) for path in PACKAGE.rglob("*.py")}
    here = files.pop("torch_private.py")
    own, of_torch = set[str]().union(*map(defined_names, files.values())), torch_names()
    found = {path: private_uses(nodes, own, of_torch) for path, nodes in files.items()}
    assert {path: names for path, names in found.items() if names} == {}
    assert {"_version", "_buffers", "_orig_mod", "_pytree"} <= private_uses(here, own, of_torch)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("module._buffers", "_buffers"),  # ours have it too
        ("self._flat_weights", "_flat_weights"),
        ("torch.ops.mkldnn._linear_pointwise.binary(x)", "_linear_pointwise"),
        ("from torch.utils import _pytree", "_pytree"),
        ("import torch._dynamo", "_dynamo"),
        ("torch._C.DisableTorchFunctionSubclass()", "_C"),
        ("name.removeprefix('_orig_mod.')", "_orig_mod"),
        ("getattr(optimizer, '_opt_called')", "_opt_called"),
    ],
)
def test_a_private_name_is_seen_however_it_is_written(line: str, name: str) -> None:
    assert private_uses(nodes_of(line), {"_buffers", "_own"}, torch_names()) == {name}
    assert private_uses(nodes_of("self._own(other._own, self._buffers, '_own')"), {"_buffers", "_own"}, set()) == set()


def test_a_name_that_torch_does_not_have_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.9.0")
    monkeypatch.setitem(torch_private._WHERE, "tree_prune", ("torch.utils._pytree", "tree_prune"))
    with pytest.raises(PacelineError, match=r"^torch 9.9.0 has no torch.utils._pytree.tree_prune: use torch 2"):
        torch_private.tree_prune  # noqa: B018


def test_products_are_torchs_where_there_is_no_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x, other = torch.randn(8, 6), torch.randn(4, 6), torch.randn(4, 8)
    packed = PackedMatrix(weight, rows=4)
    assert torch_private.can_pack()
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch_private, "pack_matrix", None)
    plain = PackedMatrix(weight, rows=4)
    torch.testing.assert_close(packed.times(x), plain.times(x))
    torch.testing.assert_close(packed.times_plus(x, other), plain.times_plus(x, other))


# ── linear layers that write their gradient in place ────────────────────────────────────────────────────────────


def linear_during_a_step() -> bool:
    """Whether it is ours; the gradient is right either way."""
    weight, place = nn.Parameter(torch.ones(2, 3)), torch.zeros(2, 3)
    collector = GradientCollector([weight], [IntoBuffer(place)])
    collector.begin()
    ours = F.linear is direct_gradients.linear
    F.linear(torch.ones(4, 3), weight).sum().backward()
    assert collector.finish() == [True]
    collector.close()
    assert torch.equal(place, torch.full((2, 3), 4.0))
    return ours


def test_linear_layers_are_torchs_where_it_is_switched_off_or_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_gradients, "LEAST_ELEMENTS", 1)
    assert linear_during_a_step()
    with monkeypatch.context() as changed:
        changed.setenv("PACELINE_PLAIN_TORCH", "1")
        assert not linear_during_a_step()
    for version in ("2.8.0", "2.99.0", "2.13.0a0+git0123456"):
        with monkeypatch.context() as changed:
            changed.setattr(torch, "__version__", version)
            assert not linear_during_a_step()
    places = {
        torch._C: ("_will_engine_execute_node", "_are_functorch_transforms_active", "_len_torch_function_stack"),
        torch.overrides: ("_get_current_function_mode_stack",),
        torch.autograd.forward_ad: ("_current_level",),
    }
    for holder, names in places.items():
        for name in names:
            with monkeypatch.context() as changed:
                changed.delattr(holder, name)  # torch needs some of them too, and would not compute a step
                assert not torch_private.can_follow_gradients()
    assert linear_during_a_step()


TRAINING = """
import json, sys
import torch
from torch import nn
from torch.distributed import ProcessGroupGloo
import paceline as pl

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
trainer = pl.Trainer(model, optimizer, lambda model, batch: model(batch[0]).square().mean())
data = torch.utils.data.TensorDataset(torch.randn(64, 16, dtype=torch.float64))
losses = [trainer.step(batch) for batch in trainer.batches(data, batch_size=16)]
print(json.dumps({"losses": losses, "compiler": "torch._dynamo" in sys.modules}))
"""


def test_a_run_without_the_loans_finds_the_same(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    with_loans = start(TRAINING, "--replicas 2")
    monkeypatch.setenv("PACELINE_PLAIN_TORCH", "1")
    without = start(TRAINING, "--replicas 2")
    assert with_loans.fine().told("compiler") is False
    assert without.fine().told("compiler") is True
    assert without.told("losses") == pytest.approx(with_loans.told("losses"), rel=1e-12)
