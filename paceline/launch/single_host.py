"""The meeting of a run on one host: what `Meeting` is to a supervisor that has others, with nobody else there."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from paceline.launch.host_messages import HostMessage, RunBegins


class SingleHost:
    """Nobody comes, and nobody hears."""

    descriptor: int | None = None

    def __init__(self) -> None:
        self.code: int | None = None  # of the run, once it is over

    def address(self) -> str | None:
        return "127.0.0.1"

    def gather(self, servers: Mapping[int, str], container: str) -> Callable[[], RunBegins | None]:
        begins = RunBegins(container=container, addresses=list(servers.values()), hosts=[0])
        return lambda: begins

    def tell(self, message: HostMessage) -> None:
        """There is nobody to hear it."""

    def tell_first(self, message: HostMessage) -> None:
        """There is nobody to hear it."""

    def speak(self) -> None:
        """There is nobody to hear it."""

    def news(self) -> list[HostMessage]:
        return []

    def finish(self, code: int, *, trained: bool) -> None:
        self.code = code

    def leave(self) -> None:
        """There is nobody to leave."""

    def refuse(self, host: int, why: str) -> None:
        """Nobody comes."""

    def close(self) -> None:
        """There are no connections."""
