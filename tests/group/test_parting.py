"""The branch where ranks parted: by syntax, on sources and stacks made by hand, and what real runs say."""

from __future__ import annotations

import ast
import functools
import linecache
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cells as in_cells
import pytest

import labkit as lab
from labkit.group.deadlock_words import ORIGINS
from labkit.group.parting import Side, frames_at, parting_in_words
from labkit.ipc.ranks_cell import cell_filename
from labkit.launch.frames import Owner, StackFrame

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402  # after the check that it is there
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

FILE = "/program/own.py"


def stack(source: str, *marks: str) -> list[StackFrame]:
    """The frames at the lines of a source that end with the comments `marks`, outermost first."""
    lines = textwrap.dedent(source).splitlines(keepends=True)
    linecache.cache[FILE] = (len(source), None, lines, FILE)
    tree, frames = ast.parse("".join(lines)), []
    for mark in marks:
        line = next(number for number, text in enumerate(lines, 1) if re.search(rf"# .*\b{mark}\b", text))
        around = [
            node for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.lineno <= line <= (node.end_lineno or 0)
        ]  # fmt: skip
        innermost = max(around, key=lambda node: node.lineno, default=None)
        frames.append(StackFrame(FILE, line, innermost.name if innermost else "<module>", Owner.STUDENT))
    return frames


def said(source: str, one: str = "A", other: str = "B", before: str = "", before_other: str | None = None) -> str:
    """What is said of rank 0 at the marks `one` and rank 1 at the marks `other` ("": returned).

    Both, or the latter with `before_other`, have entered operations at the marks `before`.
    """

    def lines(marks: str) -> list[str]:
        return [f"own.py, line {stack(source, mark)[0].line}" for mark in marks.split()]

    first = Side(["rank 0"], stack(source, *one.split()), lines(before))
    second = Side(["rank 1"], stack(source, *other.split()), lines(before if before_other is None else before_other))
    return parting_in_words(first, second)


def exchanged(words: str) -> str:
    """The same words of each other's rank."""
    return re.sub(r"rank (\d)", lambda number: f"rank {1 - int(number[1])}", words)


PAST = "`if first` (line 1): rank 0 is inside, rank 1 is past it."
PAST_FOR = PAST.replace("if first", "for x in loader")
OTHER_BRANCH = "`if first` (line 1): rank 0 is inside, rank 1 is in another branch of it."
# Programs, and what is said of them, if anything is certain.
PARTED = {
    "an if": ("if first:\n    a()  # A\nb()  # B", PAST),
    "the other way round": ("if first:\n    a()  # B\nb()  # A", exchanged(PAST)),
    "else": ("if first:\n    a()  # A\nelse:\n    b()  # B", OTHER_BRANCH),
    "elif": ("if first:\n    a()  # A\nelif second:\n    b()  # B", OTHER_BRANCH),
    "past an else": ("if first:\n    x()\nelse:\n    a()  # A\nb()  # B", PAST.replace("inside", "in its `else`")),
    "two ifs": ("if first:\n    a()  # A\nif second:\n    b()  # B", PAST),
    "in a with": ("if first:\n    with x:\n        a()  # A\nb()  # B", PAST),
    "a fixed loop": ("if first:\n    for _ in range(3):\n        a()  # A\nb()  # B", PAST),
    "in a try that catches nothing": (
        "try:\n    if first:\n        a()  # A\nfinally:\n    c()\nb()  # B", PAST.replace("line 1", "line 2"),
    ),
    "a for": ("for x in loader:\n    a()  # A\nb()  # B", PAST_FOR),
    "a while": ("while more():\n    a()  # A\nb()  # B", PAST.replace("if first", "while more()")),
    "break": (
        "for x in loader:\n    a()  # A\n    if stop:\n        break\nb()  # B",
        f"{PAST_FOR} Besides its end, `break` (line 4) under `if stop` (line 3) leaves the loop.",
    ),
    "try, caught": ("try:\n    a()  # A\nexcept E:\n    pass\nb()  # B", PAST.replace("if first", "try")),
    "match": (
        "match kind:\n    case 1:\n        a()  # A\n    case _:\n        b()  # B",
        OTHER_BRANCH.replace("if first", "match kind"),
    ),
    "past a match": ("match kind:\n    case 1:\n        a()  # A\nb()  # B", PAST.replace("if first", "match kind")),
    "one after the other": ("a()  # A\nb()  # B", ""),
    "one line": ("a()  # A B", ""),
    "before a branch": ("b()  # B\nif x:\n    a()  # A", ""),
    "on the line of the branch": ("if x: a()  # A\nb()  # B", ""),
    "in the condition of a loop": ("while a():  # A\n    x()\nb()  # B", ""),
    "in the condition of a loop in a branch": ("if x:\n    while a():  # A\n        x()\nb()  # B", ""),
    "at the edge of a with": ("with a():  # A\n    x()\nb()  # B", ""),
    "for and else": ("for x in y:\n    a()  # A\nelse:\n    b()  # B", ""),
    "finally": ("try:\n    a()  # A\nfinally:\n    b()  # B", ""),
    "only a with": ("with x:\n    a()  # A\nb()  # B", ""),
    "a loop of three rounds for all": ("for _ in range(3):\n    a()  # A\nb()  # B", ""),
    # Ranks that took the outer branch both, and parted at the inner one, look the same.
    "several ways": (
        "if epoch_ends:\n    if first:\n        a()  # A\nb()  # B",
        "`if epoch_ends` (line 1) or `if first` (line 2): rank 0 is in line 3, rank 1 is past it.",
    ),
    "too many ways": ("if a:\n    if b:\n        for x in y:\n            if c:\n                a()  # A\nb()  # B", ""),
    "a round that is cut short": (
        "for x in loader:\n    if x:\n        continue\n    a()  # A\nb()  # B",
        "`continue` (line 3) under `if x` (line 2) or `for x in loader` (line 1): rank 0 is in line 4, rank 1 is past it.",
    ),
}  # fmt: skip


