"""labkit: a laboratory for distributed training inside Jupyter.

Start real processes from a cell, watch what each computes, sends and waits for, and check what you built:

    import labkit as lab
    group = lab.Group(4)
    run = group.watch(train, epochs=3)

Importing it loads neither torch, tensorflow nor matplotlib: each name brings what it needs when it is first used.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from labkit.errors import LabError, RankError
from labkit.wrong_calls import WrongNameError, did_you_mean

if TYPE_CHECKING:
    from labkit import predict
    from labkit.check import check
    from labkit.doctor import doctor
    from labkit.explore import explore
    from labkit.group import Group
    from labkit.link import Link
    from labkit.load import load_trace
    from labkit.measure import measure_link
    from labkit.pictures.memory import memory
    from labkit.plot import breakdown, compare, scaling, timeline, traffic
    from labkit.profile import profile
    from labkit.record import record, span, steps
    from labkit.run import Run
    from labkit.runtimes import devices
    from labkit.schedule import schedule
    from labkit.trace import Span, Trace
    from labkit.track import track_memory

__all__ = [
    "Group", "LabError", "Link", "RankError", "Run", "Span", "Trace", "breakdown", "check", "compare", "devices", "doctor",
    "explore", "load_trace", "measure_link", "memory", "predict", "profile", "record", "scaling", "schedule", "span", "steps",
    "timeline", "track_memory", "traffic",
]  # fmt: skip

_HOMES = {
    "check": ["check"],
    "doctor": ["doctor"],
    "explore": ["explore"],
    "group": ["Group"],
    "link": ["Link"],
    "load": ["load_trace"],
    "measure": ["measure_link"],
    "pictures.memory": ["memory"],
    "plot": ["breakdown", "compare", "scaling", "timeline", "traffic"],
    "predict": [],  # itself
    "profile": ["profile"],
    "record": ["record", "span", "steps"],
    "run": ["Run"],
    "runtimes": ["devices"],
    "schedule": ["schedule"],
    "trace": ["Span", "Trace"],
    "track": ["track_memory"],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names or [module]}


def __getattr__(name: str) -> Any:
    """Bring a public name when it is first used (PEP 562)."""
    if name not in _HOME_OF:
        raise WrongNameError(f"labkit has no {name!r}; {did_you_mean(name, __all__)}")
    value: Any = importlib.import_module(f"labkit.{_HOME_OF[name]}")
    if _HOMES[_HOME_OF[name]]:
        value = getattr(value, name)
    if name == "Group":
        value.picture = _picture
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """A package whose public names win over its files: `record` is both, and importing the file would hide the name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and _HOMES.get(_HOME_OF.get(name, "")):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def _picture() -> Any:
    from labkit.live import Live

    return Live()


def _greet() -> None:
    """In a notebook's kernel: make `%%ranks` known, and begin to import torch in the background, which takes a second.

    In a script that is to be recorded: begin to.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    if shell is None:
        if os.environ.get("LABKIT_TRACE") and not _is_command():
            from labkit import outside

            outside.begin()
        return

    def ranks(line: str, cell: str) -> None:
        from labkit import magic

        __getattr__("Group")
        magic.ranks(line, cell, shell)

    shell.register_magic_function(ranks, "cell", "ranks")
    if hasattr(shell, "kernel"):
        from labkit.notebook import warm_up

        warm_up()


def _is_command() -> bool:
    """Whether Python imports this for `python -m labkit script.py`, which begins when it knows the script's name."""
    given = sys.orig_argv
    return sys.argv[:1] == ["-m"] and ("-m", "labkit") in itertools.pairwise(given)


_greet()
