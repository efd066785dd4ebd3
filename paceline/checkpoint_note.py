"""What a file beside a checkpoint says of it: how its model was made, and how good it was.

    top/1-trial-0007.safetensors
    top/1-trial-0007.json          {"arguments": ["--width", "64"], "metrics": {"accuracy": 0.97}}

`paceline tune` writes it, `paceline ensemble` makes the member's model by it, and anybody may write one by hand.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from paceline.errors import CheckpointError
from paceline.trial_values import TrialPlace


class CheckpointNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the model of a checkpoint is made: by the script with these arguments, in this trial."""

    arguments: list[str] = []
    metrics: dict[str, float] = {}
    trial: TrialPlace | None = None

    @property
    def words(self) -> str:
        """Returns it for a sentence.

        >>> CheckpointNote(["--width", "64"]).words, CheckpointNote().words
        ('--width 64', 'no arguments')
        """
        values = self.trial.parameters.items() if self.trial is not None else ()
        return ", ".join(filter(None, [" ".join(self.arguments), *(f"{name} {value}" for name, value in values)])) or (
            "no arguments"
        )


def note_beside(checkpoint: Path) -> Path:
    """Returns where the note of a checkpoint is."""
    return checkpoint.with_suffix(".json")


def read_note(checkpoint: Path) -> CheckpointNote:
    """Returns the note of a checkpoint; an empty one if there is none."""
    path = note_beside(checkpoint)
    try:
        return msgspec.json.decode(path.read_bytes(), type=CheckpointNote)
    except FileNotFoundError:
        return CheckpointNote()
    except (OSError, msgspec.DecodeError) as error:
        expected = 'give JSON such as {"arguments": ["--width", "64"]}'
        raise CheckpointError(f"{path} cannot be read as what belongs to a checkpoint ({error}): {expected}") from error
