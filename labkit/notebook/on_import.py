"""What `import labkit` starts: in a notebook `%%ranks` and the preload of torch; in a script, recording on request."""

from __future__ import annotations

import itertools
import os
import sys

from labkit.notebook.spawn_hint import hint_after
from labkit.recording.script_folder import VARIABLE

__all__ = ["begin"]


def begin() -> None:
    """Prepare this process for labkit.

    In a notebook's kernel, register `%%ranks` and a hint at `group.spawn`, and start a server that imports torch in the
    background, which takes a second. In a script, start recording if `LABKIT_TRACE` names a folder.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    if shell is None:
        if os.environ.get(VARIABLE) and not _is_command():
            from labkit.worker import script_recorder

            script_recorder.begin()
        return

    def ranks(line: str, cell: str) -> None:
        from labkit.notebook import ranks_magic

        ranks_magic.ranks(line, cell, shell)

    shell.register_magic_function(ranks, "cell", "ranks")
    shell.events.register("post_run_cell", hint_after)
    if hasattr(shell, "kernel"):
        from labkit.group.open_groups import warm_up

        warm_up()


def _is_command() -> bool:
    """Whether this process runs `python -m labkit script.py`, which starts recording itself, with the script's name."""
    given = sys.orig_argv
    return sys.argv[:1] == ["-m"] and ("-m", "labkit") in itertools.pairwise(given)
