"""The rules of the house that a program can hold: what may import what, how long a file is, what no file names."""

from __future__ import annotations

import ast
import graphlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "labkit").rglob("*.py"))
}
LIMIT_LINES = 420  # "about 400"

# Record, then plain data, then draw: who may not know whom, directly or through others.
WRITERS = (
    "labkit.ring", "labkit.link", "labkit.ledger", "labkit.record", "labkit.comm", "labkit.wire", "labkit.start",
    "labkit.runtimes", "labkit.rank", "labkit.track",
)  # fmt: skip
DRAWING = {name for name in FILES if name.startswith(("labkit.plot", "labkit.live", "labkit.explore", "labkit.pictures"))}
READERS = {*DRAWING} | {f"labkit.{name}" for name in ("magic", "check", "doctor", "fit", "measure", "prediction", "predict")}
LAZY = "labkit"  # the package itself names all its parts, and imports one when it is first asked for


def imports(module: str) -> set[str]:
    """The files of labkit that a file imports, also inside its functions; not those it only takes types from."""
    path = FILES[module]
    tree = ast.parse(path.read_text())
    only_types = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    skipped = {id(inner) for block in only_types for inner in ast.walk(block)}
    found = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return (found & set(FILES)) - {module, LAZY}


GRAPH = {module: imports(module) for module in FILES if module != LAZY}


def reachable(module: str) -> set[str]:
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        new = GRAPH[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


def test_no_circles() -> None:
    graphlib.TopologicalSorter(GRAPH).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("writer", [w for w in WRITERS if w in FILES])
def test_a_writer_knows_no_reader(writer: str) -> None:
    assert reachable(writer) & (READERS | {"labkit.group"}) == set()


def test_a_group_knows_no_drawing() -> None:
    assert reachable("labkit.group") & (DRAWING | {"labkit.magic"}) == set()


def test_errors_know_nothing() -> None:
    assert GRAPH["labkit.errors"] == set()


def test_units_know_nothing() -> None:
    assert GRAPH["labkit.units"] == set()


def test_the_doctor_knows_only_errors_and_units() -> None:
    assert GRAPH["labkit.doctor"] == {"labkit.errors", "labkit.units"}


@pytest.mark.parametrize("module", FILES)
def test_a_file_says_its_idea_first_and_is_short(module: str) -> None:
    text = FILES[module].read_text()
    first = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    assert re.search(r"[.:`)]$", first), f"the first line is no sentence: {first!r}"
    assert text.count("\n") <= LIMIT_LINES


@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="not a git checkout")
def test_no_committed_file_names_somebodys_machine() -> None:
    """A path of the machine that a notebook ran on stands easily in a traceback or in the name of a file."""
    machine = re.compile(rf"{re.escape(str(ROOT))}\b|/(home|Users|root)/(?!ada/)\w+")  # ada is an example in the tests
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=200, check=True)
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        try:
            text = (ROOT / name).read_text()
        except (UnicodeDecodeError, FileNotFoundError):  # a picture; or removed and not yet committed
            continue
        found += [f"{name}: {match.group()}" for match in machine.finditer(text)]
    assert found == []
