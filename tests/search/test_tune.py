"""Searching: trials that are runs, several at a time, killed and gone on with, ended early, kept and shown."""

from __future__ import annotations

import json
import random
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import MAIN, TESTS, Run

from paceline.compare.plot import can_plot

QUICK = TESTS / "search" / "quick_trial.py"
EXAMPLE = TESTS.parent / "examples" / "trials.py"
FLAGS = "--param x=0..6.0 --param wide=1,2,3 --maximize score --sampler random --trials 6 --parallel 2 --json"


class TuneRun(Run):
    """A `paceline tune` in a folder of its own."""

    def __init__(self, folder: Path, script: Path, flags: str, arguments: str = "") -> None:
        words = [
            "tune",
            str(script),
            "--folder",
            "out",
            *flags.split(),
            *(["--", *arguments.split()] if arguments else []),
        ]
        super().__init__(folder, sys.executable, "-c", MAIN, *words)

    @property
    def path(self) -> Path:
        return self.folder / "out"

    @property
    def board(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.path / "leaderboard.json").read_text())
        return found

    @property
    def trials(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.board["trials"]
        return found

    @property
    def sentence(self) -> str:
        return self.err.splitlines()[-1].removeprefix("paceline: ")


def results(run: TuneRun) -> dict[int, tuple[Any, Any, Any]]:
    """What a search has found, whatever happened meanwhile."""
    assert len({one["number"] for one in run.trials}) == len(run.trials), "none is counted twice"
    return {one["number"]: (one["values"], one["end"], one["metric"]) for one in run.trials}


def wait_until(fact: Any, what: str, limit_s: float = 90.0) -> None:
    end = time.monotonic() + limit_s
    while not fact():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def trial_processes(folder: Path) -> list[psutil.Process]:
    """Everything that belongs to a search in that folder, but for the search itself."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE
            if ours and "tune" not in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


def is_replica(process: psutil.Process) -> bool:
    with suppress(psutil.Error):  # it has ended meanwhile
        return "paceline.launch.replica" in process.cmdline()
    return False


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> TuneRun:
    run = TuneRun(tmp_path_factory.mktemp("tune"), QUICK, FLAGS)
    run.fine()
    return run


# ── what a search leaves ─────────────────────────────────────────────────────────────────────────────────────────


def test_the_leaderboard_is_right_and_best_first(search: TuneRun) -> None:
    trials = search.trials
    assert sorted(one["number"] for one in trials) == list(range(6))
    assert json.loads(search.out) == search.board
    for one in trials:
        assert one["metric"] == pytest.approx(-((one["values"]["x"] - 3) ** 2) + one["values"]["wide"] / 10)
        assert (one["end"], one["steps"], len(one["told"]), one["starts"]) == ("done", 3, 3, 1)
    assert [one["metric"] for one in trials] == sorted((one["metric"] for one in trials), reverse=True)
    table = (search.path / "leaderboard.md").read_text().splitlines()
    assert len(table) == 2 + 6
    assert table[2].startswith(f"| 1 | {trials[0]['number']} |")
    assert "param wide" not in search.err, "asked for by pl.trial()"


def test_the_three_best_checkpoints_are_kept(search: TuneRun) -> None:
    kept = sorted((search.path / "top").glob("*.safetensors"))
    assert [path.name for path in kept] == [
        f"{place}-trial-{one['number']:04}.safetensors" for place, one in enumerate(search.trials[:3], 1)
    ]
    assert [float(path.read_text()) for path in kept] == [one["metric"] for one in search.trials[:3]]
    assert search.board["top"] == [f"out/top/{path.name}" for path in kept]


def test_optuna_opens_the_journal_and_sees_the_same(search: TuneRun) -> None:
    import optuna
    from optuna.storages.journal import JournalFileBackend

    storage = optuna.storages.JournalStorage(JournalFileBackend(str(search.path / "optuna.journal")))
    study = optuna.load_study(study_name="out", storage=storage)
    assert study.best_trial.number == search.trials[0]["number"]
    for trial in study.trials:
        values, _, metric = results(search)[trial.number]
        assert (trial.params, trial.value) == (values, metric)
        assert list(trial.intermediate_values) == [1, 2, 3]
        assert trial.duration is not None


@pytest.mark.skipif(not can_plot(), reason="matplotlib is not installed")
def test_the_plot_is_a_picture(search: TuneRun) -> None:
    assert (search.path / "leaderboard.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_command_repeats_nothing_and_more_trials_are_added(search: TuneRun, tmp_path: Path) -> None:
    shutil.copytree(search.path, tmp_path / "out")
    before = {path: path.read_bytes() for path in tmp_path.glob("out/trial-*/result.json")}
    more = TuneRun(tmp_path, QUICK, FLAGS.replace("--trials 6", "--trials 7"))
    more.fine()
    assert len(before) == 6
    assert len(more.trials) == 7
    assert all(path.read_bytes() == data for path, data in before.items())
    assert "of an earlier start there are 6" in more.err
    other = TuneRun(tmp_path, QUICK, FLAGS.replace("wide=1,2,3", "wide=1,2")).end()
    assert (other.code, other.err.count("\n")) == (2, 1)
    assert "folder is 'out': it holds a search with param ['x=0..6.0', 'wide=1,2,3']" in other.err


# ── kills ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_killed_search_goes_on_and_finds_the_same(search: TuneRun, tmp_path: Path) -> None:
    first = TuneRun(tmp_path, QUICK, FLAGS, "--holds 3")
    wait_until(lambda: (tmp_path / "out/trial-0001/result.json").exists(), "trial 1 has a result")
    running = tmp_path / "out/trial-0003/state.txt"
    wait_until(running.exists, "trial 3 has saved")
    first.process.kill()
    first.end()
    assert first.code == -signal.SIGKILL
    wait_until(lambda: not trial_processes(tmp_path), "trials have died with the search")
    kept = {path: path.read_bytes() for path in tmp_path.glob("out/trial-*/result.json")}
    assert len(kept) >= 2
    again = TuneRun(tmp_path, QUICK, FLAGS, "--holds 3")
    again.fine()
    assert results(again) == results(search)
    assert all(path.read_bytes() == data for path, data in kept.items())
    assert (running.parent / "starts.txt").read_text().split() == ["0", "1"], "it went on from its checkpoint"


def test_a_killed_trial_is_started_again_and_its_search_goes_on(search: TuneRun, tmp_path: Path) -> None:
    run = TuneRun(tmp_path, QUICK, FLAGS, "--holds 0")
    wait_until((tmp_path / "out/trial-0000/state.txt").exists, "trial 0 has saved")
    (events,) = tmp_path.glob("out/trial-0000/run-*/events.jsonl")
    for event in map(json.loads, events.read_text().splitlines()):
        if event["event"] == "started":
            psutil.Process(event["pid"]).kill()
    run.fine()
    assert results(run) == results(search)
    (killed,) = (one for one in run.trials if one["number"] == 0)
    assert killed["starts"] == 2
    assert "trial 0 was killed and is started again" in run.err


def test_trials_go_on_when_the_process_was_killed_that_they_are_forked_from(search: TuneRun, tmp_path: Path) -> None:
    run = TuneRun(tmp_path, QUICK, FLAGS, "--holds 0")
    wait_until((tmp_path / "out/trial-0000/state.txt").exists, "trial 0 has saved")
    (template,) = psutil.Process(run.process.pid).children()
    template.kill()
    run.fine()
    assert results(run) == results(search)
    assert (tmp_path / "out/trial-0000/starts.txt").read_text().split() == ["0", "1"]


def test_ctrl_c_shows_what_was_found_and_two_searches_do_not_share_a_folder(tmp_path: Path) -> None:
    run = TuneRun(tmp_path, QUICK, FLAGS, "--holds 2")
    wait_until(lambda: any(tmp_path.glob("out/trial-*/result.json")), "a trial has ended")
    second = TuneRun(tmp_path, QUICK, FLAGS, "--holds 2").end()
    assert (second.code, second.sentence) == (
        2,
        "folder is 'out': another paceline tune is at work in it, wait or end it",
    )
    run.process.send_signal(signal.SIGINT)
    run.end()
    assert run.code == 130
    assert 0 < len(run.trials) < 6
    assert "the same command goes on where it was" in run.err
    wait_until(lambda: not trial_processes(tmp_path), "nothing is left")


# ── trials that end otherwise ────────────────────────────────────────────────────────────────────────────────────


def test_a_failed_trial_is_reported_and_not_fatal(tmp_path: Path) -> None:
    flags = "--param x=1..4 --sampler grid --maximize score --keep 1"
    run = TuneRun(tmp_path, QUICK, flags, "--fails-above 3 --crashes-at 3 --steps 1")
    run.fine()
    assert [(one["number"], one["end"], one["metric"], one["starts"]) for one in run.trials] == [
        (1, "done", -1.0, 1),
        (0, "done", -4.0, 1),
        (2, "failed", None, 2),
        (3, "failed", None, 1),
    ]
    assert "was killed by SIGSEGV" in run.trials[2]["error"]
    assert "RuntimeError: x is too large" in run.trials[3]["error"]
    assert run.err.count("RuntimeError: x is too large") == 1
    assert len(list((run.path / "top").glob("*.safetensors"))) == 1
    all_fail = TuneRun(
        run.folder, QUICK, "--param x=1,2 --sampler grid --maximize score --folder no", "--fails-above 0"
    )
    assert all_fail.end().code == 1


def test_bad_trials_are_ended_early(tmp_path: Path) -> None:
    flags = "--param x=3,100,4 --sampler grid --maximize score --prune asha --json"
    run = TuneRun(tmp_path, QUICK, flags, "--steps 10 --wait-for-stop 80")
    run.fine()
    by_number = {one["number"]: one for one in run.trials}
    assert [(by_number[n]["end"], by_number[n]["steps"]) for n in range(3)] == [
        ("done", 10),
        ("pruned", 1),
        ("pruned", 1),
    ]
    assert run.trials[0]["number"] == 0
    (run.folder / "out").rename(run.folder / "long")
    short = TuneRun(tmp_path, QUICK, flags, "--steps 1 --wait-for-stop 80")
    short.fine()
    assert [one["end"] for one in short.trials] == ["done"] * 3, "there was nothing left to end"
    events = (run.folder / "long" / "trial-0001" / "run-1" / "events.jsonl").read_text()
    assert '"event":"stopped","signal":"SIGINT"' in events


def test_a_budget_ends_the_search_and_more_of_it_goes_on(tmp_path: Path) -> None:
    flags = "--param x=1,2 --sampler grid --maximize score"
    run = TuneRun(tmp_path, QUICK, f"{flags} --budget 0.1s", "--steps 40 --pause 0.05")
    run.end()
    assert "--budget is used up, with more of it the same command goes on" in run.err
    assert not any(tmp_path.glob("out/trial-0001/*"))
    again = TuneRun(tmp_path, QUICK, f"{flags} --budget 1h", "--steps 40 --pause 0.05")
    again.fine()
    assert len(again.trials) == 2
    assert all(one["steps"] == 40 for one in again.trials)


SAID_AFTER_THE_FIRST = {
    "--param x=1,2 --maximize wide": "wide was never told: the script tells score, step; ask for one of them by --max",
    "--param x=1,2 --param wides=1,2 --maximize score": "param wides was never asked for:",
    "--param x=1,2 --folds 2 --maximize score": "folds is 2:",
    "--param x=a,b --maximize score": f"{QUICK} does not take its arguments: quick_trial.py: error: argument",
}


@pytest.mark.parametrize(("flags", "sentence"), SAID_AFTER_THE_FIRST.items())
def test_what_the_first_trial_shows_is_said_in_a_sentence(flags: str, sentence: str, tmp_path: Path) -> None:
    run = TuneRun(tmp_path, QUICK, f"{flags} --trials 4").end()
    assert run.code == 2
    assert run.sentence.startswith(sentence), run.err
    assert not any(tmp_path.glob("out/trial-0001/*"))


# ── with a trainer ───────────────────────────────────────────────────────────────────────────────────────────────

TRAINER = """
import argparse, time
import torch
import paceline as pl

trial = pl.trial(good=1)
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).pow(2).mean())
x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
steps = 30 if trial.good else 3000
for epoch in range(steps):
    for batch in trainer.batches(x, 40):
        trainer.step(batch)
    trainer.report(trial.good + epoch / 10000)
    time.sleep(0.01)
