"""`paceline run` with real processes: exit codes, kills, stops, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.errors import LaunchError
from paceline.launch.cores import allowed_cores, share_of_cores
from paceline.launch.emulate import check_permission

MAIN = "import sys; from paceline.cli import main; sys.exit(main())"

# What the scripts of these tests begin with: a stand-in for the trainer, made of the board's words.
PROLOGUE = """
import os, signal, subprocess, sys, time
from pathlib import Path
from paceline.exchange.board import Board
from paceline.exchange.words import HostWord, Phase, Word
from paceline.run_place import find_place

place = find_place()
board = Board(place.board)
me = place.row

def mark(text):
    Path(f"mark-{place.rank}").write_text(str(text))

def at_step(number):
    board.set(me, Word.STEP, number)

def until(ready, seconds=20):
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)

def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""


class Run:
    """A `paceline run` in its own folder."""

    def __init__(self, folder: Path, script: str, *flags: str, **popen: Any) -> None:
        self.folder = folder
        (folder / "train.py").write_text(PROLOGUE + script)
        self.process = subprocess.Popen(
            [sys.executable, "-c", MAIN, "run", "train.py", "--run-folder", "run", *flags],
            cwd=folder,
            text=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **popen},
        )
        self.began = time.monotonic()

    def end(self, timeout_s: float = 30.0) -> Run:
        self.out, self.err = self.process.communicate(timeout=timeout_s)
        self.seconds = time.monotonic() - self.began
        self.code = self.process.returncode
        return self

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads(self.out.splitlines()[-1])  # type: ignore[no-any-return]

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.read("run/events.jsonl").splitlines()]

    def event(self, name: str) -> dict[str, Any]:
        (found,) = (event for event in self.events if event["event"] == name)
        return found

    def read(self, name: str) -> str:
        return (self.folder / name).read_text()

    def await_file(self, name: str, has: Callable[[str], object] = bool) -> str:
        end = time.monotonic() + 20
        while not (self.folder / name).exists() or not has(self.read(name)):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end, f"{name} is not as it should be"
            time.sleep(0.005)
        return self.read(name)


Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    return lambda script, *flags, **popen: Run(tmp_path, script, *flags, **popen)


