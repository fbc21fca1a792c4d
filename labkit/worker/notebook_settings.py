"""The notebook's settings of `logging` and of warnings' filters, which hold in its ranks as well."""

from __future__ import annotations

import logging
import sys
import warnings
from dataclasses import dataclass, field, replace
from typing import Any, Final

from labkit.recording.record import is_students

__all__ = ["AppliedSettings", "NotebookSettings", "Settings", "StreamSettings"]

# Loggers of Jupyter and torch that are called like no package: they are no student's.
OTHERS_OWN: Final = frozenset(
    {"IPKernelApp", "strobelight_function_profiler", "strobelight_compile_time_profiler", "c10d-NullHandler-default"}
)


@dataclass(frozen=True, slots=True)
class LibraryCategory:
    """A class of warnings that a library defines, by name: to send the class itself would import the library in every rank."""

    module: str
    name: str

    @classmethod
    def instead_of(cls, category: type[Warning]) -> LibraryCategory | type[Warning]:
        """The class itself where it is Python's or the student's."""
        top = category.__module__.partition(".")[0]
        if top in ("builtins", "__main__") or category.__module__ not in sys.modules or "." in category.__qualname__:
            return category
        return cls(category.__module__, category.__name__)

    def found(self) -> type[Warning] | None:
        """The class, where its library is imported here; a library that is imported later sets its own filters then."""
        return getattr(sys.modules.get(self.module), self.name, None)


@dataclass(slots=True)
class StreamSettings:
    """A handler that writes lines.

    Args:
        stream: "stdout" or "stderr".
        level: below which it writes nothing.
        formatter: how its lines look.
        filters: what else decides what it writes.
    """

    stream: str
    level: int = logging.NOTSET
    formatter: logging.Formatter | None = None
    filters: tuple[Any, ...] = ()


@dataclass(slots=True)
class Settings:
    """What holds in a notebook.

    Args:
        filters: of warnings, as in `warnings.filters`, with a `LibraryCategory` for each class of a library's.
        captured: whether warnings go to the logger "py.warnings".
        disabled_level: `logging.disable`.
        levels: by the name of a logger, "" being the root.
        handlers: the same.
        apart: names of the loggers that hand nothing to their parents.
        replaced: handlers that write elsewhere, which in ranks write to the standard error instead.
    """

    filters: list[Any] = field(default_factory=list)
    captured: bool = False
    disabled_level: int = 0
    levels: dict[str, int] = field(default_factory=dict)
    handlers: dict[str, list[StreamSettings]] = field(default_factory=dict)
    apart: set[str] = field(default_factory=set)
    replaced: list[str] = field(default_factory=list)

    def plain(self) -> Settings:
        """The same without what may not travel: formatters and filters of handlers, and warnings of the notebook's own."""
        handlers = {name: [StreamSettings(h.stream, h.level) for h in made] for name, made in self.handlers.items()}
        filters = [f for f in self.filters if isinstance(f[2], LibraryCategory) or f[2].__module__ != "__main__"]
        return replace(self, handlers=handlers, filters=filters)


class NotebookSettings:
    """Watches this process's settings, for one set of ranks.

    To look at all loggers takes a tenth or more of what a run of nothing does; so it first asks whether anything
    changed.
    """

    def __init__(self) -> None:
        self._filters: list[Any] | None = None
        self._watched: list[tuple[logging.Logger, Any]] = []
        self._loggers = -1

    def news(self) -> Settings | None:
        """The settings, if they may have changed since this was asked last."""
        root = logging.getLogger()
        seen = getattr(root, "_cache", {})  # logging empties it when any level is set
        if (
            self._filters == warnings.filters
            and self._loggers == len(root.manager.loggerDict)
            and id(self) in seen
            and all(_handlers(logger) == handlers for logger, handlers in self._watched)
        ):
            return None
        self._filters, self._loggers = list(warnings.filters), len(root.manager.loggerDict)
        filters = [(*f[:2], LibraryCategory.instead_of(f[2]), *f[3:]) for f in self._filters]
        settings = Settings(filters, warnings.showwarning.__module__ == "logging", root.manager.disable)
        seen[id(self)] = True
        self._watched = []
        for logger in [root, *(x for x in root.manager.loggerDict.values() if isinstance(x, logging.Logger))]:
            name = "" if logger is root else logger.name
            if logger.level:
                settings.levels[name] = logger.level
            if not _is_students(name):
                continue
            self._watched.append((logger, _handlers(logger)))
            if not logger.propagate:
                settings.apart.add(name)
            handlers = [h for h in logger.handlers if not isinstance(h, logging.NullHandler)]
            settings.replaced += [repr(h) for h in handlers if _stream(h) is None]
            made = [StreamSettings(_stream(h) or "stderr", h.level, h.formatter, tuple(h.filters)) for h in handlers]
            if any(_stream(h) for h in handlers):  # then a message need not be written twice
                made = [m for m, h in zip(made, handlers, strict=True) if _stream(h)]
            if made:
                settings.handlers[name] = made[:1] if not any(_stream(h) for h in handlers) else made
        return settings


class AppliedSettings:
    """Takes the notebook's settings over, in a rank."""

    def __init__(self) -> None:
        self._own_filters = list(warnings.filters)
        self._own_level = logging.getLogger().level
        self._handlers: list[tuple[logging.Logger, logging.Handler]] = []
        self._levels: set[str] = set()

    def apply(self, settings: Settings) -> None:
        """In the place of what was applied before."""
        filters = []
        for action, message, category, module, line in settings.filters:
            known = category.found() if isinstance(category, LibraryCategory) else category
            if known is not None:
                filters.append((action, message, known, module, line))
        warnings.filters[:] = filters + [f for f in self._own_filters if f not in filters]  # type: ignore[index]
        warnings.simplefilter("default", append=True)  # what Python does anyway; and it hears of the change
        if logging.root.manager.disable != settings.disabled_level:  # each change has `logging` go through all loggers
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
        for name in settings.apart:
            logging.getLogger(name).propagate = False
        for name, handlers in settings.handlers.items():
            logger = logging.getLogger(name)
            for made in () if logger.handlers else handlers:  # a library's own logger has its handlers here as well
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
    """Which of the standard streams a handler writes to; None: neither, or in a way of its own."""
    if type(handler) is not logging.StreamHandler:
        return None
    stream = handler.stream
    if stream in (sys.stdout, sys.__stdout__):
        return "stdout"
    named = getattr(stream, "name", "")
    return "stderr" if stream in (sys.stderr, sys.__stderr__) or named in ("stderr", "<stderr>") else None


def _is_students(name: str) -> bool:
    """Whether a logger is the student's, and not one of a library, which sets it up in the ranks as well."""
    top = name.partition(".")[0]
    if top in OTHERS_OWN:
        return False
    if top not in sys.modules or top == "__main__":
        return True
    file = getattr(sys.modules[top], "__file__", None)
    return file is not None and is_students(file)