def inside_a_function(source: str, header: str = "def main():") -> str:
    return f"{header}\n{textwrap.indent(source, '    ')}"


def shifted(words: str, by: int) -> str:
    """What is said of a program that stands so many lines further down."""
    return words and "The ranks parted at " + re.sub(r"line (\d+)", lambda number: f"line {int(number[1]) + by}", words)


@pytest.mark.parametrize("case", PARTED)
def test_one_side_is_inside(case: str) -> None:
    source, words = PARTED[case]
    assert said(source) == shifted(words, 0), "in a cell"
    assert said(inside_a_function(source)) == shifted(words, 1)
    method = inside_a_function(inside_a_function(source, "@decorated\nasync def step(self):"), "class Trainer:")
    assert said(method) == shifted(words, 3)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("if first:\n    a()  # A", "`if first` (line 1): rank 0 is inside"),
        ("if not first:\n    return\na()  # A", "`return` (line 2) under `if not first` (line 1): rank 0 is in line 3"),
        ("if first:\n    return\nelse:\n    a()  # A", "`if first` (line 1): rank 0 is in its `else`"),
        ("for x in loader:\n    a()  # A", "`for x in loader` (line 1): rank 0 is inside"),
        (
            "for x in loader:\n    a()  # A\n    if x:\n        return",
            "`return` (line 4) under `if x` (line 3) or `for x in loader` (line 1): rank 0 is in line 2",
        ),
        (
            "for x in loader:\n    if x:\n        continue\n    a()  # A",
            "`continue` (line 3) under `if x` (line 2) or `for x in loader` (line 1): rank 0 is in line 4",
        ),
        (
            "if epoch_ends:\n    if first:\n        a()  # A\nb()",
            "`if epoch_ends` (line 1) or `if first` (line 2): rank 0 is in line 3",
        ),
        # A return in a function that is defined there does not count.
        (
            "def inner():\n    return 1\ncall = lambda: 2\nif first:\n    a()  # A\n",
            "`if first` (line 4): rank 0 is inside",
        ),
    ],
)
def test_one_side_has_returned(source: str, words: str) -> None:
    assert said(inside_a_function(source), other="") == shifted(f"{words}, rank 1 returned.", 1)


CALLS = """
def save(model):
    if rank == 0:
        a()  # A

def evaluate(model):
    b()  # B

def main():
    if step == 3:
        save(model)  # save
    evaluate(model)  # evaluate
    save(model); save(other)  # twice
    [save(m) for m in models]  # all
    map(save, models)  # map
    c()  # C
"""


