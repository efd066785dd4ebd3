"""`paceline container`: what servers keep, for a person: lists, shows, saves, drops, copies containers.

None of it disturbs a training: `save` and `copy` have the servers keep a copy after one step, and go on.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.cli import action
from paceline.cli.run_plan import addresses
from paceline.errors import InvalidInput
from paceline.launch.outcome import kept_models
from paceline.net.secure import Keys, is_loopback, read_token
from paceline.run_place import MODELS, check_container
from paceline.watch.output import put

if TYPE_CHECKING:
    from paceline.central.client.reader import Reader, Summary
    from paceline.central.messages.replies import Listing

ACTIONS = {"list": (), "show": ("NAME",), "save": ("NAME", "PATH"), "drop": ("NAME",), "copy": ("NAME", "NEW")}
NOTHING_KEPT = "it holds no model: a run keeps it if its script has saved none, look for what that has saved"
BAR = 40  # letters of the longest line of a histogram

EXAMPLES = """\
examples:
  paceline container list --at 127.0.0.1:7070 --token servers/0
  paceline container show digits --at 127.0.0.1:7070 --token servers/0
                                        tensors, where they are, how far training is, how stale its gradients were
  paceline container save digits model.safetensors --at 127.0.0.1:7070 --token servers/0
                                        as it is after some step, also while training goes on; loads in plain torch
  paceline container copy digits digits-tuned --at 127.0.0.1:7070 --token servers/0
                                        another one to go on from: paceline run … --container digits-tuned
  paceline container save runs/20251115-184203-train model.safetensors
                                        of a run that has ended without having saved its model
  paceline container drop digits --at 127.0.0.1:7070 --token servers/0

