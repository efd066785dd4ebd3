"""How a container is trained, as every replica of a run tells its servers."""

from __future__ import annotations

import msgspec

from paceline.rules import Rule, Sync


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a container is trained: the same from every replica of a run."""

    replicas: int
    rule: Rule = Sync()
    warmup_steps: int = 0
    warmup_epochs: int = 0
    clip_norm: float | None = None
    durability: str = "none"
    recording: bool = False  # keep the summed gradients of the last step
    run: str = ""  # which run this is: a container is trained by one at a time
    timeout_s: float = 600.0
