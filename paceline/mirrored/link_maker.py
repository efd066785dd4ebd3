"""Links to the other hosts, made anew for every view: Gloo's groups cannot lose a member and go on.

Each host's first member has a link to the first members of all others, its second to the second ones, and so on, for as
many as every host has. Where a host has more than that, because another has lost some, those compute and have no link.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from paceline.errors import ReplicaDied
from paceline.exchange.links import LOOK_EVERY, Links, Store, open_store
from paceline.exchange.members import MemberLost, Members
from paceline.exchange.together import Together
from paceline.exchange.words import HostWord

T = TypeVar("T")
MakeLinks = Callable[[Store, str, int, int], Links]  # the store, a name, this host's number among how many


class LinkMaker:
    """How one process comes to its links."""

    def __init__(self, together: Together, name: str, host: int, hosts: int, make: MakeLinks) -> None:
        """`name`: what tells these links from others of this process."""
        self.host, self.hosts = host, hosts
        self._together, self._name, self._make = together, name, make

    def open(self, members: Members) -> Links | None:
        """Returns the links of a view; None if this member has no like elsewhere. `MemberLost`: the view is over."""
        view = members.view
        assert view is not None
        lane = members.ranks.index(members.replica)
        if lane >= view.lanes or len(view.hosts) == 1:
            return None
        place, count = view.hosts.index(self.host), len(view.hosts)
        return made_in(members, self._together, lambda store: self._make(store, f"{self._name}-{lane}", place, count))


def made_in(members: Members, together: Together, make: Callable[[Store], T]) -> T:
    """Returns what `make` makes together with processes of other hosts, through the store of a view. `MemberLost`: the
    view is over."""
    view, board, timeout_s = members.view, together.board, together.timeout_s
    assert view is not None
    rendezvous = board.read_text(HostWord.STORE)
    made: Future[T] = Future()

    def work() -> None:
        try:
            store = open_store(rendezvous, serve=False, timeout_s=timeout_s)
            made.set_result(make(PrefixStore(f"view-{view.number}", store)))
        except Exception as error:
            made.set_exception(error)

    # In a thread, since it takes until all others have come, and one of them may die before.
    threading.Thread(target=work, name="paceline-links", daemon=True).start()
    while not wait([made], LOOK_EVERY.total_seconds()).done:
        board.check_view(members)
    try:
        return made.result()
    except ReplicaDied:  # whoever serves the store may have died, and that is not known yet
        raise MemberLost from None


class GivenLinks(LinkMaker):
    """Links of a run whose hosts all stay, or end together."""

    def __init__(self, links: Links) -> None:
        self.host, self.hosts, self._links = links.host, links.hosts, links

    def open(self, members: Members) -> Links | None:
        return self._links