def await_gone(*pids: int, timeout_s: float = 20.0) -> None:
    """A zombie has ended too: whoever adopted it has only not looked yet."""

    def there(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    end = time.monotonic() + timeout_s
    while left := [pid for pid in pids if there(pid)]:
        assert time.monotonic() < end, f"{left} are still there"
        time.sleep(0.01)


# ── a run in which nothing happens ───────────────────────────────────────────────────────────────────────────


def test_a_script_runs_in_each_replica_as_python_would_run_it(start: Start, tmp_path: Path) -> None:
    script = """
import beside
path = Path(__file__)
print("out", place.rank, place.world, __name__, path.is_absolute(), path.name, sys.argv, beside.WORD)
print("err", place.rank, file=sys.stderr)
at_step(3)
threads = [int(os.environ[name]) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")]
mark([sorted(os.sched_getaffinity(0)), threads, os.getpid()])
"""
    (tmp_path / "beside.py").write_text("WORD = 'imported'")
    run = start(script, "--replicas", "2", "--json", "--", "--lr", "0.1").end()
    assert run.code == 0, run.err
    said = "out {} 2 __main__ True train.py ['train.py', '--lr', '0.1'] imported\n"
    assert run.out.startswith(said.format(0) + "{"), "of the replicas only the lowest is shown"
    assert "err 0" in run.err
    assert "err 1" not in run.err
    assert sorted(run.read("run/replica-1.log").splitlines()) == ["err 1", said.format(1).strip()]
    pids = []
    for replica in range(2):
        cores, threads, pid = json.loads(run.read(f"mark-{replica}"))
        share = share_of_cores(replica, 2, allowed_cores())
        assert (cores, threads) == (sorted(share), [len(share)] * 2)
        pids.append(pid)
    await_gone(*pids, timeout_s=0.1)
    summary = run.summary
    assert {name: summary[name] for name in ("run_folder", "exit_code", "steps", "deaths", "restarts")} == {
        "run_folder": "run",
        "exit_code": 0,
        "steps": 3,
        "deaths": 0,
        "restarts": 0,
    }
    assert [event["event"] for event in run.events][:2] == ["started", "started"]
    assert run.events[-1]["event"] == "ended"


def test_the_last_words_of_a_slower_replica_are_not_shown_a_second_time(start: Start) -> None:
    run = start("time.sleep(0.3 * me)\nprint('accuracy 0.97')", "--replicas", "3").end()
    assert run.out == "accuracy 0.97\n"


def test_progress_is_shown_in_plain_lines_off_a_terminal(start: Start) -> None:
    script = """
board.host_set(HostWord.TOTAL_STEPS, 8)
for step in range(1, 9):
    board.set_float(me, Word.MEAN_LOSS, 0.25)
    board.set(me, Word.SAMPLES_SEEN, 64 * step)
    at_step(step)
    time.sleep(0.2)
"""
    run = start(script, "--replicas", "2", "--json").end()
    assert run.code == 0, run.err
    assert any(line.startswith("step ") and "/8  loss 0.25" in line for line in run.err.splitlines()), run.err
    assert "paceline: 8 steps in" in run.err
    assert 20 < run.summary["samples_per_second"] < 400, "64 samples every 0.2 s, or less often"
    assert run.summary["loss"] == 0.25


def test_somebody_who_stops_reading_the_output_does_not_stop_the_training(start: Start) -> None:
    reading, writing = os.pipe()
    run = start("until(lambda: Path('closed').exists())\nprint('x' * 100)", "--json", stdout=writing)
    os.close(writing)
    os.close(reading)
    (run.folder / "closed").touch()
    assert run.end().code == 0
    assert run.read("run/replica-0.log") == "x" * 100 + "\n"


def test_a_full_disk_is_said_once_and_the_run_goes_on(start: Start) -> None:
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # the board just fits

    script = "for _ in range(4):\n    print('x' * (1 << 20))"
    run = start(script, "--quiet", "--json", preexec_fn=small_files).end()
    assert run.code == 0
    assert run.err.count("cannot be written (File too large): the run goes on without it") == 1
    assert len(run.out) > 4 << 20, "what is shown does not depend on what is stored"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("bytearray(1 << 40)", "failed before its first step:\nMemoryError: {}, raise it\n"),
        ("os.abort()", "was killed by SIGABRT before its first step ({}); no replica is left\n"),
        ("sys.exit('std::bad_alloc')", "ended with code 1 before its first step ({})\n"),
        ("sys.exit(7)", "ended with code 7 before its first step\n"),
    ],
)
def test_a_limit_of_address_space_is_named_where_it_may_be_the_cause(start: Start, script: str, said: str) -> None:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))

    run = start(script, "--quiet", preexec_fn=limited).end()
    assert "Traceback" not in run.err
    assert run.err.endswith(
        "paceline: replica 0 " + said.format("ulimit -v allows a process 4096 MiB of address space")
    )


def test_a_limit_of_files_that_shared_memory_does_not_fit_into_is_named(start: Start) -> None:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, 1 << 19))

    run = start("", "--quiet", preexec_fn=limited).end()
    sentence = "shared memory of 1,048,576 bytes counts as a file, and ulimit -f allows 524,288: raise that limit"
    assert (run.code, run.err) == (2, f"paceline: {sentence}\n")


# ── exceptions and exit codes ────────────────────────────────────────────────────────────────────────────────


def test_the_failing_replicas_own_traceback_is_shown_and_the_others_end(start: Start) -> None:
    script = """
mark(os.getpid())
at_step(12)
def deep():
    raise ValueError("no good")
if me == 1:
    until(lambda: Path("mark-0").exists() and Path("mark-2").exists())
    deep()
time.sleep(60)
"""
    run = start(script, "--replicas", "3", "--quiet").end()
    assert run.code == 1
    assert run.seconds < 30
    lines = run.err.splitlines()
    assert lines[:2] == ["paceline: replica 1 failed at step 12:", "Traceback (most recent call last):"]
    assert re.match(r'  File "/.*/train.py", line ', lines[2]), "our own frames are left out"
    assert lines[-1] == "ValueError: no good"
    assert run.err.count("Traceback") == 1
    failure = json.loads(run.read("run/replica-1.failure.json"))
    assert (failure["kind"], failure["sentence"]) == ("ValueError", "ValueError: no good")
    assert "ValueError: no good" in run.read("run/replica-1.log")
    assert run.event("failed")["step"] == 12
    await_gone(*(int(run.read(f"mark-{replica}")) for replica in range(3)), timeout_s=0.1)


