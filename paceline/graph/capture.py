"""From a function, a model and what the function is given to the graph of what it computes, by torch.export.

What is captured is the user's own function on the user's own batch, not the model alone: a loss is a number, while what
a model returns may be of any class. The function is run once, on tensors without values; what it does that is no
operator on tensors (printing, counting, looking at a clock) happens in that run and never again, and what it decides is
decided for good. So whatever depends on values of tensors cannot be captured, and is refused with the line where it
does.
"""

from __future__ import annotations

import io
import logging
import operator
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr, suppress
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from paceline.errors import ModelError
from paceline.graph.call_graph import AROUND, CallGraph, Mode
from paceline.graph.drawn_numbers import DrawnNumbers
from paceline.graph.inputs import Structure, take_apart
from paceline.graph.operators import name_of
from paceline.graph.whole import Capturing, NotNoted, WholeCall
from paceline.optim.batchnorm import plain_batchnorm
from paceline.optim.models import own_state
from paceline.torch_private import CHECKS, as_if_called, masks_unread, schema_of

Function = Callable[[nn.Module, Any], Any]
CAPTURING = threading.Lock()  # torch.export changes torch itself meanwhile, for all threads


# Operators that take nothing of their second operand but its shape, which is known.
_SHAPED_LIKE = {
    "view_as": torch.ops.aten.view.default,
    "reshape_as": torch.ops.aten.reshape.default,
    "expand_as": torch.ops.aten.expand.default,
}


class _Computation(nn.Module):
    """A function of a model and a batch, as a module of tensors."""

    def __init__(
        self, function: Function, model: nn.Module, structure: Structure, note: Callable[[Structure], None]
    ) -> None:
        super().__init__()
        self.model = model
        # Not to an attribute: torch.export puts those back as they were.
        self._function, self._structure, self._note = function, structure, note
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with self.around():
            found, structure = take_apart(self._function(self.model, self._structure.fill(list(tensors))), "output")
        self._note(structure)
        return tuple(found)


def capture(function: Function, model: nn.Module, given: Any, free: Sequence[set[int]] = ()) -> CallGraph:
    """Returns the graph of `function(model, given)`, in the modes that the modules are in, with gradients if they are
    on. `free`: by tensor, the dims whose sizes are left open. The model is left as it was."""
    model = own_state(model)
    tensors, structure = take_apart(given, "batch")
    returned: list[Structure] = []
    computation = _Computation(function, model, structure, returned.append)
    computation.training = model.training  # that of its own, and of no submodule
    random = torch.get_rng_state()
    kept_whole = Capturing(model)

    def export(around: Callable[[], AbstractContextManager[None]]) -> Any:
        computation.around = around
        with CAPTURING, _quiet(), masks_unread(), kept_whole.as_operators():
            return torch.export.export(computation, tuple(tensors), strict=False, dynamic_shapes=_open_sizes(free))

    def follow() -> Any:
        # Without gradients torch's own attention is one operator when it is called, and several when it is exported.
        if torch.is_grad_enabled():
            with suppress(Exception):  # which code that knows of torch.export may spare us
                return export(_as_called)
        return export(nullcontext)

    try:
        with plain_batchnorm(model):
            if kept_whole.modules:
                _refuse_open(free)
                kept_whole.first_run(function, model, given)
            try:
                exported = follow()
            except NotNoted:
                _refuse_open(free)
                kept_whole.first_run(function, model, given)
                exported = follow()
    except Exception as error:
        raise _refusal(model, error) from error
    finally:
        torch.set_rng_state(random)
    return _Flattened(exported, model, returned[-1], kept_whole.calls).graph


def _open_sizes(free: Sequence[set[int]]) -> dict[str, Any] | None:
    """Returns the sizes that are left open as torch.export wants them, None for none."""
    if not any(free):
        return None
    return {"tensors": tuple(dict.fromkeys(dims, torch.export.Dim.AUTO) for dims in free)}


def _refuse_open(free: Sequence[set[int]]) -> None:
    """What is kept whole gives tensors of the sizes that it gave once."""
    if any(free):
        raise ModelError("model", "kept whole in part", "its sizes cannot be left open")


