"""`%%ranks`: names persist, the latest assignment counts, mistakes are named with the cell's own lines."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import cells as in_cells
import pytest

import labkit as lab
from labkit.magic import ranks as magic
from labkit.names import assigned, name_of, names_read, reads

START = ("fork", "spawn")
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module", params=START)
def group(request: pytest.FixtureRequest) -> Iterator[lab.Group]:
    with lab.Group(["a", "b", "c"], runtime="bare", start=request.param, timeout_s=60) as group:
        yield group


class Shell:
    """As much of IPython's shell as the magic uses."""

    def __init__(self, main: types.ModuleType) -> None:
        self.user_ns = main.__dict__
        self.history_manager = types.SimpleNamespace(input_hist_parsed=[""])

    def __call__(self, line: str, cell: str) -> None:
        self.history_manager.input_hist_parsed.append(cell)
        magic(line, textwrap.dedent(cell), self)


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch, group: lab.Group) -> in_cells.Cells:
    main = in_cells.new_main(monkeypatch)
    main.__dict__["group"] = group
    group._fit = False  # fresh ranks: what an earlier test has defined there is gone
    return in_cells.Cells(main)


@pytest.fixture
def shell(cells: in_cells.Cells) -> Shell:
    return Shell(cells._main)


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    """A terminal shows the lines of ranks as they come; here in rank order."""
    return lambda: sorted(capsys.readouterr().out.splitlines(), key=lambda line: line[: line.index("]")])


# Names


def test_names_persist_and_the_last_expression_is_shown(shell: Shell, shown: Callable[[], list[str]]) -> None:
    shell("group", "import os\nx = 10 * int(os.environ['RANK'])\nx")
    assert shown() == ["[a] 0", "[b] 10", "[c] 20"]
    shell("group", "def double(): return 2 * x\nx += 1")
    assert shown() == []
    shell("group", "print('printed')\n(x, double())")
    assert shown() == ["[a] printed", "[a] (1, 2)", "[b] printed", "[b] (11, 22)", "[c] printed", "[c] (21, 42)"]
    shell("group", "None")
    assert shown() == []


def test_some_of_the_ranks(shell: Shell, shown: Callable[[], list[str]]) -> None:
    for on, names in {"0,2": "ac", "b": "b", "c,0": "ac", "-1": "c", "1,1,b": "b", "'a, b'": "ab"}.items():
        shell(f"group --on {on}", "'here'")
        assert shown() == [f"[{name}] 'here'" for name in names], on


def test_what_the_notebook_defines_travels(shell: Shell, cells: in_cells.Cells, shown: Callable[[], list[str]]) -> None:
    cells("""
        SCALE = 3
        def scaled(x): return SCALE * x
        class Thing:
            def value(self): return scaled(7)
    """)
    shell("group", "Thing().value(), SCALE")
    assert shown() == ["[a] (21, 3)", "[b] (21, 3)", "[c] (21, 3)"]
    cells("SCALE = 4")
    shell("group --on a", "Thing().value()")
    assert shown() == ["[a] 28"], "a change reaches functions that have travelled before"
    shell("group", "Thing().value()")
    assert shown() == ["[a] 28", "[b] 28", "[c] 28"]


def test_the_latest_assignment_counts_wherever_it_was_made(
    shell: Shell, cells: in_cells.Cells, shown: Callable[[], list[str]]
) -> None:
    cells("x = 1\nhistory = []")
    shell("group", "x = x + 1; history.append(x)")
    shell("group", "x = x + 1; history.append(x)")
    shell("group --on a", "x, history")
    assert shown() == ["[a] (3, [2, 3])"], "what the ranks assigned and changed stays"
    cells("x = 100")
    shell("group --on a", "x, history")
    assert shown() == ["[a] (100, [2, 3])"], "the notebook assigned it last"
    shell("group --on b", "x = 5")
    shell("group", "x")
    assert shown() == ["[a] 100", "[b] 5", "[c] 100"], "each rank for itself"
    assert (cells.x, cells.history) == (100, []), "the notebook's own are its own"


def test_functions_that_cells_define_on_the_ranks_stay(
    shell: Shell, cells: in_cells.Cells, shown: Callable[[], list[str]]
) -> None:
    cells("def f(): return 'the notebook'")
    shell("group --on a", "f()")
    shell("group --on a", "def f(): return 'the ranks'")
    shell("group --on a", "f()")
    assert shown() == ["[a] 'the notebook'", "[a] 'the ranks'"]
    shell("group --on a", "from os.path import basename as f")
    shell("group --on a", "f('x/y')")
    assert shown() == ["[a] 'y'"]


