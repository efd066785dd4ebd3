"""Plans: what an emulated host is told, what is not used, and that no text a user can type ends in a traceback."""

from __future__ import annotations

import argparse
import io
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.cli import SUBCOMMANDS, Parser, checks, main, run
from paceline.cli.engine_flags import ENGINE_FLAGS
from paceline.cli.run_plan import RunPlan, resolve
from paceline.cli.run_words import not_used
from paceline.errors import InvalidInput, StrategyError

ON_ENGINE = ("--on", "slurm", "--nnodes", "2", "--replicas", "2")
EMULATED = ("--emulate", "hosts=2,link=1gbit", "--replicas", "2")
# A value that is not the default, for every flag that takes one.
VALUES = {
    "--replicas": "4",
    "--nproc-per-node": "1",
    "--wire": "bf16",
    "--every": "8",
    "--lost-after": "5.0",
    "--outer-momentum": "0.9",
    "--outer-lr": "0.7",
    "--batchnorm": "local",
    "--exchange": "collective",
    "--timeout": "7.5",
    "--operation-timeout": "2.5",
    "--mesh": "model=2",
    "--layout": "hidden=model",
    "--stages": "2",
    "--micro-batches": "3",
    "--schedule": "gpipe",
    "--cut-at": "a.b",
    "--tiles": "2",
    "--wavefront": "2",
    "--time-block": "5",
    "--servers": "2",
    "--servers-on": "1",
    "--only": "sparse",
    "--accept": "1",
    "--bounded": "3",
    "--stale": "scale",
    "--stale-lr": "0.5",
    "--warmup-steps": "2",
    "--warmup-epochs": "2",
    "--durability": "log",
    "--join": "127.0.0.1:7070",
    "--container": "digits",
    "--token": "token",
    "--keys": "keys",
    "--on-failure": "stop",
    "--max-restarts": "3",
    "--save-on-stop": "last.safetensors",
    "--slow": "1:2.5x",
    "--until": "loss<=0.5",
    "--longest": "90s",
    "--most-steps": "7",
    "--nnodes": "2",
    "--node-rank": "1",
    "--rdzv-endpoint": "10.0.0.9:29511",
    "--master-addr": "10.0.0.9",
    "--master-port": "29511",
    "--emulate": "hosts=2,link=10gbit",
    "--devices": "cuda:0,cuda:1",
    "--on": "slurm",
    "--cores-per-node": "3",
    "--gpus-per-node": "1",
    "--runtime-env": '{"working_dir": "."}',
    "--srun": "partition=gpu",
    "--image": "train:1",
    "--manifest": "trainjob",
    "--run-folder": "elsewhere",
}
_OF_ENGINES = tuple(f"--{name.replace('_', '-')}" for name in ENGINE_FLAGS)
# What works on one host only, so far.
REFUSED = {
    *("--layout", "--micro-batches", "--schedule", "--cut-at", "--time-block"),  # of a cut that was not asked for
    *("--only", "--in-graph", "--join", "--container", "--operation-timeout"),
    "--master-port",  # without an address
    *_OF_ENGINES,
}
REFUSED_ON_ENGINES = {
    *("--layout", "--micro-batches", "--schedule", "--cut-at", "--time-block", "--only", "--in-graph"),
    *("--node-rank", "--rdzv-endpoint", "--master-addr", "--master-port", "--emulate"),  # which the engine says
    *("--runtime-env", "--image", "--manifest"),  # of others than Slurm
    "--container",  # of servers that were not named
    "--operation-timeout",  # of several hosts
}
_SERVED = ("--servers", "2")
WITH = {
    **dict.fromkeys(("--accept", "--async", "--bounded", "--warmup-steps", "--warmup-epochs"), _SERVED),
    **dict.fromkeys(("--durability", "--servers-on", "--token", "--keys", "--secure"), _SERVED),
    **dict.fromkeys(("--stale", "--stale-lr"), (*_SERVED, "--async")),
    **dict.fromkeys(("--outer-momentum", "--outer-lr"), ("--every", "8")),
    "--mesh": ("--layout", "hidden=model"),
    "--goes-on": ("--until", "loss<=0.5"),
    "--join": ("--token", "token", "--container", "digits"),
}


