"""What is said of the package: its metadata, its README, and that what they name is there."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

import paceline

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(paceline.__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_package_says_that_it_is_typed_and_on_what_it_runs() -> None:
    assert (ROOT / "paceline" / "py.typed").exists()
    classifiers = PROJECT["classifiers"]
    assert "Typing :: Typed" in classifiers
    assert "Operating System :: POSIX :: Linux" in classifiers
    versions = re.findall(r"Python :: (3\.\d+)$", "\n".join(classifiers), re.MULTILINE)
    assert [f">={version}" for version in versions[:1]] == [PROJECT["requires-python"]]
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in versions


def test_the_readme_says_how_to_install_and_promises_no_device_that_was_never_tried() -> None:
    assert "pip install" in README
    first, _, rest = README.partition("```")
    assert rest
    assert not re.search(r"\b(?:GPU|CUDA|TPU)s?\b", first)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_link_of_a_page_leads_somewhere(page: Path) -> None:
    """They are relative: the address at which the project will be read is not known."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    for target in targets:
        if target.startswith(("https://", "http://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there), target


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as they are made where Markdown is shown."""
    headings = re.findall(r"^#+ +(.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_command_of_the_makefile_is_there() -> None:
    """`make torch-suite`, `make zoo` …: whatever they start is a file of this repository."""
    makefile = (ROOT / "Makefile").read_text()
    targets = re.search(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)
    assert targets is not None
    assert {"test", "soak", "bench", "torch-suite"} <= set(targets[1].split())
    modules = re.findall(r"python -m (benchmarks[\w.]*)", makefile)
    files = re.findall(r"python (\w[\w/]*\.py)", makefile)
    assert "benchmarks.torch_suite" in modules
    wanted = chain((module.replace(".", "/") for module in modules), (file.removesuffix(".py") for file in files))
    for path in wanted:
        assert (ROOT / f"{path}.py").exists() or (ROOT / path / "__main__.py").exists(), path


@pytest.mark.soak  # torch's tests alone take a quarter of a minute to load
def test_a_test_of_torchs_own_suite_runs_on_both_backends() -> None:
    """`make torch-suite` with one word: it tells passed tests from failed ones, on Gloo and on ours."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.torch_suite", "test_scatter_checks"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "| gloo | 1 | 0 | 0 |\n| paceline | 1 | 0 | 0 |" in done.stdout, done.stdout
