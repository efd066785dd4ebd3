"""What the text of a script says before it is started: the flags that it takes, whether it may ask `pl.trial()` for
values, and what it cannot tell.

All of it is on the safe side: a script that is not understood, that imports something of its own, or makes names as it
runs, may do anything. What it does is then known when its first trial has ended.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_TELLING = ("evaluate", "log", "report")  # methods of a trainer
_INSTALLED = {"site-packages", "dist-packages"}
_BY_NAME = ("__import__", "importlib", "runpy", "exec(")  # how else something may be imported


class ScriptText:
    """A script's text."""

    def __init__(self, script: str) -> None:
        self._folder = Path(script).parent
        self._nodes: list[ast.AST] = []
        try:
            self._text = Path(script).read_text()
            self._nodes = list(ast.walk(ast.parse(self._text)))
        except (OSError, SyntaxError, ValueError):
            self._text = ""
        self._is_all = bool(self._text) and not any(word in self._text for word in _BY_NAME) and not self._imports_own()

    @property
    def flags(self) -> set[str]:
        """The flags that it names in its calls."""
        words = (word.value for call in self._calls() for word in call.args if isinstance(word, ast.Constant))
        return {word for word in words if isinstance(word, str) and word.startswith("--")}

    @property
    def never_asks(self) -> bool:
        """Whether it cannot call `pl.trial()`."""
        return self._is_all and "trial" not in self._text

    def never_tells(self, metric: str) -> list[str] | None:
        """What it tells, if a metric of this name cannot be among it; None if it may be."""
        named = re.escape(metric.rpartition("/")[2])
        if not self._is_all or re.search(rf"(?<!\w){named}(?!\w)", self._text):
            return None
        names = [name for call in self._calls() for name in _told_by(call)]
        made = any(isinstance(node, ast.DictComp) for node in self._nodes)  # of several numbers, each has its key
        keys = (key for node in self._nodes if isinstance(node, ast.Dict) for key in node.keys)
        if made or None in names or not all(isinstance(key, ast.Constant) for key in keys):
            return None
        return [name for name in dict.fromkeys(names) if name is not None]

    def _calls(self) -> Iterator[ast.Call]:
        return (node for node in self._nodes if isinstance(node, ast.Call))

    def _imports_own(self) -> bool:
        for node in self._nodes:
            if isinstance(node, ast.Import) and any(self._is_own(alias.name) for alias in node.names):
                return True
            if isinstance(node, ast.ImportFrom) and self._is_own(node.module or ""):
                return True
        return False

    def _is_own(self, module: str) -> bool:
        """Whether a module is neither Python's nor of an installed package."""
        name = module.partition(".")[0]
        if not name or (self._folder / name).is_dir() or (self._folder / f"{name}.py").exists():
            return True
        if name in sys.stdlib_module_names or name == "paceline":
            return False
        try:
            found = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return True
        return found is None or not _INSTALLED & set(Path(str(found.origin)).parts)


def _told_by(call: ast.Call) -> Iterator[str | None]:
    """The names under which a call may tell something; None: some that are not in the text."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in _TELLING:
        return
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if None in given:
        yield None
    elif call.func.attr == "log":
        yield from given
        for values in call.args:
            constants = values.keys if isinstance(values, ast.Dict) else [None]
            yield from (key.value if isinstance(key, ast.Constant) else None for key in constants)  # type: ignore[misc]
    elif "name" in given:
        name = given["name"]
        yield str(name.value) if isinstance(name, ast.Constant) else None
    elif call.func.attr == "report":
        yield None  # whatever is looked for
