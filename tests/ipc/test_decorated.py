"""Functions whose decorator keeps state work in ranks: `singledispatch`, `torch.compile`, alone and inside others."""

from __future__ import annotations

from collections.abc import Iterator

import cells as in_cells
import pytest

import labkit as lab

pytestmark = pytest.mark.processes

torch = pytest.importorskip("torch")

DISPATCHED = """
    import functools

    class Own: ...

    @functools.singledispatch
    def shape(x): return "one"

    @shape.register
    def _(x: list): return [shape(item) for item in x]  # refers to itself

    @shape.register(Own)
    def _(x): return "own"

    class Shapes:
        @functools.singledispatchmethod
        def of(self, x): return "one"

        @of.register
        def _(self, x: list): return [self.of(item) for item in x]

    partial = functools.partial(shape, [1, [2]])

    def everything():
        import __main__
        assert shape is __main__.shape and shape.__name__ == "shape"
        return shape([1, Own(), [2]]), Shapes().of([1, [2]]), partial()
"""
COMPILED = """
    import torch

    @torch.compile(backend="eager", dynamic=True)
    def double(x): return 2 * x

    @torch.compile(backend="eager", fullgraph=True)
    def broken(x):
        torch._dynamo.graph_break()
        return x

    class Net(torch.nn.Module):
        def forward(self, x): return self.tripled(x)

        @torch.compile(backend="eager")
        def tripled(self, x): return 3 * x

    net = torch.compile(Net(), backend="eager")

    def everything(x):
        import __main__
        assert double is __main__.double and double.__name__ == "double"
        return double(x), net(x), torch._dynamo.utils.counters["stats"]["unique_graphs"]

    def breaks(x):
        try:
            broken(x)
        except torch._dynamo.exc.Unsupported:
            return "not one graph"
"""


@pytest.fixture(scope="module")
def ranks() -> Iterator[lab.Group]:
    with lab.Group(2, runtime="bare") as group:
        yield group


def test_functions_under_singledispatch(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells(DISPATCHED)
    assert ranks.run(cells.everything).results == [(["one", "own", ["one"]], ["one", ["one"]], ["one", ["one"]])] * 2
    assert ranks.run(cells.shape, [cells.Own()]).results == [["own"]] * 2
    cells("shape.register(str, lambda x: 'text')")
    assert ranks.run(lambda of: of("a"), cells.shape).results == ["text"] * 2
    sent_back = ranks[0].run(lambda of: of, cells.shape).results[0]
    assert sent_back(["a", cells.Own()]) == ["text", "own"]


@pytest.mark.parametrize("used", [False, True], ids=["new", "already compiled"])
def test_compiled_functions(ranks: lab.Group, cells: in_cells.Cells, used: bool) -> None:
    cells(COMPILED)
    x = torch.ones(2)
    if used:
        cells.everything(x)
    for doubled, tripled, graphs in ranks.run(cells.everything, x).results:
        assert (doubled.tolist(), tripled.tolist()) == ([2, 2], [3, 3])
        assert graphs >= 2  # they were compiled there
    assert ranks[1].run(cells.double, x).results[0].tolist() == [2, 2]
    assert ranks[0].run(lambda f: f(torch.ones(1)), cells.double).results[0].tolist() == [2]
    assert ranks.run(cells.breaks, x).results == ["not one graph"] * 2
