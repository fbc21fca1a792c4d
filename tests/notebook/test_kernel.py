"""In a real Jupyter kernel: prints, errors, Stop, a kernel that is killed, and notebooks with reproducible output."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import doings
import psutil
import pytest
from processes import GONE_LIMIT_S, left_after

pytest.importorskip("ipykernel", reason="needs ipykernel")
nbformat = pytest.importorskip("nbformat", reason="needs nbformat")
import IPython  # noqa: E402
from kernels import ANSWER_LIMIT_S, Cell, Kernel, shared_kernel  # noqa: E402
from nbclient import NotebookClient  # noqa: E402

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]


# The ranks of these tests need no torch; `import labkit` in a kernel starts importing it where it is installed.
WITHOUT_TORCH = "import sys\nsys.modules['torch'] = None\nimport labkit as lab\ndel sys.modules['torch']"
BEGIN = "import os, threading, time\nimport labkit as lab\ngroup = lab.Group(2, runtime='bare')"


@pytest.fixture(scope="module")
def kernel(start: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with shared_kernel(tmp_path_factory.mktemp("kernel"), LABKIT_START=start) as kernel:
        for source in (WITHOUT_TORCH, BEGIN):
            cell = kernel(source)
            assert cell.error is None, cell.error
        yield kernel


def waiting(cell: Cell) -> bool:
    """Both ranks have printed that they hang."""
    return any(state.get("text/plain", "").count("hanging") == 2 for state in cell.states)


def test_the_first_groups_modules_are_imported_in_the_background(tmp_path: Path) -> None:
    with shared_kernel(tmp_path) as kernel:
        cell = kernel(f"""
            import sys, time
            import labkit as lab
            from labkit.notebook.on_import import FIRST_USED
            until_s = time.monotonic() + {ANSWER_LIMIT_S / 2}
            while not sys.modules.keys() >= set(FIRST_USED) and time.monotonic() < until_s:
                time.sleep(0.01)
            sys.modules.keys() >= set(FIRST_USED), sys.modules.keys() & {{"torch", "matplotlib", "tensorflow"}}
        """)
    assert cell.result == "(True, set())", cell.error


FAILED = """
rank 0 failed: NameError: name 'undefined' is not defined

Traceback (most recent call last):
  File "cell {at}", line 7, in f
    return undefined
           ^^^^^^^^^
NameError: name 'undefined' is not defined"""


def test_cells_prints_errors_and_ranks_magic(kernel: Kernel) -> None:
    at = int(kernel("len(In)").result or "")  # the number of the next cell
    kernel("""
        class Thing:
            def __init__(self, rank): self.rank = rank
        def f(fail=False):
            rank = int(os.environ["RANK"])
            print("rank", rank, "of", os.environ["WORLD_SIZE"])
            if fail:
                return undefined
            return Thing(rank)
    """)
    cell = kernel("run = group.run(f)\n[(type(t) is Thing, t.rank) for t in run.results]")
    assert cell.stdout == "[rank 0] rank 0 of 2\n[rank 1] rank 1 of 2\n"
    assert cell.result == "[(True, 0), (True, 1)]"
    assert not any(cell.displays), "prints of a run that takes long are also shown during the run, and give way"

    cell = kernel("group[0].run(f, fail=True)")  # on one rank: of two, the report may name only the first that fails
    name, _, shown = cell.error or ("", "", "")
    assert name == "RankError"
    assert shown.splitlines()[1:8] == FAILED.format(at=at).splitlines()[1:]
    assert "labkit" not in shown
    assert cell.stdout == "[rank 0] rank 0 of 2\n"

    cell = kernel("%%ranks group --on 1\nx = f()\nx.rank")
    assert (cell.error, cell.stdout) == (None, "[rank 1] rank 1 of 2\n[rank 1] 1\n")
    cell = kernel("%%ranks group --on 1\n1\n1 / x.nothing")
    assert f'File "cell {at + 4}", line 2, in <module>' in (cell.error or "no error")[2], cell.error
    name, _, shown = kernel("%%ranks group\nif").error or ("", "", "")
    assert (name, shown) == ("CellSyntaxError", f'  File "cell {at + 5}", line 1\n    if\n      ^\nSyntaxError: invalid syntax')
    cell = kernel("%%ranks group --run kept  # a comment\nfor i in range(3): break\ni")
    assert (cell.stdout, cell.error) == ("[rank 0] 0\n[rank 1] 0\n", None)
    assert kernel("kept is group.last_run").result == "True"
    cell = kernel("%%ranks group\n%time f()")
    assert cell.error is not None
    assert cell.error[2].count("\n") == 0, "one line, and no frames"
    assert kernel("group.run(int).results").result == "[0, 0]"


def test_prints_appear_while_ranks_work_and_end_as_text(kernel: Kernel) -> None:
    cell = kernel(
        """
        def f(folder):
            print("line of", os.environ["RANK"])
            print("hanging", end="")
            while not os.path.exists("go on"):
                os.sched_yield()
            print(" no more")
        run = group.run(f, ".")
        """,
        when=waiting,
        then=lambda: (Path(psutil.Process(kernel.pid).cwd()) / "go on").touch(),
    )
    assert cell.error is None, cell.error
    assert cell.states[0] == cell.states[-1] == {}
    shown = [state["text/plain"] for state in cell.states if state]
    assert "[rank 0] line of 0\n[rank 0] hanging\n[rank 1] line of 1\n[rank 1] hanging" in shown
    assert cell.stdout == ("[rank 0] line of 0\n[rank 0] hanging no more\n[rank 1] line of 1\n[rank 1] hanging no more\n")


HANG = """
    def hang(how="rest"):
        print("hanging")
        if how == "rest":
            threading.Event().wait()
        else:
            sum(range(10 ** 13))
