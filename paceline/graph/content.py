"""What a computation is made of, as a key: the same for two runs whose graphs are the same.

Everything that capturing could look at goes into it: the code of the function and of what it calls, what they keep
(closures, defaults, globals by name), the model's modules with all that they have, shapes and types of tensors, the
rest of the batch, settings of torch, and which packages are installed. Code of the user's is read, and followed; that
of an installed package is known by the package's version.

Where something cannot be looked into, there is no key (`NotKnown`), and nothing is kept.
"""

from __future__ import annotations

import enum
import hashlib
import logging
import os
import site
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.torch_private import is_operator

_CONSTANT = (
    bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
)  # fmt: skip
_ASIDE = (logging.Logger, weakref.ref, types.MappingProxyType)  # what no computation depends on


class NotKnown(Exception):
    """Something that cannot be looked into."""


class Content:
    """What one computation is made of. `tensors`: those that are neither parameters nor buffers, in the order in which
    they were met, so that those of another run can stand in their places."""

    def __init__(self, function: Callable[..., Any], model: nn.Module, given: Any) -> None:
        self._hash = hashlib.blake2b(digest_size=20)
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []  # ids are of things that live
        self.tensors: list[torch.Tensor] = []
        self._named = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        self._say(_surroundings(), torch.is_grad_enabled(), torch.get_default_dtype(), *_settings())
        for part in (model, function, given):
            self._add(part)
        self.key = self._hash.hexdigest()

    def _say(self, *words: Any) -> None:
        for word in words:
            self._hash.update(f"{word!r}\0".encode(errors="surrogatepass"))

    def _add(self, value: Any) -> None:
        if isinstance(value, _CONSTANT):
            self._say(type(value).__name__, value)
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
        self._say(_name_of(type(value)))
        if isinstance(value, torch.Tensor):
            self._add_tensor(value)
        elif isinstance(value, enum.Enum):
            self._say(value.name)
        elif isinstance(value, (types.FunctionType, types.MethodType, partial)) or _is_builtin(value):
            self._add_function(value)
        elif isinstance(value, type):
            self._add_class(value)
        elif isinstance(value, types.ModuleType):
            self._say(value.__name__)
        elif isinstance(value, (set, frozenset)):
            self._add_all(sorted(value, key=repr))
        elif isinstance(value, Mapping):
            self._add_all(part for entry in value.items() for part in entry)
            self._add_fields(value)
        elif isinstance(value, (tuple, list)):
            self._say(len(value))
            self._add_all(value)
        elif isinstance(value, _ASIDE) or type(value).__module__ in ("_thread", "threading"):
            pass
        else:
            self._add_class(type(value))
            self._add_fields(value)

    def _add_fields(self, value: Any) -> None:
        """Adds what an object has: its attributes, or its slots."""
        fields = getattr(value, "__dict__", None)
        slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
        if fields is None and not slots and not isinstance(value, Mapping):
            raise NotKnown(f"a {_name_of(type(value))}")
        for name, field in (fields or {}).items():
            self._say(name)
            if not ("hash" in name and isinstance(field, int)):  # hash() is another in every run
                self._add(field)
        for name in slots:
            self._say(name)
            self._add(getattr(value, name, None))

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        strides = tuple(tensor.stride()) if tensor.layout == torch.strided else ()
        shape = tuple(tensor.shape)
        self._say(shape, strides, tensor.dtype, str(tensor.device), tensor.requires_grad, tensor.layout)
        if (name := self._named.get(id(tensor))) is not None:
            self._say(name)
        else:
            self.tensors.append(tensor)

    # ── code ─────────────────────────────────────────────────────────────────────────────────────────────

    def _add_class(self, kind: type) -> None:
        self._say(_name_of(kind))
        if not _is_users(kind.__module__) or id(kind) in self._seen:
            return
        self._seen[id(kind)] = len(self._seen)
        self._alive.append(kind)
        self._add_all(kind.__bases__)
        for name, entry in vars(kind).items():
            function = getattr(entry, "__func__", getattr(entry, "fget", entry))
            if isinstance(function, types.FunctionType) or (isinstance(entry, _CONSTANT) and name != "__doc__"):
                self._say(name)
                self._add(function)

    def _add_function(self, function: Any) -> None:
        if isinstance(function, types.MethodType):
            self._add(function.__func__)
            self._add(function.__self__)
        elif isinstance(function, partial):
            self._add_all((function.func, function.args, function.keywords))
        elif isinstance(function, types.FunctionType):
            self._add_code(function)
        else:
            self._say(getattr(function, "__module__", ""), getattr(function, "__qualname__", str(function)))
            owner = getattr(function, "__self__", None)
            if owner is not None and not isinstance(owner, types.ModuleType):
                self._add(owner)

    def _add_code(self, function: types.FunctionType) -> None:
        self._say(function.__module__, function.__qualname__)
        for cell in function.__closure__ or ():
            try:
                self._add(cell.cell_contents)
            except ValueError:  # nothing in it yet
                self._say("empty")
        self._add_all((function.__defaults__, function.__kwdefaults__))
        if not _is_users(function.__module__):
            return
        names: set[str] = set()
        for code in _codes(function.__code__):
            self._say(code.co_code, code.co_names, [c for c in code.co_consts if not isinstance(c, types.CodeType)])
            names.update(code.co_names)
        for name in sorted(names & function.__globals__.keys()):
            value = function.__globals__[name]
            self._say(name)
            self._add(value)
            if isinstance(value, types.ModuleType):  # settings.DEPTH
                of_module = {entry: vars(value)[entry] for entry in sorted(names & vars(value).keys())}
                users = _is_users(value.__name__)
                self._add_all(entry for entry in of_module.values() if users or isinstance(entry, _CONSTANT))


def _codes(code: types.CodeType) -> Iterable[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _is_builtin(value: Any) -> bool:
    kinds = types.BuiltinFunctionType, types.MethodWrapperType, types.WrapperDescriptorType
    return isinstance(value, kinds) or is_operator(value)


def _slots(kind: type) -> Iterable[str]:
    slots = kind.__dict__.get("__slots__", ())
    found = (slots,) if isinstance(slots, str) else slots
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# ── whose code it is ─────────────────────────────────────────────────────────────────────────────────────────


@cache
def _is_users(module: str | None) -> bool:
    """Returns whether a module is the user's own: neither of an installed package, nor Python's, nor ours."""
    root = (module or "").partition(".")[0]
    if root in sys.stdlib_module_names and root != "__main__":
        return False
    if root in ("torch", "paceline"):
        return False
    path = getattr(sys.modules.get(module or ""), "__file__", None)
    return path is None or not str(Path(path).resolve()).startswith(_installed())


@cache
def _installed() -> tuple[str, ...]:
    return tuple({str(Path(path).resolve()) for path in [*site.getsitepackages(), sysconfig.get_paths()["stdlib"]]})


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
