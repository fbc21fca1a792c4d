"""Pickling: definitions by value into the rank's `__main__`, arrays through shared memory; what cannot be sent is
named."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cells as in_cells
import numpy as np
import psutil
import pytest
from processes import SELDOM_SPAWNED, START

import labkit as lab
from labkit.errors.exit_reasons import Cause
from labkit.ipc import pickling, process_memory
from labkit.ipc.channel import Channel
from labkit.ipc.protocol import CallFunction, Done


@pytest.fixture(scope="module", params=[*START, "results through shared memory"])
def ranks(request: pytest.FixtureRequest) -> Iterator[lab.Group]:
    """Two ranks without a framework, started both ways, and where the system forbids reading another process's
    memory."""
    start = request.param if request.param in START else "fork"
    with lab.Group(2, runtime="bare", start=start, timeout_s=200) as group:
        with pytest.MonkeyPatch.context() as patch:
            if request.param not in START:
                patch.setattr("labkit.launch.rank_process.may_read", lambda _: False)
            group.run(int)
        yield group


def travel(value: Any) -> Any:
    """A round trip in one process."""
    return pickling.unpack(pickling.pack(value))


def through_a_socket(value: Any) -> Any:
    """As between two processes; the reader is a thread, because the socket holds less than a large value."""
    near, far = (Channel(s) for s in socket.socketpair())
    payload = pickling.pack(value)
    sender = threading.Thread(target=near.send, args=(CallFunction(True, False, payload),))
    sender.start()
    message = far.receive()
    sender.join()
    payload.close()
    near.close()
    far.close()
    assert isinstance(message, CallFunction)
    assert message.all_called
    return pickling.unpack(message.payload)


# What cells define


@pytest.mark.processes
def test_a_function_lives_in_the_ranks_main(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells("""
        import sys
        def f():
            main = sys.modules["__main__"]
            return f.__module__, main.f is f, main.__dict__ is f.__globals__, main.helper(1), __name__
        def helper(x):
            return x + OFFSET
        OFFSET = 41
        def use():
            helper
            return f()
    """)
    assert ranks.run(cells.use).results == [("__main__", True, True, 42, "__main__")] * 2


@pytest.mark.processes
def test_everything_that_a_cell_can_define(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells("""
        import abc, collections, contextlib, dataclasses, enum, functools, typing

        def loud(function):
            @functools.wraps(function)
            def wrapper(*args):
                return function(*args).upper()
            return wrapper

        @loud
        def decorated(text): return text

        @functools.lru_cache(maxsize=7)
        def fibonacci(n): return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

        def counter():
            count = 0
            def step():
                nonlocal count
                count += 1
                return count
            return step

        step = counter()
        square = lambda x: x * x
        partial = functools.partial(pow, 2)

        @dataclasses.dataclass(frozen=True, slots=True)
        class Point:
            x: int
            y: list = dataclasses.field(default_factory=list)

        class Colour(enum.Enum):
            RED = 1
            def shown(self): return self.name.lower()

        class Pair(typing.NamedTuple):
            left: int
            right: int = 2

        Old = collections.namedtuple("Old", "a b")

        class Shape(abc.ABC):
            @abc.abstractmethod
            def area(self): ...

        class Square(Shape):
            sides = 4
            def __init__(self, a): self.a = a
            def area(self): return square(self.a)
            @property
            def double(self): return 2 * self.area()
            @classmethod
            def unit(cls): return cls(1)
            @staticmethod
            def name(): return "square"
            def __repr__(self): return super().__repr__()[:4]

        class Error(Exception):
            def __init__(self, a, b): super().__init__(f"{a} and {b}")

        @contextlib.contextmanager
        def entered(): yield "in"

        def everything():
            import __main__
            assert decorated("a") == "A" and decorated is __main__.decorated
            assert fibonacci(30) == 832040 and fibonacci.cache_info().maxsize == 7
            assert [step(), step()] == [1, 2]
            assert square(3) == 9 and partial(5) == 32
            assert Point(1) == Point(1, []) and Point.__module__ == "__main__"
            assert Colour(1) is Colour.RED and Colour.RED.shown() == "red"
            assert Pair(1) == (1, 2) and Old(1, 2).b == 2
            assert Square.unit().double == 2 and Square.name() == "square" and isinstance(Square(2), Shape)
            assert repr(Square(1)) == "<__m"
            try:
                raise Error(1, 2)
            except Error as error:
                assert str(error) == "1 and 2"
            with entered() as word:
                return word
    """)
    assert ranks.run(cells.everything).results == ["in", "in"]
    assert cells.step() == 1, "a closure in the notebook does not notice what the ranks do with theirs"


@pytest.mark.processes
def test_things_that_refer_to_one_another(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells("""
        def even(n): return n == 0 or odd(n - 1)
        def odd(n): return n != 0 and even(n - 1)

        class Node:
            def __init__(self, children=()): self.children = list(children)
            def depth(self): return deepest(self)

        def deepest(node): return 1 + max((n.depth() for n in node.children), default=0)
        ring = [Node()]
        ring.append(ring)

        def f(tree):
            return even(10), Tree().grown().depth(), tree.depth(), ring[1] is ring, isinstance(tree, Node)

        class Tree:
            def grown(self): return Node([Node(), Node([Node()])])
    """)
    assert ranks.run(cells.f, cells.Node([cells.Node()])).results == [(True, 3, 2, True, True)] * 2


@pytest.mark.processes
def test_a_function_that_claims_to_be_a_librarys(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells("""
        import functools, os.path, sys

        @functools.wraps(os.path.join)
        def join(*parts): return SEPARATOR.join(parts), join.__globals__ is sys.modules["__main__"].__dict__
        SEPARATOR = "+"
    """)
    assert (cells.join.__module__, cells.join.__qualname__) == (os.path.join.__module__, "join")
    assert ranks.run(cells.join, "a", "b").results == [("a+b", True)] * 2


@pytest.mark.processes
def test_code_with_constants_that_no_compiler_makes(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells("""
        def f(): return "given"
    """)
    code = cells.f.__code__
    cells.f.__code__ = code.replace(co_consts=tuple(Path("put") if c == "given" else c for c in code.co_consts))
    assert ranks.run(cells.f).results == [Path("put")] * 2


@pytest.mark.processes
def test_redefinition_takes_effect_at_the_next_run(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells("""
        def helper(): return "old"
        SCALE = 1
        class A:
            def word(self): return "old"
        def f(): return helper(), SCALE, A().word()
    """)
    assert ranks.run(cells.f).results == [("old", 1, "old")] * 2
    cells("""
        def helper(): return "new"
        SCALE = 2
        class A:
            def word(self): return "new"
    """)
    assert ranks.run(cells.f).results == [("new", 2, "new")] * 2


@pytest.mark.processes
def test_results_have_the_notebooks_own_classes_unchanged(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells("""
        import dataclasses, enum
        @dataclasses.dataclass
        class Report:
            loss: float
            def doubled(self): return FACTOR * self.loss
        class Colour(enum.Enum):
            RED = 1
        def plain(): return 7
        FACTOR = 2
        def f():
            Report.seen = True
            return Report(1.5), Colour.RED, Report, plain
    """)
    method = cells.Report.doubled
    for report, colour, kind, function in ranks.run(cells.f).results:
        assert type(report) is cells.Report
        assert isinstance(report, cells.Report)
        assert report == cells.Report(1.5)
        assert colour is cells.Colour.RED
        assert kind is cells.Report
        assert function is cells.plain
    assert cells.Report.doubled is method, "a result must not put copies of methods into the notebook's class"
    assert not hasattr(cells.Report, "seen")
    cells("FACTOR = 3")
    assert report.doubled() == 4.5


@pytest.mark.processes
def test_a_class_that_exists_only_in_ranks_comes_back(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells("""
        def f():
            class Local:
                def word(self): return "here"
            return Local()
    """)
    assert [r.word() for r in ranks.run(cells.f).results] == ["here", "here"]


@pytest.mark.processes
def test_bound_methods_partials_and_callable_objects_run(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells("""
        import functools
        class Model:
            scale = 3
            def forward(self, x): return self.scale * x
            __call__ = forward
    """)
    model = cells.Model()
    for function in (model.forward, model, __import__("functools").partial(model.forward, 2)):
        args = () if hasattr(function, "func") else (2,)
        assert ranks.run(function, *args).results == [6, 6]


@pytest.mark.processes
def test_the_source_is_sent(ranks: lab.Group, cells: in_cells.Cells) -> None:
    source = "def f():\n    import inspect  # a comment\n    return inspect.getsource(f)\n"
    cells(source)
    assert ranks.run(cells.f).results == [source, source]


@pytest.mark.processes
def test_a_submodule_imported_through_its_parent(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells("""
        import xml.dom.minidom
        import labkit as lab
        def f(): return xml.dom.minidom.parseString("<a/>").documentElement.tagName, lab.__name__
    """)
    assert ranks.run(cells.f).results == [("a", "labkit")] * 2


# Arrays and tensors


LARGE = 100_000  # numbers: beside the message, in shared memory


ARRAYS: dict[str, Callable[[], np.ndarray]] = {
    "0-d": lambda: np.array(3.0),
    "empty": lambda: np.empty((0, 5)),
    "small": lambda: np.arange(5),
    "large": lambda: np.arange(LARGE),
    "strided": lambda: np.arange(LARGE).reshape(100, 1000)[::2, ::3],
    "Fortran order": lambda: np.asfortranarray(np.arange(LARGE).reshape(100, 1000)),
    "reversed": lambda: np.arange(LARGE)[::-1],
    "broadcast": lambda: np.broadcast_to(np.ones(1000), (100, 1000)),
    "bool": lambda: np.ones(LARGE, dtype=bool),
    "complex": lambda: np.full(LARGE, 1 + 2j),
    "big-endian": lambda: np.arange(LARGE, dtype=">f8"),
    "structured": lambda: np.zeros(LARGE, dtype=[("a", "<i4"), ("b", "<f8")]),
    "strings": lambda: np.array(["word"] * LARGE),
    "times": lambda: np.zeros(LARGE, dtype="M8[ns]"),
    "objects": lambda: np.array([1, "a", None], dtype=object),
    "masked": lambda: np.ma.masked_equal(np.arange(LARGE), 3),
}


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("way", [travel, through_a_socket])
def test_arrays(name: str, way: Callable[[Any], Any]) -> None:
    sent = ARRAYS[name]()
    got = way(sent)
    assert type(got) is type(sent)
    assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
    assert got.flags.f_contiguous or not sent.flags.f_contiguous
    np.testing.assert_array_equal(got, sent)
    assert got.flags.writeable


def test_many_large_arrays_use_one_segment() -> None:
    sent = [np.full(LARGE, i, dtype=np.int8 if i % 2 else np.float64) for i in range(5)]
    payload = pickling.pack(sent)
    assert len(payload.regions) == 5
    assert [offset % pickling.ALIGN for offset, _ in payload.regions] == [0] * 5
    assert len(payload.data) < 2000, "large arrays are no part of the message"
    for got, expected in zip(pickling.unpack(payload), sent, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.processes
def test_each_copy_is_private(ranks: lab.Group, cells: in_cells.Cells) -> None:
    """In-place changes are invisible to all others, in arguments and in results."""
    cells("""
        import numpy as np
        def f(a):
            before = a[0]
            a += 1
            f.kept = a
            return before, a
        def g():
            import __main__
            return __main__.f.kept[0]
    """)
    a = np.zeros(LARGE)
    results = ranks.run(cells.f, a).results
    assert [before for before, _ in results] == [0, 0]
    assert a[0] == 0
    for _, mine in results:
        assert mine[0] == 1
        mine += 10
    assert ranks.run(cells.g).results == [1, 1]
    assert results[0][1] is not results[1][1]


def test_a_read_only_array_stays_read_only() -> None:
    sent = np.ones(LARGE)
    sent.flags.writeable = False
    assert not travel(sent).flags.writeable


def views(x: Any) -> dict[str, Any]:
    """An array with views of it, and views without it."""
    table = x.reshape(3, -1)
    return {
        "whole and part": (x, x[:5]),
        "part and whole": (x[2:8], x),
        "transposed": (table.T, x),
        "backwards": (x[::-1], x),
        "every other": (x[::2], x[1::2], x),
        "overlapping parts": (x[:6], x[4:10]),
        "a column and a row": (table[:, 1], table[1]),
        "other bits": (x.view(np.int64), x),
        "broadcast": (np.broadcast_to(x[:4], (2, 4)), x),
        "in a column-major array": (column_major := np.asfortranarray(table), column_major[:, 1]),
        "in a tensor's memory": (memory := np.frombuffer(bytearray(x.tobytes())), memory[2:]),
    }


@pytest.mark.parametrize("size", [12, LARGE // 12 * 12])  # inside the message, and out of band
@pytest.mark.parametrize("name", views(np.arange(12.0)))
def test_arrays_keep_sharing_memory(name: str, size: int) -> None:
    """When a vector and its views were sent as separate copies, a step of a by-hand model silently had no effect."""
    given = views(np.arange(float(size)))[name]
    back = travel(given)
    for there, here in zip(back, given, strict=True):
        np.testing.assert_array_equal(there, here)
        assert (there.strides, there.dtype, there.flags.writeable) == (here.strides, here.dtype, here.flags.writeable)
    for one, other in itertools.combinations(range(len(given)), 2):
        assert np.shares_memory(back[one], back[other]) == np.shares_memory(given[one], given[other])


def test_a_view_alone_sends_only_its_own_bytes() -> None:
    x = np.zeros(1_000_000)
    payload = pickling.pack((x[:5], np.ones(3)))
    assert not payload.regions
    assert len(payload.data) < 5000


def test_arrays_made_during_pickling_are_not_confused() -> None:
    class Made:
        def __init__(self, value: int) -> None:
            self.value = value

        def __reduce__(self) -> Any:
            fresh = np.full(10, self.value)
            return tuple, ([fresh, fresh[:3]],)

    shared = np.zeros(5)
    *back, _ = travel([*(Made(i) for i in range(50)), (shared, shared[1:])])
    assert [(whole[0], part[0]) for whole, part in back] == [(i, i) for i in range(50)]


def test_object_arrays_and_empty_arrays_beside_their_views() -> None:
    things, empty = np.array([{}, "a"], object), np.zeros((0, 3))
    back = travel((things, things[:1], empty, empty[:, :1]))
    assert back[0].tolist() == [{}, "a"]
    assert back[3].shape == (0, 1)


@pytest.mark.processes
def test_a_rank_frees_results_that_the_notebook_has_read(ranks: lab.Group, cells: in_cells.Cells, tmp_path: Path) -> None:
    """At once, not at the next run."""
    cells("""
        import os, pathlib, weakref
        import numpy as np
        def f(folder):
            result = np.ones(100_000)
            weakref.finalize(result, pathlib.Path(folder, os.environ["RANK"]).touch)
            return result, {"again": result}
    """)
    for one, more in ranks.run(cells.f, tmp_path).results:
        assert one.sum() == 100_000
        assert more["again"] is one
    while len(list(tmp_path.iterdir())) < 2:
        os.sched_yield()


@pytest.mark.processes
def test_a_rank_that_dies_before_its_result_is_read(cells: in_cells.Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    cells("import numpy as np\ndef f(): return np.ones(100_000)")
    unpack = pickling.unpack

    def killed_first(payload: pickling.Payload, **options: Any) -> Any:
        if payload.owner_pid:
            os.kill(payload.owner_pid, signal.SIGKILL)
            with contextlib.suppress(psutil.NoSuchProcess):
                while psutil.Process(payload.owner_pid).status() != psutil.STATUS_ZOMBIE:
                    os.sched_yield()
        return unpack(payload, **options)

    monkeypatch.setattr(pickling, "unpack", killed_first)
    with lab.Group(2, runtime="bare", timeout_s=200) as group:
        with pytest.raises(lab.RankError) as caught:
            group.run(cells.f)
        assert caught.value.failures[0].cause is Cause.KILLED
        monkeypatch.setattr(pickling, "unpack", unpack)
        assert [r.sum() for r in group.run(cells.f).results] == [100_000] * 2


@pytest.mark.processes
def test_a_result_larger_than_any_buffer(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells("def f(n): return list(range(n)), b'x' * n")
    for numbers, text in ranks.run(cells.f, 2_000_000).results:
        assert (len(numbers), numbers[-1], len(text)) == (2_000_000, 1_999_999, 2_000_000)


TENSORS: dict[str, Callable[[Any], Any]] = {
    "0-d": lambda torch: torch.tensor(3.0),
    "empty": lambda torch: torch.empty(0, 5),
    "transposed": lambda torch: torch.arange(LARGE).view(100, 1000).t(),
    "slice": lambda torch: torch.arange(LARGE)[5:10],
    "expanded": lambda torch: torch.ones(1).expand(LARGE),
    "bool": lambda torch: torch.ones(LARGE, dtype=torch.bool),
    "bfloat16": lambda torch: torch.ones(LARGE, dtype=torch.bfloat16),
    "float8": lambda torch: torch.ones(LARGE).to(torch.float8_e4m3fn),
    "uint16": lambda torch: torch.ones(LARGE).to(torch.uint16),
    "complex": lambda torch: torch.full((LARGE,), 1 + 2j),
    "conjugate": lambda torch: torch.full((LARGE,), 1 + 2j).conj(),
    "parameter": lambda torch: torch.nn.Parameter(torch.ones(LARGE)),
    "requires grad": lambda torch: torch.ones(LARGE, requires_grad=True),
    "sparse": lambda torch: torch.eye(500).to_sparse(),
    "meta": lambda torch: torch.empty(3, 3, device="meta"),
    "channels last": lambda torch: torch.ones(2, 3, 100, 100).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("way", [travel, through_a_socket])
@pytest.mark.parametrize("name", TENSORS)
def test_tensors(name: str, way: Callable[[Any], Any]) -> None:
    torch = pytest.importorskip("torch")
    sent = TENSORS[name](torch)
    got = way(sent)
    assert type(got) is type(sent)
    for what in ("dtype", "shape", "layout", "device", "requires_grad"):
        assert getattr(got, what) == getattr(sent, what), what
    if sent.layout == torch.strided:
        assert got.stride() == sent.stride()
    if sent.device.type != "meta":
        plain = [t.detach().to_dense() for t in (got, sent)]
        assert torch.equal(*(t.float() if not t.is_complex() else t for t in plain))


def test_tensors_keep_sharing_memory() -> None:
    torch = pytest.importorskip("torch")
    base = torch.zeros(LARGE)
    got, view, as_bytes = travel((base, base[10:20], base.view(torch.uint8)))
    got[10] = 1.0
    assert view[0] == 1.0
    assert as_bytes[43] == 63  # the high byte of 1.0
    assert base[10] == 0


@pytest.mark.processes
def test_tied_weights_stay_tied_and_a_network_keeps_its_class(two_with_torch: lab.Group, cells: in_cells.Cells) -> None:
    cells("""
        import torch
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.a = torch.nn.Linear(300, 300)
                self.b = torch.nn.Linear(300, 300, bias=False)
                self.b.weight = self.a.weight
                self.register_buffer("row", self.a.weight.data[1:2])
            def forward(self, x): return self.b(self.a(x))
        def f(net):
            tied = net.a.weight is net.b.weight
            with torch.no_grad():
                net.a.weight[1] = 3
            return tied, net, net.row[0, 0].item()
    """)
    net, forward = cells.Net(), cells.Net.forward
    for tied, got, value in two_with_torch.run(cells.f, net).results:
        assert tied
        assert value == 3
        assert got.a.weight is got.b.weight
        assert type(got) is cells.Net
        got(next(net.parameters()))
    assert cells.Net.forward is forward
    assert net.row[0, 0] != 3


@pytest.fixture(scope="module", params=SELDOM_SPAWNED)
def two_with_torch(request: pytest.FixtureRequest) -> Iterator[lab.Group]:
    pytest.importorskip("torch")
    with lab.Group(2, start=request.param, timeout_s=200) as group:
        yield group


def test_tensors_of_a_gpu_become_cpu_tensors() -> None:
    """Uses a fake GPU storage, which claims to be elsewhere and has a copy on the CPU."""
    torch = pytest.importorskip("torch")

    class Far(torch.UntypedStorage):
        device = types.SimpleNamespace(type="cuda")

        def cpu(self) -> Any:
            return torch.ones(4).untyped_storage()

    payload = pickling.pack(Far(16))
    assert payload.copied_from_gpu
    got = pickling.unpack(payload)
    assert got.device.type == "cpu"
    assert torch.empty(0).set_(got).tolist() == [1, 1, 1, 1]
    assert not pickling.pack(torch.ones(4)).copied_from_gpu


# What cannot be sent


VALUES = """
    import concurrent.futures, dataclasses, functools, multiprocessing, os, queue, socket, threading
    def locked(make=threading.Lock):
        lock = make()
        thread = threading.Thread(target=lock.acquire)
        thread.start()
        thread.join()
        return lock
    lock = locked()
