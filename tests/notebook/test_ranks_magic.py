"""`%%ranks`: names persist, the latest assignment counts, errors show the cell's own lines."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cells as in_cells
import pytest
from processes import SELDOM_SPAWNED

import labkit as lab
from labkit.ipc.code_names import assigned, function_mentions, mentions, name_of, names_read, reads
from labkit.ipc.ranks_cell import CellSyntaxError, cell_filename
from labkit.notebook.ranks_magic import USAGE
from labkit.notebook.ranks_magic import rank as rank_magic
from labkit.notebook.ranks_magic import ranks as magic

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", params=SELDOM_SPAWNED)
def group(request: pytest.FixtureRequest) -> Iterator[lab.Group]:
    with lab.Group(["a", "b", "c"], runtime="bare", start=request.param, timeout_s=200) as group:
        yield group


class Shell:
    """The part of IPython's shell that the magic uses."""

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
    if group._pool is not None:
        for member in group._pool.members:
            member.made.clear()  # not needed
        group._pool.state.spend()  # fresh ranks, without the names of earlier tests
    return in_cells.Cells(main)


@pytest.fixture
def shell(cells: in_cells.Cells) -> Shell:
    return Shell(cells._main)


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    """A terminal shows the lines of ranks as they arrive; here in rank order."""
    return lambda: sorted(
        (line for line in capsys.readouterr().out.splitlines() if line[0] == "["), key=lambda line: line[: line.index("]")]
    )


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


LINES = {
    "group --on 0,2": "ac", "group --on b": "b", "group --on c,0": "ac", "group --on -1": "c", "group --on -1,0": "ac",
    "group --on 1,1,b": "b", "group --on 'a, b'": "ab", "group --on a # on the first": "a", "some": "bc",
}  # fmt: skip
ONE = {"1": "b", "b": "b", " b  group": "b", "1 --run run": "b", "1 # the second": "b", "b group --run run": "b", "-1": "c"}


def test_some_of_the_ranks_and_one(shell: Shell, cells: in_cells.Cells, shown: Callable[[], list[str]]) -> None:
    cells("some = group[1:]")
    for line, names in LINES.items():
        shell(line, "'here'")
        assert shown() == [f"[{name}] 'here'" for name in names], line
    for line, name in ONE.items():
        shell.history_manager.input_hist_parsed.append("")
        rank_magic(line, "'here'", shell)
        assert shown() == [f"[{name}] 'here'"], line
    assert shell.user_ns["run"].ranks == ("b",)


def test_one_rank_of_which_group(shell: Shell, cells: in_cells.Cells, shown: Callable[[], list[str]]) -> None:
    with lab.Group(["x", "y z"], runtime="bare") as other:
        cells.__dict__["_main"].__dict__.update(other=other, again=other, _3=other)
        rank_magic("'y z' other", "'here'", shell)
        assert shown() == ["[y z] 'here'"]
        with pytest.raises(lab.LabError, match=r"several groups are open. Write: %%rank 0 group   or   %%rank 0 other$"):
            rank_magic("0 --watch", "1", shell)
    rank_magic("0", "'closed groups do not count'", shell)
    assert shown() == ["[a] 'closed groups do not count'"]
    wrong = {"": "which rank", "--on 1": "which rank", "9": "no rank 9", "0 nothing": "'nothing' is not defined"}
    for line, said in wrong.items():
        with pytest.raises(lab.LabError, match=said):
            rank_magic(line, "1", shell)
    del shell.user_ns["group"]
    with pytest.raises(lab.LabError, match="no group is open"):
        rank_magic("0", "1", shell)
    with pytest.raises(lab.LabError, match=r"'nothing' is not defined; create a group first: group = lab.Group\(2\)"):
        rank_magic("0 nothing", "1", shell)


def test_the_notebooks_definitions_are_sent(shell: Shell, cells: in_cells.Cells, shown: Callable[[], list[str]]) -> None:
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
    for source in ("f()", "def f(): return 'the ranks'", "f()"):
        shell("group --on a", source)
    assert shown() == ["[a] 'the notebook'", "[a] 'the ranks'"]
    for source in ("from os.path import basename as f", "f('x/y')"):
        shell("group --on a", source)
    assert shown() == ["[a] 'y'"]
    shell("group", "import os\nstate = {'rank': int(os.environ['RANK'])}")
    cells("""
        def seen():
            state["seen"] = True
            return state
    """)
    assert cells.group.run(cells.seen).results == [{"rank": i, "seen": True} for i in range(3)], "a run sees it, too"