def test_ranks_in_different_functions() -> None:
    parted = "The ranks parted at `if step == 3` (line 10) or `if rank == 0` (line 3): rank 0 is in line 4, rank 1"
    assert said(CALLS, "save A", "evaluate B") == f"{parted} is past it."
    assert said(CALLS, "save A", "C") == f"{parted} is past it."
    assert said(CALLS, "evaluate B", "save A") == exchanged(f"{parted} is past it.")


def test_a_return_in_a_function_that_one_side_may_have_called() -> None:
    source = CALLS.replace("    if rank == 0:", "    if quiet:\n        return\n    if True:")
    assert "`if step == 3` (line 12), `return` (line 4) under `if quiet` (line 3) or `if True` (line 5): rank 0 is" in said(
        source, "save A", "C"
    )


def test_two_functions_that_one_line_calls() -> None:
    source = CALLS.replace("c()  # C", "save(model) if first else evaluate(model)  # either")
    assert said(source, "either A", "either B") == ""


RECURSION = """
def walk(tree):
    if tree:
        walk(tree)  # deeper
        a()  # A
    b()  # B
"""


def test_recursion() -> None:
    assert (
        said(RECURSION, "deeper A", "deeper B") == "The ranks parted at `if tree` (line 3): rank 0 is inside, rank 1 is past it."
    )
    assert said(RECURSION, "deeper deeper A", "deeper A") == "", "one line is within the call of the other"


LOOP = """
def main():
    for epoch in epochs:
        for x in loader:
            c()  # C
            step()  # S
            if save_now:
                a()  # A
            b()  # B
        if first:
            d()  # D
        e()  # E
"""


def test_loops() -> None:
    """Two lines of a loop may belong to two of its rounds."""
    parted = "The ranks parted at `if save_now` (line 7): rank 0 is inside, rank 1 is"
    assert said(LOOP) == "", "nothing tells in which rounds"
    assert said(LOOP, before="C S C S") == f"{parted} past it."
    assert said(LOOP, "A", "C", before="C S C S") == f"{parted} in a later round."
    assert said(LOOP, "C", "A", before="C S") == exchanged(f"{parted} in a later round.")
    optional = LOOP.replace("c()  # C", "c()  # C\n            if z:\n                z()  # Z")
    assert said(optional, "Z", "A", before="S") == exchanged(f"{parted.replace('7', '9')} in a later round.")
    assert said(LOOP, "A", "B", before="C S", before_other="C S C S") == "", "their rounds differ"
    assert said(LOOP, "B", "C", before="C S") == "", "no branch lets a rank pass by"
    assert said(LOOP, "A", "C", before="C") == "", "the same line may be entered several times in a round"
    assert said(LOOP, "D", "E", before="C S") == "", "the inner loop may have no round"
    assert said(LOOP, "D", "C", before="C S E C S") == "", "one may be in the next epoch, or have more batches"
    assert said(LOOP, "A", "E", before="C S") == "", "of which epoch?"
    assert said(LOOP, "B", "E", before="E") == "", "both have begun the next epoch"


def test_rounds_in_which_a_line_may_be_passed_by() -> None:
    for way in ("if x:\n        c()  # C", "if x:\n        continue\n    c()  # C"):
        source = f"for x in y:\n    {way}\n    if z:\n        a()  # A\n    b()  # B"
        assert said(source, before="C") == "", "not each round comes to C, so this counts none"
    source = "for x in y:\n    c()  # C\n    s()  # S\n    if x:\n        continue\n    a()  # A"
    parted = "The ranks parted at `continue` (line 5) under `if x` (line 4): rank 0 is in line 6, rank 1 is in a later round."
    assert said(source, "A", "C", before="C S") == said(source, "A", "C", before="S") == parted


CALLED = """
def main():
    for x in loader:
        train(x)  # train

def train(x):
    c()  # C
    s()  # S
    if first:
        a()  # A
    b()  # B
"""


def test_calls_in_a_loop() -> None:
    parted = "The ranks parted at `if first` (line 9): rank 0 is inside, rank 1 is"
    assert said(CALLED, "train A", "train B") == ""
    assert said(CALLED, "train A", "train B", before="C S") == f"{parted} past it."
    assert said(CALLED, "train A", "train C", before="C S") == f"{parted} in a later round."


