"""Explains which part of an object cannot be sent, by name, and what to do instead."""

from __future__ import annotations

import contextlib
import copyreg
import functools
import io
import socket
import types
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from labkit.ipc.code_names import names_read
from labkit.ipc.reductions import CannotSendError

DEEPEST: Final = 12  # levels of containers, attributes and functions; a longer path would not help the student

# Modules of Python whose objects' internals a student does not know: the error names the variable that holds one.
_OPAQUE: Final = (
    "_asyncio", "_queue", "_thread", "asyncio", "concurrent", "http", "logging", "multiprocessing", "queue", "select",
    "selectors", "socket", "sqlite3", "ssl", "subprocess", "tempfile", "threading", "urllib", "weakref",
)  # fmt: skip


class Call(NamedTuple):
    """A function and its arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Names(dict[str, Any]):
    """Values of the notebook, by their names."""


def explain_unpicklable(
    value: Any, label: str, error: Exception, pickle: Callable[[Any], object], *, result: bool = False
) -> str:
    """Return a message that names the innermost part that cannot be sent, and says what to do."""
    seen: set[int] = set()  # a function may refer to itself
    path, culprit, reason = label, value, error
    for _ in range(DEEPEST):
        if isinstance(reason, CannotSendError) and reason.culprit is culprit:
            break
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
    if isinstance(reason, CannotSendError):
        return f"{path} cannot be sent: this {type(reason.culprit).__name__} {reason.reason}.\n{reason.remedy}"
    words = " ".join(str(reason).split()) or type(reason).__name__
    return f"{path} cannot be sent: {type(culprit).__name__} objects cannot be pickled ({words}).\n{_remedy(culprit, result)}"


def _remedy(culprit: Any, result: bool) -> str:
    kind = f"{type(culprit).__module__}.{type(culprit).__name__}"
    if isinstance(culprit, io.IOBase):
        return "Open the file inside the function that the ranks run."
    if isinstance(culprit, socket.socket):
        return "Connect inside the function that the ranks run."
    if kind.startswith("multiprocessing"):
        return (
            "Only processes that multiprocessing starts can share it, and ranks are started otherwise: let ranks exchange "
            "messages (dist.send, rpc), or wait for one another (dist.barrier)."
        )
    if kind.startswith(("tensorflow", "keras", "tf_keras")):
        return "Send numpy arrays (tensor.numpy(), model.get_weights()), and build TensorFlow's objects inside the function."
    if isinstance(culprit, types.GeneratorType):
        return f"A generator runs only in the process that made it: {'return' if result else 'send'} list(...) of it instead."
    if result:
        return "Return plain data (numbers, arrays, tensors, state_dict()) instead."
    return "Make it inside the function that the ranks run, or send plain data (numbers, arrays, tensors, state_dict()) instead."


def _parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an object with their names, always in the same order."""
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
    elif isinstance(value, type):
        yield from _of_class(value)
    elif hasattr(value, "__wrapped__"):  # a cached function
        yield path, value.__wrapped__
    elif isinstance(value, types.ModuleType) or type(value) in copyreg.dispatch_table:
        return
    elif type(value).__module__.partition(".")[0] not in _OPAQUE:
        if type(value).__module__ == "__main__":
            yield f"the class {type(value).__qualname__}", type(value)
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(value, name)]
        yield from ((f"{path}.{name}", getattr(value, name)) for name in [*slots, *getattr(value, "__dict__", ())])


def _of_class(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the attributes, methods and base classes of a class that the student defined."""
    if kind.__module__ != "__main__":
        return
    for name, member in vars(kind).items():
        function = getattr(member, "__func__", getattr(member, "fget", member))  # of static and class methods, properties
        if isinstance(function, types.FunctionType):
            yield f"{kind.__qualname__}.{name}()", function
        elif not name.startswith("__"):
            yield f"the class attribute {kind.__qualname__}.{name}", member
    yield from ((f"the class {base.__qualname__}", base) for base in kind.__bases__)


def _used(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    used_by = f"used by {_shown(function)}()"
    for name in sorted(names_read(function.__code__) & function.__globals__.keys()):
        yield f"the variable {name!r} {used_by}", function.__globals__[name]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            yield f"the variable {name!r} {used_by}", cell.cell_contents
    for i, default in enumerate(function.__defaults__ or ()):
        yield f"the default value {i + 1} of {_shown(function)}()", default
    for name, default in (function.__kwdefaults__ or {}).items():
        yield f"the default value of {name!r} of {_shown(function)}()", default
    for name, value in vars(function).items():
        yield f"{_shown(function)}.{name}", value


def _shown(function: types.FunctionType) -> str:
    """Return a function's name with its class, but without the function that encloses it."""
    return function.__qualname__.rpartition("<locals>.")[2]
