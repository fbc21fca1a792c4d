"""labkit: a laboratory for distributed training inside Jupyter.

Start real processes from a cell, watch what each one computes, sends and waits for, and check your own solutions:

    import labkit as lab
    group = lab.Group(4)
    run = group.watch(train, epochs=3)

The import loads neither torch nor tensorflow nor matplotlib: each name loads what it needs on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from labkit.errors.exceptions import (
    DeadlockError,
    LabError,
    MismatchError,
    RankError,
    RunError,
    RunTimeoutError,
    Stopped,
)
from labkit.errors.wrong_calls import WrongNameError, did_you_mean
from labkit.notebook.on_import import begin

__version__ = "0.1.0"  # pyproject.toml reads it here

# The public names, with the module that defines each one, and their imports for editors and type checkers.
# `tests/test_house.py` compares the two lists.
_MODULES = {
    "Device": "costs.device",
    "Link": "costs.link",
    "Network": "costs.network",
    "check": "exercises.check",
    "guess": "exercises.guesses",
    "guesses": "exercises.guesses",
    "reveal": "exercises.guesses",
    "profile": "group.profile",
    "Run": "group.run",
    "same_as_serial": "group.same_as_serial",
    "doctor": "notebook.doctor",
    "EmulatedMachines": "machines.emulated",
    "Ray": "machines.ray",
    "SSH": "machines.ssh",
    "Slurm": "machines.slurm",
    "Group": "notebook.watched_group",
    "lessons": "notebook.lessons",
    "reset_lesson": "notebook.lessons",
    "measure_link": "notebook.measure_link",
    "Cluster": "planning.cluster",
    "plan": "planning.plan",
    "Transformer": "planning.workload",
    "breakdown": "plots.breakdown",
    "compare": "plots.breakdown",
    "explain": "replaying.explain",
    "explore": "plots.explore",
    "memory": "plots.memory",
    "memory_mb": "plots.memory",
    "sent_mb": "plots.traffic",
    "predictions": "plots.predictions",
    "scaling": "plots.scaling",
    "timeline": "plots.timeline",
    "traffic": "plots.traffic",
    "what_helps": "plots.what_helps",
    "track_memory": "comm.memory_tracker",
    "record": "recording.record",
    "span": "recording.record",
    "steps": "recording.record",
    "critical_path": "replaying.critical_path",
    "replay": "replaying.replay",
    "simulate": "simulation.simulate",
    "schedule": "tracing.ideal_pipeline",
    "load_trace": "tracing.load",
    "best_of": "tracing.step_times",
    "step_ms": "tracing.step_times",
    "Span": "recording.schema",
    "Trace": "tracing.trace",
    "verdict": "tracing.verdict",
    "device": "worker.runtimes.devices",
    "devices": "worker.runtimes.devices",
    "predict": "predict",  # the module itself
}
if TYPE_CHECKING:
    from labkit import predict as predict
    from labkit.comm.memory_tracker import track_memory as track_memory
    from labkit.costs.device import Device as Device
    from labkit.costs.link import Link as Link
    from labkit.costs.network import Network as Network
    from labkit.exercises.check import check as check
    from labkit.exercises.guesses import guess as guess
    from labkit.exercises.guesses import guesses as guesses
    from labkit.exercises.guesses import reveal as reveal
    from labkit.group.profile import profile as profile
    from labkit.group.run import Run as Run
    from labkit.group.same_as_serial import same_as_serial as same_as_serial
    from labkit.machines.emulated import EmulatedMachines as EmulatedMachines
    from labkit.machines.ray import Ray as Ray
    from labkit.machines.slurm import Slurm as Slurm
    from labkit.machines.ssh import SSH as SSH
    from labkit.notebook.doctor import doctor as doctor
    from labkit.notebook.lessons import lessons as lessons
    from labkit.notebook.lessons import reset_lesson as reset_lesson
    from labkit.notebook.measure_link import measure_link as measure_link
    from labkit.notebook.watched_group import Group as Group
    from labkit.planning.cluster import Cluster as Cluster
    from labkit.planning.plan import plan as plan
    from labkit.planning.workload import Transformer as Transformer
    from labkit.plots.breakdown import breakdown as breakdown
    from labkit.plots.breakdown import compare as compare
    from labkit.plots.explore import explore as explore
    from labkit.plots.memory import memory as memory
    from labkit.plots.memory import memory_mb as memory_mb
    from labkit.plots.predictions import predictions as predictions
    from labkit.plots.scaling import scaling as scaling
    from labkit.plots.timeline import timeline as timeline
    from labkit.plots.traffic import sent_mb as sent_mb
    from labkit.plots.traffic import traffic as traffic
    from labkit.plots.what_helps import what_helps as what_helps
    from labkit.recording.record import record as record
    from labkit.recording.record import span as span
    from labkit.recording.record import steps as steps
    from labkit.recording.schema import Span as Span
    from labkit.replaying.critical_path import critical_path as critical_path
    from labkit.replaying.explain import explain as explain
    from labkit.replaying.replay import replay as replay
    from labkit.simulation.simulate import simulate as simulate
    from labkit.tracing.ideal_pipeline import schedule as schedule
    from labkit.tracing.load import load_trace as load_trace
    from labkit.tracing.step_times import best_of as best_of
    from labkit.tracing.step_times import step_ms as step_ms
    from labkit.tracing.trace import Trace as Trace
    from labkit.tracing.verdict import verdict as verdict
    from labkit.worker.runtimes.devices import device as device
    from labkit.worker.runtimes.devices import devices as devices

__all__ = ["DeadlockError", "LabError", "MismatchError", "RankError", "RunError", "RunTimeoutError", "Stopped"]
__all__.extend(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _MODULES:
        raise WrongNameError(f"labkit has no {name!r}; {did_you_mean(name, __all__)}")
    value: Any = importlib.import_module(f"labkit.{_MODULES[name]}")
    if _MODULES[name] != name:
        value = getattr(value, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


begin()
