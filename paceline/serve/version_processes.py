"""The processes of one model, by version: started, replaced, ended. What they are asked is `model_pool`'s.

A version has its own processes, forked from the template with the version's copy of the tensors, and is there when all
of them are ready.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import PacelineError, ReplicaDied
from paceline.serve.model_process import ModelProcess
from paceline.serve.template import FromTemplate, Template
from paceline.serve.version_source import TakenVersion, VersionSource

MOST_TRIES = 3  # to have a process ready that is killed while it starts
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # before a process that failed to start is tried again


@dataclass
class VersionProcess:
    """One process, of one version; `batch`: what it is at, since when."""

    process: ModelProcess
    version: int
    started: asyncio.Future[None]
    batch: list[Any] = field(default_factory=list)
    since: float = 0.0


class VersionProcesses:
    """All processes there are, by name, and the copies that versions are made of."""

    def __init__(
        self,
        template: Template,
        source: VersionSource,
        cores: Sequence[Sequence[int]],
        *,
        heard: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        """`cores`: those of each process of a version. `heard` is called with the name of one that has said
        something."""
        self._template, self._source, self._cores, self._heard, self._note = template, source, cores, heard, note
        self.by_name: dict[str, VersionProcess] = {}
        self.taken: dict[int, TakenVersion] = {}
        self._versions = self._names = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def make_version(self) -> tuple[int, list[str]]:
        """Takes what the source has now, and returns a new version's number and its processes, all of which have been
        ready; `discard` lets go of them."""
        taken = await asyncio.to_thread(self._source.take)
        self._versions += 1
        version = self._versions
        self.taken[version] = taken
        started = await asyncio.gather(*(self._ready(version, cores) for cores in self._cores), return_exceptions=True)
        names = [one for one in started if isinstance(one, str)]
        for one in started:
            if isinstance(one, BaseException):
                self.discard(version, names)
                raise one
        return version, names

    def discard(self, version: int, names: Sequence[str]) -> None:
        """Lets a version go that is not going to answer."""
        for name in names:
            self.drop(name)
        os.close(self.taken.pop(version).copy)

    async def replace(self, name: str, wanted: Callable[[int], bool]) -> str | None:
        """Starts another process in the place of one that died, until one is ready, and returns its name; None: its
        version is not `wanted` any more."""
        dead = self.by_name[name]
        pause, cores, version = FIRST_PAUSE_S, dead.process.cores, dead.version
        self.drop(name)
        while wanted(version):
            try:
                new = await self._ready(version, cores)
            except PacelineError as error:
                self._note(f"a process of version {version} could not be started: {error}")
                await asyncio.sleep(pause)
                pause = min(LONGEST_PAUSE_S, 2 * pause)
                continue
            if wanted(version):
                return new
            self.drop(new)
        return None

    async def _ready(self, version: int, cores: Sequence[int]) -> str:
        """Returns the name of a new process that is ready. One that is killed before says nothing about its version:
        another is tried."""
        tries = 0
        while True:
            tries += 1
            name = await self._start(version, cores)
            try:
                await self.by_name[name].started
                return name
            except ReplicaDied:
                self.drop(name)
                if tries == MOST_TRIES:
                    raise
            except BaseException:
                self.drop(name)
                raise

    async def _start(self, version: int, cores: Sequence[int]) -> str:
        self._names += 1
        name = f"{version}.{self._names}"
        starter = FromTemplate(self._template, self._source.words, self.taken[version].copy)
        process = await asyncio.to_thread(ModelProcess, starter, name=name, cores=cores, torch_tensors=False)
        loop = asyncio.get_running_loop()
        self.by_name[name] = VersionProcess(process, version, loop.create_future())
        loop.add_reader(process.fileno(), self._heard, name)
        return name

    def drop(self, name: str) -> None:
        """Lets a process end, and forgets it."""
        if (member := self.by_name.pop(name, None)) is not None:
            asyncio.get_running_loop().remove_reader(member.process.fileno())
            member.started.cancel()  # nobody will hear that it is ready: whoever waits for that would wait for ever
            self.spawn(_closed(member.process))

    def forget_versions(self, answering: int) -> None:
        """Lets go of the copies of versions that have no process and do not answer."""
        used = {member.version for member in self.by_name.values()} | {answering}
        for version in [version for version in self.taken if version not in used and version < self._versions]:
            os.close(self.taken.pop(version).copy)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Has something done beside."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Ends all processes, and returns when they have ended."""
        for name in list(self.by_name):
            self.drop(name)
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        for taken in self.taken.values():
            os.close(taken.copy)
        self.taken = {}
        await asyncio.to_thread(self._source.close)


async def _closed(process: ModelProcess) -> None:
    await asyncio.to_thread(process.close)
