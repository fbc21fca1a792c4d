"""The arguments of a group and of its calls: read, and checked, before any process starts or does something."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import numbers
import operator
import os
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NoReturn

from labkit.costs.link import Link
from labkit.costs.network import Network
from labkit.errors.exceptions import LabError, missing
from labkit.errors.lists import listed
from labkit.errors.wrong_calls import WrongNameError
from labkit.ipc.code_names import name_of
from labkit.ipc.options import Options
from labkit.launch.capacity import check_capacity, processes_visible
from labkit.recording.cores import usable_cores
from labkit.worker.runtimes.base import Runtime
from labkit.worker.runtimes.devices import gpu_count
from labkit.worker.runtimes.registry import RUNTIMES

MAX_RANKS: Final = 1024


class FixedArgument:
    """A read-only attribute of a group, such as `group.timeout_s`: setting it later would have no effect."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, group: Any, owner: type | None = None) -> Any:
        return self if group is None else getattr(group._options, self._name)

    def __set__(self, group: Any, value: Any) -> NoReturn:
        raise WrongNameError(
            f"group.{self._name} = {reprlib.repr(value)}: the options of a group cannot be changed; "
            f"create another one: lab.Group({len(group)}, {self._name}=...)"
        )


def runtime_named(name: Any) -> type[Runtime]:
    """The class of a runtime."""
    if not isinstance(name, str) or name not in RUNTIMES:
        raise ValueError(f"runtime={name!r}: expected one of {', '.join(map(repr, RUNTIMES))}")
    return RUNTIMES[name]


def machines_or_link(
    on: Any, link: Link | Network | None, ranks: int, kind: type[Runtime]
) -> tuple[Any, Link | Network | None, str]:
    """The machines and the link of a group, and a line if they are not those that were asked for."""
    from labkit.launch.machines.engines import Engine

    if not isinstance(on, Engine):
        raise TypeError(f"on={on!r}: expected machines, as in on=lab.SSH('pc1', 'pc2')")
    on.check(ranks)
    if link is not None:
        raise ValueError(f"link={link!r}: links are emulated only between ranks of this machine; on={on} has real ones")
    if (instead := on.instead()) is None:
        return on, None, ""
    network, why = instead
    if not kind.emulates_links:
        return None, None, f"{why}. The ranks run on this machine"
    return None, network, f"{why}. The ranks run on this machine, over {network}"


