"""Which answers a notebook submits, and which of its statements they need."""

from __future__ import annotations

import pytest

from labkit.teaching.classroom.statements import parsed

CELLS = [
    "%matplotlib inline\nimport torch\nimport labkit as lab",
    "group = lab.Group(2)\nscale = 2.0\ntable = {}\ntable['a'] = 1",
    "run = group.run(print)\nlab.timeline(run)",
    "def helper(x):\n    return x * scale\n\ndef answer(x):\n    return helper(x) + table['a']\n\nlab.check('bubble', answer)",
    "def helper(x):\n    return 0\n",
]


def needed(cells: list[str], names: set[str], until: int | None = None) -> list[str]:
    program = parsed(cells)
    positions = program.needed(len(program.statements) if until is None else until, names)
    return [program.lines[s.cell][s.node.lineno - 1].strip() for i, s in enumerate(program.statements) if i in positions]


def test_an_answer_needs_what_it_refers_to_directly_or_through_others_and_nothing_else() -> None:
    [(position, exercise)] = parsed(CELLS).answers()
    assert exercise == "bubble"
    own = ["scale = 2.0", "table = {}", "table['a'] = 1", "def helper(x):", "def answer(x):"]
    assert needed(CELLS, {"answer"}, position) == own


OF_A_RUN = ["import labkit as lab", "group = lab.Group(2)", "run = group.run(print)", "share = run.results[0]"]


@pytest.mark.parametrize(
    ("cells", "name", "lines"),
    [
        ([*CELLS[:3], "share = run.results[0]"], "share", OF_A_RUN),
        (["from math import *", "x = pi"], "x", ["from math import *", "x = pi"]),  # a star may bring any name
        (["a = []", "for i in range(3):\n    a.append(i)", "print(a)"], "a", ["a = []", "for i in range(3):"]),
        (["a = (5\n     % 3)"], "a", ["a = (5"]),  # no magic
    ],
)
def test_what_a_name_needs(cells: list[str], name: str, lines: list[str]) -> None:
    assert needed(cells, {name}) == lines
    assert parsed(["a = (5\n     % 3)"]).lines[1][1] == "     % 3)\n"


@pytest.mark.parametrize(
    "call",
    [
        "lab.check('bubble', mine)", "verdict = lab.check('bubble', mine)", "check(name='bubble', answer=mine)",
        "labkit.check('bubble', answer=mine)",
    ],
)  # fmt: skip
def test_each_form_of_check_submits_an_answer(call: str) -> None:
    program = parsed(["def mine(): ...", call])
    assert [name for _, name in program.answers()] == ["bubble"]
    assert program.submitted_by_name(["bubble", "mine"]) == {"mine": 0}


@pytest.mark.parametrize(
    "cell",
    [
        "print(lab.check('bubble', mine))", "with x:\n    lab.check('bubble', mine)", "assert lab.check('bubble', mine)",
        "lab.check('bubble', mine), 1", "v: object = lab.check('bubble', mine)", "await f()\nlab.check('bubble', mine)",
        "files = !ls\nlab.check('bubble', mine)\nprint?", "%%time\nlab.check('bubble', mine)",
        "if x:\n    !ls\n    lab.check('bubble', mine)",
    ],
)  # fmt: skip
def test_checks_are_found_inside_of_other_statements_and_beside_magics_and_await(cell: str) -> None:
    program = parsed(["def mine(): ...", cell])
    assert program.errors == {}
    assert [name for _, name in program.answers()] == ["bubble"]


def test_a_function_defined_in_a_statement_that_also_checks_it_is_kept() -> None:
    cell = "if True:\n    def mine(): ...\n    lab.check('bubble', mine)"
    ((position, _),) = parsed([cell]).answers()
    assert parsed([cell]).needed(position, {"mine"}) == {0}


@pytest.mark.parametrize("call", ["lab.check('bubble')", "lab.check(name, mine)", "lab.guess('bubble', mine)", "print(1)"])
def test_other_calls_submit_nothing(call: str) -> None:
    assert list(parsed([call]).answers()) == []


def test_an_exercise_that_is_not_checked_is_submitted_under_its_name_at_its_last_definition() -> None:
    program = parsed(["def bubble(): ...", "x = 1", "def bubble(): return 1"])
    assert program.submitted_by_name(["bubble", "other"]) == {"bubble": 2}


def test_a_cell_that_is_no_python_is_left_out_and_reported() -> None:
    program = parsed(["x = 1", "def broken(:", "y = x"])
    assert list(program.errors) == [2]
    assert "SyntaxError" in program.errors[2]
    assert needed(["x = 1", "def broken(:", "y = x"], {"y"}) == ["x = 1", "y = x"]


def test_magics_keep_their_lines() -> None:
    program = parsed(["%pip install x\n!ls\ny = 1", "%%ranks group\nz = 1"])
    assert [s.node.lineno for s in program.statements if "y" in s.gives] == [3]
