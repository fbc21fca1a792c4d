"""The offset of two clocks: measured over its own connection, with a bound on the error, and removed from times."""

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

__all__ = ["ClockServer", "Reading", "ask", "bounds", "machine", "on_reference"]

Clock = Callable[[], int]

TRIES: Final = 16  # each may narrow the bound; the first ones find caches cold
LIMIT_S: Final = 0.5  # for all of them
GOOD_NS: Final = 20_000  # half the time of a quick exchange between two machines: better is not worth more tries
SECRET_BYTES: Final = 16
ANSWER: Final = struct.Struct("<q")
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class Reading(NamedTuple):
    """The offset to rank 0's clock: `offset_ns`, accurate to `within_ns`, when this clock showed `at_ns`."""

    at_ns: int
    offset_ns: int
    within_ns: int


def machine() -> str:
    """What this machine has of its own, as long as it is not started anew: its processes share one clock."""
    boot = ""
    with contextlib.suppress(OSError):  # only Linux has it
        boot = BOOT_ID.read_text(encoding="ascii").strip()
    return f"{socket.gethostname()} {boot}".strip()


class ClockServer:
    """Tells its clock to whoever knows the secret, on a thread of its own.

    Args:
        host: the address to listen on; "" for all.
        secret: 16 bytes.
        clock: what it tells, in nanoseconds.

    Attributes:
        port: where it listens.
        asked: how often somebody has come, asked, and gone.
    """

    def __init__(self, host: str, secret: bytes, clock: Clock = time.perf_counter_ns) -> None:
        self._secret, self._clock = secret, clock
        self.asked = 0
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
        """Tell nobody any more."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # else `accept` goes on
        self._socket.close()


def ask(hosts: Sequence[str], port: int, secret: bytes, clock: Clock = time.perf_counter_ns) -> Reading | None:
    """Read the clock of a `ClockServer`.

    Args:
        hosts: addresses where it may be found; the first that answers counts.
        port: where it listens.
        secret: the server's.
        clock: this process's, in nanoseconds.

    Returns:
        the reading; None where nobody answered in time.
    """
    for host in hosts:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=LIMIT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(secret)
            return _ask(connection, clock)
    return None


def _ask(connection: socket.socket, clock: Clock) -> Reading | None:
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
    """The offset that agrees with every exchange, and how far from it the truth may be.

    The server read its clock after it was asked and before the answer was heard, so each exchange bounds the offset
    from both sides, however long the ways there and back took. The bounds of several are narrower than those of the
    quickest alone.
    Source: K. Marzullo and S. Owicki, "Maintaining the Time in a Distributed System", 1983.

    Args:
        exchanges: when the question was sent, what the server's clock said, and when the answer was heard; at least
            one.
    """
    exchanges = list(exchanges)
    low = max(server - received for _, server, received in exchanges)
    high = min(server - sent for sent, server, _ in exchanges)
    if low > high:  # clocks that drift, or were set: the quickest exchange is the best that is known
        sent, server, received = min(exchanges, key=lambda e: e[2] - e[0])
        low, high = server - received, server - sent
    return Reading(exchanges[-1][2], (low + high) // 2, (high - low + 1) // 2)


def on_reference(times_ns: NDArray[np.int64], readings: Sequence[Reading]) -> NDArray[np.int64]:
    """Times of a clock on the reference's, by readings of their difference.

    Between two readings the difference is taken to change evenly; before the first and after the last one, as fast as
    it did between these on the whole. That takes out the drift of the crystals, some 10 µs in a second.

    Args:
        times_ns: any number of times, in any order.
        readings: at least one, in the order in which they were made.
    """
    import numpy as np  # here, not above: a script that is recorded may do without numpy

    at: NDArray[np.int64] = np.array([r.at_ns for r in readings], np.int64)
    offset: NDArray[np.int64] = np.array([r.offset_ns for r in readings], np.int64)
    if len(readings) == 1:
        shifted: NDArray[np.int64] = times_ns + offset[0]
        return shifted
    slope = (offset[-1] - offset[0]) / (at[-1] - at[0])
    # Counted from the first reading: as floating-point numbers, nanoseconds since the start of a machine lose some.
    since = (times_ns - at[0]).astype(float)
    change = np.interp(since, (at - at[0]).astype(float), (offset - offset[0]).astype(float))
    beyond = np.minimum(since, 0) + np.maximum(since - (at[-1] - at[0]), 0)
    added: NDArray[np.int64] = offset[0] + np.rint(change + slope * beyond).astype(np.int64)
    return times_ns + added
