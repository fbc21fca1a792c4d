"""The main loop of a rank: set up the runtime, call the functions that the notebook sends, and return the results."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Collection
from typing import Any, Final

from labkit.errors.exceptions import LabError, RankFailure
from labkit.ipc import pickling, protocol
from labkit.ipc.channel import Channel
from labkit.ipc.code_names import name_of
from labkit.ipc.pickling import Received
from labkit.ipc.protocol import Message
from labkit.ipc.ranks_cell import CellRunner
from labkit.ipc.reductions import install_builtins
from labkit.ipc.stdio import quiet_stderr, reopen_closed
from labkit.ipc.tracebacks import OWN_LIMIT, cause_of, headline, in_students_code, raised_by_student, students_traceback
from labkit.recording.cores import thread_delays
from labkit.recording.record import Recorder, here, is_students
from labkit.recording.ring_buffer import RingWriter
from labkit.worker.debugger import QUITS, Debugger, quit_failure
from labkit.worker.display import RankDisplay, RankWarnings
from labkit.worker.late_errors import context_error, without_child_deaths
from labkit.worker.network_namespace import PrivateNetwork
from labkit.worker.process_state import AppliedFilters, Imports, WorkingFolder, apply
from labkit.worker.runtimes.base import Released, Runtime
from labkit.worker.runtimes.registry import RUNTIMES
from labkit.worker.runtimes.tensorflow import blocked
from labkit.worker.torch_profiler import ProfilerEvent, TorchProfiler

GPU_AFTER_ERROR_S: Final = 0.1  # for records of a GPU that is behind: the student waits for the error
_MODULE_NAMES: Final = {"__annotations__", "__builtins__"}  # names that Python adds to a module
RESTART_COUNT: Final = "TORCHELASTIC_RESTART_COUNT"  # torchrun's name: how many times all ranks have been replaced in this run
# Variables that belong to the rank, even if the notebook's variables happen to have the same values.
ALWAYS_OWN: Final = frozenset(
    {
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TF_CONFIG", "MPLBACKEND",
        RESTART_COUNT,
    }
)  # fmt: skip


def main(sock: socket.socket, ring: mmap.mmap, network: PrivateNetwork) -> None:
    """Serve the notebook until it closes the connection."""
    channel = Channel(sock)
    me = os.getpid()
    os.register_at_fork(after_in_child=channel.close)
    sys.modules["__main__"] = types.ModuleType("__main__")
    install_builtins()
    try:
        rank_config = channel.receive()
        assert isinstance(rank_config, protocol.RankConfig)
        rank = _Rank(channel, rank_config, RingWriter(ring), network)
        while True:
            rank.serve(channel.receive())
    except (EOFError, ConnectionError):
        pass  # the notebook has closed the connection
    except OSError:
        if os.getpid() == me:
            raise
        # The student's code has forked, and this child has returned here: it is no rank, and its channel is closed.


class _Rank:
    """One rank: its runtime, its state, and its end of the channel."""

    def __init__(self, channel: Channel, rank_config: protocol.RankConfig, ring: RingWriter, network: PrivateNetwork) -> None:
        self._channel, self._rank_config, self._ring = channel, rank_config, ring
        self._sending = threading.Lock()  # a thread of the student's may display something at any time
        self._profiler = TorchProfiler()
        self._received = Received()  # functions and classes from the notebook
        self._cells = CellRunner()
        self._notes: list[str] = []  # remarks for the student, not yet sent
        self._before = 0, 0  # numbers of recorded and of failed communications when the function began
        self._imports = Imports(rank_config.place.machine)
        self._copy_errors: dict[type[Message], BaseException] = {}  # from copying the notebook's state
        self._unread_result: pickling.Payload | None = None  # a result that the notebook reads from this rank's memory
        self._runtime: Runtime = RUNTIMES[rank_config.options.runtime](rank_config, network, self._wait_for_release)
        self._folder = WorkingFolder(rank_config.place)
        before = () if rank_config.place.elsewhere else tuple(sys.path)  # another machine may have its libraries elsewhere
        self._copy(protocol.Changes(rank_config.folder, rank_config.path, before, rank_config.environment), kept=())
        self._display = RankDisplay(self._send, rich=rank_config.rich, size=rank_config.size)
        self._display.install()
        self._warnings = RankWarnings(self._send)
        self._warnings.install()
        self._debugger = Debugger(self._send, channel.receive)
        self._debugger.install()
        self._filters = AppliedFilters()
        sys.argv = [""]
        self._inherited = dict(os.environ)
        os.environ[RESTART_COUNT] = "0"
        self._variables: set[str] = set()  # environment variables that belong to this rank and do not follow the notebook's
        self._exits: dict[int, RankFailure] = {}  # this rank's, if its function ended with `exit()` or `exit(0)`
        self._handlers: dict[type[Message], Callable[[Any], None]] = {
            protocol.Offers: self._set_up,
            protocol.Install: self._install,
            protocol.CallFunction: self._call,
            protocol.RunCell: self._run_cell,
            protocol.Profile: self._profile,
            protocol.Observe: self._observe,
            protocol.Changes: self._follow,
            protocol.NewFiles: lambda message: self._learn(message.files),
            protocol.NewFilters: lambda message: self._filters.apply(self._unpack(message.payload)),
            protocol.Restarted: lambda message: os.environ.update({RESTART_COUNT: str(message.count)}),
            protocol.Forget: lambda message: self._received.forget(message.numbers),
            protocol.ResultRead: lambda _: None,  # `serve` has freed the result's memory
        }
        self._attempt(lambda _: self._send(self._runtime.offer()), rank_config)

    def serve(self, message: Message) -> None:
        """Handle one message."""
        if self._unread_result is not None:  # the notebook sends its next message after it has read the result
            self._unread_result.close()
            self._unread_result = None
        handler = self._handlers[type(message)]
        if isinstance(message, protocol.RankNotice):
            self._take(handler, message)
        else:
            self._attempt(handler, message)

    def _send(self, message: Message) -> None:
        with self._sending:
            self._channel.send(message)

    def _attempt(self, handler: Callable[[Any], None], request: Message) -> None:
        """Handle a request, and send the error if that raises one."""
        try:
            handler(request)
        except BaseException as error:  # noqa: BLE001  # SystemExit, KeyboardInterrupt too: the notebook decides what follows
            try:
                with without_child_deaths() as cause_of_it:
                    self._raised(cause_of_it(error))
            except Exception as death:  # noqa: BLE001  # raised by a signal's handler before the block was entered
                self._raised(death)

    def _take(self, handler: Callable[[Any], None], notice: Message) -> None:
        """Handle a notice, which has no reply; the next function or cell raises its error."""
        self._copy_errors.pop(type(notice), None)
        try:
            handler(notice)
        except BaseException as error:  # noqa: BLE001  # as in `_attempt`: unpickling may run any code
            self._copy_errors[type(notice)] = error

    def _set_up(self, message: protocol.Offers) -> None:
        recorder = Recorder(self._ring, self._rank_config.rank, self._rank_config.size)
        here.start(recorder)
        if self._rank_config.shares_cores:
            self._ring.thread_delay = thread_delays()
        notes = self._runtime.set_up(message.offers)
        if self._runtime.resting_is_waiting:
            blocked.detect_blocked_calls(recorder)
        self._variables = {name for name, value in os.environ.items() if self._inherited.get(name) != value} | ALWAYS_OWN
        self._send(protocol.Done([*notes, *self._take_notes()]))

    def _learn(self, files: protocol.Files) -> None:
        """Store the names of the student's files, and the sources of those that only the notebook can read."""
        for filename, (name, lines) in files.items():
            here.files[filename] = name
            if lines:
                pickling.install_source(filename, lines)
        if files:
            is_students.cache_clear()
        here.forget_spans()  # a span keeps the line at which its name was first used in this run

    def _unpack(self, payload: pickling.Payload) -> Any:
        return pickling.unpack(payload, received=self._received)

    def _copy(self, changes: protocol.Changes, kept: Collection[str]) -> None:
        """Apply changes of the notebook's process, except to variables that are kept."""
        apply(changes, kept, elsewhere=self._rank_config.place.elsewhere)
        if changes.folder is not None:
            self._notes += self._folder.enter(changes.folder)

    def _take_notes(self) -> list[str]:
        notes, self._notes = self._notes, []
        return notes

    def _follow(self, changes: protocol.Changes) -> None:
        try:
            self._copy(changes, kept=self._variables)
        except OSError as error:
            raise LabError(f"this rank cannot enter the notebook's working folder: {error}") from None

    def _install(self, message: protocol.Install) -> None:
        here.forget_spans()  # as in `_learn`
        self._unpack(message.payload)
        self._send(protocol.Done([]))

    def _profile(self, message: protocol.Profile) -> None:
        events: list[ProfilerEvent] = []
        with quiet_stderr():  # the profiler prints when it starts and stops
            if message.begin:
                self._profiler.start()
            else:
                events = self._profiler.stop()
        self._send(protocol.Profiled(events))

    def _observe(self, message: protocol.Observe) -> None:
        if message.begin:
            self._runtime.begin_recording()
            self._send(protocol.Done([]))
        else:
            self._notes += self._runtime.end_recording()
            self._send(protocol.Done(self._take_notes()))

    def _call(self, message: protocol.CallFunction) -> None:
        here.forget_spans()  # as in `_learn`
        function, args, kwargs = self._unpack(message.payload)
        name = name_of(function)
        self._runtime.begin_run(keep=False, all_called=message.all_called)
        result = self._timed(name, lambda: function(*args, **kwargs), check=message.check)
        if isinstance(result, types.CoroutineType):
            result.close()  # otherwise Python would warn that it was never awaited
            raise LabError(
                f"{name}() returned a coroutine, which is never awaited: calling an `async def` function only creates one. "
                f"Give the ranks a function that calls asyncio.run({name}(...))."
            )
        self._wait_for_gpu(f"{name}()")
        self._done(result, f"the result of {name}()")

    def _run_cell(self, message: protocol.RunCell) -> None:
        """Run a cell's source in `__main__`, and display the value of its last expression as a notebook does."""
        self._learn({message.filename: (message.label, message.source.splitlines(keepends=True))})
        space = sys.modules["__main__"].__dict__
        values = self._unpack(message.payload)
        space.update({name: value for name, value in values.items() if name not in message.present})
        before = dict(space)

        def run() -> None:
            self._display.value(self._cells.run(message.source, message.filename, space))

        self._runtime.begin_run(keep=True, all_called=message.all_called)
        try:
            self._timed("cell", run, check=message.check)
        finally:  # also after a cell that has failed
            changed = {name for name, value in space.items() if name not in before or before[name] is not value}
            self._send(protocol.Assigned(sorted((changed | (before.keys() - space.keys())) - _MODULE_NAMES)))
        self._wait_for_gpu("the cell")
        self._done(None, "nothing")

    def _wait_for_release(self) -> None:
        self._send(protocol.Serving())
        message = self._channel.receive()
        assert isinstance(message, protocol.Release), f"expected Release while serving, got {message}"

    def _timed(self, name: str, action: Callable[[], Any], *, check: bool) -> Any:
        for error in self._copy_errors.values():
            raise error
        self._exits = {}
        self._display.begin()
        self._debugger.begin()
        self._runtime.begin_recording()
        if here.recorder is not None:
            here.recorder.begin_run(check=check)
        start_ns, self._before = time.perf_counter_ns(), (self._ring.communications, self._ring.failures)
        try:
            return action()
        except Released:
            return None
        except SystemExit as end:  # `exit()` as a script's last line is a normal end
            if end.code not in (None, 0):
                raise
            self._exits = {self._rank_config.rank: self._failure(end, verb="has no result, unlike others:")}
            return None
        finally:
            self._debugger.end()
            end_ns = time.perf_counter_ns()
            recorder = here.recorder
            if recorder is not None:
                recorder.call(name, start_ns, end_ns)
            self._notes += self._runtime.end_recording()
            if imported := self._imports.new():
                self._send(protocol.Imported(imported))
            self._display.end()
            self._warnings.end()

    def _wait_for_gpu(self, name: str) -> None:
        """Wait for running kernels on the GPU, so that their errors are reported in this run, not in the next."""
        recorder = here.recorder
        if recorder is None or recorder.device_clock is None:
            return
        try:
            limit_s = recorder.device_clock.flush()
            error = context_error(limit_s)
        except RuntimeError as failed:
            error = failed
        if error is not None:
            raise LabError(
                f"{name} returned, and then a CUDA kernel that it had started failed: {headline(error)}. CUDA reports errors of "
                "kernels late: set os.environ['CUDA_LAUNCH_BLOCKING'] = '1' and make a new group to see the line that started it."
            ) from error

    def _done(self, result: Any, label: str) -> None:
        payload = pickling.pack(result, received=self._received, label=label, in_place=self._rank_config.readable_memory)
        self._flush()
        ring, (communications, failures) = self._ring, self._before
        communicated, unfinished = ring.communications != communications, ring.in_progress or ring.failures != failures
        notes = [*self._runtime.notes(), *self._take_notes()]
        facts = here.recorder.facts.take() if here.recorder is not None and here.recorder.facts is not None else []
        self._send(protocol.Returned(communicated, unfinished, self._runtime.spent, notes, self._exits, facts, payload))
        if payload.owner_pid:
            self._unread_result = payload
        else:
            payload.close()

    def _raised(self, error: BaseException) -> None:
        failure = self._failure(error)
        recorder = here.recorder
        if recorder is not None and recorder.device_clock is not None:
            with contextlib.suppress(RuntimeError):  # CUDA no longer works; its pending records are lost
                recorder.device_clock.flush(GPU_AFTER_ERROR_S)
        self._flush()
        self._send(protocol.Raised(self._runtime.spent, failure))

    def _failure(self, error: BaseException, verb: str = "failed:") -> RankFailure:
        at_ns = time.perf_counter_ns()
        if isinstance(error, QUITS):
            return quit_failure(self._rank_config.rank, self._rank_config.name, at_ns)
        text = "" if isinstance(error, LabError) and not in_students_code(error) else students_traceback(error)
        return RankFailure(
            self._rank_config.rank, self._rank_config.name, headline(error), text, at_ns=at_ns, verb=verb, cause=cause_of(error),
            broken=context_error() is not None, own=raised_by_student(error), own_limit=getattr(error, OWN_LIMIT, ""),
        )  # fmt: skip

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            try:  # `contextlib.suppress` would take several times as long, in every run
                stream.flush()
            except (AttributeError, OSError, ValueError):  # the student's code has closed it or set it to None
                reopen_closed()
