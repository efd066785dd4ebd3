"""What operators do with dims: one rule a family of ATen operators, used to name dims and to cut along them.

A rule joins the dims that are the same, and says which dims of the operands must be whole, and over which the operator
adds up. Of an operator with no rule, or in a form that its rule does not know, all operands must be whole: it is
computed on every device alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from paceline.graph.operators import given, name_of
from paceline.split.layout.atoms import Atom, Dim, Dims, join, leaves, regroup, size
from paceline.split.layout.graph_dims import GraphDims, Op, Rule
from paceline.torch_private import COPY, RESHAPE

# ── elementwise ──────────────────────────────────────────────────────────────────────────────────────────────


def pointwise(t: GraphDims, node: fx.Node) -> Op | None:
    """Element by element: dims that meet are the same."""
    out: Dims = t.fresh(t.value(node))
    return Op(out) if isinstance(out, list) and _meet(t, out, node.all_input_nodes) else None


def _meet(t: GraphDims, out: Dims, operands: Sequence[fx.Node]) -> bool:
    """Joins the dims of operands with those of a result, from the last on; a dim of one element meets any."""
    for operand in operands:
        for dim, own in zip(reversed(out), reversed(t.of(operand)), strict=False):
            if size(own) != 1 and not join(dim, own):
                return False
    return True


def broadcast(t: GraphDims, node: fx.Node) -> Op | None:
    """Several tensors in one shape: dims that meet are the same."""
    out = t.fresh(t.value(node))
    operands = node.all_input_nodes
    whole = [dim for operand in operands for dim in t.of(operand)]
    return Op(out, whole=whole) if len(out) == len(operands) else None


def expand(t: GraphDims, node: fx.Node) -> Op | None:
    """Dims of one element become longer, others are the same."""
    op = pointwise(t, node)
    if op is not None:
        op.kind = "sizes"
    return op


def made(t: GraphDims, node: fx.Node) -> Op | None:
    """What is made anew has nothing of its operands but the type."""
    return Op(t.fresh(t.value(node)), whole=[dim for operand in node.all_input_nodes for dim in t.of(operand)])


def dropout(t: GraphDims, node: fx.Node) -> Op | None:
    """Dropout is pointwise, but its mask is that of the whole tensor."""
    op = pointwise(t, node)
    if op is not None and given(node)["train"] and given(node)["p"]:
        op.kind = "dropout"
    return op


# ── norms ────────────────────────────────────────────────────────────────────────────────────────────────────


def normalized(t: GraphDims, node: fx.Node) -> Op | None:
    """LayerNorm works over the last dims; one that is distributed may have them in parts."""
    a = given(node)
    out = [list(dim) for dim in t.of(a["input"])]
    count = len(a["normalized_shape"])
    for name in ("weight", "bias"):
        own = t.of(a.get(name))
        if own and not all(map(join, own, out[-count:])):
            return None
        t.note(own, "normalized")
    if count > 1 or "bias" not in a:
        return Op(out, whole=out[-count:])
    return Op(out, kind="layer norm")


def per_channel(t: GraphDims, node: fx.Node) -> Op | None:
    """BatchNorm treats every channel by itself."""
    a = given(node)
    out = [list(dim) for dim in t.of(a["input"])]
    of_channels = [t.of(a[name]) for name in ("weight", "bias", "running_mean", "running_var")]
    if not all(join(own[0], out[1]) for own in of_channels if own):
        return None
    return Op(out, whole=[out[0], *out[2:]] if a["training"] else [], kind="batch norm")  # of these are statistics


# ── products ─────────────────────────────────────────────────────────────────────────────────────────────────


def linear(t: GraphDims, node: fx.Node) -> Op | None:
    """The input dim is summed over, the weight's outputs take its place."""
    a = given(node)
    x, weight, bias = (t.of(a[name]) for name in ("input", "weight", "bias"))
    if not x or len(weight) != 2 or not join(weight[1], x[-1]) or (bias and not join(bias[0], weight[0])):
        return None
    t.note(weight[:1], "given")
    t.note(weight[1:], "taken")
    return Op([*x[:-1], weight[0]], summed=[x[-1]], late=frozenset({"bias"}), kind="linear")


