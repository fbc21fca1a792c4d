"""labkit: a laboratory for distributed training inside Jupyter.

Start real processes from a cell, watch what each one computes, sends and waits for, and check your own solutions:

    import labkit as lab
    group = lab.Group(4)
    run = group.watch(train, epochs=3)

The import loads neither torch nor tensorflow nor matplotlib: each name loads what it needs on first use.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any, Final

from labkit.errors.wrong_calls import WrongNameError, did_you_mean
from labkit.notebook.on_import import begin

__version__ = "1.0.0rc1"  # pyproject.toml reads it here

# The public names are the imports of the stub `__init__.pyi`, which editors and type checkers read.
_MODULES: Final[dict[str, str]] = {}
for _import in ast.parse(Path(__file__).with_suffix(".pyi").read_text()).body:
    if isinstance(_import, ast.ImportFrom) and _import.module:
        _MODULES.update((alias.name, _import.module) for alias in _import.names)
__all__ = sorted(_MODULES)  # noqa: PLE0605  # a list of strings


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _MODULES:
        raise WrongNameError(f"labkit has no {name!r}; {did_you_mean(name, __all__)}")
    home = importlib.import_module(_MODULES[name])
    if name not in vars(home):  # a module, such as `predict`
        importlib.import_module(f"{home.__name__}.{name}")
    value = globals()[name] = getattr(home, name)
    return value


def __dir__() -> list[str]:
    return __all__


begin()
