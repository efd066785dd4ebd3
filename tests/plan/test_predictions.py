"""What follows from a profile and a calibration: which plan, why, where it saturates. No torch, no processes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from paceline.errors import InvalidInput
from paceline.plan.after_run import learn, predict_strategy
from paceline.plan.calibration import read, write
from paceline.plan.cluster import Cluster
from paceline.plan.plot import check_plot, draw, in_terminal
from paceline.plan.predict import StepPredictor
from paceline.plan.report import few, make_report
from paceline.plan.saturation import speedup_curve
from paceline.plan.shown import as_json, in_words
from paceline.plan.trace import with_trace
from paceline.rules import Async
from paceline.split.values import Layout, Stages
from paceline.strategy import Centralized, Mirrored
from tests.plan.made_up import calibration, cut, profile

HERE = Cluster(hosts=1, cores=2, memory_bytes=16 * 2**30)


def slow_links(hosts: int, link: str = "100mbit", cores: int = 1) -> Cluster:
    return Cluster(hosts=hosts, cores=cores, memory_bytes=16 * 2**30, link=link)


def test_a_model_that_only_computes_is_planned_data_parallel_and_says_why() -> None:
    report = make_report(profile(parameters=10_000), calibration(), HERE)
    assert report.best.strategy == Mirrored(replicas=2)
    assert 1.05 < report.best.speedup < 1.2  # one device has two threads there
    assert any(reason.startswith("Data parallel: replicas compute 32 samples each") for reason in report.why)
    assert report.best.command("train.py", ["--lr", "1"]) == ["paceline run train.py --replicas 2 -- --lr 1"]


def test_a_small_model_is_planned_for_one_device_and_says_what_the_exchange_would_take() -> None:
    report = make_report(profile(parameters=1000, ms_a_sample=0.001, fixed_ms=0.1), calibration(), HERE)
    assert report.best.strategy == Mirrored(replicas=1)
    assert any("Use one device" in reason and "exchange takes" in reason for reason in report.why)


def test_wide_layers_and_few_samples_are_cut_and_the_sentence_names_the_dim_and_the_gradient() -> None:
    made = profile(parameters=16_000_000, batch_size=8, ms_a_sample=0.2, fixed_ms=30.0, two_threads=0.9)
    layout = Layout(mesh={"model": 2}, layout={"hidden": "model"})
    made = msgspec.structs.replace(made, cuts=(cut(layout, made, 0.5), cut(Stages(stages=2), made, 0.7)))
    slow = calibration(curves=tuple(c for c in calibration().curves if c.exchange == "shared"))
    report = make_report(made, slow, HERE)
    assert report.best.strategy.split == layout
    assert any("a part of hidden" in reason and "61 MiB" in reason for reason in report.why), report.why


def test_the_link_decides_where_replicas_saturate_and_a_faster_one_moves_that() -> None:
    made = profile(parameters=500_000, batch_size=256, ms_a_sample=6.0)
    slow, fast = (
        speedup_curve(StepPredictor(made, calibration(), slow_links(16, link))) for link in ("100mbit", "10gbit")
    )
    assert slow.saturates.devices < fast.saturates.devices
    assert slow.points[0].speedup == 1.0
    report = make_report(made, calibration(), slow_links(16))
    assert any("the link binds" in reason for reason in report.why), report.why
    gains = {lever.what: lever.gain for lever in report.levers}
    assert "--every 8" in [lever.how for lever in report.levers]
    assert gains["a wire of bf16"] > 1.1
    assert gains["links of 1gbit instead of 100mbit"] > gains["a wire of bf16"]


def test_of_the_fastest_link_nobody_knows_a_faster_one() -> None:
    report = make_report(profile(parameters=500_000, batch_size=256), calibration(), slow_links(4, "400gbit"))
    assert not any(lever.what.startswith("links of") for lever in report.levers)


def test_a_closed_form_of_the_link_agrees_with_the_simulator() -> None:
    """Two descriptions of the same step: what is left of the link's time when backward is over."""
    from paceline.plan.far_servers import step_cost
    from paceline.plan.mirrored_step import mirrored_step
    from paceline.plan.simulate import simulate

    made = profile(parameters=8_000_000, batch_size=64)
    free = calibration(curves=tuple(c for c in calibration().curves if c.exchange == "shared"), between_hosts_s=0.0)
    predictor = StepPredictor(made, free, slow_links(4, "1gbit"))
    found = predictor.mirrored(4, 4)
    computed = next(part.seconds for part in found.parts if part.name == "compute")
    link = next(part.seconds for part in found.parts if part.name == "link")
    cost = msgspec.structs.replace(step_cost(predictor, predictor.compute.of(16, 1)), sum_s=0.0, update_s=0.0)
    step = mirrored_step(cost, replicas=4, hosts=4, link=125e6 * 0.955)
    assert simulate(step).step_s == pytest.approx(computed + link, rel=0.15)


