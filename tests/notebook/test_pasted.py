"""Programs in the style of well-known tutorials, including launch code, pasted into a cell of a real kernel and run
twice.

Each program in `pasted/` is as its author would run it. A case names its group, the one line that is changed, if
any, and expressions whose values are known. To add one: a file, and an entry in `CASES`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("ipykernel", reason="needs ipykernel")
pytest.importorskip("torch")
from kernels import Kernel

pytestmark = pytest.mark.processes

PROGRAMS = Path(__file__).resolve().parent / "pasted"
RESULTS: Final = "group.last_run.results"
# By rank, how often each operation was recorded; `init_*` and rpc.shutdown are not traffic.
COUNTS: Final = """
from collections import Counter
def counts(*names):
    spans = [s for s in group.last_run.trace if s.kind == "communication"]
    return [[Counter(s.name for s in spans if s.rank == rank)[name] for name in names] for rank in range(len(group))]
def nbytes(name):
    return [sum(s.nbytes for s in group.last_run.trace.filter(rank=rank) if s.name == name) for rank in range(len(group))]
def phases():
    trace = group.last_run.trace
    found = [dict(Counter(s.name for s in trace.filter(rank=rank, kind="compute"))) for rank in range(len(group))]
    return found, len(trace.step_bounds())
def gradients():
    found = Counter()  # by the rank that sends and the one that receives, bytes
    for s in group.last_run.trace:
        if s.name in ("gradients", "received gradients") and s.nbytes:
            found[(s.peer, s.rank) if s.name.startswith("received") else (s.rank, s.peer)] += s.nbytes
    return dict(found)
