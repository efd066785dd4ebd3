"""What a computation is made of, as a key, so that two runs whose graphs differ have two keys.

Into it go the code of the function and of what it calls, what they keep (closures, defaults, globals by name), classes
with all that stands in them, the model's modules with all that they have, shapes and types of parameters, buffers and
of the batch, values of all other tensors, the rest of the batch, settings of torch, and which packages are installed.
Code of the user's is read, and followed; that of an installed package is known by the package's version.

Where something cannot be looked into, there is no key (`NotKnown`), and nothing is kept. Python can hide more than can
be found here (a global reached by `getattr`, a package edited in place), so a key only says which graph is worth a
proof: `kept.py` trusts none without one.
"""

from __future__ import annotations

import dis
import enum
import hashlib
import logging
import os
import site
import sys
import sysconfig
import types
import typing
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import nn

from paceline.graph.inputs import take_apart
from paceline.torch_private import is_operator

_CONSTANT = (
    bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented), range, slice,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
)  # fmt: skip
_NUMBERS_AND_WORDS = (int, float, complex, str, bytes)  # of which there may be classes of the user's
_CONTAINERS = (tuple, list, dict, set, frozenset)
_BY_REPR = (PurePath, types.GenericAlias, types.UnionType, typing.TypeVar)
# What no computation depends on.
_ASIDE = (logging.Logger, weakref.ref, types.MemberDescriptorType, types.GetSetDescriptorType)
_OF_EVERY_CLASS = frozenset(
    ("__doc__", "__module__", "__dict__", "__weakref__", "__firstlineno__", "__static_attributes__", "_abc_impl")
)
MOST_BYTES = 256 << 20  # of a tensor whose values are looked at; to read more takes longer than to capture again


class NotKnown(Exception):
    """Something that cannot be looked into."""


