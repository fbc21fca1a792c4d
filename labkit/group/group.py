"""`Group`: real processes that run the functions of a notebook, healed when they fail and gone when it goes."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, Self

from labkit.costs.link import Link
from labkit.errors.exceptions import LabError, RankError, Stopped
from labkit.errors.lists import counted
from labkit.errors.wrong_calls import public_api
from labkit.group import stack_dump
from labkit.group.cell_names import CellNames, lost_names
from labkit.group.open_groups import notebook
from labkit.group.options import FixedArgument, Plan, check_place, chosen
from labkit.group.output import cell_label, put
from labkit.group.picture import Picture
from labkit.group.processes import RankPool
from labkit.group.profiling import Profiling
from labkit.group.rank_selection import Ranks
from labkit.group.run import Execution, Run
from labkit.group.spawn import WithRank, check_spawn, hint_for_rank
from labkit.group.unfinished import still_unfinished
from labkit.ipc import pickling
from labkit.ipc.code_names import assigned, mentions, name_of, reads
from labkit.ipc.definitions import Sent
from labkit.ipc.pickling_errors import Call, Names
from labkit.ipc.ranks_cell import parse

__all__ = ["Group"]

Files = dict[str, tuple[str, list[str]]]  # a file's name for the student, and its lines where only the notebook can read it


class Group:
    """Real processes that run the functions of a notebook.

    Args:
        ranks: how many, or their names, or TensorFlow's jobs and how many tasks each has: `{"chief": 1, "worker": 2, "ps": 1}`.
        runtime: "torch" (`torch.distributed` initialised), "rpc" (`torch.distributed.rpc` initialised, by name), "tensorflow"
            (TF_CONFIG and logical devices set; each run gets fresh processes, and `%%ranks` cells share theirs until then) or
            "bare" (processes alone).
        devices: None takes the GPUs there are, else the CPU; "cpu"; "cuda".
        devices_per_rank: logical devices of each TensorFlow rank.
        threads: threads that each rank computes with; default: the cores divided among the ranks, at least 1.
        timeout_s: seconds after which a run is stopped; default: never.
        start: "fork" or "spawn"; default: what is safe on this system.
        link: the `labkit.Link` over which what they send shall seem to go (never faster than it goes here); torch and RPC only.
        rpc_backend_options: torch's `TensorPipeRpcBackendOptions`, or a dict of its `num_worker_threads` and `rpc_timeout`.

    The processes start with the first use, stay for the next run, and are replaced when one of them fails. They end with `close`,
    at the end of a `with` block, and when this process ends, however that happens.

    Attributes:
        names: of the ranks, in rank order.
        runtime, devices, threads, timeout_s, link: as it was made.
        last_run: the `Run` of the last function or `%%ranks` cell that came to its end, with its results; None before that.

    Raises:
        TypeError, ValueError: an invalid argument.
        LabError: what this machine or this installation lacks.
    """

    picture: ClassVar[Callable[[], Picture] | None] = None  # who shows a run that is watched; this package knows no drawing
    runtime, devices, threads, timeout_s, link = (FixedArgument() for _ in range(5))

    @public_api
    def __init__(
        self,
        ranks: int | Sequence[str] | Mapping[str, int] = 2,
        *,
        runtime: str = "torch",
        devices: str | None = None,
        devices_per_rank: int = 1,
        threads: int | None = None,
        timeout_s: float | None = None,
        start: str | None = None,
        link: Link | None = None,
        rpc_backend_options: Any = None,
    ) -> None:
        check_place()
        self._plan = Plan.of(
            ranks, runtime=runtime, devices=devices, devices_per_rank=devices_per_rank, threads=threads, timeout_s=timeout_s,
            start=start, link=link, rpc_backend_options=rpc_backend_options,
        )  # fmt: skip
        self.names = self._plan.names
        self._pool: RankPool | None = None
        self._fit = False  # whether the processes may serve another run
        self._closed = False
        self._unheld: weakref.finalize[..., Group] | None = None
        self._turn = threading.Lock()  # held for the moment in which `_holder` is looked at and taken
        self._holder: object | None = None  # the run that is under way, or `close`
        self._told: set[str] = set()
        self._sent = Sent()
        self.last_run: Run | None = None
        self.profiling = Profiling()
        self._owner = os.getpid()
        notebook.starter(runtime, self._plan.start)  # begins to import the framework
        notebook.groups.add(self)

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[Ranks]:
        """Each of the ranks alone, in rank order."""
        return (Ranks(self, [rank]) for rank in range(len(self)))

    def __contains__(self, which: object) -> bool:
        """Whether it has a rank of this number or name, or these ranks."""
        return which.group is self if isinstance(which, Ranks) else which in range(len(self)) or which in self.names

    def __repr__(self) -> str:
        over = f" over {self._plan.link}" if self._plan.link is not None else ""
        state = ", closed" if self._closed else ""
        return f"<Group of {counted(len(self), f'{self.runtime} rank')}{over}{state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise LabError(
            "a group lives in the notebook and cannot be sent to a rank; inside a rank use torch.distributed (or rpc) itself"
        )

    @public_api
    def __getitem__(self, which: int | str | slice | Iterable[int | str]) -> Ranks:
        """Some of the ranks, by number, name, slice, or a list of these.

        Raises:
            LabError: the group has no such rank.
        """
        return Ranks(self, chosen(self.names, which))

    @public_api
    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Run:
        """Call `function(*args, **kwargs)` on every rank and wait for all of them.

        The function, its arguments and everything it refers to are sent by value as they are now: redefining a cell takes effect
        at the next run. Modules are not: a rank imports one by its name, and once; one that was edited since is named. Changes of
        the notebook's working folder, `sys.path` and `os.environ` reach the ranks with the next run, but for variables such as
        RANK, which are theirs. What the ranks print appears under the cell while they run.

        Returns:
            a `Run`: results, output and trace.

        Raises:
            RankError: a rank raised or died. The others are stopped; the next run starts fresh ranks.
            LabError: something cannot be sent (the message names it), `timeout_s` is over, or ranks would wait for ever.
            KeyboardInterrupt: Stop. The ranks are stopped; the next run starts fresh ones.
        """
        return self._run(function, args, kwargs, range(len(self)), watch=False)

    @public_api
    def watch(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Run:
        """`run` with a picture that grows while the ranks work: what each computes, sends and waits for."""
        return self._run(function, args, kwargs, range(len(self)), watch=True)

    @public_api
    def spawn(
        self, function: Callable[..., Any], args: Sequence[Any] = (), nprocs: int | None = None, join: bool = True, **_: Any
    ) -> Run:
        """Call `function(rank, *args)` on every rank, as `torch.multiprocessing.spawn` does, whose other arguments may stay."""
        check_spawn(function, args, nprocs, join, len(self))
        return self._run(WithRank(function), tuple(args), {}, range(len(self)), watch=False)

    @public_api
    def run_cell(self, source: str, filename: str, label: str, on: Sequence[int] | None = None, *, watch: bool = False) -> Run:
        """Run a cell's source in the ranks' `__main__`, where its names persist; what `%%ranks` does.

        A name of the notebook that the cell reads travels along, if it was assigned there after it last travelled, and after the
        ranks last assigned it themselves: the latest assignment counts, wherever it was made.

        Args:
            source: Python, without magics.
            filename: what tracebacks call it before the label replaces it.
            label: what the student calls it: "cell 5".
            on: numbers of the ranks; default: all.
            watch: whether to show the live picture.

        Raises:
            CellSyntaxError: the cell is no Python.
            RankError, LabError, KeyboardInterrupt: as for `run`; also `LabError` for magics, and for what needs a function.
        """
        on = chosen(self.names, on) if on is not None else range(len(self))
        home = sys.modules["__main__"]
        with warnings.catch_warnings(action="ignore"):  # of the syntax: the ranks will say it
            tree = parse(source, filename, label)
            read = reads(tree, filename, home.__dict__)
            written = assigned(compile(tree, filename, "exec", dont_inherit=True))
        self._check()
        there = self._pool.members if self._pool is not None and self._fit else []
        names = CellNames(home.__dict__, read, written, label, [there[i] for i in on] if there else [])
        payload = pickling.pack(Names(names.due), home=home, sent=self._sent, label="the notebook's names")
        lines: Files = {filename: (label, source.splitlines(keepends=True))}

        def data(rank: int, files: Files) -> Any:
            assert self._pool is not None
            return source, filename, names.send_to(self._pool.members[rank]), files | lines

        try:
            starts_rpc = self._plan.kind.has_rpc and "init_rpc" in source
            return self._fly("cell", payload, "the cell", on, data, watch=watch, starts_rpc=starts_rpc)
        finally:
            payload.close()
            names.learn(self._pool.members if self._pool is not None else ())

    @public_api
    def stacks(self) -> stack_dump.Stacks:
        """Where every rank is at this moment, as Python stacks cut to the student's frames; also of one that is blocked in C++.

        While a run is under way, call it from another thread: `threading.Timer(5, lambda: print(group.stacks())).start()`.

        Returns:
            by the name of each rank its stacks; printed, a report.

        Raises:
            LabError: the group has no ranks: none has been started yet, or it is closed.
        """
        pool = self._pool
        if pool is None:
            raise LabError("this group has no ranks at this moment: they start with the first run")
        living = {m.name: m.process for m in pool.members if m.process.memory >= 0}
        texts = zip(living.items(), stack_dump.ask(living.values()), strict=True)
        return stack_dump.Stacks({name: stack_dump.readable(text, process.pid) for (name, process), text in texts})

    def close(self) -> None:
        """End the ranks. A group that is closed stays closed; closing it twice does no harm."""
        if os.getpid() != self._owner:
            return
        self._closed = True
        notebook.groups.discard(self)
        me = object()
        try:
            if self._takes_turn(me):
                self._end(graceful=True)
            elif (pool := self._pool) is not None:
                pool.kill()  # a run is under way in another thread: it will see that, and tidy up
        finally:
            if self._holder is me:
                self._holder = None

    def _run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], on: Sequence[int], *, watch: bool
    ) -> Run:
        if not callable(function):
            raise TypeError(f"run({function!r}): expected a function, given {type(function).__name__}. Pass f, not f().")
        self._check()
        name = name_of(function)
        payload = pickling.pack(Call(function, args, kwargs), home=sys.modules["__main__"], sent=self._sent, label=f"{name}()")
        try:
            starts_rpc = self._plan.kind.has_rpc and mentions("init_rpc", function, payload.data)
            return self._fly("call", payload, name, on, lambda _, files: files, watch=watch, starts_rpc=starts_rpc)
        except RankError as error:
            error.hint = error.hint or hint_for_rank(function, args, kwargs)
            raise
        finally:
            payload.close()

    def _check(self) -> None:
        check_place()
        if self._closed:
            raise LabError("this group is closed; make a new one with lab.Group(...)")
        if os.getpid() != self._owner:
            raise LabError("this process is a fork of the one that made the group; make a new group here")

    def _fly(
        self,
        kind: str,
        payload: pickling.Payload,
        name: str,
        on: Sequence[int],
        data: Callable[[int, Files], Any],
        *,
        watch: bool,
        starts_rpc: bool,
    ) -> Run:
        """Send, wait, and leave the group fit for the next run whatever happens."""
        me = object()
        try:
            if not self._takes_turn(me):
                raise LabError("this group is running already, in another thread; wait for it, close it, or make a second group")
            make_picture = type(self).picture if watch else None
            picture = make_picture() if make_picture is not None else None
            if payload.copied_from_gpu:
                self._tell("CUDA tensors in arguments reach the ranks as CPU tensors.")
            pool = self._usable_pool(kind, starts_rpc)
            home = sys.modules["__main__"]
            for note in pool.follow():
                self._tell(note)
            pool.used, self._fit = True, False  # not fit until this run is known to have left nothing half done
            for note in pool.share_settings(lambda settings: pickling.pack(settings, home=home, sent=self._sent)):
                self._tell(note)
            files = self._new_files(pool, payload)
            if self._plan.kind.serving_threads:
                pool.exchange("install", files, payload, "installed")
                files = {}
            if self.profiling.on:
                pool.exchange("profile", True, None, "profiled")
            pool.observe(begin=True)
            execution = Execution(pool, on, name, picture, show=True)
            pool.begin(on, kind, lambda rank: data(rank, files), payload)
            deadline_s = None if self._plan.timeout_s is None else time.monotonic() + self._plan.timeout_s
            pool.called |= kind == "call"
            try:
                run = execution.wait(deadline_s)
                run.profiled = pool.exchange("profile", False, None, "profiled") if self.profiling.on else []
            except LabError:
                self._fit = execution.intact and not self.profiling.on
                raise
            self._fit = execution.intact and not (execution.unfinished and kind == "call")
            self.last_run = run
            for note in execution.notes:
                self._tell(note)
            if execution.unfinished is not None and self._fit:
                pool.unfinished = execution.unfinished
                self._tell(execution.unfinished.after_a_cell())
            elif execution.unfinished is not None:
                print(f"labkit: {execution.unfinished.after_a_run()}")
            return run
        except KeyboardInterrupt as stop:  # while the ranks started, say: the frames of that tell the student nothing
            raise (stop if isinstance(stop, Stopped) else Stopped(name, [])) from None
        except RankError:
            if self._closed:
                raise LabError(f"the group was closed in another thread while {name} was running") from None
            raise
        finally:
            try:
                if self._holder is me and not self._fit:
                    self._end(graceful=False)
            except KeyboardInterrupt:  # Stop, while the ranks were ended
                raise Stopped(name, []) from None
            finally:
                if self._holder is me:
                    self._holder = None
            if self._closed:  # by another thread, which left this to us
                self.close()

    def _takes_turn(self, who: object) -> bool:
        """One run at a time. Not a lock held for the run: Stop may come between taking it and the `try` that gives it back."""
        with self._turn:
            if self._holder is None:
                self._holder = who
        return self._holder is who

    def _usable_pool(self, kind: str, starts_rpc: bool) -> RankPool:
        """The processes, fresh ones where there are none that may serve this run."""
        pool = self._pool
        if pool is not None and not (self._fit and pool.may_run(kind, starts_rpc)):
            self._end(graceful=False)
        elif pool is not None and kind == "call" and (left := still_unfinished(pool.unfinished, pool.members)) is not None:
            print(f"labkit: {left.before_a_run()}")
            self._end(graceful=False)
        if self._pool is None:
            pool = RankPool(self._plan, notebook.starter(self.runtime, self._plan.start), self._sent, starts_rpc=starts_rpc)
            self._pool = pool
            self._unheld = weakref.finalize(self, _end_unheld, pool, self._owner)
            self._unheld.atexit = False
            pool.start()
            for note in pool.notes:
                self._tell(note)
        if self._closed:
            raise LabError("the group was closed in another thread while its ranks started")
        return self._pool

    def _new_files(self, pool: RankPool, payload: pickling.Payload) -> Files:
        """The student's files that the payload's functions come from and that the ranks do not know yet; all must learn them."""
        new, known = Files(), pool.members[0].known_files
        for filename in payload.files:
            file = cell_label(filename), pickling.source_of(filename)
            if known.get(filename) != file:
                new[filename] = known[filename] = file
        if new and not self._plan.kind.serving_threads:
            pool.exchange("install", new, pickling.pack(None), "installed")
            return {}
        return new

    def _end(self, *, graceful: bool) -> None:
        """End the processes; the next run starts fresh ones."""
        pool = self._pool
        if pool is None:
            return
        self._fit = False
        if not self._closed and (lost := lost_names(pool.members)):
            put(f"labkit: {lost}\n")
        try:
            pool.end(graceful=graceful)
        finally:
            pool.end(wait=False)  # Stop may have come before that had begun
            self._pool = None
            if self._unheld is not None:
                self._unheld.detach()
        if self._plan.start == "spawn" and not self._closed:
            notebook.starter(self.runtime, "spawn").warm(len(self))

    def _tell(self, note: str) -> None:
        """Say something once in the life of the group."""
        if note not in self._told:
            self._told.add(note)
            put(f"labkit: {note}\n")


def _end_unheld(pool: RankPool, owner: int) -> None:
    """Nobody holds the group any more. The garbage collector runs at any moment, also while this thread starts other ranks."""
    if os.getpid() == owner:
        pool.end(wait=False)
