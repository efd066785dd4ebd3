"""Names for dims: those the user gives by pattern, and for the rest as what operators use them.

vocab     the rows of an embedding            embed     what goes from layer to layer: an embedding's width, what is
length    those of one by position                      normalized, or the input where some layer gives the same again
heads     the factors of an attention's dims  hidden    given by one layer, taken by the next; `channels` of
width     of one head                                   convolutions
                                              in, out   taken from the input, given at the end
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import StrategyError, nearest_first
from paceline.split.layout.atoms import Atom, Dim, Dims, leaves
from paceline.split.values import BATCH

_Role = tuple[str, frozenset[str], tuple[int, ...], int, int]  # what atoms in blocks that are alike have in common


@dataclass(frozen=True)
class Seen:
    """One place where an atom is: of which parameter, which dim, which factor of that dim, of how many."""

    parameter: str
    dim: int
    factor: int
    factors: int


class Names:
    """The names of all atoms of a model's parameters."""

    def __init__(
        self, parameters: Mapping[str, Dims], inputs: Sequence[Dims], seen_as: Sequence[tuple[Dim, str]]
    ) -> None:
        """`seen_as`: dims, and as what operators have used them."""
        self._parameters = parameters
        self._input_atoms = {leaf for dims in inputs for dim in dims[1:] for leaf in leaves(dim)}
        self._words: dict[Atom, set[str]] = {}
        for dim, word in seen_as:
            factors = leaves(dim)
            for number, leaf in enumerate(factors):
                counts = len(factors) == 1 or word == "kernel" or (word == "heads" and number == 0)
                self._words.setdefault(leaf, set()).add(word if counts else "factor")
        self._seen: dict[Atom, list[Seen]] = {}
        for name, dims in parameters.items():
            for number, dim in enumerate(dims):
                factors = leaves(dim)
                for factor, leaf in enumerate(factors):
                    if leaf.size == 1 or "kernel" in self._words.get(leaf, ()):
                        continue  # a kernel's extent is nobody else's
                    self._seen.setdefault(leaf, []).append(Seen(name, number, factor, len(factors)))
        self._of: dict[Atom, str] = {}
        self._by_itself: set[Atom] = set()  # those that the user has not named

    def give(self, patterns: Mapping[str, str]) -> None:
        """Gives all of them a name: first as the user says, by pattern, then the others."""
        self._take_patterns(patterns)
        taken = set(self._of.values())
        for group in self._groups():
            own = {self._of[atom] for atom in group if atom in self._of}
            if own:
                name = sorted(own)[0]
            else:
                name = self._free_name(self._meaning(group), group, taken)
                taken.add(name)
            for atom in group:
                self._of.setdefault(atom, name)

    def of(self, atom: Atom) -> str:
        """Returns the name of an atom; an empty one if it is no parameter's."""
        return self._of.get(atom.find(), "")

    def named(self, name: str) -> set[Atom]:
        """Returns the atoms that have this name."""
        return {atom for atom, own in self._of.items() if own == name}

    @property
    def known(self) -> list[str]:
        """Returns all names, in the order of the model."""
        return list(dict.fromkeys(self._of.values()))

    def describe(self, name: str) -> str:
        """Returns a parameter's dims, as `paceline dims` prints them."""
        dims = self._parameters[name]
        return " ".join("·".join(self.of(leaf) or str(leaf.size) for leaf in leaves(dim)) for dim in dims)

    def check(self, dim: str) -> None:
        """Refuses the name of a dim that the model does not have."""
        if dim != BATCH and dim not in self._of.values():
            known = ", ".join(nearest_first(dim, [*self.known, BATCH]))
            raise StrategyError("layout", dim, f"no parameter has such a dim, there are {known} (paceline dims)")

    # ── from patterns ────────────────────────────────────────────────────────────────────────────────────

    def _take_patterns(self, patterns: Mapping[str, str]) -> None:
        for pattern, words in patterns.items():
            matching = [name for name in self._parameters if fnmatch.fnmatchcase(name, pattern)]
            if not matching:
                near = ", ".join(nearest_first(pattern, list(self._parameters))[:3])
                raise StrategyError("dims", pattern, f"no parameter is called so, there are {near} …")
            for name in matching:
                dims, given = self._parameters[name], words.split()
                if len(dims) != len(given):
                    raise StrategyError("dims", f"{pattern}: {words}", f"{name} has {len(dims)} dims, name each")
                for dim, word in zip(dims, given, strict=True):
                    atoms, parts = leaves(dim), re.split("[·*]", word)
                    if len(parts) != len(atoms):
                        wanted = "·".join(str(atom.size) for atom in atoms)
                        raise StrategyError(
                            "dims", f"{pattern}: {word}", f"that dim of {name} is {wanted}, name each factor: a·b"
                        )
                    for atom, part in zip(atoms, parts, strict=True):
                        if self._of.setdefault(atom, part) != part:
                            raise StrategyError(
                                "dims", f"{pattern}: {word}", f"that dim of {name} is called {self._of[atom]} already"
                            )

    # ── by themselves ────────────────────────────────────────────────────────────────────────────────────

    def _groups(self) -> list[list[Atom]]:
        """Returns atoms that deserve one name, together: those in the same place in blocks that are alike, unless
        that would give two dims of one parameter the same name."""
        groups: list[list[Atom]] = []
        of: dict[_Role, list[Atom]] = {}
        for atom, places in self._seen.items():
            words = frozenset(self._words.get(atom, ()))
            keys = [self._role(place, words) for place in places]
            home = next((of[key] for key in keys if key in of and self._fits(of[key], atom)), None)
            if home is None:
                home = []
                groups.append(home)
            home.append(atom)
            for key in keys:
                of.setdefault(key, home)
        return groups

    def _role(self, place: Seen, words: frozenset[str]) -> _Role:
        shape = tuple(leaf.size for dim in self._parameters[place.parameter] for leaf in leaves(dim))
        return re.sub(r"\d+", "*", place.parameter), words, shape, place.dim, place.factor

    def _free_name(self, meaning: str, group: list[Atom], taken: set[str]) -> str:
        """Returns the name, or the first numbered one, that no other dim of the same parameters has, nor one of another
        size or that the user has named."""
        for number in itertools.count(1):
            name = meaning if number == 1 else f"{meaning}{number}"
            others = self.named(name)
            if name not in taken or (
                others & self._by_itself
                and {atom.size for atom in others} == {atom.size for atom in group}
                and all(self._fits(group, other) for other in others)
            ):
                self._by_itself.update(group)
                return name
        raise AssertionError("numbers end")

    def _fits(self, group: list[Atom], atom: Atom) -> bool:
        theirs = {place.parameter for other in group for place in self._seen[other]}
        return not any(place.parameter in theirs for place in self._seen[atom])

    def _meaning(self, group: list[Atom]) -> str:
        words = set().union(*(self._words.get(atom, set()) for atom in group))
        for word, name in (("rows", "vocab"), ("positions", "length"), ("heads", "heads"), ("table", "embed")):
            if word in words:
                return name
        places = [place for atom in group for place in self._seen[atom]]
        factor = next((place for place in places if place.factors > 1), None)
        if factor is not None:
            behind = factor.factors - 1 - factor.factor
            return ("width", "heads", "parts")[min(2, behind)]
        fed = any(atom in self._input_atoms for atom in group)
        if "normalized" in words or (fed and "given" in words):
            return "embed"
        if words & {"channels given", "channels taken"}:
            both = words & {"channels given", "given"} and words & {"channels taken", "taken"}
            return "channels" if both else "in" if "channels taken" in words else "out"
        if words >= {"given", "taken"}:
            return "hidden"
        return "in" if "taken" in words else "out" if "given" in words else "rows"
