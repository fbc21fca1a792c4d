"""`Group`: valid options, which ranks run, where it works, and RPC between functions of a notebook."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cells as in_cells
import numpy as np
import psutil
import pytest
from doings import computing, returned
from processes import SELDOM_SPAWNED
from time_limits import some_limit_does

import labkit as lab
from labkit.errors.exceptions import RankFailure, RunTimeoutError
from labkit.group.open_groups import notebook
from labkit.group.processes import RankPool
from labkit.ipc.protocol import Message, NewFiles
from labkit.launch.capacity import FreeMemory
from labkit.recording.cores import usable_cores
from labkit.worker.runtimes.devices import share_of_devices
from labkit.worker.runtimes.registry import RUNTIMES

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def four(start: str) -> Iterator[lab.Group]:
    with lab.Group(["a", "b", "c", "d"], runtime="bare", start=start, timeout_s=200) as group:
        yield group


def rank() -> int:
    return int(os.environ["RANK"])


def test_a_run_of_a_new_function_waits_for_its_results_only(four: lab.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    four.run(rank)
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def new(): return 1", "a new file", "exec"), space)
    new = space["new"]
    told: list[type[Message]] = []
    tell = RankPool.tell
    monkeypatch.setattr(RankPool, "tell", lambda pool, message: (told.append(type(message)), tell(pool, message)))
    assert four.run(new).results == [1] * 4
    assert told == [NewFiles], "a notice, which has no reply"
    assert four.run(new).results == [1] * 4
    assert told == [NewFiles], "files are sent once"


# Bad input


@pytest.mark.parametrize(
    ("ranks", "options", "error", "words"),
    [
        (0, {}, ValueError, "Group(0): expected between 1 and 1024 ranks"),
        (-1, {}, ValueError, "Group(-1): expected between 1 and 1024 ranks"),
        (10**6, {}, ValueError, "Group(1000000): expected between 1 and 1024 ranks"),
        (True, {}, TypeError, "Group(True): expected a number of ranks, a list of names, or TensorFlow's jobs as a dict"),
        (2.0, {}, TypeError, "Group(2.0): expected a number of ranks, a list of names, or TensorFlow's jobs as a dict"),
        (None, {}, TypeError, "Group(None): expected a number of ranks, a list of names, or TensorFlow's jobs as a dict"),
        ("ab", {}, TypeError, "Group('ab'): expected a number of ranks, a list of names, or TensorFlow's jobs as a dict"),
        ([], {}, ValueError, "Group([]): expected between 1 and 1024 ranks"),
        (["a", "a"], {}, ValueError, "Group(['a', 'a']): duplicate rank name 'a'; every rank needs a name of its own"),
        (["a", " "], {}, ValueError, "Group(['a', ' ']): ' ' is not a valid name; expected non-empty strings"),
        (["a", 2], {}, ValueError, "Group(['a', 2]): 2 is not a valid name; expected non-empty strings"),
        (
            ["a b"],
            {"runtime": "rpc"},
            ValueError,
            "Group(['a b']): 'a b' is not a valid RPC name; expected at most 127 letters, digits and _ : -",
        ),
        ({"worker": 2}, {}, ValueError, "Group({'worker': 2}): a dict of jobs is for runtime='tensorflow'; give a number or"),
        ({"worker": 0}, {"runtime": "tensorflow"}, ValueError, "Group({'worker': 0}): expected a job's name and a number of"),
        ({}, {"runtime": "tensorflow"}, ValueError, "Group({}): expected between 1 and 1024 ranks"),
        (2, {"runtime": "mpi"}, ValueError, "runtime='mpi': expected one of 'torch', 'rpc', 'tensorflow', 'bare'"),
        (2, {"runtime": []}, ValueError, "runtime=[]: expected one of 'torch', 'rpc', 'tensorflow', 'bare'"),
        (2, {"devices": "tpu"}, ValueError, "devices='tpu': expected None or 'auto' (GPUs where there are some), 'cpu' or"),
        (2, {"devices_per_rank": 2}, ValueError, "devices_per_rank is for runtime='tensorflow'; in torch, lab.devices(n) gives"),
        (2, {"threads": 0}, ValueError, "threads=0: expected a whole number above 0"),
        (2, {"threads": "2"}, TypeError, "threads='2': expected a whole number above 0"),
        (2, {"threads": 1.5}, TypeError, "threads=1.5: expected a whole number above 0"),
        (2, {"timeout_s": -1}, ValueError, "timeout_s=-1: expected a number above 0"),
        (2, {"timeout_s": float("nan")}, ValueError, "timeout_s=nan: expected a number above 0"),
        (2, {"timeout_s": "1"}, TypeError, "timeout_s='1': expected a number above 0"),
        (2, {"start": "thread"}, ValueError, "start='thread': expected 'fork' or 'spawn'"),
    ],
)
def test_an_invalid_argument(ranks: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    known = dict(notebook.starters)
    with pytest.raises(error) as caught:
        lab.Group(ranks, **options)
    assert str(caught.value).startswith(words)
    assert notebook.starters == known, "no process was started for it"


def test_a_request_that_this_machine_cannot_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")

    def refused(*args: Any, **options: Any) -> str:
        with pytest.raises(lab.LabError) as caught:
            lab.Group(*args, **options)
        return str(caught.value)

    monkeypatch.setattr("labkit.launch.capacity.usable_memory", lambda: FreeMemory(2000 << 20, 1000 << 20, limited=False))
    assert refused(11) == (
        "11 ranks need at least 1.07 GiB of memory (100 MiB each), and 1000 MiB are available. "
        "Use at most 10 ranks, or close other groups and notebooks."
    )
    monkeypatch.undo()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    monkeypatch.setattr(psutil.Process, "num_fds", lambda _: 100)
    assert refused(300, runtime="bare") == (
        "300 ranks need about 1,856 open files, and the hard limit of this process is 1,024. "
        "Use fewer ranks, or raise the limit (ulimit -Hn 1856) before you start JupyterLab."
    )
    monkeypatch.undo()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == limits, "where nothing can be raised, nothing is changed"
    monkeypatch.setattr("labkit.launch.capacity.PROC", "/missing/proc")
    monkeypatch.setattr(sys, "platform", "linux")
    assert refused(2, runtime="bare").startswith("the file system /proc is not mounted here")
    monkeypatch.undo()
    monkeypatch.setattr("labkit.group.arguments.gpu_count", lambda: 0)
    assert refused(2, devices="cuda") == "devices='cuda': this machine has no visible GPU. Leave `devices` out to run on the CPU."
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert refused(2).startswith("torch is not installed; the extra 'torch' brings it:  pip install")
    monkeypatch.undo()
    monkeypatch.setattr(os, "name", "nt")
    assert refused(2).startswith("labkit starts ranks on Linux and macOS; on Windows, install it in WSL2")


def test_the_options_that_a_group_shows_make_an_equal_one() -> None:
    pytest.importorskip("torch")
    network = lab.Network(nodes=2, inside=lab.Link.nvlink4, between=lab.Link.ethernet_10g)
    for given in ({}, {"devices": "cpu", "threads": 1, "timeout_s": 9.0, "link": network}):
        group = lab.Group(4, **given)  # type: ignore[arg-type]  # several types
        shown = {name: getattr(group, name) for name in ("runtime", "devices", "threads", "timeout_s", "link")}
        again = lab.Group(4, **shown)
        assert {name: getattr(again, name) for name in shown} == shown


def test_numpy_integers_are_accepted() -> None:
    group = lab.Group(np.int64(3), runtime="bare", threads=np.int64(2), timeout_s=np.float32(9))
    assert len(group) == 3
    assert group[np.int64(1)].on == (1,)


@pytest.mark.parametrize(
    ("which", "error", "words"),
    [
        ("nobody", lab.LabError, "no rank is named 'nobody'; this group has 'a', 'b', 'c', 'd'"),
        (4, lab.LabError, "no rank 4; this group has ranks 0 to 3"),
        (-5, lab.LabError, "no rank -5; this group has ranks 0 to 3"),
        ([0, "x"], lab.LabError, "no rank is named 'x'; this group has 'a', 'b', 'c', 'd'"),
        ([], lab.LabError, "group[[]] selects no ranks; this group has ranks 0 to 3"),
        (slice(5, 9), lab.LabError, "group[5:9] selects no ranks; this group has ranks 0 to 3"),
        (slice(4, None), lab.LabError, "group[4:] selects no ranks; this group has ranks 0 to 3"),
        (1.5, TypeError, "group[1.5]: expected a rank's number or name"),
        (None, TypeError, "group[None]: expected a rank's number or name"),
        (True, TypeError, "group[True]: expected a rank's number or name"),
        ((0, 1.5), TypeError, "group[1.5]: expected a rank's number or name"),
    ],
)
def test_nonexistent_ranks(four: lab.Group, which: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        four[which]
    assert str(caught.value) == words


@pytest.mark.parametrize("function", [3, None, "train", [int]])
def test_objects_that_cannot_be_called(four: lab.Group, function: Any) -> None:
    for run in (four.run, four.watch, four[0].run, four[0].watch):
        with pytest.raises(TypeError, match=rf"run\({function!r}\): expected a function".replace("[", r"\[")):
            run(function)


def test_a_group_that_was_never_used_starts_no_rank() -> None:
    group = lab.Group(2, runtime="bare")
    assert group._pool is None
    group.close()


def test_a_span_has_the_line_where_this_run_used_its_name_first(four: lab.Group) -> None:
    def one() -> None:
        for _ in range(2):
            with lab.span("forward"):
                pass

    def another() -> None:
        with lab.span("forward"):
            pass

    for function, line, count in ((one, 2, 2), (another, 1, 1), (one, 2, 2)):
        spans = four.run(function).trace.filter(kind="compute")
        expected = f"test_group.py, line {function.__code__.co_firstlineno + line}"
        assert [s.line for s in spans] == [expected] * 4 * count


def test_no_groups_inside_ranks(four: lab.Group) -> None:
    def f() -> None:
        import labkit as lab

        lab.Group(2)

    with pytest.raises(lab.RankError, match="this code runs inside a rank, and ranks cannot create groups") as caught:
        four.run(f)
    assert "arguments.py" not in str(caught.value), "labkit's own frames teach nothing"


# Which ranks run


@pytest.mark.parametrize(
    ("which", "ran"),
    [
        (0, [0]),
        (-1, [3]),
        ("b", [1]),
        (slice(1, 3), [1, 2]),
        (slice(None, None, 2), [0, 2]),
        ([3, "a", 0], [0, 3]),
        (("c",), [2]),
        (range(2), [0, 1]),
        (np.array([1, 2]), [1, 2]),
    ],
)
def test_some_of_the_ranks(four: lab.Group, which: Any, ran: list[int]) -> None:
    run = four[which].run(rank)
    assert run.results == ran
    assert run.ranks == tuple("abcd"[i] for i in ran)


def test_a_group_is_a_collection_of_its_ranks(four: lab.Group) -> None:
    assert [one.run(rank).results for one in four] == [[0], [1], [2], [3]]
    assert list(four) == [four[i] for i in range(4)]
    assert [one.on for one in four[1:3]] == [(1,), (2,)]
    assert (len(four), len(four[::2])) == (4, 2)
    assert all(which in four for which in (0, 3, np.int64(2), "a", four["b"], four[1:3]))
    assert not any(which in four for which in (4, -1, "e", None, 1.5, [0]))
    with lab.Group(4, runtime="bare") as other:
        assert other[0] not in four
        assert other[0] != four[0]
    assert len({four[0], four[0], four[1]}) == 2


def test_the_other_ranks_keep_their_state(four: lab.Group, cells: in_cells.Cells) -> None:
    cells("""
        def put(value):
            import __main__
            __main__.kept = value
        def get():
            import __main__
            return __main__.kept
    """)
    four.run(cells.put, "old")
    four["b"].run(cells.put, "new")
    assert four.run(cells.get).results == ["old", "new", "old", "old"]


def test_arguments_reach_the_function_whatever_their_names(four: lab.Group) -> None:
    def f(function: int, *rest: int, on: int, **more: int) -> Any:
        return function, rest, on, more

    assert four[0].run(f, 1, 2, 3, on=4, timeout_s=5).results == [(1, (2, 3), 4, {"timeout_s": 5})]


def test_reprs(four: lab.Group) -> None:
    assert repr(four) == "<Group of 4 bare ranks>"
    assert repr(four["c", "a"]) == "<a, c of <Group of 4 bare ranks>>"
    assert repr(four.run(rank)) == "<Run of rank on 4 ranks>"
    assert repr(four["c"].run(rank)) == "<Run of rank on c>"
    assert four.names == ("a", "b", "c", "d")
    assert len(four) == 4


# The environment of ranks


def test_the_environment_is_torchruns(four: lab.Group) -> None:
    names = [
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR",
        "OMP_NUM_THREADS",
    ]  # fmt: skip
    found = four.run(lambda: ([os.environ.get(n) for n in names], int(os.environ["MASTER_PORT"]))).results
    for i, (values, port) in enumerate(found):
        assert values == [str(i), str(i), "4", "4", "0", "1", "127.0.0.1", str(max(1, int(usable_cores() // 4)))]
        assert port == found[0][1] > 0


@pytest.mark.parametrize(("cores", "threads"), [(5.5, "2"), (0.5, "1")])
def test_ranks_divide_the_cores_that_a_container_leaves_them(
    start: str, cores: float, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("labkit.group.arguments.usable_cores", lambda: cores)
    with lab.Group(2, runtime="bare", start=start, timeout_s=200) as group:
        assert group.run(lambda: os.environ["OMP_NUM_THREADS"]).results == [threads] * 2


def test_threads_and_devices_of_a_rank(start: str) -> None:
    pytest.importorskip("torch")

    def look() -> Any:
        import torch
        import torch.distributed as dist

        import labkit as lab

        mine = torch.full((1,), float(dist.get_rank() + 1))
        dist.all_reduce(mine)
        return torch.get_num_threads(), [str(d) for d in (*lab.devices(2), lab.device())], mine.item(), dist.get_backend()

    with lab.Group(2, threads=3, devices="cpu", start=start) as group:
        assert group.run(look).results == [(3, ["cpu", "cpu", "cpu"], 3.0, "gloo")] * 2


def test_shares_of_gpus() -> None:
    assert [share_of_devices(r, 2, 0) for r in range(2)] == [["cpu"]] * 2
    assert [share_of_devices(r, 4, 2) for r in range(4)] == [["cuda:0"], ["cuda:1"], ["cuda:0"], ["cuda:1"]]
    assert [share_of_devices(r, 2, 5) for r in range(2)] == [["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"]]
    with pytest.raises(ValueError, match=r"devices\(0\): expected at least 1"):
        lab.devices(0)


def test_gpus_are_only_queried_if_a_picture_shows_them(four: lab.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr("labkit.launch.starters.gpus_of", lambda ranks, _: looks.append(ranks) or [[]] * ranks)
    assert four.run(rank).results == [0, 1, 2, 3]
    assert not looks
    assert four.watch(rank).results == [0, 1, 2, 3]
    assert looks == [4]


def test_scripts_for_torchrun_find_their_process_group() -> None:
    """A function that sets up torch.distributed by itself, as under torchrun, finds the ports of its own group."""
    pytest.importorskip("torch")

    def f() -> Any:
        import torch
        import torch.distributed as dist

        dist.destroy_process_group()
        dist.init_process_group("gloo")
        one = torch.ones(1)
        dist.all_reduce(one)
        return dist.get_rank(), one.item()

    with lab.Group(2, timeout_s=200) as group:
        assert group.run(f).results == [(0, 2.0), (1, 2.0)]


@pytest.mark.parametrize("start", SELDOM_SPAWNED)
def test_preloaded_modules_exist(start: str) -> None:
    """A misspelt name would be skipped silently, and each rank would pay for the import."""
    pytest.importorskip("torch")
    with lab.Group(1, start=start) as group:
        names = [name.partition(":")[0] for name in RUNTIMES["torch"].preload]  # after a colon: a function of the module
        assert group.run(lambda names: [n for n in names if n not in sys.modules], names).results == [[]]


def test_a_forked_rank_finds_torch_prepared() -> None:
    """Otherwise every rank of every group would spend milliseconds on it."""
    pytest.importorskip("torch")

    def done_before() -> int:
        from labkit.worker.comm import install

        return install.prepare.cache_info().hits

    with lab.Group(1, start="fork") as group:
        assert group.run(done_before).results == [1]


@pytest.mark.parametrize("runtime", ["torch", "rpc", "bare"])
def test_a_rank_imports_no_labkit_modules_to_start_and_run(runtime: str) -> None:
    """Each rank of each group pays for what a forked rank imports itself; the server imports it only once."""
    pytest.importorskip("torch")
    names = ["labkit.launch.fork_server", "labkit.launch.starters", *RUNTIMES[runtime].preload]
    code = f"import importlib, sys; [importlib.import_module(n.partition(':')[0]) for n in {names}]; print(*sys.modules)"
    imported = shown("-c", code).split()
    with lab.Group(1, runtime=runtime) as group:
        (loaded,) = group.run(lambda: [name for name in sys.modules if name.startswith("labkit")]).results
    assert set(loaded) - set(imported) == set()


# Several at once, and time


def test_what_a_group_says_that_cannot_run() -> None:
    with lab.Group(1, runtime="bare") as group:
        group._holder = object()  # a run in another thread
        with pytest.raises(lab.LabError) as running:
            group.run(int)
        group._holder = None
        with pytest.MonkeyPatch.context() as patch:

            def close(*_: object) -> None:
                group._closed = True  # by another thread
                raise lab.RankError([RankFailure(0, "rank 0", "killed")])

            patch.setattr(lab.Group, "_usable_pool", close)
            with pytest.raises(lab.LabError) as closing:
                group.run(int)
    assert [str(error.value) for error in (running, closing)] == [
        "this group is running already, in another thread; wait for it, close it, or make a second group",
        "the group was closed in another thread while int was running",
    ]
    for run in (group.run, group.watch, group[0].run):
        with pytest.raises(lab.LabError, match=r"^this group is closed; make a new one with lab.Group\(...\)$"):
            run(int)
    assert repr(group) == "<Group of 1 bare rank, closed>"


def test_a_run_that_takes_too_long_says_what_the_ranks_were_doing(start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labkit.group.deadlock_monitor.SLOW_S", 0.0)  # that ranks print nothing is said, but is no cause

    def f() -> None:
        if os.environ["RANK"] == "1":
            threading.Event().wait()

    def says_so(limit_s: float) -> bool:
        with lab.Group(2, runtime="bare", start=start, timeout_s=limit_s) as group:
            group.run(int)
            with pytest.raises(RunTimeoutError) as caught:
                group.run(f)
            reported = str(caught.value).strip().strip("─").strip().splitlines()
            if f"    {returned('rank 0')}" not in reported:
                return False
            line = reported.pop(3)
            assert line.startswith(f"    {computing('rank 1')}, at test_group.py, line ")
            assert line.endswith(": threading.Event().wait()")
            assert reported == [
                f"f took longer than the group's timeout_s={limit_s:g}.",
                "",
                f"    {returned('rank 0')}",
                "",
                "All ranks were stopped; the next run starts fresh ones.",
            ]
            return group.run(int).results == [0, 0]

    assert some_limit_does(says_so)


# Where it works


def shown(*arguments: str, typed: str | None = None, folder: Path = ROOT, **variables: str) -> str:
    """What a program of Python prints that receives typed input. No error stops it."""
    answer = subprocess.run(
        [sys.executable, *arguments], input=typed, env=os.environ | {"PYTHONPATH": str(ROOT), **variables}, cwd=folder,
        capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    assert typed is not None or answer.stderr == ""
    return answer.stdout


def test_in_a_plain_script_and_its_threads(tmp_path: Path, start: str) -> None:
    """Without `if __name__ == "__main__"`, without `close`, with functions of the script and of a file beside it."""
    (tmp_path / "beside.py").write_text("def double(x):\n    return 2 * x\n")
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import threading
        import labkit as lab
        from beside import double

        class Thing:
            def __init__(self, x): self.x = x

        def f(x): return Thing(double(x))

        group = lab.Group(2, runtime="bare")
        results = []
        thread = threading.Thread(target=lambda: results.extend(group.run(f, 21).results))
        thread.start()
        thread.join()
        print([(type(r) is Thing, r.x) for r in results])
        """)
    )
    assert shown(str(script), LABKIT_START=start) == "[(True, 42), (True, 42)]\n"


