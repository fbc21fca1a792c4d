"""Describes what a rank that is blocked inside TensorFlow waits for, from its Python frames.

The frames are internals of TensorFlow, which may change; details that cannot be read are left out.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

from labkit.errors.exceptions import LABKIT
from labkit.errors.lists import counted, listed
from labkit.recording.operations import type_of_kernel
from labkit.recording.record import is_students
from labkit.worker.runtimes.tensorflow.tensorflow_internals import LIBRARY

UNTIL_STARTED: Final = "until all ranks have started their servers"
_STARTS_SERVERS: Final = "start_and_wait"  # labkit's function in which TensorFlow starts servers

NAME: Final = "TensorFlow"
DEEPEST: Final = 5  # levels of nested functions in a graph
_TENSORFLOW: Final = f"{os.sep}tensorflow{os.sep}"
_LOCKS: Final = re.compile(r"[/\\](threading|queue|pool)\.py$")  # Python's modules in which TensorFlow waits
_WRAPPERS: Final = ("traceback_utils.py", "dispatch.py", "deprecation.py", "tf_decorator.py", "tf_contextlib.py")
_PUBLIC: Final = {
    "CollectiveAllReduceStrategy": "MultiWorkerMirroredStrategy", "ParameterServerStrategyV2": "ParameterServerStrategy",
    "StrategyBase": "Strategy", "VariableMetaclass": "Variable",
}  # fmt: skip


def call_within(innermost: FrameType | None) -> FrameType | None:
    """Return the frame of TensorFlow in which a thread is, also if that waits for a Python lock; None if there is none.

    Args:
        innermost: the thread's innermost frame.
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
    """Whether a file belongs to TensorFlow, not to this package or to a program in a folder named "tensorflow"."""
    return _TENSORFLOW in file and not is_students(file) and not file.startswith(LABKIT)


def describe(innermost: FrameType) -> str:
    """Describe what a thread waits in: the function that the student called, and the collectives in it.

    Args:
        innermost: the thread's innermost frame.
    """
    frames = list(_until_student(innermost))
    details: list[str] = []
    called = ""
    for frame in frames:
        if _is_tensorflows(frame.f_code.co_filename) and not frame.f_code.co_filename.endswith(_WRAPPERS):
            called = frame.f_code.co_qualname
        with contextlib.suppress(Exception):  # TensorFlow's local variables may change
            details += [detail for detail in _details(frame) if detail not in details]  # frames of one call may repeat it
    traced = next((name for frame in frames if (name := _traced(frame))), "")
    called = traced or _short(called)
    return " ".join(filter(None, (f"{NAME}'s {called}" if called else NAME, f"({'; '.join(details)})" if details else "")))


def _until_student(innermost: FrameType) -> Iterator[FrameType]:
    frame: FrameType | None = innermost
    while frame is not None and not is_students(frame.f_code.co_filename):
        yield frame
        frame = frame.f_back


def _short(qualified: str) -> str:
    """Shorten a qualified name to the public one, such as `Strategy.reduce`, without constructors and decorators."""
    called, _, _ = qualified.partition(".<locals>")
    owner, dot, method = called.removesuffix(".__init__").removesuffix(".__call__").partition(".")
    return f"{_PUBLIC.get(owner, owner)}{dot}{method}"


def _traced(frame: FrameType) -> str:
    """Return the name of the student's function if this frame runs its graph; else ""."""
    if not frame.f_code.co_filename.endswith("polymorphic_function.py") or frame.f_code.co_name != "__call__":
        return ""
    function = getattr(frame.f_locals.get("self"), "python_function", None)
    name = getattr(function, "__name__", "")
    return "tf.function" if name == "<lambda>" else str(name)


def _details(frame: FrameType) -> list[str]:
    """Return details of what a frame waits for."""
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
    """Count the collectives in a function's graph and in the functions that it calls: "with 2 all-reduces"."""

    def count(function: Any, depth: int) -> Iterator[str]:
        for node in function.node_def:
            if word := _collective(node.op):
                yield word
            inner = {value.func.name for value in node.attr.values() if value.func.name} if depth < DEEPEST else ()
            for name in inner:
                yield from count(LIBRARY["context"]().get_function_def(name), depth + 1)

    words = Counter(count(definition, 0))
    return ["with " + listed(counted(number, word) for word, number in words.items())] if words else []


def _collective(operation: str) -> str:
    """Such as "all-reduce" of "CollectiveReduceV2" or "collective_reduce_v2"; "" for what is no collective."""
    return type_of_kernel(operation).name.replace("_", "-")