def default_threads(ranks: int) -> int:
    """The cores of this machine that this process may use, divided among the ranks."""
    return int(max(1, usable_cores() // ranks))


def check_environment() -> None:
    """Raise LabError if this process is a rank, or if labkit does not support this system."""
    if "LABKIT_RANK" in os.environ:
        raise LabError("this code runs inside a rank, and ranks cannot create groups; create the group in the notebook")
    if os.name != "posix":
        raise LabError("labkit starts ranks on Linux and macOS; on Windows, install it in WSL2 and open the notebooks from there")
    if not processes_visible():
        raise LabError("the file system /proc is not mounted here, and labkit cannot find its processes without it")


def names_and_jobs(
    ranks: int | Sequence[str] | Mapping[str, int], kind: type[Runtime]
) -> tuple[tuple[str, ...], tuple[tuple[str, int], ...]]:
    """The names of the ranks, and TensorFlow's job and task of each."""
    if isinstance(ranks, Mapping):
        jobs = _jobs(ranks, kind)
        names = tuple(job if ranks[job] == 1 else f"{job}{task}" for job, task in jobs)
    elif isinstance(ranks, numbers.Integral) and not isinstance(ranks, bool):
        _check_count(int(ranks), f"Group({ranks})")
        names = tuple(kind.rank_name.format(i) for i in range(int(ranks)))
        jobs = tuple(("worker", i) for i in range(len(names)))
    elif isinstance(ranks, (list, tuple)):
        names = tuple(ranks)
        jobs = tuple(("worker", i) for i in range(len(names)))
    else:
        raise TypeError(f"Group({ranks!r}): expected a number of ranks, a list of names, or TensorFlow's jobs as a dict")
    for name in names:
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"Group({ranks!r}): {name!r} is not a valid name; expected non-empty strings")
        if kind.valid_name is not None and not kind.valid_name.fullmatch(name):
            raise ValueError(f"Group({ranks!r}): {kind.name_error.format(name)}")
    duplicates = sorted({n for n in names if names.count(n) > 1})
    if duplicates:
        raise ValueError(f"Group({ranks!r}): duplicate rank name {duplicates[0]!r}; every rank needs a name of its own")
    _check_count(len(names), f"Group({ranks!r})")
    return names, jobs


def _jobs(ranks: Mapping[str, int], kind: type[Runtime]) -> tuple[tuple[str, int], ...]:
    if not kind.has_jobs:
        raise ValueError(f"Group({ranks!r}): a dict of jobs is for {_those('has_jobs')}; give a number or a list of names")
    for job, count in ranks.items():
        if not isinstance(job, str) or not isinstance(count, numbers.Integral) or isinstance(count, bool) or int(count) < 1:
            raise ValueError(f"Group({{{job!r}: {count!r}}}): expected a job's name and a number of tasks of at least 1")
    return tuple((job, task) for job, count in ranks.items() for task in range(count))


def _those(ability: str) -> str:
    """The runtimes that have an ability, an attribute of `Runtime`, as a group is asked for them."""
    return f"runtime={listed((repr(name) for name, kind in RUNTIMES.items() if getattr(kind, ability)), word='or')}"


def _check_count(count: int, given: str) -> None:
    if not 1 <= count <= MAX_RANKS:
        raise ValueError(f"{given}: expected between 1 and {MAX_RANKS} ranks")


def check_runtime(options: Options, kind: type[Runtime]) -> None:
    """Raise ValueError if the runtime lacks what the options ask for."""
    if options.devices_per_rank != 1 and not kind.has_logical_devices:
        raise ValueError(
            f"devices_per_rank is for {_those('has_logical_devices')}; in torch, lab.devices(n) gives a rank's devices"
        )
    if options.link is not None and not kind.emulates_links:
        raise ValueError(
            f"link={options.link}: labkit emulates links for torch only; expected {_those('emulates_links')}, "
            f"given {options.runtime!r}"
        )


def check_machine(options: Options, kind: type[Runtime]) -> None:
    """Raise LabError if this machine or installation lacks what a group needs."""
    count = len(options.names)
    if kind.package and importlib.util.find_spec(kind.package) is None:
        raise missing(kind.package, kind.extra)
    if options.devices == "cuda" and not gpu_count():
        raise LabError("devices='cuda': this machine has no visible GPU. Leave `devices` out to run on the CPU.")
    if options.start == "fork" and sys.platform != "linux":
        raise LabError("start='fork' needs Linux; elsewhere a forked process may hang in a system library. Use start='spawn'.")
    check_capacity(count, kind.rank_bytes)


def chosen(names: Sequence[str], which: int | str | slice | Iterable[int | str]) -> list[int]:
    """The numbers of the selected ranks in ascending order, given as for `Group.__getitem__`."""
    if isinstance(which, slice):
        on = list(range(len(names))[which])
    elif isinstance(which, Iterable) and not isinstance(which, str):
        on = sorted({_number(names, w) for w in which})
    else:
        on = [_number(names, which)]
    if not on:
        raise LabError(f"group[{_shown(which)}] selects no ranks; this group has ranks 0 to {len(names) - 1}")
    return on


def _number(names: Sequence[str], which: int | str) -> int:
    if isinstance(which, str):
        if which in names:
            return names.index(which)
        raise LabError(f"no rank is named {which!r}; this group has {', '.join(map(repr, names))}")
    try:
        number = operator.index(which)
    except TypeError:
        number = None
    if number is None or isinstance(which, bool):
        raise TypeError(f"group[{which!r}]: expected a rank's number or name")
    if -len(names) <= number < len(names):
        return number % len(names)
    raise LabError(f"no rank {number}; this group has ranks 0 to {len(names) - 1}")


def _shown(which: Any) -> str:
    if isinstance(which, slice):
        return ":".join("" if part is None else str(part) for part in (which.start, which.stop, which.step)).removesuffix(":")
    return repr(which)


class WithRank:
    """A function that is called with the rank's number before its arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self.__name__ = name_of(function)

    def __call__(self, *args: Any) -> Any:
        """In a rank: call the function."""
        return self._function(int(os.environ["LABKIT_RANK"]), *args)


def check_spawn(function: Any, args: Any, nprocs: int | None, join: bool, size: int) -> None:
    """Check the arguments of `group.spawn`, which supports less than `mp.spawn`."""
    if not callable(function):
        raise TypeError(f"spawn({function!r}): expected a function, given {type(function).__name__}. Pass f, not f(rank).")
    if not isinstance(args, tuple | list):
        raise TypeError(f"spawn(..., args={args!r}): expected a tuple of arguments; a single one is written args=({args!r},)")
    if nprocs not in (None, size):
        raise ValueError(f"spawn(..., nprocs={nprocs}): this group has {size} ranks; create one with lab.Group({nprocs})")
    if not join:
        raise ValueError("spawn(..., join=False): a group always waits for its ranks; leave join out")


def hint_for_rank(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """A hint for a function that was called without the rank that its first parameter expects; else ""."""
    if isinstance(function, WithRank):
        return ""
    try:
        signature = inspect.signature(function)
        first = next(iter(signature.parameters), "")
        if "rank" not in first:
            return ""
        signature.bind(0, *args, **kwargs)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        name = name_of(function)
        return f"`group.spawn({name}, args=(...))` calls {name}({first}, ...) on each rank with its number, as mp.spawn does."
    return ""
