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
from collections.abc import Callable
from typing import Any, Final

from labkit.errors.exceptions import LabError, RankFailure
from labkit.ipc import notebook_builtins, pickling
from labkit.ipc.code_names import name_of
from labkit.ipc.definitions import Received
from labkit.ipc.messages import Channel, Message
from labkit.ipc.ranks_cell import CellRunner
from labkit.ipc.stdio import reopen_closed
from labkit.ipc.tracebacks import cause_of, headline, in_students_code, raised_by_student, students_traceback
from labkit.recording.record import Recorder, here, is_students
from labkit.recording.ring_buffer import RingWriter
from labkit.worker.child_deaths import ChildDeaths
from labkit.worker.cuda_context import context_error
from labkit.worker.display import RankDisplay
from labkit.worker.edited_modules import Imports
from labkit.worker.network_namespace import Network
from labkit.worker.notebook_settings import AppliedSettings
from labkit.worker.process_state import Changes
from labkit.worker.runtimes.base import RankConfig, Released, Runtime, quiet_stderr
from labkit.worker.runtimes.registry import RUNTIMES
from labkit.worker.runtimes.tensorflow import blocked
from labkit.worker.torch_profiler import ProfilerEvent, TorchProfiler
from labkit.worker.warnings_capture import RankWarnings

__all__ = ["main"]

_MODULE_NAMES: Final = {"__annotations__", "__builtins__"}  # names that Python adds to a module
# Variables that belong to the rank, even if the notebook's variables happen to have the same values.
ALWAYS_OWN: Final = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TF_CONFIG", "MPLBACKEND"}
)


def main(sock: socket.socket, ring: mmap.mmap, network: Network) -> None:
    """Serve the notebook until it closes the connection or sends "close".

    Args:
        sock: the socket that carries messages.
        ring: the memory into which this rank records.
        network: the network in which ranks communicate.
    """
    channel = Channel(sock)
    me = os.getpid()
    os.register_at_fork(after_in_child=channel.close)
    sys.modules["__main__"] = types.ModuleType("__main__")
    notebook_builtins.install()
    try:
        message = channel.receive()
        rank = _Rank(channel, message.data, RingWriter(ring), -1 if message.payload is None else message.payload.fd, network)
        while rank.serve(channel.receive()):
            pass
    except (EOFError, ConnectionError):
        pass  # the notebook has closed the connection
    except OSError:
        if os.getpid() == me:
            raise
        # The student's code has forked, and this child has returned here: it is no rank, and its channel is closed.


