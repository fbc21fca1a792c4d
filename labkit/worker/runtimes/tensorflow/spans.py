"""`lab.span` in a tf.function becomes a name scope, so that its operations form a span each time the function runs."""

from __future__ import annotations

import threading
from typing import Any

from labkit.recording.record import TimedSpan
from labkit.worker.runtimes.tensorflow.profiler_events import scope_of


class GraphSpans:
    """The spans in the tf.functions of this process.

    Attributes:
        names: their names, by their numbers.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._lock = threading.Lock()

    def around(self, timed: TimedSpan) -> TimedSpan:
        """Return a span that is a name scope while a graph is built, and `timed` otherwise."""
        return _GraphSpan(self, timed)

    def scope(self, name: str) -> Any:
        """Return the name scope of a span."""
        import tensorflow as tf

        with self._lock:
            if name not in self.names:
                self.names.append(name)
            return tf.name_scope(scope_of(self.names.index(name)))


class _GraphSpan(TimedSpan):
    """A span of a TensorFlow rank."""

    __slots__ = ("_eagerly", "_graph_spans", "_timed")

    def __init__(self, graph_spans: GraphSpans, timed: TimedSpan) -> None:
        import tensorflow as tf

        super().__init__(timed.name, timed.kind)
        self._graph_spans, self._timed, self._eagerly = graph_spans, timed, tf.executing_eagerly

    def begin(self) -> Any:
        """Enter a name scope and return it; None after beginning the timed span instead."""
        if self._eagerly():
            self._timed.__enter__()
            return None
        scope = self._graph_spans.scope(self.name)
        scope.__enter__()
        return scope

    def end(self, begun: Any) -> None:
        """Leave the name scope, or end the timed span."""
        (self._timed if begun is None else begun).__exit__(None, None, None)
