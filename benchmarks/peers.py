"""The peers that live in environments of their own: `python -m benchmarks.peers [NAME …]` (`make peers`) makes them.

TensorFlow and Ray bring versions of packages that need not get along with one another or with the project's, so each
has a folder under `.peers/`. torch's RPC comes with torch, and needs none. Without a peer its benchmark runs all the
same, and says who was missing.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent.parent / ".peers"
INSTALL_WITHIN_S = 1800.0


@dataclass(frozen=True)
class Peer:
    """An environment: the package it is for, what is installed, the first of `packages` for which there is a wheel."""

    module: str
    packages: tuple[tuple[str, ...], ...]

    @property
    def python(self) -> Path:
        return FOLDER / self.module / "bin" / "python"

    def version(self) -> str | None:
        """None: it is not installed."""
        if not self.python.exists():
            return None
        source = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
        for wanted, *_ in self.packages:
            name = wanted.partition("==")[0].partition("[")[0]
            asked = subprocess.run([self.python, "-c", source, name], capture_output=True, text=True)
            if asked.returncode == 0:
                return asked.stdout.strip()
        return None


PEERS: Mapping[str, Peer] = {
    "TensorFlow": Peer("tensorflow", (("tensorflow-cpu==2.21.0",), ("tensorflow==2.21.0",))),
    "Ray": Peer("ray", (("ray==2.60.0", "numpy==2.4.6"),)),
    "Ray Serve": Peer("ray_serve", (("ray==2.60.0", "ray[serve]==2.60.0", "torch==2.13.0", "numpy==2.4.6"),)),
    "LitServe": Peer("litserve", (("litserve==0.2.19", "torch==2.13.0", "numpy==2.4.6"),)),
    "FastAPI": Peer("fastapi", (("fastapi==0.162.7", "uvicorn[standard]", "torch==2.13.0", "numpy==2.4.6"),)),
    "Ray Tune": Peer("ray_tune", (("ray[tune]==2.60.0", "numpy==2.4.6"),)),
}


def main(names: Sequence[str]) -> int:
    for name in names or PEERS:
        if name not in PEERS:
            print(f"there is no peer {name!r}: give some of {', '.join(PEERS)}", file=sys.stderr)
            return 2
        peer = PEERS[name]
        version = peer.version()
        if version is None:
            problem = _install(peer)
            version = peer.version()
        print(f"{name} {version}" if version is not None else f"skipped {name}: {problem}", flush=True)
    return 0


def _install(peer: Peer) -> str:
    """Make its environment. Returns what went wrong, in a line."""
    home = peer.python.parent.parent
    problem = ""
    try:
        subprocess.run([sys.executable, "-m", "venv", home], check=True, capture_output=True, text=True)
        for packages in peer.packages:
            # Without pip's cache, which would keep another half gigabyte.
            command = [str(peer.python), "-m", "pip", "install", "--quiet", "--no-cache-dir", "--only-binary", ":all:"]
            done = subprocess.run(
                [*command, *packages], capture_output=True, text=True, timeout=INSTALL_WITHIN_S, check=False
            )
            if done.returncode == 0:
                return ""
            problem = _last_error(done.stderr)
    except (subprocess.SubprocessError, OSError) as error:
        problem = str(error)
    return problem


def _last_error(stderr: str) -> str:
    errors = [line for line in stderr.splitlines() if line.startswith("ERROR")]
    return errors[-1] if errors else "pip ended without a word"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
