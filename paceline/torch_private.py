"""What Paceline uses of torch's private parts: what each is for, and what happens where it is missing.

Three of our accelerations are loans, because they change what torch does: its compiler is loaded late
(`launch/quick_start.py`), linear layers, embeddings and convolutions on tiles write their gradient in place
(`optim/direct_gradients.py`), and linear layers multiply by another library where that takes less time
(`optim/products.py`). They stay away from a torch that they were not tested with, and `PACELINE_PLAIN_TORCH=1` switches
them off; results are the same to rounding, and starts and steps take longer. Whatever else is missing is said in a
sentence as soon as it is asked for.

What torch calls by such a name is where it looks for it: the methods of `torch_group/process_group.py`.

Nothing of torch is imported before it is asked for: the compiler's late loading has to be in place earlier.
"""

from __future__ import annotations

import importlib
import operator
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch._C import DisableTorchFunctionSubclass as PlainTensors
    from torch._C import _are_functorch_transforms_active as inside_torch_func
    from torch._C import _set_grad_enabled as set_grad_mode
    from torch._C import _will_engine_execute_node as backward_will_run
    from torch._compile import _disable_dynamo as keep_compiler_out
    from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
    from torch.optim import Optimizer
    from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
    from torch.utils._python_dispatch import TorchDispatchMode as QuickDispatchMode
    from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten
    from torch.utils.data._utils.collate import collate as collate_by
    from torch.utils.data._utils.collate import default_collate_fn_map as collate_functions

    empty_tensor = torch.Tensor._make_wrapper_subclass
    make_int8_matrix = torch._make_per_channel_quantized_tensor
    pack_matrix = torch.ops.mkldnn._reorder_linear_weight
    packed_product = torch.ops.mkldnn._linear_pointwise
    packed_product_plus = torch.ops.mkldnn._linear_pointwise.binary

__all__ = [
    "AnyBatchNorm",
    "DispatchMode",
    "PlainTensors",
    "QuickDispatchMode",
    "TreeSpec",
    "backward_will_run",
    "collate_by",
    "collate_functions",
    "empty_tensor",
    "inside_torch_func",
    "keep_compiler_out",
    "make_int8_matrix",
    "pack_matrix",
    "packed_product",
    "packed_product_plus",
    "set_grad_mode",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]

_TREES = "torch.utils._pytree"
_WHERE = {
    # The base of every BatchNorm, a user's own included. Without it there is no telling which modules need statistics.
    "AnyBatchNorm": ("torch.nn.modules.batchnorm", "_BatchNorm"),
    # `torch.compiler.disable` that does not load the compiler before there is something to compile.
    "keep_compiler_out": ("torch._compile", "_disable_dynamo"),
    # Tuples, lists and dicts of tensors: batches, and what modules take and return. torch has no public name for them.
    "TreeSpec": (_TREES, "TreeSpec"),
    "tree_flatten": (_TREES, "tree_flatten"),
    "tree_leaves": (_TREES, "tree_leaves"),
    "tree_map": (_TREES, "tree_map"),
    "tree_map_only": (_TREES, "tree_map_only"),
    "tree_unflatten": (_TREES, "tree_unflatten"),
    # Sees every operator that runs inside of it: how `paceline verify` finds what a script computes in float32 itself.
    "DispatchMode": ("torch.utils._python_dispatch", "TorchDispatchMode"),
    # How samples become a batch, by class: torch's guide extends its own table, for the whole process.
    "collate_by": ("torch.utils.data._utils.collate", "collate"),
    "collate_functions": ("torch.utils.data._utils.collate", "default_collate_fn_map"),
    # What `torch.no_grad` comes to in a traced graph: a function that is called there by itself.
    "set_grad_mode": ("torch._C", "_set_grad_enabled"),
    # Of tiles: a tensor that has a size and no values, and the context inside of which its class counts for nothing.
    # Both are in torch's own guide to tensor subclasses.
    "empty_tensor": ("torch", "Tensor._make_wrapper_subclass"),
    "PlainTensors": ("torch._C", "DisableTorchFunctionSubclass"),
    # Of the wavefront: oneDNN's products with a matrix that is packed once. `can_pack` says whether they are there.
    "pack_matrix": ("torch", "ops.mkldnn._reorder_linear_weight"),
    "packed_product": ("torch", "ops.mkldnn._linear_pointwise"),
    "packed_product_plus": ("torch", "ops.mkldnn._linear_pointwise.binary"),
    # Of models in int8: whole numbers and their scales, as fbgemm's packing wants them. `quantize.kernels.can_compute`.
    "make_int8_matrix": ("torch", "_make_per_channel_quantized_tensor"),
    # Of gradients that are written in place, a loan: whether a node's gradient is accumulated by the backward that is
    # running, and whether `torch.func` is at work.
    "backward_will_run": ("torch._C", "_will_engine_execute_node"),
    "inside_torch_func": ("torch._C", "_are_functorch_transforms_active"),
}


