"""Explains wrong arguments to public functions in one line, without labkit's own frames in the traceback.

`public_api` decorates the functions that students call. Functions that must be fast (`span`, `steps`, `record`) raise
`WrongTypeError` and `WrongValueError` directly.

`check_number` is the one way to check a number that a student gives.
"""

from __future__ import annotations

import collections.abc
import dis
import functools
import inspect
import math
import numbers
import os
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from traceback import walk_tb
from typing import Any, Final, ParamSpec, TypeVar

from labkit.errors.exceptions import OWN_CODE, LabError, Stopped
from labkit.errors.lists import listed


def check_number(
    value: Any, expected: str, *, whole: bool = False, at_least: float = -math.inf, above: float = -math.inf,
    below: float | None = None,
) -> None:  # fmt: skip
    """Check that a value is a number in a range; by default, it may be infinite.

    The message of the `TypeError` or `ValueError` is `expected`: what was given, and what was expected.
    """
    if not isinstance(value, numbers.Integral if whole else numbers.Real) or isinstance(value, bool):
        raise TypeError(expected)
    try:
        number = float(value)
    except OverflowError:  # a whole number that is too large for a float
        number = math.inf
    if not (number >= at_least and number > above and (below is None or number < below)):
        raise ValueError(expected)


P = ParamSpec("P")
T = TypeVar("T")

_MOST_CHECKED: Final = 1000  # items; in longer lists and dicts the types of the items are not checked
_LONGEST_MESSAGE: Final = 800  # characters
_LONGEST: Final = 20  # characters; longer default values are shown as "..."
_RAISE: Final = dis.opmap["RAISE_VARARGS"]
_IN_WORDS: Final = {
    "Any": "anything", "Axes": "matplotlib Axes", "Callable": "a function", "Group": "a group (lab.Group)", "HasTrace": "a run",
    "Iterable": "something to loop over", "Link": "a lab.Link", "Mapping": "a dict", "Network": "a lab.Network",
    "None": "None", "NoneType": "None", "Path": "a path", "Sequence": "a list", "Trace": "a trace",
    "bool": "True or False", "float": "a number", "int": "a whole number", "range": "a range", "str": "a string",
}  # fmt: skip


class _StudentsFrames(BaseException):
    """An error that is shown under the name of its built-in class, and in a notebook with the student's frames only."""

    _builtin: type[BaseException]

    def __init_subclass__(cls) -> None:
        cls._builtin = cls.__bases__[1]
        cls.__module__, cls.__name__, cls.__qualname__ = "builtins", cls._builtin.__name__, cls._builtin.__qualname__

    def __reduce__(self) -> tuple[Any, ...]:
        return self._builtin, self.args

    def _render_traceback_(self) -> list[str]:
        """IPython's hook."""
        shell = sys.modules["IPython"].get_ipython()
        frames = _without_labkit(self.__traceback__)
        if shell is None or frames is None:
            return [f"{self._builtin.__name__}: {self}"]
        lines: list[str] = shell.InteractiveTB.structured_traceback(self._builtin, self, frames)
        return lines


class Interrupted(_StudentsFrames, KeyboardInterrupt):  # no "Error" in its name, like KeyboardInterrupt
    """Stop was pressed while labkit or a library was running."""


class WrongTypeError(_StudentsFrames, TypeError):
    """A `TypeError` about an argument that the student gave."""


class WrongValueError(_StudentsFrames, ValueError):
    """A `ValueError` about an argument that the student gave."""


class WrongNameError(_StudentsFrames, AttributeError):
    """An `AttributeError` about a name that the student used."""


