"""The benchmarks' own arithmetic and report, and that each of them runs; never how fast anything is."""

from __future__ import annotations

import importlib
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import __main__ as command
from benchmarks import (
    before,
    load,
    memory,
    peers,
    planned,
    planned_page,
    processes,
    report,
    servers,
    sparse,
    staleness,
    straggler,
)
from benchmarks.machine import Machine, this_machine
from benchmarks.measure import (
    Claim,
    Curve,
    Plot,
    Result,
    Series,
    Setting,
    Skipped,
    fastest,
    median_exchange_s,
    median_step_s,
    per_round,
    steps_per_second,
    time_in_turns,
)
from benchmarks.plot import draw, draw_curves
from benchmarks.training import Training, read_marks
from benchmarks.yardstick import Yardstick
from paceline.errors import InvalidInput
from paceline.launch.cores import allowed_cores, share_of_cores
from paceline.plan.predict import StepPredictor
from tests.plan.made_up import calibration, profile

MACHINE = Machine(processor="Abacus", cores=2, memory_gib=1, system="Linux 6", python="3.11", torch="2.13")


# ── arithmetic ───────────────────────────────────────────────────────────────────────────────────────────────

times = st.floats(1e-3, 1e3)


@given(st.lists(st.tuples(times, times, st.floats(1, 10)), min_size=1, max_size=9))
@settings(deadline=None, max_examples=50)
def test_a_round_in_which_the_machine_was_slow_has_the_same_ratio(rounds: list[tuple[float, float, float]]) -> None:
    a, b, slowed_a, slowed_b = (
        Series(name, "ms", tuple(figures))
        for name, figures in (
            ("a", [a for a, _, _ in rounds]),
            ("b", [b for _, b, _ in rounds]),
            ("slowed a", [a * by for a, _, by in rounds]),
            ("slowed b", [b * by for _, b, by in rounds]),
        )
    )
    assert per_round(slowed_a, slowed_b) == pytest.approx(per_round(a, b))
    assert per_round(a, b, times=2) == pytest.approx([2 * ratio for ratio in per_round(a, b)])


def test_contestants_take_turns_so_that_a_slow_drift_hits_all_alike() -> None:
    order: list[str] = []
    said: list[str] = []

    def contestant(name: str) -> float:
        order.append(name)
        return float(len(order))

    series = time_in_turns(
        {"a": lambda: contestant("a"), "b": lambda: contestant("b")}, Setting("full", 3, said.append), "ms"
    )
    assert order == ["a", "b", "a", "b", "a", "b"]
    assert series["a"] == Series("a", "ms", (1.0, 3.0, 5.0))
    assert series["b"].median == 4.0
    assert said[3] == "round 2/3  b: 4 ms"


def test_a_peer_is_judged_by_its_fastest_way_by_median_and_not_by_luck() -> None:
    steady, lucky = Series("steady", "ms", (5.0, 5.0, 5.0)), Series("lucky", "ms", (1.0, 9.0, 9.0))
    assert fastest([lucky, steady]) is steady


def test_step_times_leave_out_start_and_warm_up() -> None:
    marks = [100.0, 109.0, 110.0, 112.0, 113.0]  # the second step took 9 s
    assert median_step_s(marks, warm_up=2) == 1.0
    assert median_step_s(marks, warm_up=1) == 1.5


def test_an_exchange_is_counted_from_the_last_rank_that_is_ready_until_all_are_done() -> None:
    rank0 = [(0.0, 9.0), (10.0, 15.5)]  # in the second repetition, ready 4 s before rank 1
    rank1 = [(0.0, 9.0), (14.0, 15.0)]
    assert median_exchange_s([rank0, rank1], warm_up=1) == 1.5


def test_steps_are_counted_only_while_all_replicas_make_them() -> None:
    early = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    late = [3.5, 4.5, 5.5, 6.5, 7.5, 8.5]
    # From 3.5, when the late one has made its first step, to 6, when the early one has made its last.
    assert steps_per_second([early, late], warm_up=1) == 5 / 2.5
    assert steps_per_second([early], warm_up=2) == 1.0
    assert steps_per_second([[1.0, 2.0], [3.0, 4.0]], warm_up=1) == 1.0  # they never met


