"""Kills of servers and replicas at chosen moments: results, books and files are those of a run without them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import psutil
import pytest
from checksum import largest_difference
from conftest import Run, Start

from paceline.central.durability.recovery import recover

SCRIPT = Path(__file__).parent / "durable_training.py"
LOG = "--servers 2 --durability log --max-restarts 100"
LEDGER = "epochs 0 to 2: 60 samples, each once"
END_S = 150.0  # processes are started again while others of this machine work


@pytest.fixture(scope="module")
def unkilled(start: Start) -> Run:
    return start(SCRIPT, "--replicas 2 --servers 2").fine(END_S)


def kills(*given: tuple[str, int, str]) -> str:
    return f"--kill '{json.dumps(given)}'"


def check_told(run: Run, final: int) -> None:
    """No replica was told of a step that was forgotten later: nothing goes back."""
    for path in run.folder.glob("told-*"):
        told = [int(line) for line in path.read_text().split()]
        assert told == sorted(told), path
        assert not told or told[-1] <= final, path


def check_end(run: Run, expected: int) -> list[int]:
    """Everything that holds under any rule; the replicas that were there at the end."""
    there = [replica for replica in range(3) if list(run.path.glob(f"replica-{replica}.log")) and run.said(replica)]
    assert there
    for replica in there:
        assert run.told("ledger", replica) == LEDGER
        assert run.told("steps", replica) >= 15
        check_told(run, run.told("steps", replica))
    assert len(list(run.folder.glob("kill-*"))) == expected
    assert not list(run.path.glob("server-?"))  # logs of a run that ended well are not needed
    check_nothing_left(run)
    return there


def check_nothing_left(run: Run) -> None:
    run.assert_nothing_left()
    servers = {event["pid"] for event in run.events if event["event"] == "server started"}
    assert len(servers) >= 2
    for process in psutil.process_iter(["pid", "cmdline"]):
        left = process.info["pid"] in servers and "paceline.central.server.process" in (process.info["cmdline"] or [])
        assert not left, process


CASES = {
    "the chief computing": ("", [("server 0", 3, "forward")]),
    "another server computing": ("", [("server 1", 3, "forward")]),
    "the chief with gradients": ("", [("server 0", 3, "after push")]),
    "another server with gradients": ("", [("server 1", 3, "after push")]),
    "all servers": ("", [("server 0,server 1", 3, "before push"), ("server 0,server 1", 4, "after push")]),
    "servers at the start": ("", [("server 0,server 1", 0, "forward")]),
    "a replica that never comes": ("--on-failure continue", [("replica 1", 0, "start")]),
    "a replica that comes late": ("--on-failure restart", [("replica 1", 0, "start")]),
    "whoever gives the initial values": ("--on-failure continue", [("itself", 0, "filling")]),
    "whoever has given them": ("--on-failure continue", [("itself", 0, "filled")]),
    "a server, and whoever fills it": ("--on-failure continue", [("server 0", 0, "filling"), ("itself", 0, "filled")]),
    "another server, and whoever fills it": (
        "--on-failure restart",
        [("server 1", 0, "filling"), ("itself", 0, "filled")],
    ),
    "a server and a replica before the first step": (
        "--on-failure continue",
        [("server 0,replica 1", 0, "start")],
    ),
    "servers in an evaluation": ("", [("server 0", 5, "evaluation"), ("server 1", 10, "evaluation")]),
    "servers over tcp": ("--exchange tcp", [("server 0", 3, "after push"), ("server 1", 7, "forward")]),
    "a replica computing": ("--on-failure restart", [("replica 1", 3, "forward")]),
    "a replica before its push": ("--on-failure restart", [("replica 0", 3, "before push")]),
    "a replica after its push": ("--on-failure restart", [("replica 0", 3, "after push")]),
    "a replica for good": ("--on-failure continue", [("replica 1", 3, "forward")]),
    "a replica and the chief": ("--on-failure restart", [("replica 0,server 0", 6, "after push")]),
    "a replica for good and the chief": ("--on-failure continue", [("replica 1,server 0", 6, "after push")]),
    "all replicas": ("--on-failure restart", [("replica 1,replica 0", 6, "forward")]),
    "everybody": ("--on-failure restart", [("replica 1,replica 0,server 0,server 1", 6, "after push")]),
}


# A run with restarts takes its time: `make soak` has them all.
IN_EVERY_TEST_RUN = ("another server computing", "a server and a replica before the first step")


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "case",
    [case if case in IN_EVERY_TEST_RUN else pytest.param(case, marks=pytest.mark.soak) for case in CASES],
)
def test_a_sync_run_ends_as_if_nobody_had_been_killed(start: Start, unkilled: Run, case: str) -> None:
    flags, given = CASES[case]
    run = start(SCRIPT, f"--replicas 2 {LOG} {flags}", kills(*given)).fine(END_S)
    for replica in check_end(run, len(given)):
        assert run.told("evaluations", replica) == pytest.approx(unkilled.told("evaluations"), rel=1e-4)
        assert run.told("steps", replica) == 15
    assert largest_difference(unkilled.folder / "last.safetensors", run.folder / "last.safetensors") < 1e-4


SOME = [("server 0", 2, "forward"), ("server 1", 5, "after push"), ("replica 1", 8, "forward")]


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "flags",
    [
        "--replicas 3 --accept 2",
        "--replicas 2 --async",
        "--replicas 2 --async --exchange tcp --stale compensate",
        "--replicas 2 --bounded 1 --stale scale --wire bf16 --exchange tcp",
    ],
)
def test_other_rules_count_every_sample_once_and_learn_the_same(start: Start, unkilled: Run, flags: str) -> None:
    run = start(SCRIPT, f"{flags} {LOG} --on-failure restart", kills(*SOME)).fine(END_S)
    for replica in check_end(run, len(SOME)):
        assert run.told("evaluations", replica)[-1] == pytest.approx(unkilled.told("evaluations")[-1], rel=0.1)


def test_without_a_log_the_end_of_a_server_is_the_end_of_the_run_and_says_so(start: Start) -> None:
    run = start(SCRIPT, "--replicas 2 --servers 2", kills(("server 1", 3, "forward"))).end(END_S)
    assert run.code == 128 + 9
    assert "server 1 was killed by SIGKILL at step 3; its parameters are gone (--durability log would" in run.err
    check_nothing_left(run)


ROLL_BACK = """
                    import shutil
                    (now,) = Path("run/server-0").glob("*")
                    (before,) = Path("before").glob("*")
                    shutil.rmtree(now)
                    shutil.copytree(before, now)"""
DAMAGE = {  # which server's files, how, and what the run says
    "a damaged log": (
        1,
        """
                    (log,) = Path("run/server-1").glob("*/log-*")
                    with log.open("r+b") as file:
                        file.seek(100)
                        file.write(b"nonsense")""",
        "log-1 is damaged at byte 0",
    ),
    "a damaged snapshot": (
        1,
        """
                    (snapshot,) = Path("run/server-1").glob("*/snapshot-*")
                    with snapshot.open("r+b") as file:
                        file.seek(-9, 2)
                        file.write(b"\\x3f")""",
        "snapshot-1 is damaged at byte 0: its checksum is not that of its content",
    ),
    "a log that is gone": (
        0,
        """
                    (log,) = Path("run/server-0").glob("*/log-*")
                    log.unlink()""",
        "log-1 is missing, and was there",
    ),
    "a log that was cut": (
        0,
        """
                    (log,) = Path("run/server-0").glob("*/log-*")
                    os.truncate(log, log.stat().st_size // 2)""",
        r"log-1 is damaged at byte \d+: it ends with record \d+, and \d+ was acknowledged",
    ),
    "an older state of everything": (0, ROLL_BACK, "server 0 is at step 1 after it was started again, and had ack"),
}


