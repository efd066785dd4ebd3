"""How a script is given the values of a trial.

- Where its arguments name one in braces, as in `-- --rate {lr}` or `-- model.width={width}`, the value stands there.
- A script whose text names a flag of that name, as `parser.add_argument("--lr")` does, is given that flag.
- Anything else it has to ask for: `pl.trial().lr`.

`{folder}` in the arguments is the trial's folder, `{trial}` its number, `{fold}` the fold.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import InvalidInput
from paceline.search.space import RESERVED
from paceline.trial_values import FOLD, TrialPlace

_BRACES = re.compile(r"\{([A-Za-z][A-Za-z0-9_]*)\}")


@dataclass(frozen=True)
class ScriptArguments:
    """The arguments of every trial's script, with names in braces where a value goes."""

    template: tuple[str, ...]
    to_ask_for: tuple[str, ...]  # parameters that the script must ask `pl.trial()` for

    def of(self, trial: TrialPlace) -> tuple[str, ...]:
        """The script's arguments in that trial."""
        values = {name: str(value) for name, value in trial.parameters.items()}
        values |= {"folder": trial.folder, "trial": str(trial.number), "fold": str(trial.fold or 0)}
        return tuple(_BRACES.sub(lambda found: values.get(found[1], found[0]), word) for word in self.template)


def find_arguments(
    script: str, arguments: Sequence[str], names: Sequence[str], *, module: bool, folds: bool = False
) -> ScriptArguments:
    """How this script is given parameters of these names."""
    placed = {name for word in arguments for name in _BRACES.findall(word)}
    flags = {} if module else _flags_in(script)
    template, to_ask_for = list(arguments), []
    for name in names:
        typed = next((word for word in arguments if word.partition("=")[0] in _spellings(name)), None)
        if typed is not None and f"{{{name}}}" not in " ".join(arguments):
            expected = f"{typed} among the script's arguments says it already, leave one of them out"
            raise InvalidInput("param", name, expected)
        if name in placed:
            continue
        if (flag := next((flags[word] for word in _spellings(name) if word in flags), None)) is not None:
            template += [flag, f"{{{name}}}"]
        else:
            to_ask_for.append(name)
    if folds and "fold" not in placed:
        to_ask_for.append(FOLD)
    if "fold" in placed and not folds:
        raise InvalidInput("arguments", "{fold}", "there are no folds, add --folds 5")
    for name in placed - set(names) - set(RESERVED):
        if any(word == f"{{{name}}}" or word.endswith(f"={{{name}}}") for word in arguments):
            known = ", ".join(f"{{{word}}}" for word in (*names, *RESERVED))
            raise InvalidInput("arguments", f"{{{name}}}", f"no parameter has this name, give one of {known}")
    return ScriptArguments(tuple(template), tuple(to_ask_for))


def _spellings(name: str) -> tuple[str, str]:
    return f"--{name.replace('_', '-')}", f"--{name}"


def _flags_in(script: str) -> Mapping[str, str]:
    """The flags that the text of a script names in its calls."""
    try:
        tree = ast.parse(Path(script).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {}
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    words = (word.value for call in calls for word in call.args if isinstance(word, ast.Constant))
    return {word: word for word in words if isinstance(word, str) and word.startswith("--")}
