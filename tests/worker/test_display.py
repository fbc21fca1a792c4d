"""What ranks display: rich output, figures, last expressions; labelled, in rank order, bounded; `exit`,
`get_ipython`."""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cells as in_cells
import pytest

import labkit as lab
from labkit.group import output, processes
from labkit.group.output import MOST, Displays
from labkit.ipc.protocol import Displayed
from labkit.ipc.ranks_cell import cell_filename
from labkit.ipc.reductions import reduce_ipython
from labkit.worker.display import IPYTHONS, LEAST_DISPLAYS, MOST_BYTES, MOST_DISPLAYS, WIDGET, RankDisplay


class Page:
    """A notebook's cell: its prints and displays in order."""

    def __init__(self) -> None:
        self.shown: list[Any] = []

    def put(self, text: str) -> None:
        self.shown += text.splitlines()

    def display(self, data: dict[str, Any], *, raw: bool, display_id: bool = False, **_: Any) -> Any:
        assert raw
        if not display_id:  # that one is for the prints during the run
            self.shown.append(data)
        return types.SimpleNamespace(update=lambda *_, **__: None)


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    page = Page()
    shell = types.SimpleNamespace(kernel=True)
    monkeypatch.setattr(output, "notebook_shell", lambda: shell)
    monkeypatch.setattr(processes, "notebook_shell", lambda: shell)
    fake = types.ModuleType("IPython.display")
    fake.display = page.display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython.display", fake)
    monkeypatch.setattr(output, "put", page.put)
    return page


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch, page: Page) -> Iterator[in_cells.Cells]:
    cells = in_cells.Cells(in_cells.new_main(monkeypatch))
    cells("""
        class Rich:
            def __init__(self, text): self.text = text
            def _repr_html_(self): return f"<b>{self.text}</b>"
            def __repr__(self): return f"Rich({self.text!r})"
    """)
    with lab.Group(["a", "b"], runtime="bare", timeout_s=200) as group:
        cells._main.__dict__["group"] = group
        yield cells


def run_cell(cells: in_cells.Cells, source: str, on: list[int] | None = None) -> None:
    cells.group.run_cell(source, cell_filename(1), "cell 1", on)


# Displays of a rank appear under the cell


@pytest.mark.processes
def test_rich_output_follows_the_prints_labelled_and_in_rank_order(cells: in_cells.Cells, page: Page) -> None:
    run_cell(cells, "import os\nprint('said')\ndisplay(Rich('one'), 'text', 3)\nRich(os.environ['RANK'])")
    prints = [f"[{name}] {text}" for name in "ab" for text in ("said", "'text'", "3")]
    one = {"text/plain": "Rich('one')", "text/html": "<b>one</b>"}
    assert page.shown == [
        *prints,
        "[a]", one, {"text/plain": "Rich('0')", "text/html": "<b>0</b>"},
        "[b]", one, {"text/plain": "Rich('1')", "text/html": "<b>1</b>"},
    ]  # fmt: skip


@pytest.mark.processes
def test_displays_before_an_error_are_shown(cells: in_cells.Cells, page: Page) -> None:
    with pytest.raises(lab.RankError):
        run_cell(cells, "display(Rich('x'))\n1 / 0", [1])
    assert page.shown == ["[b]", {"text/plain": "Rich('x')", "text/html": "<b>x</b>"}]


@pytest.mark.processes
def test_displays_of_a_rank_that_died_or_hangs_are_shown(cells: in_cells.Cells, page: Page) -> None:
    for end in ("os._exit(1)", "os.kill(os.getpid(), 9)"):
        page.shown.clear()
        with pytest.raises(lab.RankError):
            run_cell(cells, f"import os\ndisplay(Rich('x'))\n{end}", [0])
        assert page.shown[:2] == ["[a]", {"text/plain": "Rich('x')", "text/html": "<b>x</b>"}]


