"""`python -m paceline.quantize.script_quantizer REQUEST RESULT`: quantizes the model of a script, which is run for it.

The script is run in this process as far as its evaluation; nothing is trained. What was found, or a sentence about what
is wrong, is written into a file.
"""

from __future__ import annotations

from paceline.launch.reached_script import ReachedScript
from paceline.launch.script_task import answer
from paceline.quantize.values import QuantizeReport, QuantizeRequest
from paceline.run_place import find_place


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
    answer(QuantizeRequest, _quantized)
