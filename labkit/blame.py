"""Which part of an object cannot be sent, by name, and what to do instead."""

from __future__ import annotations

import contextlib
import copyreg
import io
import types
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from labkit.names import names_read

__all__ = ["Call", "Names", "blame"]

DEEPEST: Final = 8  # levels of containers, attributes and functions; a longer path helps nobody


class Call(NamedTuple):
    """A function and what to call it with."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Names(dict[str, Any]):
    """Values of the notebook by the names that they have there."""


def blame(value: Any, what: str, error: Exception, pickle: Callable[[Any], object]) -> str:
    """The sentence that names the innermost thing that cannot be sent.

    Args:
        value: what was to be sent.
        what: how to call it.
        error: what pickling it raised.
        pickle: pickles one object; raises where that cannot be done.
    """
    path, culprit, reason = _culprit(value, what, error, pickle, depth=0)
    return f"{path} cannot be sent: {type(culprit).__name__} objects cannot be pickled ({reason}).\n{_remedy(culprit)}"


def _remedy(culprit: Any) -> str:
    kind = f"{type(culprit).__module__}.{type(culprit).__name__}"
    if isinstance(culprit, io.IOBase):
        return "Open the file inside the function that the ranks run."
    if kind.startswith(("tensorflow", "keras", "tf_keras")):
        return "Send numpy arrays (tensor.numpy(), model.get_weights()), and build TensorFlow's objects inside the function."
    return "Make it inside the function that the ranks run, or send plain data (numbers, arrays, tensors, state_dict()) instead."


def _culprit(value: Any, path: str, error: Exception, pickle: Callable[[Any], object], depth: int) -> tuple[str, Any, str]:
    if depth < DEEPEST:
        for name, part in _parts(value, path):
            try:
                pickle(part)
            except Exception as inner:  # noqa: BLE001  # an object's own __reduce__ may raise anything: the reason we report
                return _culprit(part, name, inner, pickle, depth + 1)
    reason = " ".join(str(error).split()) or type(error).__name__
    return path, value, reason


def _parts(value: Any, path: str) -> Iterable[tuple[str, Any]]:
    if isinstance(value, Call):
        yield path, value.function
        yield from ((f"argument {number} of {path}", item) for number, item in enumerate(value.args, 1))
        yield from ((f"argument {name!r} of {path}", item) for name, item in value.kwargs.items())
    elif isinstance(value, Names):
        yield from ((f"the notebook's {name!r}", item) for name, item in value.items())
    elif isinstance(value, dict):
        yield from ((f"{path}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", None) or range(len(value))
        yield from (
            (f"{path}[{name!r}]" if isinstance(name, int) else f"{path}.{name}", v) for name, v in zip(names, value, strict=True)
        )
    elif isinstance(value, types.FunctionType):
        used = names_read(value.__code__)
        yield from (
            (f"the variable {n!r} used by {value.__name__}()", value.__globals__[n]) for n in used if n in value.__globals__
        )
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                yield f"the variable {name!r} used by {value.__name__}()", cell.cell_contents
    elif not isinstance(value, (type, types.ModuleType)) and hasattr(value, "__dict__") and not _reduces_itself(value):
        yield from ((f"{path}.{name}", item) for name, item in vars(value).items())


def _reduces_itself(value: Any) -> bool:
    return type(value) in copyreg.dispatch_table