def test_of_two_failures_the_first_by_time_is_shown_even_if_its_process_ends_last(start: Start) -> None:
    script = """
import atexit
if me == 0:
    atexit.register(time.sleep, 2)
    raise ValueError("the cause")
until(lambda: Path("run/replica-0.failure.json").exists())
raise RuntimeError("the consequence")
"""
    run = start(script, "--replicas", "2", "--quiet").end()
    assert run.code == 1
    assert run.err.startswith("paceline: replica 0 failed before its first step:\n")
    assert run.err.endswith("ValueError: the cause\n")


def test_a_failed_script_that_cannot_exit_does_not_keep_the_others_waiting(start: Start) -> None:
    script = """
import threading
if me == 1:
    threading.Thread(target=time.sleep, args=(60,)).start()
    raise ValueError("with a thread that stays")
time.sleep(60)
"""
    run = start(script, "--replicas", "2", "--quiet").end()
    assert run.code == 1
    assert run.err.endswith("ValueError: with a thread that stays\n")


def test_an_error_of_paceline_is_shown_as_its_sentence_alone(start: Start) -> None:
    script = "from paceline.errors import LossError\nraise LossError('loss', 'nan', 'step 3 of replica 0')"
    run = start(script, "--quiet").end()
    assert (run.code, run.err) == (
        1,
        "paceline: replica 0 failed before its first step:\nloss is 'nan': step 3 of replica 0\n",
    )


@pytest.mark.parametrize("kind", ["ValueError", "paceline.errors.PacelineError"])
def test_an_exception_whose_message_is_no_proper_text_is_shown(start: Start, kind: str) -> None:
    run = start(f"import paceline.errors\nraise {kind}('no file \\udc80.csv')", "--quiet").end()
    assert run.code == 1
    assert run.err.startswith("paceline: replica 0 failed before its first step:\n")
    assert run.err.endswith("no file \\udc80.csv\n")
    assert run.err.count("Traceback") == (kind == "ValueError")


def test_lines_of_a_log_are_whole_whichever_stream_they_came_by(start: Start) -> None:
    pause = "time.sleep(0.3)"
    one, other = 'print("one ", end="", flush=True)', 'print("other ", end="", file=sys.stderr, flush=True)'
    rest = 'print("two"); print("three", file=sys.stderr); print("last", end="")'
    run = start(f"import sys, time\n{one}; {pause}; {other}; {pause}; {rest}").end()
    assert sorted(run.read("run/replica-0.log").splitlines()) == ["last", "one two", "other three"]


def test_a_script_that_closes_its_stdout_disturbs_nobody(start: Start) -> None:
    script = "print('last words')\nos.close(1)\ntime.sleep(0.2)\nPath('open').open('w').write('')\nmark('')"
    run = start(script, "--replicas", "2", "--json").end()
    assert run.code == 0, run.err
    assert run.out.startswith("last words\n{")


def test_a_script_that_cannot_be_compiled_is_shown_without_our_frames(start: Start) -> None:
    run = start("def broken(:\n    pass", "--replicas", "2", "--quiet").end()
    assert run.code == 1
    assert re.match(r'  File "/.*/train.py", line ', run.err.splitlines()[1])
    assert run.err.endswith("SyntaxError: invalid syntax\n")


def test_an_exit_code_of_the_script_is_the_runs(start: Start) -> None:
    run = start("if me == 1: sys.exit(7)\ntime.sleep(60)", "--replicas", "2", "--quiet").end()
    assert (run.code, run.err) == (7, "paceline: replica 1 ended with code 7 before its first step\n")


def test_a_message_given_to_exit_is_shown_though_another_replica_is_on_screen(start: Start) -> None:
    run = start("if me == 1: sys.exit('no data')\ntime.sleep(60)", "--replicas", "2", "--quiet").end()
    assert (run.code, run.err) == (1, "paceline: replica 1 ended with code 1 before its first step:\nno data\n")


