"""Which requests go together, to which process, and which are refused: all decisions of serving, and nothing else.

    arrive ─▶ waiting ──dispatch──▶ running on a process ──▶ answered
       │         │                      │
       │         ├─ leave (client gone) ├─ failed together: waits again, alone
       │         └─ expire              └─ its process died: waits again, alone, at most `MOST_TRIES` times
       └─ refused at once: no room, or its deadline cannot be met

A request that finds a free process goes at once: nobody waits for a batch to fill. Those that find all processes busy
are put together for the next one that is free, as many as `most_rows` allows, if they are of the same shape. So batches
grow with the load, and only with it.

Whoever is taken shall be answered in time, so what is predicted is held against the deadline with some room: three
times what predictions have been off by. A process that takes longer than was predicted is expected to take as much
longer again, so one that hangs makes nobody wait for long.

There is no clock, socket, process or tensor in here: times are told, processes are names, requests are values.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

from paceline.serve.service_time import ServiceTime

MOST_TRIES = 2  # of a request whose process died
MOST_SHAPES = 64  # whose service times are kept
ROOM = 3.0  # times what predictions are off by, on average


@dataclass
class Asked:
    """A request: what decides with which others it goes, and until when it must be answered."""

    number: int
    shape: Hashable  # those with the same go together
    rows: int  # that its tensors have; 0: they have no first dim in common, and it always goes alone
    deadline: float
    version: int | None = None  # that must answer it; None: the newest
    alone: bool = False  # it failed, or its process died, together with others
    tries: int = 0  # processes that have died over it

    @property
    def joins(self) -> bool:
        """Returns whether it may go together with others."""
        return self.rows > 0 and not self.alone


@dataclass(frozen=True)
class Refusal:
    """Why a request is not taken, and when it may be worth asking again."""

    why: str
    retry_after_s: float


@dataclass
class _ProcessState:
    version: int
    running: list[Asked] = field(default_factory=list)
    since: float = 0.0
    until: float = 0.0  # when it will have answered, as far as can be told

    def left_s(self, now: float) -> float:
        """Returns after how many seconds it will be free."""
        return abs(self.until - now) if self.running else 0.0


@dataclass(frozen=True)
class _Ahead:
    """What one version's processes have before them, but for what they are at."""

    states: list[_ProcessState]
    seconds: float  # of all batches that wait
    room_s: float  # that a prediction needs
    partly: dict[Hashable, tuple[int, float]]  # by shape: the last batch, if others may join it; its rows, its seconds

    @property
    def is_free(self) -> bool:
        """Returns whether a process has nothing to do, or there is none to tell anything by."""
        return not self.states or any(not state.running for state in self.states)

    def until_begun_s(self, now: float, joined_s: float) -> float:
        """Returns after how many seconds a request is begun that joins a batch of so many seconds; 0: it joins none."""
        return min(state.left_s(now) for state in self.states) + (self.seconds - joined_s) / len(self.states)


