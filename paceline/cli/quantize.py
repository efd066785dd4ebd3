"""`paceline quantize`: a trained model in int8, with what it saves and what it costs, layer by layer.

The script is run for its model and its evaluation, and nothing is trained, as `paceline ensemble` does it.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
from pathlib import Path

import msgspec

from paceline.checkpoint_note import note_beside, read_note
from paceline.cli import whole
from paceline.cli.checks import check_script
from paceline.errors import InvalidInput, LaunchError
from paceline.launch.reached_script import ReachedScript
from paceline.launch.script_task import ask
from paceline.plan.plot import check_plot
from paceline.quantize.table import in_words
from paceline.quantize.values import ACTIVATIONS, QuantizeReport, QuantizeRequest
from paceline.search.top import is_beside_a_checkpoint

SUFFIX = ".safetensors"
EXPORTS = ("onnx",)
_NEEDED = ("onnx", "onnxscript", "onnxruntime")
EXAMPLES = """\
The script has to evaluate by name, as in
  trainer.evaluate(validation_set, accuracy, name="accuracy")
and that metric, on those samples, decides: the layers by which most is lost stay in float until it is within
--max-drop. A point is 0.01 of a metric between 0 and 1 of which more is better, and of any other a hundredth of its
value for the float model.

examples:
  paceline quantize model.safetensors --script train.py                        writes model-int8.safetensors
  paceline quantize model.safetensors --script train.py --max-drop 0.2 --plot int8.png
  paceline quantize model.safetensors --script train.py --metric loss --minimize --json
  paceline quantize model.safetensors --script train.py --float "head" --float "blocks.0.*"
  paceline quantize model.safetensors --script train.py --export onnx -- --width 512

pl.load("model-int8.safetensors", Net()) and `paceline serve model-int8.safetensors --script train.py` compute in int8.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "paceline quantize MODEL --script SCRIPT [flags] [-- the script's own arguments]"
    parser.description = "Write a trained model in int8, and say what that saves and costs, layer by layer."
    parser.epilog = EXAMPLES
    parser.add_argument("checkpoint", metavar="MODEL", help="a .safetensors file, as trainer.save writes it")
    parser.add_argument("--script", metavar="SCRIPT", required=True, help="the Python file that has trained it")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as with python -m")
    parser.add_argument("--out", metavar="FILE", help="to write, default MODEL-int8.safetensors beside it")
    judged = parser.add_argument_group("by what it is judged")
    judged.add_argument("--max-drop", default="0.5", metavar="POINTS", help="that the metric may lose, default 0.5")
    judged.add_argument("--metric", metavar="NAME", help="of the evaluation, default the script's first that has one")
    judged.add_argument("--minimize", action="store_true", help="less is better, as of a loss")
    judged.add_argument("--data", metavar="FILE", help="a .npz or .safetensors file, for the script's own samples")
    how = parser.add_argument_group("how it is made")
    how.add_argument("--float", action="append", default=[], metavar="LAYER", help="stays in float; may be a pattern")
    how.add_argument(
        "--activations",
        default="calibrated",
        metavar="HOW",
        help="calibrated (default): inputs of layers are rounded by what the samples show; dynamic: by each request",
    )
    how.add_argument("--samples", type=whole("samples", 1), default=512, metavar="N", help="to calibrate, default 512")
    seen = parser.add_argument_group("what else comes of it")
    seen.add_argument("--export", metavar="KIND", help="onnx: for phones and other programs, checked in onnxruntime")
    seen.add_argument("--plot", metavar="FILE", help="layers before and after, .png or .svg")
    seen.add_argument("--json", action="store_true", help="the report as JSON")


def execute(options: argparse.Namespace) -> int:
    for field, value, known in (
        ("activations", options.activations, ACTIVATIONS),
        ("export", options.export, (None, *EXPORTS)),
    ):
        if value not in known:
            raise InvalidInput(field, value, f"give {' or '.join(filter(None, known))}")
    check_script(options.script, module=options.module)
    checkpoint = _existing("model", options.checkpoint, (SUFFIX,))
    out = _out(options.out, checkpoint)
    if options.data is not None:
        _existing("data", options.data, (".npz", SUFFIX))
    picture = None if options.plot is None else check_plot(options.plot)
    if picture is not None and importlib.util.find_spec("matplotlib") is None:
        raise LaunchError("a plot needs matplotlib: pip install 'paceline[plots]'")
    if options.export is not None and (missing := [it for it in _NEEDED if importlib.util.find_spec(it) is None]):
        raise LaunchError(f"--export onnx needs {missing[0]}: pip install 'paceline[onnx]'")
    note = read_note(checkpoint)
    if note.arguments and options.arguments:
        expected = f"{note_beside(checkpoint)} has others, give one of both"
        raise InvalidInput("arguments after --", " ".join(options.arguments), expected)
    request = QuantizeRequest(
        checkpoint=str(checkpoint),
        out=str(out),
        script=options.script,
        module=options.module,
        made=msgspec.structs.replace(note, arguments=note.arguments or options.arguments or []),
        data=options.data,
        metric=options.metric,
        maximize=not options.minimize,
        max_drop=_points(options.max_drop),
        activations=options.activations,
        samples=options.samples,
        keep=options.float,
        onnx=None if options.export is None else str(out.with_suffix(".onnx")),
    )
    script = ReachedScript(script=request.script, module=request.module, metric=request.metric)
    answer = ask("paceline.quantize.script_quantizer", request, script)
    report = msgspec.json.decode(answer, type=QuantizeReport)
    if picture is not None:
        from paceline.quantize.plot import draw

        draw(report, picture)
    print(msgspec.json.encode(report).decode() if options.json else "\n".join(in_words(report)))
    return 0


def _existing(field: str, path: str, endings: tuple[str, ...]) -> Path:
    words = " or ".join(endings)
    if os.path.isdir(path):
        raise InvalidInput(field, path[:200], f"this is a folder, give a file that ends in {words}")
    if not os.path.isfile(path):
        raise InvalidInput(field, path[:200], f"there is no such file, give one that ends in {words}")
    if not path.endswith(endings):
        raise InvalidInput(field, path[:200], f"give a file that ends in {words}")
    return Path(path)


def _out(given: str | None, checkpoint: Path) -> Path:
    out = checkpoint.with_name(f"{checkpoint.stem}-int8{SUFFIX}") if given is None else Path(given)
    if out.suffix != SUFFIX:
        raise InvalidInput("out", str(out)[:200], f"give a file name that ends in {SUFFIX}")
    if is_beside_a_checkpoint(out.name):
        raise InvalidInput("out", str(out)[:200], "give another name, this one is for files beside a checkpoint")
    if not out.absolute().parent.is_dir():
        raise InvalidInput("out", str(out)[:200], "its folder does not exist, make it first")
    if out.is_dir() or (out.exists() and os.path.samefile(out, checkpoint)):
        raise InvalidInput("out", str(out)[:200], "give another name, the float checkpoint stays as it is")
    return out


def _points(text: str) -> float:
    """
    >>> _points("0.5")
    0.5
    """
    try:
        points = float(text)
    except ValueError:
        points = math.nan
    if not 0 <= points < math.inf:
        raise InvalidInput("max-drop", text[:20], "give a number of points from 0 up, such as 0.5")
    return points
