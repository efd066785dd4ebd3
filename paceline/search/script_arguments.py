"""How a script is given the values of a trial.

- Where its arguments name one in braces, as in `-- --rate {lr}` or `-- model.width={width}`, the value stands there.
- A script whose text names a flag of that name, as `parser.add_argument("--lr")` does, is given that flag.
- Anything else it has to ask for: `pl.trial().lr`. That a script does is known when it has done so; that it cannot, as
  its text never speaks of a trial and it imports nothing of its own, is known before it is started.

`{folder}` in the arguments is the trial's folder, `{trial}` its number, `{fold}` the fold.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import InvalidInput
from paceline.search.script_text import ScriptText
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
        words: list[str] = []
        for word in self.template:
            filled = _BRACES.sub(lambda found: values.get(found[1], found[0]), word)
            if word.startswith("{") and filled.startswith("-") and words and words[-1].startswith("--"):
                words[-1] += f"={filled}"  # argparse takes -1e-05 for another flag
            else:
                words.append(filled)
        return tuple(words)


def find_arguments(
    script: str, arguments: Sequence[str], names: Sequence[str], *, module: bool, folds: bool = False
) -> ScriptArguments:
    """How this script is given parameters of these names."""
    placed = {name for word in arguments for name in _BRACES.findall(word)}
    text = ScriptText(script) if not module else None
    flags = text.flags if text is not None else set()
    template, to_ask_for = list(arguments), []
    for name in names:
        typed = next((word for word in arguments if word.partition("=")[0] in _spellings(name)), None)
        if typed is not None and f"{{{name}}}" not in " ".join(arguments):
            expected = f"{typed} among the script's arguments says it already, leave one of them out"
            raise InvalidInput("param", name, expected)
        if name in placed:
            continue
        if (flag := next((word for word in _spellings(name) if word in flags), None)) is not None:
            template += [flag, f"{{{name}}}"]
        else:
            to_ask_for.append(name)
    if folds and "fold" not in placed:
        to_ask_for.append(FOLD)
    if to_ask_for and text is not None and text.never_asks:
        raise _not_taken(script, to_ask_for[0])
    if "fold" in placed and not folds:
        raise InvalidInput("arguments", "{fold}", "there are no folds, add --folds 5")
    for name in placed - set(names) - set(RESERVED):
        if any(word == f"{{{name}}}" or word.endswith(f"={{{name}}}") for word in arguments):
            known = ", ".join(f"{{{word}}}" for word in (*names, *RESERVED))
            raise InvalidInput("arguments", f"{{{name}}}", f"no parameter has this name, give one of {known}")
    return ScriptArguments(tuple(template), tuple(to_ask_for))


def _not_taken(script: str, name: str) -> InvalidInput:
    if name == FOLD:
        expected = (
            f"{script} never calls pl.trial().fold(dataset), which gives it its part; that, or {{fold}} among its"
        )
        return InvalidInput("folds", "given", f"{expected} arguments, makes them differ")
    expected = f"{script} does not take it: it has no flag --{name.replace('_', '-')} and never calls pl.trial(); "
    return InvalidInput("param", name, f"{expected}do one of these, or say where it goes, as in -- --rate {{{name}}}")


def _spellings(name: str) -> tuple[str, str]:
    return f"--{name.replace('_', '-')}", f"--{name}"
