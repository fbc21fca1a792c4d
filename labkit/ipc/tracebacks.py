"""How an error in a rank reads: one line for it, and a traceback with the student's frames alone."""

from __future__ import annotations

import linecache
import os
import re
import textwrap
import time
import traceback
from collections.abc import Iterator
from typing import Final

from labkit.errors.exceptions import LabError, RankFailure
from labkit.errors.own_code import LABKIT
from labkit.ipc.rpc_errors import remote_error
from labkit.recording.record import here, is_students, label

__all__ = [
    "headline", "in_students_code", "is_consequence", "lost_connection", "raised_by_student", "students_traceback", "unreadable",
    "warning",
]  # fmt: skip

FRAMES: Final = 12  # of a traceback; endless recursion would fill the notebook
HEADLINE_CHARACTERS: Final = 400
TEXT_CHARACTERS: Final = 20_000  # of a traceback with its messages: a printed tensor may stand in one

_MARK = "\x00{}\x00"
_CUT = " ... ({:,} characters left out) ... "
_GAP = "\x00{:,} frames left out\x00"
_GAPS = re.compile(r'File "\x00([^\x00]+)\x00", line 0, in ')
_MARKED = re.compile(r"^(?P<margin>[ |]*).*\x00(?P<number>\d+)\x00$", re.MULTILINE)
_KERAS = "Exception encountered when calling "
# Colours and whatever else moves a terminal's cursor or writes its title; Keras writes its messages in bold.
_ANSI = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\\\)?|[@-Z\\\\^_])")
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # that a terminal obeys, or that no file can hold
_IN_C = re.compile(r"\nException raised from .* \(most recent call first\):(\nframe #\d+: .*)*")  # frames of torch's own C++
_SOURCE = re.compile(r"\[/\S+\.(cc|cpp|h):\d+\] ")  # of torch's C++, before the message
# What gloo, NCCL, RPC and TensorFlow say where another rank is gone.
_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "UnavailableError",
    "connection was aborted",
    "Collective ops is aborted by",
    "(this error originated at tensorpipe/",
    "remote process exited or there was a network error",
)
_FILE_LINE = re.compile(r'\s*File "(?P<file>[^"]+)", line ')
# Frames that tell nothing even as the innermost: what AutoGraph makes of a function, and where TensorFlow raises everything.
_EMPTY = (
    "__autograph_generated_file",
    *(os.path.join("tensorflow", "python", *place) for place in (("eager", "execute.py"), ("util", "traceback_utils.py"))),
)
_TRACED = "outer_factory.<locals>.inner_factory.<locals>.tf__"  # what AutoGraph puts before a function's name


# In AutoGraph's own list, as in "tf_data_parallel.py", line 42, in step  *, with its line of source.
_OURS_TRACED = re.compile(rf'^ *File "{re.escape(LABKIT)}[^"]*", line \d+, in .*  \*\n.*\n', re.MULTILINE)


def headline(error: BaseException) -> str:
    """The error's type and message in one line."""
    return _cut_text(_headline(error), HEADLINE_CHARACTERS)


def warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    """A warning as the student reads it, for `warnings.formatwarning`: it names the cell, and no temporary file."""
    name = label(filename) if is_students(filename) else filename.rpartition(f"site-packages{os.sep}")[2]
    source = (line if line is not None else linecache.getline(filename, lineno)).strip()
    return f"{name}, line {lineno}: {category.__name__}: {message}\n" + (f"    {source}\n" if source else "")


