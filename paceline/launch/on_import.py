"""Something to be done to a module as soon as a script has imported it, and not before; or around its import.

What has to be in place before a script's first line may need torch, and a script may want to set torch's variables
before it imports it. So nothing is imported for it: the module is waited for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Act = Callable[[ModuleType], None]
Around = Callable[[ModuleType], AbstractContextManager[None]]


def when_imported(name: str, act: Act) -> None:
    """Has `act(module)` called once the module of this name has been imported: at once if it has been already."""
    if name in sys.modules:
        act(sys.modules[name])
        return

    @contextmanager
    def then_act(module: ModuleType) -> Iterator[None]:
        yield
        act(module)

    while_imported(name, then_act)


def while_imported(name: str, around: Around) -> None:
    """Has the module of this name be imported inside `around(module)`, if it has not been imported yet."""
    if name not in sys.modules:
        sys.meta_path.insert(0, _Finder(name, around))


class _Finder(MetaPathFinder):
    def __init__(self, name: str, around: Around) -> None:
        self._name, self._around = name, around

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        found = (finder.find_spec(name, path, target) for finder in list(sys.meta_path))  # others may wait for it too
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._around)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Loader, around: Around) -> None:
        self._loader, self._around = loader, around

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader  # nobody sees that it was another
        with self._around(module):
            self._loader.exec_module(module)
