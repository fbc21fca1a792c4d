"""Compares clocks of two machines, with a bound on the error, and converts times from one to the other.

An exchange is a question to the other side and its answer: the other clock was read after the question was sent and
before the answer was received. So each exchange bounds the offset of the clocks from both sides, however long the
messages took. `Clock` converts times while a group runs on several machines. A script asks a `ClockServer` over a
connection of its own; `on_reference` converts its times afterwards.

Source: K. Marzullo and S. Owicki, "Maintaining the Time in a Distributed System", 1983.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DRIFT_PPM: Final = 500  # µs per second; NTP slews a clock by at most this, and crystals are ten times better
STEEPEST: Final = 2  # the line changes its offset by at most one part in this many
SETTLE_NS: Final = 10_000_000  # it takes at least this long, so that a change of 50 µs alters durations by only 0.5 %
TOLERATED: Final = 4  # a deviation less than the bound divided by this leaves the line as it is


class Clock:
    """Another machine's clock, `time.perf_counter_ns` as here. Without readings it is this process's own, and exact.

    The offset is this clock minus the other one. It changes by at most `DRIFT_PPM`: the bounds of older readings,
    widened by that, hold as well. What all of them allow is one interval, which each reading widens by the time since
    the reading before, and then cuts.

    Times are converted by a line that aims at the middle of this interval. A live picture shows a time as soon as it is
    converted, so the line stays as it is up to the newest time that was converted. From there it approaches the middle
    with a slope between 0.5 and 1.5, so that it never reverses the order of two times.

    What is converted before the first reading does not count as converted, since nothing is known of the other clock.
    """

    def __init__(self) -> None:
        self._there_ns = 0  # of the newest reading
        self._low_ns = self._high_ns = 0  # the offset is between these when the other clock shows `_there_ns`
        self._newest_ns: int | None = None  # the newest time that was converted
        # The line: from each of these times the offset changes with this slope, until the next; at last it is constant.
        # Before the first it is constant, too.
        self._times: list[int] = []
        self._offsets: list[int] = []
        self._slopes: list[float] = []

    def read(self, sent_ns: int, there_ns: int, received_ns: int) -> None:
        """Take one reading of the other clock into account.

        Where a machine has slept or a clock was set, the next reading contradicts those before, which are then
        forgotten. A step smaller than the readings' bounds may go unnoticed, and the error then exceeds its bound.

        On this clock, the question was sent and the answer was received; in between, the other clock showed `there_ns`.
        """
        low_ns, high_ns = sent_ns - there_ns, received_ns - there_ns
        if self._times:
            # How much the offset may have changed since then, rounded up.
            change_ns = -(-abs(there_ns - self._there_ns) * DRIFT_PPM // 1_000_000)
            before_low_ns, before_high_ns = self._low_ns - change_ns, self._high_ns + change_ns
            if max(low_ns, before_low_ns) <= min(high_ns, before_high_ns):
                low_ns, high_ns = max(low_ns, before_low_ns), min(high_ns, before_high_ns)
        self._there_ns, self._low_ns, self._high_ns = there_ns, low_ns, high_ns
        self._aim((low_ns + high_ns) // 2)

    def _aim(self, target_ns: int) -> None:
        """Let the line approach an offset, and reach it when the other clock shows `_there_ns`, or soon after."""
        there_ns, fixed_ns = self._there_ns, self._newest_ns
        if not self._times or fixed_ns is None:
            self._times, self._offsets, self._slopes = [there_ns], [target_ns], [0.0]
            return
        bound_ns = (self._high_ns - self._low_ns) // 2
        from_ns = max(there_ns, fixed_ns)
        planned = [self._offset_ns(from_ns), *self._offsets[bisect_right(self._times, from_ns) :]]
        if all(abs(offset_ns - target_ns) * TOLERATED <= bound_ns for offset_ns in planned):
            return
        offset_ns = self._offset_ns(fixed_ns)
        off_ns = target_ns - offset_ns
        reached_ns = max(there_ns, fixed_ns + max(STEEPEST * abs(off_ns), SETTLE_NS))
        kept = bisect_right(self._times, fixed_ns)
        self._times[kept:] = [fixed_ns, reached_ns]
        self._offsets[kept:] = [offset_ns, target_ns]
        self._slopes[kept:] = [off_ns / (reached_ns - fixed_ns), 0.0]

    def here(self, ns: int) -> int:
        """Convert a time of the other clock to this process's clock."""
        if not self._times:
            return ns
        self._newest_ns = ns if self._newest_ns is None else max(ns, self._newest_ns)
        return ns + self._offset_ns(ns)

    def here_all(self, times_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Convert any number of times, in any order, as `here` does each of them."""
        import numpy as np  # imported here because ranks import this package, and a bare rank runs without numpy

        if not self._times or not len(times_ns):
            return times_ns.copy()
        oldest_ns, newest_ns = int(times_ns.min()), int(times_ns.max())
        self._newest_ns = newest_ns if self._newest_ns is None else max(newest_ns, self._newest_ns)
        first, last = self._piece(oldest_ns), self._piece(newest_ns)
        if first == last and not self._slopes[first]:
            return times_ns + self._offsets[first]
        times, offsets, slopes = (np.array(part[first : last + 1]) for part in (self._times, self._offsets, self._slopes))
        piece = np.maximum(np.searchsorted(times, times_ns, side="right") - 1, 0)
        since_ns = np.maximum(times_ns - times[piece], 0)
        converted: NDArray[np.int64] = times_ns + offsets[piece] + np.rint(since_ns * slopes[piece]).astype(np.int64)
        return converted

    @property
    def error_ns(self) -> int:
        """A bound on the error of what is converted, at the time of the newest reading."""
        ahead = bisect_right(self._times, self._there_ns)
        # Until the line has reached its target it may be further off than at the time of the reading.
        offsets_ns = [self._offset_ns(self._there_ns), *self._offsets[ahead:]] if self._times else [0]
        return max(max(offset_ns - self._low_ns, self._high_ns - offset_ns) for offset_ns in offsets_ns)

    def _piece(self, ns: int) -> int:
        return max(bisect_right(self._times, ns) - 1, 0)

    def _offset_ns(self, ns: int) -> int:
        piece = self._piece(ns)
        return self._offsets[piece] + round(max(ns - self._times[piece], 0) * self._slopes[piece])


ReadClock = Callable[[], int]

# Sixteen exchanges agreed within 13 µs with a clock that was an hour ahead and ran 1 ms/s fast; a single exchange under
# load was uncertain by 1.9 ms. The first ones run with cold caches.
TRIES: Final = 16
COMPARE_LIMIT_S: Final = 0.5  # for all tries together
GOOD_NS: Final = 20_000  # half the time of a quick exchange between two machines; a tighter bound is not worth more tries
SECRET_BYTES: Final = 16
ANSWER: Final = struct.Struct("<q")
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class Reading(NamedTuple):
    """The offset to rank 0's clock: `offset_ns` ± `within_ns` at the time `at_ns` of this clock."""

    at_ns: int
    offset_ns: int
    within_ns: int


def machine() -> str:
    """Return an identifier of this machine since its last boot; processes with the same one share a clock."""
    boot = ""
    with contextlib.suppress(OSError):  # only Linux has this file
        boot = BOOT_ID.read_text(encoding="ascii").strip()
    return f"{socket.gethostname()} {boot}".strip()


class ClockServer:
    """Serves the time of a clock in nanoseconds to clients that first send a secret of 16 bytes, on its own thread."""

    def __init__(self, host: str, secret: bytes, clock: ReadClock = time.perf_counter_ns) -> None:
        self._secret, self._clock = secret, clock
        self.asked = 0  # clients that have been served and have disconnected
        self._socket = socket.create_server((host, 0), backlog=128)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, name="labkit-clock", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            with connection, contextlib.suppress(OSError):
                connection.settimeout(COMPARE_LIMIT_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if connection.recv(SECRET_BYTES, socket.MSG_WAITALL) == self._secret:
                    while connection.recv(1):
                        connection.sendall(ANSWER.pack(self._clock()))
                    self.asked += 1

    def close(self) -> None:
        """Stop serving."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # otherwise `accept` keeps blocking
        self._socket.close()


def ask(hosts: Sequence[str], port: int, secret: bytes, clock: ReadClock = time.perf_counter_ns) -> Reading | None:
    """Read the clock of a `ClockServer` at the first of some addresses that accepts; None if none answered in time."""
    for host in hosts:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=COMPARE_LIMIT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(secret)
            return _ask(connection, clock)
    return None


def _ask(connection: socket.socket, clock: ReadClock) -> Reading | None:
    until_s = time.monotonic() + COMPARE_LIMIT_S
    exchanges: list[tuple[int, int, int]] = []
    reading = None
    with contextlib.suppress(OSError):
        while len(exchanges) < TRIES and time.monotonic() < until_s:
            asked_ns = clock()
            connection.sendall(b"?")
            answer = connection.recv(ANSWER.size, socket.MSG_WAITALL)
            heard_ns = clock()
            if len(answer) < ANSWER.size:
                break
            exchanges.append((asked_ns, *ANSWER.unpack(answer), heard_ns))
            reading = bounds(exchanges)
            if reading.within_ns < GOOD_NS:
                break
    return reading


def bounds(exchanges: Iterable[tuple[int, int, int]]) -> Reading:
    """Return the offset that is consistent with every exchange, and a bound on its error.

    Several exchanges give tighter bounds than the fastest one alone. There is at least one; each has when the question
    was sent, what the server's clock showed, and when the answer was received.
    """
    exchanges = list(exchanges)
    low = max(server - received for _, server, received in exchanges)
    high = min(server - sent for sent, server, _ in exchanges)
    if low > high:  # a clock drifts, or was set: the fastest exchange is the best estimate
        sent, server, received = min(exchanges, key=lambda e: e[2] - e[0])
        low, high = server - received, server - sent
    return Reading(exchanges[-1][2], (low + high) // 2, (high - low + 1) // 2)


def on_reference(times_ns: NDArray[np.int64], readings: Sequence[Reading]) -> NDArray[np.int64]:
    """Convert times of a clock to the reference clock, given at least one reading of the offset, in order.

    The offset is interpolated between readings, and extrapolated with the mean slope between the first and the last.
    This corrects for the drift of the crystals, about 10 µs per second.
    """
    import numpy as np  # imported here because a script may be recorded without numpy

    # Relative to the first reading: nanoseconds since boot would lose precision as floating-point numbers.
    first = readings[0]
    since = (times_ns - first.at_ns).astype(float)
    at, offset = ([float(r[i] - first[i]) for r in readings] for i in range(2))
    slope = offset[-1] / at[-1] if at[-1] else 0.0
    beyond = np.minimum(since, 0) + np.maximum(since - at[-1], 0)
    added: NDArray[np.int64] = first.offset_ns + np.rint(np.interp(since, at, offset) + slope * beyond).astype(np.int64)
    return times_ns + added
