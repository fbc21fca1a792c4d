"""The names of pipeline schedules: the canonical spelling of each, and the accepted alternatives."""

from __future__ import annotations

from typing import Any, Final

from labkit.errors.lists import listed

GPIPE: Final = "gpipe"
ONE_F_ONE_B: Final = "1f1b"
INTERLEAVED: Final = "interleaved 1f1b"
_NAMES: Final = (GPIPE, ONE_F_ONE_B, INTERLEAVED)
_ALSO: Final = {  # letters and digits only, in lower case
    "gpipe": GPIPE,
    "schedulegpipe": GPIPE,  # the class in torch.distributed.pipelining
    "1f1b": ONE_F_ONE_B,
    "schedule1f1b": ONE_F_ONE_B,
    "interleaved": INTERLEAVED,
    "interleaved1f1b": INTERLEAVED,
    "scheduleinterleaved1f1b": INTERLEAVED,
}


def schedule_name(given: Any, where: str) -> str:
    """The canonical name of a schedule: `GPIPE`, `ONE_F_ONE_B` or `INTERLEAVED`.

    Args:
        given: "1F1B", "interleaved_1f1b", torch's "ScheduleGPipe", ...
        where: the name of the argument, for the error message.

    Raises:
        TypeError: `given` is not a string.
        ValueError: there is no schedule of this name.
    """
    expected = listed(map(repr, _NAMES), word="or")
    if not isinstance(given, str):
        raise TypeError(f"{where}={given!r}: expected {expected}")
    name = _ALSO.get("".join(character for character in given.lower() if character.isalnum()))
    if name is None:
        raise ValueError(f"{where}={given!r}: expected {expected}")
    return name
