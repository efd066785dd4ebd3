"""Profiles a script's step, in a process that has run the script up to its first one. Nothing is trained."""

from __future__ import annotations

import os
import re
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from paceline.cache_folder import CACHE
from paceline.data.feed import Feed
from paceline.data.ledger import Ledger
from paceline.graph.kept import KeptGraph
from paceline.graph.proof import GraphProof
from paceline.graph.shapes import AllShapes
from paceline.memory.heap import keep_memory
from paceline.optim.models import own_state
from paceline.profile.layers import layer_times
from paceline.profile.neighbours import on_cores
from paceline.profile.optimizer_times import reference_update_time, update_time
from paceline.profile.step_times import StepWork, count_flops, kept_bytes, repeat, share_times
from paceline.profile.trials import LONG_S, Trials, about, worth_trying
from paceline.profile.values import CutTrial, Profile, ProfileRequest, ShareTime, StepTrial, Timing
from paceline.profile.virtual_devices import try_cut
from paceline.split.layout.show import dims_in
from paceline.split.values import BATCH, Layout, Split, Stages, Tiles, Wavefront
from paceline.strategy import Mirrored, Strategy
from paceline.torch_private import AnyBatchNorm

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_MOST_LAYOUTS = 3
BUSY_MACHINE = 0.3  # cores that others use, from which on it is said
_CUT_S = 1.5  # after which no more rounds of one cut are made
_SHARES_OF_BUDGET = {"shares": 0.3, "rest": 0.4, "trials": 0.62}  # the other time is for cuts
_LEAST_OF_A_TRIAL = 14  # steps
_LATEST = 1.2  # of the budget, for a trial that is under way


