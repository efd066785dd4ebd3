"""What operators do with dims: one rule a kind of operator, used to name dims and to cut along them.

A rule joins the dims that are the same, and says which dims of the operands must be whole, and over which the operator
adds up. Of an operator with no rule all operands must be whole: it is computed on every device alike.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from paceline.split.layout.atoms import Atom, Dims, join, regroup, size
from paceline.split.layout.graph_dims import GraphDims, Op, Rule

# ── elementwise ──────────────────────────────────────────────────────────────────────────────────────────────


def pointwise(t: GraphDims, node: fx.Node) -> Op | None:
    """Element by element: dims that meet are the same."""
    out: Dims = t.fresh(t.values[node.name])
    for operand in node.all_input_nodes:
        value = t.values[operand.name]
        if not isinstance(value, torch.Tensor):
            continue
        for dim, own in zip(reversed(out), reversed(t.of(operand)), strict=False):
            if size(own) != 1 and not join(dim, own):
                return None
    return Op(out)


def normalized(t: GraphDims, node: fx.Node) -> Op | None:
    """LayerNorm works over the last dims; one that is distributed may have them in parts."""
    module = t.module(node)
    out = [list(dim) for dim in t.of(node.args[0])]
    count = len(module.normalized_shape)  # type: ignore[arg-type]
    parameters = {name: dims for name in ("weight", "bias") if (dims := t.own(node, name))}
    if not all(join(a, b) for dims in parameters.values() for a, b in zip(dims, out[-count:], strict=True)):
        return None
    if count > 1 or not isinstance(module, nn.LayerNorm):
        return Op(out, whole=out[-count:], parameters=parameters)
    return Op(out, parameters=parameters, kind="layer norm")


def dropout(t: GraphDims, node: fx.Node) -> Op | None:
    """Dropout is pointwise, but its mask is that of the whole tensor."""
    op = pointwise(t, node)
    if op is not None:
        op.kind = "dropout"
    return op


def per_channel(t: GraphDims, node: fx.Node) -> Op | None:
    """BatchNorm treats every channel by itself."""
    out = [list(dim) for dim in t.of(node.args[0])]
    names = ("weight", "bias", "running_mean", "running_var")
    parameters = {name: dims for name in names if (dims := t.own(node, name))}
    return Op(out, parameters=parameters) if all(join(dims[0], out[1]) for dims in parameters.values()) else None


LATE = frozenset({"bias"})

# ── products ─────────────────────────────────────────────────────────────────────────────────────────────────


def linear(t: GraphDims, node: fx.Node) -> Op | None:
    """The input dim is summed over, the weight's outputs take its place."""
    weight = t.own(node, "weight")
    x = t.of(node.args[0])
    if weight is None or not x or not join(weight[1], x[-1]):
        return None
    parameters = _with_bias(t, node, weight)
    return Op([*x[:-1], weight[0]], summed=[x[-1]], parameters=parameters, late=LATE, kind="linear")


def _with_bias(t: GraphDims, node: fx.Node, weight: Dims, name: str = "") -> dict[str, Dims]:
    """Returns the dims of a weight, and of its bias if it has one: an element for each of the weight's outputs."""
    parameters = {f"{name}weight": weight}
    if bias := t.own(node, f"{name}bias"):
        parameters[f"{name}bias"] = bias
        join(bias[0], weight[0])
    return parameters


def convolution(t: GraphDims, node: fx.Node) -> Op | None:
    """Channels are as in a linear layer, or each by itself; what is looked at around a pixel is whole."""
    module: Any = t.module(node)
    weight, x, value = t.own(node, "weight"), t.of(node.args[0]), t.values[node.name]
    if weight is None or len(x) != len(weight):  # images in batches
        return None
    parameters = _with_bias(t, node, weight)
    out: Dims = [x[0], weight[0], *t.fresh(value)[2:]]
    whole = [*x[2:], *weight[2:]]
    if module.groups == 1:
        if not join(weight[1], x[1]):
            return None
        return Op(out, whole=whole, summed=[x[1]], parameters=parameters, late=LATE, kind="conv")
    if module.groups == module.in_channels == module.out_channels:
        if not join(weight[0], x[1]):
            return None
        return Op(out, whole=whole, parameters=parameters, kind="conv")
    return None