@pytest.mark.processes
def test_displays_between_two_runs_appear_in_the_next(cells: in_cells.Cells, page: Page, tmp_path: Path) -> None:
    go, shown = tmp_path / "go", tmp_path / "shown"
    run_cell(cells, f"""
import pathlib, threading, time
def show_late():
    while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.001)
    display(Rich("late"))
    pathlib.Path({str(shown)!r}).touch()
thread = threading.Thread(target=show_late)
thread.start()
""", [0])  # fmt: skip
    assert page.shown == []
    go.touch()
    until = time.monotonic() + 60
    while not shown.exists() and time.monotonic() < until:
        time.sleep(0.001)
    assert page.shown == []
    run_cell(cells, "thread.join()", [0])
    assert page.shown == ["[a]", {"text/plain": "Rich('late')", "text/html": "<b>late</b>"}]


@pytest.mark.processes
def test_displays_are_cleared(cells: in_cells.Cells, page: Page) -> None:
    pytest.importorskip("IPython")
    run_cell(cells, """
from IPython.display import clear_output, display as shown
for i in range(200):
    clear_output(wait=True)
    print("step", i)
    shown(Rich(i))
""", [0])  # fmt: skip
    assert page.shown == ["[a] step 199", "[a]", {"text/plain": "Rich(199)", "text/html": "<b>199</b>"}]


@pytest.mark.processes
def test_an_update_says_that_displays_appear_at_the_end(cells: in_cells.Cells, page: Page) -> None:
    pytest.importorskip("IPython")
    for call in ("display('x', display_id=True)", "IPython.display.update_display('x', display_id='1')"):
        with pytest.raises(lab.RankError, match="no display can be updated: display the final state instead"):
            run_cell(cells, f"import IPython.display\n{call}", [0])


@pytest.mark.processes
def test_ipythons_own_objects_and_functions_work(cells: in_cells.Cells, page: Page) -> None:
    pytest.importorskip("IPython")
    run_cell(cells, """
import IPython.display
from IPython.display import HTML, publish_display_data
IPython.display.display(HTML("<i>hello</i>"))
publish_display_data({"text/plain": "x", "application/json": {"a": [1]}})
""", [0])  # fmt: skip
    html, data = page.shown[1:]
    assert html["text/html"] == "<i>hello</i>"
    assert data == {"text/plain": "x", "application/json": {"a": [1]}}


@pytest.mark.processes
def test_figures_are_shown_by_show_display_and_at_the_end(cells: in_cells.Cells, page: Page) -> None:
    pytest.importorskip("matplotlib")
    run_cell(cells, """
import matplotlib, matplotlib.pyplot as plt
plt.plot([1, 2]); plt.show()
fig, ax = plt.subplots(figsize=(2, 1)); ax.plot([1])
plt.figure();
""", [0])  # fmt: skip
    assert page.shown[0] == "[a]"
    assert [d["text/plain"] for d in page.shown[1:]] == [
        "<Figure size 640x480 with 1 Axes>", "<Figure size 200x100 with 1 Axes>", "<Figure size 640x480 with 0 Axes>",
    ]  # fmt: skip
    assert all(d["image/png"].startswith("iVBORw0KGgo") for d in page.shown[1:])
    page.shown.clear()
    run_cell(cells, "matplotlib.get_backend(), plt.get_fignums()", [0])
    assert page.shown == ["[a] ('agg', [])"]
    page.shown.clear()
    run_cell(cells, "display(fig); fig", [0])
    assert [d["text/plain"] for d in page.shown[1:]] == ["<Figure size 200x100 with 1 Axes>"] * 2


@pytest.mark.processes
def test_a_figure_in_a_result_is_not_displayed_by_itself(cells: in_cells.Cells, page: Page) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    cells("""
        def f():
            import matplotlib.pyplot as plt
            return plt.figure()
    """)
    before = plt.get_fignums()
    (figure,) = cells.group[0].run(cells.f).results
    assert (type(figure).__name__, plt.get_fignums()) == ("Figure", before)
    assert len(page.shown) == 2


@pytest.mark.processes
def test_many_displays_are_bounded_and_counted(cells: in_cells.Cells, page: Page) -> None:
    most = MOST_DISPLAYS // 2
    run_cell(cells, "for i in range(100): display(Rich(i))", [0])
    assert [d["text/html"] for d in page.shown[1:-1]] == [f"<b>{i}</b>" for i in range(most)]
    assert page.shown[-1] == f"[a] ... {100 - most} more left out ..."
    page.shown.clear()
    run_cell(cells, f"for i in range(3): display(Rich('x' * {MOST_BYTES // 10}))", [0])
    assert (len(page.shown), page.shown[-1]) == (4, "[a] ... 1 more left out ...")


