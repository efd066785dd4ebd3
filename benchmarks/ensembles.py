"""Ensembles: does one answer in time when a member sleeps or is killed, and is it better than its best member?

    python -m benchmarks.ensembles late       a member asleep for 10 s, deadline 300 ms, 20 requests a second for 60 s
    python -m benchmarks.ensembles killed     members killed by SIGKILL under the same load
    python -m benchmarks.ensembles seeds      three networks against the best of them, ten times, with paired tests

Each prints its figures and whether the bar was reached; exit code 1 if one was not.
"""

from __future__ import annotations

import argparse
import collections
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl
from paceline.compare.spread import difference
from paceline.ensemble.judging import Judge, Judgement, ValidationSet
from paceline.ensemble.members_between import MembersBetween
from paceline.errors import PacelineError

LATEST_S, BACK_S = 0.320, 3.0  # the bars
WIDTHS = {"one member is larger than the others": (32, 64, 128), "members are alike": (64, 64, 64)}


class Sleeper(nn.Module):
    """A model that sleeps before it answers."""

    def __init__(self, inner: nn.Module, sleep_s: float) -> None:
        super().__init__()
        self.inner, self.sleep_s = inner, sleep_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.sleep_s)
        answer: torch.Tensor = self.inner(x)
        return answer


@dataclass
class Load:
    """What was seen of requests at a fixed rate."""

    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    members: collections.Counter[int] = field(default_factory=collections.Counter)  # how many answered

    def quantile(self, share: float) -> float:
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def words(self) -> str:
        answered = ", ".join(f"{count} by {members}" for members, count in sorted(self.members.items()))
        p50, p99, longest = (1000 * seconds for seconds in (self.quantile(0.5), self.quantile(0.99), max(self.seconds)))
        return (
            f"{len(self.seconds)} requests: p50 {p50:.1f} ms, p99 {p99:.1f} ms, longest {longest:.1f} ms; "
            f"answered {answered} of 3; failed {len(self.failures)}"
        )


def network(width: int = 256) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def ask_at_rate(
    ensemble: pl.Ensemble,
    rate: float,
    duration_s: float,
    timeout_s: float,
    meanwhile: Callable[[float], None] = lambda _: None,
) -> Load:
    """Asks so many questions a second, whether or not those before have been answered; `meanwhile(seconds)` is called
    before each."""
    load, x = Load(), torch.randn(8, 64)

    def ask() -> None:
        began = time.monotonic()
        try:
            answer = ensemble(x, timeout_s=timeout_s)
        except PacelineError as error:
            load.failures.append(str(error))
        else:
            load.members[len(answer.members)] += 1
        load.seconds.append(time.monotonic() - began)

    with ThreadPoolExecutor(max_workers=int(rate * timeout_s) + 8) as pool:
        began = time.monotonic()
        for number in range(int(rate * duration_s)):
            time.sleep(max(0.0, began + number / rate - time.monotonic()))
            meanwhile(time.monotonic() - began)
            pool.submit(ask)
    return load


def late(duration_s: float = 60.0, timeout_s: float = 0.3, sleep_s: float = 10.0, rate: float = 20.0) -> Load:
    """One of three members sleeps in every request."""
    members = [network(), Sleeper(network(), sleep_s), network()]
    with pl.Ensemble(members, where="between", quorum=2) as ensemble:
        return ask_at_rate(ensemble, rate, duration_s, timeout_s)


