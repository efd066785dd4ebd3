"""`paceline verify` from the command line: rounding is told from mistakes, and what the model answers is compared."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import MAIN, Run

Verify = Callable[[str, str], Run]

SCRIPT = """
import torch
import torch.nn.functional as F
from torch import nn
import paceline as pl

torch.manual_seed(0)
x, y = torch.randn(24, 8, dtype=torch.float32), torch.randint(0, 4, (24,))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x):
        return {forward}


def loss(model, batch):
    return {loss}


def correct(model, batch):
    return {{"right": (model(batch[0]).argmax(1) == batch[1]).float().mean(), "loss": loss(model, batch)}}


model = Model()
trainer = pl.Trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss)
{before}
for batch in trainer.batches((x, y), 8, epochs={epochs}, seed=0):
    trainer.step(batch)
    {after}
"""
PLAIN = {
    "forward": "self.body(x)",
    "loss": "F.cross_entropy(model(batch[0]), batch[1])",
    "before": "",
    "after": "",
    "epochs": "2",
}

# The embedding is the output layer too; most of its rows have gradients so small that float32 has few digits for them,
# and those of the bias of the keys are zero in exact arithmetic.
TIED = """
import torch
import torch.nn.functional as F
from torch import nn
import paceline as pl


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(200, 32)
        self.body = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 200, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.body(self.embedding(tokens)))


torch.manual_seed(0)
tokens = torch.randint(0, 40, (60, 13))
model = Tied()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
trainer = pl.Trainer(model, optimizer, lambda model, t: F.cross_entropy(model(t[:, :-1]).mT, t[:, 1:]))
for batch in trainer.batches(tokens, 10, epochs=4, seed=0):
    trainer.step(batch)
"""


@pytest.fixture
def verify(tmp_path: Path) -> Verify:
    """`verify(script, "--replicas 2")`, ended."""

    def verify(script: str, flags: str) -> Run:
        (tmp_path / "train.py").write_text(script)
        return Run(tmp_path, sys.executable, "-c", MAIN, "verify", "train.py", *shlex.split(flags)).end()

    return verify


def script(**other: str) -> str:
    return SCRIPT.format(**(PLAIN | other))


def verdict_of(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run.out.splitlines()[-1])
    return found


@pytest.mark.soak
def test_a_tied_embedding_under_adamw_with_servers_is_that_of_one_process_however_long(verify: Verify) -> None:
    run = verify(TIED, "--replicas 3 --servers 2 --steps 24 --json")
    assert run.code == 0, run.out + run.err
    verdict = verdict_of(run)
    assert (verdict["dtype"], verdict["steps"], verdict["left_out"]) == ("float64", 24, 0)
    assert (verdict["tolerance"], verdict["narrow"], verdict["loss_in_eval_mode"]) == (1e-12, None, True)


def test_a_mistake_of_a_millionth_shows_in_float64_and_not_in_float32(verify: Verify) -> None:
    mistaken = script(loss="F.cross_entropy(model(batch[0]), batch[1]) * (1 + 1e-6 * trainer.replica)")
    run = verify(mistaken, "--replicas 2 --steps 2")
    assert run.code == 1
    assert run.out.startswith("different, 2 replicas against one process in float64: step 0: loss differs by")
    run = verify(mistaken, "--replicas 2 --steps 2 --dtype float32")
    assert run.code == 0, run.out
    assert "one process in float32: " in run.out


def test_what_evaluate_and_a_predictor_give_is_compared(verify: Verify) -> None:
    asking = script(
        before="predictor = trainer.predictor(); trainer.resume('saved.safetensors')",
        after="trainer.evaluate((x, y), correct); predictor(x); trainer.save('saved.safetensors')",
    )
    run = verify(asking, "--replicas 2 --steps 3")
    assert run.code == 0, run.out + run.err
    assert not list(run.folder.glob("*.safetensors")), "what is compared does not go on from what it was compared with"
    assert "steps, with the loss in eval mode, the model's answer, 2 evaluations and 2 predictions; " in run.out
    other = asking.replace("predictor(x)", "predictor(x + trainer.replicas)")
    run = verify(other, "--replicas 2 --steps 3")
    assert run.code == 1
    assert "after step 0: prediction/0 differs by" in run.out


@pytest.mark.soak
def test_what_one_process_is_predicted_is_compared(verify: Verify) -> None:
    asking = script(after="trainer.predict(x) if trainer.chief else None")
    run = verify(asking, "--replicas 2 --servers 1 --steps 3 --json")
    assert run.code == 0, run.out + run.err
    verdict = verdict_of(run)
    assert (verdict["predictions"], verdict["loss_in_eval_mode"], verdict["call_in_eval_mode"]) == (2, True, True)
    run = verify(asking.replace("predict(x)", "predict(x + trainer.replicas)"), "--replicas 2 --steps 3")
    assert run.code == 1
    assert "after step 0: prediction/0 differs by" in run.out


@pytest.mark.soak
def test_what_a_loss_logs_is_compared(verify: Verify) -> None:
    logging = script(loss='{"loss": F.cross_entropy(model(batch[0]), batch[1]), "seen": trainer.replicas}')
    run = verify(logging, "--replicas 2 --steps 2")
    assert run.code == 1
    assert "step 0: logged/seen differs by 1 " in run.out


def test_a_call_of_another_kind_than_the_losses_is_compared(verify: Verify) -> None:
    """In eval mode, where the loss is right, the model has one more output on replicas."""
    wrong = script(
        forward="(self.body(x), x.sum() + pl.place().world)[: 1 if self.training else 2]",
        loss="F.cross_entropy(model(batch[0])[0], batch[1])",
    )
    run = verify(wrong, "--replicas 2 --steps 2")
    assert run.code == 1
    assert "after step 1: prediction/alone/1 differs by 1 " in run.out


@pytest.mark.parametrize(
    "flags",
    [
        "--stages 2",
        "--replicas 2 --servers 1 --in-graph",
        pytest.param("--stages 2 --servers 1", marks=pytest.mark.soak),  # both are in the others
    ],
)
def test_all_devices_and_servers_are_asked_together_for_the_loss_in_eval_mode(verify: Verify, flags: str) -> None:
    run = verify(script(epochs="1"), f"{flags} --steps 50")  # more than the script makes
    assert run.code == 0, run.out + run.err
    assert "over 3 steps, with the loss in eval mode and the model's answer; the largest difference is" in run.out


# A mean over some of the samples, with another number to log.
COUNTED = """{
        "loss": (F.cross_entropy(model(batch[0]), batch[1], weight=WEIGHT, reduction="sum"), (batch[1] > 1).sum()),
        "mean": (batch[0].sum(), len(batch[1])),
    }


