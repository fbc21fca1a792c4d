"""The checks of what predictions are given: numbers, links, and the names of pipeline schedules."""

from __future__ import annotations

from typing import Any, Final

from labkit.costs.link import Link
from labkit.costs.network import Network
from labkit.errors.lists import listed
from labkit.errors.wrong_calls import check_number

_COUNTS: Final = frozenset(
    {"ranks", "stages", "micro_batches", "chunks", "buckets", "batch", "sequence", "hidden", "value_bytes", "calls"}
)
LARGEST: Final = 1e30  # bytes or seconds: more is certainly a mistake, and would overflow
GPIPE: Final = "gpipe"
ONE_F_ONE_B: Final = "1f1b"
INTERLEAVED: Final = "interleaved 1f1b"
_SCHEDULES: Final = {  # letters and digits only, in lower case
    "gpipe": GPIPE, "1f1b": ONE_F_ONE_B, "interleaved": INTERLEAVED, "interleaved1f1b": INTERLEAVED,
}  # fmt: skip


def check_arguments(**arguments: Any) -> None:
    """Check arguments by name: links and networks, counts (whole numbers from 1), and other numbers (from 0).

    Raises:
        TypeError, ValueError: an invalid argument.
    """
    for name, value in arguments.items():
        if name == "link":
            if not isinstance(value, Link | Network):
                raise TypeError(
                    f"link={value!r}: expected a Link, as in lab.Link(gbit_per_s=1, latency_us=50) or lab.Link.ethernet_1g, "
                    "or a lab.Network"
                )
        elif name in _COUNTS:
            check_number(value, f"{name}={value!r}: expected a whole number from 1", whole=True, at_least=1)
        else:
            check_number(value, f"{name}={value!r}: expected a number from 0", at_least=0, below=LARGEST)


def schedule_name(given: Any, argument: str) -> str:
    """Return `GPIPE`, `ONE_F_ONE_B` or `INTERLEAVED` for "1F1B", "interleaved_1f1b", torch's "ScheduleGPipe", ...

    Raises:
        TypeError, ValueError: there is no schedule of this name.
    """
    expected = f"{argument}={given!r}: expected {listed(map(repr, (GPIPE, ONE_F_ONE_B, INTERLEAVED)), word='or')}"
    if not isinstance(given, str):
        raise TypeError(expected)
    letters = "".join(character for character in given.lower() if character.isalnum())
    if letters.removeprefix("schedule") not in _SCHEDULES:
        raise ValueError(expected)
    return _SCHEDULES[letters.removeprefix("schedule")]
