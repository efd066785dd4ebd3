"""Something to be done to a module as soon as a script has imported it, and not before.

What has to be in place before a script's first line may need torch, and a script may want to set torch's variables
before it imports it. So nothing is imported for it: the module is waited for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

Act = Callable[[ModuleType], None]


def when_imported(name: str, act: Act) -> None:
    """Has `act(module)` called once the module of this name has been imported: at once if it has been already."""
    if name in sys.modules:
        act(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, act))


class _Finder(MetaPathFinder):
    def __init__(self, name: str, act: Act) -> None:
        self._name, self._act = name, act

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._act)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Loader, act: Act) -> None:
        self._loader, self._act = loader, act

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader  # nobody sees that it was another
        self._loader.exec_module(module)
        self._act(module)
