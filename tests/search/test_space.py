"""What may be tried: as it is typed, what of it is refused, and that trial n is the same whenever it is asked for."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.cli import main
from paceline.data.folds import fold_indices, split_by_fold
from paceline.errors import InvalidInput, PacelineError
from paceline.findings import MessageReader, MessageWriter, TrialAsked
from paceline.search import tune_folder
from paceline.search.goal import Goal
from paceline.search.proposals import Proposals
from paceline.search.script_arguments import find_arguments
from paceline.search.script_text import ScriptText
from paceline.search.space import SearchSpace
from paceline.search.tune_folder import TrialRecord, TuneFolder
from paceline.trial_values import TRIAL_VARIABLE, TrialPlace, TrialValues

SPACE = SearchSpace.parse(["lr=log:1e-4..1e-1", "width=64,128,256", "dropout=0..0.5", "layers=1..8", "kind=a,b"])
GOAL = Goal("accuracy", maximize=True)
SCRIPT = """
import argparse
trainer.report(0.5)
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--batch-size", type=int)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    return tmp_path


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────

FINE = ("--param", "lr=0..1", "--maximize", "accuracy")
SENTENCES = {
    ("--maximize", "accuracy"): "param is None: say what to try",
    ("--param", "lr=0..1", "--param", "depth=1,2", "--maximize", "a"): "param is 'depth': train.py does not take it: ",
    ("--param", "lr", "--maximize", "a"): "param is 'lr': give a name, = and what to try",
    ("--param", "lr=3..1", "--maximize", "a"): "param is 'lr=3..1': this range is empty, give a lower end below 1",
    ("--param", "lr=1..1", "--maximize", "a"): "param is 'lr=1..1': this range is empty",
    ("--param", "lr=log:0..1", "--maximize", "a"): "param is 'lr=log:0..1': a logarithm needs numbers above 0",
    ("--param", "lr=a..b", "--maximize", "a"): "param is 'lr=a..b': a range needs two numbers",
    ("--param", "lr=0..nan", "--maximize", "a"): "param is 'lr=0..nan': a range needs two numbers",
    ("--param", "lr=0..1:0.3", "--maximize", "a"): "param is 'lr=0..1:0.3': steps of 0.3 from 0 do not meet 1",
    ("--param", "lr=0..1:-1", "--maximize", "a"): "param is 'lr=0..1:-1': give a step above 0 and at most 1",
    ("--param", "lr=log:1..9:2", "--maximize", "a"): "param is 'lr=log:1..9:2': a step is for ranges without log:",
    ("--param", "lr=64", "--maximize", "a"): "param is 'lr=64': give two values or more, or a range",
    ("--param", "lr=1,,2", "--maximize", "a"): "param is 'lr=1,,2': give two values or more",
    ("--param", "lr=1,1", "--maximize", "a"): "param is 'lr=1,1': a value is there twice",
    ("--param", "lr=log:1,2", "--maximize", "a"): "param is 'lr=log:1,2': log: is for a range",
    ("--param", "folder=1,2", "--maximize", "a"): "param is 'folder=1,2': every trial has a folder of its own",
    ("--param", "get=1,2", "--maximize", "a"): "param is 'get=1,2': every trial has a get of its own",
    (*FINE, "--param", "lr=1,2"): "param is 'lr=1,2': lr is there twice, give it once",
    ("--param", "lr=0..1"): "maximize is None: say what is looked for",
    (*FINE, "--minimize", "loss"): "maximize is 'accuracy': give one of --maximize and --minimize",
    ("--param", "lr=0..1", "--minimize", "loss<1"): "minimize is 'loss<1': name a metric alone",
    (*FINE, "--trials", "0"): "trials is '0': give a whole number from 1 up",
    (*FINE, "--trials", "100000"): "trials is 100000: give at most 10000",
    (*FINE, "--parallel", "0"): "parallel is '0': give a whole number from 1 up",
    (*FINE, "--folds", "1"): "folds is '1': give a whole number from 2 up",
    (*FINE, "--budget", "soon"): "budget is 'soon': give a time above 0",
    (*FINE, "--sampler", "magic"): "sampler is 'magic': give",
    (*FINE, "--prune", "hard"): "prune is 'hard': give",
    (*FINE, "--prune", "asha", "--folds", "3"): "prune is 'asha': it looks at what one run tells, and with --folds",
    ("--param", "lr=0..0.5", "--maximize", "a", "--sampler", "grid"): "param is 'lr=0..0.5': a grid needs values or",
    (
        "--param",
        "lr=1,2",
        "--maximize",
        "a",
        "--sampler",
        "grid",
        "--trials",
        "3",
    ): "trials is 3: this grid has 2 points",
    (*FINE, "--replicas", "0"): "replicas is '0': give a whole number from 1 up",
    (*FINE, "--accept", "1"): "accept is '1': it needs servers, give --servers 1 or more",
    (*FINE, "--parallel", "4000", "--trials", "4000"): "replicas is 4000: torch alone takes",
    (*FINE, "--parallel", "9", "--trials", "8"): "parallel is 9: there are 8 runs to make, give at most that",
    ("--param", "lr=1,2", "--maximize", "a", "--sampler", "grid", "--seed", "1"): "seed is 1: a grid is the same",
    (*FINE, "--run-folder", "x"): "there is no flag --run-folder",
    (*FINE, "--", "--lr", "0.1"): "param is 'lr': --lr among the script's arguments says it already",
    (*FINE, "--", "--rate={rate}"): "arguments is '{rate}': no parameter has this name, give one of {lr}",
    (*FINE, "--", "--fold", "{fold}"): "arguments is '{fold}': there are no folds, add --folds 5",
}


