"""What is different in the repeats: the seed, where a script lets us give it one. All ways have the same seeds.

A script takes part by its own arguments: `-- --seed {seed}` says where the number goes, and one that has a flag
`--seed` is given it. Of any other, repeats differ in time only, and that is said.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PLACEHOLDER = "{seed}"
FLAG = "--seed"


@dataclass(frozen=True)
class Seeds:
    """How a script is given its seed."""

    arguments: tuple[str, ...]
    words: str
    differ: bool

    def of(self, repeat: int) -> tuple[str, ...]:
        """The script's arguments in that repeat."""
        return tuple(argument.replace(PLACEHOLDER, str(repeat)) for argument in self.arguments)


def find_seeds(script: str, arguments: Sequence[str], *, module: bool) -> Seeds:
    """How this script is given a seed of its own in each repeat."""
    if any(PLACEHOLDER in argument for argument in arguments):
        return Seeds(tuple(arguments), f"{PLACEHOLDER} in its arguments is 0, 1, …, the same for every strategy", True)
    if any(argument == FLAG or argument.startswith(f"{FLAG}=") for argument in arguments):
        return Seeds(tuple(arguments), f"{FLAG} is given, so all repeats have it and differ in time only", False)
    if not module and _has_flag(script):
        return Seeds((*arguments, FLAG, PLACEHOLDER), f"its {FLAG} is 0, 1, …, the same for every strategy", True)
    words = f"the script has no {FLAG}, so repeats differ in time only (-- … {PLACEHOLDER} says where a seed goes)"
    return Seeds(tuple(arguments), words, False)


def _has_flag(script: str) -> bool:
    """Whether the text of the script names it, as `parser.add_argument("--seed")` does."""
    try:
        tree = ast.parse(Path(script).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(isinstance(word, ast.Constant) and word.value == FLAG for call in calls for word in call.args)