def _headline(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        if _raised_in(error, "argparse"):
            return "argparse refused the command line; a rank has an empty one. Give arguments: parse_args(['--epochs', '3'])"
        return f"the function called exit({error.code!r})" if error.code is not None else "the function called exit()"
    if isinstance(error, LabError):
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    text = "".join(traceback.format_exception_only(error))
    remote = remote_error(text)
    if remote is not None:
        return remote.headline
    lines = _readable(text).strip().splitlines()
    if isinstance(error, SyntaxError):  # file, line and a mark come first
        return lines[-1]
    if lines[0].endswith(": in user code:"):  # AutoGraph's report of its own: frames, an empty line, and then the error
        return _of_keras(_behind_frames(lines[1:]) or lines)
    if lines[0].endswith(": Graph execution error:"):  # frames, an empty line, the message, where in the graph
        return lines[0].removesuffix("Graph execution error:") + _after_frames(lines[1:])
    return _of_keras(lines)


def _raised_in(error: BaseException, module: str) -> bool:
    """Whether a function of that module raised it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__") == module


def _of_keras(lines: list[str]) -> str:
    """The headline of a message that may be Keras': where it was, an empty line, the message, what the layer was given."""
    if _KERAS not in lines[0]:
        return lines[0]
    kind, *where = lines[0].partition(_KERAS)
    message = [line for line in lines[1:] if line.strip()]
    if len(message) > 1 and message[0].endswith("Error encountered:"):  # while it tried out the layer on symbols
        del message[0]
    return kind + (message[0] if message else "".join(where))


def in_students_code(error: BaseException) -> bool:
    """Whether the student's code had a part in it."""
    return any(is_students(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__))


def raised_by_student(error: BaseException) -> bool:
    """Whether a line of the student's own raised it, and no library that the line called."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and is_students(frames[-1].f_code.co_filename)


def students_traceback(error: BaseException) -> str:
    """The traceback as Python prints it, with the student's frames alone, and the innermost one, whosever it is."""
    whole = traceback.TracebackException.from_exception(error, capture_locals=False)
    remote: list[str] = []
    for part in _parts(whole):
        said = remote_error(str(part))
        if said is not None:
            setattr(part, "_str", _MARK.format(len(remote)))  # noqa: B010  # typeshed does not know it
            remote.append(said.traceback)
        part.stack = _cut(part.stack, whole_innermost=said is None)
    text = "".join(whole.format())
    # The callee's frames and its error take the place of the line in which the caller's error would repeat them.
    text = _MARKED.sub(lambda m: textwrap.indent(remote[int(m["number"])], m["margin"], lambda _: True), text)
    return _cut_text(_readable(_GAPS.sub(r"[\1]", text)), TEXT_CHARACTERS)


def is_consequence(error: BaseException) -> bool:
    """Whether it came of another rank's end: it says so, or one of those does that it came from."""
    seen: set[int] = set()
    part: BaseException | None = error
    while part is not None and id(part) not in seen:
        if lost_connection("".join(traceback.format_exception_only(part))):
            return True
        seen.add(id(part))
        part = part.__cause__ or part.__context__  # also where `from None` hides it
    return False


def lost_connection(text: str) -> bool:
    """Whether an error's message says that another rank was gone."""
    return any(words in text for words in _LOST)


def unreadable(error: Exception, rank: int, name: str) -> RankFailure:
    """What became of a rank whose result came, and cannot be made anew in the notebook."""
    text = f"{headline(error)}. Return plain data instead (numbers, arrays, tensors, state_dict())."
    return RankFailure(rank, name, text, at_ns=time.perf_counter_ns(), verb="returned what the notebook cannot read:")


def _parts(whole: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """The error, those it came from, and those it groups."""
    waiting = [whole]
    while waiting:
        part = waiting.pop()
        yield part
        before = part.__cause__ or (None if part.__suppress_context__ else part.__context__)
        waiting += part.exceptions or []
        if before is not None:
            waiting.append(before)


def _cut_text(text: str, limit: int) -> str:
    if len(text) <= limit + len(_CUT):  # what says that something is left out would be as long
        return text
    return f"{text[: limit // 2]}{_CUT.format(len(text) - limit)}{text[-limit // 2 :]}"


def _cut(stack: traceback.StackSummary, *, whole_innermost: bool) -> traceback.StackSummary:
    tells = whole_innermost and stack and not any(part in stack[-1].filename for part in (*_EMPTY, LABKIT))
    innermost = stack[-1:] if tells else []
    kept = [frame for frame in stack if is_students(frame.filename) or frame in innermost]
    left_out = len(kept) - FRAMES
    if left_out > 0:
        gap = traceback.FrameSummary(_GAP.format(left_out), 0, "", lookup_line=False, line="")
        kept = [*kept[: FRAMES // 2], gap, *kept[-FRAMES // 2 :]]
    for frame in kept:
        frame.line  # noqa: B018  # read the source now, under the file's real name
        frame.filename = label(frame.filename)
    return traceback.StackSummary.from_list(kept)


def _readable(text: str) -> str:
    """The text with the student's names for files and errors, without the library frames that TensorFlow lists in messages."""
    text = _IN_C.sub("", _SOURCE.sub("", _ANSI.sub("", text)))
    text = _UNPRINTABLE.sub(lambda character: ascii(character.group())[1:-1], text)
    for filename, name in here.files.items():
        text = text.replace(f'"{filename}"', f'"{name}"')
    text = text.replace("tensorflow.python.framework.errors_impl.", "tf.errors.").replace(
        "labkit.errors.exceptions.LabError", "LabError"
    )
    text = _OURS_TRACED.sub("", text).replace(_TRACED, "")
    if "Detected at node" not in text:
        return text
    names = set(here.files.values())
    kept: list[str] = []
    skipping = False
    for line in text.splitlines():
        file = _FILE_LINE.match(line)
        if file:
            skipping = file["file"] not in names and not is_students(file["file"])
        elif line.strip():
            skipping = False
        if not skipping:
            kept.append(line)
    return "\n".join(kept)


def _behind_frames(lines: list[str]) -> list[str]:
    """What stands behind a list of frames, without its indentation."""
    last = max((i for i, line in enumerate(lines) if _FILE_LINE.match(line)), default=-1)
    gap = next((i for i, line in enumerate(lines) if i > last and not line.strip()), len(lines))
    return textwrap.dedent("\n".join(lines[gap:])).strip().splitlines()


def _after_frames(lines: list[str]) -> str:
    """The first line of a message that stands behind a list of frames."""
    last = max((i for i, line in enumerate(lines) if _FILE_LINE.match(line) or line.startswith("Detected at")), default=-1)
    return next((line.strip() for line in lines[last + 1 :] if line.strip()), "")