def test_exit_with_zero_or_nothing_is_no_failure(start: Start) -> None:
    assert start("sys.exit(0 if me else None)", "--replicas", "2").end().code == 0


# ── deaths ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_continue_lets_the_others_finish_and_shows_the_next_replica(start: Start) -> None:
    script = """
print("here is", me)
at_step(12)
if me == 0:
    until(lambda: Path("mark-1").exists())
    die()
mark("")
until(lambda: not board.alive(0))
time.sleep(0.1)
print("finished", me)
"""
    run = start(script, "--replicas", "3", "--json").end()
    assert run.code == 0
    assert "paceline: replica 0 was killed by SIGKILL at step 12; 2 replicas go on\n" in run.err
    assert run.out.splitlines()[:-1] == ["here is 0", "finished 1"]
    assert (run.summary["deaths"], run.summary["restarts"]) == (1, 0)
    died = run.event("died")
    assert (died["replica"], died["signal"], died["step"]) == (0, "SIGKILL", 12)


def test_a_death_is_on_the_board_at_once(start: Start) -> None:
    script = """
if me == 1:
    until(lambda: Path("mark-0").exists())
    Path("died").write_text(str(time.monotonic()))
    die()
mark("ready")
until(lambda: not board.alive(1))
Path("noticed").write_text(str(time.monotonic()))
"""
    run = start(script, "--replicas", "2").end()
    assert run.code == 0, run.err
    assert 0 < float(run.read("noticed")) - float(run.read("died")) < 1.0


def test_stop_ends_the_others_with_the_signals_exit_code(start: Start) -> None:
    run = start("if me == 1: die()\ntime.sleep(60)", "--replicas", "3", "--on-failure", "stop", "--quiet").end()
    assert run.code == 128 + signal.SIGKILL
    assert run.err == "paceline: replica 1 was killed by SIGKILL before its first step; the run ends\n"
    assert run.seconds < 30


def test_when_nobody_is_left_the_exit_code_is_the_last_signals(start: Start) -> None:
    run = start("os.kill(os.getpid(), signal.SIGSEGV)", "--replicas", "2", "--quiet").end()
    assert run.code == 128 + signal.SIGSEGV
    assert run.err.endswith("was killed by SIGSEGV before its first step; no replica is left\n")
    assert "Current thread" in run.read("run/replica-0.log"), "the stack of a crash is in the log"


def test_restart_puts_a_new_process_in_the_dead_ones_row_and_sees_it_join(start: Start) -> None:
    script = """
if me == 1 and not place.restarted:
    die()
if me == 1:
    board.set(1, Word.JOINING, board.get(1, Word.INCARNATION))
    until(lambda: board.alive(1))
    until(lambda: Path("finish").exists())
    sys.exit()
until(lambda: board.get(1, Word.JOINING) == 3)
board.admit_joining(0, 5)
until(lambda: '"joined"' in Path("run/events.jsonl").read_text())
Path("finish").touch()
until(lambda: not board.alive(1))
"""
    run = start(script, "--replicas", "2", "--on-failure", "restart", "--json").end()
    assert run.code == 0, run.err
    assert "replica 1 was killed by SIGKILL before its first step; it is started again in 0.5 s (1 of" in run.err
    assert "paceline: replica 1 takes part again\n" in run.err
    assert (run.summary["deaths"], run.summary["restarts"]) == (1, 1)
    names = [event["event"] for event in run.events if event.get("replica") == 1]
    assert names == ["started", "died", "restarted", "joined", "finished"]


def test_a_replica_nobody_will_admit_any_more_does_not_keep_the_run_alive(start: Start) -> None:
    script = """
if place.restarted:
    mark(os.getpid())
    time.sleep(60)
if me == 1:
    die()
until(lambda: Path("mark-1").exists())
"""
    run = start(script, "--replicas", "2", "--on-failure", "restart").end()
    assert run.code == 0
    assert run.seconds < 30
    await_gone(int(run.read("mark-1")), timeout_s=0.1)