WEIGHT = torch.tensor([0.0, 0.0, 1.0, 1.0])"""


@pytest.mark.parametrize("flags", ["--replicas 2", pytest.param("--stages 2", marks=pytest.mark.soak)])
def test_of_a_loss_that_counts_the_mean_in_eval_mode_is_compared(verify: Verify, flags: str) -> None:
    run = verify(script(loss=COUNTED), f"{flags} --steps 2")
    assert run.code == 0, run.out + run.err
    assert "with the loss in eval mode" in run.out


@pytest.mark.parametrize(
    "loss", [pytest.param(PLAIN["loss"], marks=pytest.mark.soak, id="scalar"), pytest.param(COUNTED, id="counted")]
)
def test_a_stream_is_asked_for_the_batch_in_hand(verify: Verify, loss: str) -> None:
    streamed = script(before="rows = list(zip(x, y)); stream = (row for row in rows)", loss=loss)
    streamed = streamed.replace("(x, y), 8", "stream, 8")
    run = verify(streamed.replace("epochs=2", "epochs=1"), "--replicas 2 --steps 2")
    assert run.code == 0, run.out + run.err
    assert "with the loss in eval mode" in run.out


@pytest.mark.soak
def test_a_model_without_a_loss_in_eval_mode_is_compared_without_it(verify: Verify) -> None:
    run = verify(script(loss="F.cross_entropy(model(batch[0]), batch[1]) if model.training else 1 / 0"), "--replicas 2")
    assert run.code == 0, run.out + run.err
    assert run.out.endswith("; no loss in eval mode was compared (ZeroDivisionError: division by zero)\n")


@pytest.mark.soak
def test_a_script_that_narrows_itself_is_told_with_the_tolerance(verify: Verify) -> None:
    run = verify(script(forward="self.body(x).float() * 3"), "--replicas 2")
    assert run.code == 0, run.out + run.err
    assert "in float64: " in run.out
    assert "; the script itself computes in float32: 0.0001 is tolerated there" in run.out


@pytest.mark.soak
def test_a_script_that_cannot_be_widened_is_compared_as_it_is_and_told_why(verify: Verify) -> None:
    fixed = script(forward="self.body(x.float())")
    run = verify(fixed, "--replicas 2 --json")
    assert run.code == 0, run.out + run.err
    verdict = verdict_of(run)
    assert (verdict["dtype"], verdict["tolerance"]) == ("float32", 1e-4)
    assert verdict["because"].startswith("in float64 the script ends with 'RuntimeError: ")
    run = verify(fixed, "--replicas 2 --dtype float64")
    assert (run.code, run.out) == (2, "")
    assert run.err.endswith("paceline: train.py ended with exit code 1 in one process: mend that first\n")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--replicas 2 --dtype float16", "dtype is 'float16': give one of float64, float32"),
        (
            "--replicas 2 --exchange collective --wire bf16 --dtype float64",
            "dtype is 'float64': --wire bf16 is of float32 alone, leave one of them out",
        ),
        ("--replicas 2 --tolerance nan", "tolerance is 'nan': give a number above 0, such as 1e-4"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_started(verify: Verify, flags: str, sentence: str) -> None:
    run = verify(script(), flags)
    assert (run.code, run.out, run.err) == (2, "", f"paceline: {sentence}\n")


@pytest.mark.soak
def test_a_wire_of_float32_is_compared_in_float32_and_is_different(verify: Verify) -> None:
    run = verify(script(), "--replicas 2 --exchange collective --wire bf16 --steps 1")
    assert run.code == 1
    assert "against one process in float32: step 0: gradient/" in run.out
    assert "; not in float64, because --wire bf16 is of float32 alone: 0.0001 is tolerated" in run.out
