"""`python -m labkit script.py` and `torchrun -m labkit script.py` record a script; `python -m labkit lab` is a command.

The script does not import labkit. The trace is written to the folder that LABKIT_TRACE names, or to `labkit-trace`;
`labkit.load_trace` reads it.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NoReturn

from labkit.recording import TRACE_FOLDER, TRACE_VARIABLE
from labkit.worker import script_recorder

# The module of each command; its `main` takes the command's arguments and returns the exit status.
COMMANDS: Final = {
    "assign": "labkit.teaching.classroom.assign",
    "doctor": "labkit.notebook.doctor",
    "grade": "labkit.teaching.classroom.grade",
    "lab": "labkit.teaching.lessons",
}
USAGE: Final = """usage: python -m labkit [-m] SCRIPT [argument ...]
       torchrun [option ...] -m labkit [-m] SCRIPT [argument ...]
       python -m labkit lab [option of JupyterLab ...]
       python -m labkit doctor
       python -m labkit assign --lessons 02 04 --to FOLDER [option ...]
       python -m labkit grade NOTEBOOK ... [option ...]

Runs SCRIPT (a file, or with -m a module) as Python would, and records its ranks into the folder LABKIT_TRACE
(default: ./labkit-trace). In a notebook, labkit.load_trace(folder) reads and draws the trace.

lab: copies the lessons into the folder LABKIT_MY_LESSONS (default: ./my_lessons) and opens JupyterLab on the first.
doctor: says what this machine can run. assign: hands out lessons to a class; grade: judges its answers (--help).
A script called "lab" is run as ./lab."""


def main(arguments: list[str]) -> None:
    """Run a command of labkit, or the script or module of a command line as `__main__`.

    Args:
        arguments: the arguments after `python -m labkit`.
    """
    if arguments and arguments[0] in COMMANDS:
        sys.exit(importlib.import_module(COMMANDS[arguments[0]]).main(arguments[1:]))
    as_module = arguments[:1] == ["-m"]
    script, *rest = arguments[as_module:] or [""]
    if not script or script in ("-h", "--help"):
        print(USAGE, file=sys.stdout if script else sys.stderr)
        sys.exit(0 if script else 2)
    _check(script, as_module)
    sys.argv[:] = [script, *rest]
    if not os.environ.get(TRACE_VARIABLE):
        os.environ[TRACE_VARIABLE] = TRACE_FOLDER
        if os.environ.get("RANK", "0") == "0":
            print(
                f"labkit: {TRACE_VARIABLE} is not set, so the trace is written to {TRACE_FOLDER!r} "
                f"(labkit.load_trace({TRACE_FOLDER!r}) reads it)",
                file=sys.stderr,
            )
    script_recorder.begin()
    sys.excepthook = _without_labkit(sys.excepthook)
    if as_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        _run_file(script)


def _check(script: str, as_module: bool) -> None:
    if as_module:
        try:
            exists = find_spec(script) is not None
        except ImportError:
            exists = False
    else:
        exists = os.path.isfile(script)
    if not exists:
        _refuse(f"there is no {'module' if as_module else 'file'} {script!r}")


def _refuse(why: str) -> NoReturn:
    print(f"python -m labkit: {why}\n{USAGE}", file=sys.stderr)
    sys.exit(2)


def _run_file(script: str) -> None:
    """Run a file as `python script.py` does: in a `__main__` without a spec, so that spawned processes use its file."""
    path = Path(script).absolute()
    sys.path[0] = str(path.resolve().parent)
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=str(path), __builtins__=__builtins__)
    sys.modules["__main__"] = module
    exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), module.__dict__)


def _without_labkit(hook: Any) -> Any:
    """Wrap an exception hook so that tracebacks begin with the script."""

    def shown(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        ours = (__file__, runpy.__file__, "<frozen runpy>")
        first = trace
        while first is not None and first.tb_frame.f_code.co_filename in ours:
            first = first.tb_next
        hook(kind, error.with_traceback(first or trace), first or trace)

    return shown


if __name__ == "__main__":
    main(sys.argv[1:])
