"""`lab.span` in a tf.function becomes a name scope, so that its operations form a span each time the function runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from labkit.worker.runtimes.tensorflow.profiler_events import scope_of

__all__ = ["GraphSpans"]


class GraphSpans:
    """The spans in the tf.functions of this process.

    Attributes:
        names: their names, by their numbers.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._lock = threading.Lock()

    def around(self, name: str, enter: Callable[[], None], leave: Callable[..., None]) -> tuple[Callable[..., None], ...]:
        """Return functions that begin and end a span: as a name scope while a graph is built, else the given ones.

        Args:
            name: the span's name.
            enter: begins a timed span.
            leave: ends a timed span.
        """
        import tensorflow as tf
        from tensorflow.python.eager import context

        eagerly, opened = context.executing_eagerly, _Open()

        def begin() -> None:
            if eagerly():
                opened.scopes.append(None)
                enter()
                return
            with self._lock:
                if name not in self.names:
                    self.names.append(name)
                scope = tf.name_scope(scope_of(self.names.index(name)))
            opened.scopes.append(scope)
            scope.__enter__()

        def end(*error: Any) -> None:
            scope = opened.scopes.pop() if opened.scopes else None
            if scope is None:
                leave(*error)
            else:
                scope.__exit__(*error)

        return begin, end


class _Open(threading.local):
    """The open scopes of one span on this thread; None for a timed one."""

    def __init__(self) -> None:
        self.scopes: list[Any] = []
