"""The mesh as one device sees it: its part of every dim, and how the parameters are used along each axis."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.exchange.mailboxes import DeviceGroup
from paceline.split.collectives import bounds
from paceline.split.layout.atoms import Atom, Dim, leaves, repeated

Cuts = dict[Atom, str]  # atoms that are in parts, and the axis


class Axes:
    """The mesh as this device sees it: its group along each axis, and which atoms lie along which."""

    def __init__(self, groups: dict[str, DeviceGroup], cuts: Cuts) -> None:
        self.groups = groups
        self._cuts = cuts

    def of(self, atom: Atom) -> str | None:
        """Returns the axis that an atom lies along; None if it is whole."""
        return self._cuts.get(atom.find())

    def cuts(self, dims: Sequence[Dim]) -> Cuts:
        """Returns the atoms of these dims that are in parts, and their axes. One that is there twice, as in the weight
        of a layer that gives what it takes, is whole: a part of both would be a block of the diagonal."""
        whole = repeated(dims)
        of = ((leaf, self.of(leaf)) for dim in dims for leaf in leaves(dim) if leaf not in whole)
        return {leaf: axis for leaf, axis in of if axis is not None}

    def range(self, atom: Atom) -> tuple[int, int]:
        """Returns where this device's part of an atom begins and ends."""
        axis = self.of(atom)
        if axis is None:
            return 0, atom.size
        group = self.groups[axis]
        edges = bounds(atom.size, group.count)
        return edges[group.index], edges[group.index + 1]

    def part(self, atom: Atom) -> int:
        """Returns how long this device's part of an atom is."""
        start, stop = self.range(atom)
        return stop - start


class Usage:
    """How parameters are used: along which axes a device's gradient is a summand. Along all others all find the same.

    An operator that finds the same where another has a summand counts on the first device alone (`heard_once`)."""

    def __init__(self) -> None:
        self.summand: dict[str, set[str]] = {}

    def note(self, name: str, working: set[str]) -> None:
        """Notes that a parameter is used in an operator that works along these axes, and does not lie along them."""
        self.summand.setdefault(name, set()).update(working)

    def is_summand(self, name: str, axis: str) -> bool:
        """Returns whether devices have summands of a parameter's gradient along an axis."""
        return axis in self.summand.get(name, ())
