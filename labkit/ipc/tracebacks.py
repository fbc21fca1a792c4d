"""Formats an error of a rank: a headline of one line, and a traceback with the student's frames only."""

from __future__ import annotations

import linecache
import os
import re
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Final

from labkit.errors.exceptions import OWN_CODE, LabError, RankFailure
from labkit.errors.exit_reasons import Cause
from labkit.recording.record import here, is_students, label

FRAMES: Final = 12  # most frames in a traceback, so that endless recursion does not fill the notebook
HEADLINE_CHARACTERS: Final = 400
OWN_LIMIT: Final = "labkit_own_limit"  # the attribute of an error that says which time limit of the program's led to it
TEXT_CHARACTERS: Final = 20_000  # of a traceback with its messages, which may contain a printed tensor

_MARK = "\x00{}\x00"
_CUT = " ... ({:,} characters left out) ... "
_GAP = "\x00{:,} frames left out\x00"
_GAPS = re.compile(r'File "\x00([^\x00]+)\x00", line 0, in ')
_MARKED = re.compile(r"^(?P<margin>[ |]*).*\x00(?P<number>\d+)\x00$", re.MULTILINE)
_KERAS = "Exception encountered when calling "
# ANSI escape sequences: colours, cursor movement, the window's title. Keras prints its messages in bold.
_ANSI = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\\\)?|[@-Z\\\\^_])")
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # control characters, and surrogates
_IN_C = re.compile(r"\nException raised from .* \(most recent call first\):(\nframe #\d+: .*)*")  # C++ frames of torch
_SOURCE = re.compile(r"\[/\S+\.(cc|cpp|h):\d+\] ")  # torch's C++ source, before the message
# Messages of gloo, NCCL, RPC and TensorFlow after the process at the other end has gone.
_LOST = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "UnavailableError", "connection was aborted",
    "Collective ops is aborted by", "(this error originated at tensorpipe/",
    "remote process exited or there was a network error",
)  # fmt: skip
_IN_A_WORKER = re.compile(r" in DataLoader worker process \d+(?=\.$)")  # of torch
_WORKER_DIED = "DataLoader worker (pid"  # of torch; the connection that is lost then is one to a child process
_FILE_LINE = re.compile(r'\s*File "(?P<file>[^"]+)", line ')
# Frames that are useless even as the innermost: AutoGraph's generated code, and where TensorFlow raises all its errors.
_EMPTY = (
    "__autograph_generated_file",
    *(os.path.join("tensorflow", "python", *place) for place in (("eager", "execute.py"), ("util", "traceback_utils.py"))),
)
_TRACED = "outer_factory.<locals>.inner_factory.<locals>.tf__"  # AutoGraph's prefix to a function's name
# torch sends an error of a function called by RPC as text: the callee's `WorkerInfo`, then its traceback. Each RPC call
# that the error passes through wraps the text once more. One traceback is to lead from the caller to the callee.
_ON = re.compile(r"On WorkerInfo\(id=\d+, name=(?P<name>[^)]*)\):\n")
_PLACED = re.compile(r" \(on [^)]*\)$")  # the end of a headline: the rank on which the error was raised
_BEGIN = "Traceback (most recent call last):\n"
_PASSED_THROUGH = re.compile(r"\s*(\n\nAt:\n  \S+\(\d+\): _handle_exception\s*)?$")  # added by the caller's C++ code
_DEEPEST: Final = 8  # levels of nested quoting: a KeyError quotes its message each time it is raised
# A frame of labkit in AutoGraph's own list, with its line of source.
_OURS_TRACED = re.compile(rf'^ *File "(?:{"|".join(map(re.escape, OWN_CODE))})[^"]*", line \d+, in .*  \*\n.*\n', re.MULTILINE)


def headline(error: BaseException) -> str:
    """Return the error's type and message in one line."""
    return _cut_text(_headline(error), HEADLINE_CHARACTERS)


def warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    """Format a warning, as `warnings.formatwarning` does, with the name of the cell instead of its temporary file."""
    name = label(filename) if is_students(filename) else filename.rpartition(f"site-packages{os.sep}")[2]
    source = (line if line is not None else linecache.getline(filename, lineno)).strip()
    return f"{name}, line {lineno}: {category.__name__}: {message}\n" + (f"    {source}\n" if source else "")