class Content:
    """What one computation is made of. `tensors`: those that are neither parameters nor buffers, in the order in which
    they were met, so that those of another run can stand in their places."""

    def __init__(self, function: Callable[..., Any], model: nn.Module, given: Any) -> None:
        self._hash = hashlib.blake2b(digest_size=20)
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []  # ids are of things that live
        self._modules: set[tuple[str, frozenset[str]]] = set()  # of Python, that were looked into, with which names
        self.tensors: list[torch.Tensor] = []
        try:
            self._named = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
            self._inputs = {id(tensor) for tensor in take_apart(given, "batch")[0]}
            self._say(_surroundings(), torch.is_grad_enabled(), torch.get_default_dtype(), *_settings())
            self._add_all((model, function, given))
        except NotKnown:
            raise
        except Exception as error:  # of a property, a mapping or a __repr__ of the user's, whatever it is
            raise NotKnown(f"what raises {error!r}") from error
        self.key = self._hash.hexdigest()

    def _say(self, *words: Any) -> None:
        for word in words:
            self._hash.update(f"{word!r}\0".encode(errors="surrogatepass"))

    def _add(self, value: Any) -> None:
        if type(value) in _CONSTANT:
            self._say(type(value).__name__, value)
        elif type(value) in (tuple, frozenset):  # of which one run may have two where another has one
            self._add_new(value)
        elif id(value) in self._seen:
            self._say("again", self._seen[id(value)])
        else:
            self._seen[id(value)] = len(self._seen)
            self._alive.append(value)
            self._add_new(value)

    def _add_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self._add(value)

    def _add_new(self, value: Any) -> None:
        kind = type(value)
        self._say(_name_of(kind))
        if _is_environment(value):
            raise NotKnown("the environment")
        if isinstance(value, torch.Tensor):
            self._add_tensor(value)
        elif isinstance(value, type):
            self._add_class(value)
        elif isinstance(value, types.ModuleType):
            self._say(value.__name__)
        elif isinstance(value, types.CodeType):
            self._add_code(value)
        elif isinstance(value, enum.Enum):
            self._say(value.name)
            self._add_all((kind, value.value))
        elif isinstance(value, (staticmethod, classmethod)):
            self._add(value.__func__)
        elif isinstance(value, property):
            self._add_all((value.fget, value.fset, value.fdel))
        elif isinstance(value, (types.FunctionType, types.MethodType, partial)) or _is_builtin(value):
            self._add_function(value)
        elif isinstance(value, _BY_REPR) or kind.__module__ == "typing":
            self._say(str(value))
        elif not isinstance(value, _ASIDE) and kind.__module__ not in ("_thread", "threading"):
            self._add_object(value)

    # ── values ───────────────────────────────────────────────────────────────────────────────────────────

    def _add_object(self, value: Any) -> None:
        """Adds an object: its class, what it holds, its attributes or its slots."""
        kind = type(value)
        if kind not in _CONTAINERS:
            self._add(kind)
        held = True
        if isinstance(value, (set, frozenset)):
            self._add_all(sorted(value, key=repr))
        elif isinstance(value, Mapping):
            self._say(len(value))
            self._add_all(part for entry in value.items() for part in entry)
        elif isinstance(value, (tuple, list)):
            self._say(len(value))
            self._add_all(value)
        elif (base := next((base for base in _NUMBERS_AND_WORDS if isinstance(value, base)), None)) is not None:
            self._say(base.__repr__(value))
        else:
            held = False
        fields = getattr(value, "__dict__", None)
        slots = [name for of in kind.__mro__ for name in _slots(of)]
        if fields is None and not slots and not held:
            raise NotKnown(f"a {_name_of(kind)}")
        for name, field in (fields or {}).items():
            self._say(name)
            if not (name.startswith("_") and name.endswith("hash") and not _is_users(kind.__module__)):
                self._add(field)  # what a library has from hash() is another in every run
        for name in slots:
            self._say(name)
            self._add(getattr(value, name, None))

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        """Adds shape and type of a tensor. What is neither the model's nor the batch's has its values in the graph, or
        the graph has numbers that were made of them."""
        strides = tuple(tensor.stride()) if tensor.layout == torch.strided else ()
        shape = tuple(tensor.shape)
        self._say(shape, strides, tensor.dtype, str(tensor.device), tensor.requires_grad, tensor.layout)
        if (name := self._named.get(id(tensor))) is not None:
            self._say(name)
            return
        self.tensors.append(tensor)
        if id(tensor) not in self._inputs:
            self._hash.update(bytes_of(tensor))

    # ── code ─────────────────────────────────────────────────────────────────────────────────────────────

    def _add_class(self, kind: type) -> None:
        self._say(_name_of(kind))
        if _is_users(kind.__module__):
            self._add_all((type(kind), *kind.__bases__))
            for name, entry in vars(kind).items():
                if name not in _OF_EVERY_CLASS:
                    self._say(name)
                    self._add(entry)

    def _add_function(self, function: Any) -> None:
        if isinstance(function, types.MethodType):
            self._add_all((function.__func__, function.__self__))
        elif isinstance(function, partial):
            self._add_all((function.func, function.args, function.keywords))
        elif isinstance(function, types.FunctionType):
            self._add_written_function(function)
        else:
            self._say(getattr(function, "__module__", ""), getattr(function, "__qualname__", str(function)))
            owner = getattr(function, "__self__", None)
            if owner is not None and not isinstance(owner, types.ModuleType):
                self._add(owner)

    def _add_written_function(self, function: types.FunctionType) -> None:
        self._say(function.__module__, function.__qualname__)
        for cell in function.__closure__ or ():
            try:
                self._add(cell.cell_contents)
            except ValueError:  # nothing in it yet
                self._say("empty")
        self._add_all((function.__defaults__, function.__kwdefaults__))
        if not _is_users(function.__globals__.get("__name__")):  # whose code it is, whatever name a decorator gave it
            return
        self._add_all((function.__dict__, function.__code__))
        names = frozenset(name for code in _codes(function.__code__) for name in code.co_names)
        for name in sorted(names & function.__globals__.keys()):
            value = function.__globals__[name]
            self._say(name)
            self._add(value)
            if isinstance(value, types.ModuleType):
                self._add_module(value, names)

    def _add_module(self, module: types.ModuleType, names: frozenset[str]) -> None:
        """Adds what code with these names may take from a module: `settings.DEPTH`, `package.operators.scale`."""
        if (module.__name__, names) in self._modules:
            return
        self._modules.add((module.__name__, names))
        users = _is_users(module.__name__)
        for name in sorted(names & vars(module).keys()):
            entry = vars(module)[name]
            if users or isinstance(entry, (*_CONSTANT, *_CONTAINERS)) or _is_environment(entry):
                self._say(name)
                self._add(entry)
                if isinstance(entry, types.ModuleType):
                    self._add_module(entry, names)

    def _add_code(self, code: types.CodeType) -> None:
        counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        self._say(code.co_code, getattr(code, "co_exceptiontable", b""), *counts)
        self._say(code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        self._add_all(code.co_consts)
        steps = list(dis.get_instructions(code))
        for number, step in enumerate(steps):
            if step.opname == "IMPORT_NAME":
                level = steps[number - 2].argval  # 0: not `from . import`
                if level != 0 or step.argval not in sys.modules or _is_users(step.argval):
                    raise NotKnown(f"an import of {step.argval} inside of a function")


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Returns the values of a tensor."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.device.type != "cpu":
        raise NotKnown(f"a {type(tensor).__name__} on {tensor.device}")
    if tensor.layout != torch.strided or tensor.nbytes > MOST_BYTES:
        raise NotKnown(f"a tensor with the layout {tensor.layout} and {tensor.nbytes} bytes")
    if not tensor.numel():
        return b""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8).numpy().tobytes()