@settings(max_examples=300, deadline=None)
@given(st.text("0123456789.e-,:=log x²٣", max_size=20))
def test_any_text_is_a_parameter_or_a_sentence(text: str) -> None:
    for typed in (text, f"x={text}", f"x=log:{text}", f"x={text}:2..1"):
        with suppress(InvalidInput):
            SearchSpace.parse([typed])


@pytest.mark.parametrize(("given", "sentence"), SENTENCES.items())
def test_what_is_wrong_is_said_before_anything_starts(
    given: tuple[str, ...], sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["tune", "train.py", *given])
    except SystemExit as exit:
        code = exit.code  # type: ignore[assignment]
    out, err = capsys.readouterr()
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1, err
    assert err.removeprefix("paceline: ").startswith(sentence)
    assert not Path("runs").exists()


def test_a_full_disk_is_said_in_a_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(tune_folder, "write_whole", full)
    assert main(["tune", "train.py", *FINE]) == 2
    _, err = capsys.readouterr()
    assert err.startswith(
        "paceline: the files of the search cannot be written (No space left on device): what has ended"
    )
    assert err.count("\n") == 1


def test_a_search_that_was_killed_as_it_made_its_folder_begins_there_again(tmp_path: Path) -> None:
    (tmp_path / "tune.json.unfinished").write_text("{")
    TuneFolder.open(str(tmp_path), "train.py", {}).close()
    TuneFolder.open(str(tmp_path), "train.py", {}).close()
    with pytest.raises(InvalidInput, match="it holds a search with param None"):
        TuneFolder.open(str(tmp_path), "train.py", {"param": 1})


# ── the values of trial n ────────────────────────────────────────────────────────────────────────────────────────


def record(number: int, values: dict[str, int | float | str]) -> TrialRecord:
    metric = -abs(float(values["dropout"]) - 0.3)
    return TrialRecord(
        number=number, values=values, end="done", metric=metric, seconds=1, at_s=number, began=number, ended=number + 1
    )


def test_a_random_trial_follows_from_the_seed_and_its_number_alone() -> None:
    proposals = Proposals(SPACE, GOAL, "random", seed=3, parallel=4)
    assert not proposals.needs(7)
    before = [record(n, proposals.values(n, [], [])) for n in range(3)]
    found = [proposals.values(n, [], []) for n in range(40)]
    assert proposals.values(7, before, [{**found[0]}]) == found[7]
    assert len({str(values) for values in found}) == 40
    assert all(1e-4 <= float(values["lr"]) <= 1e-1 and values["layers"] in range(1, 9) for values in found)
    assert {values["width"] for values in found} == {64, 128, 256}
    assert Proposals(SPACE, GOAL, "random", seed=4, parallel=4).values(7, [], []) != found[7]


