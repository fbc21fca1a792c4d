"""`load_trace`: reads a trace from a file of `Trace.save`, or from the folder of a traced script."""

from __future__ import annotations

from pathlib import Path

from labkit.errors.exceptions import LabError
from labkit.errors.wrong_calls import public_api
from labkit.tracing.script_traces import load_folder
from labkit.tracing.trace import Trace
from labkit.tracing.trace_file import read_file


@public_api
def load_trace(path: str | Path, *, run: int = -1) -> Trace:
    """Read a trace from a file of `Trace.save`, or from the folder that LABKIT_TRACE named for a script.

    A folder may be read while the script is still running. Notes about missing data are printed, and kept in the
    trace's `notes`.

    Args:
        path: path of the file or the folder.
        run: for a folder with several runs: the number of the run, in order of their start; -1 is the newest.

    Returns:
        the trace.

    Raises:
        LabError: there is no such file, folder or run, or it is not a trace of labkit.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        trace = load_folder(path, run)
        for note in trace.notes:
            print(f"labkit: {note}")
        return trace
    try:
        return Trace(**read_file(path))
    except FileNotFoundError:
        raise LabError(
            f"no trace at {str(path)!r}: run.trace.save(path) writes a file, LABKIT_TRACE=folder torchrun ... leaves a folder"
        ) from None
    except ValueError as error:
        raise LabError(f"{str(path)!r} is not a trace that labkit wrote (run.trace.save(path) writes one): {error}") from None
