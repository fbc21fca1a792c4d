"""A hint below a cell that was written for a launcher, and failed: `group.spawn`, or `%%ranks`."""

from __future__ import annotations

import sys
from typing import Any, Final

SPAWN: Final = (
    "labkit: the processes of mp.spawn have no function that is defined in a notebook. On the ranks of a group: "
    "group.spawn(f, args=(...)) calls f(rank, ...), too."
)
NO_RANK: Final = (
    "labkit: the notebook's own process is no rank. Run the cell on the ranks of a group = lab.Group(2), by `%%ranks group` as "
    "its first line."
)
# What torch says where init_process_group finds no launcher's environment variables.
NOT_SET: Final = ("environment variable RANK expected", "environment variable WORLD_SIZE expected")
LAUNCHER: Final = "torch.multiprocessing.spawn"


def hint_after(result: Any) -> None:
    """Print a hint if a cell's error calls for one; IPython calls this after each cell.

    `mp.spawn` fails since its processes exit if they cannot find their function. An exception that the function raises
    in such a process is another error.
    """
    spawn, error = sys.modules.get(LAUNCHER), result.error_in_exec
    if spawn is not None and isinstance(error, spawn.ProcessExitedException) and error.exit_code == 1:
        print(SPAWN, file=sys.stderr)
    elif isinstance(error, ValueError) and any(words in str(error) for words in NOT_SET):
        print(NO_RANK, file=sys.stderr)
