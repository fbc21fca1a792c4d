"""Which part of an object cannot be sent, by name, and what to do instead."""

from __future__ import annotations

import contextlib
import copyreg
import functools
import io
import types
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from labkit.names import names_read

__all__ = ["Call", "Names", "blame"]

DEEPEST: Final = 12  # levels of containers, attributes and functions; a longer path helps nobody


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
    seen: set[int] = set()  # a function may refer to itself
    path, culprit, reason = what, value, error
    for _ in range(DEEPEST):
        seen.add(id(culprit))
        for name, part in _parts(culprit, path):
            if id(part) in seen:
                continue
            try:
                pickle(part)
            except Exception as inner:  # noqa: BLE001  # an object's own __reduce__ may raise anything: the reason we report
                path, culprit, reason = name, part, inner
                break
        else:
            break
    words = " ".join(str(reason).split()) or type(reason).__name__
    return f"{path} cannot be sent: {type(culprit).__name__} objects cannot be pickled ({words}).\n{_remedy(culprit)}"


def _remedy(culprit: Any) -> str:
    kind = f"{type(culprit).__module__}.{type(culprit).__name__}"
    if isinstance(culprit, io.IOBase):
        return "Open the file inside the function that the ranks run."
    if kind.startswith(("tensorflow", "keras", "tf_keras")):
        return "Send numpy arrays (tensor.numpy(), model.get_weights()), and build TensorFlow's objects inside the function."
    if isinstance(culprit, types.GeneratorType):
        return "A generator computes its items one by one, where it was made: send list(...) of it."
    return "Make it inside the function that the ranks run, or send plain data (numbers, arrays, tensors, state_dict()) instead."


def _parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """What an object is made of, each part with its name, in an order that is the same each time."""
    if isinstance(value, Call):
        yield path, value.function
        yield from ((f"argument {number} of {path}", item) for number, item in enumerate(value.args, 1))
        yield from ((f"argument {name!r} of {path}", item) for name, item in value.kwargs.items())
    elif isinstance(value, Names):
        yield from ((f"the notebook's {name!r}", item) for name, item in value.items())
    elif isinstance(value, dict):
        yield from ((f"{path}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from ((f"{path}.{name}", item) for name, item in zip(value._fields, value, strict=True))
    elif isinstance(value, (list, tuple)):
        yield from ((f"{path}[{i}]", item) for i, item in enumerate(value))
    elif isinstance(value, types.FunctionType):
        yield from _used(value)
    elif isinstance(value, types.MethodType):
        yield f"the object of {path}", value.__self__
    elif isinstance(value, functools.partial):
        yield from _parts(Call(value.func, value.args, value.keywords), path)
    elif not isinstance(value, (type, types.ModuleType)) and type(value) not in copyreg.dispatch_table:
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(value, name)]
        yield from ((f"{path}.{name}", getattr(value, name)) for name in [*slots, *getattr(value, "__dict__", ())])


def _used(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    words = f"used by {function.__name__}()"
    for name in sorted(names_read(function.__code__) & function.__globals__.keys()):
        yield f"the variable {name!r} {words}", function.__globals__[name]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            yield f"the variable {name!r} {words}", cell.cell_contents
    for i, default in enumerate(function.__defaults__ or ()):
        yield f"the default value {i + 1} of {function.__name__}()", default