class Profiler:
    """Measures one step of a script's."""

    def __init__(
        self,
        work: StepWork,
        optimizer: Optimizer,
        request: ProfileRequest,
        dims: Mapping[str, str],
        accumulate: int,
        trials: Trials,
    ) -> None:
        self._work, self._optimizer, self._request = work, optimizer, request
        self._dims, self._accumulate = dims, accumulate
        self._began = time.monotonic()
        self._cores = sorted(os.sched_getaffinity(0))[: request.cores]
        self._trials = trials
        self._left_out: list[str] = []

    def _until(self, share: float) -> float:
        return self._began + share * self._request.budget_s

    def profile(self, feed: Feed, ledger: Ledger, epoch: int, steps: int | None) -> Profile:
        """Returns everything that was found."""
        keep_memory()
        work, model = self._work, own_state(self._work.model)
        shares = share_times(work, self._cores, self._until(_SHARES_OF_BUDGET["shares"]))
        if max(share.samples for share in shares) < work.samples:
            self._left_out.append(f"shares above {max(share.samples for share in shares)} samples")
        if (others := max(share.load for share in shares)) > BUSY_MACHINE:
            self._left_out.append(f"a quiet machine: other programs kept {others:.1f} cores busy, figures may be off")
        with on_cores(self._cores[:1], 1):
            layers = layer_times(work)
            update, state_bytes = update_time(self._optimizer, 0.04 * self._request.budget_s)
            reference = reference_update_time(self._optimizer, 0.04 * self._request.budget_s)
            load = self._load(feed, ledger, epoch)
            kept, flops = kept_bytes(work), None
            if time.monotonic() < self._until(_SHARES_OF_BUDGET["rest"]):
                with suppress(Exception):  # a counter of torch's, for words only
                    flops = count_flops(work)
            tried = self._tried(shares)
            alone_s = _of_all(shares, work.samples)
            until = self._until(1.0) - LONG_S - _LEAST_OF_A_TRIAL * alone_s
            cuts = self._cuts(tried, until)
            tried = self._again(tried, until)
        tried += self._try(Mirrored(), alone_s, self._until(_LATEST))  # which trains the model
        parameters = list(model.parameters())
        trained = [p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad]
        return Profile(
            script="",
            machine="",
            batch_size=work.samples * self._accumulate,
            samples=feed.length,
            steps=steps,
            accumulate=self._accumulate,
            parameters=sum(p.numel() for p in parameters),
            parameter_bytes=sum(p.nbytes for p in parameters),
            gradient_bytes=sum(p.nbytes for p in trained),
            tensors=len(trained),
            sparse_bytes=layers.sparse_bytes,
            sparse_table_bytes=layers.sparse_table_bytes,
            zero_share=layers.zero_share,
            optimizer=type(self._optimizer).__name__,
            state_bytes=state_bytes,
            update=update,
            reference_update=reference,
            load=load,
            by_workers=feed.by_workers,
            forward_share=layers.forward_share,
            arrivals=layers.arrivals,
            shares=tuple(shares),
            layers=layers.layers,
            activation_bytes=kept * self._accumulate,
            flops=None if flops is None else flops * self._accumulate,
            batchnorms=sum(isinstance(module, AnyBatchNorm) for module in model.modules()),
            cuts=tuple(cuts),
            trials=tuple(tried),
            seconds=time.monotonic() - self._began,
            left_out=tuple(self._left_out),
        )

    def _load(self, feed: Feed, ledger: Ledger, epoch: int) -> Timing:
        if feed.length is None:  # a stream gives its samples once, and the run that follows needs them
            return Timing(0.0, 0.0, 0.0)
        rows = range(min(self._work.samples * self._accumulate, feed.length))
        lasted, _ = repeat(lambda: feed.load(ledger, epoch, rows), self._until(0.6), long_s=0.1)
        return lasted

    # ── steps as they really are ─────────────────────────────────────────────────────────────────────────

    def _tried(self, shares: Sequence[ShareTime]) -> list[StepTrial]:
        """Returns the steps of replicas on this machine."""
        cores, found = len(self._cores), list[StepTrial]()
        for strategy in worth_trying(cores, self._work.samples):
            guess_s = about(strategy, shares, found, cores)
            found += self._try(strategy, guess_s, self._until(_SHARES_OF_BUDGET["trials"]))
        return found

    def _again(self, tried: list[StepTrial], until: float) -> list[StepTrial]:
        """Returns them with what came out when they were tried once more, as far as there is time: a machine that
        others use too is slow for a while, and then it is not."""
        found = []
        for trial in tried:
            more = self._try(trial.strategy, trial.timing.seconds, until - LONG_S)
            found.append(min([trial, *more], key=lambda one: one.timing.seconds))
        return found

    def _try(self, strategy: Strategy, guess_s: float, until: float) -> list[StepTrial]:
        """Returns what was tried of a strategy, if there is time for it."""
        if time.monotonic() + _LEAST_OF_A_TRIAL * guess_s > until:
            return []
        found = self._trials.measure(strategy, tuple(self._cores), guess_s, LONG_S, until)
        return [found] if found is not None else []

    # ── cuts ─────────────────────────────────────────────────────────────────────────────────────────────

    def _cuts(self, tried: list[StepTrial], until: float) -> list[CutTrial]:
        """Tries every way to cut the model that could be one for it, until it is time. Of those that devices of this
        machine can compute, `tried` gets the real step as well."""
        found: list[CutTrial] = []
        with tempfile.TemporaryDirectory(prefix="paceline-profile-") as scratch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if os.environ.get(CACHE) == "":  # devices that are tried share one graph all the same
                os.environ[CACHE] = scratch
            last = 0.0
            for split, samples in self._ways():
                if time.monotonic() + 1.3 * last > until:
                    self._left_out.append(f"a cut by {split.words}, for lack of time (--budget)")
                    continue
                began = time.monotonic()
                real = self._trials.possible and split.devices == len(self._cores)  # then few rounds by turns will do
                latency_s, soon = self._request.mailbox_s, began if real else min(until, began + _CUT_S)
                trial = try_cut(self._work, split, samples, self._dims, latency_s, self._cores, soon)
                found.append(trial)
                if real and trial.timing is not None:
                    tried += self._try(Mirrored(split=split), trial.timing.seconds, until)
                last = time.monotonic() - began
        return found

    def _ways(self) -> list[tuple[Split, int]]:
        model, samples = own_state(self._work.model), self._work.samples
        if self._accumulate > 1:
            self._left_out.append("cuts: the script accumulates gradients over several passes")
            return []
        ways: list[tuple[Split, int]] = []
        for devices in self._request.devices:
            found: list[Split] = []
            if any(isinstance(module, _RECURRENT) for module in model.modules()):
                found.append(Wavefront(parts=devices))
            if any(isinstance(module, _CONVOLUTIONS) for module in model.modules()):
                found.append(Tiles(rows=devices))
            found += [Layout(mesh={"model": devices}, layout=layout) for layout in self._layouts(devices)]
            if samples >= 2:
                found.append(Stages(stages=devices, micro_batches=min(4 * devices, samples)))
            ways += [(split, samples) for split in found]
        return ways

    def _named_dims(self) -> dict[str, Any]:
        """Returns the dims of the model. The graph that tells them is kept for the devices of layouts."""
        work, model = self._work, own_state(self._work.model)
        kept = KeptGraph(GraphProof(work.loss, model, work.batch), AllShapes())
        kept.prove()
        kept.keep()
        return dims_in(kept.graph, model, self._dims)

    def _layouts(self, devices: int) -> list[dict[str, str]]:
        """Returns the layouts worth trying: each dim that much of the model lies along, and the two largest."""
        try:
            told = self._named_dims()
        except Exception as error:  # whatever a model does while it is captured is an answer
            self._left_out.append(f"layouts: {str(error).splitlines()[0][:150] if str(error) else repr(error)}")
            return []
        shares = {
            dim: entry["parameters"] / max(1, told["elements"])
            for dim, entry in told["dims"].items()
            if dim != BATCH and min(entry["sizes"]) >= devices
        }
        ordered = sorted((dim for dim, share in shares.items() if share >= 0.1), key=lambda dim: -shares[dim])
        single = [{dim: "model"} for dim in ordered[:_MOST_LAYOUTS]]
        together = [set(re.split(r"[ ·]", row["dims"])) for row in told["parameters"]]
        # Two dims of one parameter cannot both lie along one axis.
        pair = len(ordered) > 1 and not any({*ordered[:2]} <= dims for dims in together)
        return [*single, *([dict.fromkeys(ordered[:2], "model")] if pair else [])]


def _of_all(shares: Sequence[ShareTime], samples: int) -> float:
    """Returns the seconds of the whole batch by all cores, or by what was measured instead."""
    largest = max(share.samples for share in shares)
    return min(share.timing.seconds for share in shares if share.samples == largest) * samples / largest


def tell_profile(profiler: Profiler, feed: Feed, ledger: Ledger, epoch: int, steps: int | None, path: Path) -> None:
    """Writes the profile into a file."""
    torch.default_generator.manual_seed(0)
    path.write_bytes(msgspec.json.encode(profiler.profile(feed, ledger, epoch, steps)))
