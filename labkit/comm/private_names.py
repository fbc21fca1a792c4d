"""Names that torch and TensorFlow keep private, in tables: what depends on each, and how it is found and replaced."""

from __future__ import annotations

import functools
import inspect
import pkgutil
import re
import types
import warnings
from collections.abc import Callable
from typing import Any


class PrivateNames:
    """The private names of a framework that one thing in labkit depends on.

    Args:
        *paths: where they are, for `pkgutil.resolve_name`: "torch.distributed.rpc.api:_invoke_rpc". Words in
            parentheses at the end are parameters of a function, or names and constants in its code. The names are known
            by their last part, or, where two have the same, with their class: "Server.join".
        lost: what labkit does not record or cannot do without them.
        public: what the framework would have to offer in their place.
        versions: the versions of the framework in which they were seen.
    """

    def __init__(self, *paths: str, lost: str, public: str, versions: str) -> None:
        names = [re.split("[.:]", path.partition("(")[0]) for path in paths]
        last = [name for *_, name in names]
        self.paths = {
            name if last.count(name) == 1 else f"{owner}.{name}": path
            for (*_, owner, name), path in zip(names, paths, strict=True)
        }
        self.lost, self.public, self.versions = lost, public, versions

    @functools.cached_property
    def found(self) -> bool:
        """Whether the installed version has all of them; found out once, since some are needed at each operation."""
        return not self.missing

    @property
    def missing(self) -> list[str]:
        """The paths that the installed version lacks."""
        return [path for name, path in self.paths.items() if not self._has(name)]

    def __contains__(self, name: object) -> bool:
        return name in self.paths

    def __getitem__(self, name: str) -> Any:
        """Return what has this name.

        Raises:
            ImportError, AttributeError: the installed version lacks it.
        """
        path, _, words = self.paths[name].rstrip(")").partition("(")
        found = pkgutil.resolve_name(path)
        if words and not set(words.split(", ")) <= _words(found):
            raise AttributeError(f"{path} contains not all of {words}")
        return found

    def of(self, owner: Any, name: str) -> Any:
        """Return an attribute of an object by its private name."""
        assert name in self.paths or name in " ".join(self.paths.values()), name
        return getattr(owner, name)

    def replace(self, name: str, ours: Callable[..., Any]) -> None:
        """Replace a function by one that calls `ours` with the original as first argument; see `in_place_of`."""
        self.set(name, in_place_of(self[name], ours))

    def set(self, name: str, value: Any) -> None:
        """Give another value to a name, in its module or class."""
        module, _, inner = self.paths[name].partition("(")[0].partition(":")
        outer, _, last = inner.rpartition(".")
        setattr(pkgutil.resolve_name(f"{module}:{outer}" if outer else module), last, value)

    def _has(self, name: str) -> bool:
        try:
            with warnings.catch_warnings(action="ignore"):  # importing some of torch's modules deprecates others
                self[name]
        except (ImportError, AttributeError):
            return False
        return True


def _words(function: Any) -> set[str]:
    """Return a function's parameters, and the names and constants in its code."""
    words = set(inspect.signature(function).parameters)
    codes = [code] if (code := getattr(inspect.unwrap(function), "__code__", None)) else []
    for code in codes:
        words.update(code.co_names, map(str, code.co_consts))
        codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
    return words


def in_place_of(function: Any, ours: Callable[..., Any]) -> Any:
    """Return a replacement for `function` that calls `ours` with the original as first argument.

    If `function` is such a replacement itself, its original is used.
    """
    original = getattr(function, "__labkit_original__", function)

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs)

    watched.__labkit_original__ = original  # type: ignore[attr-defined]
    return watched
