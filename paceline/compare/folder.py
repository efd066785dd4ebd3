"""Where measurements stay: a comparison that was stopped, or killed, goes on where it was.

runs/20251115-184203-train-compare/
  compare.json          what was asked for
  async-0/              the run folder of async's repeat 0
  async-0.out           what that run printed
  async-0.json          what came of it; a run without one is made again
  report.json, report.md, curves.png, curves.svg
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import msgspec

from paceline.compare.measuring import Measurement
from paceline.compare.ways import Way
from paceline.watch.kept_folder import open_kept, write_whole

ASKED = "compare.json"


class CompareFolder:
    """The folder of one comparison."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def open(cls, given: str | None, script: str, asked: dict[str, Any]) -> CompareFolder:
        """A new one, or one in which the same was asked for before."""
        path = Path(given) if given is not None else _new_name(script)
        open_kept(path, ASKED, "a comparison", asked)
        return cls(path)

    def run_folder(self, way: Way, repeat: int) -> Path:
        return self.path / f"{way.file_name}-{repeat}"

    def read(self, way: Way, repeat: int) -> Measurement | None:
        """What was measured before, if it was to the end."""
        path = self.run_folder(way, repeat).with_suffix(".json")
        return msgspec.json.decode(path.read_bytes(), type=Measurement) if path.exists() else None

    def clear(self, way: Way, repeat: int) -> Path:
        """Make room for a run: what an interrupted one has left is no measurement."""
        path = self.run_folder(way, repeat)
        shutil.rmtree(path, ignore_errors=True)
        return path

    def keep(self, way: Way, measurement: Measurement) -> None:
        write_whole(self.run_folder(way, measurement.repeat).with_suffix(".json"), msgspec.json.encode(measurement))

    def write(self, name: str, data: bytes) -> Path:
        write_whole(self.path / name, data)
        return self.path / name


def _new_name(script: str) -> Path:
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{Path(script).stem}-compare"
    path, attempt = Path("runs") / name, 1
    while path.exists():
        attempt += 1
        path = Path("runs") / f"{name}-{attempt}"
    return path
