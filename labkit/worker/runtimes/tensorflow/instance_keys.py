"""Finds the collective in a graph that ran with a given instance key, since two graphs may have operations of one name.

Under a multi-worker strategy, a collective in a tf.function gets its instance key at each call: a placeholder of the
graph is fed with the next number. Where a tf.function calls another one, a placeholder of the outer graph feeds that of
the inner one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from labkit.worker.runtimes.tensorflow.tensorflow_internals import INSTANCE_KEYS


class InstanceKeys:
    """Notes which placeholder was fed with which key."""

    def __init__(self) -> None:
        self._fed: dict[tuple[int, int], Any] = {}  # by group and instance key
        # By graph and the name of its placeholder: the graph of the placeholder that it feeds, and that one's name.
        self._feeds: weakref.WeakKeyDictionary[Any, dict[str, tuple[weakref.ref[Any], str]]] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        """Start to take notes in this process."""

        def capture_and_note(capture: Callable[..., Any], graph: Any, closure: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(closure, "__func__", None) is not INSTANCE_KEYS["_next_instance_key"]:
                return capture(graph, closure, *args, **kwargs)
            group = INSTANCE_KEYS.of(closure.__self__, "_group_key")

            def fed() -> Any:
                value = closure()
                self._note(int(group), made[0], value)
                return value

            made = [capture(graph, fed, *args, **kwargs)]
            return made[0]

        INSTANCE_KEYS.apply(capture_call_time_value=capture_and_note)

    def placeholder(self, group: int, instance: int) -> Any:
        """Return the innermost placeholder that was fed with this key; None if it is unknown."""
        found = self._fed.get((group, instance))
        while found is not None and (inner := self._feeds.get(found.graph, {}).get(found.op.name)) is not None:
            graph = inner[0]()
            found = None if graph is None else graph.get_operation_by_name(inner[1]).outputs[0]
        return found

    def forget(self) -> None:
        """Forget the keys, which are not used again."""
        self._fed.clear()

    def _note(self, group: int, placeholder: Any, value: Any) -> None:
        if hasattr(value, "numpy"):
            self._fed[group, int(value)] = placeholder
        else:
            self._feeds.setdefault(value.graph, {})[value.op.name] = weakref.ref(placeholder.graph), placeholder.op.name