class _Rank:
    """One rank: its runtime, its state, and its end of the channel.

    Args:
        channel: the connection to the notebook.
        rank_config: the rank's settings.
        ring: writes this rank's records.
        shared_link: file descriptor of the memory of an emulated link that ranks share; -1 without one.
        network: the network in which ranks communicate.
    """

    def __init__(self, channel: Channel, rank_config: RankConfig, ring: RingWriter, shared_link: int, network: Network) -> None:
        self._channel, self._rank_config, self._ring, self._shared_link = channel, rank_config, ring, shared_link
        self._sending = threading.Lock()  # a thread of the student's may display something at any time
        self._name = rank_config.names[rank_config.rank]
        self._profiler = TorchProfiler()
        self._received = Received()  # functions and classes from the notebook
        self._cells = CellRunner()
        self._notes: list[str] = []  # remarks on the run for the student
        self._before = 0, 0  # numbers of recorded and of failed communications when the function began
        self._imports = Imports()
        self._copy_errors: dict[str, BaseException] = {}  # from copying the notebook's state, by the kind of message
        self._unread_result: pickling.Payload | None = None  # a result that the notebook reads from this rank's memory
        self._runtime: Runtime = RUNTIMES[rank_config.runtime](rank_config, network, self._wait_for_release)
        Changes(rank_config.folder, rank_config.path, tuple(sys.path), rank_config.environment).apply(())
        self._display = RankDisplay(lambda shown: self._send("shown", shown), rich=rank_config.rich, size=rank_config.size)
        self._display.install()
        self._warnings = RankWarnings(lambda text_and_count: self._send("warned", text_and_count))
        self._warnings.install()
        self._settings = AppliedSettings()
        sys.argv = [""]
        self._inherited = dict(os.environ)
        self._variables: set[str] = set()  # environment variables that belong to this rank and do not follow the notebook's
        self._exits: dict[int, RankFailure] = {}  # this rank's, if its function ended with `exit()` or `exit(0)`
        self._attempt(lambda: channel.send("offer", self._runtime.offer()))

    def serve(self, message: Message) -> bool:
        """Handle one message; return False after the last one."""
        if self._unread_result is not None:  # the notebook sends its next message after it has read the result
            self._unread_result.close()
            self._unread_result = None
        if message.kind == "read":
            return True
        if message.kind == "forget":
            self._received.forget(message.data)
            return True
        if message.kind == "follow":
            self._copy_state(message.kind, lambda: self._follow(message.data))
            return True
        if message.kind == "settings":
            self._copy_state(message.kind, lambda: self._settings.apply(self._unpack(message.payload)))
            return True
        if message.kind == "close":
            self._runtime.tear_down()
            return False
        if message.kind == "offers":
            self._attempt(lambda: self._set_up(message.data))
        elif message.kind == "profile":
            self._attempt(lambda: self._profile(message.data))
        elif message.kind == "observe":
            self._attempt(lambda: self._observe(message.data))
        elif message.kind == "install":
            self._attempt(lambda: self._install(message))
        elif message.kind == "call":
            self._attempt(lambda: self._call(message))
        elif message.kind == "cell":
            self._attempt(lambda: self._cell(message))
        else:
            raise AssertionError(f"unknown kind of message {message.kind!r}")
        return True

    def _send(self, kind: str, data: Any = None, payload: pickling.Payload | None = None) -> None:
        with self._sending:
            self._channel.send(kind, data, payload)

    def _attempt(self, action: Callable[[], None]) -> None:
        """Call a function, and send the error if it raises one."""
        try:
            action()
        except BaseException as error:  # noqa: BLE001  # SystemExit, KeyboardInterrupt too: the notebook decides what follows
            try:
                with ChildDeaths() as deaths:
                    self._raised(deaths.cause_of(error))
            except Exception as death:  # noqa: BLE001  # raised by a signal's handler before the block was entered
                self._raised(death)

    def _set_up(self, offers: list[Any]) -> None:
        recorder = Recorder(self._ring, self._rank_config.rank, self._rank_config.size)
        here.start(recorder)
        record_rpc = self._runtime.record_operations(recorder, self._shared_link)
        notes = self._runtime.set_up(offers)
        self._runtime.adapt_initialization(recorder, record_rpc)
        if self._runtime.resting_is_waiting:
            blocked.detect_blocked_calls(recorder)
        self._variables = {name for name, value in os.environ.items() if self._inherited.get(name) != value} | ALWAYS_OWN
        self._send("ready", notes)

    def _learn(self, files: dict[str, tuple[str, list[str]]]) -> None:
        """Store the names of the student's files, and the sources of those that only the notebook can read."""
        for filename, (name, lines) in files.items():
            here.files[filename] = name
            if lines:
                pickling.install_source(filename, lines)
        if files:
            is_students.cache_clear()
        here.forget_spans()  # a span keeps the line at which its name was first used in this run

    def _unpack(self, payload: pickling.Payload | None) -> Any:
        """Unpickle a payload, and install its definitions in `__main__`."""
        assert payload is not None
        return pickling.unpack(payload, received=self._received)

    def _copy_state(self, kind: str, action: Callable[[], None]) -> None:
        """Copy a part of the notebook's state. No reply is sent; the next call raises the error, if there is one."""
        self._copy_errors.pop(kind, None)
        try:
            action()
        except BaseException as error:  # noqa: BLE001  # as in `_attempt`: unpickling may run any code
            self._copy_errors[kind] = error

    def _follow(self, changes: Changes) -> None:
        """Apply changes of the notebook's process, except to the variables that belong to this rank."""
        try:
            changes.apply(self._variables)
        except OSError as error:
            raise LabError(f"this rank cannot enter the notebook's working folder: {error}") from None

    def _install(self, message: Message) -> None:
        """Install definitions before any rank starts to call, so that RPC finds them by name."""
        self._learn(message.data)
        self._unpack(message.payload)
        self._send("installed")

    def _profile(self, begin: bool) -> None:
        """Start torch's profiler, or stop it and send its events."""
        events: list[ProfilerEvent] = []
        with quiet_stderr():  # the profiler prints when it starts and stops
            if begin:
                self._profiler.start()
            else:
                events = self._profiler.stop()
        self._send("profiled", events)

    def _observe(self, begin: bool) -> None:
        """Begin or end the recording of a run in which this rank is not called but may serve others."""
        if begin:
            self._runtime.begin_recording()
        notes, self._notes = self._notes, []
        self._send("observed", [] if begin else [*notes, *self._runtime.end_recording()])

    def _call(self, message: Message) -> None:
        all_called, files = message.data
        self._learn(files)
        function, args, kwargs = self._unpack(message.payload)
        name = name_of(function)
        self._runtime.begin_run(keep=False, all_called=all_called)
        result = self._timed(name, lambda: function(*args, **kwargs))
        if isinstance(result, types.CoroutineType):
            result.close()  # otherwise Python would warn that it was never awaited
            raise LabError(
                f"{name}() returned a coroutine, which is never awaited: calling an `async def` function only creates one. "
                f"Give the ranks a function that calls asyncio.run({name}(...))."
            )
        self._wait_for_gpu(f"{name}()")
        self._done(result, f"the result of {name}()")

    def _cell(self, message: Message) -> None:
        """Run a cell's source in `__main__`, and display the value of its last expression as a notebook does."""
        all_called, (source, filename, skip, files) = message.data
        self._learn(files)
        space = sys.modules["__main__"].__dict__
        space.update({name: value for name, value in self._unpack(message.payload).items() if name not in skip})
        before = dict(space)

        def run() -> None:
            self._display.value(self._cells.run(source, filename, space))

        self._runtime.begin_run(keep=True, all_called=all_called)
        try:
            self._timed("cell", run)
        finally:  # also after a cell that has failed
            changed = {name for name, value in space.items() if name not in before or before[name] is not value}
            self._send("assigned", sorted((changed | (before.keys() - space.keys())) - _MODULE_NAMES))
        self._wait_for_gpu("the cell")
        self._done(None, "nothing")

    def _wait_for_release(self) -> None:
        """Tell the notebook that this rank only serves others from now on, and wait until it is released."""
        self._send("serving")
        message = self._channel.receive()
        assert message.kind == "release", f"expected a message 'release' while serving, got {message.kind!r}"

    def _timed(self, name: str, action: Callable[[], Any]) -> Any:
        for error in self._copy_errors.values():
            raise error
        self._exits = {}
        self._display.begin()
        self._runtime.begin_recording()
        if here.recorder is not None:
            here.recorder.begin_run()
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
            end_ns = time.perf_counter_ns()
            recorder = here.recorder
            if recorder is not None:
                recorder.call(name, start_ns, end_ns)
            self._notes += self._runtime.end_recording()
            if imported := self._imports.new():
                self._send("imported", imported)
            self._display.end()
            self._warnings.end()

    def _wait_for_gpu(self, name: str) -> None:
        """Wait for running kernels on the GPU, so that their errors are reported in this run, not in the next.

        Raises:
            LabError: a kernel failed.
        """
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
        self._send("done", (communicated, unfinished, self._runtime.end_run(), self._exits), payload)
        if payload.owner_pid:
            self._unread_result = payload
        else:
            payload.close()

    def _raised(self, error: BaseException) -> None:
        failure = self._failure(error)
        recorder = here.recorder
        if recorder is not None and recorder.device_clock is not None:
            with contextlib.suppress(RuntimeError):  # CUDA no longer works; its pending records are lost
                recorder.device_clock.flush()
        self._flush()
        self._send("raised", failure)

    def _failure(self, error: BaseException, verb: str = "failed:") -> RankFailure:
        at_ns = time.perf_counter_ns()
        text = "" if isinstance(error, LabError) and not in_students_code(error) else students_traceback(error)
        return RankFailure(
            self._rank_config.rank, self._name, headline(error), text, at_ns=at_ns, verb=verb, cause=cause_of(error),
            broken=context_error() is not None, own=raised_by_student(error),
            in_python=self._runtime.raised_in_python(error),
        )  # fmt: skip

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            try:  # `contextlib.suppress` would take several times as long, in every run
                stream.flush()
            except (AttributeError, OSError, ValueError):  # the student's code has closed it or set it to None
                reopen_closed()
