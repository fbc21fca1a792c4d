"""Cells for tests: code that is defined in `__main__`, as in a notebook, so that it is pickled as a notebook's
would be."""

from __future__ import annotations

import linecache
import sys
import textwrap
import types
from typing import Any


class Cells:
    """A notebook's namespace. `cells(source)` runs a cell; `cells.name` is the object that a cell has defined.

    Args:
        main: the module that represents the notebook.
    """

    def __init__(self, main: types.ModuleType) -> None:
        self._main = main
        self._count = 0

    def __call__(self, source: str) -> Cells:
        self._count += 1
        filename = f"<ipython-input-{self._count}-test>"
        source = textwrap.dedent(source)
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        exec(compile(source, filename, "exec", dont_inherit=True), self._main.__dict__)
        return self

    def __getattr__(self, name: str) -> Any:
        return self._main.__dict__[name]


def new_main(monkeypatch: Any) -> types.ModuleType:
    """An empty `__main__` for the duration of a test."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    return main