def test_only_names_that_a_cell_reads_are_sent(shell: Shell, cells: in_cells.Cells, shown: Callable[[], list[str]]) -> None:
    """`group` is the notebook's group, and a common name for a process group as well."""
    cells("import sys\nlock = sys._getframe()\nbig = lock")
    shell("group --on a", """
        class Net:
            big = 1
            def lock(self): return self.big
        group = Net()
        for big in range(3): pass
        group.lock(), big, group.big
    """)  # fmt: skip
    assert shown() == ["[a] (1, 2, 1)"]


def test_an_object_that_cannot_be_sent_is_named(shell: Shell, cells: in_cells.Cells) -> None:
    cells("import sys\nlock = {'inside': sys._getframe()}")
    with pytest.raises(lab.LabError, match=r"^the notebook's 'lock'\['inside'\] cannot be sent: frame objects cannot be pickled"):
        shell("group", "lock")
    with pytest.raises(lab.LabError, match="a group lives in the notebook and cannot be sent to a rank"):
        shell("group", "group")


def test_annotations_are_evaluated_as_in_a_cell(shell: Shell, shown: Callable[[], list[str]]) -> None:
    """The rank's own code postpones annotations; a cell's code must not inherit that."""
    shell("group --on a", """
        import dataclasses
        @dataclasses.dataclass
        class D:
            x: int
        def f(a: str) -> int: ...
        f.__annotations__, D.__dataclass_fields__["x"].type
    """)  # fmt: skip
    assert shown() == ["[a] ({'a': <class 'str'>, 'return': <class 'int'>}, <class 'int'>)"]


@pytest.mark.usefixtures("patient")
def test_which_failures_lose_names(shell: Shell, cells: in_cells.Cells, shown: Callable[[], list[str]]) -> None:
    cells("x = 1")
    shell("group", "x += 1")
    with pytest.raises(lab.RankError) as caught:
        shell("group", "x = 3\n1 / 0")
    assert not caught.value.stopped
    shell("group", "x")
    assert shown() == ["[a] 3", "[b] 3", "[c] 3"], "an error that stopped no rank"
    with pytest.raises(lab.RankError):
        shell("group --on b", "import os; os._exit(1)")
    shell("group", "x")
    assert shown() == ["[a] 1", "[b] 1", "[c] 1"], "of fresh ranks, the notebook's again"


# Loops and other code that students write in cells


LOOPS = """
    done = []
    for i in range(9):
        if i == 1: continue
        try:
            if i == 3: break
        finally:
            done.append(i)
    while True:
        with open("/dev/null"):
            break
    match i:
        case 3:
            for j in range(2):
                break
        case _: pass
    done, j
"""


