"""Definitions keep their identity: objects in results have the class they were made from, redefined or not."""

from __future__ import annotations

import gc

import cells as in_cells
import pytest

import labkit as lab
from labkit.errors.exceptions import LabError
from labkit.ipc.pickling import Received, Sent

pytestmark = pytest.mark.processes

TWO_FORMS = """
class Model:
    def word(self): return "old"
model = Model()
Old = Model
class Model:
    def word(self): return "new"
"""


def test_an_instance_of_a_redefined_class_comes_back_with_its_old_class(ranks: lab.Group, cells: in_cells.Cells) -> None:
    """As an argument, as a global variable, and as a default value."""
    cells(TWO_FORMS)
    cells("""
        def argument(given): return given, given.word(), isinstance(given, Model), Model()
        def variable(): return argument(model)
        def default(given=model): return argument(given)
    """)
    methods = cells.Old.word, cells.Model.word
    for run in (ranks.run(cells.argument, cells.model), ranks.run(cells.variable), ranks.run(cells.default)):
        for old, word, is_new, new in run.results:
            assert (type(old), type(new)) == (cells.Old, cells.Model)
            assert (word, is_new, old.word(), new.word()) == ("old", False, "old", "new")
    assert (cells.Old.word, cells.Model.word) == methods, "a result must not put copies of methods into the notebook's classes"


def test_objects_kept_in_ranks_have_the_class_of_that_time(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells("""
        import __main__
        class Model:
            def word(self): return "old"
        def keep():
            __main__.remembered = Model()
            return __main__.remembered
        def kept(): return __main__.remembered
    """)
    assert [type(r) for r in ranks.run(cells.keep).results] == [cells.Model] * 2
    cells("Old = Model")
    cells("class Model:\n    def word(self): return 'new'")
    for result in ranks.run(cells.kept).results:
        assert type(result) is cells.Old
        assert not isinstance(result, cells.Model)
        assert result.word() == "old"


def test_ranks_send_a_class_that_the_notebook_has_lost(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells("""
        import __main__
        class Report:
            def word(self): return "lost"
        def keep(): __main__.remembered = Report()
        def kept(): return __main__.remembered
    """)
    ranks.run(cells.keep)
    cells("class Report: ...")
    gc.collect()
    first, second = ranks.run(cells.kept).results
    assert (first.word(), second.word()) == ("lost", "lost")
    assert type(first) is type(second)
    assert not isinstance(first, cells.Report)
    cells("del Report")
    assert ranks.run(cells.kept).results[0].word() == "lost"


def test_functions_that_ranks_kept(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells("""
        import __main__
        def step(): return "old"
        old = step
        def keep(function):
            __main__.kept_function = function
            return function
        def kept(): return __main__.kept_function
    """)
    assert ranks.run(cells.keep, cells.step).results == [cells.step] * 2
    cells("def step(): return 'new'")
    assert ranks.run(cells.kept).results == [cells.old] * 2
    ranks.run(cells.keep, lambda: "of a moment")
    gc.collect()
    assert [f() for f in ranks.run(cells.kept).results] == ["of a moment"] * 2


def test_a_closure_comes_back_with_the_state_of_its_rank(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells("""
        import os
        def counter():
            count = 0
            def step():
                nonlocal count
                count += 1
                return count
            return step
        step = counter()
        def f(step):
            for _ in range(1 + int(os.environ["RANK"])): step()
            return step
    """)
    assert [step() for step in ranks.run(cells.f, cells.step).results] == [2, 3]
    assert cells.step() == 1


def test_subclasses_enumerations_and_classes_themselves(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells(TWO_FORMS)
    cells("""
        import enum
        class Derived(Old): ...
        class Colour(enum.Enum):
            RED = 1
        red = Colour.RED
        OldColour = Colour
        class Colour(enum.Enum):
            RED = 1
        def f(*given): return given
    """)
    for derived, red, kind in ranks.run(cells.f, cells.Derived(), cells.red, cells.Old).results:
        assert isinstance(derived, cells.Derived)
        assert isinstance(derived, cells.Old)
        assert red is cells.OldColour.RED
        assert red is not cells.Colour.RED
        assert kind is cells.Old


def test_classes_keep_their_slots_in_ranks(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells("""
        import dataclasses
        class Slots:
            __slots__ = ("a", "b")
            def __init__(self): self.a = 1
        class Below(Slots):
            __slots__ = "c"
        @dataclasses.dataclass(slots=True)
        class Point:
            x: int
            y: int = 2
        def f(*given):
            for one in given: one.__class__  # all of them have arrived
            given[0].b = given[1].c = 3
            try:
                given[0].undeclared = 1
            except AttributeError:
                return *given, hasattr(given[2], "__dict__")
    """)
    for slots, below, point, has_dict in ranks.run(cells.f, cells.Slots(), cells.Below(), cells.Point(1)).results:
        assert (slots.a, slots.b, below.a, below.c) == (1, 3, 1, 3)
        assert point == cells.Point(1, 2)
        assert not has_dict
        assert [type(x) for x in (slots, below, point)] == [cells.Slots, cells.Below, cells.Point]


def test_persistent_names_of_cells_on_the_ranks(ranks: lab.Group, cells: in_cells.Cells) -> None:
    cells(TWO_FORMS)
    cells("def get():\n    import __main__\n    return __main__.mine")
    ranks.run_cell("mine = [model, Model()]", "<cell>", "cell 1")
    cells("Second = Model\nclass Model: ...")
    ranks.run_cell("mine.append(Model())", "<cell>", "cell 2")
    for mine in ranks.run(cells.get).results:
        assert [type(m) for m in mine] == [cells.Old, cells.Second, cells.Model]


# The numbers


def test_numbers_are_kept_and_never_reused() -> None:
    sent = Sent()

    class One: ...

    class Other: ...

    assert [sent.number_of(x) for x in (One, Other, One)] == [1, 2, 1]
    assert sent.look_up(2, "Other") is Other
    del Other
    gc.collect()
    assert sent.take_gone() == [2]
    assert sent.take_gone() == []
    with pytest.raises(LabError, match="the result refers to Other, which is no longer defined"):
        sent.look_up(2, "Other")
    assert sent.number_of(lambda: None) == 3


def test_a_rank_knows_every_form_of_a_definition_by_the_same_number() -> None:
    received = Received()

    def one() -> None: ...

    def again() -> None: ...

    received.add({7: one})
    received.add({7: again, 8: int})
    assert [received.number_of(x) for x in (one, again, int, str)] == [7, 7, 8, None]
    received.forget([7])
    assert [received.number_of(x) for x in (one, again, int)] == [None, None, 8]
