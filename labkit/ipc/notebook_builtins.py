"""`input`, `exit` and `get_ipython` in a rank: what they do there in place of the notebook's versions."""

from __future__ import annotations

import builtins
import subprocess
import sys
import types
from typing import Any, NoReturn

from labkit.errors.exceptions import LabError
from labkit.ipc.ranks_cell import instead_of_magic


def install() -> None:
    """Install them in this process, which is a rank."""
    builtins.input = _input
    vars(builtins).update(exit=_Exit("exit"), quit=_Exit("quit"), get_ipython=_Shell)


def reduce_ipython(thing: Any) -> Any:
    """Reduce IPython's shell, and the names that it defines in every notebook, to a rank's versions of them.

    Returns:
        the constructor in the rank and its arguments, for pickle; None for other objects.
    """
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
    raise LabError(
        f"input({str(prompt)!r}): a rank has no keyboard. Ask in the notebook, and pass the answer: group.run(f, answer)"
    )


class _Exit:
    """Ends the function that this rank runs, but not the rank: `exit()` and `exit(0)` succeed, other codes fail."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, code: Any = None, **_: Any) -> NoReturn:
        raise SystemExit(code)

    def __repr__(self) -> str:
        return f"{self._name}() ends the function that this rank runs"


class _Shell:
    """The result of `get_ipython()` in a rank: shell commands work (`!ls` in a function), magics raise an error."""

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
        if name != "matplotlib":  # it chooses where figures appear; those of ranks always appear under the cell
            raise LabError(
                f"{f'%{name} {line}'.strip()!r} is IPython syntax, and ranks run plain Python. {instead_of_magic(name)}"
            )

    def run_cell_magic(self, name: str, line: str = "", *_: Any) -> None:
        """`%%name line`."""
        self.run_line_magic(f"%{name}", line)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"get_ipython().{name}: IPython runs in the notebook, and this is a rank")
