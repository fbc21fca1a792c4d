"""Progress of a run: steps done and left, steps per second, and the last recorded values."""

from __future__ import annotations

from collections import deque
from typing import Final

from labkit.errors.lists import counted
from labkit.errors.units import clock_time, rate_in_words
from labkit.plots.live.curves import recorded
from labkit.plots.style import shortened
from labkit.recording.schema import STEP, STEPS_IN_ALL
from labkit.tracing.trace import Trace

KEPT_STEPS: Final = 100  # per rank; the rate is the mean over these
STALLED: Final = 5  # times the longest step so far without the end of a step: rate and time left are no longer true
STALLED_NS: Final = 2_000_000_000  # the least time without the end of a step for which that is said
NAMES_SHOWN: Final = 4  # the most recorded values in the text


class _StepsOfRank:
    """The steps of one rank."""

    def __init__(self) -> None:
        self.last: deque[tuple[int, int]] = deque(maxlen=KEPT_STEPS)  # start and end in ns
        self.ended_ns = 0  # when the last step ended
        self.longest_ns = 0
        self.count = 0  # in the whole run
        self.in_loop = 0  # in the current loop
        self.loops = 0
        self.loop_length = 0  # 0: unknown

    def add(self, loops: list[tuple[int, int]], steps: list[tuple[int, int]], sums: list[tuple[int, int]]) -> None:
        """Add new loops as (start in ns, length), steps as (start, end), and sums of steps as (start, count)."""
        since = 0
        if loops:
            self.loops += len(loops)
            since, self.loop_length = loops[-1]
            self.in_loop = 0
        for start, count in sums:
            self.count += count
            self.in_loop += count * (start >= since)
        self.ended_ns = max([self.ended_ns, *(end for _, end in steps), *(start for start, _ in sums)])
        self.longest_ns = max([self.longest_ns, *(end - start for start, end in steps)])
        for start, end in steps:
            if self.last and start < self.last[-1][1]:
                continue  # a step of an outer loop
            self.last.append((start, end))
            self.count += 1
            self.in_loop += start >= since


class Progress:
    """The steps and recorded values of a run of so many ranks so far."""

    def __init__(self, ranks: int) -> None:
        self._steps = [_StepsOfRank() for _ in range(ranks)]
        self._values: dict[str, dict[int, float]] = {}

    def add(self, new: Trace) -> None:
        """Add the newly completed spans and values."""
        loops: dict[int, list[tuple[int, int]]] = {}
        for scalar in new.scalars:
            if scalar.name == STEPS_IN_ALL:
                loops.setdefault(scalar.rank, []).append((scalar.time_ns, int(scalar.value)))
        for scalar in recorded(new.scalars):
            self._values.setdefault(scalar.name, {})[scalar.rank] = scalar.value
        data = new.columns.data
        steps = data[data["kind"] == STEP]
        for rank, own in enumerate(self._steps):
            rows = steps[steps["rank"] == rank]
            if len(rows) or rank in loops:
                is_sum = rows["count"] > 1
                each, sums = rows[~is_sum], rows[is_sum]
                own.add(
                    loops.get(rank, []),
                    list(zip(each["start_ns"].tolist(), each["end_ns"].tolist(), strict=True)),
                    list(zip(sums["start_ns"].tolist(), sums["count"].tolist(), strict=True)),
                )

    @property
    def done(self) -> int:
        """The number of steps completed by all ranks that have any."""
        slowest = self._slowest()
        return slowest.count if slowest else 0

    @property
    def fraction(self) -> float | None:
        """The completed fraction of the current loop, from 0 to 1; None if its length is unknown."""
        slowest = self._slowest()
        return min(slowest.in_loop / slowest.loop_length, 1.0) if slowest and slowest.loop_length else None

    def last_step(self) -> tuple[int, int] | None:
        """Return start and end in ns, over all ranks, of the last step that all ranks have completed; None for none."""
        done, found = self.done, []
        for own in self._steps:
            ahead = own.count - done
            if own.count and ahead < len(own.last):
                found.append(own.last[-1 - ahead])
        if not done or not found:
            return None
        return min(start for start, _ in found), max(end for _, end in found)

    def parts(self, now_ns: int = 0) -> tuple[str, ...]:
        """Return texts for steps, rate and time left ("" if unknown), and for each of the last values.

        Long after the last step, its age takes the place of the rate; not if the current time is not given.
        """
        steps, rate, left, slowest = "", "", "", self._slowest()
        if slowest is not None:
            length = slowest.loop_length
            number = length or slowest.count
            steps = (f"{slowest.in_loop} of " if length else "") + counted(number, "step")
            since_ns = now_ns - slowest.ended_ns
            going_on = slowest.count and slowest.in_loop != length
            if going_on and since_ns > max(STALLED * slowest.longest_ns, STALLED_NS):
                rate = f"no step for {clock_time(since_ns / 1e9)}"
            elif per_s := self._steps_per_s(slowest):
                rate = rate_in_words(per_s, "step")
                if length:
                    left = clock_time((length - slowest.in_loop) / per_s)
                    left = f"{left} left" if slowest.loops == 1 else f"{left} left in this loop"
        values = [
            f"{shortened(name, 20)} {sum(of.values()) / len(of):.4g}" for name, of in list(self._values.items())[:NAMES_SHOWN]
        ]
        return (steps, rate, left, *values)

    def _slowest(self) -> _StepsOfRank | None:
        return min((own for own in self._steps if own.count or own.loops), key=lambda own: own.count, default=None)

    @staticmethod
    def _steps_per_s(own: _StepsOfRank) -> float | None:
        if not own.last:
            return None
        took_ns = own.last[-1][1] - own.last[0][0]
        return len(own.last) * 1e9 / took_ns if took_ns > 0 else None