def test_when_all_have_died_restart_begins_anew_on_a_fresh_board(start: Start) -> None:
    script = """
with open("starts", "a") as file:
    print(me, place.restarted, board.get(me, Word.INCARNATION), board.alive(me), file=file)
if len(Path("starts").read_text().splitlines()) < 2:
    die()
"""
    run = start(script, "--on-failure", "restart", "--json").end()
    assert run.code == 0, run.err
    assert run.read("starts").splitlines() == ["0 False 1 True", "0 False 1 True"]
    assert "no replica is left, all start anew in 0.5 s (1 of at most 10 times)" in run.err
    assert run.summary["restarts"] == 1


def test_restarts_are_not_endless(start: Start) -> None:
    script = "if me == 1: die()\nuntil(lambda: Path('finish').exists())"
    run = start(script, "--replicas", "2", "--on-failure", "restart", "--max-restarts", "1", "--json")
    run.await_file("run/events.jsonl", lambda events: events.count('"died"') == 2)
    (run.folder / "finish").touch()
    assert run.end().code == 0
    assert "all restarts are used up, 1 replica goes on\n" in run.err
    assert (run.summary["deaths"], run.summary["restarts"]) == (2, 1)


def test_devices_of_a_cut_replica_do_not_go_on_alone_when_all_restarts_are_used_up(start: Start) -> None:
    script = "if me == 1: die()\ntime.sleep(60)"
    flags = ("--stages", "2", "--on-failure", "restart", "--max-restarts", "0", "--quiet")
    run = start(script, *flags).end(timeout_s=20)
    assert run.code == 128 + signal.SIGKILL
    assert run.err == (
        "paceline: device 1 of replica 0 was killed by SIGKILL before its first step; "
        "all restarts are used up, the run ends\n"
    )


def test_a_replica_started_again_is_not_left_alone_with_nobody_to_join(start: Start) -> None:
    script = """
if me == 1 and not place.restarted:
    die()
if me == 0:
    until(lambda: Path("mark-1").exists())
    die()
mark(os.getpid())
time.sleep(60)
"""
    run = start(script, "--replicas", "2", "--on-failure", "restart", "--max-restarts", "1", "--quiet").end()
    assert run.code == 128 + signal.SIGKILL
    assert run.err.endswith("replica 0 was killed by SIGKILL before its first step; no replica is left\n")
    await_gone(int(run.read("mark-1")), timeout_s=0.1)


def test_replicas_that_cannot_all_be_started_are_all_ended(start: Start) -> None:
    def few_descriptors() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))

    run = start("time.sleep(60)", "--replicas", "30", "--quiet", preexec_fn=few_descriptors).end()
    assert run.code == 2
    assert "could not be started: Too many open files\n" in run.err
    assert "Traceback" not in run.err
    await_gone(*(event["pid"] for event in run.events if event["event"] == "started"), timeout_s=1)


# ── stops ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_lets_the_step_finish_and_says_where_it_was_saved(start: Start, number: signal.Signals) -> None:
    script = """
at_step(57)
mark("ready")
until(lambda: board.host_get(HostWord.STOP_REQUESTED))
if me == 0:
    Path(place.save_on_stop).write_text("saved")
sys.exit(130)
"""
    run = start(script, "--replicas", "2", "--save-on-stop", "last.safetensors")
    for replica in range(2):
        run.await_file(f"mark-{replica}")
    run.process.send_signal(number)
    run.end(timeout_s=10)
    assert run.code == 130
    assert "paceline: stopping after this step; Ctrl-C again ends at once\n" in run.err
    assert "paceline: stopped at step 57, saved to last.safetensors; run folder run\n" in run.err
    assert run.event("stopped")["signal"] == number.name


def test_a_second_interrupt_ends_a_script_that_does_not_listen(start: Start) -> None:
    run = start("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nmark(os.getpid())\ntime.sleep(60)")
    pid = int(run.await_file("mark-0"))
    run.process.send_signal(signal.SIGINT)
    run.await_file("run/events.jsonl", lambda events: '"stopped"' in events)
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    run.end()
    assert run.code == 130
    assert "nothing was saved" in run.err
    await_gone(pid, timeout_s=0.1)