@pytest.mark.parametrize("caller", ["twice", "all", "map"])
def test_a_function_that_one_line_may_call_several_times(caller: str) -> None:
    source = CALLS.replace("a()  # A", "a()  # A\n    x()  # X")
    assert said(source, f"{caller} A", f"{caller} X") == ""
    assert said(source, "save A", "save X") == "The ranks parted at `if rank == 0` (line 3): rank 0 is inside, rank 1 is past it."


def test_a_source_that_cannot_be_read_or_has_changed() -> None:
    a, b = stack("if x:\n    a()  # A\nb()  # B", "A", "B")
    assert parting_in_words(Side(["rank 0"], [a]), Side(["rank 1"], [b]))
    gone = Side(["rank 1"], [b._replace(file="/program/nowhere.py")])
    assert parting_in_words(Side(["rank 0"], [a]), gone) == ""
    assert parting_in_words(gone, Side(["rank 0"], [])) == ""
    assert parting_in_words(Side(["rank 0"], [a]), Side(["rank 1"], [b._replace(source="another line")])) == ""
    linecache.cache[FILE] = (1, None, ["%time a()\n", "    x\n", "b()\n"], FILE)
    assert parting_in_words(Side(["rank 0"], [a]), Side(["rank 1"], [b])) == "", "no Python"


def test_lambdas_and_generators() -> None:
    (a, b) = stack("if x:\n    a()  # A\nb()  # B", "A", "B")
    for function in ("<lambda>", "<genexpr>"):
        assert parting_in_words(Side(["rank 0"], [a, a._replace(function=function)]), Side(["rank 1"], [b])) == ""
    assert parting_in_words(Side(["rank 0"], [a, a._replace(function="<dictcomp>")]), Side(["rank 1"], [b]))


def test_several_ranks() -> None:
    a, b = stack("if x:\n    a()  # A\nb()  # B", "A", "B")
    words = parting_in_words(Side(["rank 0", "rank 2"], [a]), Side(["rank 1", "rank 3"], [b]))
    assert words == "The ranks parted at `if x` (line 1): rank 0 and rank 2 are inside, rank 1 and rank 3 are past it."


def test_the_frames_of_an_operation() -> None:
    a, b = stack("def main():\n    a()  # A\n    b()  # B", "A", "B")
    library = StackFrame("/lib/torch.py", 7, "all_reduce", Owner.LIBRARY)
    assert frames_at("own.py, line 2", [a, library], None) == [a]
    assert frames_at("own.py, line 3", [a, library], None) == [], "it has gone on"
    assert frames_at("own.py, line 3", [], a._replace(line=1)) == [b], "in the called function"
    remark = "its group number 2, after that of own.py, line 9"
    assert frames_at(f"own.py, line 2; {remark}", [a, library], None) == [a], "as new_group has it"
    assert frames_at("other.py, line 3", [], a) == []
    assert frames_at("", [a, library], a) == []


def test_long_conditions_are_cut() -> None:
    source = f"if {' or '.join(f'condition_{i}' for i in range(20))}:\n    a()  # A\nb()  # B"
    assert "..." in said(source)
    assert len(said(source)) < 170


# Real ranks.


def failure(group: lab.Group, function: Callable[..., Any], *arguments: Any) -> str:
    """What is said when a run fails, on one line."""
    with pytest.raises(lab.RunError) as caught:
        group.run(function, *arguments)
    return " ".join(str(caught.value).split())


def at(function: Callable[..., Any], line: int) -> str:
    """A line of a function, counted from its `def`."""
    return f"(line {function.__code__.co_firstlineno + line})"


def validates_on_rank_0() -> None:
    model = DistributedDataParallel(nn.BatchNorm1d(4))
    if dist.get_rank() == 0:
        model(torch.ones(2, 4))
    dist.barrier()


def gathers_on_rank_0() -> None:
    if dist.get_rank() == 0:
        dist.all_gather_object([None, None], "mine")
    else:
        dist.barrier()


@pytest.mark.processes
def test_a_collective_on_one_rank(two: lab.Group) -> None:
    said = failure(two, validates_on_rank_0)
    assert f"parted at `if dist.get_rank() == 0` {at(validates_on_rank_0, 2)}: rank 0 is inside, rank 1 is past it." in said
    assert ORIGINS["_sync_buffers"] in said
    assert ": model(torch.ones(2, 4))" in said
    assert ": dist.barrier()" in said
    said = failure(two, gathers_on_rank_0)
    assert f"parted at `if dist.get_rank() == 0` {at(gathers_on_rank_0, 1)}: rank 0 is inside, rank 1 is in another" in said
    assert ORIGINS["all_gather_object"] in said


