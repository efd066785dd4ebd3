"""A float checkpoint becomes one in int8: the way from one to the other, and the report.

load ─▶ find layers ─▶ calibrate ─▶ choose ─▶ write ─▶ read it back: the same answers? ─▶ time ─▶ export
"""

from __future__ import annotations

import contextlib
import fnmatch
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from paceline import checkpoint
from paceline.checkpoint_note import note_beside
from paceline.errors import CheckpointError, InvalidInput, LossError, ModelError
from paceline.loop.model_found import found_call
from paceline.loop.validation import ValidationSet
from paceline.optim.models import own_state
from paceline.quantize.choosing import Int8Choice, difference_of
from paceline.quantize.int8_file import check_same_tensors, fill_int8, is_int8, write_int8
from paceline.quantize.kernels import can_compute
from paceline.quantize.layers import find_layers
from paceline.quantize.swaps import Swap, find_norms
from paceline.quantize.timing import one_core, time_in_turns
from paceline.quantize.values import LayerReport, ModelReport, OnnxReport, QuantizeReport, QuantizeRequest
from paceline.torch_private import tree_leaves
from paceline.watch.kept_folder import write_whole

MANY = 32  # samples in an answer that is timed beside that of one


def quantize(request: QuantizeRequest, model: nn.Module, validation: ValidationSet) -> QuantizeReport:
    """Writes the model of the request's checkpoint in int8, and returns what came of it."""
    if not can_compute():
        raise ModelError("model", type(model).__name__, f"torch {torch.__version__} has no kernels for int8 here")
    model = own_state(model).eval()
    _fill_float(model, request.checkpoint)
    return _Quantizing(request, model, validation).run()


def _fill_float(model: nn.Module, path: str) -> None:
    """Loads the checkpoint, of which every number has to be one."""
    tensors, notes = checkpoint.read_noted_model(path)
    if is_int8(notes):
        raise CheckpointError(f"{path} is in int8 already: give the checkpoint that it was made of")
    check_same_tensors(path, model.state_dict(), tensors)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise CheckpointError(f"{path} has numbers that are not finite in {name!r}: give one from before that")
    model.load_state_dict(tensors)