@pytest.mark.parametrize(
    "case", [case if case == "a damaged log" else pytest.param(case, marks=pytest.mark.soak) for case in DAMAGE]
)
def test_damage_ends_the_run_with_the_name_of_the_file(start: Start, case: str) -> None:
    server, damage, sentence = DAMAGE[case]
    script = SCRIPT.read_text().replace(
        "os.kill(pid_of(name), signal.SIGKILL)",
        f"""os.kill(pid_of(name), signal.SIGSTOP){damage}
                    os.kill(pid_of(name), signal.SIGKILL)""",
    )
    script = script.replace(
        'reached("between")',
        """if trainer.steps == 1 and place.rank == 0:
                    import shutil
                    shutil.copytree("run/server-0", "before")
                reached("between")""",
    )
    run = start(script, f"--replicas 2 {LOG}", kills((f"server {server}", 3, "forward"))).end(END_S)
    assert run.code == 1
    assert re.search(sentence, run.err), run.err
    assert "Traceback" not in run.err
    check_nothing_left(run)


def test_a_full_disk_is_one_sentence_and_nothing_that_was_told_is_lost(start: Start) -> None:
    script = SCRIPT.read_text().replace(
        "os.kill(pid_of(name), signal.SIGKILL)",
        """(log,) = Path("run/server-1").glob("*/log-*")
                    room = log.stat().st_size + 1000  # of the disk, as far as this process can tell
                    resource.prlimit(pid_of(name), resource.RLIMIT_FSIZE, (room, room))""",
    )
    script = script.replace("import signal\n", "import resource\nimport signal\n")
    run = start(script, f"--replicas 2 {LOG}", kills(("server 1", 3, "forward"))).end(END_S)
    assert run.code == 1
    assert "server-1/" in run.err
    assert "cannot be written (File too large)" in run.err
    assert "Traceback" not in run.err
    told = [int(line) for path in run.folder.glob("told-*") for line in path.read_text().split()]
    for server in range(2):
        (share,) = recover(run.path / f"server-{server}", lambda addresses, timeout_s: [])
        assert share.container.step == max(told) == 3
    check_nothing_left(run)
