"""A server for tests: `paceline serve` as a user starts it, in a folder of its own, and what tests ask of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from safetensors.numpy import save_file

LONG_S = 90.0
SCRIPT = Path(__file__).parent / "served_script.py"


def save_weight(path: Path, weight: float) -> None:
    """Writes a checkpoint as a careful program does: it is there as a whole or not at all."""
    new = path.with_name(f"{path.name}.new")
    save_file({"weight": np.array([weight], np.float32)}, new)
    os.replace(new, path)


class Served:
    """One running server."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        script: Path = SCRIPT,
        checkpoint: Path | None = None,
        models: Sequence[Path] | None = None,
    ) -> None:
        """`models`: what stands first on the command line, by default the one checkpoint."""
        self.folder, self.hold_file = folder, folder / "hold"
        self.checkpoint = checkpoint or folder / "model.safetensors"
        if checkpoint is None and models is None:
            save_weight(self.checkpoint, 1.0)
        given = [self.checkpoint] if models is None else models
        self.errors = (folder / "stderr").open("wb+")
        command = [sys.executable, "-m", "paceline", "serve", *map(str, given), "--script", str(script)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HOLD_FILE": str(self.hold_file)}
        self.process = subprocess.Popen(
            [*command, "--port", "0", "--json", *flags], stdout=subprocess.PIPE, stderr=self.errors, env=environment
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:  # it has not started
            self.process.wait(LONG_S)
            self.process.stdout.close()
            self.errors.close()
            raise AssertionError(self.said)
        self.told = json.loads(line)
        self.client = httpx.Client(base_url=self.told["address"], timeout=LONG_S, verify=False)

    @property
    def said(self) -> str:
        return (self.folder / "stderr").read_text()

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> int:
        """Ends it as an operator does, and returns its exit code."""
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(LONG_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.errors.close()
        return code

    def ask(self, *rows: list[float], deadline_s: float = LONG_S, version: str = "") -> httpx.Response:
        """Asks by the protocol, with as much time as a test may take unless it is said otherwise."""
        data = [number for row in rows for number in row]
        body = {"inputs": [{"name": "x", "shape": [len(rows), 4], "datatype": "FP32", "data": data}]}
        at = f"/versions/{version}" if version else ""
        headers = {"Paceline-Deadline": str(deadline_s)}
        return self.client.post(f"/v2/models/{self.told['name']}{at}/infer", json=body, headers=headers)

    def metric(self, name: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    def wait_for(self, fact: Callable[[], bool]) -> None:
        """Waits until something is so, which the test has set in motion."""
        end = time.monotonic() + LONG_S
        while not fact():
            assert time.monotonic() < end, self.said
            time.sleep(0.005)

    def hold(self) -> None:
        """From now on whoever computes a row that begins with 555 waits for `release`."""
        self.hold_file.touch()

    def release(self) -> None:
        self.hold_file.unlink()


def outputs(response: httpx.Response) -> dict[str, Any]:
    """The tensors of an answer, as flat lists by name."""
    assert response.status_code == 200, response.text
    return {tensor["name"]: tensor["data"] for tensor in response.json()["outputs"]}
