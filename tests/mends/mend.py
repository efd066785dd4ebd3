"""A mend: what was wrong once, the lines that put it right, and the tests that fail without them.

Rows are plain data, in the TOML files of this folder. `mend` is what stands in `file`, exactly once; `without` is what
takes its place so that the defect is back (`also`: in other places too, where two guards stand behind each other).
Each of `tests` must then fail, and what its failure says must match `says`: so that it fails because of the defect,
and not because of a name that does not exist.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import msgspec

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COPIED = ("paceline", "tests")  # all else of the repository is only read
LIMIT_S = 600.0


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Lines of a file, and what takes their place."""

    file: str
    mend: str
    without: str


class Mend(Change, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row."""

    wrong: str
    tests: list[str]
    says: str
    also: list[Change] = []

    @property
    def changes(self) -> list[Change]:
        return [self, *self.also]


class _Rows(msgspec.Struct, forbid_unknown_fields=True):
    mend: list[Mend]


def all_mends() -> list[Mend]:
    """Return the rows of all files."""
    paths = sorted(HERE.glob("*.toml"))
    return [mend for path in paths for mend in msgspec.toml.decode(path.read_text(), type=_Rows).mend]


def what_does_not_fit(mend: Mend) -> str | None:
    """Return why a row is not about the code as it is now, if so."""
    for change in mend.changes:
        path = ROOT / change.file
        if not path.exists():
            return f"{change.file} does not exist"
        if (count := path.read_text().count(change.mend)) != 1:
            return f"{change.file} has the mend {count} times"
        try:
            ast.parse(path.read_text().replace(change.mend, change.without))
        except SyntaxError as error:
            return f"{change.file} would be no Python without the mend: {error}"
    re.compile(mend.says)
    return next((f"{test} does not exist" for test in mend.tests if not _exists(test)), None)


def _exists(test: str) -> bool:
    """Return whether there is such a function; which parameters it has is known when it runs."""
    file, _, name = test.partition("::")
    return name.partition("[")[0] in _functions(file)


@cache
def _functions(file: str) -> set[str]:
    path = ROOT / file
    if not path.exists():
        return set()
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def failures_without(mend: Mend, folder: Path) -> dict[str, list[str]]:
    """Take the mend out of a copy of the package in `folder`, run its tests there, and return what the failures of each
    say."""
    for path in ROOT.iterdir():
        if path.name in COPIED:
            shutil.copytree(path, folder / path.name)
        elif not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    for change in mend.changes:
        path = folder / change.file
        path.write_text(path.read_text().replace(change.mend, change.without))
    results = folder / "results.xml"
    command = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", f"--junitxml={results}", *mend.tests]
    # Before whatever is installed, in all processes that a test starts too.
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    which = [sys.executable, "-c", "import paceline; print(paceline.__file__)"]
    imported = subprocess.run(which, cwd="/", env=environment, check=True, capture_output=True, text=True).stdout
    assert imported.startswith(str(folder)), f"processes would import {imported}"
    ran = subprocess.run(
        command, cwd=folder, env=environment, timeout=LIMIT_S, check=False, capture_output=True, text=True
    )
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    said: dict[str, list[str]] = {test: [] for test in mend.tests}
    for case in ElementTree.parse(results).iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        for test in said:
            if name == test or name.startswith(f"{test}["):
                said[test] += [_errors(found.text or "") for found in case if found.tag in ("failure", "error")]
    return said


def _errors(report: str) -> str:
    """Return what a failure says, without the lines of the test around it, in which anything may stand."""
    marked = [line[1:] for line in report.splitlines() if line.startswith("E ")]
    return "\n".join(marked) or report  # one of `pytest.fail` has only what it says
