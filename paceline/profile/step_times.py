"""Forward and backward of a replica's share of the batch: with a core to itself beside busy ones, and with all cores.

What a replica computes under a strategy is a smaller batch, with fewer threads, while others do the same. All three
change the time of a sample, each model differently, so none of it is guessed.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.loss_value import Weight
from paceline.optim.direct_gradients import as_in_a_step
from paceline.optim.models import left_as_it_was
from paceline.profile.neighbours import busy_neighbours, on_cores
from paceline.profile.other_load import LoadOfOthers
from paceline.profile.values import ShareTime, Timing
from paceline.split.cut import Check, Loss, train
from paceline.split.stages.micro_batches import length_of, part_of

MOST_SIZES = 6
REPETITIONS = (4, 40)  # at least, at most
_LONG_S = 0.15  # of repetitions of one size
_DISTURBED = 0.25  # cores that others use


@dataclass
class StepWork:
    """What is measured: a loss, a model, and one batch of a script's own."""

    loss: Loss
    model: nn.Module
    batch: Any
    check: Check

    @property
    def samples(self) -> int:
        return length_of(self.batch)

    def part(self, samples: int) -> Any:
        """Returns the first samples of the batch."""
        length = self.samples
        return self.batch if samples >= length else part_of(self.batch, length, 0, samples)

    def once(self, batch: Any) -> None:
        """Computes the gradients of a batch, as replicas do, and forgets them."""
        with as_in_a_step():
            self.by_torch(batch)

    def by_torch(self, batch: Any) -> None:
        """Does so by torch's own operators, which its counters know."""
        train(self.loss, self.model, batch, Weight.whole(length_of(batch)), self.check)
        for parameter in self.model.parameters():
            parameter.grad = None


def timing(seconds: Sequence[float]) -> Timing:
    """Returns how long it takes undisturbed, which is the lower quartile; and where the middle four fifths lie."""
    ordered = sorted(seconds)
    cut = len(ordered) // 10
    return Timing(undisturbed(ordered), ordered[cut], ordered[-1 - cut])


