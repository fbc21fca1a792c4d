"""`Group`: processes that run a notebook's functions, are replaced when they fail, and end with the kernel."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ClassVar, NoReturn, Self

from labkit.costs.link import Link
from labkit.costs.network import Network
from labkit.errors.exceptions import LabError, RankError, RunError, Stopped, wrapped
from labkit.errors.lists import counted
from labkit.errors.wrong_calls import public_api
from labkit.group import arguments
from labkit.group.collector import Picture
from labkit.group.deadlock_words import Stacks, readable
from labkit.group.open_groups import default_start, notebook
from labkit.group.output import cell_label, put
from labkit.group.pool_state import CellNames, Member, Phase, Request, lost_names
from labkit.group.processes import RankPool
from labkit.group.run import Execution, Run
from labkit.ipc import pickling, protocol
from labkit.ipc.code_names import assigned, function_mentions, mentions, name_of, parameters_of, reads
from labkit.ipc.options import Options
from labkit.ipc.pickling import Sent
from labkit.ipc.pickling_errors import Call, Names
from labkit.ipc.protocol import Message
from labkit.ipc.ranks_cell import parse
from labkit.launch.frames import Owner, StackFrame
from labkit.launch.thread_states import Threads
from labkit.worker.runtimes.registry import RUNTIMES


class Group:
    """Processes that run the functions of a notebook.

    Args:
        ranks: the number of ranks, their names, or TensorFlow's jobs with their numbers of tasks:
            `{"chief": 1, "worker": 2, "ps": 1}`.
        runtime: "torch" (`torch.distributed` initialized), "rpc" (`torch.distributed.rpc` initialized, with the ranks'
            names), "tensorflow" (TF_CONFIG and logical devices set; each run has new processes, which later `%%ranks`
            cells share) or "bare" (processes only).
        devices: None or "auto" uses the GPUs if there are any, else the CPU; "cpu" hides GPUs from the ranks; "cuda".
        devices_per_rank: logical devices of each TensorFlow rank.
        threads: compute threads per rank; default: the cores of its machine divided among its ranks, at least 1.
        timeout_s: seconds after which a run is stopped; default: never.
        start: "fork" or "spawn"; default: the method that is safe on this system.
        link: the `labkit.Link` or `Network` to emulate between ranks (never faster than the real one); torch, RPC only.
        on: the machines that run the ranks, such as `labkit.SSH("pc1", "pc2")`; default: this one.
        restarts: how many times one run may replace all ranks, after one of them died or raised an error, and call its
            function again from the start, as `torchrun --max-restarts` does. The variable TORCHELASTIC_RESTART_COUNT
            tells a rank how many times this was. What is to survive, the function must save and load itself. Results,
            steps and figures are those of the last attempt; `lab.timeline` and `run.trace` show all. Deadlocks,
            mismatched operations, Stop, `timeout_s` and `%%ranks` cells never restart.

    The processes start with the first run, are kept for the next, and are replaced when one of them fails. They end
    with `close`, at the end of a `with` block, and when this process ends, however it ends.

    Attributes:
        names: names of the ranks, in rank order.
        on: the machines that run them; None for this one.
        runtime, devices, threads, timeout_s, link, restarts: the constructor's arguments.
        last_run: the `Run` of the last function or `%%ranks` cell that returned; None before that.

    Raises:
        TypeError, ValueError: an invalid argument.
        LabError: this machine or installation lacks what the group needs.
    """

    picture: ClassVar[Callable[[], Picture] | None] = None  # makes the live picture of `watch`; this package draws nothing
    runtime, devices, threads, timeout_s, link, restarts = (arguments.FixedArgument() for _ in range(6))

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
        link: Link | Network | None = None,
        on: Any = None,
        restarts: int = 0,
    ) -> None:
        arguments.check_environment()
        self._kind = arguments.runtime_named(runtime)
        self.names, jobs = arguments.names_and_jobs(ranks, self._kind)
        note = ""
        if on is not None:
            on, link, note = arguments.machines_or_link(on, link, len(self.names), self._kind)
        self._options = Options(
            names=self.names,
            jobs=jobs,
            runtime=runtime,
            devices="auto" if devices is None else devices,
            devices_per_rank=devices_per_rank,
            threads=arguments.default_threads(len(self.names)) if threads is None and on is None else threads,
            timeout_s=timeout_s,
            start=default_start() if start is None else start,
            link=link,
            restarts=restarts,
        )
        arguments.check_runtime(self._options, self._kind)
        if on is None:
            arguments.check_machine(self._options, self._kind)
        self.on = on
        self._pool: RankPool | None = None
        self._closed = False
        self._finalizer: weakref.finalize[..., Group] | None = None
        self._turn = threading.Lock()  # protects `_holder`
        self._holder: object | None = None  # the current run, or `close`
        self._announced: set[str] = set()
        self._machines: set[str] = set()  # on which any ranks of this group have been
        self._returns = 0  # `on.returns` when the current ranks were started
        self._sent = Sent()
        self.last_run: Run | None = None
        self.profiling = False  # whether `lab.profile` records the runs with torch's profiler
        self._owner = os.getpid()
        notebook.starter(runtime, self._options.start, on)  # starts importing the framework where ranks are forked
        notebook.groups.add(self)
        if note:
            self._announce(note)

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[Ranks]:
        return (Ranks(self, [rank]) for rank in range(len(self)))

    def __contains__(self, which: object) -> bool:
        return which.group is self if isinstance(which, Ranks) else which in range(len(self)) or which in self.names

    def __repr__(self) -> str:
        over = f" over {self.link}" if self.link is not None else ""
        state = ", closed" if self._closed else ""
        where = f" on {self.on}" if self.on is not None else ""
        return f"<Group of {counted(len(self), f'{self.runtime} rank')}{where}{over}{state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: object, __: object) -> None:
        self.close()
        if isinstance(error, RankError):
            error.closed = True

    def __reduce__(self) -> NoReturn:
        raise LabError("a group lives in the notebook and cannot be sent to a rank; ranks use torch.distributed or rpc itself")

    @public_api
    def __getitem__(self, which: int | str | slice | Iterable[int | str]) -> Ranks:
        """Select ranks by number, name, slice, or a list of numbers and names.

        Raises:
            LabError: the group has no such rank.
            TypeError: an index of another type.
        """
        return Ranks(self, arguments.chosen(self.names, which))

    @public_api
    def run(self, function: Callable[..., Any], /, *args: Any, check: bool | None = None, **kwargs: Any) -> Run:
        """Call `function(*args, **kwargs)` on every rank and wait for all of them.

        The function, its arguments and everything it refers to are sent by value with each run, so that redefining a
        cell takes effect in the next run. Modules are not sent: a rank imports a module by name, once, and labkit says
        when a module was edited since. Changes of the notebook's working folder, `sys.path` and `os.environ` reach the
        ranks with the next run, except variables such as RANK, which belong to the ranks. The ranks' prints appear
        below the cell while they run.

        Args:
            function: the function.
            *args: its arguments.
            check: whether to compare parameters, gradients and inputs of the ranks, for `labkit.verdict`; torch only.
                It does not reach the function.
            **kwargs: its named arguments.

        Returns:
            a `Run`: results, output and trace.

        Raises:
            RankError: a rank raised, died or blocks the others. They are stopped, and the next run starts new ranks,
                except where all failed alike or none had communicated.
            DeadlockError, MismatchError, RunTimeoutError: the run ended otherwise; each is a `RunError`, too.
            LabError: something cannot be sent (the message names it).
            KeyboardInterrupt: Stop was pressed. The ranks are stopped; the next run starts new ones.
        """
        return self._run(function, args, kwargs, range(len(self)), watch=False, check=check)

    @public_api
    def watch(self, function: Callable[..., Any], /, *args: Any, check: bool | None = None, **kwargs: Any) -> Run:
        """`run` with a live picture of what each rank computes, sends and waits for."""
        return self._run(function, args, kwargs, range(len(self)), watch=True, check=check)

    @public_api
    def spawn(
        self, function: Callable[..., Any], args: Sequence[Any] = (), nprocs: int | None = None, join: bool = True,
        daemon: bool = False, start_method: str = "spawn") -> Run:  # fmt: skip  # noqa: ARG002  # the last two have no effect
        """Call `function(rank, *args)` on every rank, as `mp.spawn` does."""
        arguments.check_spawn(function, args, nprocs, join, len(self))
        return self._run(arguments.WithRank(function), tuple(args), {}, range(len(self)), watch=False)

    @public_api
    def run_cell(
        self, source: str, filename: str, label: str, on: Sequence[int] | None = None, *, watch: bool = False, check: bool = False
    ) -> Run:
        """Run a cell's source in the ranks' `__main__`, where its names persist; this is what `%%ranks` does.

        A notebook's name that the cell reads is sent along if it was assigned there after it was last sent, and after
        the ranks last assigned it themselves: the latest assignment counts, in the notebook or in the ranks.

        Args:
            source: Python source, without magics.
            filename: its name in tracebacks before `label` replaces it.
            label: its name for the student: "cell 5".
            on: numbers of the ranks; default: all.
            watch: whether to show the live picture.
            check: whether to compare the ranks' tensors, as for `run`.

        Raises:
            CellSyntaxError: the cell has a syntax error.
            RankError, LabError, KeyboardInterrupt: as for `run`; also `LabError` for magics.
        """
        self._check_check(check)
        on = arguments.chosen(self.names, on) if on is not None else range(len(self))
        home = sys.modules["__main__"]
        with warnings.catch_warnings(action="ignore"):  # the ranks will show syntax warnings
            tree = parse(source, filename, label)
            code = compile(tree, filename, "exec", dont_inherit=True)
        written = assigned(code)
        self._check()
        pickling.install_source(filename, source.splitlines(keepends=True))
        pool = self._pool
        kept = pool is not None and pool.state.phase is Phase.IDLE and not self._may_regain_machine(pool)
        members = [pool.members[i] for i in on] if pool is not None and kept else []
        names = CellNames(home.__dict__, reads(code, home.__dict__), written, label, members)
        pack = partial(pickling.pack, home=home, sent=self._sent, label="the notebook's names")
        try:
            payload = pack(Names(names.to_send))
        except LabError:
            names.remove_unsendable()
            payload = pack(Names(names.to_send))
        all_called = len(on) == len(self)

        def message(member: Member) -> protocol.RunCell:
            return protocol.RunCell(all_called, check, source, filename, label, names.send_to(member), payload)

        try:
            starts_rpc = self._kind.has_rpc and all_called and mentions("init_rpc", code, home.__dict__)
            request = Request(cell=True, starts_rpc=starts_rpc)
            called = StackFrame(filename, 1, "<module>", Owner.STUDENT)
            return self._execute(request, payload, "the cell", on, message, called, watch=watch)
        finally:
            payload.close()
            names.learn(self._pool.members if self._pool is not None else ())

    @public_api
    def stacks(self) -> Stacks:
        """Where every rank is now, as Python stacks cut to the student's frames; also for ranks blocked in C++.

        During a run, call it from another thread: `threading.Timer(5, lambda: print(group.stacks())).start()`.

        Returns:
            the stacks by rank name; printed, they are a report.

        Raises:
            LabError: no ranks are running: the group has not started any yet, or is closed.
        """
        pool = self._pool
        if pool is None:
            raise LabError("this group has no running ranks: they start with the first run")
        living = [member for member in pool.members if member.process.memory >= 0]
        threads = pool.ask(Threads(), living)
        return Stacks({m.name: readable(of_rank, m.process.status()) for m, of_rank in zip(living, threads, strict=True)})

    def close(self) -> None:
        """End the ranks. A closed group stays closed; closing it again does nothing."""
        if os.getpid() != self._owner:
            return
        self._closed = True
        notebook.groups.discard(self)
        me = object()
        try:
            if self._takes_turn(me):
                self._end()
            elif (pool := self._pool) is not None:
                pool.kill()  # a run in another thread will notice, and clean up
        finally:
            if self._holder is me:
                self._holder = None

    def _run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], on: Sequence[int], *, watch: bool,
        check: bool | None = None
    ) -> Run:  # fmt: skip
        if not callable(function):
            raise TypeError(f"run({function!r}): expected a function, given {type(function).__name__}. Pass f, not f().")
        self._check_check(check or False)
        if check is not None and "check" in parameters_of(function):
            raise TypeError(
                f"check=: {name_of(function)}() has a parameter of this name, too. Give it by position, or rename it."
            )
        self._check()
        name = name_of(function)
        payload = pickling.pack(Call(function, args, kwargs), home=sys.modules["__main__"], sent=self._sent, label=f"{name}()")
        try:
            all_called = len(on) == len(self)
            starts_rpc = self._kind.has_rpc and all_called and function_mentions("init_rpc", function, payload.data)
            call = protocol.CallFunction(all_called, bool(check), payload)
            code = getattr(function, "__code__", None)
            called = StackFrame(code.co_filename, code.co_firstlineno, code.co_name, Owner.STUDENT) if code is not None else None
            request = Request(cell=False, starts_rpc=starts_rpc)
            return self._execute(request, payload, name, on, lambda _: call, called, watch=watch)
        except RankError as error:
            if error.hint or not (hint := arguments.hint_for_rank(function, args, kwargs)):
                raise
            hinted = RankError(error.failures, error.others, stopped=error.stopped, hint=hint)
            hinted.run, hinted.restarts = error.run, error.restarts
            raise hinted from None
        finally:
            payload.close()

    def _check_check(self, check: Any) -> None:
        if not isinstance(check, bool):
            raise TypeError(f"check={check!r}: expected True or False")
        if check and self.runtime != "torch":
            raise LabError(f"check=True compares tensors of torch; the group's runtime is {self.runtime!r}")

    def _check(self) -> None:
        if self._closed:
            raise LabError("this group is closed; make a new one with lab.Group(...)")
        if os.getpid() != self._owner:
            raise LabError("this process is a fork of the one that made the group; make a new group here")

    def _execute(
        self,
        request: Request,
        payload: pickling.Payload,
        name: str,
        on: Sequence[int],
        message: Callable[[Member], Message],
        called: StackFrame | None,
        *,
        watch: bool,
    ) -> Run:
        """Send each rank its message, wait for all, and leave the group ready for the next run whatever happens."""
        me = object()
        try:
            if not self._takes_turn(me):
                raise LabError("this group is running already, in another thread; wait for it, close it, or make a second group")
            make_picture = type(self).picture if watch else None
            picture = make_picture() if make_picture is not None else None
            if payload.copied_from_gpu:
                self._announce("CUDA tensors in arguments reach the ranks as CPU tensors.")
            execution, run = self._attempts(request, payload, name, on, message, called, picture)
            pool = self._pool
            assert pool is not None
            self.last_run = run
            self._announce(*execution.notes)
            for fault in execution.faults:  # after every run, unlike notes, until it is mended
                put(wrapped(f"labkit: {fault}") + "\n")
            if execution.unfinished is None:
                pool.state.end()
            elif request.cell and not pool.state.spent:
                pool.unfinished = execution.unfinished
                pool.state.end()
                self._announce(execution.unfinished.after_a_cell())
            else:
                print(f"labkit: {execution.unfinished.after_a_run()}")
            return run
        except KeyboardInterrupt as stop:  # perhaps while the ranks started, whose frames do not help the student
            raise (stop if isinstance(stop, Stopped) else Stopped(name, [])) from None
        except RankError:
            if self._closed:
                raise LabError(f"the group was closed in another thread while {name} was running") from None
            raise
        finally:
            try:
                if self._holder is me and self._pool is not None and self._pool.state.phase is not Phase.IDLE:
                    self._end()
            except KeyboardInterrupt:  # Stop, while the ranks were ended
                raise Stopped(name, []) from None
            finally:
                if self._holder is me:
                    self._holder = None
            if self._closed:  # by another thread, which left the cleanup to this one
                self.close()

    def _attempts(
        self, request: Request, payload: pickling.Payload, name: str, on: Sequence[int], message: Callable[[Member], Message],
        called: StackFrame | None, picture: Picture | None,
    ) -> tuple[Execution, Run]:  # fmt: skip
        """Call the function until it has returned on all ranks; where `restarts` allows it, again after a failure."""
        most, deadline_s = 0 if request.cell else self._options.restarts, None
        failed: Execution | None = None
        for restarts in itertools.count():
            try:
                pool = self._ready_pool(request, payload, name, restarts)
                execution = Execution(pool, on, name, picture, called, failed)
                pool.begin(on, message)
            except BaseException as error:
                if failed is not None:
                    _end_between(failed, name, error)
                raise
            if restarts == 0 and self._options.timeout_s is not None:
                deadline_s = time.monotonic() + self._options.timeout_s
            try:
                run = execution.wait(deadline_s, profile=self.profiling, may_restart=restarts < most)
            except LabError as error:
                if isinstance(error, RankError):
                    error.restarts = restarts
                if not self.profiling:  # otherwise the profiler still records
                    pool.state.end()
                raise
            if run is not None:
                return execution, run
            assert execution.failed is not None
            put(wrapped(f"labkit: {str(execution.failed).rstrip('.')}.") + "\n" + execution.failed.traceback)
            put(f"labkit: {name} starts again on fresh ranks (restart {restarts + 1} of {most}).\n")
            failed = execution
        raise AssertionError("the last attempt raises its error")

    def _ready_pool(self, request: Request, payload: pickling.Payload, name: str, restarts: int) -> RankPool:
        """The processes, told all that they must know before they are called, after so many restarts in this run."""
        if self._closed:
            raise LabError(f"the group was closed in another thread while {name} was running")
        pool, home = self._usable_pool(request), sys.modules["__main__"]
        self._announce(*pool.follow())
        pool.state.begin(request)
        pool.share_filters(lambda filters: pickling.pack(filters, home=home, sent=self._sent))
        pool.tell_restarts(restarts)
        self._install(pool, payload)
        if self.profiling:
            pool.exchange(protocol.Profile(begin=True), protocol.Profiled)
        pool.observe(begin=True)
        return pool

    def _takes_turn(self, who: object) -> bool:
        """One run at a time. A lock held for the run could leak: Stop may come between acquiring it and the `try`."""
        with self._turn:
            if self._holder is None:
                self._holder = who
        return self._holder is who

    def _usable_pool(self, request: Request) -> RankPool:
        """The processes; new ones if there are none that may serve this run."""
        if self._pool is not None and (self._may_regain_machine(self._pool) or not self._pool.may_serve(request)):
            self._end()
        if self._pool is None:
            self._returns = self.on.returns if self.on is not None else 0
            starter = notebook.starter(self.runtime, self._options.start, self.on)
            self._pool = pool = RankPool(self._options, self._kind, starter, self._sent, starts_rpc=request.starts_rpc)
            self._finalizer = weakref.finalize(self, _end_unreferenced, pool, self._owner)
            self._finalizer.atexit = False
            pool.start()
            self._machines |= pool.machines
            if self._machines - pool.machines:
                self._announced.difference_update(pool.notes)  # a machine may be lost more than once
            self._announce(*pool.notes)
        if self._closed:
            raise LabError("the group was closed in another thread while its ranks started")
        return self._pool

    def _may_regain_machine(self, pool: RankPool) -> bool:
        """Whether the ranks lack a machine that this group had before, and one has come back since they started."""
        return self.on is not None and self.on.returns > self._returns and bool(self._machines - pool.machines)

    def _install(self, pool: RankPool, payload: pickling.Payload) -> None:
        """Install in the ranks, before any of them starts to call, the student's files from which the functions come.

        Where ranks serve others, install the functions themselves, too.
        """
        new, known = protocol.Files(), pool.members[0].known_files
        for filename in payload.files:
            file = cell_label(filename), pickling.source_of(filename)
            if known.get(filename) != file:
                new[filename] = known[filename] = file
        if new:
            pool.tell(protocol.NewFiles(new))
        if self._kind.serving_threads:
            pool.exchange(protocol.Install(payload), protocol.Done)

    def _end(self) -> None:
        pool = self._pool
        if pool is None:
            return
        if not self._closed and (lost := lost_names(pool.members)):
            put(f"labkit: {lost}\n")
        try:
            pool.end()
        finally:
            pool.end(wait=False)  # Stop may have interrupted the call above
            self._pool = None
            if self._finalizer is not None:
                self._finalizer.detach()
        if self._options.start == "spawn" and self.on is None and not self._closed:
            notebook.starter(self.runtime, "spawn").warm(len(self))

    def _announce(self, *notes: str) -> None:
        for note in notes:
            if note not in self._announced:
                self._announced.add(note)
                put(f"labkit: {note}\n")


class Ranks:
    """Selected ranks: `group[0]`, `group["master"]`, `group[1:3]`. The others keep serving while these run."""

    def __init__(self, group: Group, on: Sequence[int]) -> None:
        self.group, self.on = group, tuple(on)

    def __len__(self) -> int:
        return len(self.on)

    def __iter__(self) -> Iterator[Ranks]:
        return (Ranks(self.group, [rank]) for rank in self.on)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranks) and (self.group, self.on) == (other.group, other.on)

    def __hash__(self) -> int:
        return hash((id(self.group), self.on))

    @public_api
    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Run:
        """Call `function(*args, **kwargs)` on these ranks; see `Group.run`."""
        return self.group._run(function, args, kwargs, self.on, watch=False)

    @public_api
    def watch(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Run:
        """`run` with the live picture; see `Group.watch`."""
        return self.group._run(function, args, kwargs, self.on, watch=True)

    def __repr__(self) -> str:
        return f"<{', '.join(self.group.names[i] for i in self.on)} of {self.group!r}>"


@public_api
def profile(group: Group) -> AbstractContextManager[None]:
    """Record each rank with torch's profiler in the runs of this block: operators, kernels, CUDA calls.

        with lab.profile(group):
            run = group.run(train)
        run.trace.save("x.json")      # Perfetto shows them in each rank's process, below labkit's own rows

    The events have the clock of the spans, to within some microseconds. Profiling slows the ranks down, so measure
    times without it. For each rank and run, the 100,000 longest events are kept, in `run.trace.profile`.

    Args:
        group: a group with runtime "torch" or "rpc".

    Returns:
        a context manager.

    Raises:
        TypeError: `group` is not a group.
        LabError: the group has another runtime.
    """
    if not hasattr(group, "profiling"):
        raise TypeError(f"profile({group!r}): expected a group, as in `with lab.profile(group):`")
    if not RUNTIMES[group.runtime].has_torch_profiler:
        raise LabError(f"lab.profile is for torch; this group has the runtime {group.runtime!r}")
    return _profiled(group)


@contextmanager
def _profiled(group: Group) -> Iterator[None]:
    before, group.profiling = group.profiling, True
    try:
        yield
    finally:
        group.profiling = before


def _end_between(execution: Execution, name: str, error: BaseException) -> None:
    """End a run whose ranks cannot be replaced after a failure, since Stop was pressed, or for another reason."""
    run = execution.conclude("stopped")
    if isinstance(error, KeyboardInterrupt):
        stop = Stopped(name, [])
        stop.run = run
        raise stop from None
    if isinstance(error, RunError):
        error.run = run


def _end_unreferenced(pool: RankPool, owner: int) -> None:
    """End the ranks of a garbage-collected group without waiting: this may run while this thread starts other ranks."""
    if os.getpid() == owner:
        pool.end(wait=False)
