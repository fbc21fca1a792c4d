"""Calls something as soon as a module has been imported, in a process that may never import it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["when_imported"]


class _Finder:
    """Stands in `sys.meta_path` until a module has been imported, and tells when it has.

    Args:
        name: of the module.
        then: what to call with it.
    """

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then
        self._looking = False

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        """What Python asks for each module: of this one its own spec, with a loader that calls afterwards."""
        if name != self._name or self._looking:
            return None
        self._looking = True  # the other finders are asked, and this one again
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_tell(module: ModuleType) -> None:
            load(module)
            if self in sys.meta_path:  # else another thread was first
                sys.meta_path.remove(self)
                self._then(module)

        spec.loader.exec_module = load_and_tell  # type: ignore[method-assign]  # of this one loader
        return spec


def when_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call `then` with the module of that name once it has been imported, at once where it has been."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, then))
