"""Gradients on their way from backward into the arena.

A hook copies every gradient into this replica's flat buffer the moment backward has finished it, while it is
still in the cache, and gives its memory back. A buffer always holds a valid contribution: what a parameter left
there in an earlier step is zeroed when a step does not use that parameter.

Of linear layers and embeddings a gradient need not even be copied: it is computed where it goes, and that of a
convolution on tiles when there is time (direct_gradients.py).

Whoever sends gradients while backward still runs is told of each when it has landed. Backward adds to a parameter
once, with the sum of all its uses; but a backward inside of it, as reentrant checkpointing makes one for each segment,
adds by itself. Whether a parameter gets several summands is seen in the first step that uses it, in which it is not
said to have landed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.errors import ModelError
from paceline.optim import direct_gradients, products


class Destination(Protocol):
    """Where the gradient of one parameter goes."""

    def put(self, gradient: torch.Tensor) -> None: ...

    def add(self, gradient: torch.Tensor) -> None: ...

    def zero(self) -> None: ...


class IntoBuffer:
    """Into one buffer that has room for the whole gradient."""

    def __init__(self, view: torch.Tensor) -> None:
        self._view = view

    def put(self, gradient: torch.Tensor) -> None:
        if gradient.layout is torch.strided:
            self._view.copy_(gradient)
        else:
            self._view.zero_().add_(gradient.to(self._view.device))

    def add(self, gradient: torch.Tensor) -> None:
        self._view.add_(gradient.to(self._view.device))

    def put_product(self, one: torch.Tensor, other: torch.Tensor) -> None:
        products.add_gradient(self._view, one, other, replace=True)

    def add_product(self, one: torch.Tensor, other: torch.Tensor) -> None:
        products.add_gradient(self._view, one, other, replace=False)

    def add_rows(self, numbers: torch.Tensor, rows: torch.Tensor) -> None:
        self._view.index_add_(0, numbers, rows)

    def zero(self) -> None:
        self._view.zero_()


class Discard:
    """Nowhere: somebody else has this gradient as well, and adds it."""

    def put(self, gradient: torch.Tensor) -> None:
        pass

    add = put

    def zero(self) -> None:
        pass


class GradientCollector:
    """Collects the gradients of one replica's step where they are to go."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        destinations: Sequence[Destination],
        landed: Callable[[int], None] | None = None,
        *,
        fresh: bool = False,
    ) -> None:
        """`parameters`: the trained ones. `landed(number)` is called when a parameter's gradient has landed to which
        this step will not add any more. `fresh`: the destinations are zero, and where nothing ever goes stay so without
        being touched, which would take memory."""
        self._parameters = parameters
        self._destinations = destinations
        self._seen = [False] * len(parameters)
        self._dirty = [not fresh] * len(parameters)  # what a process before this one has left there
        self._landed = landed
        self._in_pass = [False] * len(parameters)  # has had a gradient in this pass
        self._known = [False] * len(parameters)  # has been used in a step
        self._several = [False] * len(parameters)  # has had more than one in a pass
        self._last_pass = True
        self._collecting = False
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(slot))  # type: ignore[no-untyped-call]
            for slot, parameter in enumerate(parameters)
            if parameter.requires_grad
        ]
        # Not if somebody waits for complete gradients: an operator does not know whether it is the last to add.
        numbered = enumerate(parameters) if landed is None else ()
        self._written_in_place = [
            parameter for slot, parameter in numbered if direct_gradients.register(parameter, SlotWriter(self, slot))
        ]
        # Linear ones and tables: whoever waits for gradients has their products made quickly all the same.
        self._has_large_layers = any(
            parameter.dim() == 2 for parameter in parameters if direct_gradients.pays(parameter)
        )

    def writes(self, slot: int) -> bool:
        """Whether gradients are collected now, and this one goes into one buffer as a whole."""
        return self._collecting and isinstance(self._destinations[slot], IntoBuffer)

    def write(self, slot: int, gradient: torch.Tensor) -> None:
        """Write a gradient where it goes."""
        if self._seen[slot]:
            self._destinations[slot].add(gradient)
        else:
            self._destinations[slot].put(gradient)
        self._seen[slot] = self._dirty[slot] = True

    def write_product(self, slot: int, one: torch.Tensor, other: torch.Tensor) -> None:
        """Write a gradient that is this product where it goes."""
        destination = self._destinations[slot]
        assert isinstance(destination, IntoBuffer)
        if self._seen[slot]:
            destination.add_product(one, other)
        else:
            destination.put_product(one, other)
        self._seen[slot] = self._dirty[slot] = True

    def write_rows(self, slot: int, numbers: torch.Tensor, rows: torch.Tensor) -> None:
        """Write a gradient that is zero but for these rows where it goes."""
        destination = self._destinations[slot]
        assert isinstance(destination, IntoBuffer)
        if not self._seen[slot] and self._dirty[slot]:
            destination.zero()
        destination.add_rows(numbers, rows)
        self._seen[slot] = self._dirty[slot] = True

    def _hook(self, slot: int) -> Callable[[torch.Tensor], None]:
        def collect(parameter: torch.Tensor) -> None:
            if self._collecting and parameter.grad is not None:  # it may have landed already
                self._collect(slot, parameter)

        return collect

    def redirect(self, destinations: Sequence[Destination]) -> None:
        """From now on gradients go somewhere else, where what was collected so far is too."""
        self._destinations = destinations

    def begin(self) -> None:
        """A step begins: whatever backward produces from now on belongs to it, and what a script has left does not."""
        for parameter in self._parameters:
            parameter.grad = None
        self._seen = [False] * len(self._parameters)
        self._in_pass = [False] * len(self._parameters)
        self._collecting = True
        if self._has_large_layers:
            direct_gradients.begin(self)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the forward and backward of a step; `finish` has to follow."""
        self.begin()
        try:
            yield
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Collect no more: what backward produces from now on belongs to no step."""
        self._collecting = False
        direct_gradients.end(self)

    def last_pass(self, is_last: bool) -> None:
        """Whether the coming backward is the step's last one: then what lands is complete."""
        self._last_pass = is_last
        self._in_pass = [False] * len(self._parameters)

    def _collect(self, slot: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        self.write(slot, gradient)
        parameter.grad = None
        if self._landed is not None:
            self._tell_landed(slot, self._landed)

    def _tell_landed(self, slot: int, landed: Callable[[int], None]) -> None:
        again, self._in_pass[slot] = self._in_pass[slot], True
        may_tell = self._known[slot] and not self._several[slot] and self._last_pass
        self._several[slot] |= again
        if may_tell and again:
            raise ModelError(
                "model",
                "one that adds to the gradient of a parameter twice in a pass",
                "that was added once in the steps before, and is sent while backward runs; use "
                "checkpoint(use_reentrant=False), and no backward inside of the loss",
            )
        if may_tell:
            landed(slot)

    def finish(self) -> list[bool]:
        """The step's backward is over: settle the parameters it did not use. Returns which ones it did."""
        self.stop()
        self._known = [known or seen for known, seen in zip(self._known, self._seen, strict=True)]
        for slot, parameter in enumerate(self._parameters):
            if parameter.grad is not None:  # was frozen when training began, and has no hook
                self._collect(slot, parameter)
            if not self._seen[slot] and self._dirty[slot]:
                self._destinations[slot].zero()
                self._dirty[slot] = False
        return self._seen

    def close(self) -> None:
        self.stop()
        for handle in self._handles:
            handle.remove()
        for parameter in self._written_in_place:
            direct_gradients.unregister(parameter)


@dataclass(frozen=True)
class SlotWriter:
    """What may write the gradient of one parameter where a collector has it go."""

    collector: GradientCollector
    slot: int

    @property
    def ready(self) -> bool:
        return self.collector.writes(self.slot)

    def write(self, gradient: torch.Tensor) -> None:
        if self.ready:  # else the step that it was for is given up
            self.collector.write(self.slot, gradient)

    def write_product(self, one: torch.Tensor, other: torch.Tensor) -> None:
        if self.ready:
            self.collector.write_product(self.slot, one, other)

    def write_rows(self, numbers: torch.Tensor, rows: torch.Tensor) -> None:
        self.collector.write_rows(self.slot, numbers, rows)
