"""Copies the notebook's settings of `logging` and of warning filters to its ranks."""

from __future__ import annotations

import logging
import sys
import warnings
from dataclasses import dataclass, field, replace
from typing import Any, Final

from labkit.recording.record import is_students

# Loggers of Jupyter and torch whose names are not those of packages.
LIBRARY_LOGGERS: Final = frozenset(
    {"IPKernelApp", "strobelight_function_profiler", "strobelight_compile_time_profiler", "c10d-NullHandler-default"}
)
# TensorFlow sets this level itself where Python is interactive; in ranks, it would print what nobody asked for.
TENSORFLOWS_OWN: Final = ("tensorflow", logging.INFO)


@dataclass(frozen=True, slots=True)
class LibraryCategory:
    """A library's warning class, by name: sending the class itself would import the library in each rank.

    Args:
        module: the module that defines it.
        name: its name.
    """

    module: str
    name: str

    @classmethod
    def instead_of(cls, category: type[Warning]) -> LibraryCategory | type[Warning]:
        """Return a `LibraryCategory` for a library's class; Python's and the student's own classes stay as they are."""
        top = category.__module__.partition(".")[0]
        if top in ("builtins", "__main__") or category.__module__ not in sys.modules or "." in category.__qualname__:
            return category
        return cls(category.__module__, category.__name__)

    def found(self) -> type[Warning] | None:
        """Return the class if its library is imported here, else None: libraries set their own filters on import."""
        return getattr(sys.modules.get(self.module), self.name, None)


@dataclass(slots=True)
class StreamSettings:
    """The settings of a logging handler that writes to a standard stream.

    Args:
        stream: "stdout" or "stderr".
        level: the lowest level that it writes.
        formatter: formats its lines.
        filters: its filters.
    """

    stream: str
    level: int = logging.NOTSET
    formatter: logging.Formatter | None = None
    filters: tuple[Any, ...] = ()


@dataclass(slots=True)
class Settings:
    """The settings of a notebook.

    Args:
        filters: warning filters, as in `warnings.filters`, with a `LibraryCategory` for each class of a library.
        captured: whether warnings go to the logger "py.warnings".
        disabled_level: the level given to `logging.disable`.
        levels: the levels of loggers, by name; "" is the root logger.
        handlers: the handlers of loggers, by name.
        not_propagating: names of the loggers that do not propagate to their parents.
        replaced: handlers that write elsewhere; in ranks they write to standard error.
    """

    filters: list[Any] = field(default_factory=list)
    captured: bool = False
    disabled_level: int = 0
    levels: dict[str, int] = field(default_factory=dict)
    handlers: dict[str, list[StreamSettings]] = field(default_factory=dict)
    not_propagating: set[str] = field(default_factory=set)
    replaced: list[str] = field(default_factory=list)

    def plain(self) -> Settings:
        """Return a copy without what may fail to pickle: handlers' formatters and filters, the notebook's warnings."""
        handlers = {name: [StreamSettings(h.stream, h.level) for h in made] for name, made in self.handlers.items()}
        filters = [f for f in self.filters if isinstance(f[2], LibraryCategory) or f[2].__module__ != "__main__"]
        return replace(self, handlers=handlers, filters=filters)


