"""Links that are shared fairly: whatever is under way over a link gets the same, and what it cannot use others get.

That is how TCP divides a link between connections of about equal delay, and it is what makes a parameter server slow
for everybody at once instead of for the last in a queue. Rates are max-min fair and change only when something begins
or is over, so time goes from one such moment to the next.

Flows over the same links, and with the same limit of their own, always have the same rate. Those are one *class*: it
has one position, how many bytes any of its flows would have carried since the class began, and a flow is over when the
position has come to where it ends. So a moment costs as much as there are classes, not flows.

A *leaf* is a link whose flows all go on over the same other links, as a host's do that go to servers. To its n flows it
is a limit, of an n-th of it. So hosts with as many flows under way are of one class too; a flow changes its class when
another one of its host begins or is over.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

_LITTLE = 1e-9  # of a flow: what rounding may leave of it
NO_LEAF = -1


class _FlowClass:
    """Flows that are alike."""

    __slots__ = ("count", "ends", "limit", "links", "position", "rate")

    def __init__(self, limit: float, links: tuple[int, ...]) -> None:
        self.limit, self.links = limit, links
        self.position, self.rate = 0.0, 0.0
        self.count = 0
        self.ends: list[tuple[float, int, int]] = []  # a heap: position at the end, which flow, and which move of it


class _Flow:
    """A flow: what of it is left is from its class's position to its end."""

    __slots__ = ("alike", "end", "leaf", "limit", "links", "moves", "size")

    def __init__(self, size: float, limit: float, links: tuple[int, ...], leaf: int) -> None:
        self.size, self.limit, self.links, self.leaf = size, limit, links, leaf
        self.alike: _FlowClass | None = None
        self.end, self.moves = 0.0, 0