def embedding(t: GraphDims, node: fx.Node) -> Op | None:
    """Rows are picked: who has a row gives it, so the table's rows are summed over."""
    weight = t.own(node, "weight")
    if weight is None:
        return None
    return Op([*t.of(node.args[0]), weight[1]], summed=[weight[0]], parameters={"weight": weight}, kind="embedding")


def matmul(t: GraphDims, node: fx.Node) -> Op | None:
    """The inner dim is summed over, leading dims are the same."""
    a, b = (t.of(argument) for argument in node.args[:2])
    if len(a) < 2 or len(b) < 2 or not join(a[-1], b[-2]):
        return None
    out: Dims = t.fresh(t.values[node.name])
    for operand in (a, b):
        for dim, own in zip(reversed(out[:-2]), reversed(operand[:-2]), strict=False):
            if size(own) != 1 and not join(dim, own):
                return None
    return Op([*out[:-2], a[-2], b[-1]], summed=[a[-1]])


def attention(t: GraphDims, node: fx.Node) -> Op | None:
    """scaled_dot_product_attention may be cut along any leading dim, such as heads."""
    q, k, v = (t.of(argument) for argument in node.args[:3])
    if not (len(q) == len(k) == len(v) >= 3):
        return None
    for a, b, c in zip(q[:-2], k[:-2], v[:-2], strict=True):
        if not (join(a, b) and join(a, c)):
            return None
    whole = [q[-1], k[-1], k[-2], v[-2], q[-2]]
    mask = _given(node, 3, "attn_mask")
    if isinstance(mask, fx.Node):
        whole += t.of(mask)
    if _given(node, 4, "dropout_p"):  # masks are drawn for all heads together
        return None
    return Op([*q[:-2], q[-2], v[-1]], whole=whole)


def heads(t: GraphDims, node: fx.Node) -> Op | None:
    """nn.MultiheadAttention is cut by heads."""
    module: Any = t.module(node)
    q, k, v = (t.of(argument) for argument in (*node.args, *node.kwargs.values())[:3])
    inner, weights = t.own(node, "in_proj_weight"), t.values[node.name][1]
    plain = (
        module.bias_k is None
        and not module.add_zero_attn
        and weights is None
        and not (module.dropout and module.training)
    )
    if inner is None or len(node.args) < 3 or len(q) != 3 or not plain:
        return None
    joined = Atom(3), Atom(module.num_heads), Atom(module.head_dim)
    if not join(inner[0], joined):
        return None
    outer = t.own(node, "out_proj.weight")
    assert outer is not None
    if not (join(outer[1], joined[1:]) and join(outer[0], q[2]) and all(join(inner[1], x[2]) for x in (q, k, v))):
        return None
    parameters = _with_bias(t, node, inner, "in_proj_") | _with_bias(t, node, outer, "out_proj.")
    whole = [dim for x in (q, k, v) for dim in x[:2]] + [q[2]]
    return Op(
        ([q[0], q[1], outer[0]], None),
        whole=whole,
        summed=[[joined[1]]],
        parameters=parameters,
        late=frozenset({"out_proj.bias"}),
        kind="heads",
    )


# ── shapes ───────────────────────────────────────────────────────────────────────────────────────────────────


def reshape(t: GraphDims, node: fx.Node) -> Op | None:
    """The same atoms in other groups."""
    dims = regroup(t.of(node.args[0]), t.shape(node))
    return None if dims is None else Op(dims, kind="reshape")


def permute(t: GraphDims, node: fx.Node) -> Op | None:
    """The same dims in another order."""
    x, rank = t.of(node.args[0]), len(t.shape(node))
    if len(x) != rank:
        return None
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    arguments = [*node.args[1:], *node.kwargs.values()]
    if name in ("transpose", "swapaxes", "swapdims"):
        a, b = (int(i) % rank for i in arguments)  # type: ignore[arg-type]
        order = list(range(rank))
        order[a], order[b] = b, a
    elif name in ("t", "mT"):
        order = [*range(rank - 2), rank - 1, rank - 2]
    else:
        given = arguments[0] if len(arguments) == 1 and isinstance(arguments[0], (tuple, list)) else arguments
        order = [int(i) % rank for i in given]  # type: ignore[arg-type]
    return Op([x[i] for i in order])


