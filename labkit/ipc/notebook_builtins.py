"""What `input`, `breakpoint`, `exit`, `get_ipython` and the like, which a notebook gives to everybody, mean in a rank."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
import types
from typing import Any, Final, NoReturn

from labkit.errors.exceptions import LabError
from labkit.ipc.ranks_cell import instead_of_magic

__all__ = ["install", "reduce_ipython"]

_NO_DEBUGGER: Final = "{}: a rank has no keyboard for a debugger. Print instead, or call the function in the notebook itself"


def install() -> None:
    """Put them into this process, which is a rank."""
    builtins.input = _input
    sys.breakpointhook = _breakpoint
    vars(builtins).update(exit=_Exit("exit"), quit=_Exit("quit"), get_ipython=_Shell)


def reduce_ipython(thing: Any) -> Any:
    """For pickle: what stands in a rank for IPython's shell and for what it puts into every notebook; None for anything else."""
    kind = type(thing)
    if kind is types.MethodType:
        return (_builtin, ("get_ipython",)) if thing.__func__.__name__ == "get_ipython" else None
    if not kind.__module__.startswith(("IPython.", "ipykernel.")):
        return None
    if kind.__name__.endswith("ExitAutocall"):
        return _builtin, ("exit",)
    return (_Shell, ()) if kind.__name__.endswith("InteractiveShell") else None


def _builtin(name: str) -> Any:
    return getattr(builtins, name)


def _input(prompt: object = "", /) -> NoReturn:
    if sys._getframe(1).f_globals.get("__name__") == "cmd":  # `pdb.set_trace()` reads its commands with it
        raise LabError(_NO_DEBUGGER.format("pdb"))
    raise LabError(
        f"input({str(prompt)!r}): a rank has no keyboard. Ask in the notebook, and pass the answer: group.run(f, answer)"
    )


def _breakpoint(*_: Any, **__: Any) -> None:
    if os.environ.get("PYTHONBREAKPOINT") != "0":  # then Python ignores it everywhere
        raise LabError(_NO_DEBUGGER.format("breakpoint()"))


class _Exit:
    """Ends what this rank runs, and not the rank: `exit()` and `exit(0)` end it well, any other code is a failure."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, code: Any = None, **_: Any) -> NoReturn:
        raise SystemExit(code)

    def __repr__(self) -> str:
        return f"{self._name}() ends what this rank runs"


class _Shell:
    """What `get_ipython()` gives in a rank: shell commands work (`!ls` in a function), magics are refused in words."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}
        self.user_ns = sys.modules["__main__"].__dict__

    def system(self, command: str) -> None:
        """`!command`."""
        subprocess.run(command, shell=True, check=False)

    def getoutput(self, command: str, **_: Any) -> list[str]:
        """`lines = !command`."""
        return subprocess.run(command, shell=True, check=False, stdout=subprocess.PIPE, text=True).stdout.splitlines()

    def run_line_magic(self, name: str, line: str = "", *_: Any, **__: Any) -> None:
        """`%name line`."""
        if name != "matplotlib":  # which chooses where figures are shown: ranks have one place
            raise LabError(f"{f'%{name} {line}'.strip()!r} is IPython's, and ranks run plain Python. {instead_of_magic(name)}")

    def run_cell_magic(self, name: str, line: str = "", *_: Any) -> None:
        """`%%name line`."""
        self.run_line_magic(f"%{name}", line)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"get_ipython().{name}: IPython lives in the notebook, and this is a rank")
