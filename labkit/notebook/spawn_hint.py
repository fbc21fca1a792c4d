"""A hint at `group.spawn`, after a cell in which `mp.spawn` could not start a function of the notebook."""

from __future__ import annotations

import sys
from typing import Any, Final

__all__ = ["hint_after"]

HINT: Final = (
    "labkit: the processes of mp.spawn have no function that is defined in a notebook. On the ranks of a group: "
    "group.spawn(f, args=(...)) calls f(rank, ...), too."
)


def hint_after(result: Any) -> None:
    """Print the hint if `mp.spawn` failed since its processes exited, as they do if they cannot find their function.

    IPython calls this after each cell. An exception that the function raises in such a process is another error.
    """
    spawn = sys.modules.get("torch.multiprocessing.spawn")
    error = result.error_in_exec
    if spawn is not None and isinstance(error, spawn.ProcessExitedException) and error.exit_code == 1:
        print(HINT, file=sys.stderr)
