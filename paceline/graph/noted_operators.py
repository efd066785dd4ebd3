"""What a computation comes to, as a list of operators, forward and backward: seen without computing any of them.

It is run on tensors that have a shape and no values, and every operator that torch would carry out is noted, below
autograd: which one, with which numbers, on which results of others. Two lists that are the same have the same results,
to the last bit, on any batch. So a graph that has the list of the function it was captured from is right, which takes a
fraction of a second to see, however large model and batch are; and a list says which graph is looked for among those of
earlier runs. Lists that differ prove nothing, nor does what cannot be followed without values: then values have to tell
(`proof.py`).

Operators that nobody needs the results of are left out: a graph has lost those.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.graph.operators import changes_unsaid
from paceline.torch_private import QuickDispatchMode, empty_tensor, plain_function, schema_of, tree_leaves, tree_map

MOST_BYTES = 256 << 20  # of a tensor that is none of the model's, whose values are looked at
_DEVICE = "prim::device"
_NEW_CONSTANT = ("aten::lift_fresh", "aten::lift_fresh_copy")  # `torch.tensor(…)`, as it is called and in a graph
_THE_SAME = ("aten::detach", "aten::alias")  # below autograd
_CPU, _META = torch.device("cpu"), torch.device("meta")


# What operators give, as shapes, strides and types, by all that this depends on. A model has many alike.
Known = dict[Any, list[tuple[torch.Size, tuple[int, ...], torch.dtype]]]


class CannotFollow(Exception):
    """Something for which values would be needed."""


@dataclass(frozen=True)
class _Call:
    """One operator that was to be carried out. Tensors go by names here."""

    operator: str
    arguments: Any
    takes: list[Any]
    gives: list[Any]
    changes: list[Any]  # whose memory it changes
    has_effect: bool  # beside that


@dataclass(frozen=True)
class NotedOperators:
    """The operators that something follows from, and the tensors that they use and that are not the model's, each once
    and in the order in which they came up: those of another run can stand in their places."""

    operators: list[Any]
    constants: list[torch.Tensor]


def noted_operators(
    model: nn.Module, inputs: list[torch.Tensor], compute: Callable[[], Any], known: Known, *, gradients: bool
) -> NotedOperators:
    """Returns what a computation with this model and these inputs comes to, with all gradients if they are wanted.
    Tensors are left as they were. `known`: what is to be found out once for several of them."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    tensors |= {f"input {number}": tensor for number, tensor in enumerate(inputs)}
    noting = _Noting({id(tensor): name for name, tensor in tensors.items()}, known)
    try:
        with noting, torch.set_grad_enabled(gradients):
            returned = [leaf for leaf in tree_leaves(compute()) if isinstance(leaf, torch.Tensor)]
            found: Iterable[torch.Tensor | None] = ()
            if gradients and returned and returned[0].requires_grad:
                wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
                found = torch.autograd.grad(returned[0].sum(), wanted, allow_unused=True)
        return NotedOperators(noting.needed_for([*returned, *found], set(tensors)), noting.constants)
    except Exception as error:  # whatever it is that does not work without values
        raise CannotFollow from error


class _Shape(torch.Tensor):
    """A tensor without values. It stands for one of torch's own, on the device that has none."""

    without_values: torch.Tensor
    __torch_function__ = plain_function()

    @staticmethod
    def of(inner: torch.Tensor) -> _Shape:
        made: _Shape = empty_tensor(_Shape, inner.shape, inner.stride(), dtype=inner.dtype, device=_CPU)
        made.without_values = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise CannotFollow


