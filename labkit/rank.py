"""The loop inside a rank: set up, call what the notebook sends, report how it went."""

from __future__ import annotations

import ast
import contextlib
import mmap
import os
import socket
import sys
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

from labkit import blocked, wire
from labkit.channel import Channel, Frame
from labkit.errors import LabError, RankFailure
from labkit.names import name_of
from labkit.private import Network
from labkit.profiled import Row, TorchProfiler
from labkit.record import Recorder, here, is_students, span
from labkit.report import headline, in_students_code, is_consequence, students_traceback, warning
from labkit.ring import RingWriter
from labkit.runtimes import RUNTIMES, Runtime, Seat, devices, quiet_stderr

__all__ = ["main"]


def main(sock: socket.socket, ring: mmap.mmap, network: Network) -> None:
    """Serve the notebook until it closes the stream or says so.

    Args:
        sock: the stream of frames.
        ring: where this rank records.
        network: where it talks to the other ranks.
    """
    channel = Channel(sock)
    me = os.getpid()
    os.register_at_fork(after_in_child=channel.close)
    sys.modules["__main__"] = types.ModuleType("__main__")
    warnings.formatwarning = warning
    try:
        frame = channel.receive()
        rank = _Rank(channel, frame.data, RingWriter(ring), -1 if frame.parcel is None else frame.parcel.fd, network)
        while rank.serve(channel.receive()):
            pass
    except (EOFError, ConnectionError):
        pass  # the notebook has let go of this rank
    except OSError:
        if os.getpid() == me:
            raise
        # The student's code has forked and let the child run on: that is no rank, and has no channel any more.


