"""`lab.span` inside a tf.function: a name scope, by which the operations inside are a span each time the function runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from labkit.worker.runtimes.tensorflow.events import scope_of

__all__ = ["GraphSpans"]


class GraphSpans:
    """The spans of this process that tf.functions have been built with.

    Attributes:
        names: what they are called, by their numbers.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._lock = threading.Lock()

    def around(self, name: str, enter: Callable[[], None], leave: Callable[..., None]) -> tuple[Callable[..., None], ...]:
        """What begins and ends a span: the name scope where a graph is built, else what times it.

        Args:
            name: of the span.
            enter: begins it where it is timed.
            leave: ends it there.
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
    """The scopes of one span that are open; None for one that is timed."""

    def __init__(self) -> None:
        self.scopes: list[Any] = []
