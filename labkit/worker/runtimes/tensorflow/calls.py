"""What a rank that is blocked inside TensorFlow waits for, in words: read from its Python frames.

TensorFlow promises none of what is read here; what cannot be read is left out.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

from labkit.errors.own_code import LABKIT
from labkit.recording.record import is_students

__all__ = ["call_within", "describe"]

UNTIL_STARTED: Final = "until all ranks have started their servers"
_STARTS_SERVERS: Final = "start_and_wait"  # the function of labkit's through which TensorFlow does that

NAME: Final = "TensorFlow"
DEEPEST: Final = 5  # functions of TensorFlow's that call one another
_TENSORFLOW: Final = f"{os.sep}tensorflow{os.sep}"
_LOCKS: Final = re.compile(r"[/\\](threading|queue|pool)\.py$")  # Python's, that TensorFlow waits in
_WRAPPERS: Final = ("traceback_utils.py", "dispatch.py", "deprecation.py", "tf_decorator.py", "tf_contextlib.py")
_PUBLIC: Final = {
    "CollectiveAllReduceStrategy": "MultiWorkerMirroredStrategy", "ParameterServerStrategyV2": "ParameterServerStrategy",
    "StrategyBase": "Strategy",
}  # fmt: skip
# By the begin of an operation's name, with and without capitals: CollectiveReduceV2 and collective_reduce_v2.
_COLLECTIVES: Final = {
    "reducescatter": "reduce-scatter", "reduce": "all-reduce", "gather": "all-gather", "bcast": "broadcast",
    "alltoall": "all-to-all", "permute": "permutation",
}  # fmt: skip


def call_within(innermost: FrameType | None) -> FrameType | None:
    """TensorFlow's frame that a thread is in, also where that waits in a lock of Python's; None where it is not in TensorFlow.

    Args:
        innermost: where the thread's stack ends.
    """
    frame = innermost
    while frame is not None:
        file = frame.f_code.co_filename
        if _is_tensorflows(file):
            return frame
        if not (_LOCKS.search(file) or file.startswith(LABKIT)):
            return None
        frame = frame.f_back
    return None


def _is_tensorflows(file: str) -> bool:
    """Not a program that lies in a folder of that name, nor this package."""
    return _TENSORFLOW in file and not is_students(file) and not file.startswith(LABKIT)


def describe(innermost: FrameType) -> str:
    """What a thread waits in: what the student has called, and which collectives that holds.

    Args:
        innermost: where the thread's stack ends.
    """
    frames = list(_until_student(innermost))
    details: list[str] = []
    called = ""
    for frame in frames:
        if _is_tensorflows(frame.f_code.co_filename) and not frame.f_code.co_filename.endswith(_WRAPPERS):
            called = frame.f_code.co_qualname
        with contextlib.suppress(Exception):  # what TensorFlow keeps in its frames may change
            details += [detail for detail in _details(frame) if detail not in details]  # frames of one call may say the same
    traced = next((name for frame in frames if (name := _traced(frame))), "")
    called = traced or _short(called)
    return " ".join(filter(None, (f"{NAME}'s {called}" if called else NAME, f"({'; '.join(details)})" if details else "")))


def _until_student(innermost: FrameType) -> Iterator[FrameType]:
    frame: FrameType | None = innermost
    while frame is not None and not is_students(frame.f_code.co_filename):
        yield frame
        frame = frame.f_back


def _short(qualified: str) -> str:
    """`Strategy.reduce` of what Python calls it: no constructor, no function that a decorator has made, and the public name."""
    called, _, _ = qualified.partition(".<locals>")
    owner, dot, method = called.removesuffix(".__init__").removesuffix(".__call__").partition(".")
    return f"{_PUBLIC.get(owner, owner)}{dot}{method}"


def _traced(frame: FrameType) -> str:
    """The name of the student's function whose graph runs, if this is where."""
    if not frame.f_code.co_filename.endswith("polymorphic_function.py") or frame.f_code.co_name != "__call__":
        return ""
    function = getattr(frame.f_locals.get("self"), "python_function", None)
    name = getattr(function, "__name__", "")
    return "tf.function" if name == "<lambda>" else str(name)


def _details(frame: FrameType) -> list[str]:
    """What a frame tells of what it waits for."""
    code, values = frame.f_code, frame.f_locals
    if code.co_name == _STARTS_SERVERS:
        return [UNTIL_STARTED]
    if code.co_name == "wait" and "_inflight_closure_count" in vars(values.get("self", code.__class__)):
        queue = values["self"]
        return [f"scheduled functions: {queue._inflight_closure_count} on workers, {queue._queue.qsize()} in the queue"]
    if code.co_name.startswith("collective_") and code.co_filename.endswith("gen_collective_ops.py"):
        return [_collective(code.co_name) or code.co_name]
    if code.co_qualname.startswith("AtomicFunction.call_flat"):
        return _in_graph(values["self"].definition)
    return []


def _in_graph(definition: Any) -> list[str]:
    """The collectives in a function's graph and in the functions that it calls: "2 all-reduces"."""
    from tensorflow.python.eager import context

    def count(function: Any, depth: int) -> Iterator[str]:
        for node in function.node_def:
            if word := _collective(node.op):
                yield word
            inner = {value.func.name for value in node.attr.values() if value.func.name} if depth < DEEPEST else ()
            for name in inner:
                yield from count(context.context().get_function_def(name), depth + 1)

    words = Counter(count(definition, 0))
    return ["with " + " and ".join(f"{number} {word}{'s' * (number > 1)}" for word, number in words.items())] if words else []


def _collective(operation: str) -> str:
    plain = operation.replace("_", "").lower()
    if not plain.startswith("collective"):
        return ""
    return next((word for begin, word in _COLLECTIVES.items() if plain.removeprefix("collective").startswith(begin)), "")