def unsqueeze(t: GraphDims, node: fx.Node) -> Op | None:
    """A dim of 1 comes in between."""
    x = list(t.of(node.args[0]))
    at = int((*node.args, *node.kwargs.values())[1]) % (len(x) + 1)  # type: ignore[arg-type]
    return Op([*x[:at], [Atom(1)], *x[at:]])


def reduction(t: GraphDims, node: fx.Node) -> Op | None:
    """`sum` and `mean` go over dims that are whole."""
    x, rank = t.of(node.args[0]), len(t.of(node.args[0]))
    given = _given(node, 1, "dim")
    if given is None:
        return None
    which = {int(i) % rank for i in (given if isinstance(given, (tuple, list)) else [given])}
    keeps = len(t.shape(node)) == rank
    out = [[Atom(1)] if i in which else x[i] for i in range(rank) if keeps or i not in which]
    return Op(out, whole=[x[i] for i in which])


def along_one(t: GraphDims, node: fx.Node) -> Op | None:
    """softmax and the like need one dim whole, the others pass."""
    x = t.of(node.args[0])
    given = t.module(node).dim if node.op == "call_module" else _given(node, 1, "dim")
    if not isinstance(given, int) or len(x) != len(t.shape(node)):
        return None
    return Op(list(x), whole=[x[given]])


def spatial(t: GraphDims, node: fx.Node) -> Op | None:
    """Pooling, padding of images and upsampling let batch and channels pass and need the rest whole."""
    x, value = t.of(node.args[0]), t.values[node.name]
    if not isinstance(value, torch.Tensor) or len(x) != value.dim() or len(x) < 3:
        return None
    if tuple(value.shape[:2]) != t.shape(node.args[0])[:2]:  # type: ignore[arg-type]
        return None
    return Op([x[0], x[1], *t.fresh(value)[2:]], whole=x[2:])


def pieces(t: GraphDims, node: fx.Node) -> Op | None:
    """`chunk` and `split` into equal pieces take the outer factor of the dim apart."""
    values, x = t.values[node.name], t.of(node.args[0])
    at = _given(node, 2, "dim", 0) % len(x)
    sizes = {tuple(value.shape) for value in values}
    if len(sizes) != 1:
        return None
    inner = values[0].shape[at]
    outer = [Atom(len(values)), Atom(inner)]
    if not join(x[at], outer):
        return None
    part = [*x[:at], [outer[1]], *x[at + 1 :]]
    return Op(tuple(part for _ in values), whole=[[outer[0]]], kind="pieces")


def item(t: GraphDims, node: fx.Node) -> Op | None:
    """One of several results, or a part of a tensor by slices."""
    source, index = node.args[:2]
    dims = t.dims.get(source) if isinstance(source, fx.Node) else None
    if isinstance(dims, tuple) and isinstance(index, int):
        return Op(dims[index])
    if not isinstance(dims, list):
        return None
    # Of a tensor: what is sliced, or picked out, must be whole; what is not, passes.
    given: Sequence[Any] = index if isinstance(index, tuple) else (index,)
    out, whole, at = [], [], 0
    sizes = list(t.shape(node))
    for entry in given:
        if entry is None:
            out.append([Atom(1)])
        elif entry == slice(None):
            out.append(dims[at])
            at += 1
        elif isinstance(entry, (int, slice)):
            whole.append(dims[at])
            if isinstance(entry, slice):
                out.append([Atom(sizes[len(out)])])
            at += 1
        else:
            return None
    return Op([*out, *dims[at:]], whole=whole)


def concatenation(t: GraphDims, node: fx.Node) -> Op | None:
    """The dim along which tensors are put together is whole, the others are the same."""
    operands = [t.of(operand) for operand in node.args[0]]  # type: ignore[union-attr]
    out: Dims = t.fresh(t.values[node.name])
    at = _given(node, 1, "dim", 0) % len(out)
    for operand in operands:
        for number, (dim, own) in enumerate(zip(out, operand, strict=True)):
            if number != at and not join(dim, own):
                return None
    return Op(out, whole=[operand[at] for operand in operands])