"""


def refused(cells: in_cells.Cells, definitions: str, call: str) -> list[str]:
    """The lines of the error of a run whose function or arguments cannot be sent."""
    cells(VALUES)(definitions)
    with lab.Group(1, runtime="bare") as group, pytest.raises(lab.LabError) as caught:
        eval(call, vars(sys.modules["__main__"]) | {"run": group.run})
    assert group._pool is None, "nothing was started for it"
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("definitions", "call", "named"),
    [
        ("attribute = lock\ndef f(): return f.attribute, lock", "run(f)", "the variable 'lock' used by f()"),
        (
            "def outer():\n    inside = locked()\n    def inner(): return inside\n    return inner",
            "run(outer())",
            "the variable 'inside' used by inner()",
        ),
        ("", "run(print, 1, lock)", "argument 2 of print()"),
        ("", "run(print, end=lock)", "argument 'end' of print()"),
        ("", "run(print, {'a': [1, (2, lock)]})", "argument 1 of print()['a'][1][1]"),
        ("class Thing: ...\nthing = Thing()\nthing.part = lock", "run(print, thing)", "argument 1 of print().part"),
        (
            "class Thing:\n    def method(self): ...\nthing = Thing()\nthing.part = lock",
            "run(thing.method)",
            "the object of method().part",
        ),
        ("", "run(functools.partial(print, 1, [lock]))", "argument 2 of print()[0]"),
        (
            "@dataclasses.dataclass(slots=True)\nclass Point:\n    x: int\n    y: object",
            "run(print, Point(1, lock))",
            "argument 1 of print().y",
        ),
        ("def default(a=lock): ...", "run(default)", "the default value 1 of default()"),
        ("def f(*, a=lock): ...", "run(f)", "the default value of 'a' of f()"),
        ("def even(): odd()\ndef odd(): even(), lock", "run(even)", "the variable 'lock' used by odd()"),
        ("class A:\n    own = lock\ndef f(): A", "run(f)", "the class attribute A.own"),
        ("class A:\n    own = lock\na = A()\ndef f(): a", "run(f)", "the class attribute A.own"),
        ("class B:\n    own = lock\nclass A(B): ...\ndef f(): A", "run(f)", "the class attribute B.own"),
        ("class A:\n    @property\n    def p(self): lock\ndef f(): A", "run(f)", "the variable 'lock' used by A.p()"),
        ("class A:\n    @staticmethod\n    def s(x=lock): ...\ndef f(): A", "run(f)", "the default value 1 of A.s()"),
        ("@functools.cache\ndef c(): return lock\ndef f(): c", "run(f)", "the variable 'lock' used by c()"),
        ("def g(): ...\ng.own = lock\ndef f(): g", "run(f)", "g.own"),
    ],
)
@pytest.mark.processes
def test_the_innermost_part_that_cannot_be_sent_is_named(definitions: str, call: str, named: str, cells: in_cells.Cells) -> None:
    what, remedy = refused(cells, definitions, call)
    assert what == f"{named} cannot be sent: this lock is locked at this moment."
    assert remedy.startswith("Release it before the run")


OF_ONE_PROCESS = "belongs to the process that made it"


@pytest.mark.parametrize(
    ("thing", "says", "remedy"),
    [
        ("thing = lock", "this lock is locked at this moment", "Release it before the run"),
        ("thing = locked(threading.RLock)", "this RLock is locked at this moment", "Release it before the run"),
        ("thing = queue.SimpleQueue()", "SimpleQueue objects cannot be pickled", "Make it inside the function"),
        ("thing = concurrent.futures.ThreadPoolExecutor(1)", f"this ThreadPoolExecutor {OF_ONE_PROCESS}", "Make it inside"),
        ("thing = concurrent.futures.Future()", f"this Future {OF_ONE_PROCESS}", "Make it inside the function"),
        ("thing = threading.Barrier(2)", f"this Barrier {OF_ONE_PROCESS}", "Make it inside the function"),
        ("thing = threading.Thread()", f"this Thread {OF_ONE_PROCESS}", "Make it inside the function"),
        ("thing = multiprocessing.Lock()", "Lock objects cannot", "Only processes that multiprocessing starts can share it"),
        ("thing = socket.socket()\nthing.close()", "socket objects cannot", "Connect inside the function"),
        (
            "thing = (i for i in range(3))",
            "generator objects cannot",
            "A generator runs only in the process that made it: send li",
        ),
        ("thing = open(os.devnull, 'wb')\nthing.close()", "BufferedWriter objects cannot", "Open the file inside the function"),
    ],
)
@pytest.mark.processes
def test_the_reason_and_the_remedy_fit_the_object(thing: str, says: str, remedy: str, cells: in_cells.Cells) -> None:
    users = "class Service:\n    def work(self): return thing\ndef f(): return Service().work()"
    first, second = refused(cells, f"{thing}\n{users}", "run(f)")
    assert first.startswith(f"the variable 'thing' used by Service.work() cannot be sent: {says}")
    assert second.startswith(remedy)


@pytest.mark.processes
def test_a_group_is_not_sent(cells: in_cells.Cells) -> None:
    with lab.Group(1, runtime="bare") as group:
        cells("def f(): return group")._main.group = group
        with pytest.raises(lab.LabError, match="a group lives in the notebook and cannot be sent to a rank; ranks use"):
            group.run(cells.f)


@pytest.mark.usefixtures("patient")
@pytest.mark.processes
def test_a_result_that_cannot_be_sent_is_named_and_the_ranks_stay(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells("""
        import sys
        def f():
            f.ran = True
            return {"x": [1, sys._getframe()]}
        def g():
            import __main__
            return __main__.f.ran
    """)
    with pytest.raises(lab.RankError, match=r"the result of f\(\)\['x'\]\[1\] cannot be sent: frame objects") as caught:
        ranks.run(cells.f)
    assert "Traceback" not in str(caught.value)
    assert ranks.run(cells.g).results == [True, True]


def test_an_objects_own_error_is_the_reason() -> None:
    class Shy:
        def __reduce__(self) -> Any:
            raise ZeroDivisionError("I stay\nhere")

    with pytest.raises(lab.LabError, match=r"^the value\[0\]\['a'\] cannot be sent: Shy objects cannot be pickled \(I stay"):
        pickling.pack([{"a": Shy()}])


@pytest.mark.processes
def test_an_object_that_cannot_be_unpickled(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells("""
        def fail(): raise ValueError("not in a rank")
        class Odd:
            def __reduce__(self): return fail, ()
    """)
    with pytest.raises(lab.RankError, match="ValueError: not in a rank"):
        ranks.run(print, cells.Odd())
    assert ranks.run(int).results == [0, 0]


# Bookkeeping


@pytest.mark.processes
def test_runs_leave_no_descriptors(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells("""
        import os, threading
        def f(a): return a, len(os.listdir("/proc/self/fd"))
        lock = threading.Lock()
        lock.acquire()
        def g(): return lock
    """)
    a = np.ones(LARGE)

    def once() -> tuple[int, int, int]:
        first, second = ranks.run(cells.f, a).results
        counts = first[1], second[1]
        del first, second
        with pytest.raises(lab.LabError):
            ranks.run(cells.g)
        gc.collect(0)
        return len(os.listdir("/proc/self/fd")), *counts

    once()
    expected = once()
    for _ in range(100):
        once()
    until = time.monotonic() + 60
    while ((now := np.array(once())) > expected).any() and time.monotonic() < until:
        pass  # a thread of another test may be about to end
    assert (now <= expected).all()  # fewer, if leftovers of an earlier test are collected only now


def test_memory_of_results_is_freed() -> None:
    """A result's segment exists as long as one of its arrays is referenced, and no longer."""

    def segments() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:labkit")

    gc.collect()  # leftovers of earlier tests
    before = segments()
    held = travel([np.ones(LARGE)] * 2)
    assert segments() == before + 1
    part = held[0][:5]
    del held
    assert segments() == before + 1
    del part
    assert segments() == before


