"""What the losses of all replicas log in a step, beside the loss: numbers whose means are the same for all.

Each replica leaves its own in the arena before it arrives, and writes on the board how long that is; after all have
arrived everybody adds them up, in the order of the ranks. A step in which nobody logs anything reads a word a replica.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from paceline.exchange.together import Together
from paceline.exchange.words import Word
from paceline.loss_value import NOTHING, LossPart
from paceline.memory.model_arena import LOGGED_BYTES, ModelArena
from paceline.mirrored.one_host import OneHost

_LENGTH_BYTES = 8
_PARTS = msgspec.msgpack.Decoder(LossPart)


class LoggedNumbers:
    """One replica's side of it."""

    def __init__(self, together: Together, arena: ModelArena, hosts: OneHost) -> None:
        self._board, self._row = together.board, together.replica
        self._arena, self._hosts = arena, hosts

    def leave(self, part: LossPart) -> None:
        """Has the others see what this replica has logged."""
        text = msgspec.msgpack.encode(part) if part.logged else b""
        if text:
            self._arena.write_logged(self._row, text)
        self._board.set(self._row, Word.LOGGED, len(text))

    def add_up(self, ranks: Sequence[int]) -> dict[str, float]:
        """Returns the means over all replicas of all hosts, which all call this."""
        texts = [self._arena.read_logged(rank, self._board.get(rank, Word.LOGGED)) for rank in ranks]
        if self._hosts.count > 1:
            texts = self._of_all_hosts(texts)
        total = NOTHING
        for text in filter(None, texts):
            total = total + _PARTS.decode(text)
        return total.means

    def _of_all_hosts(self, texts: Sequence[bytes]) -> list[bytes]:
        """Returns the texts of all hosts: each adds its own to zeros in its place."""
        size = _LENGTH_BYTES + LOGGED_BYTES
        places, first = torch.zeros(self._hosts.total, size, dtype=torch.uint8), self._hosts.before
        for place, text in zip(places[first : first + len(texts)], texts, strict=True):
            framed = len(text).to_bytes(_LENGTH_BYTES, "little") + text
            place[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        rows = self._hosts.sum(places)
        lengths = [int(row[:_LENGTH_BYTES].view(torch.int64)) for row in rows]
        return [bytes(row[_LENGTH_BYTES : _LENGTH_BYTES + n].numpy()) for row, n in zip(rows, lengths, strict=True)]
