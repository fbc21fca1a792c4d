"""Calls a function as soon as a module has been imported, in a process that may never import it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Finder:
    """Stays in `sys.meta_path` until a module has been imported, then calls a function with it."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then
        self._looking = False

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        if name != self._name or self._looking:
            return None
        self._looking = True  # `importlib` asks all finders, including this one
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_tell(module: ModuleType) -> None:
            load(module)
            if self in sys.meta_path:  # otherwise another thread was first
                sys.meta_path.remove(self)
                self._then(module)

        spec.loader.exec_module = load_and_tell  # type: ignore[method-assign]  # only on this loader
        return spec


def when_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call a function with a module as soon as it has been imported; at once if it already has been."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, then))
