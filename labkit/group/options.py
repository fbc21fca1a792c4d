"""The arguments of a group, checked before any process starts."""

from __future__ import annotations

import importlib.util
import numbers
import operator
import os
import reprlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from labkit.costs.link import Link
from labkit.costs.network import Network
from labkit.errors.exceptions import LabError, missing
from labkit.errors.lists import listed
from labkit.errors.units import in_words
from labkit.errors.wrong_calls import WrongNameError
from labkit.group.open_groups import STARTS, default_start
from labkit.launch.fork_server import BATCH
from labkit.launch.open_files import count_open_files, raise_limit
from labkit.launch.usable_cores import usable_cores
from labkit.recording.ring_layout import RING_BYTES
from labkit.worker.runtimes.base import Runtime
from labkit.worker.runtimes.devices import gpu_count
from labkit.worker.runtimes.registry import RUNTIMES

__all__ = ["FixedArgument", "Plan", "check_environment", "chosen"]

MAX_RANKS: Final = 1024
FILES_PER_RANK: Final = 5  # open in this process: socket, output, process, recording memory and its mapping
STARTING_FILES: Final = 3  # more for each rank of a batch that is being started: the other ends
RPC_OPTIONS: Final = (16, 60.0)  # torch's defaults
SHARED_BYTES: Final = 2 * RING_BYTES  # the largest file that a rank without large arguments needs: records and stacks
PROC: Final = "/proc/self/stat"
FILES_TO_SPARE: Final = 64  # for the arguments of a run, and the student