def test_a_run_sees_what_a_cell_has_defined(shell: Shell, cells: in_cells.Cells) -> None:
    shell("group", "import os\nstate = {'rank': int(os.environ['RANK'])}")
    cells("""
        def f():
            state["seen"] = True
            return state
    """)
    assert cells.group.run(cells.f).results == [{"rank": i, "seen": True} for i in range(3)]


def test_only_what_a_cell_reads_travels(shell: Shell, cells: in_cells.Cells, shown: Callable[[], list[str]]) -> None:
    """`group` is the notebook's group, and a common name for a process group as well."""
    cells("import threading\nlock = threading.Lock()\nbig = lock")
    shell("group --on a", """
        class Net:
            big = 1
            def lock(self): return self.big
        group = Net()
        for big in range(3): pass
        group.lock(), big, group.big
    """)  # fmt: skip
    assert shown() == ["[a] (1, 2, 1)"]


def test_an_object_that_cannot_travel_is_named(shell: Shell, cells: in_cells.Cells) -> None:
    cells("import threading\nlock = {'inside': threading.Lock()}")
    with pytest.raises(lab.LabError, match=r"^the notebook's 'lock'\['inside'\] cannot be sent: lock objects cannot be pickled"):
        shell("group", "lock")
    with pytest.raises(lab.LabError, match="a group lives in the notebook and cannot be sent to a rank"):
        shell("group", "group")


def test_annotations_are_what_they_are_in_a_cell(shell: Shell, shown: Callable[[], list[str]]) -> None:
    """The rank's own code postpones them; a cell's must not inherit that."""
    shell("group --on a", """
        import dataclasses
        @dataclasses.dataclass
        class D:
            x: int
        def f(a: str) -> int: ...
        f.__annotations__, D.__dataclass_fields__["x"].type
    """)  # fmt: skip
    assert shown() == ["[a] ({'a': <class 'str'>, 'return': <class 'int'>}, <class 'int'>)"]


def test_after_a_failure_fresh_ranks_know_nothing(shell: Shell, cells: in_cells.Cells, shown: Callable[[], list[str]]) -> None:
    cells("x = 1")
    shell("group", "x += 1\nimport os")
    with pytest.raises(lab.RankError):
        shell("group --on b", "os._exit(1)")
    shell("group", "x")
    assert shown() == ["[a] 1", "[b] 1", "[c] 1"], "the notebook's again"


def test_after_an_error_that_stopped_nobody_names_persist(shell: Shell, shown: Callable[[], list[str]]) -> None:
    shell("group", "x = 1")
    with pytest.raises(lab.RankError, match="The ranks go on, with all that they hold"):
        shell("group", "x = 2\n1 / 0")
    shell("group", "x")
    assert shown() == ["[a] 2", "[b] 2", "[c] 2"]


# Mistakes


def test_an_error_shows_the_cells_line(shell: Shell, cells: in_cells.Cells) -> None:
    cells("def helper(x):\n    return x['missing']\n")
    with pytest.raises(lab.RankError) as caught:
        shell("group", "a = 1\nb = helper({})\n")
    assert caught.value.failures[0].traceback.splitlines() == [
        "Traceback (most recent call last):",
        '  File "cell 1", line 2, in <module>',
        "    b = helper({})",
        "        ^^^^^^^^^^",
        '  File "<ipython-input-1-test>", line 2, in helper',
        "    return x['missing']",
        "           ~^^^^^^^^^^^",
        "KeyError: 'missing'",
    ]
    with pytest.raises(lab.RankError, match='File "cell 2", line 1, in <module>'):
        shell("group", "undefined")


def test_what_is_no_python_reaches_no_rank(shell: Shell, cells: in_cells.Cells) -> None:
    with pytest.raises(SyntaxError) as caught:
        shell("group", "x = 1\nif x\n")
    assert (caught.value.filename, caught.value.lineno) == ("<cell 1 on the ranks>", 2)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "%%ranks: the following arguments are required: group. Write: %%ranks group   or   %%ranks group --on 0,2"),
        ("nothing", "%%ranks nothing: 'nothing' is not defined; make a group first: nothing = lab.Group(2)"),
        ("number", "%%ranks number: 'number' is of type int; make a group first: number = lab.Group(2)"),
        ("group 1", "%%ranks: unrecognized arguments: 1. Write: %%ranks group   or   %%ranks group --on 0,2"),
        ("group --all", "%%ranks: unrecognized arguments: --all. Write: %%ranks group   or   %%ranks group --on 0,2"),
        ("group --on", "%%ranks: argument --on: expected one argument. Write: %%ranks group   or   %%ranks group --on 0,2"),
        ("group --on 7", "no rank 7; this group has ranks 0 to 2"),
        ("group --on 0,x", "no rank is called 'x'; this group has 'a', 'b', 'c'"),
        ("group --on ''", "no rank is called ''; this group has 'a', 'b', 'c'"),
        ("group --on 'a", "%%ranks: No closing quotation. Write: %%ranks group   or   %%ranks group --on 0,2"),
    ],
)
def test_a_line_that_cannot_be_meant(shell: Shell, cells: in_cells.Cells, line: str, words: str) -> None:
    cells("number = 3")
    with pytest.raises(lab.LabError) as caught:
        shell(line, "1")
    assert str(caught.value) == words