def test_a_claim_is_reached_by_its_median_on_the_right_side_of_the_bar() -> None:
    rounds = (0.9, 1.1, 2.0)
    assert Claim(text="", rounds=rounds, at_least=1.1).reached is True
    assert Claim(text="", rounds=rounds, at_least=1.11).reached is False
    assert Claim(text="", rounds=rounds, at_most=1.1).reached is True
    assert Claim(text="", rounds=rounds, at_most=1.09).reached is False
    assert Claim(text="", rounds=rounds).reached is None
    assert Claim(text="", rounds=rounds, at_most=1.1).bar == "≤ 1.10×"
    assert Claim(text="", rounds=rounds).figure == "1.10× (0.90 – 2.00)"


def test_a_line_that_is_being_written_is_not_taken_for_a_time(tmp_path: Path) -> None:
    path = tmp_path / "times"
    assert read_marks(path) == []
    path.write_text("1.25\n2.5\n3.")
    assert read_marks(path) == [1.25, 2.5]


def test_own_computing_is_not_taken_for_others_and_others_is(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([(0.0, 100.0, 5.0), (10.0, 112.0, 16.0)])  # 10 s in which 12 s were computed, 11 of them by us
    monkeypatch.setattr(load, "_now", lambda: next(clock))
    for what_is_left_to_tests in ("_adopt", "_reap"):
        monkeypatch.setattr(load, what_is_left_to_tests, lambda: None)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert load.OtherLoad().share() == pytest.approx(1 / 20)


def test_a_child_that_was_waited_for_counts_as_own() -> None:
    wall_s, all_s, own_s = load._now()
    subprocess.run(
        [sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: sum(range(100_000))"], check=True
    )
    now_s, all_now_s, own_now_s = load._now()
    assert own_now_s - own_s >= 0.2
    assert all_now_s - all_s >= own_now_s - own_s - 0.05  # ticks are coarse
    assert now_s > wall_s


# ── parameter servers ────────────────────────────────────────────────────────────────────────────────────────


def test_auto_has_come_to_three_when_a_replica_has_a_third_of_the_batch_and_keeps_it() -> None:
    size = straggler.Size(batch_size=96, sleep_ms=1.0, steps=20, warm_up=2)
    shares = [24, 24, 32, 24, 24, 32, 31, 32, 33, 32, 32, 8]  # once by chance, then for good, but for the data's end
    steps = [straggler.Step(float(number), number, share) for number, share in enumerate(shares, 1)]
    assert size.found_at(steps) == 6
    assert size.found_at(steps[:5]) == 5
    assert size.samples_per_second(steps, batch_size=96) == 96.0


def test_samples_of_async_updates_are_counted_as_such() -> None:
    size = straggler.Size(batch_size=96, sleep_ms=1.0, steps=20, warm_up=2)
    steps = [straggler.Step(float(number), 3 * number, 32) for number in range(1, 9)]
    assert size.samples_per_second(steps, batch_size=32) == 96.0


def test_staleness_is_the_mean_over_all_gradients_and_accuracy_the_median_of_the_last_evaluations() -> None:
    curve = tuple((float(x), y) for x, y in enumerate([0.1, 0.9, 0.2, 0.95, 0.94, 0.96]))
    found = staleness.Found(curve, {0: 1, 3: 5, 4: 2})
    assert found.mean_staleness == 23 / 8
    assert found.accuracy == 0.94
    assert staleness.Found(curve, {}).mean_staleness == 0


def test_rows_that_must_travel_are_the_touched_ones_both_ways_with_their_numbers() -> None:
    assert sparse.SIZES["full"].least_bytes == 2 * 2048 * (16 * 4 + 8)


def test_a_peer_that_is_not_installed_is_skipped_with_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    notes: list[str] = []
    contestants = servers._contestants(servers.SIZES["tiny"], notes)
    assert servers.RPC in contestants
    assert servers.RAY not in contestants
    assert f"Skipped {servers.RAY}: Ray is not installed, `make peers` does it where it can." in notes
    assert f"Skipped {servers.TENSORFLOW}: TensorFlow is not installed, `make peers` does it where it can." in notes


def test_paceline_is_held_against_the_best_of_the_peers_and_the_bars_are_of_two_replicas() -> None:
    rates = {servers.SHARED: 90.0, servers.TCP: 20.0, servers.TLS: 10.0}
    rates |= {servers.RPC: 5.0, servers.RAY: 10.0, servers.RAY_APART: 8.0}  # over TCP the last one is the best
    series = {
        servers._in(name, count): Series(name, servers.UNIT, (rate,))
        for name, rate in rates.items()
        for count in (1, 2)
    }
    alone, both = (servers._claims(series, count) for count in (1, 2))
    assert [claim.rounds for claim in both] == [(9.0,), (2.5,), (2.0,), (0.5,)]
    bars = [servers.SHARED_LEAST, servers.TCP_LEAST, None, servers.TLS_LEAST]
    assert [claim.at_least for claim in both] == bars
    assert all(claim.reached is None for claim in alone)


def test_bytes_over_tcp_are_counted_both_ways_and_those_of_pipes_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(processes.SCRIPTS)
    traffic = importlib.import_module("traffic")
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as one:
        other, _ = listener.accept()
        left, right = socket.socketpair()
        with other, left, right:
            before = traffic.bytes_so_far()
            one.sendall(b"x" * 1000)
            assert other.recv(1000, socket.MSG_WAITALL) == b"x" * 1000
            left.sendall(b"x" * 500)
            while (counted := traffic.bytes_so_far() - before) < 2000:  # the acknowledgement may be on its way
                time.sleep(0.01)
    assert counted == 2000  # sent by one end, received by the other, both of this process


def test_all_rows_of_a_step_are_different(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(processes.SCRIPTS)
    rows = importlib.import_module("rows")
    options = rows.parse(None).parse_args(["--rows", "10000", "--touched", "4096", "--steps", "3"])
    for step in rows.make_data(options).split(rows.batch_size(options)):
        assert step.unique().numel() == step.numel() == 4096
        assert step.min() >= 0
        assert step.max() < 10_000


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_four_copies_are_counted_as_four_and_shared_ones_as_one() -> None:
    size = memory.SIZES["full"]
    model, idle = size.model_bytes, 1_000_000_000
    assert memory.copies(idle + 4 * model + 3 * model, idle, size) == 1
    assert memory.copies(idle + 4 * model + 4 * 3 * model, idle, size) == 4


def test_memory_that_two_processes_share_is_counted_once() -> None:
    size = 64 << 20
    descriptor = os.memfd_create("shared")
    os.ftruncate(descriptor, size)
    source = (
        f"import mmap, time; shared = mmap.mmap({descriptor}, {size}); sum(shared[::4096]); "
        "print('read', flush=True); time.sleep(60)"
    )
    before = memory.pss([os.getpid()])
    with mmap.mmap(descriptor, size) as shared:
        shared.write(b"x" * size)
        child = subprocess.Popen([sys.executable, "-c", source], pass_fds=[descriptor], stdout=subprocess.PIPE)
        with child:
            assert child.stdout is not None
            child.stdout.readline()
            both = memory.pss([os.getpid()])  # finds the child by itself
            child.kill()
    os.close(descriptor)
    assert both.shared - before.shared == pytest.approx(size, rel=0.02)


# ── the models are what the titles say ───────────────────────────────────────────────────────────────────────


def parameters(training: Training, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.syspath_prepend(processes.SCRIPTS)
    workload = importlib.import_module("workload")
    options = workload.parse(None).parse_args(training.arguments(Path("times")))
    return sum(parameter.numel() for parameter in workload.make_model(options).parameters())


def test_models_have_the_sizes_that_the_bars_are_about(monkeypatch: pytest.MonkeyPatch) -> None:
    suite = {name: importlib.import_module(f"benchmarks.{name}") for name in ("mlp", "conv", "compute")}
    assert parameters(suite["mlp"].SIZES["full"].training, monkeypatch) == pytest.approx(15e6, rel=0.06)
    assert parameters(suite["conv"].SIZES["full"], monkeypatch) == pytest.approx(0.26e6, rel=0.01)
    assert parameters(suite["compute"].SIZES["full"], monkeypatch) < 50_000
    assert 4 * parameters(memory.SIZES["quick"].training, monkeypatch) == memory.SIZES["quick"].model_bytes
    assert memory.SIZES["full"].model_bytes == pytest.approx(400e6, rel=0.01)


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────────


def test_when_one_rank_fails_its_last_words_are_given_and_the_others_are_ended(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    sleeper = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    failing = f"""
import os, sys, time
while not os.path.exists({str(pid_file)!r}):
    time.sleep(0.01)
sys.exit("so it ends")
"""
    with pytest.raises(processes.Failed, match=r"exit code 1:\nso it ends"):
        processes.run([processes.Process([sys.executable, "-c", source]) for source in (sleeper, failing)])
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_servers_are_ended_when_all_others_have(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    serving = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    waiting = f"import os, time\nwhile not os.path.exists({str(pid_file)!r}): time.sleep(0.01)\ntime.sleep(0.1)"
    server, client = (processes.Process([sys.executable, "-c", source]) for source in (serving, waiting))
    processes.run([client], servers=[server])
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_when_a_server_fails_so_does_the_run() -> None:
    failing = processes.Process([sys.executable, "-c", "import sys; sys.exit('no port')"])
    client = processes.Process([sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(processes.Failed, match="no port"):
        processes.run([client], servers=[failing])


def test_ddp_ranks_are_pinned_as_paceline_pins_replicas() -> None:
    for hosts, count in ((1, 2), (1, 4), (2, 4)):
        ranks = processes.ranks("train_ddp.py", [], count, hosts=hosts)
        on_host = count // hosts
        shares = [share_of_cores(local, on_host, allowed_cores()) for local in range(on_host)]
        assert [rank.cores for rank in ranks] == shares * hosts
        assert [rank.environment["RANK"] for rank in ranks] == [str(rank) for rank in range(count)]
        assert [int(rank.environment["OMP_NUM_THREADS"]) for rank in ranks] == [len(cores) for cores in shares * hosts]
        assert len({rank.environment["MASTER_PORT"] for rank in ranks}) == 1


def test_a_process_really_runs_on_its_cores(tmp_path: Path) -> None:
    core = allowed_cores()[-1]
    path = tmp_path / "cores"
    source = f"import os; open({str(path)!r}, 'w').write(str(os.sched_getaffinity(0)))"
    processes.run([processes.Process([sys.executable, "-c", source], (core,))])
    assert path.read_text() == str({core})


# ── the report ───────────────────────────────────────────────────────────────────────────────────────────────


def result(median: float = 1.6) -> Result:
    return Result(
        title="A title",
        series=(
            Series("Paceline", "ms a step", (99.0, 100.0, 101.0)),
            Series("DDP", "ms a step", (160.0, 160.0, 160.0)),
        ),
        claims=(
            Claim(text="over DDP's", rounds=(median - 0.1, median, median + 0.1), at_least=1.5),
            Claim(text="for information", rounds=(1.0,)),
        ),
        notes=("A note.",),
        measured="2025-01-01 00:00",
    )


def test_what_was_written_is_read_back_and_the_page_shows_its_figures(tmp_path: Path) -> None:
    written = report.Report({}).with_new({"mlp": result(), "conv": result(1.2)}, MACHINE, ("mlp", "conv"))
    record, page = report.write(written, tmp_path)
    assert report.read(tmp_path) == written
    assert record.name == "benchmarks.json"
    text = page.read_text()
    assert text.startswith("# Benchmarks\n")
    assert "| over DDP's | ≥ 1.50× | 1.60× (1.50 – 1.70) | reached |" in text
    assert "| over DDP's | ≥ 1.50× | 1.20× (1.10 – 1.30) | **not reached** |" in text
    assert "| Paceline | 100 | 99 – 101 | ms a step |" in text
    machine = "Abacus, 2 cores, 1 GiB, Linux 6, Python 3.11, torch 2.13"
    assert f"`python -m benchmarks conv`, 2025-01-01 00:00, {machine}." in text
    assert "\nA note.\n" in text


def test_only_what_is_between_the_markers_is_rewritten(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text(f"my words\n{report.BEGIN}\nold\n{report.END}\nmore of them\n")
    report.write(report.Report({"mlp": report.Measured(MACHINE, result())}), tmp_path)
    once = page.read_text()
    assert once.startswith(f"my words\n{report.BEGIN}\n")
    assert once.endswith(f"\n{report.END}\nmore of them\n")
    assert "old" not in once
    report.write(report.Report({"mlp": report.Measured(MACHINE, result())}), tmp_path)
    assert page.read_text() == once


def test_a_page_without_markers_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text("my words\n")
    with pytest.raises(InvalidInput, match="it must have the lines"):
        report.write(report.Report({"mlp": report.Measured(MACHINE, result())}), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["benchmarks.md"]
    assert page.read_text() == "my words\n"


def test_a_partial_run_keeps_the_other_figures_each_with_its_machine() -> None:
    order = ("mlp", "conv", "start")
    before = report.Report({}).with_new({"start": result(2), "mlp": result(1)}, MACHINE, order)
    now = before.with_new({"conv": result(3), "mlp": result(4)}, this_machine(), order)
    assert list(now.results) == list(order)
    assert {name: of_one.result for name, of_one in now.results.items()} == {
        "mlp": result(4),
        "conv": result(3),
        "start": result(2),
    }
    assert [of_one.machine for of_one in now.results.values()] == [this_machine(), this_machine(), MACHINE]


def test_the_plot_is_a_picture_of_all_kinds_of_claims(tmp_path: Path) -> None:
    claims = [*result().claims, *result(1.2).claims, Claim(text="at most", rounds=(1.0,), at_most=1.1)]
    draw(claims, tmp_path / "ratios.png")
    assert (tmp_path / "ratios.png").read_bytes().startswith(b"\x89PNG")


def test_a_benchmarks_own_plot_is_a_picture_and_the_page_shows_it(tmp_path: Path) -> None:
    curves = (Curve("threads", ((1.0, 2.0), (10.0, 9.0))), Curve("processes", ((1.0, 3.0),)))
    for log in (True, False):
        draw_curves(Plot(x="replicas", y="ms", curves=curves, log=log), tmp_path / "plot.png", "A title")
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    plotted = msgspec.structs.replace(result(), plot=Plot(x="replicas", y="ms", curves=curves))
    written = report.Report({"replicas": report.Measured(MACHINE, plotted)})
    _, page = report.write(written, tmp_path)
    assert report.read(tmp_path) == written
    assert "![ms, by replicas](benchmarks-replicas.png)" in page.read_text()


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["alreduce"], "benchmark is 'alreduce': did you mean allreduce?"),
        (
            ["nothing-like-it"],
            "benchmark is 'nothing-like-it': give one of mlp, conv, compute, allreduce, memory, hosts, ",
        ),
        (["--rounds", "2"], "rounds is 2: give 3 or more, or --quick"),
        (["--out", "no/such"], "out is 'no/such': there is no such folder, make it first"),
    ],
)
def test_bad_input_is_refused_with_a_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"benchmarks: {sentence}")
    assert err.count("\n") == 1


def test_help_names_every_benchmark_and_does_not_wait_for_torch() -> None:
    source = """
import sys
from benchmarks.__main__ import main
try:
    main(["--help"])
finally:
    sys.exit("torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, cwd=Path(command.__file__).parent.parent
    )
    assert done.returncode == 0
    for name in command.SUITE:
        assert f"\n  {name} " in done.stdout


def test_when_it_is_told_to_end_nothing_that_it_started_is_left() -> None:
    root = Path(command.__file__).parent.parent
    measuring = subprocess.Popen(
        [sys.executable, "-m", "benchmarks", "start", "--quick"], cwd=root, stdout=subprocess.DEVNULL
    )
    process = psutil.Process(measuring.pid)
    while len(started := process.children(recursive=True)) < 3:  # paceline run, its guard, a replica
        assert measuring.poll() is None
        time.sleep(0.02)
    measuring.terminate()
    assert measuring.wait() == 128 + signal.SIGTERM
    _, left = psutil.wait_procs(started, timeout=10)
    assert left == []


# ── the benchmarks ───────────────────────────────────────────────────────────────────────────────────────────


# Between them they start all but the plain script and the peers; `make soak` runs all.
IN_EVERY_TEST_RUN = ("allreduce",)


@pytest.mark.parametrize(
    "name",
    [name if name in IN_EVERY_TEST_RUN else pytest.param(name, marks=pytest.mark.soak) for name in command.SUITE],
)
@pytest.mark.timeout(300)
def test_it_runs(name: str) -> None:
    said: list[str] = []
    try:
        found = importlib.import_module(f"benchmarks.{name}").run(Setting("tiny", 1, said.append))
    except Skipped as reason:
        pytest.skip(str(reason))
    assert len(said) >= 2
    assert found.claims
    assert all(len(claim.rounds) == 1 for claim in found.claims)
    assert all(len(series.rounds) == 1 for series in found.series)
    assert all(series.rounds[0] > 0 for series in found.series if series.unit != "MB")


# ── this tree and an earlier one ─────────────────────────────────────────────────────────────────────────────


def test_faster_is_above_one_whatever_the_unit() -> None:
    given = [(100.0, 50.0), (100.0, 100.0), (100.0, 80.0)]
    assert before._row("ms", given)[3:] == ("1.250 (1.00 – 2.00)", "2.000", "yes")
    assert before._row("steps/s", given)[3:] == ("0.800 (0.50 – 1.00)", "1.000", "no")


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_both_trees_are_measured_and_nothing_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    trees = subprocess.run(["git", "worktree", "list"], capture_output=True, text=True, check=True).stdout
    assert before.main(["HEAD", "allreduce", "--quick", "--rounds", "1", "--only", "4 KB"]) == 0
    assert "allreduce: 4 KB" in capsys.readouterr().out
    assert subprocess.run(["git", "worktree", "list"], capture_output=True, text=True, check=True).stdout == trees


# ── planned ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_yardstick_tells_a_time_whenever_it_is_asked() -> None:
    yardstick = Yardstick()
    try:
        assert all(0 < yardstick.seconds() < 10 for _ in range(2))
    finally:
        yardstick.close()


def test_at_equal_speed_only_what_a_link_takes_stays_as_long() -> None:
    state = planned.State(
        calibration=calibration(), profiles={"mlp": profile()}, yardstick_s={"mlp": 1.0, planned.CALIBRATED: 1.0}
    )
    twice_as_slow = planned.Measured(1.0, 1.0, 1.0, "now", yardstick_s=2.0)
    here = StepPredictor(profile(), calibration(), planned.here(calibration())).mirrored(2)
    assert planned_page._factor(state, "mlp", here, twice_as_slow) == pytest.approx(2.0)
    hosts = StepPredictor(profile(), calibration(), planned.emulated(2, "100mbit", calibration())).mirrored(2, 2)
    assert 1.0 < planned_page._factor(state, "mlp", hosts, twice_as_slow) < 2.0
    assert planned_page._factor(state, "mlp", here, planned.Measured(1.0, 1.0, 1.0, "before")) == 1.0