def added_product(t: GraphDims, node: fx.Node) -> Op | None:
    """A product of matrices, and something that is added to it: a bias."""
    a = given(node)
    bias, x, y = (t.of(a[name]) for name in ("self", "mat1", "mat2"))
    if a["beta"] != 1 or a["alpha"] != 1 or not join(x[1], y[0]) or (bias and not join(bias[-1], y[1])):
        return None
    if len(bias) > 1 and not (size(bias[0]) == 1 or join(bias[0], x[0])):
        return None
    t.note(y[1:], "given")
    t.note(y[:1], "taken")
    return Op([x[0], y[1]], summed=[x[1]], late=frozenset({"self"}), kind="added product")


def product(t: GraphDims, node: fx.Node) -> Op | None:
    """The inner dim is summed over, leading dims are the same."""
    a, b = (t.of(operand) for operand in node.args[:2])
    if len(a) < 2 or len(b) < 2 or not join(a[-1], b[-2]):
        return None
    out: Dims = t.fresh(t.value(node))
    for operand in (a, b):
        for dim, own in zip(reversed(out[:-2]), reversed(operand[:-2]), strict=False):
            if size(own) != 1 and not join(dim, own):
                return None
    if len(b) == 2:
        t.note(b[1:], "given")
        t.note(b[:1], "taken")
    elif len(a) == len(b) > 3:
        t.note(b[-3:-2], "heads")
    elif len(a) == len(b) == len(leaves(b[0])) + 1:  # batch and heads in one
        t.note([leaves(b[0])[1:]], "heads")
    return Op([*out[:-2], a[-2], b[-1]], summed=[a[-1]])


def einsum(t: GraphDims, node: fx.Node) -> Op | None:
    """Dims of one letter are the same; those that are missing in the result are summed over."""
    equation, operands = node.args[:2]
    takes, arrow, gives = str(equation).replace(" ", "").partition("->")
    if not arrow or "." in takes:
        return None
    of: dict[str, Dim] = {}
    for letters, operand in zip(takes.split(","), operands, strict=True):  # type: ignore[arg-type]
        if len(set(letters)) < len(letters):
            return None
        for letter, dim in zip(letters, t.of(operand), strict=True):
            if not join(of.setdefault(letter, dim), dim):
                return None
    return Op([of[letter] for letter in gives], summed=[dim for letter, dim in of.items() if letter not in gives])


def convolution(t: GraphDims, node: fx.Node) -> Op | None:
    """Channels are as in a linear layer, or each by itself; what is looked at around a pixel is whole."""
    a = given(node)
    x, weight, bias = (t.of(a[name]) for name in ("input", "weight", "bias"))
    if len(x) != len(weight) or (bias and not join(bias[0], weight[0])):  # images in batches
        return None
    out: Dims = [x[0], weight[0], *t.fresh(t.value(node))[2:]]
    whole = [*x[2:], *weight[2:]]
    t.note(weight[:1], "channels given")
    t.note(weight[2:], "kernel")
    if a["groups"] == 1:
        t.note(weight[1:2], "channels taken")
        if join(weight[1], x[1]):
            return Op(out, whole=whole, summed=[x[1]], late=frozenset({"bias"}), kind="conv")
    elif a["groups"] == size(x[1]) == size(weight[0]) and join(weight[0], x[1]):
        return Op(out, whole=whole, kind="conv")
    return None


def embedding(t: GraphDims, node: fx.Node) -> Op | None:
    """Rows are picked: who has a row gives it, so the table's rows are summed over."""
    a = given(node)
    weight = t.of(a["weight"])
    counted = "positions" if size(weight[0]) >= (t.shape(a["indices"]) or (1,))[-1] else "kinds"
    t.note(weight[:1], "rows" if _from_inputs(t, a["indices"]) else counted)
    t.note(weight[1:], "table")
    if a["scale_grad_by_freq"] or a["sparse"]:
        return None
    return Op([*t.of(a["indices"]), weight[1]], summed=[weight[0]], kind="embedding")