def test_a_closed_group(shell: Shell, cells: in_cells.Cells) -> None:
    closed = lab.Group(1, runtime="bare")
    closed.close()
    cells._main.__dict__["closed"] = closed
    with pytest.raises(lab.LabError, match="this group is closed; make a new one"):
        shell("closed", "1")


def test_in_ipython_itself(tmp_path: Path) -> None:
    """Registered by the import; as a line magic it says what it is."""
    code = """
import labkit as lab
group = lab.Group(2, runtime="bare")
get_ipython().run_cell_magic("ranks", "group", "x = 6\\nx * 7")
get_ipython().run_line_magic("ranks", "group")
"""
    answer = subprocess.run(
        [sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor", "-c", code],
        env=os.environ | {"IPYTHONDIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert sorted(answer.stdout.splitlines()[:2]) == ["[rank 0] 42", "[rank 1] 42"]
    assert "Line magic function `%ranks` not found (But cell magic `%%ranks` exists" in answer.stdout + answer.stderr


# What code reads and assigns


@pytest.mark.parametrize(
    ("source", "read", "written"),
    [
        ("x", {"x"}, set()),
        ("x = 1\nx", set(), {"x"}),
        ("x = x + 1", {"x"}, {"x"}),
        ("x += 1", {"x"}, {"x"}),
        ("if c: x = 1\nx", {"c", "x"}, {"x"}),
        ("for x, y in r: x, z\nx", {"r", "z"}, {"x", "y"}),
        ("for x in x: pass", {"x"}, {"x"}),
        ("while c: x = y\nx", {"c", "x", "y"}, {"x"}),
        ("if c:\n x = 1\n x", {"c"}, {"x"}),
        ("try: x = 1\nexcept E: y\nx", {"x", "y"}, {"x"}),
        ("a.x.y", {"a"}, set()),
        ("def f(): return x", {"x"}, {"f"}),
        ("def f(x): return x", set(), {"f"}),
        ("def f():\n global x\n x = 1", set(), {"f", "x"}),
        ("f()\ndef f(): ...", {"f"}, {"f"}),
        ("def f(a=x): ...", {"x"}, {"f"}),
        ("class A:\n y = x\n def m(self): return z", {"x", "z"}, {"A"}),
        ("import a.b, c as d\nfrom e import f", set(), {"a", "d", "f"}),
        ("[x for x in y if z]", {"y", "z"}, set()),
        ("lambda: x", {"x"}, set()),
        ("with a as b: c = b\nb, c", {"a"}, {"b", "c"}),
        ("(x := 1)", set(), {"x"}),
        ("del x", set(), {"x"}),
        ("x: int = 1\nx", set(), {"x"}),
        ("x, (y, *z) = v\nx, y, z", {"v"}, {"x", "y", "z"}),
        ("@d\ndef f(): ...", {"d"}, {"f"}),
        ("f'{x}'", {"x"}, set()),
    ],
)
def test_names_in_a_cell(source: str, read: set[str], written: set[str]) -> None:
    home = dict.fromkeys("abcdefrvxyz", 0) | {"A": 0}
    tree = ast.parse(source)
    assert reads(tree, "<test>", home) == read
    assert assigned(compile(source, "<test>", "exec")) == written


def test_what_functions_and_classes_read_in_turn(cells: in_cells.Cells) -> None:
    cells("""
        import functools
        def outer(): return middle()
        @functools.lru_cache
        def middle(): return Thing
        class Thing:
            @property
            def a(self): return through_property
            @staticmethod
            def b(): return through_static
            @classmethod
            def c(cls): return through_class
            def d(self): return circle()
        def circle(): return outer, unknown
        through_property = through_static = through_class = 1
        unread = 2
    """)
    home = cells._main.__dict__
    assert reads(ast.parse("outer()"), "<test>", home) == {
        "outer", "middle", "Thing", "through_property", "through_static", "through_class", "circle",
    }  # fmt: skip
    assert "unknown" in names_read(home["circle"].__code__)


def test_what_a_function_is_called() -> None:
    from functools import partial

    class Model:
        def __call__(self) -> None: ...

    assert [name_of(f) for f in (print, partial(partial(sorted)), Model, Model())] == ["print", "sorted", "Model", "Model"]
