"""`--secure`: TLS between the hosts of a run, with keys that nobody has to hand out.

Every host makes the run's authority (CA) out of the run's secret, which all of them have (`--token`), and has it sign
keys of its own for the servers and replicas it starts. So each finds the others' signatures right, no key travels, and
whoever does not know the secret cannot make any. They are in the run folder while it runs, without the authority's key.
Guessing a weak secret costs an attacker 16 MB and a twentieth of a second each time (scrypt).
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from paceline.cli.keys import make_keys
from paceline.cli.run_plan import RunPlan
from paceline.errors import SecurityError
from paceline.net.secure import read_token

_OF_THE_RUN = "of-a-run"  # the authority's name, which has to be the same on all hosts
_SALT = b"paceline run --secure"


@contextmanager
def with_keys(plan: RunPlan, folder: Path) -> Iterator[RunPlan]:
    """The plan with `--keys` in the place of `--secure`, for as long as this lasts."""
    if not plan.secure:
        yield plan
        return
    if importlib.util.find_spec("cryptography") is None:
        raise SecurityError("--secure needs the package cryptography: pip install 'paceline[tls]'")
    assert plan.token is not None
    keys = folder / f"keys-{plan.host}"
    try:
        make_keys(keys, _OF_THE_RUN, days=30, force=True, seed=seed_of(read_token(Path(plan.token))))
        (keys / "ca.key").unlink()
        yield replace(plan, keys=str(keys), token=None)
    finally:
        shutil.rmtree(keys, ignore_errors=True)


def seed_of(token: str) -> bytes:
    """What the authority's key is made of."""
    return hashlib.scrypt(token.encode(), salt=_SALT, n=1 << 14, r=8, p=1, dklen=40)
