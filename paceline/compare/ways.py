"""Ways to train, as they are typed: `--strategies "async, sync, accept 3 x4, layout hidden=2, one"`.

    one                  a single replica
    mirrored             replicas that hold the parameters together
    sync, accept K       parameters on servers; a step closes with all replicas, or with the first K
    async, bounded K     parameters on servers; a step at each report, at most K ahead of the slowest
    layout DIM[=N]       one model cut along a named dim, or several joined by +, over N devices (`paceline dims`)
    stages [N]           by layer
    tiles [N|RxC]        by image region
    wavefront [N]        stacked recurrent layers, by layer and time

`xN` behind any of them is the number of its replicas. What is left out comes from --replicas, --servers and --devices.
A way is flags of `paceline run`; whether they are right is decided there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import StrategyError, nearest_first

_REPLICAS = re.compile(r"x([0-9]{1,6})")
EXAMPLE = '"async, sync, accept 3 x4, mirrored, layout hidden, one"'


@dataclass(frozen=True)
class Defaults:
    """What a way has unless it says otherwise."""

    replicas: int
    servers: int
    devices: int


@dataclass(frozen=True)
class Way:
    """One way to train. `kind` is its first word."""

    name: str
    kind: str
    replicas: int
    flags: tuple[str, ...]

    @property
    def is_cut(self) -> bool:
        return self.kind in ("layout", "stages", "tiles", "wavefront")

    @property
    def on_servers(self) -> bool:
        return self.kind in ("sync", "accept", "async", "bounded")

    @property
    def is_async(self) -> bool:
        return self.kind in ("async", "bounded")

    @property
    def file_name(self) -> str:
        """
        >>> Way("layout heads+hidden=2 x2", "layout", 2, ()).file_name
        'layout-heads-hidden-2-x2'
        """
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


def read_ways(text: str, defaults: Defaults) -> list[Way]:
    """
    >>> for way in read_ways("one, accept 3 x4, layout hidden", Defaults(replicas=2, servers=1, devices=2)):
    ...     print(*way.flags)
    --replicas 1
    --replicas 4 --servers 1 --accept 3
    --mesh model=2 --layout hidden=model
    """
    ways = [_read_way(" ".join(entry.split()), text, defaults) for entry in text.split(",")]
    for number, way in enumerate(ways):
        if way.file_name in {earlier.file_name for earlier in ways[:number]}:
            raise StrategyError("strategies", text[:200], f"{way.name} is there twice, give it once")
    return ways


def _read_way(entry: str, text: str, defaults: Defaults) -> Way:
    kind, *words = entry.split() or [""]
    if kind not in _FLAGS:
        known = ", ".join(nearest_first(kind, list(_FLAGS)))
        raise StrategyError("strategies", text[:200], f"{kind[:50]!r} is none, give some of {known}, as in {EXAMPLE}")
    replicas = None
    if words and (typed := _REPLICAS.fullmatch(words[-1])):
        replicas = int(typed[1])
        words = words[:-1]
    needed, flags = _FLAGS[kind]
    if len(words) > 1 or (words and needed is None) or (not words and needed):
        expected = f"{kind} needs {needed}" if needed and not words else f"{entry[:80]!r} has a word too many"
        raise StrategyError("strategies", text[:200], f"{expected}, as in {EXAMPLE}")
    if replicas is None:
        replicas = 1 if kind == "one" or kind in ("layout", "stages", "tiles", "wavefront") else defaults.replicas
    if kind == "one" and replicas != 1:
        raise StrategyError(
            "strategies", text[:200], f"one is one replica and not {replicas}, say mirrored x{replicas}"
        )
    return Way(entry, kind, replicas, tuple(flags(words[0] if words else "", replicas, defaults)))


# ── the flags behind a word ──────────────────────────────────────────────────────────────────────────────────


def _mirrored(word: str, replicas: int, defaults: Defaults) -> list[str]:
    return ["--replicas", str(replicas)]


def _servers(*flags: str) -> Callable[[str, int, Defaults], list[str]]:
    def with_word(word: str, replicas: int, defaults: Defaults) -> list[str]:
        own = [*flags, word] if word else list(flags)
        return ["--replicas", str(replicas), "--servers", str(defaults.servers), *own]

    return with_word


def _layout(word: str, replicas: int, defaults: Defaults) -> list[str]:
    dims, _, size = word.partition("=")
    mesh = f"model={size or defaults.devices}"
    along = [f"{dim}=model" for dim in dims.split("+")]
    if replicas > 1:
        mesh, along = f"data={replicas},{mesh}", ["batch=data", *along]
    return ["--mesh", mesh, "--layout", ",".join(along)]


def _cut(flag: str) -> Callable[[str, int, Defaults], list[str]]:
    def with_word(word: str, replicas: int, defaults: Defaults) -> list[str]:
        return ["--replicas", str(replicas), flag, word or str(defaults.devices)]

    return with_word


# What a word needs (empty: it may have something; None: nothing), and its flags.
_FLAGS: dict[str, tuple[str | None, Callable[[str, int, Defaults], list[str]]]] = {
    "one": (None, _mirrored),
    "mirrored": (None, _mirrored),
    "sync": (None, _servers()),
    "accept": ("a number of replicas, or auto", _servers("--accept")),
    "async": (None, _servers("--async")),
    "bounded": ("a number of steps", _servers("--bounded")),
    "layout": ("a dim of the model (paceline dims)", _layout),
    "stages": ("", _cut("--stages")),
    "tiles": ("", _cut("--tiles")),
    "wavefront": ("", _cut("--wavefront")),
}