def _quick_dispatch_mode() -> type:
    """A `DispatchMode` that tells the compiler nothing, for which torch would load it: a second, and a third of that
    for every operator's sake."""
    mode = __getattr__("DispatchMode")
    return type("QuickDispatchMode", (mode,), {"_should_skip_dynamo": classmethod(lambda _: False)})


def __getattr__(name: str) -> Any:
    if name == "QuickDispatchMode":
        return globals().setdefault(name, _quick_dispatch_mode())
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, there = _WHERE[name]
    try:
        found = operator.attrgetter(there)(importlib.import_module(module))
    except (ImportError, AttributeError):
        version = sys.modules["torch"].__version__
        raise PacelineError(f"torch {version} has no {module}.{there}: use torch {_words(TESTED)}") from None
    globals()[name] = found  # and is not asked for again
    return found


# Of graphs: operators that torch.export leaves in one to check it, and two that a rule knows.
CHECKS = frozenset({"_assert_tensor_metadata", "_assert_async", "_assert_scalar"})
COPY, RESHAPE = "_to_copy", "_unsafe_view"


def schema_of(operator: Any) -> Any:
    """What an operator of a graph takes, changes and returns; None for a function that is none of torch's."""
    return getattr(operator, "_schema", None)


def plain_function() -> Any:
    """What a class of tensors has as `__torch_function__` to be an ordinary one; torch's guide to them says so."""
    import torch

    return torch._C._disabled_torch_function_impl


def is_operator(value: Any) -> bool:
    """Whether something is one operator of torch's registry, and no function or namespace of it."""
    from torch._ops import OpOverload

    return isinstance(value, OpOverload)


FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")  # attributes in which a module has them


