"""torch's own tests of torch.distributed, on Gloo and on the backend paceline: `make torch-suite`.

The installed torch ships one of its suites, DistributedTest: collectives, sends, subgroups, objects, profiling and
DistributedDataParallel in all its forms, each test in processes of its own. (Those of c10d, FSDP and pipelining lie in
torch's repository only.) The suite asks in its decorators which backend it runs on, and leaves out for an unknown one
what it would do for Gloo. So it is told "gloo" while it is loaded, and what is to be run afterwards. Both run the same
tests.

`python -m benchmarks.torch_suite [WORD ...]` runs the tests with one of these words in their names; all without.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
import types
import unittest
from collections import Counter
from datetime import timedelta
from typing import Any

BACKENDS = ("gloo", "paceline")
RANKS = 3
TEST_WITHIN_S = 90
SUITE_WITHIN_S = 7200.0


class LikeGloo(str):
    """The name of a backend, for tests that ask for Gloo's where they mean the CPU."""

    def __eq__(self, other: object) -> bool:
        return other in (str(self), "gloo")

    def __hash__(self) -> int:
        return hash(str(self))


def main() -> None:
    """Run the suite on both backends; print what passed, and what failed and why."""
    import torch

    found = {backend: _outcomes(backend, sys.argv[1:]) for backend in BACKENDS}
    print(f"\ntorch {torch.__version__}, DistributedTest, {RANKS} processes\n\n| backend | passed | failed | skipped |")
    print("| --- | ---: | ---: | ---: |")
    for backend, outcomes in found.items():
        count = Counter(outcome["outcome"] for outcome in outcomes.values())
        print(f"| {backend} | {count['passed']} | {count['failed']} | {count['skipped']} |")
    print("\n| failed | on | because |\n| --- | --- | --- |")
    for name in found[BACKENDS[0]]:
        wrong = {backend: found[backend][name] for backend in BACKENDS if found[backend][name]["outcome"] == "failed"}
        if wrong:
            print(f"| {name} | {', '.join(wrong)} | {[*wrong.values()][-1]['why']} |")


def _outcomes(backend: str, words: list[str]) -> dict[str, dict[str, str]]:
    """What became of each test, by its name: passed, failed or skipped, and why."""
    said = subprocess.Popen(
        [sys.executable, "-m", __spec__.name, *words],
        env={
            **os.environ,
            "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
            "SUITE_BACKEND": backend,
            "BACKEND": "gloo",
            "WORLD_SIZE": str(RANKS),
            "OMP_NUM_THREADS": "1",
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(TEST_WITHIN_S),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert said.stdout is not None
    outcomes = {}
    for line in said.stdout:
        if line.startswith('{"test"'):
            outcome = json.loads(line)
            outcomes[outcome["test"]] = outcome
            print(f"{backend:9} {outcome['outcome']:8} {outcome['test']}  {outcome['why']}", flush=True)
    said.wait(SUITE_WITHIN_S)
    return outcomes


def run_suite(backend: str, words: list[str]) -> None:
    """Run the tests of the suite on one backend; a line of JSON says of each what became of it."""
    # torch's tests import a package that is used for texts that rewrite themselves. No test here does that.
    sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase, ACCEPT=False)  # type: ignore[assignment]
    from torch import distributed as dist
    from torch.testing._internal.distributed import distributed_test as suite

    import paceline.torch_backend

    os.environ["BACKEND"] = "mpi"  # the only one for which tests of subgroups are not left out with few ranks
    if backend != "gloo":
        suite.BACKEND = LikeGloo(paceline.torch_backend.register())
        for able in suite.DistTestCases.backend_feature.values():
            able |= {backend} if "gloo" in able else set()

        # torch.distributed.monitored_barrier refuses every backend but Gloo by its name; so the group's own is taken.
        def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
            if group != dist.GroupMember.NON_GROUP_MEMBER:
                limit = timedelta(seconds=timeout) if isinstance(timeout, float) else timeout
                (group or dist.group.WORLD).monitored_barrier(limit, wait_all_ranks)

        dist.monitored_barrier = monitored_barrier

    class Suite(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)  # no import of torch in each

    class Said(unittest.TestResult):
        def _say(self, test: unittest.TestCase, outcome: str, why: str) -> None:
            name = test.id().rsplit(".", 1)[-1]
            print(json.dumps({"test": name, "outcome": outcome, "why": why}), flush=True)

        def addSuccess(self, test: unittest.TestCase) -> None:
            self._say(test, "passed", "")

        def addSkip(self, test: unittest.TestCase, reason: str) -> None:
            self._say(test, "skipped", reason)

        def addFailure(self, test: unittest.TestCase, err: Any) -> None:
            print(err[1], flush=True)
            raised = re.findall(r"^(\w[\w.]*(?:Error|Exception|Late|Died|Broken)\b.*)", str(err[1]), re.MULTILINE)
            self._say(test, "failed", (raised[-1] if raised else str(err[1]).partition("\n")[0])[:200])

        addError = addFailure

    names = [
        name for name in unittest.TestLoader().getTestCaseNames(Suite) if not words or any(w in name for w in words)
    ]
    unittest.TestSuite(Suite(name) for name in names).run(Said())


if __name__ == "__main__":
    if "SUITE_BACKEND" in os.environ:
        run_suite(os.environ["SUITE_BACKEND"], sys.argv[1:])
    else:
        main()