# In a plain script


@pytest.mark.processes
def test_outside_a_notebook_the_text_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cells = in_cells.Cells(in_cells.new_main(monkeypatch))
    cells("""
        class Rich:
            def _repr_html_(self): return "<b>x</b>"
            def __repr__(self): return "Rich()"
        def f():
            display(Rich(), "text")
            display(3)
            import matplotlib.pyplot as plt
            plt.plot([1])
            plt.show()
    """)
    with lab.Group(1, runtime="bare") as group:
        group.run(cells.f)
        group.run_cell("Rich()", cell_filename(1), "cell 1")
    lines = ["Rich()", "'text'", "3", "<Figure size 640x480 with 1 Axes>", "Rich()"]
    assert capsys.readouterr().out.splitlines() == [f"[rank 0] {line}" for line in lines]


@pytest.mark.processes
def test_a_display_that_fails_says_why_and_does_not_end_the_run(cells: in_cells.Cells, page: Page) -> None:
    """As in IPython: the traceback is printed, and a simpler form of the object is shown."""
    cells("""
        class Broken:
            def _repr_html_(self): raise ValueError("no table today")
            def _repr_latex_(self): raise NotImplementedError
            def __repr__(self): return "Broken()"
        class Unspeakable:
            def __repr__(self): raise KeyError("no words")
        def f():
            display(Broken())
            print("went on")
            return "result"
    """)
    assert cells.group[0].run(cells.f).results == ["result"]
    assert page.shown[-2:] == ["[a] Broken()", "[a] went on"]
    reported = "\n".join(map(str, page.shown))
    assert "ValueError: no table today" in reported
    assert "_repr_html_" in reported
    assert "NotImplementedError" not in reported
    assert "rank_display" not in reported

    for source, shown in (("Broken()", "[a] Broken()"), ("Unspeakable()", "[a] <__main__.Unspeakable object at 0x")):
        page.shown.clear()
        run_cell(cells, source, on=[0])
        assert page.shown[-1].startswith(shown)


# Without processes


