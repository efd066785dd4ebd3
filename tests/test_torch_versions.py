"""The oldest and the newest torch that we claim are installed, and what touches private parts is tested there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.torch_private import TESTED

ROOT = Path(__file__).parent.parent
CUTS = tuple(f"tests/split/test_{way}.py" for way in ("layouts", "stages", "tiles", "wavefront"))
NEEDED = ("tests/optim", "tests/launch/test_quick_start.py", "tests/test_torch_private.py", "tests/torch_group", *CUTS)
CONTRACT = ("tests/contract/test_contract.py", "-k", "one_process and uneven")  # every model, with three replicas
TOOLS = ("numpy", "msgspec", "safetensors", "rich", "pytest", "pytest-timeout", "hypothesis", "psutil", "cryptography")


@pytest.mark.soak
@pytest.mark.timeout(7200)  # several gigabytes are downloaded: PyPI has no torch without CUDA
@pytest.mark.parametrize("version", TESTED, ids=lambda version: ".".join(map(str, version)))
def test_what_we_use_of_torch_is_in_the_oldest_and_the_newest(version: tuple[int, int], tmp_path: Path) -> None:
    python = str(tmp_path / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path)], check=True)
    torch = f"torch=={version[0]}.{version[1]}.*"
    subprocess.run([python, "-m", "pip", "install", "-q", torch, *TOOLS, "-e", str(ROOT)], check=True)
    for tests in (NEEDED, CONTRACT):
        ended = subprocess.run(
            [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "900", "-m", "not soak", *tests],
            cwd=ROOT,
            text=True,
            capture_output=True,
        )
        assert ended.returncode == 0, ended.stdout[-5000:]