def _headline(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        innermost = _innermost(error)
        if innermost is not None and innermost.f_globals.get("__name__") == "argparse":
            return "argparse refused the command line; a rank has an empty one. Give arguments: parse_args(['--epochs', '3'])"
        return f"the function called exit({error.code!r})" if error.code is not None else "the function called exit()"
    if isinstance(error, LabError):
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    text = "".join(traceback.format_exception_only(error))
    remote = remote_error(text)
    if remote is not None:
        return remote.headline
    lines = _readable(text).strip().splitlines()
    if worker := _IN_A_WORKER.search(lines[0]):
        return _of_a_worker(lines, worker[0])
    if isinstance(error, SyntaxError):  # file, line and a marker come first
        return lines[-1]
    if lines[0].endswith(": in user code:"):  # AutoGraph's report: frames, an empty line, the error
        return _of_keras(_message_lines(lines[1:]) or lines)
    if lines[0].endswith(": Graph execution error:"):  # frames, an empty line, the message, the node
        return lines[0].removesuffix("Graph execution error:") + _first_message_line(lines[1:])
    return _of_keras(lines)


def _of_a_worker(lines: list[str], where: str) -> str:
    frames = [i for i, line in enumerate(lines) if line.startswith('  File "')]
    after = lines[frames[-1] :] if frames else []
    return next((f"{line}{where}" for line in after if not line.startswith(" ")), lines[0])


def _of_keras(lines: list[str]) -> str:
    """Return the headline of a message that may be from Keras: place, empty line, message, the layer's arguments."""
    if _KERAS not in lines[0]:
        return lines[0]
    kind, *where = lines[0].partition(_KERAS)
    message = [line for line in lines[1:] if line.strip()]
    if len(message) > 1 and message[0].endswith("Error encountered:"):  # raised while Keras called the layer symbolically
        del message[0]
    return kind + (message[0] if message else "".join(where))


def in_students_code(error: BaseException) -> bool:
    """Whether any frame of the error's traceback is in the student's code."""
    return any(is_students(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__))


def raised_by_student(error: BaseException) -> bool:
    """Whether the student's own code raised the error, rather than a library that it called."""
    innermost = _innermost(error)
    return innermost is not None and is_students(innermost.f_code.co_filename)


def _innermost(error: BaseException) -> FrameType | None:
    return next((frame for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__)))), None)


def students_traceback(error: BaseException) -> str:
    """Format the traceback as Python does, with the student's frames and the innermost frame only."""
    whole = traceback.TracebackException.from_exception(error, capture_locals=False)
    remote: list[str] = []
    for part in _parts(whole):
        callee = remote_error(str(part))
        if callee is not None:
            setattr(part, "_str", _MARK.format(len(remote)))  # noqa: B010  # typeshed does not know it
            remote.append(callee.traceback)
        part.stack = _cut(part.stack, whole_innermost=callee is None)
    text = "".join(whole.format())
    # Replace the line in which the caller's error repeats the callee's with the callee's frames and error.
    text = _MARKED.sub(lambda m: textwrap.indent(remote[int(m["number"])], m["margin"], lambda _: True), text)
    return _cut_text(_readable(_GAPS.sub(r"[\1]", text)), TEXT_CHARACTERS)


def cause_of(error: BaseException) -> Cause:
    """Return the cause of a failure from the error that a rank raised. Only here are libraries' messages searched."""
    if _follows_lost_connection(error):
        return Cause.LOST_CONNECTION if _lost_connection(headline(error)) else Cause.AFTER_LOST_CONNECTION
    return Cause.NOT_IMPLEMENTED if isinstance(error, NotImplementedError) else Cause.RAISED


def _follows_lost_connection(error: BaseException) -> bool:
    """Whether another rank's end caused the error: its message says so, or that of an error that led to it."""
    seen: set[int] = set()
    part: BaseException | None = error
    while part is not None and id(part) not in seen:
        text = "".join(traceback.format_exception_only(part))
        if _WORKER_DIED in text:
            return False
        if _lost_connection(text):
            return True
        seen.add(id(part))
        part = part.__cause__ or part.__context__  # even if `from None` hides it
    return False


def _lost_connection(text: str) -> bool:
    return any(words in text for words in _LOST)