def _without_labkit(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """Return the traceback without labkit's frames."""
    kept = []
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_filename.startswith(OWN_CODE):
            kept.append(traceback)
        traceback = traceback.tb_next
    rest: types.TracebackType | None = None
    for entry in reversed(kept):
        rest = types.TracebackType(rest, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return rest


def _is_in_libraries(traceback: types.TracebackType | None) -> bool:
    """Whether all frames are in labkit, other libraries or Python itself, and none in the student's code."""
    libraries = (*OWN_CODE, "<frozen ", *(os.path.join(prefix, "") for prefix in {sys.prefix, sys.base_prefix}))
    return all(frame.f_code.co_filename.startswith(libraries) for frame, _ in walk_tb(traceback))


def public_api(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a public function: its errors reach the student without labkit's frames.

    If an error comes from elsewhere, the arguments are compared with their annotations, and one of a wrong type becomes
    a `WrongTypeError`. A call that works costs nothing and is never rejected. Any other error is a bug in labkit and
    keeps its frames.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (LabError, Stopped, WrongTypeError, WrongValueError) as error:
            shown: BaseException = error.with_traceback(None)
        except KeyboardInterrupt as stop:
            if not _is_in_libraries(stop.__traceback__):
                raise  # it came while the student's own function ran: show where
            shown = Interrupted(*stop.args)
        except Exception as error:
            better = _for_the_student(function, args, kwargs, error)
            if better is None:
                raise
            shown = better
        try:
            raise shown
        finally:
            del shown  # breaks a reference cycle: the error's traceback refers to this frame

    return wrapper


def public_class(kind: type[T]) -> type[T]:
    """Decorate a public dataclass: the errors of its generated `__init__` are those of a public function."""
    kind.__init__ = public_api(kind.__init__)  # type: ignore[method-assign]  # generated by `dataclass`
    return kind


def _for_the_student(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
) -> Exception | None:
    """Return an error that explains the wrong argument in one line; None for a bug in labkit."""
    if _is_raised_here(error):
        kinds: dict[type[Exception], type[Exception]] = {TypeError: WrongTypeError, ValueError: WrongValueError}
        if kind := kinds.get(type(error)):
            return kind(*(_shortened(part) if isinstance(part, str) else part for part in error.args))
        return error.with_traceback(None) if isinstance(error, TypeError | ValueError) else None
    name = function.__qualname__.removesuffix(".__init__")
    signature = inspect.signature(function)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return _wrong_arguments(name, signature, args, kwargs)
    for parameter, value in _each(signature, given):
        hint = _meaning(parameter.annotation, function)
        if not _fits(value, hint):
            got = f"{name}({parameter.name}={reprlib.repr(value)})"
            return WrongTypeError(f"{got}: expected {_choice(hint)}, given {_kind_of(value)}")
    return None


def _shortened(message: str) -> str:
    """Cut the middle out of a message with a long list or array in it."""
    end = _LONGEST_MESSAGE // 2
    return message if len(message) <= _LONGEST_MESSAGE else f"{message[:end]} … {message[-end:]}"


def _is_raised_here(error: BaseException) -> bool:
    """Whether a `raise` statement in labkit raised it; other errors are not written for the student.

    The bytecode tells them apart: a `ValueError` that `int("x")` raises in labkit is a bug in labkit.
    """
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or not last.tb_frame.f_code.co_filename.startswith(OWN_CODE):
        return False
    return last.tb_frame.f_code.co_code[last.tb_lasti] == _RAISE


def _wrong_arguments(name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> WrongTypeError:
    """Explain arguments that do not fit the signature: too many, too few, or an unknown name."""
    parameters = list(signature.parameters.values())
    if parameters and parameters[0].name == "self":
        parameters, args = parameters[1:], args[1:]
    shown = inspect.Signature([_plain(p) for p in parameters])
    why, hint = "the arguments do not fit", ""
    try:
        shown.bind(*args, **kwargs)
    except TypeError as error:
        why = str(error)
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if unknown := [name for name in kwargs if name not in {p.name for p in parameters}]:
        why = f"got an unexpected argument {unknown[0]!r}"
        hint = f" Did you mean {close!r}?" if (close := _close(unknown[0], named)) else ""
    return WrongTypeError(f"{name}(): {why}; expected {name}{shown}.{hint}")


class _Text(str):
    """A default value as a signature shows it."""

    __slots__ = ()
    __repr__ = str.__str__


def _plain(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a parameter without its annotation, and with "..." for a long default value."""
    default = parameter.default
    if default is not parameter.empty:
        default = _Text("..." if default is ... or len(repr(default)) > _LONGEST else repr(default))
    return parameter.replace(annotation=parameter.empty, default=default)


def one_number(value: Any) -> float | None:
    """Return the value of a number, or of an array or tensor with one element; None if it is neither."""
    if hasattr(value, "numpy") and not hasattr(value, "item"):
        value = value.numpy()  # TensorFlow's tensors
    if isinstance(value, bool) or not (isinstance(value, numbers.Real) or hasattr(value, "item")):
        return None
    try:
        return float(value if isinstance(value, numbers.Real) else value.item())
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def did_you_mean(wrong: str, names: Sequence[str]) -> str:
    """Suggest a name instead of one that does not exist: a similar one, or else list all."""
    close = _close(wrong, names)
    return f"did you mean {close!r}?" if close else f"it has {', '.join(names) or 'none'}"


def _close(wrong: str, names: Sequence[str]) -> str:
    """Return a name with a similar spelling, or one that begins with `wrong`; "" if there is none."""
    import difflib  # needed only after an error

    folded = {name.casefold(): name for name in names}
    wrong = wrong.casefold()
    alike = difflib.get_close_matches(wrong, folded, n=1) or [n for n in folded if n.startswith(wrong)]
    return folded[alike[0]] if alike else ""


def _each(signature: inspect.Signature, given: Mapping[str, Any]) -> Iterator[tuple[inspect.Parameter, Any]]:
    """Yield each parameter with its argument; those in `*args` and `**kwargs` one by one."""
    for name, value in given.items():
        parameter = signature.parameters[name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            yield from ((parameter, each) for each in value)
        elif parameter.kind is parameter.VAR_KEYWORD:
            yield from ((parameter.replace(name=key), each) for key, each in value.items())
        elif name != "self":
            yield parameter, value


class _Absent:
    """Stands for a class that is imported for type checkers only, such as matplotlib's Axes; compared by name."""


class _ModuleNames(dict[str, Any]):
    """The names of a module, with placeholders for those that only type checkers import."""

    def __missing__(self, name: str) -> Any:
        import builtins

        return getattr(builtins, name, None) or type(name, (_Absent,), {"__class_getitem__": classmethod(lambda c, _: c)})


def _meaning(annotation: Any, function: Callable[..., Any]) -> Any:
    """Return the type that an annotation names; `Any` if it cannot be evaluated."""
    if not isinstance(annotation, str):
        return Any if annotation is inspect.Parameter.empty else annotation
    try:
        return eval(annotation, {}, _ModuleNames(inspect.unwrap(function).__globals__))  # labkit's own annotations
    except (TypeError, AttributeError):  # a form of annotation that this function does not support
        return Any


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type; True if that cannot be decided."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is None or hint is type(None):
        return value is None
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, part) for part in parts)
    if origin is not None:
        return _fits(value, origin) and _items_fit(value, origin, parts)
    if hint is collections.abc.Callable:
        return callable(value)
    if hint in (Any, object) or not isinstance(hint, type):
        return True
    if hint in (int, float):
        number = numbers.Integral if hint is int else numbers.Real
        return isinstance(value, number) and not isinstance(value, bool)
    if issubclass(hint, _Absent):
        return hint.__name__ in [kind.__name__ for kind in type(value).__mro__]
    if getattr(hint, "_is_protocol", False):
        return all(hasattr(value, name) for name in vars(hint) if not name.startswith("_"))
    return isinstance(value, hint)


def _items_fit(value: Any, origin: Any, parts: tuple[Any, ...]) -> bool:
    if not isinstance(value, collections.abc.Collection) or len(value) > _MOST_CHECKED:
        return True
    if isinstance(value, Mapping) and len(parts) == 2:
        return all(_fits(key, parts[0]) and _fits(each, parts[1]) for key, each in value.items())
    if issubclass(origin, collections.abc.Iterable) and len(parts) == 1:
        return all(_fits(each, parts[0]) for each in value)
    return True


def _words(hint: Any) -> list[str]:
    """Return a type in everyday words; for a union, the words for each of its types."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return [word for part in parts for word in _words(part)]
    named = origin or hint
    name = getattr(named, "__name__", str(named))
    word = _IN_WORDS.get(name, f"a {name}")
    if not (isinstance(origin, type) and issubclass(origin, collections.abc.Iterable)) or not parts or Any in parts:
        return [word]
    if len(parts) == 2:
        return [f"{word} {{{_choice(parts[0])}: {_choice(parts[1])}}}"]
    return [f"{word} (each {_choice(parts[0])})"]


def _choice(hint: Any) -> str:
    return listed(dict.fromkeys(_words(hint)), word="or")


def _kind_of(value: Any) -> str:
    if isinstance(value, type):
        return value.__name__
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
