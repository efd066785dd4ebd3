"""`python -m paceline.quantize.script_quantizer REQUEST RESULT`: quantizes the model of a script, which is run for it.

The script is run in this process as far as its evaluation; nothing is trained. What was found, or a sentence about what
is wrong, is written into a file.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import msgspec

from paceline.errors import PacelineError
from paceline.launch.quick_start import load_compiler_late
from paceline.launch.reached_script import ReachedScript
from paceline.launch.resting_collector import rest_while_loading
from paceline.quantize.values import QuantizeRefused, QuantizeReport, QuantizeRequest
from paceline.run_place import find_place


def main(arguments: Sequence[str]) -> int:
    """Quantizes, and writes the report, or a sentence about what is wrong."""
    request_path, result_path = arguments
    request = msgspec.json.decode(Path(request_path).read_bytes(), type=QuantizeRequest)
    load_compiler_late()
    rest_while_loading()
    try:
        found: msgspec.Struct = _quantized(request)
    except PacelineError as error:
        found = QuantizeRefused(str(error))
    except Exception:
        traceback.print_exc()
        return 1
    Path(result_path).write_bytes(msgspec.json.encode(found))
    return 0


def _quantized(request: QuantizeRequest) -> QuantizeReport:
    script = ReachedScript(script=request.script, module=request.module, metric=request.metric)
    reached = script.run(request.made, find_place())
    from paceline.loop.validation import open_validation
    from paceline.quantize.given_data import read_data
    from paceline.quantize.quantizing import quantize

    data = None if request.data is None else read_data(request.data, reached.data.dataset)
    with open_validation(reached, request.metric, data) as validation:
        return quantize(request, reached.model, validation)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a script that was cut off in the middle may have left threads behind