def undisturbed(seconds: Sequence[float]) -> float:
    """Returns the lower quartile: other programs make some repetitions longer, and none shorter.

    >>> undisturbed([4.0, 1.0, 2.0, 3.0, 9.0])
    2.0
    """
    return sorted(seconds)[len(seconds) // 4]


def repeat(act: Callable[[], object], until: float, *, long_s: float = _LONG_S) -> tuple[Timing, float]:
    """Does something again and again, for as long as `long_s` or until that time. Returns how long it takes, and the
    share of that in which a core worked."""
    least, most = REPETITIONS
    lasted: list[float] = []
    cpu_began, waits, began = time.process_time(), _waits(), time.perf_counter()
    while len(lasted) < most:
        enough = len(lasted) >= least and time.perf_counter() - began > long_s
        if enough or (lasted and time.monotonic() > until):
            break
        at = time.perf_counter()
        act()
        lasted.append(time.perf_counter() - at)
    whole = time.perf_counter() - began
    # What does not wait by itself is only pushed aside by other programs now and then.
    by_itself = (_waits() - waits) > len(lasted) / 2
    return timing(lasted), min(1.0, (time.process_time() - cpu_began) / whole) if by_itself else 1.0


def _waits() -> int:
    """Returns how often this process has given its core away to wait for something."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw


def sizes(samples: int) -> list[int]:
    """Returns the shares that are measured: the batch, a half of it, a quarter …

    >>> sizes(100), sizes(1)
    ([100, 50, 25, 13, 7, 4], [1])
    """
    found = [samples]
    while found[-1] > 1 and len(found) < MOST_SIZES:
        found.append(-(-found[-1] // 2))
    return found


def share_times(work: StepWork, cores: Sequence[int], until: float) -> list[ShareTime]:
    """Returns the times of all shares, as far as there is time: the whole batch and what each core's part of it is
    first. What was measured while other programs were busy is measured again in the time that is left."""
    found: list[_Measuring] = []
    with left_as_it_was(work.model):
        works = _what_works(work, until)
        for measuring in _in_order(list(works), len(cores)):
            # What follows takes about so many repetitions; of one share there has to be something.
            if not found or time.monotonic() + 2 * REPETITIONS[0] * works[measuring.samples] < until:
                measuring.measure(work, cores, until)
                found.append(measuring)
        for measuring in sorted(found, key=lambda one: -one.load):
            if measuring.load > _DISTURBED and time.monotonic() + 1.5 * _LONG_S < until:
                measuring.measure(work, cores, until)
    return [measuring.found() for measuring in found]


def _what_works(work: StepWork, until: float) -> dict[int, float]:
    """Returns the shares that can be computed, and are not too long to be measured, with about how long each takes."""
    found: dict[int, float] = {}
    began, last = time.monotonic(), 0.0
    for samples in sorted(sizes(work.samples)):
        if found and began + (until - began) / 4 < time.monotonic() + 4 * last:
            break
        if seconds := _takes(work, samples):
            found[samples] = last = seconds
    return found


def _takes(work: StepWork, samples: int) -> float:
    """Returns about how long so many take; 0 if so few cannot be computed: BatchNorm needs more than one sample."""
    try:
        work.once(work.part(samples))
    except Exception:
        if samples == work.samples:
            raise
        return 0.0
    began = time.monotonic()
    work.once(work.part(samples))
    return max(1e-9, time.monotonic() - began)


@dataclass
class _Measuring:
    """A share to measure, and what came of it."""

    samples: int
    threads: int
    busy: bool
    load: float = 0.0  # of others, when it was measured best
    best: tuple[Timing, float] | None = None

    def measure(self, work: StepWork, cores: Sequence[int], until: float) -> None:
        once, load = partial(work.once, work.part(self.samples)), LoadOfOthers()
        with on_cores(cores[: self.threads], self.threads), busy_neighbours(once, cores[1:] if self.busy else ()):
            once()
            found = repeat(once, until)
        if self.best is None or found[0].seconds < self.best[0].seconds:
            self.best, self.load = found, load.cores()

    def found(self) -> ShareTime:
        assert self.best is not None
        lasted, cpu_share = self.best
        share = cpu_share if self.threads == 1 else 1.0
        return ShareTime(
            samples=self.samples, threads=self.threads, busy=self.busy, timing=lasted, cpu_share=share, load=self.load
        )


def _in_order(works: Sequence[int], cores: int) -> list[_Measuring]:
    """Returns what is measured: what one process and a replica a core have to do first, then the rest."""
    largest_first = sorted(works, reverse=True)
    one_core = [_Measuring(samples, 1, busy=True) for samples in largest_first]
    if cores == 1:
        return one_core
    all_cores = [_Measuring(samples, cores, busy=False) for samples in largest_first]
    share = min(len(works) - 1, (cores - 1).bit_length())  # a core's part of the batch
    first = [one_core[share], one_core[-1], all_cores[0], all_cores[-1], one_core[0]]
    rest = [one for pair in zip(one_core, all_cores, strict=True) for one in pair]
    ordered = [*first, _Measuring(largest_first[0], 1, busy=False), *rest]
    return list({(one.samples, one.threads, one.busy): one for one in ordered}.values())


def count_flops(work: StepWork) -> float | None:
    """Returns the floating-point operations of forward and backward; None if the counter knows none of them."""
    from torch.utils.flop_counter import FlopCounterMode

    with left_as_it_was(work.model), FlopCounterMode(display=False) as counter:
        work.by_torch(work.batch)
    total = counter.get_total_flops()
    return float(total) if total else None


def kept_bytes(work: StepWork) -> int:
    """Returns the bytes that forward keeps for backward, parameters not counted."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in work.model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with left_as_it_was(work.model), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = work.check(work.loss(work.model, work.batch))
        found.backward(Weight.whole(work.samples))
    for parameter in work.model.parameters():
        parameter.grad = None
    return sum(kept.values())
