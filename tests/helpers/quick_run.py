"""Which tests start processes, and a check that a quick run, `pytest -m "not processes and not slow"`, starts none.

A test is marked `processes` if its code, its fixtures' code or the code that these call in `tests/` and `bench/` names
something that starts processes. Where names do not show it, the quick run fails, and the test gets the mark by hand.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

__all__ = ["mark_those_that_start_processes", "note_started_processes", "started", "starts_processes"]

STARTERS = frozenset(
    {"Group", "Kernel", "NotebookClient", "Popen", "fork", "judge", "multiprocessing", "starter", "subprocess"}
)  # `judge`: answers to exercises run on ranks
EVENTS = frozenset({"os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"})
HARMLESS = frozenset({"fc-list"})  # matplotlib asks for the fonts once in the life of a machine
FOLDERS = frozenset(Path(__file__).resolve().parents[2] / name for name in ("bench", "tests"))

started: list[str] = []


def mark_those_that_start_processes(items: list[pytest.Item]) -> None:
    """Mark each test `processes` whose code names something that starts processes."""
    for item in items:
        if isinstance(item, pytest.Function) and any(starts_processes(function) for function in _functions(item)):
            item.add_marker(pytest.mark.processes)


def note_started_processes() -> None:
    """From now on, `started` has a line for each process that this one starts."""
    sys.addaudithook(_note)


def _note(event: str, args: tuple[Any, ...]) -> None:
    if event in EVENTS and not (args and args[0] in HARMLESS):
        started.append(f"{event} {' '.join(map(str, args[:2]))[:200]}".strip())


def _functions(item: pytest.Function) -> Iterator[Callable[..., Any]]:
    yield item.function
    for definitions in item._fixtureinfo.name2fixturedefs.values():
        yield from (definition.func for definition in definitions)


@functools.cache
def starts_processes(function: Callable[..., Any]) -> bool:
    """Whether the names in a function's code, or in what it calls, say that it starts processes."""
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType):
        return False
    checked: set[FunctionType] = set()
    waiting = [function]
    while waiting:
        function = waiting.pop()
        checked.add(function)
        names = _names(function.__code__)
        if names & STARTERS:
            return True
        found = [function.__globals__[name] for name in names if name in function.__globals__]
        found += [vars(module).get(name) for module in found if _is_ours(module) for name in names]
        waiting += [called for thing in found for called in _called(thing) if called not in checked]
    return False


def _is_ours(module: Any) -> bool:
    return isinstance(module, ModuleType) and _lies_here(getattr(module, "__file__", None) or "")


def _lies_here(file: str) -> bool:
    return not FOLDERS.isdisjoint(Path(file).parents)


def _names(code: CodeType) -> set[str]:
    """The names in a function's code and in that of the functions inside it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _called(thing: Any) -> list[FunctionType]:
    """A function of `tests/` or `bench/`, or the methods of a class there."""
    methods = vars(thing).values() if inspect.isclass(thing) else [thing]
    functions = [inspect.unwrap(f) for f in methods if isinstance(f, FunctionType)]  # also inside decorators
    return [f for f in functions if isinstance(f, FunctionType) and _lies_here(f.__code__.co_filename)]
