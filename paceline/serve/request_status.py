"""What all devices of a predictor see of its requests: shared words, and the reason of the last failure as text.

Each word has one writer at a time and is written whole, so there are no locks that a dead device could hold.
"""

from __future__ import annotations

import enum

import torch

from paceline.memory.arena import Arena

_WORDS = 2048
PAGE_BYTES = 1 << 16  # the words, and the text behind them


class StatusWord(enum.IntEnum):
    """Where each word lies; of a word by device, that of device 0."""

    REQUEST = 0  # the last one that was made; by the caller
    FAILED = 1  # the last request that failed somewhere
    FAILED_AT = 2  # the device that said so first
    PREPARED = 256  # by device: 1 once its model is cut, -1 if that failed
    STOPPED = 512  # by device: the last failure that it has seen, and stopped working
    CLEARED = 1024  # by device: the last failure after which it has thrown everything away


class RequestStatus:
    """The shared page. It is made before the devices are forked, so all have it."""

    def __init__(self) -> None:
        arena = Arena.create(PAGE_BYTES, "a predictor")
        self._words = arena.view(0, torch.int64, [_WORDS]).numpy().data
        self._text = arena.view(_WORDS * 8, torch.uint8, [PAGE_BYTES - _WORDS * 8]).numpy().data
        arena.close()

    def __getitem__(self, word: int) -> int:
        number: int = self._words[word]
        return number

    def __setitem__(self, word: int, value: int) -> None:
        self._words[word] = value

    def fail(self, request: int, device: int, reason: str) -> None:
        """Says that this request has failed on this device, unless another has said so before."""
        if self[StatusWord.FAILED] < request:  # the first reason is the one that counts
            text = reason.encode(errors="replace")[: len(self._text) - 8]
            self._text[: len(text)] = text
            self._text[len(text)] = 0
            self[StatusWord.FAILED_AT] = device
            self[StatusWord.FAILED] = request

    @property
    def reason(self) -> str:
        """Returns why the last request failed that did."""
        return bytes(self._text).partition(b"\0")[0].decode(errors="replace")