def test_the_commands_for_servers_elsewhere_are_ones_that_paceline_knows() -> None:
    from paceline.cli import Parser, run, server
    from paceline.cli.run_plan import resolve

    ordered = make_report(profile(), calibration(), slow_links(4)).ordered
    found = [plan for plan in ordered if plan.strategy.on_servers and plan.hosts > 1]
    serve, train = found[0].command("train.py", ["--lr", "1"])
    parser = Parser("paceline server")
    server.add_arguments(parser)
    assert parser.parse(serve.split()[2:]).keys == Path("KEYS")
    parser = Parser("paceline run")
    run.add_arguments(parser)
    words = train.replace("K ", "0 ").split(" -- ")[0].split()[2:]
    options = parser.parse([word.replace("SERVER0", "10.0.0.1").replace("SERVER1", "10.0.0.2") for word in words])
    options.arguments = []
    plan = resolve(options)
    assert plan.strategy.servers == found[0].strategy.servers  # type: ignore[union-attr]
    assert plan.hosts == found[0].hosts


def test_more_replicas_than_cores_share_them() -> None:
    predictor = StepPredictor(profile(), calibration(), HERE)
    two, four = predictor.mirrored(2), predictor.mirrored(4)
    assert four.samples_per_s < 1.02 * two.samples_per_s


def test_an_async_step_is_one_update_and_its_staleness_is_said() -> None:
    found = StepPredictor(profile(), calibration(), HERE).servers(2, 1, Async())
    assert found is not None
    assert found.staleness == 1.0
    assert not found.exact
    sync = StepPredictor(profile(), calibration(), HERE).servers(2, 1)
    assert sync is not None
    assert found.step.seconds < sync.step.seconds * 1.2


def test_what_does_not_fit_is_left_out_and_the_sentence_says_where_memory_goes() -> None:
    big = profile(parameters=200_000_000)
    report = make_report(big, calibration(), Cluster(hosts=1, cores=2, memory_bytes=4 * 2**30))
    assert all(plan.host_memory_bytes <= 4 * 2**30 for plan in report.ordered)
    assert any("do not fit into memory" in reason and "gradients" in reason for reason in report.why), report.why


def test_a_described_device_is_called_an_estimate_everywhere() -> None:
    cluster = Cluster(hosts=2, cores=8, memory_bytes=40 * 2**30, link="100gbit", device="a100", devices_a_host=4)
    report = make_report(profile(), calibration(), cluster)
    shown = in_words(report, [], module=False, top=3, price=None, layers=False, checked=None)
    assert report.best.estimate
    assert "(estimate)" in shown
    assert "a100 is described, not measured" in shown
    assert json.loads(as_json(report, [], module=False, price=2.0, checked=None))["best"]["estimate"]


def test_beyond_what_was_calibrated_it_says_so() -> None:
    found = StepPredictor(profile(parameters=200_000_000), calibration(), HERE).mirrored(8)
    assert {"shared of more than 256 MiB", "shared with more than 4 replicas a host"} <= set(found.outside)


def test_runs_correct_later_predictions_and_one_that_is_far_off_does_not() -> None:
    known = calibration()
    for ratio in (1.3, 1.25, 1.35, 1.3):
        known = learn(known, "mirrored", ratio)
    before = StepPredictor(profile(), calibration(), HERE).mirrored(2)
    after = StepPredictor(profile(), known, HERE).mirrored(2)
    assert after.step.seconds / before.step.seconds == pytest.approx(1.3 ** (4 / 6), rel=0.01)
    assert learn(known, "mirrored", 100.0) == known
    others = (StepPredictor(profile(), machine, HERE).one.step.seconds for machine in (known, calibration()))
    assert math.isclose(*others)


def test_every_strategy_of_a_plan_is_predicted_alike_after_its_run() -> None:
    made = profile()
    made = msgspec.structs.replace(made, cuts=(cut(Stages(stages=2, micro_batches=8), made, 0.6),))
    predictor = StepPredictor(made, calibration(), HERE)
    for strategy in (
        Mirrored(replicas=2),
        Mirrored(split=Stages(stages=2, micro_batches=8)),
        Centralized(replicas=2, servers=1),
        Centralized(replicas=2, servers=1, rule=Async()),
    ):
        found = predict_strategy(predictor, strategy, 1)
        assert found is not None
        assert found.strategy == strategy
    assert predict_strategy(predictor, Mirrored(split=Stages(stages=3)), 1) is None  # was not tried