def _given(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """Returns an argument that may be given by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


# ── which rule ───────────────────────────────────────────────────────────────────────────────────────────────

_POINTWISE_MODULES: tuple[type[nn.Module], ...] = (
    nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Mish, nn.Hardtanh, nn.ReLU6, nn.SELU,
    nn.CELU, nn.Softplus, nn.Hardswish, nn.Hardsigmoid, nn.Softsign, nn.LogSigmoid, nn.Identity,
)  # fmt: skip
_POOLS: tuple[type[nn.Module], ...] = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.Upsample, nn.ZeroPad2d,
)  # fmt: skip
MODULES: tuple[tuple[tuple[type[nn.Module], ...], Rule], ...] = (
    ((nn.Linear,), linear),
    ((nn.Conv1d, nn.Conv2d, nn.Conv3d), convolution),
    ((nn.Embedding,), embedding),
    ((nn.MultiheadAttention,), heads),
    ((nn.LayerNorm, nn.RMSNorm), normalized),
    ((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), per_channel),
    ((nn.Dropout,), dropout),
    ((nn.Softmax, nn.LogSoftmax), along_one),
    ((nn.Flatten, nn.Unflatten), reshape),
    (_POINTWISE_MODULES, pointwise),
    (_POOLS, spatial),
)

FUNCTIONS: dict[Any, Rule] = {
    **dict.fromkeys(
        (
            operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.pow, operator.iadd,
            operator.isub, operator.imul, torch.add, torch.sub, torch.mul, torch.div, torch.relu, torch.tanh,
            torch.sigmoid, torch.exp, torch.sqrt, torch.rsqrt, torch.abs, torch.clamp, torch.where, torch.square,
            torch.maximum, torch.minimum, F.relu, F.gelu, F.silu, F.tanh, F.sigmoid, F.elu, F.leaky_relu, F.softplus,
            F.mish, F.hardswish, F.relu6,
        ),
        pointwise,
    ),
    F.dropout: dropout,
    **dict.fromkeys((torch.matmul, torch.bmm, operator.matmul), matmul),
    F.scaled_dot_product_attention: attention,
    **dict.fromkeys((torch.reshape, torch.flatten), reshape),
    **dict.fromkeys((torch.transpose, torch.permute, torch.t), permute),
    torch.unsqueeze: unsqueeze,
    **dict.fromkeys((torch.sum, torch.mean), reduction),
    **dict.fromkeys((torch.softmax, F.softmax, F.log_softmax, torch.log_softmax), along_one),
    **dict.fromkeys(
        (F.max_pool2d, F.avg_pool2d, F.max_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool1d, F.interpolate), spatial
    ),
    **dict.fromkeys((torch.chunk, torch.split), pieces),
    operator.getitem: item,
    **dict.fromkeys((torch.cat, torch.concat), concatenation),
}  # fmt: skip

METHODS: dict[str, Rule] = {
    **dict.fromkeys(
        (
            "add", "sub", "mul", "div", "relu", "tanh", "sigmoid", "exp", "sqrt", "rsqrt", "clamp", "contiguous",
            "clone", "float", "to", "type_as", "neg", "pow", "abs", "add_", "mul_", "relu_", "masked_fill", "square",
        ),
        pointwise,
    ),
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten"), reshape),
    **dict.fromkeys(("transpose", "permute", "swapaxes", "swapdims", "t"), permute),
    "unsqueeze": unsqueeze,
    **dict.fromkeys(("sum", "mean"), reduction),
    **dict.fromkeys(("softmax", "log_softmax"), along_one),
    **dict.fromkeys(("matmul", "bmm"), matmul),
    **dict.fromkeys(("chunk", "split"), pieces),
}  # fmt: skip


def rule_of(model: nn.Module, node: fx.Node) -> Rule | None:
    """Returns the rule for a node of the model's graph; None if there is none."""
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        return next((rule for kinds, rule in MODULES if isinstance(module, kinds)), None)
    if node.op == "call_method":
        return METHODS.get(str(node.target))
    return FUNCTIONS.get(node.target)