class _Quantizing:
    """One model on its way to int8."""

    def __init__(self, request: QuantizeRequest, model: nn.Module, validation: ValidationSet) -> None:
        self._request, self._model, self._validation = request, model, validation
        self._layers = find_layers(model)
        for layer in self._layers:
            if pattern := next((it for it in request.keep if fnmatch.fnmatchcase(layer.name, it)), None):
                for its in [other for other in self._layers if other.name in (layer.tied or [layer.name])]:
                    its.kind, its.refusal = None, f"--float {pattern}"
        for pattern in request.keep:
            if not fnmatch.filter([layer.name for layer in self._layers], pattern):
                known = ", ".join(layer.name for layer in self._layers[:8])
                raise InvalidInput("float", pattern, f"no layer has such a name, they are {known}, …")

    def run(self) -> QuantizeReport:
        request, model, validation = self._request, self._model, self._validation
        answer = self._call(range(min(MANY, validation.length)))
        with torch.no_grad():
            float_value = validation.measured(model)
            groups = self._groups(answer)
            choice = Int8Choice(groups, answer)
            point = 0.01 if request.maximize and 0 <= float_value <= 1 else 0.01 * abs(float_value) or 0.01

            def drop(value: float) -> float:
                return (float_value - value if request.maximize else value - float_value) / point

            def measure() -> float:
                try:
                    return validation.measured(model)
                except LossError:  # with these layers in int8 it is not even finite
                    return -math.inf if request.maximize else math.inf

            chosen = choice.settle(measure, drop, request.max_drop)
            write_int8(Path(request.out), model, chosen, {"metrics": {validation.told: float_value}})
            self._read_back(choice, answer, chosen)
            value = validation.measured(model)
        note = msgspec.structs.replace(request.made, metrics={validation.told: value})
        write_whole(note_beside(Path(request.out)), msgspec.json.encode(note))
        before, after, layers = self._timed(choice, groups, chosen)
        onnx = None if request.onnx is None else self._exported(Path(request.onnx))
        return QuantizeReport(
            path=request.out,
            metric=validation.told,
            maximize=request.maximize,
            samples=validation.length,
            max_drop=request.max_drop,
            point=point,
            drop=drop(value),
            before=ModelReport(bytes=os.path.getsize(request.checkpoint), value=float_value, ms=before),
            after=ModelReport(bytes=os.path.getsize(request.out), value=value, ms=after),
            layers=layers,
            onnx=onnx,
        )

    # ── on the way ───────────────────────────────────────────────────────────────────────────────────────────

    def _call(self, samples: range) -> Callable[[], Any]:
        """Returns what has the model answer these samples, as the metric asks it."""
        batch = self._validation.load(samples)
        metric, model = self._validation.metric, self._model
        call = found_call(metric, model, batch)
        if call is None:  # it calls something else of the model
            return lambda: metric(model, batch)
        args, kwargs = call
        return lambda: model(*args, **kwargs)

    def _groups(self, answer: Callable[[], Any]) -> list[list[Swap]]:
        """Returns what stands for the layers that can be in int8, calibrated; those that share a weight together."""
        request, model, validation = self._request, self._model, self._validation
        possible = [layer for layer in self._layers if layer.kind is not None]
        norms = find_norms(model, possible, answer)
        swaps = {layer.name: Swap(model, layer, norms.get(layer.name)) for layer in possible}
        for swap in swaps.values():
            swap.layer.begin_look()
            swap.put(int8=True)
        seen = 0
        for samples in validation.batches:
            validation.number(model, validation.load(samples), len(samples))
            if (seen := seen + len(samples)) >= request.samples:
                break
        refused: dict[str, str] = {}
        for name, swap in swaps.items():
            if (problem := swap.layer.end_look(dynamic=request.activations == "dynamic")) is not None:
                refused[name] = problem
            swap.put(int8=False)
        for layer in possible:
            if problems := [refused[name] for name in (layer.tied or [layer.name]) if name in refused]:
                layer.kind, layer.refusal = None, problems[0]
        left = [layer for layer in possible if layer.kind is not None]
        if not left:
            why = "; ".join(f"{layer.name}: {layer.refusal}" for layer in self._layers[:3]) or "it has no weights"
            raise ModelError("model", type(model).__name__, f"no layer of it can be in int8 ({why})")
        groups: dict[str, list[Swap]] = {}
        for layer in left:
            groups.setdefault((layer.tied or [layer.name])[0], []).append(swaps[layer.name])
        return list(groups.values())

    def _read_back(self, choice: Int8Choice, answer: Callable[[], Any], chosen: Sequence[Swap]) -> None:
        """Raises unless the file, read as anybody would, answers just what was measured."""
        expected = answer()
        choice.use([])
        tensors, notes = checkpoint.read_noted_model(self._request.out)
        fill_int8(self._model, self._request.out, tensors, notes, cut=False)
        found = answer()
        for swap in chosen:
            swap.put(int8=True)
        for a, b in zip(tree_leaves(expected), tree_leaves(found), strict=True):
            if isinstance(a, torch.Tensor) and not torch.equal(a, b):
                raise CheckpointError(f"{self._request.out} does not answer what was measured: this is a defect")

    def _exported(self, path: Path) -> OnnxReport:
        """Returns what onnxruntime makes of the model, once it is an ONNX file."""
        from paceline.quantize.onnx_export import export_onnx

        model, validation = self._model, self._validation
        batch, one = (validation.load(range(min(rows, validation.length))) for rows in (MANY, 1))
        call, single = (found_call(validation.metric, model, it) for it in (batch, one))
        if call is None or single is None:
            raise ModelError("export", "onnx", "the metric has to call the model as model(…)")
        exported = export_onnx(model, call, path)
        with torch.no_grad():
            difference = difference_of(model(*call[0], **call[1]), exported(*call[0], **call[1]))
        seconds = time_in_turns({path: lambda: exported(*single[0], **single[1])})[path]
        return OnnxReport(
            path=str(path),
            bytes=os.path.getsize(path),
            value=validation.measured(exported),
            difference=difference,
            ms=1000 * seconds,
        )

    # ── what it costs ────────────────────────────────────────────────────────────────────────────────────────

    def _timed(
        self, choice: Int8Choice, groups: Sequence[Sequence[Swap]], chosen: Sequence[Swap]
    ) -> tuple[dict[int, float], dict[int, float], list[LayerReport]]:
        """Returns milliseconds of an answer in float and in int8, by number of samples; and of each layer."""
        names = {swap.name for swap in chosen}
        in_int8 = [group for group in groups if group[0].name in names]
        before, after = {}, {}
        with one_core():
            for rows in sorted({1, min(MANY, self._validation.length)}):
                answer = self._call(range(rows))
                taken = time_in_turns(
                    {True: answer, False: answer}, lambda is_int8: choice.use(in_int8 if is_int8 else [])
                )
                before[rows], after[rows] = 1000 * taken[False], 1000 * taken[True]
            choice.use([])
            layers = self._layer_reports(choice, {swap.name: swap for group in groups for swap in group}, names)
        choice.use(in_int8)
        return before, after, layers

    def _layer_reports(self, choice: Int8Choice, swaps: dict[str, Swap], chosen: set[str]) -> list[LayerReport]:
        calls = _inputs(self._call(range(1)), swaps.values())
        reports, counted = [], set()
        for layer in self._layers:
            parameters = [it for it in layer.module.parameters() if id(it) not in counted]
            counted |= {id(it) for it in parameters}
            size = sum(it.nbytes for it in parameters)
            report = LayerReport(
                name=layer.name,
                kind=type(layer.module).__name__,
                parameters=sum(it.numel() for it in parameters),
                int8=layer.name in chosen,
                why=layer.refusal or ("" if layer.name in chosen else "too much is lost"),
                bytes_before=size,
                bytes_after=size,
            )
            if (swap := swaps.get(layer.name)) is not None:
                report = msgspec.structs.replace(report, error=choice.errors[layer.name])
                if layer.name in chosen and parameters:
                    after = sum(tensor.nbytes for tensor in swap.layer.tensors().values())
                    report = msgspec.structs.replace(report, bytes_after=after)
                if (call := calls.get(layer.name)) is not None:
                    args, kwargs = call
                    taken = time_in_turns({kind: _applied(kind, args, kwargs) for kind in (swap.module, swap.layer)})
                    report = msgspec.structs.replace(
                        report, us_before=1e6 * taken[swap.module], us_after=1e6 * taken[swap.layer]
                    )
            reports.append(report)
        return reports


def _applied(module: nn.Module, args: Any, kwargs: Any) -> Callable[[], Any]:
    return lambda: module(*args, **kwargs)


def _inputs(answer: Callable[[], Any], swaps: Any) -> dict[str, tuple[Any, Any]]:
    """Returns what each layer is first given while the model answers."""
    found: dict[str, tuple[Any, Any]] = {}
    with contextlib.ExitStack() as hooks:
        for swap in swaps:

            def note(_: nn.Module, args: Any, kwargs: Any, name: str = swap.name) -> None:
                found.setdefault(name, (args, kwargs))

            hooks.callback(swap.module.register_forward_pre_hook(note, with_kwargs=True).remove)
        answer()
    return found