def _codes(code: types.CodeType) -> Iterable[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _is_builtin(value: Any) -> bool:
    kinds = (
        types.BuiltinFunctionType, types.MethodWrapperType, types.WrapperDescriptorType, types.MethodDescriptorType,
        types.ClassMethodDescriptorType,
    )  # fmt: skip
    return isinstance(value, kinds) or is_operator(value)


def _is_environment(value: Any) -> bool:
    return value is os.environ or value is os.getenv


def _slots(kind: type) -> Iterable[str]:
    slots = kind.__dict__.get("__slots__", ())
    found = (slots,) if isinstance(slots, str) else slots
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# ── whose code it is ─────────────────────────────────────────────────────────────────────────────────────────


@cache
def _is_users(module: str | None) -> bool:
    """Returns whether a module is the user's own: neither of an installed package, nor Python's, nor ours. It is the
    file that tells: `test` and `code` are modules of Python's, and names that a user may give."""
    root = (module or "").partition(".")[0]
    if root in ("torch", "paceline"):
        return False
    path = getattr(sys.modules.get(module or ""), "__file__", None)
    if path is None:
        return root == "__main__" or root not in sys.stdlib_module_names
    return not str(Path(path).resolve()).startswith(_installed())


@cache
def _installed() -> tuple[str, ...]:
    paths = (*site.getsitepackages(), sysconfig.get_paths()["stdlib"])
    return tuple({f"{Path(path).resolve()}{os.sep}" for path in paths})


@cache
def _surroundings() -> str:
    """Returns the versions of Python and of all packages, and which code of ours this is."""
    found = [sys.version, torch.__version__, torch.backends.cpu.get_cpu_capability()]
    for folder in sys.path:
        if os.path.isdir(folder):
            found += sorted(name for name in os.listdir(folder) if name.endswith((".dist-info", ".egg-info")))
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        found.append(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}")
    return hashlib.blake2b("\n".join(found).encode()).hexdigest()


def _settings() -> list[Any]:
    """Returns the settings of torch on which it depends what an operator is made of."""
    return [
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.mkldnn.enabled,
        torch.backends.cuda.flash_sdp_enabled(),  # type: ignore[no-untyped-call]
        torch.backends.cuda.math_sdp_enabled(),  # type: ignore[no-untyped-call]
    ]
