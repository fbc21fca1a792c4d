"""Copies the notebook's settings of `logging` and of warning filters to its ranks.

Loggers have the notebook's levels. Ranks have no other handler than one that prints in the format of the notebook's
root logger.
"""

from __future__ import annotations

import logging
import sys
import warnings
from dataclasses import dataclass, field, replace
from typing import Any, Final

from labkit.recording.record import is_students

# Loggers of Jupyter and torch whose names are not those of packages.
LIBRARY_LOGGERS: Final = (
    "IPKernelApp", "TerminalIPythonApp", "strobelight_function_profiler", "strobelight_compile_time_profiler",
    "c10d-NullHandler-default",
)  # fmt: skip
# TensorFlow sets this level itself where Python is interactive; in ranks, it would print what nobody asked for.
TENSORFLOWS_OWN: Final = ("tensorflow", logging.INFO)


@dataclass(slots=True)
class Settings:
    """The settings of a notebook."""

    filters: list[Any] = field(default_factory=list)  # as in `warnings.filters`, with a `_category_to_send` in each
    captured: bool = False  # whether warnings go to the logger "py.warnings"
    disabled_level: int = 0  # given to `logging.disable`
    levels: dict[str, int] = field(default_factory=dict)  # of loggers, by name; "" is the root logger
    handler: tuple[int, logging.Formatter | None] | None = None  # level and format of the root logger's
    notes: list[str] = field(default_factory=list)  # for the student

    def plain(self) -> Settings:
        """Return a copy without what may fail to pickle: the handler's format, the notebook's own warnings."""
        filters = [f for f in self.filters if not isinstance(f[2], type) or f[2].__module__ != "__main__"]
        return replace(self, filters=filters, handler=self.handler and (self.handler[0], None))


class NotebookSettings:
    """Reads this process's settings, for the ranks of one group."""

    def __init__(self) -> None:
        self._last: Any = None

    def news(self) -> Settings | None:
        """Return the settings if they may have changed since the last call; else None."""
        root = logging.getLogger()
        loggers = list(root.manager.loggerDict.items())
        levels = [("", root.level), *((name, x.level) for name, x in loggers if isinstance(x, logging.Logger) and x.level)]
        handlers = [(h, h.level, h.formatter) for h in root.handlers if not isinstance(h, logging.NullHandler)]
        captured = warnings.showwarning.__module__ == "logging"
        state = list(warnings.filters), levels, handlers, root.manager.disable, captured
        if state == self._last:
            return None
        self._last = state
        settings = Settings(
            [(*f[:2], _category_to_send(f[2]), *f[3:]) for f in warnings.filters],
            captured,
            root.manager.disable,
            {name: level for name, level in levels if level and (name, level) != TENSORFLOWS_OWN},
        )
        printing = [entry for entry in handlers if type(entry[0]) is logging.StreamHandler]
        if handlers:
            settings.handler = (printing or handlers)[0][1:]
        # Without a handler, Python prints warnings and errors only.
        settings.notes = [
            f"the logging handler {h!r} is the notebook's; ranks print their messages instead."
            for h, *_ in handlers
            if type(h) is not logging.StreamHandler
        ] + [
            f"ranks have the level of the logger {name!r}, not its handlers: logging.basicConfig(...) sets the format of ranks."
            for name, x in loggers
            if isinstance(x, logging.Logger) and x.handlers and 0 < x.level < logging.WARNING and _is_students(name)
        ]
        return settings


class AppliedSettings:
    """Applies the notebook's settings in a rank."""

    def __init__(self) -> None:
        self._own_filters = list(warnings.filters)
        self._own_level = logging.getLogger().level
        self._handler: logging.Handler | None = None
        self._levels: set[str] = set()

    def apply(self, settings: Settings) -> None:
        """Apply settings, and undo those applied before."""
        filters = []
        for action, message, sent, module, line in settings.filters:
            # A class of a library that is not imported here is left out: libraries set their own filters on import.
            category = sent if isinstance(sent, type) else getattr(sys.modules.get(sent[0]), sent[1], None)
            if category is not None:
                filters.append((action, message, category, module, line))
        warnings.filters[:] = filters + [f for f in self._own_filters if f not in filters]  # type: ignore[index]
        warnings.simplefilter("default", append=True)  # Python's default; the call invalidates its cache
        logging.disable(settings.disabled_level)
        logging.captureWarnings(settings.captured)
        for name in self._levels - settings.levels.keys():
            logging.getLogger(name).setLevel(logging.NOTSET if name else self._own_level)
        self._levels = set(settings.levels)
        for name, level in settings.levels.items():
            logging.getLogger(name).setLevel(level)
        root = logging.getLogger()
        if self._handler is not None:
            root.removeHandler(self._handler)
            self._handler = None
        if settings.handler is not None and not root.handlers:
            self._handler = logging.StreamHandler()
            self._handler.setLevel(settings.handler[0])
            self._handler.setFormatter(settings.handler[1])
            root.addHandler(self._handler)


def _category_to_send(category: Any) -> Any:
    """Return a library's class as its module and name: sending the class would import the library in each rank."""
    module = category.__module__
    if module.partition(".")[0] in ("builtins", "__main__") or module not in sys.modules or "." in category.__qualname__:
        return category
    return module, category.__name__


def _is_students(name: str) -> bool:
    """Whether a logger is the student's; libraries set up their own in the ranks as well."""
    top = name.partition(".")[0]
    if top in LIBRARY_LOGGERS:
        return False
    if top not in sys.modules or top == "__main__":
        return True
    file = getattr(sys.modules[top], "__file__", None)
    return file is not None and is_students(file)