def parser() -> Parser:
    made = Parser("paceline run")
    run.add_arguments(made)
    return made


def plan_of(*arguments: str) -> RunPlan:
    options = parser().parse(arguments)
    options.arguments = ["--lr", "0.1"]
    return resolve(options)


FLAGS = {
    action.option_strings[-1]: action.nargs != 0
    for action in parser()._actions
    if action.option_strings and not isinstance(action, argparse._HelpAction)
}


def test_a_zero_is_passed_on_to_an_emulated_host() -> None:
    plan = plan_of("train.py", *EMULATED, "--timeout", "0.5", "--most-steps", "1", "--max-restarts", "0")
    assert plan_of(*plan.on_host(0, "10.213.0.1:29500", "folder").command()[1:-3]).max_restarts == 0


@pytest.mark.parametrize("flag", sorted(FLAGS))
def test_an_emulated_host_resolves_the_plan_of_its_maker_whatever_flag_was_given(flag: str) -> None:
    typed = [flag, VALUES[flag]] if FLAGS[flag] else [flag]
    arguments = ["train.py", *EMULATED, *typed, *WITH.get(flag, ())]
    if flag in REFUSED:
        with pytest.raises(StrategyError):
            plan_of(*arguments)
        return
    outer = plan_of(*arguments)
    for host in range(2):
        plan = outer.on_host(host, "10.213.0.1:29500", "folder")
        subcommand, *words, dashes, one, two = plan.command()
        assert (subcommand, dashes, one, two) == ("run", "--", "--lr", "0.1")
        own: dict[str, Any] = {"host": host, "rendezvous": "10.213.0.1:29500", "run_folder": "folder", "json": False}
        if outer.meets and outer.token is None and outer.keys is None:
            own["token"] = "folder"  # which its maker has put there
        assert plan_of(*words) == plan == replace(outer, **own, quiet=outer.quiet or host == 1)


@pytest.mark.parametrize("flag", sorted(FLAGS))
def test_a_host_of_an_engine_resolves_the_plan_of_its_driver_whatever_flag_was_given(flag: str) -> None:
    typed = [flag, VALUES[flag]] if FLAGS[flag] else [flag]
    arguments = ["train.py", *ON_ENGINE, *typed, *WITH.get(flag, ())]
    if flag in REFUSED_ON_ENGINES:
        with pytest.raises(StrategyError):
            plan_of(*arguments)
        return
    outer = plan_of(*arguments)
    for host in range(2):
        plan = outer.on_engine_host(host, "10.0.0.1:29500", "folder")
        words = plan.command()[1:-3]
        if outer.meets and outer.token is None and outer.keys is None:
            words = ["--token", "written-there", *words]  # by the agent
            plan = replace(plan, token="written-there")
        own: dict[str, Any] = {"host": host, "rendezvous": "10.0.0.1:29500", "run_folder": "folder"}
        own |= dict.fromkeys(ENGINE_FLAGS)
        own |= {"quiet": True, "json": False} if host else {}
        assert plan_of(*words) == plan == replace(outer, **own, token=plan.token)


JOINED = "--nnodes 1:2 --node-rank 0 --rdzv-endpoint 10.0.0.1:29500 --replicas 4"


def test_servers_count_where_memory_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "free_memory", lambda: 4 * checks.REPLICA_BYTES)
    checks.check(plan_of("train.py", "--replicas", "2", "--servers", "2"))
    with pytest.raises(StrategyError, match=r"servers is 3: torch alone takes .* in 5 processes .* give at most 4"):
        checks.check(plan_of("train.py", "--replicas", "2", "--servers", "3"))