class NotebookSettings:
    """Reads this process's settings, for the ranks of one group.

    Reading all loggers takes a tenth or more of the time of an empty run, so it first checks whether anything has
    changed.
    """

    def __init__(self) -> None:
        self._filters: list[Any] | None = None
        self._known_handlers: list[tuple[logging.Logger, Any]] = []
        self._loggers = -1

    def news(self) -> Settings | None:
        """Return the settings if they may have changed since the last call; else None."""
        root = logging.getLogger()
        cache = getattr(root, "_cache", {})  # logging clears it when any level is set
        if (
            self._filters == warnings.filters
            and self._loggers == len(root.manager.loggerDict)
            and id(self) in cache
            and all(_handlers(logger) == handlers for logger, handlers in self._known_handlers)
        ):
            return None
        self._filters, self._loggers = list(warnings.filters), len(root.manager.loggerDict)
        filters = [(*f[:2], LibraryCategory.instead_of(f[2]), *f[3:]) for f in self._filters]
        settings = Settings(filters, warnings.showwarning.__module__ == "logging", root.manager.disable)
        cache[id(self)] = True
        self._known_handlers = []
        for logger in [root, *(x for x in root.manager.loggerDict.values() if isinstance(x, logging.Logger))]:
            name = "" if logger is root else logger.name
            if logger.level and (name, logger.level) != TENSORFLOWS_OWN:
                settings.levels[name] = logger.level
            if not _is_students(name):
                continue
            self._known_handlers.append((logger, _handlers(logger)))
            if not logger.propagate:
                settings.not_propagating.add(name)
            handlers = [h for h in logger.handlers if not isinstance(h, logging.NullHandler)]
            settings.replaced += [repr(h) for h in handlers if _stream(h) is None]
            made = [StreamSettings(_stream(h) or "stderr", h.level, h.formatter, tuple(h.filters)) for h in handlers]
            if any(_stream(h) for h in handlers):  # do not write a message twice
                made = [m for m, h in zip(made, handlers, strict=True) if _stream(h)]
            if made:
                settings.handlers[name] = made[:1] if not any(_stream(h) for h in handlers) else made
        return settings


class AppliedSettings:
    """Applies the notebook's settings in a rank."""

    def __init__(self) -> None:
        self._own_filters = list(warnings.filters)
        self._own_level = logging.getLogger().level
        self._handlers: list[tuple[logging.Logger, logging.Handler]] = []
        self._levels: set[str] = set()

    def apply(self, settings: Settings) -> None:
        """Apply settings, and undo those applied before."""
        filters = []
        for action, message, category, module, line in settings.filters:
            known = category.found() if isinstance(category, LibraryCategory) else category
            if known is not None:
                filters.append((action, message, known, module, line))
        warnings.filters[:] = filters + [f for f in self._own_filters if f not in filters]  # type: ignore[index]
        warnings.simplefilter("default", append=True)  # Python's default; the call invalidates its cache
        if logging.root.manager.disable != settings.disabled_level:  # setting it makes `logging` visit all loggers
            logging.disable(settings.disabled_level)
        logging.captureWarnings(settings.captured)
        for logger, handler in self._handlers:
            logger.removeHandler(handler)
        self._handlers.clear()
        for name in self._levels - settings.levels.keys():
            _set_level(name, logging.NOTSET if name else self._own_level)
        self._levels = set(settings.levels)
        for name, level in settings.levels.items():
            _set_level(name, level)
        for name in settings.not_propagating:
            logging.getLogger(name).propagate = False
        for name, handlers in settings.handlers.items():
            logger = logging.getLogger(name)
            for made in () if logger.handlers else handlers:  # a library's logger has its handlers in the rank as well
                new = logging.StreamHandler(getattr(sys, made.stream))
                new.setLevel(made.level)
                new.setFormatter(made.formatter)
                new.filters = list(made.filters)
                logger.addHandler(new)
                self._handlers.append((logger, new))


def _set_level(name: str, level: int) -> None:
    logger = logging.getLogger(name)
    if logger.level != level:
        logger.setLevel(level)


def _handlers(logger: logging.Logger) -> Any:
    return [(id(h), h.level, id(h.formatter), len(h.filters)) for h in logger.handlers], logger.propagate


def _stream(handler: logging.Handler) -> str | None:
    """Return the standard stream to which a handler writes; None for other streams and for subclasses."""
    if type(handler) is not logging.StreamHandler:
        return None
    stream = handler.stream
    if stream in (sys.stdout, sys.__stdout__):
        return "stdout"
    named = getattr(stream, "name", "")
    return "stderr" if stream in (sys.stderr, sys.__stderr__) or named in ("stderr", "<stderr>") else None


def _is_students(name: str) -> bool:
    """Whether a logger is the student's; libraries set up their own in the ranks as well."""
    top = name.partition(".")[0]
    if top in LIBRARY_LOGGERS:
        return False
    if top not in sys.modules or top == "__main__":
        return True
    file = getattr(sys.modules[top], "__file__", None)
    return file is not None and is_students(file)
