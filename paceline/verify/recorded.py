"""The files of a recorded run: one a step, one an answer.

An answer that was given after n steps has their number, and comes before the step that followed.
"""

from __future__ import annotations

from pathlib import Path

CALLED = "prediction"  # what tensors of answers are called
NOT_ASKED = "not-asked.txt"  # why one process could not be asked for its loss in eval mode


def step_file(number: int) -> str:
    """
    >>> step_file(0), answer_file(1, 0)
    ('step-0000.safetensors', 'step-0001-answer-0000.safetensors')
    """
    return f"step-{number:04d}.safetensors"


def answer_file(steps: int, number: int) -> str:
    """`number`: of this answer among all of the run."""
    return f"step-{steps:04d}-answer-{number:04d}.safetensors"


def asked_file(steps: int) -> str:
    """Of what no script has asked for."""
    return f"step-{steps:04d}-answer-asked.safetensors"


def was_asked(folder: Path) -> bool:
    """Returns whether a run was asked after its last step."""
    return (folder / asked_file(steps_of(folder))).exists()


def was_called(folder: Path) -> bool:
    """Returns whether the model was called then, beside its loss."""
    from safetensors import safe_open

    path = folder / asked_file(steps_of(folder))
    if not path.exists():
        return False
    with safe_open(path, "pt") as file:
        return any(name.startswith(CALLED) for name in file.keys())  # noqa: SIM118 - it is no dict


def forget_asked(folder: Path) -> None:
    """Of a run whose answer nobody else will give."""
    (folder / asked_file(steps_of(folder))).unlink()


def is_answer(name: str) -> bool:
    return "-answer-" in name


def files_of(folder: Path) -> list[str]:
    """Returns the names of all steps and answers, in order."""
    names = (path.name for path in folder.glob("step-*.safetensors"))
    return sorted(names, key=lambda name: (step_of(name), not is_answer(name), name))


def steps_of(folder: Path) -> int:
    """Returns how many steps were recorded."""
    return sum(not is_answer(name) for name in files_of(folder))


def step_of(name: str) -> int:
    """Returns the number of a step; of an answer, that of the steps before it.

    >>> step_of(answer_file(12, 3))
    12
    """
    return int(name.removesuffix(".safetensors").split("-")[1])
