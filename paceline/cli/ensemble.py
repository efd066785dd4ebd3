"""`paceline ensemble`: do several trained models answer better together than the best of them alone?

The models are checkpoints of one script, which is run for its model and its validation set, as far as its first named
evaluation; nothing is trained. Members and ensemble are measured there, and a paired test says whether it matters.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec

from paceline.checkpoint_note import note_beside, read_note
from paceline.cli import complain
from paceline.cli.checks import check_script
from paceline.combining import HOWS, KINDS
from paceline.ensemble.script_members import JudgeRequest, MemberFile
from paceline.errors import CheckpointError, InvalidInput
from paceline.launch.reached_script import ReachedScript
from paceline.launch.script_task import ask
from paceline.search.top import is_beside_a_checkpoint

EXAMPLES = """\
how answers are combined (--combine):
  mean       the mean of the members' probabilities; of a regression, of their values
  majority   a vote each; of a tie, the mean decides
  weighted   a mean with weights: each member's metric on the validation set
  stacked    weights with which the script's own loss is smallest there
Weights are found on four fifths of the set and judged on the last, in turns.

the script has to evaluate by name, as in
  trainer.evaluate(validation_set, accuracy, name="accuracy")

examples:
  paceline tune train.py --param lr=log:1e-4..1e-1 --trials 8 --maximize accuracy     leaves the best three in top/
  paceline ensemble top/*.safetensors --script train.py
  paceline ensemble a.safetensors b.safetensors --script train.py --combine stacked --json
  paceline ensemble *.safetensors --script train.py --metric error --minimize
  paceline ensemble *.safetensors --script train.py -- --width 64      arguments that all members were trained with

A member with other arguments has them in a file beside it, top/3.json beside top/3.safetensors:
  {"arguments": ["--width", "64"], "metrics": {"accuracy": 0.97}}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "paceline ensemble CHECKPOINTS --script SCRIPT [flags] [-- the script's own arguments]"
    parser.description = "Measure several trained models together, beside each of them alone: is it worth it?"
    parser.epilog = EXAMPLES
    parser.add_argument("members", metavar="CHECKPOINTS", nargs="*", help="safetensors files that trainer.save wrote")
    parser.add_argument("--script", metavar="SCRIPT", required=True, help="the Python file that has trained them")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as with python -m")
    parser.add_argument("--combine", metavar="HOW", default="mean", help=f"{', '.join(HOWS)}; default mean")
    parser.add_argument("--metric", metavar="NAME", help="of the evaluation, default the script's first that has one")
    parser.add_argument("--minimize", action="store_true", help="less is better, as of a loss")
    parser.add_argument("--outputs", metavar="KIND", help=f"of the model: {', '.join(KINDS)}; default by its targets")
    parser.add_argument("--class-dim", type=int, metavar="N", help="along which classes lie, default by its targets")
    parser.add_argument("--json", action="store_true", help="the result as JSON")


def execute(options: argparse.Namespace) -> int:
    for field, value, known in (("combine", options.combine, HOWS), ("outputs", options.outputs, (None, *KINDS))):
        if value not in known:
            raise InvalidInput(field, value, f"give one of {', '.join(filter(None, known))}")
    check_script(options.script, module=options.module)
    members, told = read_members(options.members, options.arguments)
    request = JudgeRequest(
        script=options.script,
        module=options.module,
        members=members,
        metric=options.metric,
        maximize=not options.minimize,
        combine=options.combine,
        outputs=options.outputs,
        class_dim=options.class_dim,
    )
    script = ReachedScript(script=request.script, module=request.module, metric=request.metric)
    found: dict[str, Any] = json.loads(ask("paceline.ensemble.script_members", request, script))
    for row in found["members"]:
        row["metrics"] = told[row["name"]]
    print(json.dumps(found) if options.json else "\n".join(in_words(found)))
    return 0


def read_members(paths: list[str], arguments: list[str] | None) -> tuple[list[MemberFile], dict[str, dict[str, float]]]:
    """Returns the members, and by name the metrics that were told when they were trained."""
    beside = [path for path in paths if is_beside_a_checkpoint(Path(path).name)]
    if beside:
        complain(f"{', '.join(beside)} belongs to another checkpoint, and is no member by itself")
    given = [path for path in paths if path not in beside]
    if len(given) < 2:
        raise InvalidInput("checkpoints", given, "give at least two, as in top/*.safetensors")
    names = [Path(path).stem for path in given]
    if len(set(names)) < len(names):
        names = given
    if len(set(given)) < len(given):
        twice = next(path for path in given if given.count(path) > 1)
        raise InvalidInput("checkpoints", twice, "give each of them once")
    members, told = [], {}
    for path, name in zip(given, names, strict=True):
        if not Path(path).is_file():
            raise CheckpointError(f"{path} is no file: give safetensors files that trainer.save wrote")
        _check_header(Path(path))
        note = read_note(Path(path))
        if note.arguments and arguments:
            expected = f"{note_beside(Path(path))} has others for {name}, give one of both"
            raise InvalidInput("arguments after --", " ".join(arguments), expected)
        members.append(
            MemberFile(path, name, msgspec.structs.replace(note, arguments=note.arguments or arguments or []))
        )
        told[name] = note.metrics
    return members, told


def _check_header(path: Path) -> None:
    """Raises of a file that is no safetensors file; what is in it is looked at when it is loaded."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= path.stat().st_size - 8:
                raise ValueError("its first bytes are no length")
            json.loads(file.read(length))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is no checkpoint ({error}): give files that trainer.save wrote") from error


def in_words(found: dict[str, Any]) -> list[str]:
    """Returns a table, and the answer in a sentence."""
    names = [*(row["name"] for row in found["members"]), "ensemble"]
    width = max(map(len, names))
    more = "more" if found["maximize"] else "less"
    lines = [f"{'':{width}}  {found['metric']:>10}   the ensemble is better"]
    for row in found["members"]:
        test = row["ensemble_better"]
        words = f"{test['verdict']} (on {test['better_on']} {found['paired_by']}s, worse on {test['worse_on']})"
        lines.append(f"{row['name']:{width}}  {row['value']:10.4f}   {words}, p = {test['p_value']:.2g}")
    how = f"{found['combine']} of {found['outputs']}"
    if found["weights"] is not None:
        how += f", weights {', '.join(f'{weight:.3g}' for weight in found['weights'])}"
    lines.append(f"{'ensemble':{width}}  {found['value']:10.4f}   {how}")
    better = found["better"]
    test = "McNemar's exact test" if better["test"] == "McNemar" else "paired bootstrap"
    lines += [
        "",
        f"Does the ensemble perform better than its best member, {found['best']}? {better['verdict'].capitalize()}: "
        f"{found['metric']} ({more} is better) differs by {better['difference']:+.4f} on {found['samples']} samples, "
        f"p = {better['p_value']:.2g} ({test}, by {found['paired_by']}).",
    ]
    return lines
