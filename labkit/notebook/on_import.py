"""What `import labkit` starts: in a notebook its magics and the preload of torch; in a script, recording on request."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from typing import Final

import labkit.ipc.options  # noqa: F401  # keeps the variables of this moment
from labkit.notebook.spawn_hint import hint_after
from labkit.recording import TRACE_VARIABLE

FIRST_USED: Final = ("labkit.notebook.watched_group", "labkit.plots.live.live")  # with what they import, 70 modules


def begin() -> None:
    """Prepare this process for labkit.

    In IPython, register `%%ranks`, `%%rank` and a hint at `group.spawn`. In the background, start a server
    that imports torch, which takes a second, and import here what the first group needs, which takes 0.06 s. In a
    script, start recording if `LABKIT_TRACE` names a folder.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    if shell is None:
        if os.environ.get(TRACE_VARIABLE) and not _is_command():
            from labkit.worker import script_recorder

            script_recorder.begin()
        return

    def register(name: str) -> None:
        def magic(line: str, cell: str) -> None:
            from labkit.notebook import ranks_magic

            getattr(ranks_magic, name)(line, cell, shell)

        shell.register_magic_function(magic, "cell", name)

    register("ranks")
    register("rank")
    shell.events.register("post_run_cell", hint_after)
    if hasattr(shell, "kernel"):
        from labkit.group.open_groups import warm_up
        from labkit.launch.starters import in_background

        warm_up()
        in_background(_import_first_used)


def _import_first_used() -> None:
    for name in FIRST_USED:
        importlib.import_module(name)


def _is_command() -> bool:
    """Whether this process runs `python -m labkit script.py`, which starts recording itself, with the script's name."""
    given = sys.orig_argv
    return sys.argv[:1] == ["-m"] and ("-m", "labkit") in itertools.pairwise(given)