class _Rank:
    """One rank: its place, its runtime, and its end of the channel."""

    def __init__(self, channel: Channel, seat: Seat, ring: RingWriter, ledger: int, network: Network) -> None:
        self._channel, self._seat, self._ring, self._ledger = channel, seat, ring, ledger
        self._name = seat.names[seat.rank]
        self._profiler = TorchProfiler()
        self._known: dict[str, Any] = {}  # what the notebook has defined here
        self._lent: wire.Parcel | None = None  # a result that the notebook is reading
        self._runtime: Runtime = RUNTIMES[seat.runtime](seat, network)
        for variable, value in seat.environment.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value
        sys.path[:] = seat.path
        sys.argv = [""]
        os.chdir(seat.folder)
        self._attempt(lambda: channel.send("offer", self._runtime.offer()))

    def serve(self, frame: Frame) -> bool:
        """Do what one frame says; False where it was the last."""
        if self._lent is not None:  # whatever the notebook says next, it has read that
            self._lent.close()
            self._lent = None
        if frame.kind == "read":
            return True
        if frame.kind == "close":
            self._runtime.tear_down()
            return False
        if frame.kind == "offers":
            self._attempt(lambda: self._set_up(frame.data))
        elif frame.kind == "profile":
            self._attempt(lambda: self._profile(frame.data))
        elif frame.kind == "install":
            self._attempt(lambda: self._install(frame))
        elif frame.kind == "call":
            self._attempt(lambda: self._call(frame))
        elif frame.kind == "cell":
            self._attempt(lambda: self._cell(frame))
        else:
            raise AssertionError(f"a frame of unknown kind {frame.kind!r}")
        return True

    def _attempt(self, action: Callable[[], None]) -> None:
        """Do it, or report why not."""
        try:
            action()
        except BaseException as error:  # noqa: BLE001  # SystemExit, KeyboardInterrupt too: the notebook decides what follows
            self._raised(error)

    def _set_up(self, offers: list[Any]) -> None:
        recorder = Recorder(self._ring, threads=self._runtime.serving_threads > 0)
        here.start(recorder)
        if self._seat.runtime in ("torch", "rpc"):
            from labkit import comm

            watch, link = comm.watch_torch if self._seat.runtime == "torch" else comm.watch_rpc, self._seat.link
            watch(recorder, None if link is None else comm.slow_link(link, self._seat.rank, self._ledger))
            notes = self._runtime.set_up(offers)
            comm.watch_device(recorder, devices()[0])
        else:
            notes = self._runtime.set_up(offers)
        if self._runtime.resting_is_waiting:
            blocked.watch_tensorflow(recorder)
        self._channel.send("ready", notes)

    def _learn(self, files: dict[str, tuple[str, list[str]]]) -> None:
        """Take over the names, and where only the notebook can read them the sources, of the student's files."""
        for filename, (name, lines) in files.items():
            here.files[filename] = name
            if lines:
                wire.install_source(filename, lines)
        if files:
            is_students.cache_clear()
        span.cache_clear()  # a span knows where its name was first used: in this run

    def _take(self, parcel: wire.Parcel | None) -> Any:
        """What is in a parcel; what it defines lives here now, and the notebook knows it by name."""
        assert parcel is not None
        value, definitions = wire.unpack(parcel)
        self._known |= definitions
        return value

    def _install(self, frame: Frame) -> None:
        """Take the definitions, so that RPC finds them here by name, before any rank begins to call."""
        self._learn(frame.data)
        self._take(frame.parcel)
        self._channel.send("installed")

    def _profile(self, begin: bool) -> None:
        """From now on have torch's profiler look; or tell what it has seen."""
        seen: list[Row] = []
        with quiet_stderr():  # it says when it starts and stops
            if begin:
                self._profiler.start()
            else:
                seen = self._profiler.stop()
        self._channel.send("profiled", seen)

    def _call(self, frame: Frame) -> None:
        self._learn(frame.data)
        function, args, kwargs = self._take(frame.parcel)
        name = name_of(function)
        result = self._timed(name, lambda: function(*args, **kwargs))
        if isinstance(result, types.CoroutineType):
            result.close()  # else Python warns that nobody awaited it, which is what we say
            raise LabError(
                f"{name}() gave a coroutine, which nobody awaits: `async def` only makes one. "
                f"Give the ranks a function that calls asyncio.run({name}(...))."
            )
        self._done(result, f"the result of {name}()")

    def _cell(self, frame: Frame) -> None:
        """Run a cell's source in `__main__`; its last expression is shown as a notebook would."""
        source, filename, skip, files = frame.data
        self._learn(files)
        space = sys.modules["__main__"].__dict__
        space.update({name: value for name, value in self._take(frame.parcel).items() if name not in skip})
        tree = ast.parse(source, filename)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None

        def run() -> None:
            exec(compile(tree, filename, "exec", dont_inherit=True), space)  # else it would inherit this file's __future__
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), filename, "eval", dont_inherit=True), space)
                if value is not None:
                    print(repr(value))

        self._timed("cell", run)
        self._done(None, "nothing")

    def _timed(self, name: str, action: Callable[[], Any]) -> Any:
        start_ns = time.perf_counter_ns()
        try:
            return action()
        finally:
            end_ns = time.perf_counter_ns()
            recorder = here.recorder
            if recorder is not None:
                recorder.call(name, start_ns, end_ns)

    def _done(self, result: Any, what: str) -> None:
        parcel = wire.pack(result, known=self._known, what=what, lend=self._seat.lend)
        self._flush()
        self._channel.send("done", None, parcel)
        if parcel.lender:
            self._lent = parcel
        else:
            parcel.close()

    def _raised(self, error: BaseException) -> None:
        at_ns = time.perf_counter_ns()
        text = "" if isinstance(error, LabError) and not in_students_code(error) else students_traceback(error)
        self._flush()
        failure = RankFailure(
            self._seat.rank, self._name, headline(error), text, at_ns=at_ns, consequence=is_consequence(error)
        )  # fmt: skip
        self._channel.send("raised", failure)

    def _flush(self) -> None:
        recorder = here.recorder
        if recorder is not None and recorder.device_clock is not None:
            recorder.device_clock.flush()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # the student's code has closed it, or put None there
                stream.flush()