class FixedArgument:
    """A read-only attribute of a group, such as `group.timeout_s`: setting it later would have no effect."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, group: Any, owner: type | None = None) -> Any:
        return self if group is None else getattr(group._plan, self._name)

    def __set__(self, group: Any, value: Any) -> NoReturn:
        raise WrongNameError(
            f"group.{self._name} = {reprlib.repr(value)}: the options of a group cannot be changed; "
            f"create another one: lab.Group({len(group)}, {self._name}=...)"
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """The checked arguments of a group.

    Args:
        names: names of the ranks, in rank order.
        jobs: TensorFlow's job and task number of each rank.
        runtime: one of `RUNTIMES`.
        devices: "auto", "cpu" or "cuda".
        devices_per_rank: logical devices of each TensorFlow rank.
        threads: compute threads per rank.
        timeout_s: time limit of a run; None for no limit.
        start: "fork" or "spawn".
        link: the link or network to emulate between ranks; None for none.
        rpc_options: the number of threads that serve calls in an RPC rank, and the time limit of a call in seconds.
    """

    names: tuple[str, ...]
    jobs: tuple[tuple[str, int], ...]
    runtime: str
    devices: str
    devices_per_rank: int
    threads: int
    timeout_s: float | None
    start: str
    link: Link | Network | None = None
    rpc_options: tuple[int, float] = RPC_OPTIONS

    @property
    def kind(self) -> type[Runtime]:
        """The class of the runtime."""
        return RUNTIMES[self.runtime]

    @property
    def nodes(self) -> tuple[int, ...]:
        """The node of each rank of an emulated network; empty without one."""
        return self.link.nodes_among(len(self.names)) if isinstance(self.link, Network) else ()

    @classmethod
    def of(
        cls,
        ranks: int | Sequence[str] | Mapping[str, int],
        *,
        runtime: str,
        devices: str | None,
        devices_per_rank: int,
        threads: int | None,
        timeout_s: float | None,
        start: str | None,
        link: Link | Network | None = None,
        rpc_backend_options: Any = None,
    ) -> Plan:
        """Check the arguments of `labkit.Group`, which documents them.

        Raises:
            TypeError, ValueError: an invalid argument.
            LabError: this machine or installation lacks what the group needs.
        """
        if not isinstance(runtime, str) or runtime not in RUNTIMES:
            raise ValueError(f"runtime={runtime!r}: expected one of {', '.join(map(repr, RUNTIMES))}")
        kind = RUNTIMES[runtime]
        names, jobs = _names(ranks, kind)
        if devices not in (None, "auto", "cpu", "cuda"):
            raise ValueError(f"devices={devices!r}: expected None or 'auto' (GPUs where there are some), 'cpu' or 'cuda'")
        if devices_per_rank != 1 and not kind.has_logical_devices:
            raise ValueError(
                f"devices_per_rank is for {_those('has_logical_devices')}; in torch, lab.devices(n) gives a rank's devices"
            )
        _check_number("devices_per_rank", devices_per_rank, whole=True)
        _check_number("threads", threads, whole=True)
        _check_number("timeout_s", timeout_s, whole=False)
        if start not in (None, *STARTS):
            raise ValueError(f"start={start!r}: expected 'fork' or 'spawn'")
        link = _checked_link(link, runtime, len(names))
        plan = cls(
            names,
            jobs,
            runtime,
            devices or "auto",
            int(devices_per_rank),
            int(threads or max(1, usable_cores() // len(names))),
            timeout_s,
            start or default_start(),
            link,
            _rpc_options(rpc_backend_options, runtime),
        )
        _check_machine(plan)
        return plan


def check_environment() -> None:
    """Check that this process may create groups.

    Raises:
        LabError: this process is a rank, or labkit does not support this system.
    """
    if "LABKIT_RANK" in os.environ:
        raise LabError("this code runs inside a rank, and ranks cannot create groups; create the group in the notebook")
    if os.name != "posix":
        raise LabError("labkit starts ranks on Linux and macOS; on Windows, install it in WSL2 and open the notebooks from there")
    if sys.platform == "linux" and not os.path.exists(PROC):
        raise LabError("the file system /proc is not mounted here, and labkit cannot find its processes without it")


def _names(
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


def _check_number(option: str, value: Any, *, whole: bool) -> None:
    if value is None:
        return
    if not isinstance(value, numbers.Integral if whole else numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{option}={value!r}: expected a {'whole ' * whole}number above 0")
    if not float(value) > 0:
        raise ValueError(f"{option}={value!r}: expected a {'whole ' * whole}number above 0")


def _checked_link(link: Any, runtime: str, ranks: int) -> Link | Network | None:
    """The link; a network knows the number of ranks."""
    if link is None:
        return None
    if not isinstance(link, (Link, Network)):
        raise TypeError(
            f"link={link!r}: expected a Link, as in link=lab.Link(gbit_per_s=1, latency_us=50) or lab.Link.ethernet_1g, "
            "or a Network, as in link=lab.Network(nodes=2, inside=lab.Link.nvlink4, between=lab.Link.ethernet_10g)"
        )
    if not RUNTIMES[runtime].emulates_links:
        raise ValueError(
            f"link={link}: labkit emulates links for torch only; expected {_those('emulates_links')}, given {runtime!r}"
        )
    if isinstance(link, Link):
        return link
    if link.ranks not in (None, ranks):
        raise ValueError(f"link={link}: this network has {link.ranks} ranks, and the group {ranks}; leave ranks= out of Network")
    return link.of(ranks)


def _rpc_options(given: Any, runtime: str) -> tuple[int, float]:
    """The number of threads that serve calls, and the time limit of a call in seconds."""
    if given is None:
        return RPC_OPTIONS
    if not RUNTIMES[runtime].has_rpc:
        raise ValueError(f"rpc_backend_options is for {_those('has_rpc')}, given {runtime!r}")
    names = ("num_worker_threads", "rpc_timeout")
    options = dict(given) if isinstance(given, Mapping) else {n: getattr(given, n) for n in names if hasattr(given, n)}
    if not options or options.keys() - set(names):
        raise TypeError(
            f"rpc_backend_options={given!r}: expected rpc.TensorPipeRpcBackendOptions(...), or a dict of {' and '.join(names)}"
        )
    if getattr(given, "device_maps", None) or getattr(given, "devices", None):
        raise ValueError("rpc_backend_options: device maps differ by rank; pass them to rpc.init_rpc in the function that runs")
    _check_number("num_worker_threads", options.get("num_worker_threads"), whole=True)
    _check_number("rpc_timeout", options.get("rpc_timeout"), whole=False)
    threads, timeout_s = RPC_OPTIONS
    return int(options.get("num_worker_threads", threads)), float(options.get("rpc_timeout", timeout_s))


def _check_machine(plan: Plan) -> None:
    kind, count = plan.kind, len(plan.names)
    if kind.package and importlib.util.find_spec(kind.package) is None:
        raise missing(kind.package, kind.extra)
    if plan.devices == "cuda" and not gpu_count():
        raise LabError("devices='cuda': this machine has no visible GPU. Leave `devices` out to run on the CPU.")
    if plan.start == "fork" and sys.platform != "linux":
        raise LabError("start='fork' needs Linux; elsewhere a forked process may hang in a system library. Use start='spawn'.")
    _check_memory(count, kind.rank_bytes)
    _check_open_files(count)
    _check_file_size()


def _check_file_size() -> None:
    import resource  # not available on Windows

    largest = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if largest != resource.RLIM_INFINITY and largest < SHARED_BYTES:
        raise LabError(
            f"this process may create no file larger than {in_words(largest, 'iB')} (ulimit -f), and each rank records in "
            f"{in_words(RING_BYTES, 'iB')} of shared memory. Raise the limit before you start JupyterLab."
        )


def _check_memory(count: int, rank_bytes: int) -> None:
    import psutil

    available, needed = psutil.virtual_memory().available, count * rank_bytes
    if needed > available:
        raise LabError(
            f"{count} ranks need at least {in_words(needed, 'iB')} of memory ({in_words(rank_bytes, 'iB')} each), and "
            f"{in_words(available, 'iB')} are available. Use at most {max(1, available // rank_bytes)} ranks, or close other "
            f"groups and notebooks."
        )


def _check_open_files(count: int) -> None:
    spare = FILES_TO_SPARE + count_open_files()

    def files(ranks: int) -> int:
        return ranks * FILES_PER_RANK + min(ranks, BATCH) * STARTING_FILES + spare

    needed = files(count)
    limit = raise_limit(needed)
    if needed > limit:
        most = max((n for n in range(1, count) if files(n) <= limit), default=0)
        first = f"Use at most {most} ranks" if most else "Close some"
        raise LabError(
            f"{count} ranks need about {needed:,} open files, and the hard limit of this process is {limit:,}. "
            f"{first}, or raise the limit (ulimit -Hn {needed}) before you start JupyterLab."
        )


def chosen(names: Sequence[str], which: int | str | slice | Iterable[int | str]) -> list[int]:
    """The numbers of the selected ranks in ascending order.

    Args:
        names: names of all ranks of the group.
        which: a number, a name, a slice, or several numbers and names.

    Raises:
        LabError: the group has no such rank.
        TypeError: `which` has another type.
    """
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