One address of a container's servers is enough. Servers with keys take --keys FOLDER instead of --token.
"""


# ── what can be typed ────────────────────────────────────────────────────────────────────────────────────────


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "paceline container {list | show NAME | save NAME PATH | drop NAME | copy NAME NEW} --at ADDRESSES\n"
        "       paceline container save RUN-FOLDER PATH"
    )
    parser.description = "List, show, save, drop and copy the containers that servers keep."
    parser.epilog = EXAMPLES
    parser.add_argument("action", type=action(ACTIONS), metavar="ACTION", help=f"one of {', '.join(ACTIONS)}")
    parser.add_argument("operands", nargs="*", metavar="NAME", help="what it is about")
    parser.add_argument("--at", metavar="ADDRESSES", help="of servers, such as 127.0.0.1:7070")
    parser.add_argument("--token", metavar="PATH", help="their token: the file, or the --dir it is in")
    parser.add_argument("--keys", type=Path, metavar="FOLDER", help="instead of a token, on other machines")
    parser.add_argument("--force", action="store_true", help="of drop: also while replicas train it")
    parser.add_argument("--json", action="store_true", help="as JSON")


def execute(options: argparse.Namespace) -> int:
    given, wanted = options.operands, ACTIONS[options.action]
    if len(given) != len(wanted):
        raise InvalidInput(
            options.action, " ".join(given), f"give {' '.join(('paceline container', options.action, *wanted))}"
        )
    for name, value in zip(wanted, given, strict=True):
        if name != "PATH" and options.at is not None:
            check_container(value)
    if options.action == "save":
        _check_path(given[1])
    if options.at is None and options.action == "save" and os.path.isdir(given[0]):
        plain, tell = _save_kept(Path(given[0]), given[1])
    else:
        with _reader(options, given[0] if given else None) as reader:
            plain, tell = _act(reader, options.action, given, force=options.force)
    if options.json:
        put(sys.stdout, msgspec.json.encode(plain, enc_hook=str) + b"\n")
    else:
        tell()
    return 0


def _check_path(path: str) -> None:
    if os.path.isdir(path):
        raise InvalidInput("path", path, "this is a folder, give the name of a file in it")
    if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise InvalidInput("path", path, "its folder does not exist, make it first")


def _reader(options: argparse.Namespace, container: str | None) -> Reader:
    if options.at is None:
        run = ", or the folder of a run that has ended" if options.action == "save" else ""
        raise InvalidInput("at", "missing", f"give the addresses of servers, such as 127.0.0.1:7070{run}")
    at = addresses("at", options.at)
    if options.token is None and options.keys is None:
        raise InvalidInput("at", options.at, "say how to be let in, --token with the servers' folder, or --keys")
    for address in at:
        if options.keys is None and not is_loopback(address.rpartition(":")[0]):
            raise InvalidInput("at", address, "beyond this machine give --keys, made by paceline keys make")
    token = read_token(Path(options.token)) if options.token is not None else ""
    keys = Keys.load(options.keys) if options.keys is not None else None
    from paceline.central.client.reader import Reader

    return Reader(at, container, token=token, keys=keys)


def _act(reader: Reader, action: str, operands: Sequence[str], *, force: bool) -> tuple[Any, Callable[[], None]]:
    """Do it; what came of it as plain data, and how to tell a person."""
    if action == "list":
        listed = reader.listing()
        return listed, partial(_tell_list, listed)
    if action == "show":
        summary = reader.summary()
        plain = _plain(summary)
        return plain, partial(_tell, summary, plain)
    name = operands[0]
    if action == "save":
        step, path = reader.save(operands[1]), operands[1]
        size = Path(path).stat().st_size
        done = {"container": name, "step": step, "path": path, "bytes": size}
        return done, partial(_say, f"{name} after step {step} is in {path}, {_size(size)}")
    if action == "copy":
        reader.copy(operands[1])
        return {"container": name, "copy": operands[1]}, partial(_say, f"{name} was copied to {operands[1]}")
    reader.drop(force=force)
    return {"container": name, "dropped": True}, partial(_say, f"{name} was dropped")


def _save_kept(folder: Path, path: str) -> tuple[Any, Callable[[], None]]:
    """Save what a run has kept that ended without having saved its model."""
    kept = kept_models(folder / MODELS)
    if len(kept) != 1:
        there = f"it holds {', '.join(str(model) for model in kept)}, copy the one you want" if kept else NOTHING_KEPT
        raise InvalidInput("run folder", str(folder), there)
    from paceline.checkpoint import read_model
    from paceline.checkpoint.model_file import write_plain_model

    write_plain_model(path, "model", read_model(kept[0]), {})
    size = Path(path).stat().st_size
    done = {"run_folder": str(folder), "path": path, "bytes": size}
    return done, partial(_say, f"the model of {folder} is in {path}, {_size(size)}")


def _say(text: str) -> None:
    put(sys.stdout, f"{text}\n".encode())


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────


def _tell_list(containers: list[Listing]) -> None:
    """A line each."""
    rows = [
        [
            listed.name,
            str(listed.step),
            _size(listed.bytes),
            str(listed.tensors),
            listed.optimizer,
            str(listed.runs) if listed.rule else "?",  # its chief is elsewhere
            str(listed.replicas) if listed.rule else "?",
            listed.rule or "?",
            f"{listed.loss:.4g}" if listed.step and listed.rule else "-",
        ]
        for listed in containers
    ]
    if rows:
        _table(("name", "step", "size", "tensors", "optimizer", "runs", "replicas", "rule", "loss"), rows)
    else:
        _say("no container")


def _plain(summary: Summary) -> dict[str, Any]:
    """One container: what it holds, where, and how its training stands."""
    books = summary.books
    return {
        "name": summary.name,
        "step": summary.step,
        "optimizer": summary.optimizer,
        "rule": summary.rule.words,
        "accepting": summary.accepting,
        "replicas": summary.replicas,
        "runs": summary.runs,
        "loss": books.last.loss,
        "batch": books.last.samples,
        "addresses": summary.addresses,
        "bytes": summary.bytes_by_server,
        "tensors": summary.tensors,
        "staleness": books.staleness,
        "late": books.late,
        "dropped": books.dropped,
        "datasets": [
            {
                "length": chapter.length,
                "epochs": chapter.finished,
                "samples": sum(stop - start for _, start, stop in chapter.counted),
            }
            for _, chapter in sorted(books.chapters.items())
        ],
    }


def _tell(summary: Summary, plain: dict[str, Any]) -> None:
    """The same, line by line, and a table of its tensors."""
    replicas = ", ".join(map(str, summary.replicas)) or "none"
    lines = [
        f"{summary.name}: step {summary.step}, {summary.optimizer}, {_size(sum(summary.bytes_by_server))}",
        f"rule      {plain['rule']}; {summary.accepting} gradients make a step now",
        f"replicas  {replicas}",
        f"last step loss {_number(plain['loss'])} over {plain['batch']} samples" if plain["batch"] else "no step yet",
        f"gradients {plain['late']} late, {plain['dropped']} dropped",
    ]
    if len(summary.runs) > 1:  # what stands above is of the last of them
        lines += [
            f"run {number}     step {run.step}, {run.seen} samples, replicas {', '.join(map(str, run.replicas))}, "
            f"{run.rule}, loss {_number(run.loss)}"
            for number, run in enumerate(summary.runs)
        ]
    lines += [
        f"dataset {number} of {chapter['length']} samples: {chapter['epochs']} epochs finished, "
        f"{chapter['samples']} samples counted"
        for number, chapter in enumerate(plain["datasets"])
    ]
    lines += [
        f"server {number}  {address}  {_size(size)}"
        for number, (address, size) in enumerate(zip(summary.addresses, summary.bytes_by_server, strict=True))
    ]
    most = max(plain["staleness"].values(), default=0)
    lines += [
        f"staleness {staleness:3}  {count:8}  {'#' * math.ceil(BAR * count / most)}"
        for staleness, count in sorted(plain["staleness"].items())
    ]
    _say("\n".join(lines))
    rows = [
        [
            tensor.name,
            " x ".join(map(str, tensor.shape)) or "number",
            tensor.dtype,
            "trained" if tensor.trained else "not trained",
            ", ".join(map(str, tensor.servers)),
        ]
        for tensor in summary.tensors
    ]
    _table(("tensor", "shape", "type", "", "servers"), rows)


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "not finite"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """With lines on a terminal; elsewhere plain columns, a line a row."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(*headings)
        for row in rows:
            table.add_row(*map(Text, row))
        Console().print(table)
        return
    columns = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    lines = [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, columns, strict=True)) for row in (headings, *rows)
    ]
    _say("\n".join(line.rstrip() for line in lines))


def _size(size: int) -> str:
    """
    >>> _size(1500), _size(41_500_000)
    ('1.5 kB', '41.5 MB')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"
