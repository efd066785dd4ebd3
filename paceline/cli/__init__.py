"""The command line: `paceline SUBCOMMAND …`.

Each subcommand is a module of this folder with `add_arguments(parser)` and `execute(options) -> exit code`, loaded
only when it is the one asked for. Whatever is wrong with the input is said in one sentence on stderr, with exit
code 2, and before anything is started. What stands after `--` belongs to the script: `options.arguments`.

Nothing here imports torch: help has to come at once.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import importlib.metadata
import re
import sys
from collections.abc import Callable, Collection, Sequence
from typing import NoReturn

from paceline.errors import InvalidInput, PacelineError, StrategyError
from paceline.launch import limits
from paceline.strategy import MOST_TIMEOUT_S
from paceline.watch.output import open_missing_streams

SUBCOMMANDS = {
    "run": "train a script on one or many replicas",
    "plan": "say which strategy, how many devices, where it saturates, and why",
    "calibrate": "measure this machine once, for plans",
    "verify": "compare the numbers of a strategy with those of one process",
    "compare": "train to a target in several ways, with repeats and spread",
    "tune": "train with many hyperparameters, several at a time, and keep the best",
    "serve": "answer requests with a trained model, over HTTP",
    "ensemble": "measure trained models together, beside each alone",
    "quantize": "write a trained model in int8, with what that saves and costs",
    "dims": "show the named dims of a model, to write a layout with",
    "server": "run one server that keeps parameters for long",
    "container": "list, show, save, drop and copy what servers keep",
    "keys": "make and show the keys of servers on several machines",
}


class Parser(argparse.ArgumentParser):
    """argparse, with one sentence for each mistake and the nearest flag for an unknown one."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Flags may be typed with underscores, as torchrun's users do."""
        given = []
        for argument in arguments:
            if argument.startswith("--"):
                flag, equals, value = argument.partition("=")
                argument = flag.replace("_", "-") + equals + value
                self._check_flag(argument.partition("=")[0])
            given.append(argument)
        return self.parse_args(given)

    def _check_flag(self, flag: str) -> None:
        if flag not in self._option_string_actions:
            near = difflib.get_close_matches(flag, self._option_string_actions, n=1, cutoff=0.7)
            hint = f"did you mean {near[0]}?" if near else "the script's own arguments go after a lone --"
            self.error(f"there is no flag {flag}: {hint}")

    def error(self, message: str) -> NoReturn:
        for pattern, sentence in (
            (r"argument ([^/:]+)\S*: expected one argument", r"\1 needs a value"),
            (r"the following arguments are required: (.+)", rf"\1 is missing: {self.prog} --help shows how"),
            (r"unrecognized arguments: (.+)", r"\1 is one argument too many: the script's own go after a lone --"),
        ):
            message = re.sub(pattern, sentence, message)
        complain(message)
        raise SystemExit(2)


def is_count(text: str) -> bool:
    """
    >>> is_count("12"), is_count("²"), is_count("9" * 5000)  # Python takes the second for a digit, and dreads the third
    (True, False, False)
    """
    return text.isascii() and text.isdigit() and len(text) < 19


def was_given(value: object) -> bool:
    """Whether a flag has this value because somebody typed it; 0 is a value.

    >>> was_given(0), was_given(None), was_given(False)
    (True, False, False)
    """
    return value is not None and value is not False


def is_port(text: str) -> bool:
    return is_count(text) and 0 < int(text) < 65536


def whole(field: str, least: int) -> Callable[[str], int]:
    """How a flag that counts something is read."""

    def convert(text: str) -> int:
        if not (is_count(text) and int(text) >= least):
            raise StrategyError(field, text, f"give a whole number from {least} up")
        return int(text)

    return convert


def seconds(field: str) -> Callable[[str], float]:
    """How a flag that is a time is read."""
    return number(field, "number of seconds", MOST_TIMEOUT_S)


def number(field: str, what: str = "number", most: float = sys.float_info.max) -> Callable[[str], float]:
    """How a flag that is a factor is read."""

    def convert(text: str) -> float:
        with contextlib.suppress(ValueError):
            if 0 < (value := float(text)) <= most:
                return value
        raise StrategyError(field, text, f"give a {what} above 0")

    return convert


def action(actions: Collection[str]) -> Callable[[str], str]:
    """How the action of a subcommand is read."""

    def convert(text: str) -> str:
        if text in actions:
            return text
        near = difflib.get_close_matches(text, actions, n=1, cutoff=0.5)
        raise InvalidInput("action", text, f"did you mean {near[0]}?" if near else f"give one of {', '.join(actions)}")

    return convert


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the `paceline` command; the exit code."""
    open_missing_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        for argument in given:
            if "\0" in argument or any("\ud800" <= letter <= "\udfff" for letter in argument):
                raise PacelineError(f"argument {argument!r} is not text in UTF-8: rename what it names")
        return _dispatch(given)
    except PacelineError as error:
        complain(str(error))
        return 2
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if not (limit := limits.behind(error)):
            raise
        complain(f"{str(error) or type(error).__name__}: {limit}, raise it")
        return 2


def _dispatch(arguments: list[str]) -> int:
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == "--version":
        print(f"paceline {importlib.metadata.version('paceline')}")
        return 0
    if name not in SUBCOMMANDS:
        near = difflib.get_close_matches(name, SUBCOMMANDS, n=1, cutoff=0.5)
        if name.endswith(".py"):
            near = [f"run {name}"]
        hint = f"did you mean paceline {near[0]}?" if near else f"give one of {', '.join(SUBCOMMANDS)}"
        complain(f"there is no subcommand {name}: {hint}")
        return 2
    subcommand = importlib.import_module(f"paceline.cli.{name}")
    parser = Parser(f"paceline {name}")
    subcommand.add_arguments(parser)
    own, scripts = _split(arguments[1:])
    options = parser.parse(own)
    options.arguments = scripts or None
    return int(subcommand.execute(options))


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """
    >>> _split(["train.py", "--replicas", "2", "--", "--lr", "0.1"])
    (['train.py', '--replicas', '2'], ['--lr', '0.1'])
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:end], arguments[end + 1 :]


def _help() -> str:
    width = max(map(len, SUBCOMMANDS))
    listed = "\n".join(f"  paceline {name:{width}}   {what}" for name, what in SUBCOMMANDS.items())
    return (
        "Paceline trains PyTorch models across devices and machines.\n\n"
        f"{listed}\n\n"
        "paceline SUBCOMMAND --help shows its flags and examples; paceline --version the version."
    )


def complain(sentence: str) -> None:
    print(f"paceline: {sentence}", file=sys.stderr)