def test_a_failure_while_stopping_is_not_hidden(start: Start) -> None:
    script = "mark(1)\nuntil(lambda: board.host_get(HostWord.STOP_REQUESTED))\nraise OSError('disk full')"
    run = start(script, "--quiet")
    run.await_file("mark-0")
    run.process.send_signal(signal.SIGINT)
    run.end(timeout_s=10)
    assert run.code == 1
    assert run.err.endswith("OSError: disk full\n")


# ── what is left ─────────────────────────────────────────────────────────────────────────────────────────────

SPAWNING = """
children = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
mark(" ".join(str(pid) for pid in (os.getpid(), *(child.pid for child in children))))
"""


def test_kill_9_of_the_supervisor_leaves_no_process_of_any_replica(start: Start) -> None:
    run = start(SPAWNING + "time.sleep(60)", "--replicas", "2")
    pids = [int(pid) for replica in range(2) for pid in run.await_file(f"mark-{replica}").split()]
    assert len(pids) == 6
    run.process.kill()
    run.end()
    await_gone(*pids)


def test_replicas_end_with_their_supervisor_even_if_its_guard_was_killed_before(start: Start) -> None:
    run = start("mark(os.getpid())\ntime.sleep(60)", "--replicas", "2")
    pids = [int(run.await_file(f"mark-{replica}")) for replica in range(2)]
    children = psutil.Process(run.process.pid).children()
    (guard,) = (child for child in children if any(word.endswith("guard.py") for word in child.cmdline()))
    guard.kill()
    run.process.kill()
    run.end()
    await_gone(*pids)


def test_what_a_replica_has_spawned_ends_with_it(start: Start) -> None:
    script = SPAWNING + "if me == 1: die()\nuntil(lambda: not board.alive(1))\ntime.sleep(0.2)"
    run = start(script, "--replicas", "2").end()
    assert run.code == 0
    await_gone(*(int(pid) for replica in range(2) for pid in run.read(f"mark-{replica}").split()), timeout_s=1)


# Processes that have left the replica's group: with a session of their own, orphaned at once, without our environment.
DAEMONS = """
def daemon(command, **how):
    starter = f"import subprocess; print(subprocess.Popen({command!r}, stdout=subprocess.DEVNULL).pid)"
    done = subprocess.run([sys.executable, "-S", "-c", starter], stdout=subprocess.PIPE, start_new_session=True, **how)
    return int(done.stdout)

pids = [
    subprocess.Popen(["sleep", "60"], start_new_session=True).pid,
    daemon(["sleep", "60"]),
    daemon(["sh", "-c", "sleep 60 & sleep 60"]),
]
if me == 0:
    pids.append(daemon(["sleep", "60"], env={}))
mark(" ".join(map(str, pids)))
until(lambda: all(Path(f"mark-{row}").exists() for row in range(2)))
"""


def test_what_has_left_a_replicas_group_ends_with_it_and_nothing_else_does(start: Start) -> None:
    stays = subprocess.Popen(["sleep", "60"])
    script = """
if me == 1:
    die()
until(lambda: not board.alive(1))
theirs = [int(pid) for pid in Path("mark-1").read_text().split()]
until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in theirs))
assert all(Path(f"/proc/{pid}").exists() for pid in pids), "those of the living stay"
"""
    run = start(DAEMONS + script, "--replicas", "2").end()
    assert run.code == 0, run.err
    await_gone(*(int(pid) for replica in range(2) for pid in run.read(f"mark-{replica}").split()), timeout_s=0.1)
    assert stays.poll() is None
    stays.kill()
    stays.wait()


def test_kill_9_of_the_supervisor_leaves_nothing_that_has_left_a_replicas_group(start: Start) -> None:
    run = start(DAEMONS.replace(", env={}", "") + "time.sleep(60)", "--replicas", "2")
    pids = [int(pid) for replica in range(2) for pid in run.await_file(f"mark-{replica}").split()]
    run.process.kill()
    run.end()
    await_gone(*pids)


def test_no_shared_memory_is_left_in_the_file_system(start: Start) -> None:
    before = set(os.listdir("/dev/shm"))
    start("die()", "--replicas", "2").end()
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "paceline" in name]