def unreadable(error: Exception, rank: int, name: str) -> RankFailure:
    """Return the failure of a rank whose result arrived, but cannot be unpickled in the notebook."""
    text = f"{headline(error)}. Return plain data instead (numbers, arrays, tensors, state_dict())."
    cause, verb = Cause.UNREADABLE_RESULT, "returned what the notebook cannot read:"
    return RankFailure(rank, name, text, at_ns=time.perf_counter_ns(), cause=cause, verb=verb)


def _parts(whole: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """Yield the error, those that led to it, and those that it groups."""
    pending = [whole]
    while pending:
        part = pending.pop()
        yield part
        before = part.__cause__ or (None if part.__suppress_context__ else part.__context__)
        pending += part.exceptions or []
        if before is not None:
            pending.append(before)


def _cut_text(text: str, limit: int) -> str:
    if len(text) <= limit + len(_CUT):  # the note on what is left out would be as long as the text
        return text
    return f"{text[: limit // 2]}{_CUT.format(len(text) - limit)}{text[-limit // 2 :]}"


def _cut(stack: traceback.StackSummary, *, whole_innermost: bool) -> traceback.StackSummary:
    useful = whole_innermost and stack and not any(part in stack[-1].filename for part in (*_EMPTY, *OWN_CODE))
    innermost = stack[-1:] if useful else []
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
    """Use the student's names for files and errors, and drop the library frames in TensorFlow's messages."""
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
    return _without_frames(text, lambda file: file not in names and not is_students(file))


def _without_frames(text: str, left_out: Callable[[str], bool]) -> str:
    """Drop the frames of some files, with their source lines."""
    kept: list[str] = []
    skipping = False
    for line in text.splitlines():
        frame = _FILE_LINE.match(line)
        if frame:
            skipping = left_out(frame["file"])
        elif line.strip() and not line.startswith("    "):
            skipping = False
        if not skipping:
            kept.append(line)
    return "\n".join(kept)


def _message_lines(lines: list[str]) -> list[str]:
    """Return the lines that follow a list of frames and an empty line, without their indentation."""
    last = max((i for i, line in enumerate(lines) if _FILE_LINE.match(line)), default=-1)
    gap = next((i for i, line in enumerate(lines) if i > last and not line.strip()), len(lines))
    return textwrap.dedent("\n".join(lines[gap:])).strip().splitlines()


def _first_message_line(lines: list[str]) -> str:
    """Return the first line of a message that follows a list of frames."""
    last = max((i for i, line in enumerate(lines) if _FILE_LINE.match(line) or line.startswith("Detected at")), default=-1)
    return next((line.strip() for line in lines[last + 1 :] if line.strip()), "")


@dataclass(frozen=True, slots=True)
class RemoteError:
    """An error of a callee, as its caller sees it."""

    headline: str  # one line: its type and message, and the rank on which it was raised
    traceback: str  # "on shard1:", the callee's frames, and the error


def sent_error(worker: object, headline: str, traceback: str) -> str:
    """Return the text that a callee sends, in torch's format, which begins with its `WorkerInfo`.

    The text is escaped, because the receiver decodes escape sequences, and the message may contain some.
    """
    return f"On {worker}:\n{headline}\n{traceback}".encode("unicode_escape").decode()


def remote_error(text: str) -> RemoteError | None:
    """Parse a callee's error from the message of an error; None if the message contains none."""
    if "On WorkerInfo(" not in text:
        return None
    quoted = 0
    while (on := _ON.search(text)) is None:
        if quoted == _DEEPEST:
            return None
        text, quoted = text.encode("latin-1", "backslashreplace").decode("unicode_escape"), quoted + 1
    rest = _PASSED_THROUGH.sub("", text[on.end() :], count=1)
    for _ in range(quoted):
        rest = _PASSED_THROUGH.sub("", rest.removesuffix("'").removesuffix('"'), count=1)
    headline, _, whole = rest.partition("\n")
    before, _, frames = whole.partition(_BEGIN)
    if before or _BEGIN in frames:  # a chain of errors, each with its own traceback
        frames = whole
    if not _PLACED.search(headline):  # else the callee had itself made the call that failed
        headline += f" (on {on['name']})"
    students = _without_frames(frames, lambda file: os.path.isabs(file) and not is_students(file))  # torch lists libraries'
    return RemoteError(headline, f"on {on['name']}:\n{students}".rstrip())