def test_the_program_of_the_readme_runs_as_a_script(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    found = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    (tmp_path / "script.py").write_text(found[1])
    said = shown("script.py", folder=tmp_path)
    assert said.splitlines()[-1] == "[1.5, 1.5, 1.5, 1.5] [('all_reduce', 4000000)]"


@pytest.mark.parametrize("arguments", [["-i", "-q"], ["-"], ["-c", "import sys; exec(sys.stdin.read())"]])
def test_in_a_repl_and_in_piped_input(arguments: list[str]) -> None:
    """A REPL has no file to read functions from."""
    typed = (
        "import labkit as lab\n"
        "def f(x):\n    return undefined_name if x else __name__\n\n"
        "group = lab.Group(2, runtime='bare')\n"
        "print(group.run(f, 0).results)\n"
        "try:\n    group.run(f, 1)\nexcept lab.RankError as error:\n    print(error)\n\n"
    )
    said = shown(*arguments, typed=typed)
    assert "['__main__', '__main__']" in said
    assert "rank 0 failed: NameError: name 'undefined_name' is not defined" in said
    assert ", line 3, in f" in said or ", line 2, in f" in said
    assert "labkit" not in said.replace("labkit as lab", "")


def test_ipython_is_not_loaded_outside_ipython() -> None:
    code = "import sys, labkit as lab; lab.Group(1, runtime='bare').run(print, 'hello'); print('IPython' in sys.modules)"
    assert shown("-c", code) == "[rank 0] hello\nFalse\n"


# RPC


@pytest.fixture(scope="module", params=SELDOM_SPAWNED)
def master_and_shards(request: pytest.FixtureRequest) -> Iterator[lab.Group]:
    pytest.importorskip("torch")
    with lab.Group(["master", "shard1", "shard2"], runtime="rpc", start=request.param, timeout_s=200) as group:
        yield group


def test_rpc_between_functions_and_classes_of_a_notebook(master_and_shards: lab.Group, cells: in_cells.Cells) -> None:
    cells("""
        import torch
        import torch.distributed.rpc as rpc
        from torch.distributed.rpc import RRef

        def who(): return rpc.get_worker_info().name
        def add(a, b): return a + b + OFFSET
        OFFSET = 100

        class Counter:
            def __init__(self, start): self.count = start
            def add(self, n):
                self.count += n
                return self
            def value(self): return self.count

        def method_of(rref, n): return rref.local_value().add(n).value()

        def master():
            names = [rpc.rpc_sync(n, who) for n in ("master", "shard1", "shard2")]
            futures = [rpc.rpc_async(n, add, args=(1, torch.ones(2))) for n in ("shard1", "shard2")]
            sums = [s.tolist() for s in torch.futures.wait_all(futures)]
            counter = rpc.remote("shard1", Counter, args=(5,))
            first = counter.rpc_sync().value()
            second = counter.rpc_async().add(1).wait().value()
            third = counter.remote().add(10).to_here()
            inside = rpc.rpc_sync("shard1", method_of, args=(counter, 100))
            return names, sums, first, second, third.value(), type(third) is Counter, inside, counter.owner_name()
    """)
    (result,) = master_and_shards["master"].run(cells.master).results
    assert result == (["master", "shard1", "shard2"], [[102.0, 102.0]] * 2, 5, 6, 16, True, 116, "shard1")
    cells("OFFSET = 0\ndef who(): return 'somebody'")
    (result,) = master_and_shards["master"].run(cells.master).results
    assert result[:2] == (["somebody"] * 3, [[2.0, 2.0]] * 2), "what a cell redefines reaches the ranks that only serve"


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own optimizers
def test_distributed_autograd_and_optimizer(master_and_shards: lab.Group, cells: in_cells.Cells) -> None:
    """The same as in one process, with classes of a notebook on both sides."""
    cells("""
        import torch
        import torch.distributed.autograd as autograd
        import torch.distributed.rpc as rpc
        from torch.distributed.optim import DistributedOptimizer
        from torch.distributed.rpc import RRef

        class Shard(torch.nn.Module):
            def __init__(self, seed):
                super().__init__()
                torch.manual_seed(seed)
                self.linear = torch.nn.Linear(4, 4)
            def forward(self, x): return torch.tanh(self.linear(x))
            def refs(self): return [RRef(p) for p in self.parameters()]
            def weight(self): return self.linear.weight.detach()

        def serial(x):
            shards = [Shard(1), Shard(2)]
            optimizer = torch.optim.SGD([p for s in shards for p in s.parameters()], lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                shards[1](shards[0](x)).sum().backward()
                optimizer.step()
            return [s.weight() for s in shards]

        def master(x):
            shards = [rpc.remote(f"shard{i}", Shard, args=(i,)) for i in (1, 2)]
            refs = [r for s in shards for r in s.rpc_sync().refs()]
            optimizer = DistributedOptimizer(torch.optim.SGD, refs, lr=0.1)
            for _ in range(3):
                with autograd.context() as context:
                    y = shards[1].rpc_sync().forward(shards[0].rpc_sync().forward(x))
                    autograd.backward(context, [y.sum()])
                    optimizer.step(context)
            return [s.rpc_sync().weight() for s in shards]
    """)
    import torch

    x = torch.arange(8.0).view(2, 4) / 8
    (distributed,) = master_and_shards["master"].run(cells.master, x).results
    for ours, expected in zip(distributed, cells.serial(x), strict=True):
        torch.testing.assert_close(ours, expected)


def test_an_error_in_a_served_call_is_the_callers(master_and_shards: lab.Group, cells: in_cells.Cells) -> None:
    cells("""
        import torch.distributed.rpc as rpc
        def broken(): return {}["missing"]
        def master(): return rpc.rpc_sync("shard2", broken)
        def fine(): return "fine"
    """)
    with pytest.raises(lab.RankError, match="KeyError") as caught:
        master_and_shards["master"].run(cells.master)
    assert caught.value.failures[0].name == "master"
    assert master_and_shards["master"].run(cells.fine).results == ["fine"]


def test_ranks_of_rpc_groups_by_number_are_called_worker() -> None:
    pytest.importorskip("torch")
    assert lab.Group(2, runtime="rpc").names == ("worker0", "worker1")