"""


def test_stop_gives_the_prompt_back_and_the_next_run_works(kernel: Kernel) -> None:
    kernel(f"group.close()\n{BEGIN}")  # otherwise labkit also reports the names that an earlier test's cells lose
    kernel(HANG)
    before = eval(kernel("group.run(os.getpid).results").result or "")

    def interrupt_kernel_alone() -> None:  # as VS Code does: no signal reaches other processes
        os.kill(kernel.pid, signal.SIGINT)

    for how, interrupt in (("rest", kernel.manager.interrupt_kernel), ("compute", interrupt_kernel_alone)):
        cell = kernel(f"group.run(hang, {how!r})", when=waiting, then=interrupt)
        assert cell.error is not None
        assert cell.error[2].splitlines()[0].endswith("hang was stopped.")
        assert "labkit/" not in cell.error[2]
        assert cell.stdout == "[rank 0] hanging\n[rank 1] hanging\n"
    after = eval(kernel("group.run(os.getpid).results").result or "")
    assert not set(before) & set(after)
    assert not left_after(GONE_LIMIT_S, before)


@pytest.mark.slow
def test_stop_while_ranks_hang_in_a_collective(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    kernel = Kernel(tmp_path)
    try:
        kernel("import threading, time\nimport labkit as lab\nimport torch, torch.distributed as dist\ngroup = lab.Group(2)")
        kernel("""
            def f():
                threading.Thread(target=time.sleep, args=(600,), daemon=True).start()  # it may act: no deadlock
                if dist.get_rank() == 0:
                    dist.all_reduce(torch.ones(1))
                else:
                    dist.recv(torch.ones(1), src=0)
            def g():
                one = torch.ones(1)
                dist.all_reduce(one)
                return one.item()
            def waits(member):
                return any(operation.wait_start_ns for operation in member.reader.pending())
            def look():
                while not (group._pool and len(group._pool.members) == 2 and all(map(waits, group._pool.members))):
                    time.sleep(0.01)
                print("both wait", flush=True)
        """)
        cell = kernel(
            "threading.Thread(target=look).start()\ngroup.run(f)",
            when=lambda cell: "both wait" in cell.stdout,
            then=kernel.manager.interrupt_kernel,
        )
        assert cell.error is not None
        lines = cell.error[2].splitlines()
        zero = doings.waiting("rank 0", "all_reduce", "cell 2, line 4", signature="float32 [1]")
        one = doings.waiting("rank 1", "recv", "cell 2, line 6", ("rank 0", "rank 1"), 0, "float32 [1]")
        assert zero.fullmatch(lines[1].strip())
        assert one.fullmatch(lines[2].strip())
        assert kernel("group.run(g).results").result == "[2.0, 2.0]"
    finally:
        kernel.close()


def test_stop_at_once_while_the_first_group_starts(start: str, tmp_path: Path) -> None:
    """The student changes their mind while frameworks are still being imported."""
    kernel = Kernel(tmp_path, LABKIT_START=start)
    try:
        kernel("import labkit as lab")
        cell = kernel(
            "group = lab.Group(2, runtime='bare')\nprint('starting', flush=True)\nwhile True: group.run(int)",
            when=lambda cell: "starting" in cell.stdout,
            then=kernel.manager.interrupt_kernel,
        )
        assert cell.error is not None
        assert cell.error[0] in ("KeyboardInterrupt", "Stopped")
        assert kernel("group.run(int).results").result == "[0, 0]"
    finally:
        kernel.close()


@pytest.fixture
def own_kernel(start: str, tmp_path: Path) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path, LABKIT_START=start)
    yield kernel
    kernel.close()


def test_nothing_is_left_of_a_kernel(own_kernel: Kernel) -> None:
    for how in ("restarted", "killed", "shut down"):
        assert not left_after(GONE_LIMIT_S, ended(own_kernel, how)), how
        if how == "killed":
            own_kernel.manager.restart_kernel(now=True)
            own_kernel.client.wait_for_ready(timeout=ANSWER_LIMIT_S)


def ended(kernel: Kernel, how: str) -> list[int]:
    """End a kernel with a group; returns the processes that it had started."""
    assert kernel(BEGIN).error is None
    kernel(HANG)
    kernel("import subprocess")
    pids = eval(
        kernel("""
        from labkit.group.open_groups import notebook
        pids = group.run(lambda: [os.getpid(), subprocess.Popen(["sleep", "600"]).pid]).results
        [pid for pair in pids for pid in pair] + [s._process.pid for s in notebook.starters.values()]
        """).result
        or ""
    )
    assert len(pids) >= 5
    if how == "restarted":
        kernel.manager.restart_kernel(now=True)
        kernel.client.wait_for_ready(timeout=ANSWER_LIMIT_S)
    elif how == "shut down":
        kernel.manager.shutdown_kernel()
    else:
        kernel.client.execute("group.run(hang, 'compute')")
        while True:
            message = kernel.client.get_iopub_msg(timeout=ANSWER_LIMIT_S)
            if str(message["content"].get("data", "")).count("hanging") == 2:
                break
        psutil.Process(kernel.pid).kill()
    return list(pids)


# Notebooks


# In `slow`, the ranks wait until the notebook has shown what they print; other runs show it if they take long.
CELLS = """
import labkit as lab
import os
group = lab.Group(3, runtime='bare')
def look(message):
    if 'begun' in str(message['content']['data']):
        open('seen', 'w').close()
    return message
