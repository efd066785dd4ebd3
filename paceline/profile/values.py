"""What was measured of a script's step. Plain values: the command line reads them and does not import torch."""

from __future__ import annotations

import msgspec

from paceline.split.values import Split
from paceline.strategy import Strategy


class ProfileRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What `paceline plan` asks of a process: measure the first step instead of making it, write that down, and end."""

    path: str
    cores: int  # of a host: as many threads has a replica that is alone on one
    devices: tuple[int, ...] = ()  # over how many devices a cut model is tried
    budget_s: float = 10.0
    mailbox_s: float = 60e-6  # until a device that waits goes on with what another has sent


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """How long something takes undisturbed, and between what most repetitions lay."""

    seconds: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """Half the width of the interval, as a share of that."""
        return (self.high - self.low) / 2 / self.seconds if self.seconds > 0 else 0.0

    def times(self, factor: float) -> Timing:
        return Timing(self.seconds * factor, self.low * factor, self.high * factor)


class ShareTime(msgspec.Struct, frozen=True, kw_only=True):
    """Forward and backward of so many samples, with so many threads; `busy`: while all other cores do the same."""

    samples: int
    threads: int
    busy: bool
    timing: Timing
    cpu_share: float = 1.0  # of that time a core was used; the rest it waited
    load: float = 0.0  # cores that other programs kept busy meanwhile


class LayerTime(msgspec.Struct, frozen=True, kw_only=True):
    """One module that computes by itself, at the whole batch and with one thread."""

    name: str
    kind: str
    parameters: int
    activation_bytes: int  # of what it gives
    forward_s: float
    backward_s: float  # until its gradients are complete; modules without parameters count with the one behind them
    flops: float | None = None


class CutTrial(msgspec.Struct, frozen=True, kw_only=True):
    """One replica cut over devices, computed for real on one core by turns, on a clock that runs for each device."""

    split: Split
    samples: int
    timing: Timing | None = None  # of forward and backward on so many devices; None: it cannot be cut so
    busiest_s: float = 0.0  # the device that computes longest
    messages: int = 0  # that the device with the most receives in a step
    bytes: int = 0
    parameter_bytes: int = 0  # that the device with the most computes with
    why_not: str | None = None


class StepTrial(msgspec.Struct, frozen=True, kw_only=True):
    """A step as it was when this machine made some by that strategy, with copies of the model."""

    strategy: Strategy
    timing: Timing
    computed_s: float  # of that, forward and backward


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What a step of a script costs."""

    script: str
    machine: str  # fingerprint of where it was measured
    batch_size: int
    samples: int | None  # of the dataset; None: a stream
    steps: int | None  # of the call of `batches` that was looked at
    accumulate: int
    parameters: int
    parameter_bytes: int
    gradient_bytes: int  # dense, of what is trained
    tensors: int  # trained ones
    sparse_bytes: int  # rows with a gradient in a step, of tables that servers may hold
    sparse_table_bytes: int
    zero_share: float  # of dense gradients: how much is zero
    optimizer: str
    state_bytes: int  # of the optimizer
    update: Timing  # by one core, as owners do it
    reference_update: Timing  # the same for SGD with momentum, which calibration uses
    load: Timing  # of a whole batch, by one core
    by_workers: bool  # whether other processes load it
    forward_share: float  # of forward and backward
    arrivals: tuple[tuple[float, float], ...]  # share of the time of backward, share of gradient bytes there by then
    shares: tuple[ShareTime, ...]
    layers: tuple[LayerTime, ...]
    activation_bytes: int  # kept from forward for backward, at the whole batch
    flops: float | None  # of forward and backward of the whole batch; None: not counted
    batchnorms: int
    cuts: tuple[CutTrial, ...] = ()
    trials: tuple[StepTrial, ...] = ()  # of what this machine can run itself
    seconds: float = 0.0  # that measuring took
    left_out: tuple[str, ...] = ()  # for lack of time, in words
    traced: bool = False  # computing was not measured here: its times are those of a trace

    def trial(self, strategy: Strategy) -> StepTrial | None:
        """Returns what was tried of a strategy, if it was."""
        return next((trial for trial in self.trials if trial.strategy == strategy), None)

    @property
    def works(self) -> float:
        """Share of the time of forward and backward in which a core is busy; the rest it waits for something else."""
        return max(share.cpu_share for share in self.shares if share.threads == 1)

    @property
    def flops_per_weight(self) -> float | None:
        """Computation of one sample for each weight: the higher, the better does data parallelism pay."""
        return None if self.flops is None else self.flops / self.batch_size / max(1, self.parameters)

    @property
    def flops_per_activation(self) -> float | None:
        """Computation for each value that a layer hands on: the higher, the better do cuts between layers pay."""
        values = sum(layer.activation_bytes for layer in self.layers) / 4
        return None if self.flops is None else self.flops / max(1.0, values)

    @property
    def weights_over_activations(self) -> float:
        """Bytes of weights for each byte of activations that layers hand on, at the whole batch."""
        return self.parameter_bytes / max(1, sum(layer.activation_bytes for layer in self.layers))
