"""What the members of a step say on the board of what they have computed; and that added up, over hosts too.

Every field of the totals is a number that is only ever added up, so one small sum over the hosts tells all.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

import torch

from paceline.errors import ModelError
from paceline.exchange.board import Board
from paceline.exchange.members import Members
from paceline.exchange.words import NO_LOSS, OVER_SAMPLES, HostWord, Word
from paceline.loss_value import LossPart


@dataclass(frozen=True)
class StepTotals:
    """What the replicas of a host, or of all hosts, have computed in a step, and what they have said of it."""

    loss: float  # the sum of their parts of the loss
    samples: float
    members: float
    sums: float  # members whose loss is a sum over something that they count,
    counted: float  # and what these have counted
    means: float  # members whose loss is a mean over samples
    logged: float  # hosts that have logged numbers
    options: float  # of the optimizer: a fingerprint a host
    stop: float  # hosts that say that this step is the last
    lets_in: float  # hosts that say that others come in after it

    @classmethod
    def of_host(cls, board: Board, members: Members, row: int) -> StepTotals:
        """Returns what this host's members have written; the replica in `row` asks."""
        ranks = members.ranks
        counts = [board.get_float(rank, Word.COUNT) for rank in ranks]
        counted = [count for count in counts if count >= 0]
        return cls(
            loss=sum(board.get_float(rank, Word.LOSS) for rank in ranks),
            samples=sum(board.get(rank, Word.SAMPLES) for rank in ranks),
            members=len(ranks),
            sums=len(counted),
            counted=sum(counted),
            means=counts.count(OVER_SAMPLES),
            logged=any(board.get(rank, Word.LOGGED) for rank in ranks),
            options=board.get(row, Word.OPTIONS),
            stop=board.host_get(HostWord.STOP_AFTER) == members.op,
            lets_in=board.host_get(HostWord.LET_IN_AFTER) == members.op,
        )

    @classmethod
    def of_numbers(cls, numbers: torch.Tensor) -> StepTotals:
        """Returns what the first of `numbers` say."""
        return cls(*numbers[: len(fields(cls))].tolist())

    def numbers(self) -> torch.Tensor:
        return torch.tensor(astuple(self), dtype=torch.float64)

    @property
    def mean_loss(self) -> float:
        return self.loss / self.counted if self.sums else self.loss


def check_options(board: Board, members: Members) -> None:
    """Raises `ModelError` if the optimizers of this host's members have different options."""
    mine = board.get(members.replica, Word.OPTIONS)
    for other in members.ranks:
        if board.get(other, Word.OPTIONS) != mine:
            raise different_options(board.called(members.replica), board.called(other))


def different_options(one: str, other: str) -> ModelError:
    return ModelError(
        "optimizer",
        f"the options of {one}",
        f"they differ from those of {other} (learning rate, momentum …); change them alike in every replica, and give "
        "a scheduler to Trainer(scheduler=…) so that it is restored",
    )


def leave_loss(board: Board, row: int, part: LossPart, samples: int) -> None:
    """Writes down what the replica in `row` has computed: its part of the loss, of so many samples."""
    board.set_float(row, Word.LOSS, part.loss.total if part.loss is not None else 0.0)
    board.set(row, Word.SAMPLES, samples)
    leave_count(board, row, part)


def leave_count(board: Board, row: int, part: LossPart, before: float = 0.0) -> None:
    """Writes down what that replica's loss is a sum over, beside what was counted `before`."""
    loss = part.loss
    board.set_float(row, Word.UNIT, part.unit if part.counted else 0.0)
    if loss is None:
        board.set_float(row, Word.COUNT, NO_LOSS)
    else:
        board.set_float(row, Word.COUNT, OVER_SAMPLES if loss.count is None else before + loss.count)