get_ipython().display_pub.register_hook(look)
---
# NBVAL_CHECK_OUTPUT
def f():
    print('rank', os.environ['RANK'])
run = group.run(f)
---
# NBVAL_CHECK_OUTPUT
def slow():
    print('begun')
    while not os.path.exists('seen'):
        os.sched_yield()
    print('done')
if os.path.exists('seen'):
    os.remove('seen')
run = group.run(slow)
---
# NBVAL_CHECK_OUTPUT
run.output
---
# NBVAL_CHECK_OUTPUT
def wrong():
    return 1 / 0
group.run(wrong)
---
%%ranks group
# NBVAL_CHECK_OUTPUT
int(os.environ['RANK']) ** 2
---
group.close()
""".strip().split("\n---\n")


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small notebook with its outputs, as `make notebooks` leaves them."""
    v4 = nbformat.v4
    cells = [v4.new_code_cell(source) for source in CELLS]
    cells[4].metadata["tags"] = ["raises-exception"]
    notebook = v4.new_notebook(cells=cells)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    folder = tmp_path_factory.mktemp("notebook")
    environment = {"PYTHONPATH": str(ROOT), "IPYTHONDIR": str(folder)}
    NotebookClient(notebook, timeout=int(ANSWER_LIMIT_S), kernel_name="python3").execute(
        cwd=str(folder), env=os.environ | environment
    )
    nbformat.write(notebook, folder / "lesson.ipynb")
    return folder / "lesson.ipynb"


def test_a_saved_notebook_holds_clean_outputs(executed: Path) -> None:
    cells = [cell.outputs for cell in nbformat.read(executed, as_version=4).cells]
    assert [o.data for o in cells[2] if o.output_type == "display_data"] == [{}], "prints shown during the run have given way"
    outputs = [[o for o in own if o.get("data") != {}] for own in cells]  # a run that takes long has such a display as well
    assert [(o.output_type, o.text) for o in outputs[1]] == [("stream", "[rank 0] rank 0\n[rank 1] rank 1\n[rank 2] rank 2\n")]
    text = "".join(f"[rank {i}] begun\n[rank {i}] done\n" for i in range(3))
    assert [o.text for o in outputs[2]] == [text]
    assert outputs[4][0].ename == "RankError"
    assert "labkit" not in "\n".join(outputs[4][0].traceback)
    assert outputs[5][0].text == "[rank 0] 0\n[rank 1] 1\n[rank 2] 4\n"


@pytest.mark.skipif(IPython.version_info < (8,), reason="nbval keeps no history, from which IPython 7 knows a cell's number")
def test_nbval_passes_twice(executed: Path) -> None:
    """Also where every start counts as slow: the notice is no part of what is compared."""
    again = shutil.copy(executed, executed.with_name("again.ipynb"))
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(executed.parent),
        "--nbval", "--nbval-current-env", "--nbval-sanitize-with", str(ROOT / "tests" / "nbval_sanitize.cfg"),
        str(executed), str(again),
    ]  # fmt: skip
    answer = subprocess.run(
        command,
        cwd=executed.parent, env=os.environ | {"PYTHONPATH": str(ROOT), "LABKIT_SLOW_S": "0.001"},
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout
    assert f"{2 * len(CELLS)} passed" in answer.stdout
