"""The public surface is small, and stays so unless somebody changes this file."""

import subprocess
import sys

import paceline


def test_exported_names() -> None:
    values = ["Async", "Centralized", "Layout", "Mirrored", "Stages", "Sync", "Tiles", "Wavefront"]
    doors = ["PacelineError", "Trainer", "__version__", "distribute", "load", "place", "trial", "whole"]
    many = ["DeadlineExceeded", "Ensemble", "deadline"]
    together = ["barrier", "broadcast", "gather", "mean"]
    assert sorted(paceline.__all__) == sorted(values + doors + together + many)
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None


def test_importing_paceline_does_not_wait_for_torch() -> None:
    code = "import sys, paceline, paceline.cli.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
