"""The zoo's own verdicts, on a model that needs nothing but torch; the architectures themselves are `make zoo`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.zoo import __main__ as command
from benchmarks.zoo.cell import DIED, EQUAL, REFUSED, TRACEBACK, Cell, Ended, code_now, judged_by_output, run_cell
from benchmarks.zoo.compare import LOSSES_FILE, MODEL_FILE, largest_difference
from benchmarks.zoo.models import MODELS
from benchmarks.zoo.strategies import STRATEGIES
from benchmarks.zoo.table import Results, all_pairs, page

ROOT = Path(__file__).parents[1]


def cell(model: str, strategy: str, verdict: str, words: str) -> Cell:
    return Cell(model=model, strategy=strategy, verdict=verdict, words=words, command="", seconds=1.0, code=code_now())


# ── real runs ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_model_is_equal_under_replicas_and_stages_and_its_cells_are_kept_and_shown(tmp_path: Path) -> None:
    options = ["--only", "perceptron", "--strategy", "mirrored,stages", "--json", "--show"]
    options += ["--folder", str(tmp_path), "--cells", str(tmp_path / "cells.json")]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.zoo", *options], cwd=ROOT, capture_output=True, text=True, check=True
    )
    cells = json.loads(done.stdout)
    assert [(found["strategy"], found["verdict"]) for found in cells] == [("mirrored", EQUAL), ("stages", EQUAL)]
    assert cells[1]["command"] == (
        "paceline run benchmarks/zoo/train.py --stages 2 --micro-batches 2 -- perceptron --no-dropout"
    )
    assert done.stderr.count("step 3: loss ") == 4  # each strategy, and what it is compared with
    assert set(Results(tmp_path / "cells.json").cells) == {("perceptron", "mirrored"), ("perceptron", "stages")}


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_refusal_is_quoted(tmp_path: Path) -> None:
    found = run_cell(MODELS["perceptron"], STRATEGIES["wavefront"], tmp_path)
    assert found.verdict == REFUSED
    assert found.words.startswith("wavefront is 2: the model has no nn.LSTM")


# ── verdicts ─────────────────────────────────────────────────────────────────────────────────────────────────


def write_run(folder: Path, losses: dict[str, float], **tensors: torch.Tensor) -> Path:
    folder.mkdir()
    (folder / LOSSES_FILE.format(replica=0, device=0)).write_text(json.dumps(losses))
    save_file({name.replace("__", "."): tensor for name, tensor in tensors.items()}, folder / MODEL_FILE)
    return folder


def test_the_largest_difference_is_found_in_losses_and_in_tensors(tmp_path: Path) -> None:
    weight, mean = torch.tensor([2.0, -4.0], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    expected = write_run(tmp_path / "alone", {"1": 2.0, "2": 1.0}, weight=weight, norm__running_mean=mean)
    same = write_run(tmp_path / "same", {"1": 2.0, "2": 1.0}, weight=weight, norm__running_mean=mean)
    moved = write_run(tmp_path / "moved", {"1": 2.0, "2": 1.0}, weight=weight + 1e-6, norm__running_mean=mean * 2)
    short = write_run(tmp_path / "short", {"1": 2.0}, weight=weight, norm__running_mean=mean)
    unfinished = write_run(tmp_path / "nan", {"1": 2.0, "2": 1.0}, weight=weight / 0, norm__running_mean=mean)
    assert largest_difference(expected, same, statistics=True).relative == 0
    found = largest_difference(expected, moved, statistics=False)
    assert (found.relative, found.where) == (pytest.approx(2.5e-7), "weight")
    assert largest_difference(expected, moved, statistics=True).where == "norm.running_mean"
    assert largest_difference(expected, short, statistics=True).where == "the loss of step 2"
    assert not largest_difference(expected, unfinished, statistics=True).relative <= 1


@pytest.mark.parametrize(
    ("code", "output", "verdict", "words"),
    [
        (2, "$ paceline run\npaceline: replicas is 0: give a whole number from 1 up\n", REFUSED, "replicas is 0"),
        (1, "Traceback (most recent call last):\npaceline.errors.ModelError: model is 'X': no\n", REFUSED, "model is"),
        (1, "Traceback (most recent call last):\n  …\nKeyError: 'x'\n", TRACEBACK, "KeyError: 'x' (no line of ours)"),
        (139, "Segmentation fault\n", DIED, "exit code 139: Segmentation fault"),
    ],
)
def test_a_run_that_left_only_output_is_judged_by_it(code: int, output: str, verdict: str, words: str) -> None:
    judged = judged_by_output(Ended(code, output))
    assert judged.verdict == verdict
    assert judged.words.startswith(words)


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_page_counts_quotes_and_says_what_was_not_run() -> None:
    cells = [
        cell("gpt2", "mirrored", EQUAL, "1.0e-14 in wte.weight"),
        cell("gpt2", "stages", REFUSED, "model is 'GPT2': a | b"),
        cell("bert", "stages", TRACEBACK, "KeyError: 'x'"),
    ]
    text = page({(one.model, one.strategy): one for one in cells})
    assert f"**3 cells: 1 equal, 1 refused, 1 traceback, {len(all_pairs()) - 3} not run.**" in text
    assert "| gpt2 (transformers) | equal 1.0e-14 | not run |" in text
    assert "| stages | gpt2 | model is 'GPT2': a \\| b |" in text
    assert "| stages | bert | traceback: KeyError: 'x' |" in text


def test_the_page_in_the_docs_is_made_of_the_cells_beside_it() -> None:
    docs = ROOT / "docs"
    assert (docs / "zoo.md").read_text() == page(Results(docs / "zoo.json").cells)


def test_there_are_twenty_architectures_and_each_has_a_way_to_be_cut() -> None:
    models = {model.name for model, _ in all_pairs()}
    assert len(models) >= 20
    for strategy in STRATEGIES:
        assert any(one.name == strategy for _, one in all_pairs())


def test_a_name_that_is_not_there_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--only", "gtp2"]) == 2
    assert "only is 'gtp2': give some of gpt2, " in capsys.readouterr().err