"""


def test_a_trial_of_two_replicas_is_ended_early_and_both_stop_at_the_same_step(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINER)
    flags = "--param good=1,0 --sampler grid --maximize quality --prune asha --replicas 2"
    run = TuneRun(tmp_path, tmp_path / "train.py", flags)
    run.fine()
    good, bad = run.trials
    assert (good["end"], good["steps"], good["metric"]) == ("done", 30, pytest.approx(1.0029))
    assert bad["end"] == "pruned"
    assert 1 <= bad["steps"] < 3000
    events = [json.loads(line) for line in (run.path / "trial-0001/run-1/events.jsonl").read_text().splitlines()]
    finished = [(event["replica"], event["code"], event["step"]) for event in events if event["event"] == "finished"]
    assert sorted(finished) == [(0, 130, bad["steps"]), (1, 130, bad["steps"])]


def test_the_example_is_cross_validated(tmp_path: Path) -> None:
    flags = "--param lr=0.01,0.1 --sampler grid --trials 1 --maximize accuracy --folds 2 --parallel 2"
    run = TuneRun(tmp_path, EXAMPLE, flags, "--epochs 2")
    run.fine()
    (best,) = run.trials
    assert best["values"] == {"lr": 0.01}
    assert best["metric"] == sum(best["folds"]) / 2 > 0.8
    assert best["folds"][0] != best["folds"][1]
    assert best["steps"] == 2 * 2 * 15  # 899 or 898 samples to train on in batches of 64
    assert len(list((run.path / "top").glob("*.safetensors"))) == 2


# ── many kills ───────────────────────────────────────────────────────────────────────────────────────────────────


RESUMING = """
import sys, time
import torch
import paceline as pl