@contextmanager
def masks_unread() -> Iterator[None]:
    """torch's TransformerEncoder and decoder do not look meanwhile whether a mask is the causal one, which a graph
    cannot follow; attention gives the same with the mask as it is. Where there is no such look, nothing happens."""
    from torch.nn.modules import transformer

    look = getattr(transformer, "_detect_is_causal_mask", None)
    if look is None:
        yield
        return

    def unread(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return bool(is_causal)

    transformer._detect_is_causal_mask = unread
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = look


@contextmanager
def as_if_called() -> Iterator[None]:
    """Code that asks torch whether it is being exported is told that it is not, and does what it does when it is
    called: `transformers` would make masks that it can do without. Where torch keeps that elsewhere, it does not."""
    from torch import compiler

    names = [name for name in ("_is_compiling_flag", "_is_exporting_flag") if hasattr(compiler, name)]
    before = [getattr(compiler, name) for name in names]
    try:
        for name in names:
            setattr(compiler, name, False)
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(compiler, name, value)


def expression_of(size: torch.SymInt) -> Any:
    """What a size is that torch.export leaves open, as an expression of sympy."""
    return size.node.expr


def conditions_of(size: torch.SymInt) -> list[Any]:
    """What has to hold of open sizes for a graph to be right, as expressions of sympy. Where torch keeps them elsewhere
    there are none to be found, and graphs are held against what they were captured from."""
    environment = size.node.shape_env
    found = [guard.expr for guard in getattr(environment, "guards", ())]
    asserted = getattr(environment, "deferred_runtime_asserts", {})
    found += [entry.expr for entries in asserted.values() for entry in entries]
    found = [environment.replace(condition) for condition in found]  # sizes that turned out to be numbers
    for symbol, bounds in getattr(environment, "var_to_range", {}).items():
        if symbol in size.node.expr.free_symbols:
            found += [symbol >= bounds.lower, symbol <= bounds.upper]
    return found


# ── the loans ────────────────────────────────────────────────────────────────────────────────────────────────

TESTED = ((2, 9), (2, 15))  # the oldest and the newest torch that all tests of the loans have run with
PLAIN_TORCH = "PACELINE_PLAIN_TORCH"

# For the compiler's late loading: the module that is not to be loaded, and the one that loads it with what
# `torch.export` needs beside it; the decorator of every optimizer's `step`, which loads it; and where `torch._compile`
# keeps, at a method, the form of it that the compiler knows.
COMPILER = "torch._dynamo"
EXPORTER = "torch.export._trace"
STEP_DECORATOR = "_use_grad_for_differentiable"
KNOWN_TO_COMPILER = "__dynamo_disable"


def wants_plain_torch() -> bool:
    """Whether the user has switched the loans off."""
    return os.environ.get(PLAIN_TORCH, "0") not in ("", "0")


def may_borrow(version: str) -> bool:
    """Whether the loans may be taken of this torch: it is a release that they were tested with, and nobody objects.

    >>> may_borrow("2.13.0+cpu"), may_borrow("2.8.1"), may_borrow("2.14.0a0+git1234"), may_borrow("3.0.0")
    (True, False, False, False)
    """
    release = re.fullmatch(r"(\d+)\.(\d+)\.\d+(\+\w+)?", version)
    if release is None or wants_plain_torch():
        return False
    return TESTED[0] <= (int(release[1]), int(release[2])) <= TESTED[1]


def can_follow_gradients() -> bool:
    """Whether the linear layers may write their gradients in place: all that tells them when not to is there."""
    import torch
    from torch.autograd import forward_ad

    return (
        may_borrow(torch.__version__)
        and all(hasattr(torch._C, _WHERE[name][1]) for name in ("backward_will_run", "inside_torch_func"))
        and all(hasattr(torch.Tensor, name) for name in ("_backward_hooks", "_post_accumulate_grad_hooks", "_is_view"))
        and hasattr(torch._C, "_len_torch_function_stack")
        and hasattr(torch.overrides, "_get_current_function_mode_stack")
        and hasattr(torch.ops.aten, "_unsafe_view")
        and hasattr(forward_ad, "_current_level")
    )


def linear_of_onednn() -> Any:
    """Returns oneDNN's operator of a linear layer, which torch's compiler puts into what it makes for inference, and
    which autograd knows nothing of: (x, weight, bias, "none", [], "") → x @ weightᵀ + bias. None where there is none,
    or it is not wanted. Weights whose rows do not follow one another it multiplies a thousand times slower."""
    import torch

    return torch.ops.mkldnn._linear_pointwise if may_borrow(torch.__version__) and can_pack() else None


def is_watched(weight: torch.Tensor) -> bool:
    """Whether hooks of the user's want to see this parameter's gradient; one is the collector's own."""
    return bool(weight._backward_hooks) or len(weight._post_accumulate_grad_hooks or ()) > 1


def function_modes() -> list[Any]:
    """Every `TorchFunctionMode` that is active."""
    import torch

    if not torch._C._len_torch_function_stack():
        return []
    return torch.overrides._get_current_function_mode_stack()  # type: ignore[no-any-return, no-untyped-call]


def add_function_mode(mode: Any) -> None:
    """Makes a `TorchFunctionMode` active beneath all that are: who leaves one of those takes away the uppermost. That
    of `torch.set_default_device` is the lowest: torch insists on it."""
    import torch

    above, of_default = function_modes(), getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    lowest = 1 if above and above[0] is of_default else 0
    for _ in above[lowest:]:
        torch.overrides._pop_mode()  # type: ignore[no-untyped-call]
    for other in (mode, *above[lowest:]):
        torch.overrides._push_mode(other)  # type: ignore[no-untyped-call]


def remove_function_mode(mode: Any) -> None:
    """Takes it away, wherever it is; if it is not active, nothing changes."""
    import torch

    active = function_modes()
    if mode not in active:
        return
    above = active[active.index(mode) :]
    for _ in above:
        torch.overrides._pop_mode()  # type: ignore[no-untyped-call]
    for other in above[1:]:
        torch.overrides._push_mode(other)  # type: ignore[no-untyped-call]


def inside_forward_derivative() -> bool:
    """Whether derivatives are being taken forwards."""
    from torch.autograd import forward_ad

    return forward_ad._current_level >= 0


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether it stands for several, of which an operator without a rule for that would make one."""
    import torch

    kinds = ("is_batchedtensor", "is_legacy_batchedtensor")
    return any(hasattr(torch._C._functorch, kind) and getattr(torch._C._functorch, kind)(tensor) for kind in kinds)


def not_a_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory: autograd lets nobody change a view in place that a function of ours has returned."""
    import torch

    return torch.ops.aten._unsafe_view(tensor, tensor.shape) if tensor._is_view() else tensor


# ── modules, optimizers and tensors ──────────────────────────────────────────────────────────────────────────
#
# Attributes that torch has had for years. Where one is missing and nothing else is said, Python names it.


def inside_compiled(model: nn.Module) -> nn.Module | None:
    """The user's module inside of one that `torch.compile` has returned; None of any other."""
    inner: nn.Module | None = getattr(model, "_orig_mod", None)
    return inner


def is_compiled(model: nn.Module) -> bool:
    """Whether the compiler runs this module, by `torch.compile(model)` or `model.compile()`."""
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody wants to be called before or after this module."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def buffer_tables(model: nn.Module) -> list[dict[str, torch.Tensor | None]]:
    """Where the modules of a model keep their buffers: a step that looks there need not go through all modules."""
    return [module._buffers for module in model.modules()]


def check_input_dims(module: AnyBatchNorm, x: torch.Tensor) -> None:
    """Refuse what this kind of BatchNorm does not take; its forward, which ours stands for, asks this first."""
    module._check_input_dim(x)  # type: ignore[no-untyped-call]


# Where an optimizer keeps its hooks around `step`. Owners do not call them, so an optimizer that has some is refused;
# under another name they would be called for every chunk.
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def be_worker(number: int, count: int, seed: int, dataset: Any) -> None:
    """Have `torch.utils.data.get_worker_info` say that this process is one of a dataset's workers."""
    from torch.utils.data._utils import worker

    worker._worker_info = worker.WorkerInfo(id=number, num_workers=count, seed=seed, dataset=dataset)


def mark_stepped(optimizer: Optimizer) -> None:
    """Tell schedulers that an update was made: by owners, here. Where the mark has another name, schedulers warn."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def times_changed(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place: what autograd compares before it uses what it kept."""
    return tensor._version


def can_pack() -> bool:
    """Whether this torch has oneDNN and its packed products; torch's own do the same where it does not."""
    import torch

    there = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return there and all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))


