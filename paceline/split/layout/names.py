"""Names for dims: those the user gives by pattern, and for the rest as what operators use them.

vocab     the rows of an embedding, and the   embed     what goes from layer to layer: an embedding's width, what is
          words among which a loss decides              normalized, or the input where some layer gives the same again
length    rows by position                    hidden    given by one layer, taken by the next; `channels` of
kinds     rows by what a word is, of few                convolutions
heads     that share no keys; in each         in, out   taken from the input, given at the end
groups    of queries with the same keys       parts     pieces that a layer's result is taken apart into
width     of one head                         factor    of a dim that is reshaped otherwise
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
        self._parts = {leaf for dim, word in seen_as if word == "parts" for leaf in leaves(dim)}
        for dim, word in seen_as:
            factors = self._but_parts(leaves(dim))
            for number, leaf in enumerate(factors):
                if word == "heads":
                    self._words.setdefault(leaf, set()).add("groups" if number else "heads")
                elif len(factors) == 1 or word in ("kernel", "parts"):
                    self._words.setdefault(leaf, set()).add(word)
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

    def parameter_with(self, name: str) -> str:
        """Returns a parameter that has a dim of this name."""
        of = self.named(name)
        return next(
            own for own, dims in self._parameters.items() if any(leaf in of for dim in dims for leaf in leaves(dim))
        )

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

    def _but_parts(self, factors: Dim) -> Dim:
        return [leaf for leaf in factors if leaf not in self._parts] or factors

    def _meaning(self, group: list[Atom]) -> str:
        words = set().union(*(self._words.get(atom, set()) for atom in group))
        places = [place for atom in group for place in self._seen[atom]]
        named = next((name for word, name in _BY_WORD.items() if word in words), None)
        if named is not None:
            return named
        fed = any(atom in self._input_atoms for atom in group)
        if "normalized" in words or (fed and "given" in words):
            return "embed"
        if words & {"channels given", "channels taken"}:
            split = any(place.factors > 1 for place in places)
            given, taken = words & {"channels given", "given"}, split or words & {"channels taken", "taken"}
            return "channels" if given and taken else "out" if given else "in"
        if factor := self._as_factor(places):
            return factor
        if words >= {"given", "taken"}:
            return "hidden"
        if not words and any(map(self._is_before_embed, places)):
            return "length"
        return "in" if "taken" in words else "out" if "given" in words else "rows"

    def _as_factor(self, places: list[Seen]) -> str | None:
        """Returns the name of a factor of a dim by what stands beside it."""
        for place in places:
            factors = leaves(self._parameters[place.parameter][place.dim])
            heads = [number for number, leaf in enumerate(factors) if "heads" in self._words.get(leaf, ())]
            if heads:
                return "parts" if place.factor < heads[0] else "width"
            if len(self._but_parts(factors)) > 1:
                return "factor"
        return None

    def _is_before_embed(self, place: Seen) -> bool:
        """Returns whether something is added in every place: the last dim is that of what goes from layer to layer."""
        dims = self._parameters[place.parameter]
        last = {word for leaf in leaves(dims[-1]) for word in self._words.get(leaf, ())}
        return place.dim == len(dims) - 2 and bool(last & {"normalized", "table"})


_BY_WORD = {
    "rows": "vocab", "words": "vocab", "positions": "length", "kinds": "kinds", "heads": "heads", "groups": "groups",
    "parts": "parts", "table": "embed",
}  # fmt: skip