class FairLinks:
    """Carries flows over links of these capacities, in bytes a second.

    >>> links = FairLinks([10.0])
    >>> links.begin(0.0, 1, 30.0, math.inf, (0,))
    >>> links.begin(1.0, 2, 5.0, math.inf, (0,))
    >>> links.next_over(), links.over(2.0), links.next_over(), links.over(3.5)
    (2.0, [2], 3.5, [1])
    """

    def __init__(self, capacities: Sequence[float]) -> None:
        self._capacities = capacities
        self._flows: dict[int, _Flow] = {}
        self._on_leaf: dict[int, dict[int, _Flow]] = {}
        self._classes: dict[tuple[float, tuple[int, ...]], _FlowClass] = {}
        self._classes_on = [0] * len(capacities)
        self._at = 0.0
        self._changed: set[_FlowClass] = set()  # whose number of flows is another since rates were worked out
        self._next = math.inf

    def begin(
        self, now: float, flow: int, size: float, limit: float, links: tuple[int, ...], leaf: int = NO_LEAF
    ) -> None:
        """A flow of so many bytes begins; `limit` is what it could carry at most, `links` all but its leaf."""
        if now > self._at:
            self._advance(now)
        begun = self._flows[flow] = _Flow(size, limit, links, leaf)
        begun.end = size
        if leaf == NO_LEAF:
            self._put(flow, begun, limit)
        else:
            self._on_leaf.setdefault(leaf, {})[flow] = begun
            self._divide(leaf)

    def next_over(self) -> float:
        """Returns when the next flow is over, if none begins until then."""
        if self._changed:
            self._solve()
            at, self._next = self._at, math.inf
            for alike in self._classes.values():
                ends = alike.ends
                while self._has_moved(*ends[0][1:]):
                    heapq.heappop(ends)
                over_at = at + (ends[0][0] - alike.position) / alike.rate
                if over_at < self._next:
                    self._next = max(at, over_at)
        return self._next

    def over(self, now: float) -> list[int]:
        """Returns the flows that are over at `now`, which is not after `next_over`."""
        self._advance(now)
        done: list[int] = []
        little = 1e-15 * now  # what is shorter than this no clock of so many digits could show
        for alike in self._classes.values():
            ends = alike.ends
            while ends:
                end, flow, move = ends[0]
                if not self._has_moved(flow, move):
                    if end - alike.position > max(_LITTLE * self._flows[flow].size, little * alike.rate):
                        break
                    done.append(flow)
                heapq.heappop(ends)
        leaves = {}
        for flow in done:
            ended = self._flows.pop(flow)
            self._take(ended)
            if ended.leaf != NO_LEAF:
                del self._on_leaf[ended.leaf][flow]
                leaves[ended.leaf] = True
        for leaf in leaves:
            self._divide(leaf)
        return done

    def _has_moved(self, flow: int, move: int) -> bool:
        known = self._flows.get(flow)
        return known is None or known.moves != move

    def _divide(self, leaf: int) -> None:
        """Gives every flow over a leaf its part of it."""
        flows = self._on_leaf[leaf]
        if not flows:
            return
        part = self._capacities[leaf] / len(flows)
        for number, flow in flows.items():
            limit = min(part, flow.limit)
            if flow.alike is None:
                self._put(number, flow, limit)
            elif flow.alike.limit != limit:
                flow.end -= flow.alike.position
                self._take(flow)
                self._put(number, flow, limit)

    def _put(self, number: int, flow: _Flow, limit: float) -> None:
        """Puts a flow that has as much left as its end says into its class."""
        key = (limit, flow.links)
        if (alike := self._classes.get(key)) is None:
            alike = self._classes[key] = _FlowClass(limit, flow.links)
            for link in flow.links:
                self._classes_on[link] += 1
        flow.alike = alike
        flow.end += alike.position
        flow.moves += 1
        alike.count += 1
        heapq.heappush(alike.ends, (flow.end, number, flow.moves))
        self._changed.add(alike)

    def _take(self, flow: _Flow) -> None:
        """Takes a flow out of its class; one that is empty is gone."""
        alike = flow.alike
        assert alike is not None
        alike.count -= 1
        self._changed.add(alike)
        if not alike.count:
            del self._classes[alike.limit, alike.links]
            for link in alike.links:
                self._classes_on[link] -= 1

    def _advance(self, now: float) -> None:
        if self._changed:
            self._solve()
        for alike in self._classes.values():
            alike.position += alike.rate * (now - self._at)
        self._at = now

    def _solve(self) -> None:
        """Gives every class its rate. One that is alone on its links changes nobody else's."""
        classes_on = self._classes_on
        for alike in self._changed:
            there = 1 if alike.count else 0
            if any(classes_on[link] > there for link in alike.links):
                self._solve_all()
                break
            if there:
                rate = alike.limit
                for link in alike.links:
                    rate = min(rate, self._capacities[link] / alike.count)
                alike.rate = rate
        self._changed.clear()

    def _solve_all(self) -> None:
        """Again and again the tightest link is divided among those that are still without a rate."""
        open_classes = list(self._classes.values())
        left: dict[int, float] = {}
        users: dict[int, int] = {}
        for alike in open_classes:
            for link in alike.links:
                left[link] = self._capacities[link]
                users[link] = users.get(link, 0) + alike.count
        while open_classes:
            shares = {link: left[link] / count for link, count in users.items() if count}
            tightest = min(min(shares.values(), default=math.inf), min(alike.limit for alike in open_classes))
            still_open = []
            for alike in open_classes:
                if alike.limit <= tightest or any(shares[link] <= tightest * (1 + 1e-12) for link in alike.links):
                    alike.rate = tightest
                    for link in alike.links:
                        left[link] = max(0.0, left[link] - tightest * alike.count)
                        users[link] -= alike.count
                else:
                    still_open.append(alike)
            open_classes = still_open


def leaves_and_others(links: Sequence[tuple[int, ...]]) -> list[tuple[int, tuple[int, ...]]]:
    """Returns of each piece's links the one that is a leaf, if any is, and the others.

    >>> leaves_and_others([(0, 2), (0, 2), (1, 2), (2,)])
    [(0, (2,)), (0, (2,)), (1, (2,)), (-1, (2,))]
    """
    pieces_on: dict[int, list[int]] = {}
    for place, over in enumerate(links):
        for link in over:
            pieces_on.setdefault(link, []).append(place)
    ways = [(NO_LEAF, over) for over in links]
    for link, places in pieces_on.items():
        others = {tuple(other for other in links[place] if other != link) for place in places}
        if len(others) == 1:
            (rest,) = others
            # Where as many go on as come, it is no leaf: they are of one class anyway.
            if rest and all(len(pieces_on[other]) > len(places) for other in rest):
                for place in places:
                    ways[place] = (link, rest)
    return ways