"""


@dataclass(frozen=True)
class Case:
    """One program.

    Args:
        file: its name without ".py".
        group: how the notebook makes its group.
        line: the line that is changed, and what it becomes.
        magic: the line above the program, if it is in a `%%ranks` cell.
        values: expressions of the notebook after it ran, with their values.
        printed: text that its output contains.
    """

    file: str
    group: str
    line: tuple[str, str] | None = None
    magic: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    printed: tuple[str, ...] = ()


SPAWN: Final = ("mp.spawn(", "group.spawn(")
CASES: Final = [
    Case(
        "ddp_basic", "lab.Group(2)", SPAWN,
        values={
            f"len(set({RESULTS}))": 1,  # the replicas are equal
            "[n > 0 for n, in counts('all_reduce')]": [True, True],
            "counts('init_process_group')": [[0], [0]],
        },
        printed=("[rank 1] Running DDP with model parallel example on rank 1.", "[rank 0] Running DDP checkpoint example"),
    ),
    Case(
        "messages_and_ring", "lab.Group(3)", SPAWN,
        values={
            RESULTS: [(1.0, 2.0, [3.0, 3.0], 3), (1.0, 2.0, [3.0, 3.0], 3), (0.0, 1.0, [3.0, 3.0], 3)],
            "counts('send', 'recv', 'all_reduce')": [[3, 2, 1], [2, 3, 1], [2, 2, 0]],
        },
    ),
    Case(
        "rpc_parameter_server", "lab.Group(3, runtime='rpc')", SPAWN,
        values={
            RESULTS: ["parameter_server", True, True],
            "counts('remote get_parameter_server', 'rpc.shutdown')": [[0, 1], [1, 1], [1, 1]],
        },
    ),
    Case(
        "rpc_rnn", "lab.Group(['ps', 'trainer'], runtime='rpc')", SPAWN,
        values={
            f"{RESULTS}[0]": [],
            f"{RESULTS}[1] == sorted({RESULTS}[1], reverse=True)": True,
            "counts('remote EmbeddingTable', 'remote Decoder', 'dist_autograd.backward')": [[0, 0, 0], [1, 1, 3]],
        },
    ),
    Case(
        "rpc_pipeline", "lab.Group(3, runtime='rpc')", SPAWN,
        values={
            f"{RESULTS}[1:]": [None, None],
            "counts('to_here', 'dist_autograd.backward')": [[0, 2], [6, 0], [6, 0]],
            # Of the output, [4, 4], and of the tensor between the shards, [4, 16].
            "gradients()": {(0, 2): 6 * 4 * 4 * 4, (2, 1): 6 * 4 * 16 * 4},
        },
        printed=("the loss falls: True",),
    ),
    Case(
        "rpc_reinforcement", "lab.Group(3, runtime='rpc')", SPAWN,
        values={
            RESULTS: [([4.0, 8.0], {1: [1.0] * 4, 2: [2.0] * 4}, 42), None, None],
            "counts('rpc_sync Agent.select_action', 'rpc_sync Agent.report_reward')": [[0, 0], [4, 4], [4, 4]],
        },
    ),
    Case(
        "fsdp", "lab.Group(2)", SPAWN,
        values={
            RESULTS: [(True, True)] * 2,
            "counts('all_reduce', 'barrier')": [[3, 1]] * 2,
            "[n > 0 and m > 0 for n, m in counts('all_gather_into_tensor', 'reduce_scatter_tensor')]": [True, True],
        },
    ),
    Case(
        "hybrid_sharded", "lab.Group(4)", SPAWN,
        values={
            f"len({{tuple(r) for r in {RESULTS}}}), len({RESULTS}[0])": (1, 3),
            # In each of three steps two layers are gathered, forward and backward, and their gradients reduced over the
            # shards, then over the copies; and the squares of their norms.
            "counts('all_gather_into_tensor', 'reduce_scatter_tensor', 'all_reduce')": [[12, 6, 9]] * 4,
            "nbytes('all_gather_into_tensor')": [12 * 8 * 16 * 4] * 4,
            "nbytes('reduce_scatter_tensor')": [6 * 8 * 16 * 4] * 4,
            "nbytes('all_reduce')": [6 * 8 * 16 * 4 // 2 + 3 * 2 * 4] * 4,
        },
    ),
    Case("data_parallel", "lab.Group(2)", magic="%%ranks group --on 0", printed=("Outside: output size torch.Size([30, 2])",)),
    Case(
        "torchrun_main", "lab.Group(2)", magic="%%ranks group",
        values={"[n > 0 for n, in counts('all_reduce')]": [True, True]},
        printed=("[rank 0] [0] Epoch 1 | Steps 2", "[rank 1] [1] Epoch 1 | Steps 2"),
    ),
    *(
        Case(
            f"plain_{name}", "lab.Group(2)", magic="%%ranks group", printed=("[rank 0] ",),
            values={"phases()": ([found] * 2, steps), "[n > 0 for n, in counts('all_reduce')]": [True, True]},
        )
        for name, steps, found in (
            # The loss function is a module, too; the loader's start and its end are fetches of data.
            ("ddp", 16, {"data": 18, "forward": 32, "backward": 16, "optimizer": 16}),
            ("fsdp2", 16, {"forward": 16, "backward": 16, "optimizer": 16}),
            ("gan", 12, {"forward": 60, "backward": 24, "optimizer": 24}),
            ("accumulation", 8, {"forward": 32, "backward": 32, "optimizer": 8}),
        )
    ),
    Case(
        # The first forward pass compiles the model, which computes gradients, too.
        "plain_compile", "lab.Group(2)", magic="%%ranks group", printed=("[rank 0] the loss is a number: True",),
        values={
            "[(f['forward'], f['optimizer']) for f in phases()[0]], phases()[1]": ([(12, 12)] * 2, 12),
            "[n > 0 for n, in counts('all_reduce')]": [True, True],
        },
    ),
    Case(
        "groups_and_barriers", "lab.Group(4)", SPAWN,
        values={RESULTS: [[2.0, 4.0, 2.0, 4.0]] * 4, "counts('all_reduce', 'barrier', 'all_gather')": [[1, 2, 1]] * 4},
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path_factory.mktemp("kernel"), LABKIT_START="fork")
    kernel("import labkit as lab")
    kernel(COUNTS)
    yield kernel
    kernel.close()


@pytest.mark.parametrize(
    "case",
    # It compiles with inductor, which takes as long as all others together; test_compiled.py has faster compilers.
    [pytest.param(case, marks=pytest.mark.slow if case.file == "plain_compile" else (), id=case.file) for case in CASES],
)
def test_a_pasted_program_runs_twice(case: Case, kernel: Kernel) -> None:
    source = (PROGRAMS / f"{case.file}.py").read_text()
    if case.line is not None:
        before, after = case.line
        assert source.count(before) == 1, "one changed line"
        source = source.replace(before, after)
    assert kernel(f"group = {case.group}").error is None
    try:
        for _ in range(2):
            cell = kernel(f"{case.magic}\n{source}" if case.magic else source)
            assert cell.error is None, cell.error[2]
            for line in case.printed:
                assert line in cell.stdout
            for expression, value in case.values.items():
                reported = kernel(expression)
                assert reported.error is None, reported.error[2]
                assert ast.literal_eval(reported.result or "None") == value, expression
    finally:
        kernel("group.close()")
