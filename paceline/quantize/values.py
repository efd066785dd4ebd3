"""What `paceline quantize` is asked for, and what it finds: plain values, without torch."""

from __future__ import annotations

import msgspec

from paceline.checkpoint_note import CheckpointNote

ACTIVATIONS = ("calibrated", "dynamic")


class QuantizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint, the script it is of, and how its int8 is to be made."""

    checkpoint: str
    out: str
    script: str
    made: CheckpointNote
    module: bool = False
    data: str | None = None
    metric: str | None = None
    maximize: bool = True
    max_drop: float = 0.5  # points
    activations: str = "calibrated"
    samples: int = 512  # that inputs are calibrated with
    keep: list[str] = []  # patterns of layers that stay in float
    onnx: str | None = None


class LayerReport(msgspec.Struct, frozen=True, kw_only=True):
    """One layer, before and after."""

    name: str
    kind: str
    parameters: int
    int8: bool
    why: str = ""  # it stays in float
    bytes_before: int
    bytes_after: int
    error: float | None = None  # of the model's answers when it alone is in int8, of their size
    us_before: float | None = None  # microseconds, for one sample, on one core
    us_after: float | None = None

    @property
    def us_now(self) -> float | None:
        return self.us_after if self.int8 else self.us_before


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """The model, before or after."""

    bytes: int  # of the file
    value: float  # of the metric
    ms: dict[int, float]  # milliseconds on one core, by number of samples


class OnnxReport(msgspec.Struct, frozen=True, kw_only=True):
    """The exported model, run in onnxruntime."""

    path: str
    bytes: int
    value: float  # of the metric
    difference: float  # of its answers from those of the model in int8, of their size
    ms: float  # for one sample, on one core


class QuantizeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    path: str
    metric: str
    maximize: bool
    samples: int  # of the evaluation
    max_drop: float
    point: float  # what a point is of this metric
    drop: float  # points
    before: ModelReport
    after: ModelReport
    layers: list[LayerReport]
    onnx: OnnxReport | None = None

    @property
    def smaller(self) -> float:
        """How many times as large the file was."""
        return self.before.bytes / self.after.bytes

    @property
    def faster(self) -> dict[int, float]:
        """How many times as long an answer took, by number of samples."""
        return {rows: before / self.after.ms[rows] for rows, before in self.before.ms.items()}
