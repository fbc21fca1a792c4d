"""Refuses pickles that name anything but data. A rank that runs a submission could send one that calls any function.

What ranks send is data: messages, numbers, arrays, tensors, and what exercises return. A pickle with another name in it
raises an error in the judge's process, before anything is called.

Source: "Restricting Globals" in the documentation of Python's pickle module.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any, Final

from labkit.exercises.judging import AnswerError

_TRUSTED: Final = {
    "builtins": ("bytearray", "complex", "frozenset", "range", "set", "slice"),
    "collections": ("Counter", "OrderedDict", "defaultdict", "deque"),
    "decimal": ("Decimal",),
    "fractions": ("Fraction",),
    "labkit.errors.causes": ("Cause",),
    "labkit.errors.exceptions": ("RankFailure",),
    "labkit.recording.rank_facts": ("Fact", "FactKind"),
    "labkit.ipc.array_views": ("_array_at", "_storage_at"),
    "labkit.ipc.pickling": ("_sent_definition", "_storage_from", "_tensor_from"),
    "labkit.ipc.protocol": ("ImportedModule", "Offer"),
    "numpy": ("dtype", "ndarray"),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "numpy._core.numeric": ("_frombuffer",),
    "torch": ("Size", "UntypedStorage"),
}


@dataclass
class _State:
    """Whether the hook is installed, and whether it refuses."""

    installed: bool = False
    active: bool = False


_state: Final = _State()


@contextlib.contextmanager
def only_trusted_pickles() -> Iterator[None]:
    """Refuse other pickles in the `with` block."""
    if not _state.installed:
        _state.installed = True
        sys.addaudithook(_hook)
    _state.active = True
    try:
        yield
    finally:
        _state.active = False


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class" and _state.active and not _is_trusted(*arguments):
        raise AnswerError(f"it sends {'.'.join(arguments)}: expected numbers, texts, or lists of them")


def _is_trusted(module: str, name: str) -> bool:
    if name in _TRUSTED.get(module, ()) or module == "labkit.launch.server_requests":
        return True
    found = getattr(sys.modules.get(module), name, None)
    if module == "torch":
        return isinstance(found, sys.modules["torch"].dtype)
    # What exercises of RPC and simulated ranks return. Making one runs no code of its own.
    if not module.startswith(("labkit.exercises.", "labkit.simulation.program")) or not isinstance(found, type):
        return False
    return is_dataclass(found) or issubclass(found, tuple)