class RequestQueue:
    """The requests of one model, and the processes that answer them."""

    def __init__(self, most_rows: int, most_waiting: int) -> None:
        self.most_rows, self.most_waiting = most_rows, most_waiting
        self._version = 0
        self.waiting: OrderedDict[int, Asked] = OrderedDict()
        self._processes: dict[str, _ProcessState] = {}
        self._times: OrderedDict[Hashable, ServiceTime] = OrderedDict()
        self._ahead: dict[int, _Ahead] = {}  # by version, until something changes

    @property
    def version(self) -> int:
        """Returns the version that answers requests which name none; 0: there is none."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        self._ahead.clear()
        self._version = version

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────

    def arrive(self, asked: Asked, now: float) -> Refusal | None:
        """Takes a request, and returns None; or why not. One that finds a free process is taken whatever was predicted:
        else a model that was slow once would be thought so for ever."""
        if not self._free(asked):
            room = self._ahead_of(asked.version).room_s
            if (refusal := self._refusal(self.predicted_s(asked, now), room, asked.deadline - now)) is not None:
                return refusal
        self._ahead.clear()
        self.waiting[asked.number] = asked
        return None

    def refusal(self, deadline: float, now: float) -> Refusal | None:
        """Returns why no request, whatever it is, could be answered by then; None: one might."""
        if any(not state.running and state.version == self._version for state in self._processes.values()):
            return None
        ahead = self._ahead_of(None)
        if not ahead.states:  # there is nothing to tell anything by
            return None
        joined_s = max((seconds for _, seconds in ahead.partly.values()), default=0.0)
        shortest_s = min((time.of(1) for time in self._times.values()), default=0.0)
        return self._refusal(ahead.until_begun_s(now, joined_s) + shortest_s, ahead.room_s, deadline - now)

    def _refusal(self, predicted: float, room: float, left: float) -> Refusal | None:
        if len(self.waiting) >= self.most_waiting:
            return Refusal(f"{len(self.waiting)} requests are waiting, and there is no room for more", predicted)
        if predicted + room <= left:
            return None
        about = f"{predicted:.3g} s" if predicted > left else f"{predicted:.3g} s, give or take {room:.3g} s,"
        why = f"its answer would take about {about} and its deadline is in {max(0.0, left):.3g} s"
        return Refusal(why, predicted + room - left)

    def leave(self, number: int) -> bool:
        """Forgets a request that nobody waits for any more, and returns whether it was still waiting."""
        self._ahead.clear()
        return self.waiting.pop(number, None) is not None

    def expire(self, now: float) -> list[Asked]:
        """Returns the waiting requests whose deadline has passed, and forgets them."""
        self._ahead.clear()
        late = [asked for asked in self.waiting.values() if asked.deadline <= now]
        for asked in late:
            del self.waiting[asked.number]
        return late

    def alone_s(self, asked: Asked) -> float:
        """Returns how many seconds a process is at this request if it is alone; 0 if nobody can tell."""
        return self._time(asked.shape).of(max(1, asked.rows))

    def predicted_s(self, asked: Asked, now: float) -> float:
        """Returns after how many seconds this request would be answered, as far as can be told."""
        time, ahead = self._time(asked.shape), self._ahead_of(asked.version)
        own = self.alone_s(asked)
        if ahead.is_free:
            return own
        rows, joined_s = ahead.partly.get(asked.shape, (0, 0.0)) if asked.joins else (0, 0.0)
        together = time.of(min(self.most_rows, rows + asked.rows)) if rows else own
        return ahead.until_begun_s(now, joined_s) + max(own, together)

    # ── processes ────────────────────────────────────────────────────────────────────────────────────────────

    def add_process(self, name: str, version: int) -> None:
        """A process of this version is ready to be asked."""
        self._ahead.clear()
        self._processes[name] = _ProcessState(version)

    def remove_process(self, name: str) -> list[Asked]:
        """A process is no more. What it was at waits again, in front, and each request alone: one of them may have
        killed it, and would kill the next with all others. Returns those that have had enough tries."""
        self._ahead.clear()
        state = self._processes.pop(name, None)
        batch = state.running if state is not None else []
        given_up = []
        for asked in reversed(batch):
            asked.tries += 1
            asked.alone = asked.alone or len(batch) > 1
            if asked.tries < MOST_TRIES:
                self._put_back(asked)
            else:
                given_up.append(asked)
        return given_up[::-1]

    def dispatch(self, now: float) -> list[tuple[str, list[Asked]]]:
        """Returns who is to be asked what now. Afterwards no process is free that could answer something waiting."""
        found = []
        for name, state in self._processes.items():
            if not state.running and (batch := self._next_batch(state)):
                self._ahead.clear()
                state.running, state.since = batch, now
                state.until = now + self._taking(batch)
                found.append((name, batch))
        return found

    def answered(self, name: str, now: float) -> list[Asked]:
        """A process has answered: returns what it was asked, and takes note of how long that took."""
        state = self._processes[name]
        self._ahead.clear()
        batch, state.running = state.running, []
        self._time(batch[0].shape).measured(max(1, sum(asked.rows for asked in batch)), now - state.since)
        return batch

    def failed(self, name: str) -> list[Asked]:
        """The model has failed in what a process was asked. Returns the request that it lies with; of several, each
        waits again, alone, and none is returned."""
        state = self._processes[name]
        self._ahead.clear()
        batch, state.running = state.running, []
        if len(batch) == 1:
            return batch
        self.put_back(batch)
        return []

    def put_back(self, batch: list[Asked]) -> None:
        """Has an answered batch wait again, each request alone: its answer cannot be divided among them."""
        for asked in reversed(batch):
            asked.alone = True
            self._put_back(asked)

    def retired(self) -> list[str]:
        """Returns processes of versions before the newest that nobody needs any more."""
        needed = {asked.version for asked in self.waiting.values()}
        return [
            name
            for name, state in self._processes.items()
            if state.version != self.version and not state.running and state.version not in needed
        ]

    @property
    def running(self) -> dict[str, list[Asked]]:
        """Returns what each process is at."""
        return {name: list(state.running) for name, state in self._processes.items()}

    @property
    def processes(self) -> int:
        """Returns how many processes there are."""
        return len(self._processes)

    @property
    def versions(self) -> set[int]:
        """Returns the versions that there are processes of."""
        return {state.version for state in self._processes.values()}

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────

    def _next_batch(self, state: _ProcessState) -> list[Asked]:
        batch: list[Asked] = []
        rows = 0
        for asked in self.waiting.values():
            if not self._may(state, asked):
                continue
            if not batch:
                batch, rows = [asked], asked.rows
                if not asked.joins:
                    break
            elif asked.joins and asked.shape == batch[0].shape and rows + asked.rows <= self.most_rows:
                batch.append(asked)
                rows += asked.rows
            if rows >= self.most_rows:
                break
        for asked in batch:
            del self.waiting[asked.number]
        return batch

    def _may(self, state: _ProcessState, asked: Asked) -> bool:
        return state.version == (self.version if asked.version is None else asked.version)

    def _free(self, asked: Asked) -> bool:
        return any(not state.running and self._may(state, asked) for state in self._processes.values())

    def _ahead_of(self, version: int | None) -> _Ahead:
        """Returns what the processes of a version have before them. It is worked out anew when something has changed:
        to refuse a request costs no look at those that wait."""
        version = self.version if version is None else version
        if (known := self._ahead.get(version)) is not None:
            return known
        states = [state for state in self._processes.values() if state.version == version]
        batches, seconds = 0, 0.0
        rows: dict[Hashable, int] = {}
        for other in self.waiting.values():
            if (self.version if other.version is None else other.version) != version:
                continue
            if other.joins:
                rows[other.shape] = rows.get(other.shape, 0) + other.rows
            else:
                batches, seconds = batches + 1, seconds + self._time(other.shape).of(max(1, other.rows))
        partly: dict[Hashable, tuple[int, float]] = {}
        for shape, count in rows.items():
            each_s, full = self._time(shape).of(min(count, self.most_rows)), -(-count // self.most_rows)
            batches, seconds = batches + full, seconds + full * each_s
            if count % self.most_rows:
                partly[shape] = count % self.most_rows, each_s
        off_s = max((time.off_s for time in self._times.values()), default=0.0)
        room_s = ROOM * off_s * math.sqrt(1 + batches / max(1, len(states)))  # errors make up for each other in part
        self._ahead[version] = found = _Ahead(states, seconds, room_s, partly)
        return found

    def _put_back(self, asked: Asked) -> None:
        self._ahead.clear()
        self.waiting[asked.number] = asked
        self.waiting.move_to_end(asked.number, last=False)

    def _taking(self, batch: list[Asked]) -> float:
        return self._time(batch[0].shape).of(max(1, sum(asked.rows for asked in batch)))

    def _time(self, shape: Hashable) -> ServiceTime:
        if (time := self._times.get(shape)) is None:
            time = self._times[shape] = ServiceTime()
        self._times.move_to_end(shape)
        if len(self._times) > MOST_SHAPES:
            self._times.popitem(last=False)
        return time