def gloo_group(store: Any, rank: int, count: int, timeout: timedelta, address: str | None) -> Any:
    """Ranks that exchange what lies in main memory. `address`: of this machine, at which others reach it, which can be
    given by no public name; None: whatever Gloo finds."""
    from torch import distributed

    gloo: Any = distributed.ProcessGroupGloo
    if address is None:
        return gloo(store, rank, count, timeout)
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout, options._threads = timeout, 2
    return gloo(store, rank, count, options)


def nccl_group(store: Any, rank: int, count: int, timeout: timedelta) -> Any:
    """Ranks that exchange what lies on GPUs: only there where torch was built for them. To give them a time limit has
    no public name."""
    from torch import distributed

    nccl: Any = distributed.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    return nccl(store, rank, count, options)


def leave_unrecorded(backend: str) -> None:
    """Have torch's flight recorder (2.15 and later) pass over groups of this backend, as over those that record
    themselves: it asks a group for its name in C++, which a group in Python cannot answer. Before, there is none."""
    from torch.distributed import distributed_c10d

    recording: set[str] = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recording.add(backend)


def after_backward(act: Callable[[], None]) -> None:
    """Have `act` called at the end of the backward that is running; DDP does it so. There is no public name for it."""
    import torch

    torch.autograd.Variable._execution_engine.queue_callback(act)


def _words(versions: tuple[tuple[int, int], tuple[int, int]]) -> str:
    (old, older), (new, newer) = versions
    return f"{old}.{older} to {new}.{newer}"