def _from_inputs(t: GraphDims, node: fx.Node) -> bool:
    """Returns whether a value comes from what the computation was given, and not from counting."""
    todo, seen = [node], {node}
    while todo:
        here = todo.pop()
        if here in t.call.inputs:
            return True
        if here.op == "call_function" and name_of(here).removeprefix("new_").partition("_")[0] in _CONSTANTS:
            continue
        todo += [source for source in here.all_input_nodes if source not in seen]
        seen.update(here.all_input_nodes)
    return False


def attention(t: GraphDims, node: fx.Node) -> Op | None:
    """Heads are each by themselves; a head is whole, and so are the keys that it looks at."""
    a = given(node)
    q, k, v = (t.of(a[name]) for name in ("query", "key", "value"))
    if not len(q) == len(k) == len(v) >= 3:
        return None
    heads = len(q) - 3
    for number, (dim, *others) in enumerate(zip(q[:-2], k[:-2], v[:-2], strict=True)):
        for other in others:
            grouped = number == heads and a["enable_gqa"]
            if not join(dim, [*other, Atom(size(dim) // size(other))] if grouped else other):
                return None
    join(k[-2], v[-2])
    mask = t.of(a["attn_mask"])
    for dim, own in zip(reversed([*q[:-1], k[-2]]), reversed(mask), strict=False):
        if size(own) != 1 and not join(dim, own):
            return None
    if len(q) > 3:
        t.note(k[-3:-2], "heads")
        t.note([q[-1], v[-1]], "width")
    whole = [*q[-2:], *k[-2:], *v[-2:]]
    return Op([*q[:-1], v[-1]], whole=whole, kind="attention" if a["dropout_p"] else "")


def cross_entropy(t: GraphDims, node: fx.Node) -> Op | None:
    """Of classes that are in parts every device finds its summands; rows are whole."""
    a = given(node)
    x = t.of(a["self"])
    target = t.value(a["target"])
    if len(x) == 3 or len(leaves(x[0])) > 1:  # of every place in every sample
        t.note(x[1:2], "words")
    simple = len(x) == 2 and target.dim() == 1 and a["weight"] is None and not a["label_smoothing"]
    if not simple:
        return None
    return Op(t.fresh(t.value(node)), whole=[x[0], *t.of(a["target"])], kind="cross entropy")


# ── shapes ───────────────────────────────────────────────────────────────────────────────────────────────────


def reshape(t: GraphDims, node: fx.Node) -> Op | None:
    """The same atoms in other groups."""
    dims = regroup(t.of(node.args[0]), t.shape(node))
    return None if dims is None else Op(dims, kind="reshape")


def permute(t: GraphDims, node: fx.Node) -> Op | None:
    """The same dims in another order."""
    x = t.of(node.args[0])
    rank = len(x)
    a = given(node)
    order = list(range(rank))
    if "dim0" in a:
        one, other = a["dim0"] % rank, a["dim1"] % rank
        order[one], order[other] = order[other], order[one]
    elif "dims" in a:
        order = [dim % rank for dim in a["dims"]]
    else:  # t, mT, numpy_T
        order = order[::-1] if rank <= 2 or "numpy" in str(node.target) else [*order[:-2], *order[:-3:-1]]
    return Op([x[i] for i in order])


def unsqueeze(t: GraphDims, node: fx.Node) -> Op | None:
    """A dim of 1 comes in between."""
    x = list(t.of(node.args[0]))
    at = given(node)["dim"] % (len(x) + 1)
    return Op([*x[:at], [Atom(1)], *x[at:]])


def squeeze(t: GraphDims, node: fx.Node) -> Op | None:
    """Dims of 1 go away."""
    x = t.of(node.args[0])
    asked = given(node).get("dim")
    which = range(len(x)) if asked is None else asked if isinstance(asked, (tuple, list)) else [asked]
    gone = {at % len(x) for at in which if size(x[at]) == 1} if x else set()
    return Op([dim for at, dim in enumerate(x) if at not in gone], kind="reshape")  # a part of 1 is no dim of 1


def reduction(t: GraphDims, node: fx.Node) -> Op | None:
    """A sum goes over dims that may be in parts, a mean too; others are the same."""
    x = t.of(node.args[0])
    rank = len(x)
    asked = given(node).get("dim")
    which = set(range(rank)) if asked is None or asked == [] else {
        at % rank for at in (asked if isinstance(asked, (tuple, list)) else [asked])
    }  # fmt: skip
    keeps = len(t.shape(node)) == rank
    out = [[Atom(1)] if at in which else x[at] for at in range(rank) if keeps or at not in which]
    over = [x[at] for at in which]
    name = name_of(node)
    if name == "sum":
        return Op(out, summed=over)
    return Op(out, summed=over, kind="mean") if name == "mean" else Op(out, whole=over)


def along_one(t: GraphDims, node: fx.Node) -> Op | None:
    """softmax and the like need one dim whole, the others pass."""
    x = t.of(node.args[0])
    asked = given(node).get("dim")
    if not isinstance(asked, int) or len(x) != len(t.shape(node)):
        return None
    return Op(list(x), whole=[x[asked]])


def spatial(t: GraphDims, node: fx.Node) -> Op | None:
    """Pooling and upsampling let batch and channels pass and need the rest whole."""
    x, value = t.of(node.args[0]), t.value(node)
    if not isinstance(value, torch.Tensor) or len(x) != value.dim() or len(x) < 3:
        return None
    if tuple(value.shape[:2]) != t.shape(node.args[0])[:2]:  # type: ignore[arg-type]
        return None
    return Op([x[0], x[1], *t.fresh(value)[2:]], whole=x[2:])


def padding(t: GraphDims, node: fx.Node) -> Op | None:
    """Dims that are padded must be whole, others pass."""
    x, amounts = t.of(node.args[0]), given(node)["pad"]
    padded = {len(x) - 1 - at // 2 for at, amount in enumerate(amounts) if amount}
    fresh = t.fresh(t.value(node))
    return Op([fresh[at] if at in padded else dim for at, dim in enumerate(x)], whole=[x[at] for at in sorted(padded)])


def pieces(t: GraphDims, node: fx.Node) -> Op | None:
    """`chunk` and `split` into equal pieces take the outer factor of the dim apart."""
    values, x = t.value(node), t.of(node.args[0])
    at = given(node)["dim"] % len(x)
    if len({tuple(value.shape) for value in values}) != 1:
        fresh = t.fresh(values)
        return Op(tuple([*x[:at], own[at], *x[at + 1 :]] for own in fresh), whole=[x[at]])
    outer = [Atom(len(values)), Atom(values[0].shape[at])]
    if not join(x[at], outer):
        return None
    t.note([[outer[0]]], "parts")
    part = [*x[:at], [outer[1]], *x[at + 1 :]]
    return Op(tuple(part for _ in values), whole=[[outer[0]]], kind="pieces")


def unbind(t: GraphDims, node: fx.Node) -> Op | None:
    """A dim goes away, and there are as many tensors as it had elements."""
    x = t.of(node.args[0])
    at = given(node)["dim"] % len(x)
    part = [*x[:at], *x[at + 1 :]]
    t.note([x[at]], "parts")
    return Op(tuple(part for _ in t.value(node)), whole=[x[at]])


def item(t: GraphDims, node: fx.Node) -> Op | None:
    """One of several results."""
    source, index = node.args[:2]
    dims = t.dims.get(source)  # type: ignore[arg-type]
    return Op(dims[index]) if isinstance(dims, tuple) and isinstance(index, int) else None


def part(t: GraphDims, node: fx.Node) -> Op | None:
    """What is sliced, or picked out, must be whole; the other dims pass."""
    a, x = given(node), t.of(node.args[0])
    at = a["dim"] % len(x)
    if "index" in a and isinstance(a["index"], int):
        return Op([*x[:at], *x[at + 1 :]], whole=[x[at]])
    if t.shape(node) == t.shape(node.args[0]):  # type: ignore[arg-type]
        return Op(list(x), kind="reshape")
    return Op([*x[:at], t.fresh(t.value(node))[at], *x[at + 1 :]], whole=[x[at]])


def concatenation(t: GraphDims, node: fx.Node) -> Op | None:
    """The dim along which tensors are put together is whole, the others are the same."""
    listed: Sequence[fx.Node] = node.args[0]  # type: ignore[assignment]
    operands = [t.of(operand) for operand in listed if t.shape(operand) != (0,)]  # an empty cache is nothing
    out: Dims = t.fresh(t.value(node))
    at = given(node)["dim"] % len(out)
    if len(operands) == 1:
        return Op(list(operands[0]))
    for operand in operands:
        if len(operand) != len(out):
            return None
        for number, (dim, own) in enumerate(zip(out, operand, strict=True)):
            if number != at and not join(dim, own):
                return None
    return Op(out, whole=[operand[at] for operand in operands])


def stack(t: GraphDims, node: fx.Node) -> Op | None:
    """A new dim, the others are the same."""
    out: Dims = t.fresh(t.value(node))
    at = given(node)["dim"] % len(out)
    rest = [*out[:at], *out[at + 1 :]]
    return Op(out) if _meet(t, rest, node.all_input_nodes) else None


# ── which rule ───────────────────────────────────────────────────────────────────────────────────────────────

_CONSTANTS = ("arange", "zeros", "ones", "full", "empty", "eye", "linspace")  # and others like them
_POINTWISE = (
    "abs", "add", "addcdiv", "addcmul", "alias", "atan2", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor",
    "__and__", "__or__", "__xor__", "ceil", "celu", "clamp", "clamp_max", "clamp_min", "clone", "contiguous",
    "copysign", "cos", "cosh", "detach", "div", "elu", "eq", "erf", "erfc", "exp", "exp2", "expm1", "fill", "floor",
    "floor_divide", "fmod", "ge", "gelu", "gt", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "isfinite",
    "isinf", "isnan", "le", "leaky_relu", "lerp", "lift_fresh", "lift_fresh_copy", "log", "log10", "log1p", "log2",
    "log_sigmoid", "logical_and", "logical_not", "logical_or", "logical_xor", "logit", "lt", "masked_fill",
    "maximum", "minimum", "mish", "mul", "nan_to_num", "ne", "neg", "ones_like", "pow", "reciprocal", "relu",
    "relu6", "remainder", "round", "rsqrt", "rsub", "selu", "sigmoid", "sign", "silu", "sin", "sinh", "softplus",
    "softshrink", "softsign", "sqrt", "square", "sub", "tan", "tanh", "threshold", "to", "type_as",
    "where", "xlogy", "zeros_like", "full_like", "empty_like",
)  # fmt: skip
_POOLS = (
    "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_nearest3d",
)  # fmt: skip
RULES: dict[str, Rule] = {
    **dict.fromkeys((*_POINTWISE, COPY), pointwise),
    **dict.fromkeys(_POOLS, spatial),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty"), made),
    **dict.fromkeys(("matmul", "bmm", "mm"), product),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), convolution),
    **dict.fromkeys(("layer_norm", "rms_norm"), normalized),
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", RESHAPE), reshape),
    **dict.fromkeys(("transpose", "permute", "t", "numpy_T", "mT"), permute),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "var", "std", "any", "all", "logsumexp", "prod"), reduction),
    **dict.fromkeys(("softmax", "log_softmax", "cumsum", "flip"), along_one),
    **dict.fromkeys(("chunk", "split", "split_with_sizes"), pieces),
    **dict.fromkeys(("slice", "select", "narrow"), part),
    **dict.fromkeys(("pad", "constant_pad_nd"), padding),
    "expand": expand, "broadcast_tensors": broadcast, "dropout": dropout, "batch_norm": per_channel, "linear": linear,
    "addmm": added_product, "einsum": einsum, "embedding": embedding, "scaled_dot_product_attention": attention,
    "cross_entropy_loss": cross_entropy, "unsqueeze": unsqueeze, "squeeze": squeeze, "unbind": unbind,
    "getitem": item, "cat": concatenation, "stack": stack,
}  # fmt: skip