trial = pl.trial()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1).double()
x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)).double()
y = x @ torch.tensor([1.0, 2.0, 3.0, 4.0]).double()
error = lambda model, batch: (model(batch[0])[:, 0] - batch[1]).pow(2).mean()
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=trial.lr), error)
trainer.resume(trial.folder / "model.safetensors")
for epoch in range(8):
    for batch in trainer.batches((x, y), 32):
        trainer.step(batch)
        time.sleep(0.1)
    trainer.evaluate((x, y), error, name="error")
    trainer.save(trial.folder / "model.safetensors")
"""
KILLS = ("the search", "a trial", "a replica")


def kill_one(run: TuneRun, kind: str, chance: random.Random) -> bool:
    """Kill -9 one of these, whatever it is at; whether there was one."""
    processes = [run.process] if kind == "the search" else trial_processes(run.folder)
    if kind == "a trial":  # a replica's parent, if that is of this search too: an orphan's is not
        parents = set()
        for process in filter(is_replica, processes):
            with suppress(psutil.Error):
                parents.add(process.ppid())
        processes = [process for process in processes if process.pid in parents]
    elif kind == "a replica":
        processes = [process for process in processes if is_replica(process)]
    if not processes or run.process.poll() is not None:
        return False
    with suppress(psutil.NoSuchProcess):
        chance.choice(processes).kill()
        return True
    return False


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_twenty_kills_lose_no_trial_and_change_nothing(tmp_path: Path) -> None:
    """Of the search, of a trial's supervisor and of one of its two replicas, from the first moment on."""
    chance = random.Random(0)
    flags = "--param lr=log:1e-3..1e-1 --minimize error --sampler random --trials 12 --parallel 2 --replicas 2 --json"
    for name in ("calm", "kills"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(RESUMING)
    calm = TuneRun(tmp_path / "calm", tmp_path / "calm" / "train.py", flags)
    calm.fine(600)
    folder = tmp_path / "kills"

    def started() -> TuneRun:
        return TuneRun(folder, folder / "train.py", flags)

    run, kept, finished = started(), dict[Path, bytes](), 0
    for number in range(20):
        # All over the search, however fast it goes: the last when half of it has ended.
        wait_until(lambda: len(list(folder.glob("out/trial-*/result.json"))) >= number // 3, "trials end", 300)  # noqa: B023
        time.sleep(chance.uniform(0.0, 1.5))
        end, done = time.monotonic() + 300, False
        while not done:
            kept |= {path: path.read_bytes() for path in folder.glob("out/trial-*/result.json")}
            done = kill_one(run, KILLS[number % 3], chance)
            assert time.monotonic() < end, f"nothing to kill for kill {number}: {run.process.poll()}"
            assert run.process.poll() in (None, -signal.SIGKILL), f"the search was over after {number} kills"
        if KILLS[number % 3] == "the search":
            finished = max(finished, len(kept))
            run.end()
            run = started()
    run.fine(600)
    assert finished > 0, "no search was killed that had finished trials"
    assert all(path.read_bytes() == data for path, data in kept.items()), "what has ended stays as it is"
    found, expected = ({number: it[:2] for number, it in results(one).items()} for one in (run, calm))
    assert found == expected
    for one, other in zip(sorted(run.trials, key=_number), sorted(calm.trials, key=_number), strict=True):
        assert one["metric"] == pytest.approx(other["metric"], rel=1e-9)
        assert [step for step, _ in one["told"]] == [step for step, _ in other["told"]] == list(range(2, 17, 2))
    assert [one["number"] for one in run.trials] == [one["number"] for one in calm.trials], "the same order, and best"
    assert sum(one["starts"] for one in run.trials) > len(run.trials)
    wait_until(lambda: not trial_processes(folder), "nothing is left")


def _number(trial: dict[str, Any]) -> int:
    return int(trial["number"])