def shown_by(rank: RankDisplay, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    printed: list[str] = []
    monkeypatch.setattr("builtins.print", lambda text: printed.append(text))
    return printed


@pytest.mark.parametrize("home", ["IPython.core.display_functions", "IPython.core.display"])
def test_ipythons_functions_are_replaced_where_its_version_has_them(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in IPYTHONS:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    vars(sys.modules[home]).update(display=print, publish_display_data=print)
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setattr("labkit.worker.display.when_imported", lambda name, then: name in IPYTHONS and then(sys.modules[name]))
    monkeypatch.setattr("builtins.display", None, raising=False)
    rank = RankDisplay(lambda _: None, rich=True, size=1)
    rank.install()
    assert sys.modules[home].display == rank.display
    assert sys.modules[home].publish_display_data is not print
    assert not [name for name in IPYTHONS if name != home and hasattr(sys.modules[name], "display")]


def test_a_widget_is_shown_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Displayed] = []
    rank = RankDisplay(sent.append, rich=True, size=1)
    printed = shown_by(rank, monkeypatch)
    rank.display({"text/plain": "IntSlider(value=0)", WIDGET: {"model_id": "1"}}, raw=True)
    assert (sent, printed) == ([], ["IntSlider(value=0)"])


def test_methods_that_return_bytes_metadata_or_nothing() -> None:
    class Everything:
        def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
            return b"\x89PNG", {"width": 3}

        def _repr_html_(self) -> None: ...

        def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
            return {"application/json": {"a": {1, 2}.__class__}, "text/markdown": "*m*"}

        def __repr__(self) -> str:
            return "Everything()"

    sent: list[Displayed] = []
    RankDisplay(sent.append, rich=True, size=1).value(Everything())
    assert sent == [
        Displayed(
            {
                "text/plain": "Everything()",
                "image/png": "iVBORw==",
                "application/json": {"a": "<class 'set'>"},
                "text/markdown": "*m*",
            },
            {"image/png": {"width": 3}},
        )
    ]


def test_an_object_that_displays_itself() -> None:
    shown = []

    class Itself:
        def _ipython_display_(self) -> None:
            shown.append(self)

    RankDisplay(lambda _: None, rich=True, size=1).display(thing := Itself())
    assert shown == [thing]


def test_all_ranks_together_are_bounded(page: Page) -> None:
    displays = Displays([f"rank {i}" for i in range(MOST)])
    for rank in range(MOST):
        for _ in range(LEAST_DISPLAYS):
            displays.take(rank, Displayed({"text/plain": "x"}))
    displays.finish(page.put)
    assert sum(isinstance(shown, dict) for shown in page.shown) == MOST
    assert page.shown[-1] == f"[rank {MOST - 1}] ... {LEAST_DISPLAYS} more left out ..."


# exit, quit, get_ipython


@pytest.mark.processes
def test_exit_ends_the_function_of_a_rank(cells: in_cells.Cells, page: Page) -> None:
    cells("""
        import os, sys
        def f(how):
            if os.environ["RANK"] == "0":
                {"exit": exit, "quit": quit, "sys": sys.exit}[how](*[0] * (how == "sys"))
    """)
    pids = cells.group.run(os_getpid).results
    for how in ("exit", "quit", "sys"):
        assert cells.group.run(cells.f, how).results == [None, None]
        assert cells.group.run(os_getpid).results == pids, "of the function, not of the rank"
    run_cell(cells, "x = 1\nexit()\nx = 2")
    run_cell(cells, "x", [0])
    assert page.shown == ["[a] 1"]
    with pytest.raises(lab.RankError, match=r"the function called exit\(3\)"):
        run_cell(cells, "exit(3)")


def os_getpid() -> int:
    import os

    return os.getpid()


@pytest.mark.processes
def test_get_ipython_in_a_rank(cells: in_cells.Cells, page: Page) -> None:
    cells("""
        def f():
            ip = get_ipython()
            ip.system("echo hello")
            ip.run_line_magic("matplotlib", "inline")
            return ip.getoutput("echo there; echo twice"), hasattr(ip, "kernel"), "IPKernelApp" in ip.config
        def g(): get_ipython().run_line_magic("timeit", "f()")
    """)
    assert cells.group[0].run(cells.f).results == [(["there", "twice"], False, False)]
    assert page.shown == ["[a] hello"]
    with pytest.raises(lab.RankError, match="To time ranks"):
        cells.group.run(cells.g)


@pytest.mark.processes
def test_names_that_ipython_defines_become_the_ranks_own(cells: in_cells.Cells) -> None:
    interactiveshell = pytest.importorskip("IPython.core.interactiveshell")
    autocall = pytest.importorskip("IPython.core.autocall")
    shell = object.__new__(interactiveshell.InteractiveShell)
    cells._main.__dict__.update(exit=autocall.ExitAutocall(), get_ipython=shell.get_ipython, ip=shell)
    cells("def f(): return repr(exit), type(get_ipython()) is type(ip), ip.config\ndef g(): exit()")
    assert cells.group[0].run(cells.f).results == [("exit() ends the function that this rank runs", True, {})]
    assert cells.group[0].run(cells.g).results == [None]
    assert reduce_ipython([].append) is None
    assert reduce_ipython(3) is None


@pytest.mark.processes
def test_bars_of_tqdm_for_notebooks_are_text(cells: in_cells.Cells, page: Page, tmp_path: Path) -> None:
    """With a package in place of tqdm, which is not among the tests' tools."""
    folder = tmp_path / "tqdm"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "std.py").write_text("def tqdm(items): return 'text'\ntrange = tqdm\n")
    (folder / "notebook.py").write_text("def tqdm(items): return 'widget'\ntqdm_notebook = tnrange = trange = tqdm\n")
    imported = "from tqdm.notebook import tnrange, tqdm, tqdm_notebook, trange"
    run_cell(cells, f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n{imported}", [0])
    run_cell(cells, "[make(3) for make in (tnrange, tqdm, tqdm_notebook, trange)]", [0])
    assert page.shown == ["[a] ['text', 'text', 'text', 'text']"]
