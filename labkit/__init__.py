"""labkit: a laboratory for distributed training inside Jupyter.

Start real processes from a cell, watch what each computes, sends and waits for, and check what you built:

    import labkit as lab
    group = lab.Group(4)
    run = group.watch(train, epochs=3)

Importing it loads neither torch, tensorflow nor matplotlib: each name brings what it needs when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from labkit.errors.exceptions import LabError, RankError
from labkit.errors.wrong_calls import WrongNameError, did_you_mean
from labkit.notebook.startup import begin

if TYPE_CHECKING:
    from labkit.costs import formulas as predict
    from labkit.costs.link import Link
    from labkit.exercises.check import check
    from labkit.group.profile import profile
    from labkit.group.run import Run
    from labkit.notebook.doctor import doctor
    from labkit.notebook.group import Group
    from labkit.notebook.measure_link import measure_link
    from labkit.plots.explore import explore
    from labkit.plots.figures import breakdown, compare, scaling, timeline, traffic
    from labkit.plots.memory import memory
    from labkit.recording.memory_tracker import track_memory
    from labkit.recording.record import record, span, steps
    from labkit.tracing.ideal_pipeline import schedule
    from labkit.tracing.load import load_trace
    from labkit.tracing.trace import Span, Trace
    from labkit.worker.runtimes.registry import devices

__all__ = [
    "Group", "LabError", "Link", "RankError", "Run", "Span", "Trace", "breakdown", "check", "compare", "devices", "doctor",
    "explore", "load_trace", "measure_link", "memory", "predict", "profile", "record", "scaling", "schedule", "span", "steps",
    "timeline", "track_memory", "traffic",
]  # fmt: skip

_HOMES = {
    "costs.formulas": ["predict"],  # the module itself
    "costs.link": ["Link"],
    "exercises.check": ["check"],
    "group.profile": ["profile"],
    "group.run": ["Run"],
    "notebook.doctor": ["doctor"],
    "notebook.group": ["Group"],
    "notebook.measure_link": ["measure_link"],
    "plots.explore": ["explore"],
    "plots.figures": ["breakdown", "compare", "scaling", "timeline", "traffic"],
    "plots.memory": ["memory"],
    "recording.memory_tracker": ["track_memory"],
    "recording.record": ["record", "span", "steps"],
    "tracing.ideal_pipeline": ["schedule"],
    "tracing.load": ["load_trace"],
    "tracing.trace": ["Span", "Trace"],
    "worker.runtimes.registry": ["devices"],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Bring a public name when it is first used (PEP 562)."""
    if name not in _HOME_OF:
        raise WrongNameError(f"labkit has no {name!r}; {did_you_mean(name, __all__)}")
    value: Any = importlib.import_module(f"labkit.{_HOME_OF[name]}")
    if name != "predict":
        value = getattr(value, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


begin()
