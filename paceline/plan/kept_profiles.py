"""Profiles of scripts: made by running the script up to its first step, and kept until the script changes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from paceline.cache_folder import cache_folder
from paceline.errors import LaunchError
from paceline.launch.job import run_alone
from paceline.plan.calibration import fingerprint, script_key
from paceline.profile.values import Profile, ProfileRequest
from paceline.run_place import Place

ADD_A_TRAINER = (
    "trainer = pl.Trainer(model, optimizer, loss), then `for batch in trainer.batches(data, batch_size=…): "
    "trainer.step(batch)`"
)


def profile_script(
    script: str,
    arguments: Sequence[str],
    cores: int,
    devices: Sequence[int],
    *,
    module: bool = False,
    budget_s: float = 10.0,
    mailbox_s: float = 60e-6,
) -> Profile:
    """Returns the profile of a script, which is run up to its first step; and keeps it."""
    with tempfile.TemporaryDirectory(prefix="paceline-profile-") as scratch:
        path = Path(scratch) / "profile.json"
        request = ProfileRequest(
            path=str(path), cores=cores, devices=tuple(devices), budget_s=budget_s, mailbox_s=mailbox_s
        )
        place = Place(row=0, rows=1, started_by="reference", profiling=request)
        command = ["-m", "paceline.launch.script", *(["-m"] if module else []), script, *arguments]
        outcome = run_alone(command, place)
        if not path.exists():
            raise LaunchError(_why_not(script, outcome.returncode, outcome.stderr))
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    profile = msgspec.structs.replace(profile, script=script, machine=fingerprint())
    if (kept := _path(script, arguments, module=module)) is not None:
        with suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            beside = kept.with_name(f".{kept.name}.{os.getpid()}")
            beside.write_bytes(msgspec.json.encode(profile))
            os.replace(beside, kept)
    return profile


def kept_profile(script: str, arguments: Sequence[str], *, module: bool = False) -> Profile | None:
    """Returns the profile of this script as it is, with these arguments, on this machine, if there is one."""
    path = _path(script, arguments, module=module)
    if path is None:
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Profile)
    except (OSError, msgspec.DecodeError, msgspec.ValidationError):
        return None


def _path(script: str, arguments: Sequence[str], *, module: bool) -> Path | None:
    folder = cache_folder()
    if folder is None:
        return None
    try:
        return folder / f"{script_key(script, arguments, module=module)}.profile.json"
    except OSError:
        return None


def _why_not(script: str, code: int, said: str) -> str:
    if code:
        last = next((line for line in reversed(said.strip().splitlines()) if line.strip()), f"exit code {code}")
        return f"{script} ended before its first step: {last.strip()}"
    return f"{script} ended and never made a step with a pl.Trainer, which is what is planned: add one, {ADD_A_TRAINER}"
