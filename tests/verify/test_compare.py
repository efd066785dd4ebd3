"""`paceline verify`'s judgement: rounding passes, mistakes do not."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import PacelineError
from paceline.verify.compare import compare
from paceline.verify.gain import Gain
from paceline.verify.recorded import answer_file, step_file


def recording(folder: Path, *steps: dict[str, torch.Tensor], **notes: str) -> Path:
    folder.mkdir()
    for number, tensors in enumerate(steps):
        save_file(tensors, folder / step_file(number), notes)
    return folder


def wide(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.double() for name, tensor in tensors.items()}


def answer(folder: Path, steps: int, number: int, narrow: str = "", **values: float) -> None:
    tensors = {f"evaluation/{name}": torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    save_file(tensors, folder / answer_file(steps, number), {"narrow": narrow})


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


# ── in float64 ───────────────────────────────────────────────────────────────────────────────────────────────


def test_in_float64_a_millionth_is_a_mistake_and_nothing_is_left_out(tmp_path: Path) -> None:
    a, b = wide(step(gradient=3e-8)), wide(step(gradient=-1e-8, weight=2.002))
    folders = recording(tmp_path / "a", a), recording(tmp_path / "b", b)
    verdict = compare(*folders, dtype="float64")
    assert verdict.first is not None
    assert verdict.first.tensor == "gradient/w"
    assert (verdict.left_out, verdict.tolerance) == (0, 1e-12)
    assert compare(*folders).equal  # as rounding of float32 it would be


def test_what_the_script_narrows_itself_is_judged_as_rounding_of_that_type_and_told(tmp_path: Path) -> None:
    a, off = wide(step()), wide(step(weight=2 + 1e-6))
    strict, loose, wrong = (
        compare(recording(tmp_path / f"a{n}", a, narrow=narrow), recording(tmp_path / f"b{n}", b), dtype="float64")
        for n, (narrow, b) in enumerate([("", off), ("float32", off), ("float32", wide(step(weight=2.01)))])
    )
    assert not strict.equal
    assert loose.equal
    assert (loose.narrow, loose.tolerance) == ("float32", 1e-4)
    assert not wrong.equal
    same = compare(recording(tmp_path / "c", a, narrow="float32"), recording(tmp_path / "d", a), dtype="float64")
    assert (same.equal, same.narrow, same.tolerance) == (True, "", 1e-12)


def test_a_metric_in_float32_makes_only_itself_imprecise(tmp_path: Path) -> None:
    a, b = (recording(tmp_path / name, wide(step()), wide(step())) for name in "ab")
    answer(a, 1, 0, "float32", accuracy=0.5)
    answer(b, 1, 0, accuracy=0.5 + 1e-8)
    verdict = compare(a, b, dtype="float64")
    assert (verdict.equal, verdict.narrow, verdict.answers["evaluation"]) == (True, "float32", 1)
    save_file(wide(step(loss=1 + 1e-8)), b / step_file(1))
    assert compare(a, b, dtype="float64").first is not None


def test_a_given_tolerance_holds_for_everything(tmp_path: Path) -> None:
    a, b = recording(tmp_path / "a", wide(step()), narrow="float32"), recording(tmp_path / "b", wide(step(loss=1.0001)))
    assert not compare(a, b, 1e-6, dtype="float64").equal
    assert compare(a, b, 1e-3, dtype="float64").equal


SMALL = 1e-6  # of a tensor whose gradients are small among those of the model


def adam(folder: Path, noise: float, *, wrong: float = 0.0, lr: float = 1e-3) -> Path:
    """Six steps of torch's own Adam. One element's gradient is zero in exact arithmetic; `noise` is what rounding adds
    to each, and `wrong` the relative mistake in one element of the small tensor."""
    drawn = torch.Generator().manual_seed(1)
    rounding = torch.Generator().manual_seed(int(noise * 1e20))
    model = torch.nn.ParameterDict({"large": torch.ones(4, 8), "small": torch.ones(8)}).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    steps = []
    for _ in range(6):
        for name, parameter in model.items():
            gradient = torch.randn(parameter.shape, generator=drawn, dtype=torch.float64) * (name == "large" or SMALL)
            gradient.view(-1)[0] = 0.0
            gradient.view(-1)[1] *= 1 + wrong * (name == "small")
            parameter.grad = gradient + noise * torch.randn(parameter.shape, generator=rounding, dtype=torch.float64)
        optimizer.step()
        tensors = {"loss": torch.ones((), dtype=torch.float64)}
        for name, parameter in model.items():
            tensors |= {f"gradient/{name}": parameter.grad.clone(), f"model/{name}": parameter.detach().clone()}
            tensors |= {f"optimizer/{name}/{key}": it.clone() for key, it in optimizer.state[parameter].items()}
        steps.append(tensors)
    return recording(folder, *steps, gain=Gain.of(optimizer.param_groups).note())


def test_what_adam_makes_of_the_rounding_of_gradients_is_equal(tmp_path: Path) -> None:
    """Of a gradient that is nothing but rounding too, which decides where the step goes."""
    a, b = adam(tmp_path / "a", 1e-14), adam(tmp_path / "b", 2e-14)
    verdict = compare(a, b, dtype="float64")
    assert verdict.equal, str(verdict.first)
    for number in range(6):
        save_file(load_file(a / step_file(number)), a / step_file(number), {"gain": "{}"})
    assert not compare(a, b, dtype="float64").equal  # so there was something to explain


def test_a_mistake_of_a_millionth_in_a_gradient_or_in_the_rate_is_found_under_adam(tmp_path: Path) -> None:
    a = adam(tmp_path / "a", 1e-14)
    verdict = compare(a, adam(tmp_path / "b", 2e-14, wrong=1e-6), dtype="float64")
    assert verdict.first is not None
    assert (verdict.first.step, verdict.first.tensor) == (0, "gradient/small")
    verdict = compare(a, adam(tmp_path / "c", 2e-14, lr=1e-3 * (1 + 1e-6)), dtype="float64")
    assert verdict.first is not None
    assert (verdict.first.step, verdict.first.tensor) == (0, "model/large")


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_answers_are_compared_between_the_steps_and_named_by_them(tmp_path: Path) -> None:
    a, b = (recording(tmp_path / name, step(), step()) for name in "ab")
    answer(a, 0, 0, loss=2.0)
    answer(b, 0, 0, loss=2.0)
    answer(a, 1, 1, loss=1.0)
    answer(b, 1, 1, loss=1.1)
    save_file(step(loss=5.0), b / step_file(1))
    verdict = compare(a, b)
    assert str(verdict.first) == "after step 0: evaluation/loss differs by 0.1 (0.1 of its scale)"
    assert (verdict.steps, verdict.answers) == (1, {"evaluation": 2, "prediction": 0})


@pytest.mark.parametrize(("asked", "where"), [("a", "the other run"), ("b", "one process")])
def test_an_answer_that_only_one_run_has_is_a_difference(tmp_path: Path, asked: str, where: str) -> None:
    a, b = (recording(tmp_path / name, step()) for name in "ab")
    answer(tmp_path / asked, 0, 0, loss=2.0)
    assert str(compare(a, b).first) == f"before the first step: evaluation was not asked for in {where}"
