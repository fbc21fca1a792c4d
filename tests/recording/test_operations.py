"""The table of operations: its entries are whole, nothing else lists operations, and a new entry needs no other
edit."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.recording import operations
from labkit.recording.operations import (  # fmt: skip
    FOR_OTHERS,
    OPERATION_TYPES,
    OTHER,
    REMOTE,
    REPLY,
    RPC,
    SERVE,
    VALUE,
    OperationType,
    Traffic,
    methods,
    type_of,
    type_of_kernel,
)

ROOT = Path(__file__).resolve().parents[2]
OF_TORCH = [kind for kind in OPERATION_TYPES if any(form.methods for form in kind.forms)]


@pytest.mark.parametrize(
    ("recorded", "name"),
    [
        ("all_reduce", "all_reduce"),
        ("all_gather_into_tensor_coalesced", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("reduce_scatter_single_coalesced", "reduce_scatter"),
        ("reduce", "reduce"),
        ("alltoall_base", "all_to_all"),
        ("recv_anysource", "recv"),
        ("rpc", "rpc"),
        ("rpc_async Net.forward", "rpc"),
        ("remote Net", "remote"),
        ("serve Net.forward", "serve"),
        ("reply send", "reply"),
        ("received reply add", "received reply"),
        ("future of Net.forward", "future of"),
        ("unseen future of f", "unseen future of"),
        ("received gradients", "received gradients"),
        ("monitored_barrier", "monitored_barrier"),
    ],
)
def test_a_name_in_the_record_says_what_it_is(recorded: str, name: str) -> None:
    assert type_of(recorded).name == name


@pytest.mark.parametrize("name", ["", "gossip", "all_reduce of gradients", "recv left", "serve", "reply", "remote", "forward"])
def test_a_span_of_the_students_own_is_no_operation(name: str) -> None:
    assert type_of(name) is OTHER


def test_the_function_behind_the_name() -> None:
    assert SERVE.recorded("Net.forward") == "serve Net.forward"
    for kind in (RPC, REMOTE, REPLY, VALUE, *FOR_OTHERS):
        for form in kind.forms:
            assert type_of(f"{form.name} Net.forward") is kind
            assert kind.function_in(f"{form.name} Net.forward") == "Net.forward"
    assert type_of("all_reduce").function_in("all_reduce") == ""


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("CollectiveReduceV3", "all_reduce"),
        ("CollectiveReduceScatterV2", "reduce_scatter"),
        ("collective_bcast_recv", "broadcast"),
        ("CollectiveAllToAllV2", "all_to_all"),
        ("collective_gather_v2", "all_gather"),
        ("MatMul", ""),
        ("CollectiveInitializeCommunicator", ""),
    ],
)
def test_tensorflows_kernels(kernel: str, name: str) -> None:
    assert type_of_kernel(kernel).name == name


def test_no_two_operations_share_a_name_or_a_method() -> None:
    for names in (
        [kind.name for kind in OPERATION_TYPES],
        [form.name for kind in OPERATION_TYPES for form in kind.forms],
        [method for kind in OPERATION_TYPES for form in kind.forms for method in form.methods],
    ):
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("kind", OF_TORCH, ids=lambda kind: kind.name)
def test_an_entry_with_methods_of_torchs_is_whole(kind: OperationType) -> None:
    from torch._C._distributed_c10d import ProcessGroup

    assert kind.traffic not in (Traffic.UNKNOWN, Traffic.NONE)
    assert kind.cost is not None
    assert kind.cost.rounds(4) > 0
    assert kind.cost.formula
    assert kind.cost.source
    assert (kind.colour != OTHER.colour) == (kind.traffic not in (Traffic.TOGETHER, Traffic.SECOND_END)), "no colour"
    names = [form.name for form in kind.forms]
    for form in kind.forms:
        assert any(hasattr(ProcessGroup, method) for method in form.methods)
        assert not form.of_one or form.of_one in names


def test_each_method_of_torchs_that_starts_something_is_in_the_table() -> None:
    """torch's C++ says of each method what it returns: of those that start an operation, a `Work`."""
    from torch._C._distributed_c10d import ProcessGroup

    start = {name for name in dir(ProcessGroup) if re.search(r"-> [\w.:]*Work\b", getattr(ProcessGroup, name).__doc__ or "")}
    assert len(start) >= 20  # in torch 2.11; more in later versions
    assert start - {"_end_coalescing", "end_coalescing"} <= set(methods())


def test_each_way_to_call_is_in_the_table() -> None:
    rpc = pytest.importorskip("torch.distributed.rpc.internal")
    assert {type_of(f"rpc_{mode.value} f") for mode in rpc.RPCExecMode} == {RPC}


# Names with other meanings as well: a runtime, a kind of memory, a message to a rank's process.
AMBIGUOUS = {"rpc", "gradients", "remote", "reply", "serve", "value"}
ELSEWHERE = {
    "labkit/notebook/measure_link.py",  # what it has torch do for each
    "labkit/plots/measured_link.py",  # the link between two ranks is that of messages
    "labkit/costs/rounds.py",  # the other algorithms of an all-reduce and of a broadcast
    "notebooks/judges/find_the_bottleneck.py",  # what its exercise is about
    "notebooks/judges/tensor_parallel.py",  # an all_gather records the bytes of all ranks
    "notebooks/judges/long_sequences_and_experts.py",  # its exercise sends tokens by an all_to_all
    "labkit/group/simulation/simulated_group.py",  # what a rank receives if all have the same input
}


def names_asked_for(path: Path) -> set[str]:
    """The names of operations, and how they begin, that a file compares something with, or has as keys of a
    dictionary."""
    names = {form.name for kind in OPERATION_TYPES for form in kind.forms} | {kind.name for kind in OPERATION_TYPES}
    asked: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare):
            asked += [node.left, *node.comparators]
        elif isinstance(node, ast.Dict):
            asked += node.keys
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in PREFIXES:
            asked += node.args
    texts = [part.value for value in asked if value for part in ast.walk(value) if isinstance(part, ast.Constant)]
    return {text.strip() for text in texts if isinstance(text, str)} & names - AMBIGUOUS


PREFIXES = ("startswith", "endswith", "removeprefix", "removesuffix")


def test_nothing_else_lists_operations() -> None:
    folders = (ROOT / "labkit", ROOT / "notebooks")
    files = [path for folder in folders for path in folder.rglob("*.py") if path != Path(operations.__file__)]
    assert {"send", "all_reduce"} <= names_asked_for(ROOT / "labkit" / "notebook" / "measure_link.py"), "the search finds some"
    found = {str(path.relative_to(ROOT)): names for path in files if (names := names_asked_for(path))}
    assert set(found) == ELSEWHERE, found


@pytest.mark.processes
def test_a_new_entry_needs_no_other_edit() -> None:
    program = ROOT / "tests" / "helpers" / "made_up_collective.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["recorded"] == {"name": "gossip", "nbytes": 32, "signature": "float32 [4, 2]"}
    assert found["matrix"] == [[0, 1000, 0, 0], [0, 0, 1000, 0], [0, 0, 0, 1000], [1000, 0, 0, 0]]
    assert found["rings"]
    assert found["colour"] == "#123456"
    assert found["seconds"] == found["predicted"] == pytest.approx(12e-3 + 8e-3)
    for part in ("gossip", "float32 [4]", "int32 [4]", "(cell 5, line 1)", "rank 0", "rank 1"):
        assert part in found["mismatch"]
    assert "gossip (cell 5, line 1)" in found["deadlock"]
    assert found["reduced"] == 2