HOSTS = "--nnodes 2 --node-rank 0 --rdzv-endpoint 10.0.0.1:29500 --replicas 4"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--every 8", "every is 8: replicas of one host share memory and send nothing"),
        ("--gossip", "gossip is 'set': replicas of one host share memory and send nothing"),
        ("--outer-lr 0.7 --every 8", "every is 8: replicas of one host share memory and send nothing"),
        (f"{HOSTS} --outer-momentum 0.9", "outer-momentum is 0.9: it is of steps that hosts make by themselves, add"),
        (f"{HOSTS} --outer-lr 0.7", "outer-lr is 0.7: it is of steps that hosts make by themselves, add --every"),
        (f"{HOSTS} --every 8 --outer-momentum 1", "outer-momentum is 1.0: give a number from 0 up to, but not, 1"),
        (f"{HOSTS} --every 8 --outer-lr 11", "outer-lr is 11.0: give a number above 0, up to 10"),
        (f"{HOSTS} --gossip --outer-lr 0.7", "outer-lr is 0.7: no step is made of what all hosts have come to, leave"),
        (f"{HOSTS} --gossip --wire bf16", "wire is 'bf16': neighbours exchange the parameters themselves, give fp32"),
        (f"{HOSTS} --every 8 --wire powersgd:4", "wire is 'powersgd:4': it is of gradients, and --every sends none"),
        (f"{HOSTS} --gossip --stages 2", "gossip is 'set': hosts exchange the gradients of a cut model at each step"),
        (f"{HOSTS} --wire powersgd:4 --stages 2", "wire is 'powersgd:4': matrices of a cut model lie in parts"),
        (f"{HOSTS} --servers 2 --token t --gossip", "gossip is 'set': with servers replicas push at each step"),
        ("--servers 1 --wire topk:0.01", "wire is 'topk:0.01': what it owes would not be in checkpoints of servers"),
        ("--servers 1 --wire powersgd:2", "wire is 'powersgd:2': what it owes would not be in checkpoints of servers"),
        ("--replicas 2 --wire topk", "wire is 'topk': give the share of the values that travels"),
        (f"{JOINED} --servers 2 --token t", "nnodes is '1:2': no host can join a run with servers, give one number"),
        (f"{JOINED} --stages 2", "nnodes is '1:2': no host can join a run of a cut model, which needs all its devices"),
        (f"{JOINED} --every 8", "nnodes is '1:2': no host can join a run with --every, where each host has steps"),
        (f"{JOINED} --gossip", "nnodes is '1:2': no host can join a run with --gossip, where each host has steps"),
        (f"{JOINED} --on-failure stop", "nnodes is '1:2': no host can join a run with --on-failure stop, where nobody"),
        (f"{JOINED} --exchange collective", "nnodes is '1:2': no host can join a run with --exchange collective"),
        ("--nnodes 1:2 --on ray", "nnodes is '1:2': no host can join a run on ray, which has as many nodes as are"),
        (
            "--emulate hosts=1:2,link=1gbit --servers 1",
            "emulate is 'hosts=1:2,link=1gbit': no host can join a run with",
        ),
        ("--nnodes 3:2", "nnodes is '3:2': give how many hosts there are, such as 4, or from how many on and up to"),
        ("--nnodes 0:2", "nnodes is '0:2': give how many hosts there are, such as 4, or from how many on and up to"),
        ("--nnodes 2:", "nnodes is '2:': give how many hosts there are, such as 4, or from how many on and up to"),
        ("--nnodes 1:1", "nnodes is '1:1': no host can join a run of one host, give one number"),
    ],
)
def test_what_does_not_go_together_between_hosts_is_refused(line: str, said: str) -> None:
    with pytest.raises(StrategyError) as caught:
        plan_of("train.py", *line.split())
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--replicas 2 --wire bf16", "wire bf16 (no gradient crosses a link)"),
        ("--replicas 2 --wire powersgd:4", "wire powersgd:4 (no gradient crosses a link)"),
        ("--replicas 2 --wire bf16 --exchange collective", ""),
        ("--replicas 2 --servers 1 --wire bf16", "wire bf16 (no gradient crosses a link)"),
        ("--replicas 2 --servers 1 --wire bf16 --exchange tcp", ""),
        ("--batchnorm local", "batchnorm local (there is one replica)"),
        (
            "--replicas 2 --servers 1 --batchnorm local",
            "batchnorm local (with servers each replica has its own statistics)",
        ),
        ("--exchange shared", "exchange shared (there is one process)"),
        ("--timeout 30", "timeout 30 s (one process waits for nobody)"),
        ("--servers 1 --timeout 30", ""),
        ("--on-failure stop", "on-failure stop (nobody would go on)"),
        ("--replicas 2 --on-failure stop", ""),
        ("--replicas 2 --max-restarts 3", "max-restarts 3 (nothing is started again, --on-failure restart would)"),
        ("--replicas 2 --max-restarts 3 --on-failure restart", ""),
        ("--replicas 2 --servers 2 --durability log --max-restarts 3", ""),
        ("--servers 1 --warmup-steps 3", "warmup-steps 3 (one replica makes all steps)"),
        ("--servers 1 --async --stale scale", "async (there is one replica), stale scale (gradients of one replica"),
        ("--servers 1 --in-graph", "in-graph (one replica is one process)"),
        ("--replicas 2 --in-graph --timeout 5", ""),
        ("--replicas 2 --in-graph --on-failure stop", "on-failure stop (nobody would go on)"),
        ("--stages 1 --schedule gpipe", "schedule gpipe (there is one stage)"),
        ("--wavefront 1 --time-block 4", "time-block 4 (there is one device)"),
        ("--node-rank 0", "host 0 (there is one host)"),
        ("--quiet --plain", "plain (--quiet shows no progress)"),
    ],
)
def test_a_setting_without_effect_is_named_with_the_reason(line: str, said: str) -> None:
    told = not_used(plan_of("train.py", *line.split()))
    expected = f"not used: {said}" if said else ""
    assert told[: len(expected) or None] == expected