def test_500_replicas_are_planned_in_five_seconds_and_500_megabytes() -> None:
    code = (
        "import time\nfrom pathlib import Path\n"
        "from tests.plan.made_up import calibration, profile\n"
        "from paceline.plan.cluster import Cluster\n"
        "from paceline.plan.report import make_report\n"
        "began = time.process_time()\n"
        "cluster = Cluster(hosts=125, cores=4, memory_bytes=2**36, link='10gbit')\n"
        "report = make_report(profile(batch_size=8000), calibration(), cluster)\n"
        "seconds = time.process_time() - began\n"
        # Not ru_maxrss: that begins with the size of the process which started this one.
        "status = dict(line.split(':') for line in Path('/proc/self/status').read_text().splitlines())\n"
        "print(seconds, status['VmHWM'].split()[0])\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root, timeout=60
    )
    seconds, kilobytes = map(float, done.stdout.split())
    assert seconds < 5.0
    assert kilobytes < 500 * 1024


def test_the_table_and_the_json_have_what_was_asked_for() -> None:
    report = make_report(profile(), calibration(), HERE)
    shown = in_words(report, [], module=False, top=3, price=3.0, layers=True, checked=None)
    for word in ("samples/s", "speed-up", "from – to", "memory of a device", "0 (Linear)", "paceline run train.py"):
        assert word in shown, word
    found = json.loads(as_json(report, [], module=False, price=3.0, checked=None))
    assert found["command"]
    assert found["saturation"]
    assert found["price"] > 0
    assert found["profile"]["flops_per_weight"] == 6.0
    assert len(few(report.ordered, report.best, 3)) == 3


@pytest.mark.parametrize("name", ["speedup.png", "speedup.svg"])
def test_a_plot_is_a_picture_of_the_kind_its_name_says(tmp_path: Path, name: str) -> None:
    curve = speedup_curve(StepPredictor(profile(), calibration(), slow_links(8)))
    draw([curve], tmp_path / name, "train.py")
    start = (tmp_path / name).read_bytes()[:200]
    assert start.startswith(b"\x89PNG") or b"svg" in start or b"xml" in start
    assert "8 devices" in in_terminal([curve])


def test_a_calibration_can_be_read_again_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    write(calibration(), path)
    assert read(path) == calibration()
    path.write_text("{}")
    with pytest.raises(InvalidInput, match="paceline calibrate"):
        read(path)


def test_a_trace_replaces_what_was_measured(tmp_path: Path) -> None:
    events = [{"name": f"ProfilerStep#{n}", "ph": "X", "ts": 1e4 * n, "dur": 9000, "cat": "user"} for n in range(4)]
    events += [{"name": "Optimizer.step#AdamW.step", "ph": "X", "ts": 1e4 * n, "dur": 1000} for n in range(4)]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = with_trace(profile(), path)
    assert StepPredictor(found, calibration(), HERE).compute.of(64, 1).seconds == pytest.approx(0.008)
    twice = with_trace(profile(accumulate=2), path)  # a step of the trace is both of its passes
    assert StepPredictor(twice, calibration(), HERE).compute.of(128, 1).seconds == pytest.approx(0.008)
    there = Cluster(hosts=1, cores=2, memory_bytes=1, device="a100")
    assert StepPredictor(found, calibration(), there).compute.of(64, 1).seconds == pytest.approx(0.008)
    assert found.update.seconds == pytest.approx(0.001)
    path.write_text('{"traceEvents": []}')
    with pytest.raises(InvalidInput, match="call prof"):
        with_trace(profile(), path)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"hosts": 0}, "hosts is 0: give 1 to 1024"),
        ({"hosts": 4}, "say what is between them"),
        ({"cores": 5000}, "give 1 to 1024"),
        ({"hosts": 2, "link": "fast"}, "100mbit, 1gbit, 10gbit"),
        ({"device": "a10"}, "a100"),
    ],
)
def test_impossible_machines_are_refused_with_what_would_be_right(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        Cluster(**{"hosts": 1, "cores": 2, "memory_bytes": 1, **given})  # type: ignore[arg-type]


def test_a_plot_of_another_kind_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"\.png or \.svg"):
        check_plot("speedup.gif")