class _Noting(QuickDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators that are called inside of it, and carries out none."""

    def __init__(self, named: Mapping[int, str], known: Known) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = known
        self._calls: list[_Call] = []
        self._names: dict[int, Any] = dict(named)  # of tensors, by identity; a number for what an operator gave
        self._memory: dict[Any, Any] = {}  # by name: in whose memory it lies, if not in its own
        self._outer: dict[int, torch.Tensor] = {}  # of what has no values, by identity: the tensor it stands for
        self._inner: dict[int, torch.Tensor] = {}  # of tensors that do have values
        self._alive: list[Any] = []  # identities are those of what lives
        self.constants: list[torch.Tensor] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = schema_of(operator)
        if schema.name == _DEVICE:
            return _CPU
        if schema.name in _THE_SAME:
            same = _Shape.of(self._without_values(args[0]))
            self._names[id(same)] = self._name(args[0])
            self._alive.append(same)
            return same
        takes: list[Any] = []
        arguments = self._described((*args, *sorted(kwargs.items())), takes)
        shared, changes = self._aliased(schema, args, kwargs)
        found = self._carried_out(operator, schema, tree_map(self._without_values, (args, kwargs)), arguments)
        is_constant = schema.name in _NEW_CONSTANT
        if is_constant:
            found = torch.empty_like(found)  # it may be changed, and the one it is made of is not
        several = len(schema.returns) > 1
        returned = tree_map(self._standing_for, found)
        gives: list[Any] = []
        for result, value in zip(schema.returns, returned if several else [returned], strict=True):
            alias = result.alias_info
            memory = next((shared[part] for part in alias.before_set if part in shared), None) if alias else None
            gives += [self._give(leaf, memory) for leaf in tree_leaves(value)]
        name = "constant" if is_constant else str(operator)
        effect = torch.Tag.nondeterministic_seeded in operator.tags or changes_unsaid(schema.name)
        self._calls.append(_Call(name, arguments, takes, gives, changes, effect))
        return returned

    def _carried_out(self, operator: Any, schema: Any, given: Any, arguments: Any) -> Any:
        """Returns what an operator gives for what has no values."""
        args, kwargs = given
        if any(entry.alias_info is not None for entry in (*schema.arguments, *schema.returns)):
            return operator(*args, **kwargs)
        tensors = (leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor))
        key = (operator, str(arguments), *((leaf.shape, leaf.stride(), leaf.dtype) for leaf in tensors))
        if (about := self._known.get(key)) is not None:
            made = [torch.empty_strided(shape, stride, dtype=dtype, device=_META) for shape, stride, dtype in about]
            return made[0] if len(schema.returns) == 1 else tuple(made)
        found = operator(*args, **kwargs)
        leaves = [found] if len(schema.returns) == 1 else list(found)
        if all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            self._known[key] = [(leaf.shape, leaf.stride(), leaf.dtype) for leaf in leaves]
        return found

    def _aliased(self, schema: Any, args: Any, kwargs: Any) -> tuple[dict[str, Any], list[Any]]:
        """Returns in whose memory results may lie, by the schema's names for it, and whose memory is changed."""
        shared: dict[str, Any] = {}
        changes: list[Any] = []
        for number, argument in enumerate(schema.arguments):
            alias = argument.alias_info
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            for tensor in tree_leaves(value) if alias is not None else ():
                if isinstance(tensor, torch.Tensor):
                    name = self._name(tensor)
                    memory = self._memory.get(name, name)
                    shared |= dict.fromkeys(alias.before_set, memory)
                    if alias.is_write:
                        changes.append(memory)
        if any(isinstance(memory, tuple) for memory in changes):
            raise CannotFollow  # it keeps something in a tensor that is none of the model's
        return shared, changes

    # ── tensors ──────────────────────────────────────────────────────────────────────────────────────────

    def _described(self, value: Any, takes: list[Any]) -> Any:
        """Returns a value so that it can be compared, and notes the tensors in it."""
        if isinstance(value, (tuple, list)):
            return [self._described(entry, takes) for entry in value]
        if isinstance(value, torch.Tensor):
            takes.append(self._name(value))
            return ["tensor", len(takes)]
        if isinstance(value, torch.device):
            return "device"
        if isinstance(value, torch.Generator):
            raise CannotFollow
        return (type(value).__name__, repr(value))

    def _name(self, tensor: torch.Tensor) -> Any:
        if (name := self._names.get(id(tensor))) is None:
            name = self._names[id(tensor)] = _constant(tensor)
            self.constants.append(tensor)
        return name

    def _without_values(self, leaf: Any) -> Any:
        if isinstance(leaf, _Shape):
            return leaf.without_values
        if isinstance(leaf, torch.Tensor):
            if (inner := self._inner.get(id(leaf))) is None:
                inner = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=_META)
                self._inner[id(leaf)], self._outer[id(inner)] = inner, leaf
                self._alive.append(leaf)
            return inner
        return _META if isinstance(leaf, torch.device) else leaf

    def _standing_for(self, leaf: Any) -> Any:
        """Returns the tensor that stands for one of torch's without values."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if (outer := self._outer.get(id(leaf))) is None:
            outer = self._outer[id(leaf)] = _Shape.of(leaf)
            self._alive += [leaf, outer]
        if outer.shape != leaf.shape or outer.stride() != leaf.stride():
            raise CannotFollow  # it was given another shape
        return outer

    def _give(self, leaf: Any, memory: Any) -> Any:
        """Returns the name of what an operator has given."""
        if not isinstance(leaf, torch.Tensor):
            return (type(leaf).__name__, repr(leaf))
        if (name := self._names.get(id(leaf))) is None:
            name = self._names[id(leaf)] = len(self._names)
            if memory is not None:
                self._memory[name] = memory
        return name

    # ── what is needed ───────────────────────────────────────────────────────────────────────────────────

    def needed_for(self, results: list[torch.Tensor | None], given: set[str]) -> list[Any]:
        """Returns the operators that these results or changes of what was given follow from, and the results."""
        names = [None if result is None else self._name(result) for result in results]
        needed = set(names)
        memory: set[Any] = given | {self._memory.get(name, name) for name in names}
        calls: list[_Call] = []
        for call in reversed(self._calls):
            if call.has_effect or needed.intersection(call.gives) or memory.intersection(call.changes):
                calls.append(call)
                needed.update(call.takes)
                memory.update(self._memory.get(name, name) for name in call.takes)
        numbers: dict[Any, int] = {}

        def numbered(found: list[Any]) -> list[Any]:
            return [numbers.setdefault(name, len(numbers)) if isinstance(name, int) else name for name in found]

        listed = [
            (call.operator, call.arguments, numbered(call.takes), numbered(call.gives)) for call in reversed(calls)
        ]
        return [*listed, numbered(names)]


def _constant(tensor: torch.Tensor) -> Any:
    """Returns what a tensor that is none of the model's goes by: its values."""
    about = (str(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()), tensor.requires_grad)
    return (*about, hashlib.blake2b(bytes_of(tensor), digest_size=20).hexdigest())


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Returns the values of a tensor."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device == _CPU and tensor.layout == torch.strided
    if not plain or tensor.nbytes > MOST_BYTES:
        raise CannotFollow
    if not tensor.numel():
        return b""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