def test_descriptors_belong_to_their_own_frames() -> None:
    """The system may deliver the descriptor of the next frame with the bytes of this one."""
    near, far = (Channel(s) for s in socket.socketpair())
    for i in range(3):
        near.send(CallFunction(False, False, pickling.pack(i)))
        payload = pickling.pack(np.full(LARGE, i))
        near.send(CallFunction(True, False, payload))
        payload.close()
    for i in range(3):
        for large in (False, True):
            message = far.receive()
            assert isinstance(message, CallFunction)
            assert message.all_called == large
            value = pickling.unpack(message.payload)
            assert (value[0] if large else value) == i
    payload = pickling.pack(np.ones(LARGE))
    gc.collect()  # leftovers of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    near.send(Done([]))
    near.send(CallFunction(True, False, payload))
    far.receive()
    far.close()
    near.close()
    assert len(os.listdir("/proc/self/fd")) == before - 2, "what nobody has taken is closed with the channel"
    payload.close()


def test_the_end_of_the_stream_raises_eof_at_any_point() -> None:
    near, far = socket.socketpair()
    writer = Channel(near)
    writer.send(CallFunction(True, False, pickling.pack(list(range(30_000)))))
    writer.close()
    with far:
        whole = b"".join(iter(lambda: far.recv(1 << 20), b""))
    assert len(whole) > 1 << 16, "some of it is read in pieces"
    for cut in (0, 1, 5, 12, 50, 3000, len(whole) - 1):
        a, b = socket.socketpair()
        sender = threading.Thread(target=lambda a=a, cut=cut: (a.sendall(whole[:cut]), a.close()))
        sender.start()
        with pytest.raises(EOFError):
            Channel(b).receive()
        sender.join()
        b.close()