@pytest.mark.parametrize("parallel", [1, 2])
def test_tpe_is_the_same_whenever_trials_end_and_learns(parallel: int) -> None:
    proposals = Proposals(SPACE, GOAL, "tpe", seed=0, parallel=parallel)

    def search() -> list[TrialRecord]:
        records: list[TrialRecord] = []
        for number in range(30):
            needs = proposals.needs(number)
            assert len(needs) == max(0, number - (0 if parallel == 1 else 4))
            others = [one.values for one in records[len(needs) :]]
            records.append(record(number, proposals.values(number, records[: len(needs)], others)))
        return records

    first = search()
    assert search() == first
    early, late = ([abs(float(one.values["dropout"]) - 0.3) for one in part] for part in (first[:10], first[-10:]))
    assert sum(late) < sum(early)


def test_a_grid_has_every_point_once() -> None:
    space = SearchSpace.parse(["width=64,128", "dropout=0..0.5:0.25", "layers=1..3"])
    proposals = Proposals(space, GOAL, "grid", seed=0, parallel=1)
    points = [proposals.values(number, [], []) for number in range(space.grid_size())]
    assert len({str(point) for point in points}) == space.grid_size() == 18
    assert points[0] == {"width": 64, "dropout": 0.0, "layers": 1}
    assert points[-1] == {"width": 128, "dropout": 0.5, "layers": 3}


# ── how a script is given them ───────────────────────────────────────────────────────────────────────────────────


def test_a_script_is_given_flags_that_it_names_braces_that_it_is_given_and_asks_for_the_rest(folder: Path) -> None:
    Path("train.py").write_text(f"{SCRIPT}depth = pl.trial().depth")
    names = ["lr", "batch_size", "width", "depth"]
    found = find_arguments("train.py", ["--net", "{width}x2", "--save={folder}/a", "{}"], names, module=False)
    assert found.to_ask_for == ("depth",)
    trial = TrialPlace(
        number=4, parameters={"lr": 0.5, "batch_size": 8, "width": 3, "depth": 2}, folder="/t", metric="a"
    )
    assert found.of(trial) == ("--net", "3x2", "--save=/t/a", "{}", "--lr", "0.5", "--batch-size", "8")
    assert find_arguments("train.py", [], ["lr"], module=True).to_ask_for == ("lr",)
    below = msgspec.structs.replace(trial, parameters={"lr": -1e-05})
    given = find_arguments("train.py", ["--fast", "--net={lr}"], ["lr"], module=False).of(below)
    assert given == ("--fast", "--net=-1e-05")
    assert find_arguments("train.py", [], ["lr"], module=False).of(below) == ("--lr=-1e-05",), "argparse takes no other"


PLAIN = """
import argparse, torch, numpy.linalg as n
from os import path
import paceline as pl
trainer.evaluate(data, metric, name="validation/accuracy")
trainer.log({"rate": 0.1}, epoch=3)
"""
MAY_DO_ANYTHING = ("import beside", "from . import it", "import nobody_knows_it", "__import__(name)", "def f(:")
MAY_TELL = (
    "trainer.report(0.5)",
    "trainer.log(**numbers)",
    "trainer.log(numbers)",
    "trainer.evaluate(data, metric, name=f'val/{name}')",
    "numbers = {f'top{k}': k}",
    "numbers = {k: 1 for k in names}",
    "numbers['error'] = 1",
)


def test_that_a_script_takes_no_such_value_is_known_before_it_is_started(folder: Path) -> None:
    Path("beside.py").touch()
    Path("plain.py").write_text(PLAIN)
    with pytest.raises(
        InvalidInput, match=r"param is 'max_depth': plain.py does not take it: it has no flag --max-depth and never"
    ):
        find_arguments("plain.py", [], ["max_depth"], module=False)
    assert find_arguments("plain.py", ["{depth}"], ["depth"], module=False).to_ask_for == ()
    with pytest.raises(InvalidInput, match=r"folds is 'given': plain.py never calls pl.trial\(\).fold\(dataset\)"):
        find_arguments("plain.py", ["{depth}"], ["depth"], module=False, folds=True)
    for line in ("pl.trial()", *MAY_DO_ANYTHING):
        Path("plain.py").write_text(PLAIN + line)
        assert find_arguments("plain.py", [], ["depth"], module=False).to_ask_for == ("depth",)


