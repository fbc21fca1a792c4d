"""The notebook's filters of warnings apply in ranks; a warning of several ranks is shown once."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import cells as in_cells
import pytest
from python_programs import environment, python

import labkit as lab
from labkit.group import output
from labkit.group.output import WARNED_AFTER_S, GroupedWarnings, Output
from labkit.group.processes import RankPool
from labkit.ipc.protocol import Message, NewFilters, Warned
from labkit.worker.display import MOST_WARNINGS

pytestmark = pytest.mark.processes


@pytest.fixture
def notebooks_filters() -> Iterator[None]:
    """Python's defaults, as in a fresh notebook, without pytest's filters."""
    level = logging.getLogger().level
    with warnings.catch_warnings():
        warnings.resetwarnings()
        yield
    logging.getLogger().setLevel(level)


@pytest.fixture
def cells(notebooks_filters: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[in_cells.Cells]:
    cells = in_cells.Cells(in_cells.new_main(monkeypatch))
    cells("""
        import logging, os, sys, warnings
        def warn():
            warnings.warn("careful")
            if os.environ["RANK"] == "1":
                warnings.warn("old", DeprecationWarning)
    """)
    with lab.Group(2, runtime="bare", timeout_s=200) as group:
        cells._main.__dict__["group"] = group
        yield cells


# The notebook's settings


def test_logging_is_the_functions_own_task(cells: in_cells.Cells, capsys: pytest.CaptureFixture[str]) -> None:
    note = "labkit: ranks do not have the notebook's logging: call logging.basicConfig(...) in the function"
    cells("def f(): logging.basicConfig(level=logging.INFO, format='%(message)s!'); logging.info('said')")
    assert cells.group[0].run(cells.f).output == "[rank 0] said!"
    assert note not in capsys.readouterr().out
    logging.getLogger().setLevel(logging.INFO)
    for _ in range(2):
        cells.group.run(int)
    assert capsys.readouterr().out.count(note) == 1


def test_unchanged_filters_are_not_sent(cells: in_cells.Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    cells.group.run(int)
    asked: list[type[Message]] = []
    tell = RankPool.tell

    def look(pool: RankPool, message: Message) -> None:
        asked.append(type(message))
        tell(pool, message)

    monkeypatch.setattr(RankPool, "tell", look)
    cells.group.run(int)
    assert asked == []
    warnings.simplefilter("ignore")
    cells.group.run(int)
    cells.group.run(int)
    assert asked == [NewFilters]


def test_a_filter_that_fails_in_a_rank_is_reported_by_the_next_call(cells: in_cells.Cells) -> None:
    cells("""
        def not_here(): raise RuntimeError("only in the notebook")
        class Fails:
            def __reduce__(self): return not_here, ()
        class Mine(UserWarning): fails = Fails()
    """)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cells.Mine)
        for _ in range(2):
            with pytest.raises(lab.RankError, match="only in the notebook"):
                cells.group.run(int)
    assert cells.group.run(int).results == [0, 0]


def test_the_notebooks_filters_apply(cells: in_cells.Cells) -> None:
    assert "old" in cells.group.run(cells.warn).output
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message="care")
    assert cells.group.run(cells.warn).output == ""
    warnings.filterwarnings("error", message="care")
    with pytest.raises(lab.RankError, match="UserWarning: careful"):
        cells.group.run(cells.warn)
    cells("class Mine(UserWarning): ...\ndef g(): warnings.warn('x', Mine)")
    warnings.simplefilter("error", cells.Mine)
    with pytest.raises(lab.RankError, match="Mine: x"):
        cells.group.run(cells.g)


# What ranks warn of


def test_a_warning_of_all_ranks_is_shown_once(cells: in_cells.Cells, capsys: pytest.CaptureFixture[str]) -> None:
    cells("""
        def f():
            print("said")
            warnings.simplefilter("always")
            for _ in range(3):
                warn()
    """)
    run = cells.group.run(cells.f)
    said = [
        "[ranks 0-1] <ipython-input-1-test>, line 4: UserWarning: careful (3 times)",
        '[ranks 0-1]     warnings.warn("careful")',
        "[rank 1] <ipython-input-1-test>, line 6: DeprecationWarning: old (3 times)",
        '[rank 1]     warnings.warn("old", DeprecationWarning)',
    ]
    assert run.output.splitlines() == ["[rank 0] said", "[rank 1] said", *said]
    out, err = capsys.readouterr()
    assert sorted(line for line in out.splitlines() if line[0] == "[") == ["[rank 0] said", "[rank 1] said"]
    assert err.splitlines() == said


@pytest.mark.usefixtures("notebooks_filters")
def test_a_warning_of_torchs_about_an_argument_names_the_programs_line(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = in_cells.Cells(in_cells.new_main(monkeypatch))
    cells("""
        import torch, warnings
        def f():
            warnings.simplefilter("always")
            torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), check_reduction=True)
    """)
    with lab.Group(2, timeout_s=200) as group:
        said = group.run(cells.f).output.splitlines()
    assert said[0].startswith("[ranks 0-1] <ipython-input-1-test>, line 5: FutureWarning: The `check_reduction` argument")


def test_many_warnings_are_bounded_and_custom_showwarning_works(cells: in_cells.Cells) -> None:
    cells(f"""
        def f():
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                warnings.warn("recorded")
            warnings.showwarning("shown", UserWarning, "file.py", 1, file=sys.stdout)
            for i in range({MOST_WARNINGS + 5}):
                warnings.warn(str(i))
            if not (child := os.fork()):
                warnings.warn("of a child")
                os._exit(0)
            os.waitpid(child, 0)
            return len(seen)
    """)
    run = cells.group[0].run(cells.f)
    lines = run.output.splitlines()
    assert run.results == [1]
    assert lines[0].endswith("UserWarning: shown")
    assert lines[1].endswith("UserWarning: of a child"), "what is no rank writes"
    assert len(lines) == 3 + 2 * MOST_WARNINGS + 1
    assert lines[-1] == "[rank 0] ... 5 other warnings left out ..."


@pytest.mark.parametrize(
    ("names", "said", "label"),
    [
        ([f"rank {i}" for i in range(8)], [0, 1, 2, 3], "ranks 0-3"),
        ([f"rank {i}" for i in range(8)], [0, 2, 3, 7], "ranks 0, 2-3, 7"),
        (["master", "worker"], [0, 1], "master and worker"),
        (["master", "worker"], [1], "worker"),
        (list("abcdef"), [0, 1, 2, 3, 4, 5], "all 6 ranks"),
        (list("abcdef"), [0, 1, 2, 3, 5], "a, b, c, d and f"),
    ],
)
def test_the_ranks_of_a_warning_are_named(names: list[str], said: list[int], label: str) -> None:
    grouped = GroupedWarnings(names)
    for rank in reversed(said):
        grouped.take(rank, "UserWarning: x\n", 1)
    grouped.take(said[-1], "UserWarning: x\n", 4)
    often = " (5 times)" if len(said) == 1 else " (up to 5 times)"
    assert grouped.lines() == [f"[{label}] UserWarning: x{often}"]


def test_a_terminal_waits_for_the_other_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [100.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    prints = Output(["rank 0", "rank 1"])
    prints.take(1, Warned("x", 1))
    prints.refresh()
    prints.take(0, Warned("x", 1))
    now[0] += 2 * WARNED_AFTER_S
    assert capsys.readouterr().err == ""
    prints.refresh()
    assert capsys.readouterr().err == "[ranks 0-1] x\n"
    prints.take(0, Warned("y", 1))
    assert prints.finish() == "[ranks 0-1] x\n[rank 0] y"
    assert capsys.readouterr().err == "[rank 0] y\n"


def test_warnings_as_errors_from_the_beginning() -> None:
    """In the notebook's process, in the fork server, and in the ranks."""
    program = (
        "import os, labkit as lab\n"
        "def f():\n    import warnings\n    warnings.warn('careful')\n"
        "with lab.Group(2, runtime='{}') as group:\n"
        "    print(group.run(os.getenv, 'PYTHONWARNINGS').results)\n"
        "    try: group.run(f)\n    except lab.RankError as error: print(error.failures[0].headline)\n"
    )
    for runtime in ("bare", "torch"):
        answer = python("-c", program.format(runtime), env=environment(PYTHONWARNINGS="error"))
        assert (answer.stdout.splitlines(), answer.stderr) == (["['error', 'error']", "UserWarning: careful"], "")