def test_memory_that_the_system_copies_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system copies at most 2 GiB per call; here a smaller limit is simulated."""
    pwrite, reader = os.pwrite, process_memory._reader()
    assert reader is not None
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: pwrite(fd, view[:70_000], at))

    def read_less(pid: int, here: Any, parts: int, there: Any, there_parts: int, flags: int) -> int:
        here.size = min(here.size, 50_000)
        return reader(pid, here, parts, there, there_parts, flags)

    monkeypatch.setattr(process_memory, "_reader", lambda: read_less)
    sent = [np.arange(LARGE), np.arange(LARGE, dtype=np.int16)]
    for in_place in (False, True):
        payload = pickling.pack(sent, in_place=in_place)
        assert bool(payload.owner_pid) is in_place
        for got, expected in zip(pickling.unpack(payload), sent, strict=True):
            np.testing.assert_array_equal(got, expected)
        payload.close()


@pytest.mark.processes
def test_whose_memory_may_be_read() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        assert process_memory.may_read(child.pid)
        child.kill()
        child.wait()
        assert not process_memory.may_read(child.pid)
        with pytest.raises(OSError, match=rf"reading 8 bytes of process {child.pid}: ESRCH"):
            process_memory.read(child.pid, [(1 << 20, 8)])


def test_stop_while_a_segment_is_filled_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> int:
        raise KeyboardInterrupt

    gc.collect()  # leftovers of earlier tests
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else pytest.skip("needs /proc")
    monkeypatch.setattr(os, "pwrite", stop)
    with pytest.raises(KeyboardInterrupt):
        pickling.pack(np.ones(1 << 20))
    assert set(os.listdir("/proc/self/fd")) == before