@contextmanager
def _as_called() -> Iterator[None]:
    """What is computed inside of it goes the way that it goes when it is called."""
    with as_if_called(), DrawnNumbers():
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps torch from logging and printing what the sentence says better."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class _Flattened:
    """A graph of torch.export, without its blocks, and with placeholders for all that it needs."""

    def __init__(self, exported: Any, model: nn.Module, structure: Structure, calls: Sequence[WholeCall]) -> None:
        self._calls = calls  # of modules that are kept whole
        names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        signature = exported.graph_signature
        given = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        lifted = signature.inputs_to_lifted_tensor_constants
        self._graph = fx.Graph()
        self._values: dict[fx.Node, Any] = {}
        inputs: list[fx.Node] = []
        tensors: dict[str, fx.Node] = {}
        constants: dict[fx.Node, torch.Tensor] = {}
        copies: dict[fx.Node, Any] = {}
        for node in exported.graph.nodes:
            if node.op != "placeholder":
                continue
            path = given.get(node.name)
            name = names.get(id(_attribute(model, path))) if path is not None else None
            if name is not None and name in tensors:  # one tensor of two names
                copies[node] = tensors[name]
                continue
            copies[node] = made = self._graph.placeholder(node.name)
            self._values[made] = node.meta["val"]
            if name is not None:
                tensors[name] = made
            elif node.name in lifted:
                constants[made] = exported.constants[lifted[node.name]]
            elif path is not None:
                constants[made] = _attribute(model, path)
            else:
                inputs.append(made)
        (returned,) = self._add(exported.graph_module, copies, AROUND)
        self._graph.output(tuple(returned))
        self._drop_unused()
        used = {name: node for name, node in tensors.items() if node.users}
        self.graph = CallGraph(self._graph, inputs, used, constants, list(returned), structure, self._values)

    def _add(self, module: fx.GraphModule, copies: dict[fx.Node, Any], mode: Mode) -> list[Any]:
        """Adds the operators of a module, and of the blocks in it. Returns what it returns."""
        for node in module.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                return [fx.map_arg(node.args[0], copies.__getitem__)]
            if node.op == "get_attr":
                copies[node] = getattr(module, str(node.target))
            elif (block := _block(node)) is not None:
                inner, arguments, inside = block
                copies[node] = self._inlined(copies[inner], fx.map_arg(arguments, copies.__getitem__), inside, mode)
            elif node.target is operator.getitem and isinstance(copies[node.args[0]], tuple):
                copies[node] = copies[node.args[0]][node.args[1]]  # a result of a block
            elif name_of(node) not in CHECKS:
                copies[node] = self._copy(node, copies, mode)
        raise AssertionError("a graph without an output")

    def _inlined(self, module: fx.GraphModule, arguments: Sequence[Any], inside: Mode, around: Mode) -> tuple[Any, ...]:
        places = [node for node in module.graph.nodes if node.op == "placeholder"]
        mode = (inside[0] if inside[0] is not None else around[0], inside[1] or around[1])
        (returned,) = self._add(module, dict(zip(places, arguments, strict=True)), mode)
        return tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)

    def _copy(self, node: fx.Node, copies: dict[fx.Node, Any], mode: Mode) -> fx.Node:
        made = self._graph.node_copy(node, copies.__getitem__)
        if (plain := _SHAPED_LIKE.get(name_of(node))) is not None:
            made.target, made.args = plain, (made.args[0], list(node.meta["val"].shape))
        if node.target is torch.ops.paceline.whole.default:
            args: Any = made.args
            number, *operands = args
            made.target, made.args = self._calls[number], tuple(operand for group in operands for operand in group)
        stack = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
        # Of the model that lies in the computation.
        modules = [path.partition(".")[2] for path in stack if path.partition(".")[0] == "model"]
        made.meta = {"mode": mode, "modules": modules}
        self._values[made] = node.meta.get("val")
        return made

    def _drop_unused(self) -> None:
        """Leaves out what nobody uses and what changes nothing."""
        for node in reversed(list(self._graph.nodes)):
            if node.op == "call_function" and not node.users and not _has_effect(node):
                self._graph.erase_node(node)


def _has_effect(node: fx.Node) -> bool:
    if isinstance(node.target, WholeCall):
        return True  # nobody knows
    schema: Any = schema_of(node.target)
    target: Any = node.target
    return schema is not None and (schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags)


def _block(node: fx.Node) -> tuple[fx.Node, Sequence[Any], Mode] | None:
    """Returns the module of a block, what it is given, and the mode inside; None for an operator."""
    name = getattr(node.target, "__name__", "")
    args: Any = node.args
    if name == "wrap_with_set_grad_enabled":
        return args[1], args[2:], (args[0], None)
    if name == "wrap_with_autocast":
        device, kind, enabled, _ = args[:4]
        return args[4], args[5:], (None, (device, kind or torch.get_autocast_dtype(device), enabled))
    return None


def _attribute(model: nn.Module, path: str) -> Any:
    """Returns a tensor by its path in the computation, which begins with the model."""
    first, _, rest = path.partition(".")
    owner, _, name = rest.rpartition(".")
    return getattr(model.get_submodule(owner), name) if first == "model" else None


# ── what cannot be captured ──────────────────────────────────────────────────────────────────────────────────


def _refusal(model: nn.Module, error: Exception) -> ModelError:
    if isinstance(error, ModelError):
        return error
    by_values = "data-dependent" in str(error) or "DataDependent" in type(error).__name__
    why = "it decides by the values of a tensor" if by_values else _first_line(error)
    path = _module_of(model, error)
    then = f"keep that module whole with pl.whole({_spelled(path)})" if path else "leave that out"
    return ModelError(
        "model",
        type(model).__name__,
        f"what it computes cannot be followed{_line_of(error)}, so it cannot be cut: {why}; {then}, or use --replicas",
    )


def _module_of(model: nn.Module, error: BaseException) -> str:
    """Returns the path of the innermost module that an error came through; an empty one if that is the model."""
    paths = {module: path for path, module in model.named_modules()}
    found, here = "", error.__traceback__
    while here is not None:
        of = here.tb_frame.f_locals.get("self")
        # Not torch's own Sequential or Linear around or below the user's line: nothing in there decides.
        if isinstance(of, nn.Module) and of in paths and not type(of).__module__.startswith("torch.nn."):
            found = paths[of]
        here = here.tb_next
    return found


def _spelled(path: str) -> str:
    """Returns a path as a script spells it.

    >>> _spelled("layers.0.experts")
    'model.layers[0].experts'
    """
    return "model" + "".join(f"[{name}]" if name.isdigit() else f".{name}" for name in path.split("."))


def _line_of(error: BaseException) -> str:
    """Returns the last line of the user's own code, or of a library's but torch's, that an error came through."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    if not frames:
        return ""
    line = frames[-1]
    return f" at {Path(line.filename).name}:{line.lineno} ({line.line})"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
