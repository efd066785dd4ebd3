"""`paceline verify`'s judgement: rounding passes, mistakes do not."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paceline.errors import PacelineError
from paceline.verify.compare import compare


def recording(folder: Path, *steps: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    for number, tensors in enumerate(steps):
        save_file(tensors, folder / f"step-{number:04d}.safetensors")
    return folder


def step(loss: float = 1.0, gradient: float = 0.5, weight: float = 2.0, state: float = 0.1) -> dict[str, torch.Tensor]:
    return {
        "loss": torch.tensor(loss, dtype=torch.float64),
        "gradient/w": torch.tensor([gradient, 1.0]),
        "optimizer/w/exp_avg": torch.tensor([state, 1.0]),
        "model/w": torch.tensor([weight, 3.0]),
    }


def test_rounding_is_equal_and_its_size_is_told(tmp_path: Path) -> None:
    verdict = compare(recording(tmp_path / "a", step(), step()), recording(tmp_path / "b", step(), step(loss=1 + 1e-7)))
    assert verdict.equal
    assert (verdict.steps, verdict.tensors) == (2, 8)
    assert verdict.largest is not None
    assert verdict.largest.tensor == "loss"
    assert verdict.largest.relative == pytest.approx(1e-7, rel=0.1)


def test_the_first_difference_is_named_by_step_and_cause_before_effect(tmp_path: Path) -> None:
    other = step(gradient=0.6, weight=1.9, state=0.2)
    verdict = compare(recording(tmp_path / "a", step(), step()), recording(tmp_path / "b", step(), other))
    assert not verdict.equal
    assert verdict.first is not None
    assert (verdict.first.step, verdict.first.tensor) == (1, "gradient/w")
    assert verdict.first.error == pytest.approx(0.1, rel=1e-5)


def test_a_gradient_of_pure_rounding_is_left_out_with_what_the_optimizer_makes_of_it(tmp_path: Path) -> None:
    a = step(gradient=3e-8, weight=2.0)
    b = step(gradient=-1e-8, weight=2.002)
    verdict = compare(recording(tmp_path / "a", a), recording(tmp_path / "b", b))
    assert verdict.equal
    assert verdict.left_out == 1


def test_a_wrong_parameter_with_a_right_gradient_is_not_left_out(tmp_path: Path) -> None:
    verdict = compare(recording(tmp_path / "a", step()), recording(tmp_path / "b", step(weight=2.002)))
    assert verdict.first is not None
    assert verdict.first.tensor == "model/w"


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({k: v for k, v in step().items() if k != "model/w"}, "is missing in the other run"),
        ({**step(), "model/extra": torch.zeros(1)}, "is not there in one process"),
        ({**step(), "model/w": torch.zeros(3)}, r"has shape \(3,\) instead of \(2,\)"),
        ({**step(), "model/w": torch.tensor([2.0, float("nan")])}, "is not finite in one of the runs"),
    ],
)
def test_what_cannot_be_compared_is_a_difference(tmp_path: Path, other: dict[str, torch.Tensor], reason: str) -> None:
    verdict = compare(recording(tmp_path / "a", step()), recording(tmp_path / "b", other))
    assert not verdict.equal
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(str(verdict.first))


def test_a_run_that_ends_early_differs_and_one_that_recorded_nothing_is_an_error(tmp_path: Path) -> None:
    two = recording(tmp_path / "a", step(), step())
    verdict = compare(two, recording(tmp_path / "b", step()))
    assert "was not reached" in str(verdict.first)
    with pytest.raises(PacelineError, match=r"must call trainer\.step"):
        compare(recording(tmp_path / "c"), two)