def test_every_flag_can_be_tried() -> None:
    assert {flag for flag, takes_value in FLAGS.items() if takes_value} == set(VALUES)


ODD = ("²", "٣", "-1", "1" * 5000, "a" * 5000, "=", ",", ":", "a:1,", "💥", " ")
TEXTS = st.text(max_size=20) | st.sampled_from(ODD)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_typed_is_answered_with_a_sentence(data: st.DataObject, tmp_path: Path) -> None:
    """Two flags with any text at all, in any subcommand that starts with checking; the script is missing, so that
    what is accepted ends there."""
    name = data.draw(st.sampled_from(sorted(set(SUBCOMMANDS) - {"server", "keys"})))
    flags = sorted(FLAGS) if name == "run" else ["--replicas", "--at", "--token", "--tolerance", "--steps", "--json"]
    words = [name, data.draw(TEXTS)]
    for flag in data.draw(st.lists(st.sampled_from(flags), max_size=3, unique=True)):
        words += [flag, data.draw(TEXTS)] if FLAGS.get(flag, True) else [flag]
    told = io.StringIO()
    with redirect_stderr(told), redirect_stdout(told):
        try:
            code = main(words)
        except SystemExit as exit:
            code = exit.code  # type: ignore[assignment]
    assert code in (0, 2), words
    assert told.getvalue().startswith("paceline: ") or code == 0


@settings(max_examples=500, deadline=None)
@given(flag=st.sampled_from(sorted(flag for flag in FLAGS if FLAGS[flag])), text=TEXTS)
def test_any_text_after_a_flag_makes_a_plan_or_a_sentence(flag: str, text: str) -> None:
    """As above, but the script is there, and nothing is started."""
    typed = [*EMULATED, f"{flag}={text}"] if flag in ("--save-on-stop", "--run-folder") else [f"{flag}={text}"]
    told = io.StringIO()
    with redirect_stderr(told), suppress(InvalidInput, SystemExit):
        plan_of("train.py", *typed, *WITH.get(flag, ()))


def test_hosts_compare_whether_they_save_when_they_are_stopped_and_not_where_to(tmp_path: Path) -> None:
    def compared(*given: str) -> object:
        plan = plan_of("train.py", "--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "127.0.0.1:29500", *given)
        hosts = plan.job(plan.place(tmp_path)).hosts
        assert hosts is not None
        return hosts.settings

    one, other = (compared("--save-on-stop", f"{name}.safetensors") for name in ("one", "other"))
    assert one == other != compared()
