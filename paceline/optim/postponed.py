"""Work of a backward that nobody waits for: a device does it while it would wait for another.

Of what a cut model's backward computes, other devices need the gradients of what they have handed on. Gradients of
weights they do not: those are made later, oldest first, whenever others are waited for (`Board.meanwhile`), and what is
left of them at the end of the step.

That of a linear layer is a product of two matrices that are narrow if a micro-batch is small, and as large as the
weight: to add it to what is there takes longer to read and write than to compute. So what waits for the same weight is
one product of wider matrices. That of a convolution is whatever its own function finds. What is needed for that is as
large as the activations: where it adds up, few may wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch

MOST_AT_ONCE = 4  # products of the same weight

Find = Callable[[], torch.Tensor]


class Writer(Protocol):
    """Adds to the gradient of one weight."""

    def write(self, gradient: torch.Tensor) -> None: ...

    def write_product(self, one: torch.Tensor, other: torch.Tensor) -> None: ...


@dataclass(frozen=True, eq=False)
class _Product:
    """What is to be added to a gradient, and in the how many-th backward that was found."""

    backward: int
    writer: Writer
    one: torch.Tensor
    other: torch.Tensor


@dataclass(frozen=True, eq=False)
class _Convolution:
    """What finds a summand of a gradient, and in the how many-th backward it was left."""

    backward: int
    writer: Writer
    find: Find


class Postponed:
    """What waits, of one device; with `most`, not more than so much at a time."""

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._waiting: deque[_Product | _Convolution] = deque()
        self._backwards = 0

    @contextmanager
    def backward(self, most_backwards: int | None = None) -> Iterator[None]:
        """Around a backward, of which work may wait; at its end that of the last `most_backwards` still does: it holds
        memory."""
        token = _postponed.set(self)
        try:
            yield
        except BaseException:
            self.forget()  # else somebody else's wait would do it, for a step that there is not
            raise
        finally:
            _postponed.reset(token)
        self._backwards += 1
        while (
            most_backwards is not None
            and self._waiting
            and self._waiting[0].backward < self._backwards - most_backwards
        ):
            self.do_one()

    def add_product(self, writer: Writer, one: torch.Tensor, other: torch.Tensor) -> None:
        self._add(_Product(self._backwards, writer, one, other))

    def add_convolution(self, writer: Writer, find: Find) -> None:
        self._add(_Convolution(self._backwards, writer, find))

    def _add(self, work: _Product | _Convolution) -> None:
        self._waiting.append(work)
        while self._most is not None and len(self._waiting) > self._most:
            self.do_one()

    def do_one(self) -> bool:
        """Do what has waited longest, with what waits for the same weight; returns whether there was something."""
        if not self._waiting:
            return False
        first = self._waiting[0]
        with torch.no_grad():
            if isinstance(first, _Convolution):
                self._waiting.popleft()
                first.writer.write(first.find())
            else:
                self._multiply(first.writer)
        return True

    def _multiply(self, writer: Writer) -> None:
        """Adds the products that have waited longest for one weight, as one."""
        products = [work for work in self._waiting if isinstance(work, _Product) and work.writer == writer]
        found = products[:MOST_AT_ONCE]
        for product in found:
            self._waiting.remove(product)
        if len(found) == 1:
            writer.write_product(found[0].one, found[0].other)
        else:  # both are cut along what is summed over
            one = torch.cat([product.one.t() for product in found]).t()
            writer.write_product(one, torch.cat([product.other for product in found]))

    def do_all(self) -> None:
        while self.do_one():
            pass

    def forget(self) -> None:
        """Whatever still waits belongs to a step that has come to nothing."""
        self._waiting.clear()


_postponed: ContextVar[Postponed | None] = ContextVar("postponed", default=None)


def write_product(writer: Writer, one: torch.Tensor, other: torch.Tensor) -> None:
    """Have a product added to a gradient: later, inside of a backward of which work may wait, and else at once."""
    postponed = _postponed.get()
    if postponed is None:
        writer.write_product(one, other)
    else:
        postponed.add_product(writer, one, other)


def write_convolution(writer: Writer, find: Find) -> None:
    """Have what a convolution finds added to the gradient of its weight, in the same way."""
    postponed = _postponed.get()
    if postponed is None:
        writer.write(find())
    else:
        postponed.add_convolution(writer, find)
