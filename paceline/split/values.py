"""The ways to cut one model, as values: what was asked for, checked as far as it can be without the model.

No torch here: the command line and the supervisor read these.
"""

from __future__ import annotations

import math
from typing import ClassVar

import msgspec

from paceline.errors import StrategyError, nearest_first

BATCH = "batch"  # the dim whose split is data parallelism
SCHEDULES = ("1f1b", "gpipe")


class Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="layout"):
    """Cuts by named dimension: `layout` says which dim of the tensors lies along which axis of the mesh.

    >>> Layout(mesh={"data": 2, "model": 2}, layout={"batch": "data", "hidden": "model"}).devices
    2
    """

    mesh: dict[str, int]
    layout: dict[str, str]

    captures: ClassVar[bool] = True  # a graph of the model, always
    over_hosts: ClassVar[bool] = False  # devices of a replica may be on several: little crosses between them

    def __post_init__(self) -> None:
        for axis, size in self.mesh.items():
            if size < 1:
                raise StrategyError("mesh", f"{axis}={size}", "give every axis a size from 1 up")
        for dim, axis in self.layout.items():
            if axis not in self.mesh:
                known = ", ".join(nearest_first(axis, list(self.mesh)))
                raise StrategyError("layout", f"{dim}={axis}", f"the mesh has no axis {axis!r}, it has {known}")
        used = list(self.layout.values())
        for axis in self.mesh:
            if used.count(axis) > 1 and self.layout.get(BATCH) == axis:
                other = next(dim for dim, a in self.layout.items() if a == axis and dim != BATCH)
                raise StrategyError("layout", f"{other}={axis}", f"that axis divides the batch, give {other} another")

    @property
    def parts_of_batch(self) -> int | None:
        """How many replicas it divides the batch among; None: that is left to others."""
        return self.mesh[self.layout[BATCH]] if BATCH in self.layout else None

    @property
    def axes(self) -> dict[str, int]:
        """Returns the axes that cut the model, in the mesh's order."""
        return {axis: size for axis, size in self.mesh.items() if axis != self.layout.get(BATCH)}

    @property
    def devices(self) -> int:
        """Returns how many devices a replica has."""
        return math.prod(self.axes.values())

    @property
    def words(self) -> str:
        """Returns it as the settings of a run show it."""
        _, mesh, _, layout = self.flags()
        return f"mesh {mesh}, layout {layout}"

    def flags(self) -> list[str]:
        """What `paceline run` is given to have this cut."""
        mesh, layout = (",".join(f"{a}={b}" for a, b in pairs.items()) for pairs in (self.mesh, self.layout))
        return ["--mesh", mesh, "--layout", layout]


class Stages(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="stages"):
    """Cuts by layer: every device has some of the layers, and micro-batches go from one to the next."""

    stages: int
    micro_batches: int = 1
    schedule: str = "1f1b"
    cut_at: tuple[str, ...] = ()  # modules at which a new stage begins; none: by measured cost

    parts_of_batch: ClassVar[None] = None
    captures: ClassVar[bool] = True
    over_hosts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for field, value in (("stages", self.stages), ("micro-batches", self.micro_batches)):
            if value < 1:
                raise StrategyError(field, value, "give a whole number from 1 up")
        if self.schedule not in SCHEDULES:
            known = ", ".join(nearest_first(self.schedule, list(SCHEDULES)))
            raise StrategyError("schedule", self.schedule, f"give one of {known}")
        if self.cut_at and len(self.cut_at) != self.stages - 1:
            raise StrategyError(
                "cut-at", ",".join(self.cut_at), f"{self.stages} stages begin at {self.stages - 1} modules, name those"
            )

    @property
    def devices(self) -> int:
        return self.stages

    @property
    def words(self) -> str:
        return f"{self.stages} stages, {self.micro_batches} micro-batches, {self.schedule}"

    def flags(self) -> list[str]:
        """What `paceline run` is given to have this cut."""
        flags = ["--stages", str(self.stages), "--micro-batches", str(self.micro_batches), "--schedule", self.schedule]
        return [*flags, "--cut-at", ",".join(self.cut_at)] if self.cut_at else flags


class Tiles(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="tiles"):
    """Cuts by image region: every device has a tile of each activation, and halos are exchanged."""

    rows: int
    columns: int = 1

    parts_of_batch: ClassVar[None] = None
    captures: ClassVar[bool] = False
    over_hosts: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.rows < 1 or self.columns < 1:
            raise StrategyError("tiles", f"{self.rows}x{self.columns}", "give a number of rows, or rows x columns: 2x2")

    @property
    def devices(self) -> int:
        return self.rows * self.columns

    @property
    def words(self) -> str:
        return f"tiles {self.rows}x{self.columns}"

    def flags(self) -> list[str]:
        """What `paceline run` is given to have this cut."""
        return ["--tiles", f"{self.rows}x{self.columns}"]


class Wavefront(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="wavefront"):
    """Cuts stacked recurrent layers by layer and time: layer l works at block t while layer l + 1 works at block t -
    1."""

    parts: int
    time_block: int = 8

    parts_of_batch: ClassVar[None] = None
    captures: ClassVar[bool] = False  # but of cells in a loop
    over_hosts: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise StrategyError("wavefront", self.parts, "give a number of devices from 1 up")
        if self.time_block < 1:
            raise StrategyError("time-block", self.time_block, "give a number of time steps from 1 up")

    @property
    def devices(self) -> int:
        return self.parts

    @property
    def words(self) -> str:
        return f"wavefront {self.parts}, time blocks of {self.time_block}"

    def flags(self) -> list[str]:
        """What `paceline run` is given to have this cut."""
        return ["--wavefront", str(self.parts), "--time-block", str(self.time_block)]


Split = Layout | Stages | Tiles | Wavefront
