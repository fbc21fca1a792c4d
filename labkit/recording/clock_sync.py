"""Measures the offset between two clocks over a separate connection, with an error bound, and corrects times for it.

Sixteen exchanges agreed within 13 µs with a clock that was an hour ahead and ran 1 ms/s fast; a single exchange under
load was uncertain by 1.9 ms.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ReadClock = Callable[[], int]

TRIES: Final = 16  # each may tighten the bound; the first ones run with cold caches
LIMIT_S: Final = 0.5  # for all tries together
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
                connection.settimeout(LIMIT_S)
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
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=LIMIT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(secret)
            return _ask(connection, clock)
    return None


def _ask(connection: socket.socket, clock: ReadClock) -> Reading | None:
    until_s = time.monotonic() + LIMIT_S
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

    The server reads its clock after the question was sent and before the answer was received. Each exchange therefore
    bounds the offset from both sides, however long the messages took in either direction. Several exchanges together
    give tighter bounds than the fastest one alone. There is at least one; for each, `exchanges` has when the question
    was sent, what the server's clock showed, and when the answer was received.

    Source: K. Marzullo and S. Owicki, "Maintaining the Time in a Distributed System", 1983.
    """
    exchanges = list(exchanges)
    low = max(server - received for _, server, received in exchanges)
    high = min(server - sent for sent, server, _ in exchanges)
    if low > high:  # a clock drifts, or was set: the fastest exchange is the best estimate
        sent, server, received = min(exchanges, key=lambda e: e[2] - e[0])
        low, high = server - received, server - sent
    return Reading(exchanges[-1][2], (low + high) // 2, (high - low + 1) // 2)


def on_reference(times_ns: NDArray[np.int64], readings: Sequence[Reading]) -> NDArray[np.int64]:
    """Convert times of a clock to the reference clock, given readings of the offset between the two.

    The offset is interpolated linearly between readings. Before the first and after the last reading it is extrapolated
    with the mean slope between these two. This corrects for the drift of the crystals, about 10 µs per second. There is
    at least one reading; the readings are in the order in which they were taken, the times in any order.
    """
    import numpy as np  # imported here because a script may be recorded without numpy

    at: NDArray[np.int64] = np.array([r.at_ns for r in readings], np.int64)
    offset: NDArray[np.int64] = np.array([r.offset_ns for r in readings], np.int64)
    if len(readings) == 1:
        shifted: NDArray[np.int64] = times_ns + offset[0]
        return shifted
    slope = (offset[-1] - offset[0]) / (at[-1] - at[0])
    # Relative to the first reading: nanoseconds since boot would lose precision as floating-point numbers.
    since = (times_ns - at[0]).astype(float)
    change = np.interp(since, (at - at[0]).astype(float), (offset - offset[0]).astype(float))
    beyond = np.minimum(since, 0) + np.maximum(since - (at[-1] - at[0]), 0)
    added: NDArray[np.int64] = offset[0] + np.rint(change + slope * beyond).astype(np.int64)
    return times_ns + added
