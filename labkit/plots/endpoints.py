"""Endpoints of communication: the ranks, or, for a rank with several TensorFlow devices, each of its devices."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from labkit.recording.events import device_number
from labkit.recording.schema import COMMUNICATION, COMPUTE
from labkit.tracing.trace import Trace

OTHERS: Final = "others"


@dataclass(frozen=True, slots=True)
class Ends:
    """The endpoints of a trace's communication.

    Args:
        names: name of each endpoint.
        rank: rank number of each endpoint, shape (endpoints,).
        place: index into `names` by rank and by `device_number`, shape (ranks, devices + 1).
            Device 0 is the rank as a whole.
    """

    names: tuple[str, ...]
    rank: NDArray[np.int64]
    place: NDArray[np.int64]

    @property
    def devices(self) -> bool:
        """Whether any endpoint is a device."""
        return bool(self.place.shape[1] > 1)

    def of(self, rows: Any) -> NDArray[np.int64]:
        """Return the endpoint that recorded each of these rows."""
        return np.asarray(self.place[rows["rank"], device_number(rows)])

    def root(self, ranks: NDArray[Any]) -> NDArray[np.int64]:
        """Return the endpoint of a collective's root, given the root's rank: in TensorFlow, the rank's first device."""
        return np.asarray(self.place[ranks, min(1, self.place.shape[1] - 1)])

    def opposite(self, sent: Any, received: Any) -> NDArray[np.int64]:
        """Return the peer endpoint of each message: the device that recorded the matching row; the rank if none did."""
        found = np.array(self.place[sent["peer"], 0])
        if self.devices:
            at = defaultdict(list)
            for key, end in zip(_keys(received, "rank"), self.of(received).tolist(), strict=True):
                at[key].append(end)
            for i, key in enumerate(_keys(sent, "peer")):
                if at.get(key):
                    found[i] = at[key].pop(0)
        return found

    def matter(self, ends: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the endpoints to show.

        These are all endpoints, except for ranks that have devices and do not occur in `ends` themselves.
        """
        shown = np.ones(len(self.names), bool)
        with_devices = (self.place != self.place[:, :1]).any(axis=1)
        shown[self.place[with_devices, 0]] = False
        shown[ends] = True
        return shown


def devices_of(trace: Trace, rank: int) -> list[int]:
    """Return the active devices of a rank, by `device_number`; [] if there is at most one."""
    data = trace.columns.data
    active = (data["rank"] == rank) & ((data["kind"] == COMPUTE) | (data["kind"] == COMMUNICATION))
    numbers = np.unique(device_number(data[active]))
    found: list[int] = numbers[numbers > 0].tolist()
    return found if len(found) > 1 else []


def ends_of(trace: Trace) -> Ends:
    """Return the endpoints of a trace; those ranks of a simulation that it lacks are one endpoint, "others"."""
    devices = [devices_of(trace, rank) for rank in range(len(trace.ranks))]
    place = np.zeros((len(devices), 1 + max((d[-1] for d in devices if d), default=0)), np.int64)
    names: list[str] = []
    ranks: list[int] = []
    for rank, (name, of_rank) in enumerate(zip(trace.ranks, devices, strict=True)):
        place[rank] = len(names)
        names.append(name)
        for number in of_rank:
            place[rank, number] = len(names)
            names.append(f"CPU:{number - 1}" if len(devices) == 1 else f"{name} CPU:{number - 1}")
        ranks += [rank] * (1 + len(of_rank))
    if trace.simulated > len(devices):
        place = np.append(place, np.full((1, place.shape[1]), len(names)), axis=0)
        names.append(OTHERS)
        ranks.append(len(devices))
    return Ends(tuple(names), np.array(ranks, np.int64), place)


def _keys(rows: Any, other: str) -> list[tuple[int, int, int]]:
    return list(zip(rows["group"].tolist(), rows["match"].tolist(), rows[other].tolist(), strict=True))