def test_that_a_script_does_not_tell_a_metric_is_known_before_it_is_started(folder: Path) -> None:
    Path("beside.py").touch()
    Path("plain.py").write_text(PLAIN)
    text = ScriptText("plain.py")
    assert text.never_tells("error") == ["validation/accuracy", "epoch", "rate"]
    assert text.never_tells("accurac") is not None, "a part of a word is another"
    for metric in ("accuracy", "validation/accuracy", "rate"):
        assert text.never_tells(metric) is None
    for line in (*MAY_TELL, *MAY_DO_ANYTHING):
        Path("plain.py").write_text(PLAIN + line)
        assert ScriptText("plain.py").never_tells("error") is None, line
    Path("plain.py").write_text("import torch")
    assert ScriptText("plain.py").never_tells("error") == []
    example = str(Path(__file__).parents[2] / "examples" / "trials.py")
    assert ScriptText(example).never_tells("acuracy") == ["accuracy"]


def test_a_trial_has_the_tuners_values_over_the_defaults_and_tells_what_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(TRIAL_VARIABLE, raising=False)
    alone = pl.trial(lr=0.1)
    assert (alone.lr, alone.get("width", 64), alone.number, alone.folder) == (0.1, 64, None, Path())
    with pytest.raises(AttributeError, match=r"trial\.with was not given: this trial has lr; pl\.trial\(with="):
        getattr(alone, "with")
    with pytest.raises(PacelineError, match="parameter of a trial is 'folder': every trial has something of this name"):
        pl.trial(folder="x")
    place = TrialPlace(number=2, parameters={"lr": 0.5}, folder="/t", metric="accuracy")
    reading, writing = os.pipe()
    trial = TrialValues(place, {"lr": 0.1, "width": 64}, MessageWriter(writing))
    assert (trial.lr, trial["lr"], trial.width, trial.number, trial.folder) == (0.5, 0.5, 64, 2, Path("/t"))
    assert dict(trial) == {"lr": 0.5, "width": 64}
    assert MessageReader().read(os.read(reading, 4096)) == [TrialAsked("lr"), TrialAsked("width")]
    os.close(reading)
    os.close(writing)


# ── folds ────────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=60, deadline=None)
@given(length=st.integers(2, 200), folds=st.integers(2, 12), seed=st.integers(0, 5))
def test_each_sample_validates_in_exactly_one_fold(length: int, folds: int, seed: int) -> None:
    folds = min(folds, length)
    validated: list[int] = []
    for fold in range(folds):
        train, validation = fold_indices(length, fold, folds, seed)
        assert sorted([*train.tolist(), *validation.tolist()]) == list(range(length))
        assert len(validation) in (length // folds, -(-length // folds))
        validated += validation.tolist()
    assert sorted(validated) == list(range(length))


def test_every_kind_of_dataset_is_split_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRIAL_VARIABLE, raising=False)
    x, y = torch.arange(20.0).reshape(10, 2), torch.arange(10)
    expected = [part[1].tolist() for part in split_by_fold((x, y), 1, 3)]
    assert sorted(expected[0] + expected[1]) == list(range(10))
    assert [part["y"].tolist() for part in split_by_fold({"x": x, "y": y}, 1, 3)] == expected
    assert [part.tolist() for part in split_by_fold(y, 1, 3)] == expected
    assert [part[1].tolist() for part in split_by_fold(TensorDataset(x, y), 1, 3)] == expected
    assert [[part[i] for i in range(len(part))] for part in split_by_fold(list(range(10)), 1, 3)] == expected
    train, validation = pl.trial().fold(y)
    assert (len(train), len(validation)) == (8, 2), "outside of a search it is the first of five"
    for wrong, sentence in ((iter([1]), "dataset is 'list_iterator': folds need one with len"), (y[:1], "folds is 5")):
        with pytest.raises(PacelineError, match=sentence):
            pl.trial().fold(wrong)