# ── a stall ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_stall_says_who_waits_for_whom_and_where_the_culprit_stands(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        PROLOGUE
        + """
def load_forever():
    until(lambda: Path("finish").exists())
if me == 1:
    board.enter(me, Phase.LOADING)
    load_forever()
else:
    board.enter(me, Phase.AWAITING_GRADIENTS)
    until(lambda: Path("finish").exists())
"""
    )
    (tmp_path / "drive.py").write_text(
        """
from pathlib import Path
from paceline.run_place import Place
from paceline.launch.job import RunJob
from paceline.launch.supervisor import Supervisor
from paceline.watch.display import PlainDisplay
from paceline.watch.run_folder import RunFolder

class Display(PlainDisplay):
    def say(self, line):
        super().say(line)
        if "stands at" in line:
            Path("finish").touch()

folder = Path("run")
folder.mkdir()
job = RunJob("train.py", (), Place(row=0, rows=2, run_folder=str(folder.resolve())), stall_s=0.4)
raise SystemExit(Supervisor(job, RunFolder(folder, print), Display()).run().exit_code)
"""
    )
    done = subprocess.run(
        [sys.executable, "drive.py"], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "replica 0 waits for gradients of step 0 (0 s); replica 1 is loading step 0 (0 s)" in done.stderr
    assert "; waited for: replica 1\n" in done.stderr
    assert "paceline: replica 1 stands at\n" in done.stderr
    assert "in load_forever\n" in done.stderr
    assert "in load_forever\n" in (tmp_path / "run/replica-1.log").read_text()
    assert "load_forever" not in (tmp_path / "run/replica-0.log").read_text(), "who waits is not asked"


# ── several hosts ────────────────────────────────────────────────────────────────────────────────────────────


def test_two_supervisors_make_one_run_and_only_the_first_speaks(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    flags = ["--nnodes=2", "--nproc_per_node=2", f"--rdzv_endpoint=127.0.0.1:{port}"]
    script = "print(place.rank, place.world, place.host, place.hosts, place.rendezvous, place.strategy.replicas)"
    runs = [start(script, *flags, f"--node_rank={host}") for host in range(2)]
    for run in runs:
        assert run.end().code == 0, run.err
    assert runs[0].out == f"0 4 0 2 127.0.0.1:{port} 4\n"
    assert (runs[1].out, runs[1].err) == ("", "")
    assert runs[1].read("run/host-1/replica-3.log") == f"3 4 1 2 127.0.0.1:{port} 4\n"


def may_emulate() -> bool:
    try:
        check_permission()
    except LaunchError:
        return False
    return True


@pytest.mark.skipif(not may_emulate(), reason="emulated hosts need root and iproute2")
@pytest.mark.parametrize("linger_s", [0, 1])
def test_emulated_hosts_run_the_script_and_the_first_failure_is_the_one_shown(start: Start, linger_s: int) -> None:
    """Also when the first to fail is not the first to end."""
    script = (
        f"linger_s = {linger_s}"
        + """
import atexit
print(place.rank, place.rendezvous, os.environ["GLOO_SOCKET_IFNAME"])
mark(os.getpid())
until(lambda: all(Path(f"mark-{rank}").exists() for rank in range(4)))
if place.rank == 3:
    atexit.register(time.sleep, linger_s)
    raise ValueError("on the other host")
if place.rank == 0:
    until(lambda: Path("run/host-1/replica-3.failure.json").exists())
    raise RuntimeError("because of it")
time.sleep(60)
"""
    )
    run = start(script, "--replicas", "4", "--emulate", "hosts=2,link=1gbit", "--json", "--quiet").end()
    assert run.code == 1
    assert run.out.startswith("0 10.213.0.1:29500 eth0\n")
    assert run.summary["exit_code"] == 1
    # Whichever comes first: what the other host says of it, or the end of a replica of this one.
    of_host = "paceline: host 1 ended the run: replica 3 failed: ValueError: on the other host\n"
    assert run.err.removeprefix(of_host).startswith("paceline: replica 3 failed before its first step:\nTraceback")
    assert run.err.endswith("ValueError: on the other host\n")
    await_gone(*(int(run.read(f"mark-{rank}")) for rank in range(4)), timeout_s=0.1)
    namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"paceline-{run.process.pid}-" not in namespaces