def killed(
    duration_s: float = 60.0, timeout_s: float = 0.3, every_s: float = 6.0, rate: float = 20.0
) -> tuple[Load, list[float]]:
    """Members are killed in turns; also returned: how long each was away, from the kill until its process answers."""
    away: list[float] = []
    with pl.Ensemble([network() for _ in range(3)], where="between", quorum=2) as ensemble:
        members = ensemble.asked
        assert isinstance(members, MembersBetween)
        kills: list[tuple[int, int, float]] = []  # member, its process, when

        def look() -> None:
            if kills and members.processes[kills[0][0]] != kills[0][1] and members.ready[kills[0][0]]:
                away.append(time.monotonic() - kills.pop(0)[2])

        def meanwhile(seconds: float) -> None:
            look()
            if not kills and seconds > every_s * (len(away) + 0.5):
                victim = len(away) % 3
                process = members.processes[victim]
                kills.append((victim, process, time.monotonic()))
                os.kill(process, signal.SIGKILL)

        load = ask_at_rate(ensemble, rate, duration_s, timeout_s, meanwhile)
        until = time.monotonic() + 30
        while kills and time.monotonic() < until:
            look()
            time.sleep(0.005)
        assert not kills, "a member has not come back"
    return load, away


def seeds(widths: Sequence[int], count: int = 10, train: int = 300, epochs: int = 30) -> list[Judgement]:
    """Trains three networks on few digits, for each seed on others, and judges them on all the rest. The best member is
    the one that is best on just these, which makes it look better than it is: the comparison leans towards it."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def accuracy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return (model(batch[0]).argmax(1) == batch[1]).float().mean()

    found = []
    for seed in range(count):
        mixed = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        members, rest = {}, mixed[train:]
        for member, width in enumerate(widths):
            torch.manual_seed(100 * seed + member)
            model = network(width)
            trainer = pl.Trainer(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loss)
            own = mixed[:train]
            for batch in trainer.batches((x[own], y[own]), 50, epochs=epochs, seed=100 * seed + member):
                trainer.step(batch)
            members[f"{member}: width {width}"] = model
        test_x, test_y = x[rest], y[rest]

        def load(part: range, x: torch.Tensor = test_x, y: torch.Tensor = test_y) -> tuple[torch.Tensor, torch.Tensor]:
            return x[part.start : part.stop], y[part.start : part.stop]

        validation = ValidationSet(load, len(rest), 256, accuracy, loss, "accuracy")
        found.append(Judge(members, validation).judge("mean", "logits", -1, maximize=True))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("late", "killed", "seeds"))
    parser.add_argument("--seconds", type=float, default=60.0, help="of load, default 60")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if options.what == "late":
        load = late(options.seconds)
        reached = load.quantile(0.99) <= LATEST_S and not load.failures and set(load.members) == {2}
        print(load.words())
    elif options.what == "killed":
        load, away = killed(options.seconds)
        reached = not load.failures and max(away) <= BACK_S
        print(load.words())
        print(f"{len(away)} kills: back after {statistics.median(away):.2f} s (median), {max(away):.2f} s (longest)")
    else:
        for name, widths in WIDTHS.items():
            print(f"{name}: widths {', '.join(map(str, widths))}")
            print_seeds(seeds(widths))
        return 0
    print("reached" if reached else "not reached")
    return 0 if reached else 1


def print_seeds(judged: list[Judgement]) -> None:
    print(f"{'seed':>4}  {'best member':>11}  {'ensemble':>8}  difference  p (McNemar)  better?")
    best = {seed: max(member.value for member in one.members) for seed, one in enumerate(judged)}
    for seed, one in enumerate(judged):
        row = f"{seed:4}  {best[seed]:11.4f}  {one.value:8.4f}  {one.better.difference:+10.4f}"
        print(f"{row}  {one.better.p_value:11.3f}  {one.better.verdict}")
    verdicts = collections.Counter(one.better.verdict for one in judged)
    over = difference({seed: one.value for seed, one in enumerate(judged)}, best, margin=0.0)
    assert over is not None
    print(", ".join(f"{verdict}: {count}" for verdict, count in verdicts.items()), end="; ")
    print(f"over all seeds {over.mean:+.4f} ± {over.half or 0:.4f} (95 %, paired by seed)")


if __name__ == "__main__":
    sys.exit(main())