class Trainer:
    """Only rank 0 sees that it is time to stop."""

    def fit(self) -> None:
        for step in range(10):
            dist.all_reduce(torch.ones(1))
            if dist.get_rank() == 0 and step == 3:
                break

    def save(self, rank: int) -> None:
        for _ in range(2):
            dist.all_reduce(torch.ones(1))
            torch.zeros(1).item()
            if dist.get_rank() == rank:
                dist.barrier()


@pytest.mark.processes
def test_methods(two: lab.Group) -> None:
    loop, leaves, condition = at(Trainer.fit, 1), at(Trainer.fit, 4), at(Trainer.fit, 3)
    assert (
        f"parted at `for step in range(10)` {loop}: rank 1 is inside, rank 0 returned. Besides its end, `break` {leaves} under "
        f"`if dist.get_rank() == 0 and step == 3` {condition} leaves the loop."
    ) in failure(two, Trainer().fit)
    assert "parted" not in failure(two, Trainer().save, 0), "rank 1 may be in the same round as rank 0, or a later one"


def leaves_in_step_3(*, before: bool) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    for step in range(5):
        dist.all_reduce(torch.ones(1))
        if before:
            optimizer.step()
        if dist.get_rank() == 0 and step == 2:
            return
        if not before:
            optimizer.step()


@pytest.mark.processes
def test_the_steps_that_ranks_have_done(two: lab.Group) -> None:
    assert "Each has done 3 optimizer steps." in failure(two, functools.partial(leaves_in_step_3, before=True))
    said = failure(two, functools.partial(leaves_in_step_3, before=False))
    assert "So far, rank 1 has done 3 optimizer steps and rank 0 2 optimizer steps." in said


MODULE = """
import torch
import torch.distributed as dist

def reduced(x, first):
    if first:
        return dist.all_reduce(x)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)

def returns():
    if dist.get_rank() == 1:
        return
    dist.barrier()

def both():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(2))
    else:
        dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MAX)
"""


@pytest.mark.processes
def test_a_module(two: lab.Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    import own_module

    try:
        words = "`return` (line 12) under `if dist.get_rank() == 1` (line 11): rank 0 is in line 13, rank 1 returned."
        assert f"parted at {words}" in failure(two, own_module.returns)
        words = "`if dist.get_rank() == 0` (line 16): rank 0 is inside, rank 1 is in another branch of it."
        assert f"parted at {words}" in failure(two, own_module.both), "both have returned"
    finally:
        del sys.modules["own_module"]


def sends_and_receives() -> None:
    if dist.get_rank() == 0:
        dist.send(torch.ones(1), 1, tag=1)
    else:
        dist.recv(torch.ones(1), 0)


def two_groups() -> None:
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups if dist.get_rank() == 0 else reversed(groups):
        dist.barrier(group)


@pytest.mark.processes
@pytest.mark.parametrize("function", [sends_and_receives, two_groups])
def test_ranks_that_have_not_parted_at_a_branch(two: lab.Group, function: Callable[..., None]) -> None:
    assert "parted" not in failure(two, function)


CELL = """import torch, torch.distributed as dist
x = torch.ones(2)
if dist.get_rank() > 0:
    dist.all_reduce(x)
dist.barrier()
"""


@pytest.mark.processes
def test_a_cell(three: lab.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    in_cells.new_main(monkeypatch)
    with pytest.raises(lab.RunError) as caught:
        three.run_cell(CELL, cell_filename(4), "cell 4")
    said = " ".join(str(caught.value).split())
    assert "parted at `if dist.get_rank() > 0` (line 3): " in said


def test_the_functions_of_torch_that_are_recognized_exist() -> None:
    """By name, on stacks."""
    from torch.distributed import distributed_c10d, utils
    from torch.distributed.tensor import DTensor

    places = (DistributedDataParallel, DTensor, distributed_c10d, utils)
    assert [name for name in ORIGINS if not any(hasattr(place, name) for place in places)] == []
