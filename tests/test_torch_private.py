"""torch's private parts are used in one file, and nothing depends on those that a torch may not have."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline
from paceline import torch_private
from paceline.errors import PacelineError
from paceline.optim import linear_gradients
from paceline.optim.gradients import GradientCollector, IntoBuffer
from tests.conftest import Start

PACKAGE = Path(paceline.__file__).parent
DOCUMENTED = {"torch.Tensor._make_wrapper_subclass", "torch._C.DisableTorchFunctionSubclass", "torch._C"}  # by torch
ONLY_THERE = {"_orig_mod", "_opt_called", "_compiled_call_impl", "_execution_engine", "_post_accumulate_grad_hooks"}


def private_names(path: Path) -> set[str]:
    """What a file takes of torch that begins with an underscore."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            found |= {text} if re.fullmatch(r"(torch|nn|F)\.[\w.]+", text) else {node.attr} & ONLY_THERE
    return {name for name in found if re.search(r"(^|\.)_[a-zA-Z]", name)} - DOCUMENTED


def test_private_names_of_torch_are_in_one_file() -> None:
    found = {str(path.relative_to(PACKAGE)): private_names(path) for path in PACKAGE.rglob("*.py")}
    assert found.pop("torch_private.py")
    assert {path: names for path, names in found.items() if names} == {}


def test_a_name_that_torch_does_not_have_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.9.0")
    monkeypatch.setitem(torch_private._WHERE, "tree_prune", ("torch.utils._pytree", "tree_prune"))
    with pytest.raises(PacelineError, match=r"^torch 9.9.0 has no torch.utils._pytree.tree_prune: use torch 2"):
        torch_private.tree_prune  # noqa: B018


# ── linear layers that write their gradient in place ────────────────────────────────────────────────────────────


def linear_during_a_step() -> bool:
    """Whether it is ours; the gradient is right either way."""
    weight, place = nn.Parameter(torch.ones(2, 3)), torch.zeros(2, 3)
    collector = GradientCollector([weight], [IntoBuffer(place)])
    collector.begin()
    ours = F.linear is linear_gradients.linear
    F.linear(torch.ones(4, 3), weight).sum().backward()
    assert collector.finish() == [True]
    collector.close()
    assert torch.equal(place, torch.full((2, 3), 4.0))
    return ours


def test_linear_layers_are_torchs_where_it_is_switched_off_or_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_gradients, "LEAST_ELEMENTS", 1)
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
