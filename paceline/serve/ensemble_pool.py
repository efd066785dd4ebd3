"""Several models that answer as one, each with processes, a queue and versions of its own.

    request ──┬──▶ pool of member a ──▶ answer ───────────┐
              ├──▶ pool of member b ──▶ answer ───────────┼──▶ combined, of those that are in time
              └──▶ pool of member c ──▶ late, dead, busy ─┘    (at least the quorum)

Every member is asked at the same moment, and for the version that it has at that moment: a version of the ensemble is
one version of each member, and an answer is of one of them. A member that is late for one question is passed over in
the next ones until it has answered: its own queue foresees that it will not be in time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from paceline.combining import Combination
from paceline.errors import ModelError
from paceline.serve.batching import Refusal
from paceline.serve.model_pool import ModelPool, Pending
from paceline.serve.request_error import NOT_COMPUTED, REFUSED, TOO_LATE, UNAVAILABLE, UNKNOWN, RequestError
from paceline.serve.served_model import Arrays, ServedAnswer
from paceline.serve.serving_metrics import ServingMetrics

COMBINING_S = 0.002  # of a deadline that are left for putting answers together, or a tenth if that is less
VERSIONS_KEPT = 64  # whose numbers are remembered


class EnsemblePool:
    """Answers requests with what its members say together."""

    def __init__(
        self, pools: Mapping[str, ModelPool], combination: Combination, quorum: int, metrics: ServingMetrics
    ) -> None:
        self.metrics = metrics
        self._pools, self._combination, self._quorum = dict(pools), combination, quorum
        self._version_numbers: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self._last_number = 0

    # ── versions ─────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def version(self) -> int | None:
        """Returns the number of the version that answers: that of the members' versions as they are now."""
        now = tuple(pool.queue.version for pool in self._pools.values())
        if 0 in now:
            return None
        if now not in self._version_numbers:
            self._last_number += 1
            self._version_numbers[now] = self._last_number
            if len(self._version_numbers) > VERSIONS_KEPT:
                self._version_numbers.popitem(last=False)
        return self._version_numbers[now]

    @property
    def versions(self) -> list[int]:
        """Returns the versions that can be asked by number: those of which every member still has its part."""
        there = [set(pool.versions) for pool in self._pools.values()]
        known = [
            number
            for members, number in self._version_numbers.items()
            if all(version in versions for version, versions in zip(members, there, strict=True))
        ]
        return sorted({*known, *([self.version] if self.version is not None else [])})

    @property
    def is_ready(self) -> bool:
        """Returns whether as many members answer as an answer needs."""
        return sum(pool.is_ready for pool in self._pools.values()) >= self._quorum

    @property
    def problem(self) -> str:
        """Returns what is wrong with the source of versions of any member; empty if nothing is."""
        return "; ".join(filter(None, (pool.problem for pool in self._pools.values())))

    @property
    def most_rows(self) -> int:
        """Returns how many rows are computed together at most."""
        return max(pool.most_rows for pool in self._pools.values())

    @property
    def processes(self) -> dict[str, int]:
        """Returns the numbers of the processes, by member and name."""
        return {
            f"{member} {name}": process
            for member, pool in self._pools.items()
            for name, process in pool.processes.items()
        }

    async def load(self) -> int:
        """Takes what the members' sources have now as new versions of all of them, or if that fails of none, and
        returns the ensemble's."""
        async with contextlib.AsyncExitStack() as all_loaded:
            loading = [all_loaded.enter_async_context(pool.loading()) for pool in self._pools.values()]
            for found in await asyncio.gather(*loading, return_exceptions=True):
                if isinstance(found, BaseException):
                    raise found
        version = self.version
        assert version is not None
        return version

    async def unload(self) -> None:
        """Has nobody answer any more."""
        await asyncio.gather(*(pool.unload() for pool in self._pools.values()))

    async def look(self) -> None:
        """Loads what has changed of any member, and ends processes that are stuck."""
        await asyncio.gather(*(pool.look() for pool in self._pools.values()))

    async def close(self) -> None:
        """Ends all processes."""
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))

    # ── answers ──────────────────────────────────────────────────────────────────────────────────────────────

    def refusal(self, deadline_s: float) -> Refusal | None:
        """Returns why no request could be answered by a quorum in that time; None: one might."""
        found = [pool.foreseen(_for_members(deadline_s)) for pool in self._pools.values()]
        refusals = sorted(filter(None, found), key=lambda refusal: refusal.retry_after_s)
        if len(found) - len(refusals) >= self._quorum:
            return None
        self.metrics.refused.labels("quorum").inc()
        return refusals[self._quorum - (len(found) - len(refusals)) - 1]

    def ask(self, inputs: Arrays, rows: int, deadline_s: float, version: int | None) -> asyncio.Future[ServedAnswer]:
        """Returns what will have the answer of the members that are in time, or the RequestError that says why there is
        none. Whoever cancels it has gone away."""
        return asyncio.ensure_future(self._answer(inputs, rows, deadline_s, version))

    async def _answer(self, inputs: Arrays, rows: int, deadline_s: float, version: int | None) -> ServedAnswer:
        number, versions = self._wanted(version)
        asked: dict[str, Pending] = {}
        errors: dict[str, RequestError] = {}
        answers: dict[str, ServedAnswer] = {}
        try:
            for member, pool in self._pools.items():
                try:
                    limit_s = _for_members(deadline_s)
                    asked[member] = pool.submit(inputs, rows, limit_s, versions[member], late_s=0.0)
                except RequestError as error:
                    errors[member] = error
            for member, pending in asked.items():
                if len(self._pools) - len(errors) < self._quorum:
                    break  # nobody needs to wait for the others
                try:
                    answers[member] = await pending.future
                except RequestError as error:
                    errors[member] = error
        except asyncio.CancelledError:
            self.metrics.left.inc()
            raise
        finally:
            for member, pending in asked.items():
                self._pools[member].withdraw(pending)
        if len(answers) < self._quorum:
            raise self._too_few(answers, errors)
        for member in errors:
            self.metrics.missing.labels(member).inc()
        return self._combined(number, answers, errors)

    def _wanted(self, version: int | None) -> tuple[int, dict[str, int]]:
        now = self.version
        if now is None:
            raise RequestError(UNAVAILABLE, "the model is not loaded: POST /v2/repository/models/NAME/load loads it")
        wanted = now if version is None else version
        for members, number in self._version_numbers.items():
            if number == wanted:
                return number, dict(zip(self._pools, members, strict=True))
        raise RequestError(UNKNOWN, f"version is {version}: the one that answers is {now}")

    def _combined(
        self, number: int, answers: Mapping[str, ServedAnswer], errors: Mapping[str, RequestError]
    ) -> ServedAnswer:
        members = [at for at, member in enumerate(self._pools) if member in answers]
        parts = list(answers.values())
        try:
            output, arrays = _one_output([part.outputs for part in parts])
            value = self._combination.of(arrays, members)
        except ModelError as error:
            raise RequestError(NOT_COMPUTED, f"the answers cannot be combined: {error}") from error
        slowest = max(parts, key=lambda part: part.waited_s + part.computed_s)
        return replace(
            slowest,
            outputs={output: value},
            version=number,
            process=" ".join(f"{member}/{part.process}" for member, part in answers.items()),
            members=dict(answers),
            missing={member: str(error) for member, error in errors.items()},
        )

    def _too_few(self, answers: Mapping[str, ServedAnswer], errors: Mapping[str, RequestError]) -> RequestError:
        """Returns what is told when the quorum was missed: as one member would have told it, if all agree in that."""
        statuses = {error.status for error in errors.values()}
        status = statuses.pop() if len(statuses) == 1 else TOO_LATE if statuses == {REFUSED, TOO_LATE} else UNAVAILABLE
        reasons = "; ".join(f"{member}: {error}" for member, error in errors.items())
        retry = max((error.retry_after_s for error in errors.values() if error.retry_after_s is not None), default=None)
        known = f"{len(answers)} of {len(self._pools)} members have answered" if answers else "no member has answered"
        return RequestError(status, f"{known} and the quorum is {self._quorum} ({reasons})", retry)


def _for_members(deadline_s: float) -> float:
    """Returns how long members may take, of so many seconds."""
    return deadline_s - min(COMBINING_S, deadline_s / 10)


def _one_output(answers: Sequence[Mapping[str, np.ndarray]]) -> tuple[str, list[np.ndarray]]:
    """Returns the name of the one tensor that each member answers with, and those tensors."""
    names = {tuple(outputs) for outputs in answers}
    if len(names) > 1 or len(next(iter(names))) != 1:
        told = " and ".join(", ".join(one) for one in sorted(names))
        raise ModelError("a member's answer", told, "let each member answer with one tensor of the same name")
    ((name,),) = names
    return name, [outputs[name] for outputs in answers]
