"""`Group`: real processes that run the functions of a notebook, healed when they fail and gone when it goes."""

from __future__ import annotations

import atexit
import importlib.util
import os
import selectors
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Final

from labkit import wire
from labkit.errors import LabError, RankError, RankFailure, missing
from labkit.output import notebook_shell
from labkit.ring import RING_BYTES
from labkit.run import Flight, Member, Picture, Run
from labkit.runtimes import MIB, RUNTIMES, Seat, gpu_count

if os.name == "posix":
    from labkit.start import ForkStarter, SpawnStarter

__all__ = ["Group", "Ranks", "warm_up"]

START_LIMIT_S: Final = 60.0  # for all ranks to set up; joining a process group takes 0.05 s
CLOSE_LIMIT_S: Final = 0.5  # for a rank to leave its process group by itself, before it is ended
MAX_RANKS: Final = 1024
STARTS: Final = ("fork", "spawn")


class _Notebook:
    """What this process holds for all its groups: the open ones, and the starters, which groups share."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.groups: weakref.WeakSet[Group] = weakref.WeakSet()
        self.starters: dict[tuple[str, str], Any] = {}
        self.lock = threading.Lock()

    def starter(self, runtime: str, start: str) -> Any:
        """The process that starts ranks of a runtime; the first call begins to start it, and does not wait."""
        kind = RUNTIMES[runtime]
        key = (",".join(kind.preload), start)
        with self.lock:
            starter = self.starters.get(key)
            if starter is None or not starter.alive():
                make = ForkStarter if start == "fork" else SpawnStarter
                starter = self.starters[key] = make(kind.preload, kind.environment, RING_BYTES, wire.shared_memory)
        return starter

    def close(self) -> None:
        """At exit: nothing is left."""
        if os.getpid() != self.pid:
            return  # a fork of the notebook's process owns nothing
        for group in list(self.groups):
            group.close()
        for starter in self.starters.values():
            starter.close()
        self.starters.clear()


_notebook = _Notebook()
atexit.register(_notebook.close)


def warm_up(runtime: str = "torch") -> None:
    """Begin to import a runtime's framework in the background, so that the first group is there at once. Returns immediately."""
    if os.name == "posix" and "LABKIT_RANK" not in os.environ and importlib.util.find_spec(RUNTIMES[runtime].package or "sys"):
        start = default_start()
        starter = _notebook.starter(runtime, start)
        if start == "spawn":
            starter.warm(min(4, os.cpu_count() or 1))


def default_start() -> str:
    """"fork" on Linux, where a server can fork safely; "spawn" elsewhere. LABKIT_START chooses the other one."""
    chosen = os.environ.get("LABKIT_START") or ("fork" if sys.platform == "linux" else "spawn")
    if chosen not in STARTS:
        raise LabError(f"LABKIT_START={chosen!r}: expected 'fork' or 'spawn'")
    return chosen