@pytest.mark.parametrize("runtime", ["bare", "torch", "rpc", pytest.param("tensorflow", marks=pytest.mark.tf)])
def test_break_and_continue_in_every_runtime(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if runtime != "bare":
        pytest.importorskip("tensorflow" if runtime == "tensorflow" else "torch")
    in_cells.new_main(monkeypatch)
    with lab.Group(["a", "b"] if runtime != "tensorflow" else 1, runtime=runtime) as group:
        run = group.run_cell(textwrap.dedent(LOOPS), cell_filename(1), "cell 1")
        assert run.output.splitlines() == [f"[{name}] ([0, 2, 3], 0)" for name in group.names]


def test_definitions_of_every_kind_persist(shell: Shell, cells: in_cells.Cells, shown: Callable[[], list[str]]) -> None:
    cells("N = 3\nfactors = [1, 2]\npi = 'of the notebook'")
    shell("group --on a", """
        from __future__ import annotations
        import contextlib, dataclasses, functools
        from math import *
        total: int = 0
        def counted(function):
            @functools.wraps(function)
            def call(*args):
                global total
                total += 1
                return function(*args)
            return call
        @counted
        @functools.lru_cache
        def tripled(x): return N * x
        class Base:
            size = N
            def all(self): return [[tripled(a * b) for a in factors] for b in range(self.size)]
        class Derived(Base):
            def all(self): return super().all()[1:]
        @dataclasses.dataclass
        class Point:
            x: Undefined
            y: list[int] = dataclasses.field(default_factory=list)
        @contextlib.contextmanager
        def doubled(): yield 2 * N
    """)  # fmt: skip
    shell("group --on a", """
        with doubled() as six: pass
        def later(x: AlsoUndefined): return x  # the import from __future__ holds on
        Derived().all(), Point(1).y, six, total, floor(2.5), later(1), (lambda n: [tripled(n) for _ in factors])(1)
    """)  # fmt: skip
    assert shown() == ["[a] ([[3, 6], [6, 12]], [], 6, 6, 2, 1, [3, 3])"]
    shell("group --on a", "round(pi, 2), total")
    assert shown() == ["[a] (3.14, 8)"], "what a star import, or a function, assigns is assigned on the ranks"


def test_a_semicolon_shows_nothing(shell: Shell, shown: Callable[[], list[str]]) -> None:
    shell("group --on a", "x = 1; x")
    assert shown() == ["[a] 1"]
    for source in ("x;", "x ;  # a comment", "'é'; x;", "(x,\n1);"):
        shell("group --on a", source)
        assert shown() == [], source
    shell("group --on a", "'é'  # a comment;")
    assert shown() == ["[a] 'é'"]


# The line: a comment, the picture, the run


def test_a_cell_leaves_its_run(shell: Shell, cells: in_cells.Cells) -> None:
    shell("group --run mine", "import labkit as lab\nwith lab.span('forward'): print('said')")
    assert cells.mine is cells.group.last_run
    assert cells.mine.output == "[a] said\n[b] said\n[c] said"
    assert [[s.name for s in cells.mine.trace if s.rank == rank] for rank in range(3)] == [["cell", "forward"]] * 3
    with pytest.raises(lab.RankError):
        shell("group --run other", "1 / 0")
    assert "other" not in cells._main.__dict__
    assert cells.mine is cells.group.last_run, "a cell that failed has no run"
    assert cells.group.run(int) is cells.group.last_run


def test_a_cell_is_watched(shell: Shell, cells: in_cells.Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[Any] = []
    traces: list[lab.Trace] = []

    class Picture:
        interval_s = 100.0

        def begin(self, ranks: tuple[str, ...], title: str, *_: Any) -> None:
            reported.append((ranks, title))

        def update(self, *_: Any) -> None: ...

        def end(self, trace: lab.Trace, stopped: str) -> None:
            reported.append((sorted({s.name for s in trace}), stopped))
            traces.append(trace)

    monkeypatch.setattr(lab.Group, "picture", Picture)
    shell("group", "import labkit as lab\nwith lab.span('forward'): pass")
    assert reported == []
    shell("group --watch --on 0,2 --run mine", "with lab.span('forward'): pass")
    assert reported == [(("a", "b", "c"), "the cell on 2 ranks"), (["cell", "forward"], "")]
    assert cells.mine.ranks == ("a", "c")
    assert cells.mine.trace is traces[-1], "it is made once"


# Mistakes


@pytest.mark.parametrize(
    ("source", "line", "about"),
    [
        ("x = 1\n%time f()", 2, "To time ranks"),
        ("%%time\nx = 1", 1, "To time ranks"),
        ("took = %timeit -o f()", 1, "To time ranks"),
        ("for i in range(3):\n    !ls", 2, "subprocess.run"),
        ("files = !ls *.py", 1, "subprocess.run"),
        ("%pip install einops", 1, "subprocess.run"),
        ("%run train.py --epochs 2", 1, "runpy.run_path('train.py', run_name='__main__');"),
        ("%matplotlib inline\nimport os", 1, "figures of ranks are shown"),
        ("%load_ext autoreload", 1, "a cell without %%ranks"),
        ("print?", 1, "help"),
    ],
)
def test_code_that_ranks_cannot_run_is_refused_in_one_line(shell: Shell, source: str, line: int, about: str) -> None:
    with pytest.raises(lab.LabError) as caught:
        shell("group", source)
    assert type(caught.value) is lab.LabError
    assert str(caught.value).startswith(f"cell 1, line {line}: ")
    assert about in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_runs_on_the_ranks_as_a_script(
    shell: Shell, cells: in_cells.Cells, shown: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
        import sys
        import labkit as lab
        def train(number):
            with lab.span("work"):
                print(__name__, 6 / number)
        if __name__ == "__main__":
            train(int(sys.argv[1]))
        """
    (tmp_path / "train.py").write_text(textwrap.dedent(source).lstrip())
    monkeypatch.chdir(tmp_path)
    cell = "import runpy, sys; sys.argv = ['train.py', '{}']\nrunpy.run_path('train.py', run_name='__main__');"
    shell("group --run mine", cell.format(2))
    assert shown() == [f"[{rank}] __main__ 3.0" for rank in "abc"]
    assert {s.line for s in cells.mine.trace if s.name == "work"} == {"train.py, line 4"}
    with pytest.raises(lab.RankError, match="ZeroDivisionError") as caught:
        shell("group", cell.format(0))
    assert 'File "train.py", line 5, in train' in caught.value.report()


@pytest.mark.parametrize(
    "source", ["x = 5\ny = 5 \\\n% x", "def f():\n    return 1", "async def f():\n    await f()", "'''\n!ls\n%time\n'''"]
)
def test_code_that_only_looks_like_it_runs(shell: Shell, source: str) -> None:
    shell("group", source)


def test_a_syntax_error_shows_only_its_line(shell: Shell) -> None:
    with pytest.raises(CellSyntaxError) as caught:
        shell("group", "x = 1\nif x:\n    print(1 +)")
    assert caught.value._render_traceback_() == [
        '  File "cell 1", line 3', "    print(1 +)", "             ^", "SyntaxError: invalid syntax",
    ]  # fmt: skip
    assert (caught.value.label, caught.value.lineno) == ("cell 1", 3)
    for source, words in {
        "x = 1\nbreak": "'break' outside loop",
        "x = 1\nreturn x": "'return' outside function",
        "for i in range(3):\n    await f(i)": "'await' outside function",
    }.items():
        with pytest.raises(CellSyntaxError, match=words) as caught:
            shell("group", source)
        assert caught.value.lineno == 2


def test_input_is_refused(shell: Shell, cells: in_cells.Cells) -> None:
    cells("def f():\n    input('name?')\n    return 1")
    for ask in (lambda: shell("group", "input('name?')"), lambda: cells.group.run(cells.f)):
        with pytest.raises(lab.RankError) as caught:
            ask()
        assert caught.value.failures[0].headline.startswith("LabError: input('name?'): a rank has no keyboard")
        assert "labkit" not in caught.value.report()


def test_a_breakpoint_shows_the_cells_lines_and_leaves_no_names(
    shell: Shell, cells: in_cells.Cells, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = iter(["l", "n", "c", "c"])
    monkeypatch.setattr("labkit.group.breakpoints.input", lambda _: next(typed), raising=False)
    rank_magic("b", "x = 1\nbreakpoint()\ny = 2", shell)
    said = capsys.readouterr().out
    assert "[b] > cell 0(3)<module>()" in said
    listed = [line for line in said.splitlines() if line.startswith("[b]   ")]
    assert listed == ["[b]   1     x = 1", "[b]   2     breakpoint()", "[b]   3  -> y = 2"], "in columns, without tabs"
    assert cells.group._pool.members[1].made.keys() == {"x", "y"}, "pdb's own names are not the cell's"
    rank_magic("b", "[name for name in globals() if name in ('__return__', '__exception__') or 'pdb' in name]", shell)
    assert capsys.readouterr().out == "[b] []\n"
    rank_magic("b", "y = 1\nbreakpoint()\nz = 2", shell)
    assert "->None" not in capsys.readouterr().out


def test_breakpoints_can_be_switched_off(cells: in_cells.Cells) -> None:
    cells("""
        import os
        def f():
            os.environ["PYTHONBREAKPOINT"] = "0"
            breakpoint()
            del os.environ["PYTHONBREAKPOINT"]
    """)
    assert cells.group.run(cells.f).results == [None] * 3


def test_an_error_shows_the_cells_line(shell: Shell, cells: in_cells.Cells) -> None:
    cells("def helper(x):\n    return x['missing']\n")
    with pytest.raises(lab.RankError) as caught:
        shell("group", "a = 1\nb = helper({})\n")
    expected = """
        Traceback (most recent call last):
          File "cell 1", line 2, in <module>
            b = helper({})
                ^^^^^^^^^^
          File "<ipython-input-1-test>", line 2, in helper
            return x['missing']
                   ~^^^^^^^^^^^
        KeyError: 'missing'
    """
    assert caught.value.failures[0].traceback.strip() == textwrap.dedent(expected).strip()
    with pytest.raises(lab.RankError, match='File "cell 2", line 1, in <module>'):
        shell("group", "undefined")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", f"%%ranks: the following arguments are required: group. {USAGE}"),
        ("nothing", "%%ranks nothing: 'nothing' is not defined; open groups: group"),
        ("number", "%%ranks number: 'number' is of type int; open groups: group"),
        ("group[0]", "%%ranks group[0]: expected a name; to select some of a group's ranks, write %%ranks group --on 0,1"),
        ("group 1", f"%%ranks: unrecognized arguments: 1. {USAGE}"),
        ("group --all", f"%%ranks: unrecognized arguments: --all. {USAGE}"),
        ("group --on", f"%%ranks: argument --on: expected one argument. {USAGE}"),
        ("group --on 7", "no rank 7; this group has ranks 0 to 2"),
        ("group --on 0,x", "no rank is named 'x'; this group has 'a', 'b', 'c'"),
        ("group --run 1x", f"%%ranks: argument --run: '1x' is not a valid variable name. {USAGE}"),
        ("group --run if", f"%%ranks: argument --run: 'if' is not a valid variable name. {USAGE}"),
        ("group --on ''", "no rank is named ''; this group has 'a', 'b', 'c'"),
        ("group --on 'a", f"%%ranks: No closing quotation. {USAGE}"),
        ("closed", "this group is closed; make a new one"),
    ],
)
def test_an_invalid_line(shell: Shell, cells: in_cells.Cells, line: str, words: str) -> None:
    cells("import labkit as lab\nnumber = 3\nclosed = lab.Group(1, runtime='bare')\nclosed.close()")
    with pytest.raises(lab.LabError) as caught:
        shell(line, "1")
    assert words in str(caught.value)


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
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert sorted(answer.stdout.splitlines()[:2]) == ["[rank 0] 42", "[rank 1] 42"]
    assert "Line magic function `%ranks` not found (But cell magic `%%ranks` exists" in answer.stdout + answer.stderr


# What code reads and assigns


@pytest.mark.parametrize(
    ("source", "read", "written"),
    [
        ("x", {"x"}, set()),
        ("x = 1\nx", {"x"}, {"x"}),
        ("x = x + 1", {"x"}, {"x"}),
        ("x += 1", {"x"}, {"x"}),
        ("if c: x = 1\nx", {"c", "x"}, {"x"}),
        ("for x, y in r: x, z\nx", {"r", "x", "z"}, {"x", "y"}),
        ("for x in x: pass", {"x"}, {"x"}),
        ("while c: x = y\nx", {"c", "x", "y"}, {"x"}),
        ("if c:\n x = 1\n x", {"c", "x"}, {"x"}),
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
        ("with a as b: c = b\nb, c", {"a", "b", "c"}, {"b", "c"}),
        ("(x := 1)", set(), {"x"}),
        ("del x", set(), {"x"}),
        ("x: int = 1\nx", {"x"}, {"x"}),
        ("for x in y:\n if z: break\n else: continue", {"y", "z"}, {"x"}),
        ("while True:\n try:\n  with v: break\n finally: pass", {"v"}, set()),
        ("from __future__ import annotations\nx: y = z", {"z"}, {"annotations", "x"}),
        ("from e import *\nx", {"x"}, set()),
        ("x, (y, *z) = v\nx, y, z", {"v", "x", "y", "z"}, {"x", "y", "z"}),
        ("@d\ndef f(): ...", {"d"}, {"f"}),
        ("f'{x}'", {"x"}, set()),
    ],
)
def test_names_in_a_cell(source: str, read: set[str], written: set[str]) -> None:
    home = dict.fromkeys("abcdefrvxyz", 0) | {"A": 0}
    code = compile(source, "<test>", "exec", dont_inherit=True)
    assert reads(code, home) == read
    assert assigned(code) == written


def test_names_that_functions_and_classes_read_in_turn(cells: in_cells.Cells) -> None:
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
    assert reads(compile("outer()", "<test>", "eval"), home) == {
        "outer", "middle", "Thing", "through_property", "through_static", "through_class", "circle",
    }  # fmt: skip
    assert "unknown" in names_read(home["circle"].__code__)


@pytest.mark.parametrize(
    ("call", "found"),
    [("init_rpc()", True), ("direct()", True), ("through()", True), ("Trainer()", True), ("documented()", False), ("()", False)],
)
def test_whether_code_mentions_a_name(call: str, found: bool, cells: in_cells.Cells) -> None:
    cells("""
        from torch.distributed import rpc
        def direct(): rpc.init_rpc("worker0")
        def through(): direct()
        class Trainer:
            def main(self): through()
        def documented():
            "It needs no init_rpc."
            print("init_rpc is not called")
    """)
    home = cells._main.__dict__
    assert mentions("init_rpc", compile(call, "<test>", "eval"), home) is found
    if (function := home.get(call[:-2])) and not isinstance(function, type):
        assert function_mentions("init_rpc", function, b"") is found
    assert function_mentions("init_rpc", print, pickle.dumps(["init_rpc"])), "a name of code in the pickle"
    assert not function_mentions("init_rpc", print, pickle.dumps(["no init_rpc"]))


def test_the_name_of_a_function() -> None:
    class Model:
        def __call__(self) -> None: ...

    callables = (print, partial(partial(sorted)), Model, Model())
    assert [name_of(f) for f in callables] == ["print", "sorted", "Model", "Model"]
