"""Finds the sizes of TensorFlow's collectives and messages from the shapes in graphs, since the profiler has none."""

from __future__ import annotations

import inspect
import math
import re
import weakref
from collections.abc import Callable
from typing import Any, Final

from labkit.worker.runtimes.tensorflow.tensorflow_internals import COLLECTIVES, GRAPHS, INSTANCE_KEYS, LIBRARY

NOTHING: Final = -1  # the size of a message without a tensor, which only signals that an operation has ended

COLLECTIVE: Final = "Collective"  # prefix of the types of collectives
GROUPED: Final = "GroupCrossDeviceControlEdges_"  # prefix of the signals that TensorFlow's graph optimizer combines
LOWERED: Final = "_func_"  # prefix of the functions that DTensor generates
# Of an operation in a loop or a branch, such as while/body/_1/while/Tanh: its name in the graph of the body.
BRANCH: Final = re.compile(r".*/(?:body|then|else)/_\d+/(.+)")
# Collectives whose size is that of the largest input; for others it is that of the largest output.
LARGEST_INPUT: Final = ("CollectiveReduceScatter", "CollectiveAllToAll", "CollectiveBcastSend")


class Sizes:
    """Collects the graphs of tf.functions, and the sizes of collectives outside of them."""

    def __init__(self) -> None:
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._keys = InstanceKeys()
        self._eager: dict[tuple[int, int], int] = {}  # by group and instance key
        self._known: dict[str, int] = {}
        # By graph: the sizes by the names of the placeholder of the instance key and of the operation.
        self._by_key: weakref.WeakKeyDictionary[Any, dict[tuple[str, str], int]] = weakref.WeakKeyDictionary()
        self._known_graphs = 0  # the number of graphs that `_known` is based on
        self._in_library: dict[str, set[int]] = {}  # sizes in functions that TensorFlow has generated
        self._read: set[str] = set()  # the names of those functions

    def install(self) -> None:
        """Start to collect, in this process."""
        import tensorflow as tf

        def begin_and_keep(begin: Callable[..., None], graph: Any, *args: Any, **kwargs: Any) -> None:
            begin(graph, *args, **kwargs)
            self._graphs.add(graph)

        def read_and_remove(remove: Callable[..., Any], library: Any, name: Any) -> Any:
            self._look_into_library()
            return remove(library, name)

        def make_and_record(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            """Record the size of a collective that runs at once."""
            made = make(*args, **kwargs)
            if tf.executing_eagerly() and isinstance(made, tf.Tensor):
                given = dict(zip(inspect.signature(make).parameters, args, strict=False)) | kwargs
                self._eager[int(given["group_key"]), int(given["instance_key"])] = _bytes_of(made.shape, made.dtype)
            return made

        GRAPHS.apply(__init__=begin_and_keep)
        self._keys.install()
        LIBRARY.apply(remove_function=read_and_remove)
        COLLECTIVES.apply(**dict.fromkeys(COLLECTIVES.paths, make_and_record))

    def nbytes(self, name: str, group: int = -1, instance: int = -1, eager: bool = False) -> int:
        """Return the size of a collective or of a message in bytes; 0 if unknown, `NOTHING` if no tensor is sent.

        It needs the operation's name in its graph, the keys of a collective's group and instance, and whether it ran
        `eager`, outside a tf.function.
        """
        if eager:
            return self._eager.get((group, instance), 0)
        placeholder = self._keys.placeholder(group, instance)
        if placeholder is not None:
            sizes, key = self._by_key.setdefault(placeholder.graph, {}), (placeholder.op.name, name)
            if key not in sizes:
                sizes[key] = self._size_by_key(name.split("/"), placeholder)
            return sizes[key]
        if len(self._graphs) != self._known_graphs:
            self._known.clear()
            self._known_graphs = len(self._graphs)
        if name not in self._known:
            self._known[name] = self._look_up(name)
        # Outside a tf.function, the broadcast of a variable's initial value runs in an executor, with a unique key.
        return self._known[name] or self._eager.get((group, instance), 0)

    def forget(self) -> None:
        """Forget what belongs to single collectives, which is not needed after a session was read."""
        self._eager.clear()
        self._keys.forget()

    def _look_up(self, name: str) -> int:
        """Return the size that all graphs with an operation of this name agree on; 0 if they do not."""
        parts = name.split("/")
        if any(part.startswith(GROUPED) for part in parts):
            return NOTHING
        names = ["/".join(parts[i:]) for i in range(len(parts)) if all("PartitionedCall" in part for part in parts[:i])]
        if branch := BRANCH.match(name):
            names = [branch[1]]
        for one in reversed(names):
            found = {size for graph in list(self._graphs) if (size := _in_graph(graph, one))}
            if found:
                return found.pop() if len(found) == 1 else 0
        self._look_into_library()
        found = set().union(*(self._in_library.get(one, ()) for one in names))
        return found.pop() if len(found) == 1 else 0

    def _size_by_key(self, parts: list[str], placeholder: Any) -> int:
        """Return the size of the collective whose instance key comes from a placeholder; 0 if it is unknown."""
        collectives = [o for o in placeholder.consumers() if o.type.startswith(COLLECTIVE)]
        if collectives:
            found = {_of_operation(operation) for operation in collectives}
            return found.pop() if len(found) == 1 else 0
        # The collective is in a loop or a branch of that graph, which has a graph of its own. Its name there may be a
        # part of this one, such as cond/then/_48/cond/adam/CollectiveReduceV2: the longest part is the right one.
        below = [graph for graph in list(self._graphs) if _is_below(graph, placeholder.graph)]
        for i in range(len(parts)):
            found = {size for graph in below if (size := _in_graph(graph, "/".join(parts[i:])))}
            if found:
                return found.pop() if len(found) == 1 else 0
        return 0

    def _look_into_library(self) -> None:
        """Read the shapes in functions that TensorFlow has generated (for DTensor); these have no graph in Python."""
        if not LIBRARY.found:
            return
        library = LIBRARY["context"]()
        for name in library.list_function_names():
            if name.startswith(LOWERED) and name not in self._read:
                self._read.add(name)
                for operation, size in _in_function(library.get_function_def(name)).items():
                    self._in_library.setdefault(operation, set()).add(size)


class InstanceKeys:
    """Notes which placeholder was fed with which instance key: two graphs may have collectives of one name.

    Under a multi-worker strategy, a collective in a tf.function gets its instance key at each call: a placeholder of
    the graph is fed with the next number. Where a tf.function calls another one, a placeholder of the outer graph feeds
    that of the inner one.
    """

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


def _in_graph(graph: Any, name: str) -> int:
    try:
        operation = graph.get_operation_by_name(name)
    except (KeyError, ValueError):
        return 0
    return _of_operation(operation) if operation.outputs else NOTHING


def _of_operation(operation: Any) -> int:
    tensors = operation.inputs if operation.type.startswith(LARGEST_INPUT) else operation.outputs
    return max((_bytes_of(t.shape, t.dtype) for t in tensors), default=0)


def _is_below(graph: Any, outer: Any) -> bool:
    while graph is not None and graph is not outer:
        graph = getattr(graph, "outer_graph", None)
    return graph is outer


def _in_function(function: Any) -> dict[str, int]:
    """Return the sizes of the outputs of a function's collectives, by their names."""
    import tensorflow as tf

    found = {}
    for node in function.node_def:
        shapes = list(node.attr["_output_shapes"].list.shape) if "_output_shapes" in node.attr else []
        if node.op.startswith(COLLECTIVE) and len(shapes) and not shapes[0].unknown_rank:
            sides = [side.size for side in shapes[0].dim]
            if min(sides, default=0) >= 0:
                found[node.name] = math.prod(sides) * tf.dtypes.as_dtype(node.attr["T"].type).size
    return found


def _bytes_of(shape: Any, dtype: Any) -> int:
    """Return the size of a tensor in bytes; 0 if a dimension is unknown, or elements have no fixed size."""
    if shape.rank is None or None in shape.as_list() or dtype.name in ("resource", "variant", "string"):
        return 0
    return int(math.prod(shape.as_list())) * int(dtype.size)