class Ranks:
    """Some ranks of a group: `group[0]`, `group["master"]`, `group[1:3]`. The others keep serving while these run.

    Args:
        group: the group they belong to.
        on: their numbers.
    """

    def __init__(self, group: Group, on: Sequence[int]) -> None:
        self._group, self._on = group, tuple(on)

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Run:
        """Call `function(*args, **kwargs)` on these ranks; see `Group.run`."""
        return self._group._run(function, args, kwargs, self._on, None)

    def watch(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Run:
        """The same with the live picture; see `Group.watch`."""
        return self._group._run(function, args, kwargs, self._on, self._group._new_picture())

    def __repr__(self) -> str:
        return f"<{', '.join(self._group.names[i] for i in self._on)} of {self._group!r}>"


class Group:
    """Real processes that run the functions of a notebook.

    Args:
        ranks: how many, or their names, or TensorFlow's jobs and how many tasks each has: `{"chief": 1, "worker": 2, "ps": 1}`.
        runtime: "torch" (`torch.distributed` initialised), "rpc" (`torch.distributed.rpc` initialised, by name), "tensorflow"
            (TF_CONFIG and logical devices set; each run gets fresh processes) or "bare" (processes alone).
        devices: None takes the GPUs there are, else the CPU; "cpu"; "cuda".
        devices_per_rank: logical devices of each TensorFlow rank.
        threads: threads that each rank computes with; default: the cores divided among the ranks, at least 1.
        timeout_s: seconds after which a run is stopped; default: never.
        start: "fork" or "spawn"; default: what is safe on this system.

    The processes start with the first use, stay for the next run, and are replaced when one of them fails. They end with `close`, at
    the end of a `with` block, and when this process ends, however that happens.

    Raises:
        TypeError, ValueError: an argument that cannot be meant.
        LabError: what this machine or this installation lacks.
    """

    picture: ClassVar[Callable[[], Picture] | None] = None  # set by labkit/__init__: this file knows no drawing

    def __init__(
        self,
        ranks: int | Sequence[str] | dict[str, int] = 2,
        *,
        runtime: str = "torch",
        devices: str | None = None,
        devices_per_rank: int = 1,
        threads: int | None = None,
        timeout_s: float | None = None,
        start: str | None = None,
    ) -> None:
        self._members: list[Member] = []  # first: __del__ runs also when a check below fails
        self._closed = False
        _check_place()
        if runtime not in RUNTIMES:
            raise ValueError(f"runtime={runtime!r}: expected one of {', '.join(map(repr, RUNTIMES))}")
        self._kind = RUNTIMES[runtime]
        self.runtime = runtime
        self.names, self._jobs = _names(ranks, runtime)
        if devices not in (None, "cpu", "cuda"):
            raise ValueError(f"devices={devices!r}: expected None (GPUs where there are some), 'cpu' or 'cuda'")
        if devices_per_rank != 1 and runtime != "tensorflow":
            raise ValueError("devices_per_rank is for runtime='tensorflow'; in torch, lab.devices(n) gives a rank's devices")
        for option, value in (("devices_per_rank", devices_per_rank), ("threads", threads), ("timeout_s", timeout_s)):
            if value is not None and not value > 0:
                raise ValueError(f"{option}={value!r}: expected a number above 0")
        if start not in (None, *STARTS):
            raise ValueError(f"start={start!r}: expected 'fork' or 'spawn'")
        if self._kind.package and importlib.util.find_spec(self._kind.package) is None:
            raise missing(self._kind.package, self._kind.extra)
        if devices == "cuda" and not gpu_count():
            raise LabError("devices='cuda': this machine shows no GPU. Leave `devices` out to run on the CPU.")
        _check_memory(len(self.names), self._kind.rank_bytes)
        self._devices, self._devices_per_rank, self._timeout_s = devices or "auto", devices_per_rank, timeout_s
        self._threads = threads or max(1, _cores() // len(self.names))
        self._start = start or default_start()
        if self._start == "fork" and sys.platform != "linux":
            raise LabError("start='fork' needs Linux; elsewhere a forked process may hang in a system library. Use start='spawn'.")
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._starter = _notebook.starter(runtime, self._start)
        self._spent = False
        self._told: set[str] = set()
        self._cell_names: set[str] = set()
        self._owner = os.getpid()
        _notebook.groups.add(self)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<Group of {len(self)} {self.runtime} ranks{state}>"

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise LabError("a group lives in the notebook and cannot be sent to a rank; inside a rank use torch.distributed (or rpc) itself")

    def __del__(self) -> None:
        if self._members and os.getpid() == self._owner:
            self._end(graceful=False)

    def __getitem__(self, which: int | str | slice | Iterable[int | str]) -> Ranks:
        """Some of the ranks, by number, name, slice, or a list of these.

        Raises:
            LabError: the group has no such rank.
        """
        if isinstance(which, slice):
            return Ranks(self, range(len(self))[which])
        wanted = [which] if isinstance(which, (int, str)) else list(which)
        return Ranks(self, sorted({self._number(w) for w in wanted}))

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Run:
        """Call `function(*args, **kwargs)` on every rank and wait for all of them.

        The function, its arguments and everything it refers to are sent by value as they are now: redefining a cell takes effect
        at the next run. What the ranks print appears under the cell while they run.

        Returns:
            a `Run`: results, output and trace.

        Raises:
            RankError: a rank raised or died. The others are stopped; the next run starts fresh ranks.
            LabError: something cannot be sent (the message names it), or `timeout_s` is over.
            KeyboardInterrupt: Stop. The ranks are stopped; the next run starts fresh ones.
        """
        return self._run(function, args, kwargs, range(len(self)), None)

    def watch(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Run:
        """`run` with a picture that grows while the ranks work: what each computes, sends and waits for."""
        return self._run(function, args, kwargs, range(len(self)), self._new_picture())

    def close(self) -> None:
        """End the ranks. A group that is closed stays closed; closing it twice does no harm."""
        if os.getpid() != self._owner:
            return
        self._closed = True
        self._end(graceful=True)
        _notebook.groups.discard(self)

    def _new_picture(self) -> Picture | None:
        make = type(self).picture
        return make() if make is not None else None

    def _number(self, which: int | str) -> int:
        if isinstance(which, str):
            if which in self.names:
                return self.names.index(which)
            raise LabError(f"no rank is called {which!r}; this group has {', '.join(map(repr, self.names))}")
        if not isinstance(which, int) or isinstance(which, bool):
            raise TypeError(f"group[{which!r}]: expected a rank's number or name")
        if -len(self) <= which < len(self):
            return which % len(self)
        raise LabError(f"no rank {which}; this group has ranks 0 to {len(self) - 1}")

    def _run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], on: Sequence[int], picture: Picture | None
    ) -> Run:
        if not callable(function):
            raise TypeError(f"run({function!r}): expected a function, given {type(function).__name__}. Pass f, not f().")
        name = getattr(function, "__name__", type(function).__name__)
        home = sys.modules["__main__"]
        parcel = wire.pack((function, args, kwargs), home=home, what=f"the call of {name}()")
        self._check_arguments_moved(parcel)
        return self._fly("call", lambda files: files, parcel, name, on, picture)

    def run_cell(self, source: str, filename: str, label: str, on: Sequence[int] | None = None) -> Run:
        """Run a cell's source in the ranks' `__main__`, where its names persist; what `%%ranks` does.

        Args:
            source: Python, without magics.
            filename: what tracebacks call it before the label replaces it.
            label: what the student calls it: "cell 5".
            on: numbers of the ranks; default: all.
        """
        home = sys.modules["__main__"]
        needed = {n: home.__dict__[n] for n in _names_read(source, filename) if n in home.__dict__ and n not in self._cell_names}
        parcel = wire.pack(needed, home=home, what="a name used in the cell")
        lines = {filename: (label, source.splitlines(keepends=True))}
        run = self._fly("cell", lambda files: (source, filename, files | lines), parcel, "the cell", on or range(len(self)), None)
        for names in run.results:
            self._cell_names.update(names)
        return run

    def _fly(
        self, kind: str, data: Callable[[dict[str, Any]], Any], parcel: wire.Parcel, name: str, on: Sequence[int], picture: Picture | None
    ) -> Run:
        """Send, wait, and leave the group fit for the next run whatever happens."""
        _check_place()
        if self._closed:
            raise LabError("this group is closed; make a new one with lab.Group(...)")
        if os.getpid() != self._owner:
            raise LabError("this process is a fork of the one that made the group; make a new group here")
        if not self._lock.acquire(blocking=False):
            raise LabError("this group is running already, in another thread; wait for it, or make a second group")
        intact = False
        try:
            if self._spent and kind == "call":
                self._end(graceful=False)
            self._ensure_started()
            limit_s = self._kind.deserted_after_s
            flight = Flight(
                self._members, list(on), name, self._selector, self._bury, picture, show=True, deserted_after_s=limit_s
            )
            files = self._files(parcel.files)
            if self._kind.several_threads:
                self._exchange("install", files, parcel, "installed")
                files = {}
            for rank in on:
                member = self._members[rank]
                try:
                    member.channel.send(kind, data(files), parcel)
                except OSError:
                    pass  # it has just ended; the flight will see that, and say why
            deadline_s = None if self._timeout_s is None else time.monotonic() + self._timeout_s
            try:
                run = flight.wait(deadline_s)
                intact = flight.intact
            except RankError:
                intact = flight.intact
                raise
            if flight.moved:
                self._tell("CUDA tensors in results come back as CPU tensors.")
            return run
        finally:
            parcel.close()
            if not intact:
                self._end(graceful=False)
            self._spent = self._spent or (self._kind.fresh_each_run and kind == "call")
            self._lock.release()

    def _files(self, filenames: Iterable[str]) -> dict[str, tuple[str, list[str]]]:
        """Names, and sources only this process can read, of the student's files: those the ranks do not know yet."""
        found = {}
        known = self._members[0].known_files
        for filename in filenames:
            label = _label(filename)
            if known.get(filename) != label:
                found[filename] = (label, wire.source_of(filename))
                known[filename] = label
        if found and not self._kind.several_threads:
            self._exchange("install", found, wire.pack(None), "installed")
            return {}
        return found

    def _ensure_started(self) -> None:
        if self._members:
            return
        self._spent = False
        self._cell_names.clear()
        if not self._starter.alive():
            self._starter = _notebook.starter(self.runtime, self._start)
        processes = self._starter.start(len(self))
        for rank, (name, process) in enumerate(zip(self.names, processes, strict=True)):
            member = Member(rank, name, process)
            self._members.append(member)
            self._selector.register(member.channel, selectors.EVENT_READ, ("frame", member))
            self._selector.register(process.output, selectors.EVENT_READ, ("output", member))
            if process.sentinel >= 0:
                self._selector.register(process.sentinel, selectors.EVENT_READ, ("end", member))
        for member in self._members:
            member.channel.send("seat", self._seat(member.rank))
        offers = self._answers("offer")
        for member in self._members:
            member.channel.send("offers", offers)
        for notes in self._answers("ready"):
            for note in notes:
                self._tell(note)

    def _seat(self, rank: int) -> Seat:
        return Seat(
            rank, self.names, self.runtime, self._threads, self._devices, self._devices_per_rank, self._jobs, tuple(sys.path), os.getcwd()
        )

    def _exchange(self, kind: str, data: Any, parcel: wire.Parcel, expected: str) -> None:
        for member in self._members:
            member.channel.send(kind, data, parcel)
        self._answers(expected)

    def _answers(self, expected: str) -> list[Any]:
        """One frame from every rank, outside a run."""
        answers: dict[int, Any] = {}
        until = time.monotonic() + START_LIMIT_S
        while len(answers) < len(self._members):
            events = self._selector.select(max(0.0, until - time.monotonic()))
            if not events:
                late = [m.name for m in self._members if m.rank not in answers]
                raise LabError(f"{', '.join(late)} did not answer within {START_LIMIT_S:.0f} s while the group was starting")
            for key, _ in events:
                what, member = key.data
                if what == "output":
                    continue  # stays in the pipe for the run
                try:
                    frame = member.channel.receive()
                except (EOFError, OSError):
                    from labkit.run import explain_exit

                    raise RankError([RankFailure(member.rank, member.name, explain_exit(self._bury(member)))]) from None
                if frame.kind == "raised":
                    raise RankError([frame.data])
                assert frame.kind == expected, f"{frame.kind!r} where {expected!r} was expected"
                answers[member.rank] = frame.data
        return [answers[m.rank] for m in self._members]

    def _bury(self, member: Member) -> int:
        code: int = self._starter.end([member.process]).get(member.process.pid, 0)
        return code

    def _end(self, *, graceful: bool) -> None:
        """End the processes; the next run starts fresh ones."""
        members, self._members = self._members, []
        if not members:
            return
        if graceful:
            for member in members:
                try:
                    member.channel.send("close")
                except OSError:
                    continue
            self._await_end(members)
        for member in members:
            for thing in (member.channel, member.process.output, member.process.sentinel):
                try:
                    self._selector.unregister(thing)
                except (KeyError, ValueError):
                    continue  # never registered, or unregistered at its end
        self._starter.end([m.process for m in members])
        for member in members:
            member.close()
        if self._start == "spawn" and not self._closed:
            self._starter.warm(len(self))

    def _await_end(self, members: Sequence[Member]) -> None:
        left = {m.rank for m in members}
        until = time.monotonic() + CLOSE_LIMIT_S
        while left and time.monotonic() < until:
            for key, _ in self._selector.select(max(0.0, until - time.monotonic())):
                what, member = key.data
                if what == "output" and not os.read(member.process.output, 1 << 16):
                    self._selector.unregister(member.process.output)
                elif what != "output":
                    left.discard(member.rank)
                    self._selector.unregister(key.fileobj)

    def _check_arguments_moved(self, parcel: wire.Parcel) -> None:
        if parcel.moved:
            self._tell("CUDA tensors in arguments reach the ranks as CPU tensors.")

    def _tell(self, note: str) -> None:
        """Say something once in the life of the group."""
        if note not in self._told:
            self._told.add(note)
            print(f"labkit: {note}")


def _check_place() -> None:
    if "LABKIT_RANK" in os.environ:
        raise LabError("this code runs inside a rank, and ranks cannot have groups of their own; make the group in the notebook")
    if os.name != "posix":
        raise LabError("labkit starts ranks on Linux and macOS; on Windows, install it in WSL2 and open the notebooks from there")


def _names(ranks: int | Sequence[str] | dict[str, int], runtime: str) -> tuple[tuple[str, ...], tuple[tuple[str, int], ...]]:
    """The names of the ranks, and TensorFlow's job and task of each."""
    if isinstance(ranks, bool) or not isinstance(ranks, (int, dict, list, tuple)):
        raise TypeError(f"Group({ranks!r}): expected a number of ranks, a list of names, or TensorFlow's jobs as a dict")
    if isinstance(ranks, dict):
        if runtime != "tensorflow":
            raise ValueError("Group({...}): a dict of jobs is for runtime='tensorflow'; give a number or a list of names")
        for job, count in ranks.items():
            if not isinstance(job, str) or not isinstance(count, int) or count < 1:
                raise ValueError(f"Group({{{job!r}: {count!r}}}): expected a job's name and a number of tasks of at least 1")
        jobs = tuple((job, task) for job, count in ranks.items() for task in range(count))
        names = tuple(job if ranks[job] == 1 else f"{job}{task}" for job, task in jobs)
    elif isinstance(ranks, int):
        if not 1 <= ranks <= MAX_RANKS:
            raise ValueError(f"Group({ranks}): expected between 1 and {MAX_RANKS} ranks")
        names = tuple(f"rank {i}" for i in range(ranks))
        jobs = tuple(("worker", i) for i in range(ranks))
    else:
        names = tuple(ranks)
        for name in names:
            if not isinstance(name, str) or not name.strip():
                raise ValueError(f"Group({list(ranks)!r}): {name!r} is no name; expected non-empty strings")
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ValueError(f"Group({list(ranks)!r}): {twice[0]!r} stands there twice; every rank needs a name of its own")
        jobs = tuple(("worker", i) for i in range(len(names)))
    if not names:
        raise ValueError(f"Group({ranks!r}): expected at least one rank")
    return names, jobs


def _check_memory(count: int, rank_bytes: int) -> None:
    import psutil

    available, needed = psutil.virtual_memory().available, count * rank_bytes
    if needed > available:
        raise LabError(
            f"{count} ranks need at least {needed / MIB:,.0f} MiB of memory ({rank_bytes / MIB:.0f} MiB each), and {available / MIB:,.0f} MiB"
            f" are free. Use at most {max(1, available // rank_bytes)} ranks, or close other groups and notebooks."
        )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _label(filename: str) -> str:
    """What the student calls a file: "cell 5" for a cell of this notebook, else the base name."""
    shell = notebook_shell()
    number = getattr(shell.compile, "_filename_map", {}).get(filename) if shell is not None else None
    return f"cell {number}" if number is not None else os.path.basename(filename)


def _names_read(source: str, filename: str) -> set[str]:
    """The global names that a cell reads."""
    found: set[str] = set()
    codes: list[types.CodeType] = [compile(source, filename, "exec")]
    while codes:
        code = codes.pop()
        found.update(code.co_names)
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return found