def test_a_notebook_that_ignores_its_childrens_ends() -> None:
    program = (
        "import os, signal, subprocess, labkit as lab\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "def f(how):\n"
        "    if how == 'die': os._exit(3)\n"
        "    return subprocess.run(['false']).returncode\n"
        "for start in ('fork', 'spawn'):\n"
        "    with lab.Group(2, runtime='bare', start=start) as group:\n"
        "        print(group.run(f, 'live').results)\n"
        "        try: group[0].run(f, 'die')\n"
        "        except lab.RankError as error: print(error.failures[0].headline)\n"
        "        print(group.run(f, 'live').results)\n"
    )
    answer = python("-c", program)
    assert answer.stderr == ""
    lines = answer.stdout.splitlines()
    assert [lines[i] for i in (0, 2, 3, 5)] == ["[1, 1]"] * 4
    assert "exit code 3" in lines[1], "a forked rank's exit code is known"
    assert "the process ended" in lines[4], "of a spawned one, a child of the notebook's, nobody can know it then"


def test_a_librarys_warnings_import_no_library(notebooks_filters: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The filters of a notebook that has imported numpy name numpy's classes, which a rank may not know."""
    (tmp_path / "slowly_imported.py").write_text("class OwnWarning(UserWarning): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    category = __import__("slowly_imported").OwnWarning
    warnings.simplefilter("error", category)

    def imported() -> bool:
        return "slowly_imported" in sys.modules

    def warn() -> None:
        import slowly_imported  # type: ignore[import-not-found]

        warnings.warn("own", slowly_imported.OwnWarning, stacklevel=1)

    with lab.Group(1, runtime="bare") as group:
        assert group.run(imported).results == [False]
        group.run(warn)  # the library was not imported when the filters arrived
        warnings.simplefilter("always", ResourceWarning)  # they are sent again
        with pytest.raises(lab.RankError, match="OwnWarning: own"):
            group.run(warn)
    monkeypatch.delitem(sys.modules, "slowly_imported")
