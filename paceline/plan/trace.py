"""A trace of torch.profiler, from the device that is planned for: its steps replace what was measured here.

`torch.profiler.profile(...).export_chrome_trace("trace.json")`, with `prof.step()` after every update.
"""

from __future__ import annotations

import gzip
import json
import statistics
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import InvalidInput
from paceline.profile.values import Profile, Timing

_STEP = "ProfilerStep#"
_UPDATE = "Optimizer.step#"


def with_trace(profile: Profile, path: Path) -> Profile:
    """Returns the profile with computing as long as a step of the trace takes, less its optimizer's update."""
    steps, updates = _durations(_events(path), path)
    computed = statistics.median(steps) - (statistics.median(updates) if updates else 0.0)
    if computed <= 0:
        raise InvalidInput("trace", str(path), "its steps are no longer than the optimizer's updates in them")
    whole = max(profile.shares, key=lambda share: (share.samples, share.threads, share.busy))
    factor = computed / profile.accumulate / whole.timing.seconds  # what was measured is one pass of a step
    spread = (max(steps) - min(steps)) / 2
    shares = tuple(
        msgspec.structs.replace(
            share,
            timing=_wider(share.timing.times(factor), spread / profile.accumulate * share.samples / whole.samples),
        )
        for share in profile.shares
    )
    update = Timing(*([statistics.median(updates)] * 3)) if updates else profile.update
    return msgspec.structs.replace(
        profile,
        shares=shares,
        update=update,
        traced=True,
        left_out=(*profile.left_out, f"compute times are those of {path.name}"),
    )


def _wider(found: Timing, more: float) -> Timing:
    return Timing(found.seconds, max(0.0, found.low - more), found.high + more)


def _events(path: Path) -> list[dict[str, Any]]:
    try:
        raw = path.read_bytes()
        content = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except OSError as error:
        raise InvalidInput("trace", str(path), f"it cannot be read ({error.strerror}), give another") from error
    except ValueError as error:
        raise InvalidInput(
            "trace", str(path), f"this is no JSON ({error}), give what torch.profiler exports"
        ) from error
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list):
        raise InvalidInput("trace", str(path), "it has no traceEvents, give what torch.profiler exports")
    return [event for event in events if isinstance(event, dict)]


def _durations(events: list[dict[str, Any]], path: Path) -> tuple[list[float], list[float]]:
    """Returns the seconds of every step but the first, and of every update."""

    def lasted(beginning: str) -> list[float]:
        named = [event for event in events if str(event.get("name", "")).startswith(beginning) and "dur" in event]
        on_cpu = [event for event in named if event.get("cat") != "gpu_user_annotation"] or named
        return [float(event["dur"]) / 1e6 for event in sorted(on_cpu, key=lambda event: float(event["ts"]))]

    steps = lasted(_STEP)
    if not steps:
        raise InvalidInput("trace", str(path), "it has no steps, call prof.step() after every update while it is made")
    return steps[1:] if len(steps) > 2 else steps, lasted(_UPDATE)
