"""The branch where ranks parted: found by syntax from the lines at which ranks are, once a run has failed.

Nothing is said unless it is certain: wrong words would mislead. What can go wrong, and tests of `test_parting.py`:

- One rank is a round of a loop ahead, and passed the other's line in an earlier one (`test_loops`).
- Ranks that went past two nested branches may have parted at either (`test_one_side_is_inside`).
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from labkit.errors.lists import listed
from labkit.group.output import cell_label
from labkit.launch.frames import Owner, StackFrame

MOST_WAYS: Final = 3  # past a line: more explain nothing
LONGEST_HEAD: Final = 70  # characters of a condition
LOOPS: Final = (ast.For, ast.AsyncFor, ast.While)
WITH: Final = (ast.With, ast.AsyncWith)
LEAVING: Final = (ast.Return, ast.Break, ast.Continue)
FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS: Final = ("<listcomp>", "<setcomp>", "<dictcomp>")
REPEATED: Final = (*LOOPS, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)


class Side(NamedTuple):
    """Ranks that are at the same place."""

    names: Sequence[str]  # their names
    frames: Sequence[StackFrame]  # the student's frames, outermost first; none if the ranks have returned
    lines: Sequence[str] = ()  # where they were before: the lines of their steps and of the group's operations, in order

    def __str__(self) -> str:
        return f"{listed(self.names)} {'is' if len(self.names) == 1 else 'are'}"


class _Branch(NamedTuple):
    """A compound statement around a line, and the block of it that contains the line."""

    node: Any
    block: list[Any]

    @property
    def repeats(self) -> bool:
        return isinstance(self.node, LOOPS) and self.block is self.node.body

    @property
    def arm(self) -> str:
        return "in its `else`" if self.block is getattr(self.node, "orelse", None) else "inside"


class _BranchPlace(NamedTuple):
    """A frame in the syntax tree: its function, and the branches around its line, outermost first."""

    frame: StackFrame
    function: Any
    branches: list[_Branch]

    def block(self, depth: int) -> list[Any]:
        return self.branches[depth - 1].block if depth else list(self.function.body)


class _Way(NamedTuple):
    """A way past a place: a branch around it, or a statement before it that leaves, and the `if` around that."""

    node: Any
    under: Any = None
    arm: str = ""  # in which the line is

    def __str__(self) -> str:
        return _head(self.node) + (f" under {_head(self.under)}" if self.under else "")


def parting_in_words(one: Side, other: Side) -> str:
    """The sentence about where two sides parted; "" if that is not certain. The other side may have returned."""
    mine, theirs = _places(one.frames), _places(other.frames)
    if not mine or (other.frames and not theirs):
        return ""
    if not theirs:
        return _sentence(_ways(mine, 0, left=True), one, f"{listed(other.names)} returned")
    at = next((i for i, (f, g) in enumerate(zip(mine, theirs, strict=False)) if f.frame[:3] != g.frame[:3]), 0)
    a, b = mine[at], theirs[at]
    if a.function is not b.function or a.frame.line == b.frame.line:
        return ""
    common = sum(x.block is y.block for x, y in zip(a.branches, b.branches, strict=False))
    depth = max((n for n, branch in enumerate(a.branches[:common], 1) if branch.repeats), default=0)
    later: list[bool | None] = [False, False]
    if depth or not all(_happens_once(place, mine[i + 1].frame.function) for i, place in enumerate(mine[:at])):
        later = [_is_in_later_round(place, depth, one, other) for place in (a, b)]
    if None in later:
        return ""
    pairs = (one, mine, other, b, later), (other, theirs, one, a, later[::-1])
    for inside, places, rest, there, (before, after) in pairs:
        branch = next(iter(places[at].branches[common:]), None)
        if after and not before:
            return _sentence(_ways(places[at:], depth, left=True), inside, f"{rest} in a later round")
        if branch is None or before is not after or there.frame.line <= branch.block[-1].end_lineno:
            continue
        if there.frame.line > branch.node.end_lineno:
            return _sentence(_ways(places[at:], common, left=False), inside, f"{rest} past it")
        if isinstance(branch.node, ast.If | ast.Match):
            return _sentence([_Way(branch.node, arm=branch.arm)], inside, f"{rest} in another branch of it")
    return ""


def frames_at(line: str, stack: Sequence[StackFrame], called: StackFrame | None) -> list[StackFrame]:
    """The student's frames of a rank that entered an operation at a line; [] if they are not certain.

    `stack` is its present stack; if it has left the operation, the line may still be in the called function itself.
    """
    own, (label, number) = [frame for frame in stack if frame.own is Owner.STUDENT], _label_and_number(line)
    if own and (cell_label(own[-1].file), own[-1].line) == (label, number):
        return own
    return [called._replace(line=number)] if called is not None and cell_label(called.file) == label else []


def _label_and_number(line: str) -> tuple[str, int]:
    """The parts of a line: "cell 5, line 3", perhaps with a remark, as that of a new group."""
    found = re.match(r"(.*?), line (\d+)", line)
    return (found[1], int(found[2])) if found else ("", 0)


def source_of(frame: StackFrame) -> str:
    """The source line of a frame; "" if this machine does not have it."""
    linecache.checkcache(frame.file)
    return linecache.getline(frame.file, frame.line).strip()


def _places(frames: Sequence[StackFrame]) -> list[_BranchPlace]:
    places = [_place(frame) for frame in frames if frame.function not in COMPREHENSIONS]
    return [] if None in places else [place for place in places if place is not None]


def _place(frame: StackFrame) -> _BranchPlace | None:
    """The place of a frame; None if its source is unknown, or if its line does not tell where in it the frame is."""
    source = source_of(frame)
    tree = _parsed("".join(linecache.getlines(frame.file)))
    if tree is None or not source or frame.source not in ("", source):
        return None
    named = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS) and node.name == frame.function]
    around = [node for node in named if _contains(node, frame.line)]
    function = tree if frame.function == "<module>" else max(around, key=lambda node: node.lineno, default=None)
    branches = _branches(function, frame.line) if function is not None else None
    return _BranchPlace(frame, function, branches) if branches is not None else None


@functools.lru_cache(maxsize=16)  # places of one function must be in the same tree
def _parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except SyntaxError:
        return None


def _contains(node: Any, line: int) -> bool:
    return bool(getattr(node, "lineno", line + 1) <= line <= node.end_lineno)


def _branches(function: Any, line: int) -> list[_Branch] | None:
    """The branches around a line, outermost first; None if they are not certain."""
    found: list[_Branch] = []
    block = function.body
    while block:
        node = next((statement for statement in block if _contains(statement, line)), None)
        blocks = _blocks(node)
        block = next((inner for inner in blocks if inner[0].lineno <= line <= inner[-1].end_lineno), [])
        if node is None or (block and blocks[0][0].lineno == node.lineno):
            return None  # on one line with its header
        if blocks and not block and not isinstance(node, ast.If | ast.Match):
            return None  # in the header of a loop or `with`, which is also where a round and the block end
        found += [_Branch(node, block)] if block else []
    return found


def _blocks(node: Any) -> list[list[Any]]:
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return []
    parts = [node, *getattr(node, "handlers", ()), *getattr(node, "cases", ())]
    return [block for part in parts for name in ("body", "orelse", "finalbody") if (block := getattr(part, name, None))]


def _happens_once(place: _BranchPlace, function: str) -> bool:
    """Whether a line calls a function once: not in a loop, through a library, or for each of several elements."""
    nodes = [node for node in ast.walk(place.function) if _contains(node, place.frame.line)]
    called = [ast.unparse(node.func).rpartition(".")[2] for node in nodes if isinstance(node, ast.Call)]
    return called.count(function) == 1 and not any(isinstance(node, REPEATED) for node in nodes)


def _is_in_later_round(place: _BranchPlace, depth: int, one: Side, other: Side) -> bool | None:
    """Whether ranks have begun another round, or call, since the last line at which both sides were; None if unknown.

    If each round comes to that line, ranks that are before it have, and ranks that are after it have not.
    """
    label, line = _label_and_number(one.lines[-1]) if one.lines and one.lines == other.lines else ("", 0)
    if label != cell_label(place.frame.file):
        return None
    block = place.block(depth)
    last = next((node for node in block if _contains(node, line) and not _blocks(node)), None)
    if last is None or _contains(last, place.frame.line) or any(node.lineno < last.lineno for node, _ in _leaving(block)):
        return None
    return bool(place.frame.line < last.lineno)


def _ways(places: Sequence[_BranchPlace], depth: int, *, left: bool) -> list[_Way]:
    """The ways past a place for ranks that left the block inside that many branches, or are past the next branch."""
    found: list[_Way] = []
    for place in places:
        line, inner = place.frame.line, place.branches[depth:]
        until = next((branch.node.end_lineno + 1 for branch in inner if branch.repeats), line)
        leaving = [(node, under) for node, under in _leaving(place.block(depth)) if left and node.lineno < until]
        for branch in inner:
            skips = [pair for pair in _leaving(branch.block) if branch.repeats and isinstance(pair[0], ast.Continue)]
            leaving += [(node, under) for node, under in skips if node.lineno < line]
        found += [_Way(node, under) for node, under in leaving if under not in [branch.node for branch in inner]]
        choices = [branch for branch in inner if _may_differ(branch.node)]
        found += [_Way(branch.node, arm=branch.arm) for branch in choices]
        depth, left = 0, True
    return found


def _may_differ(node: Any) -> bool:
    """Whether ranks may go past a branch in different ways; if they skip a round, the operations in it would differ."""
    fixed = isinstance(node, ast.For) and re.fullmatch(r"range\([1-9]\d*\)", ast.unparse(node.iter))
    handled = not isinstance(node, ast.Try) or bool(node.handlers)
    return handled and not isinstance(node, WITH) and not (fixed and not _breaks(node))


def _breaks(node: Any) -> list[_Way]:
    return [_Way(*pair) for pair in _leaving(node.body) if isinstance(pair[0], ast.Break)] if isinstance(node, LOOPS) else []


def _leaving(block: Sequence[Any], under: Any = None, *, nested: bool = False) -> Iterator[tuple[Any, Any]]:
    """The statements that leave a block early, each with the `if` around it."""
    for node in block:
        if isinstance(node, ast.Return) or (isinstance(node, LEAVING) and not nested):
            yield node, under
        for inner in _blocks(node):
            in_loop = isinstance(node, LOOPS) and inner is node.body
            yield from _leaving(inner, node if isinstance(node, ast.If) else under, nested=nested or in_loop)


def _sentence(ways: Sequence[_Way], inside: Side, of_rest: str) -> str:
    if not 0 < len(ways) <= MOST_WAYS:
        return ""
    first, breaks = ways[0], _breaks(ways[0].node)
    where = first.arm if len(ways) == 1 and first.arm else f"in line {inside.frames[-1].line}"
    left = f" Besides its end, {listed(breaks, word='or')} leaves the loop." if breaks and len(ways) == 1 else ""
    return f"The ranks parted at {listed(ways, word='or')}: {inside} {where}, {of_rest}.{left}"


def _head(node: Any) -> str:
    """A statement without its block, and its line."""
    text = "return" if isinstance(node, ast.Return) else ast.unparse(node).partition("\n")[0].removesuffix(":")
    return f"`{text if len(text) <= LONGEST_HEAD else text[:LONGEST_HEAD] + '...'}` (line {node.lineno})"
