"""Programs that initialise and end torch.distributed and RPC themselves, in the ranks of a group."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import cells as in_cells
import pytest
from reported import Reported

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
import torch.distributed.autograd as dist_autograd  # noqa: E402
from time_limits import LIMITS_S, some_limit_does  # noqa: E402
from torch.distributed import rpc  # noqa: E402

import labkit as lab  # noqa: E402
from labkit.errors.exceptions import DeadlockError, RankError  # noqa: E402
from labkit.errors.exit_reasons import Cause  # noqa: E402
from labkit.group.deadlock import Reason  # noqa: E402
from labkit.recording.group_keys import size_of  # noqa: E402
from labkit.worker.runtimes.registry import RUNTIMES  # noqa: E402

pytestmark = pytest.mark.processes

NOTHING_TO_DO = "init_process_group had nothing to do"


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[dict[str, lab.Group]]:
    with lab.Group(3, timeout_s=200) as torch_group, lab.Group(3, runtime="rpc", timeout_s=200) as rpc_group:
        yield {"torch": torch_group, "rpc": rpc_group}


@pytest.fixture
def three(groups: dict[str, lab.Group]) -> lab.Group:
    return groups["torch"]


@pytest.fixture
def remote(groups: dict[str, lab.Group]) -> lab.Group:
    return groups["rpc"]


def my_rank() -> int:
    return int(os.environ["RANK"])


def total(value: float) -> float:
    tensor = torch.tensor(value)
    dist.all_reduce(tensor)
    return tensor.item()


def setup(rank: int, size: int, **options: Any) -> None:
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29500"
    dist.init_process_group("gloo", rank=rank, world_size=size, **options)


def three_experiments() -> list[Any]:
    seen: list[Any] = []
    for number in (1.0, 2.0, 3.0):
        setup(my_rank(), 3)
        seen += [total(number), dist.get_rank(), dist.is_initialized()]
        dist.destroy_process_group()
        seen.append(dist.is_initialized())
    return seen


def names(run: lab.Run, rank: int = 0) -> list[str]:
    return [s.name for s in run.trace.filter(rank=rank, kind="communication")]


def test_the_first_initialisation_does_nothing_and_says_so_once(three: lab.Group, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        run = three.run(three_experiments)
        assert run.results == [[3.0, r, True, False, 6.0, r, True, False, 9.0, r, True, False] for r in range(3)]
        assert names(run) == ["all_reduce", *["init_process_group", "all_reduce"] * 2]
    assert capsys.readouterr().out.count(NOTHING_TO_DO) == 1
    assert three.run(total, 2.0).results == [6.0] * 3, "destroyed by one run, there again for the next"


def destroys(fail: bool = False) -> int:
    dist.destroy_process_group()
    if fail:
        raise ValueError("no")
    return os.getpid()


def test_after_a_function_that_destroys_its_group_the_next_run_has_new_ranks(three: lab.Group) -> None:
    before = three.run(destroys).results
    after = three.run_cell("import os, torch.distributed as dist\nprint(dist.get_world_size(), os.getpid())", "<cell>", "cell 1")
    for line, pid in zip(after.output.splitlines(), before, strict=True):
        _, _, size, new = line.split()
        assert size == "3"
        assert int(new) != pid
    with pytest.raises(RankError, match="ValueError: no"):
        three.run(destroys, fail=True)
    assert three.run(total, 2.0).results == [6.0] * 3


def test_after_a_cell_that_destroys_its_group_the_ranks_are_kept(three: lab.Group) -> None:
    def run(source: str) -> list[str]:
        output = three.run_cell(f"import os, torch.distributed as dist\n{source}", "<cell>", "cell 1").output
        return sorted(line.partition("] ")[2] for line in output.splitlines() if line.startswith("[rank"))

    pids = run("print(os.getpid())")
    run("dist.destroy_process_group()")
    with pytest.raises(RankError, match="Default process group has not been initialized"):
        run("dist.barrier()")
    for _ in range(2):
        program = "dist.init_process_group('nccl'); dist.barrier(); dist.destroy_process_group(); print(os.getpid())"
        assert run(program) == pids
    assert not set(map(str, three.run(os.getpid).results)) & set(pids)


def ways_to_initialise() -> list[float]:
    found = []
    rank, store = my_rank(), dist.HashStore()
    for way in (
        {},
        {"backend": "cpu:gloo,cuda:nccl"},
        {"backend": "gloo", "init_method": "env://"},
        {"init_method": "tcp://localhost:23456", "rank": rank, "world_size": 3},
        {"init_method": f"tcp://10.1.1.20:23456?rank={rank}&world_size=3"},
        {"init_method": "file:///nowhere/at/all", "rank": rank, "world_size": 3},
        {"store": store, "rank": rank, "world_size": 3},
        {"timeout": timedelta(seconds=200)},
    ):
        dist.init_process_group(**way)
        found.append(total(1.0))
        dist.destroy_process_group()
    return found


def test_any_init_method_port_and_backend_works(three: lab.Group) -> None:
    assert three.run(ways_to_initialise).results == [[3.0] * 8] * 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="where each rank has a GPU, NCCL can be had")
def test_nccl_without_gpus_becomes_gloo_with_a_notice(capsys: pytest.CaptureFixture[str]) -> None:
    def program() -> float:
        dist.init_process_group("nccl")
        return total(1.0)

    with lab.Group(2) as group:
        assert group.run(program).results == [2.0, 2.0]
    assert "init_process_group('nccl'): there is no GPU for each rank here" in capsys.readouterr().out


def other_numbers() -> tuple[int, float, int]:
    dist.init_process_group("gloo", init_method="tcp://localhost:29501", rank=(my_rank() + 1) % 3, world_size=3)
    tensor = torch.tensor(float(my_rank()))
    dist.broadcast(tensor, src=0)
    result = dist.get_rank(), tensor.item(), dist.get_world_size()
    dist.destroy_process_group()
    return result


def two_of_them() -> float | None:
    if my_rank() == 2:
        return None
    setup(my_rank(), 2)
    subgroup = dist.new_group([0, 1])
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=subgroup)
    return total(tensor.item())


def each_alone() -> float:
    setup(0, 1)
    return total(5.0)


@pytest.mark.parametrize("which", ["torch", "rpc"])
def test_another_size_or_rank_works(which: str, groups: dict[str, lab.Group]) -> None:
    group = groups[which]
    for _ in range(2):
        assert group.run(other_numbers).results == [(1, 2.0, 3), (2, 2.0, 3), (0, 2.0, 3)]
        assert group.run(two_of_them).results == [4.0, 4.0, None]
        assert group.run(each_alone).results == [5.0] * 3
        run = group.run(three_experiments)
        assert run.results == [[3.0, r, True, False, 6.0, r, True, False, 9.0, r, True, False] for r in range(3)]
    made = [s for s in run.trace.filter(rank=0, name="init_process_group") if s.kind == "communication"]
    assert len(made) == (3 if which == "rpc" else 2)
    assert all(s.wait_end_ns > s.wait_start_ns > 0 for s in made), "who makes a group waits for the others"


def twice() -> None:
    setup(my_rank(), 3)
    setup(my_rank(), 3)


def test_two_initialisations_without_an_end_are_torchs_error(three: lab.Group) -> None:
    with pytest.raises(RankError, match="trying to initialize the default process group twice"):
        three.run(twice)


def changes_its_environment() -> tuple[str, str]:
    before = os.environ["WORLD_SIZE"], os.environ["MASTER_PORT"]
    dist.init_process_group()
    os.environ["WORLD_SIZE"], os.environ["MASTER_PORT"] = "1", "29500"
    return before


def test_the_next_run_finds_the_environment_unchanged(three: lab.Group) -> None:
    assert len({three.run(changes_its_environment).results[0] for _ in range(2)}) == 1


def add(a: Any, b: Any) -> Any:
    return a + b


def calls_in_a_circle(prefix: str, rank: int, options: Any = None) -> Any:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "29500"
    rpc.init_rpc(f"{prefix}{rank}", rank=rank, world_size=3, rpc_backend_options=options)
    reference = rpc.remote(f"{prefix}{(rank + 1) % 3}", add, args=(rank, 10))
    with dist_autograd.context() as context:
        weight = torch.ones(2, requires_grad=True)
        loss = rpc.rpc_sync(f"{prefix}{(rank + 1) % 3}", add, args=(weight, weight)).sum()
        dist_autograd.backward(context, [loss])
        gradient = dist_autograd.get_gradients(context)[weight].tolist()
    result = reference.to_here(), gradient, rpc.get_worker_info().name, rpc.get_rpc_timeout()
    rpc.shutdown()
    return result


def as_the_group() -> Any:
    return calls_in_a_circle("worker", my_rank())


def other_names() -> Any:
    return calls_in_a_circle("trainer", my_rank())


def other_rpc_numbers() -> Any:
    return calls_in_a_circle("worker", (my_rank() + 1) % 3)


def other_options() -> Any:
    return calls_in_a_circle("worker", my_rank(), rpc.TensorPipeRpcBackendOptions(num_worker_threads=3, rpc_timeout=270))


@pytest.mark.parametrize("which", ["rpc", "torch"])
@pytest.mark.parametrize(
    ("program", "prefix", "shift", "timeout_s"),
    [(as_the_group, "worker", 0, 60.0), (other_names, "trainer", 0, 60.0), (other_rpc_numbers, "worker", 1, 60.0),
     (other_options, "worker", 0, 270.0)],
)  # fmt: skip
def test_a_program_that_starts_rpc_runs_twice(
    which: str, program: Callable[[], Any], prefix: str, shift: int, timeout_s: float, groups: dict[str, lab.Group]
) -> None:
    group = groups[which]
    numbers = [(r + shift) % 3 for r in range(3)]
    for _ in range(2):
        run = group.run(program)
        assert run.results == [(n + 10, [2.0, 2.0], f"{prefix}{n}", timeout_s) for n in numbers]
    assert {"init_rpc", "rpc_sync add", "to_here", "rpc.shutdown"} <= set(names(run))
    (end,) = run.trace.filter(rank=0, name="rpc.shutdown")
    assert end.wait_end_ns - end.wait_start_ns > 0.5 * (end.end_ns - end.start_ns) > 0, "to wait in rpc.shutdown is to wait"


def uses_rpc() -> Any:
    return rpc.rpc_sync("worker0", add, args=(1, 2))


def test_rpc_works_again_after_a_program_has_ended_it(remote: lab.Group) -> None:
    remote.run(other_names)
    assert remote.run(uses_rpc).results == [3] * 3


def both() -> Any:
    setup(my_rank(), 3)
    return total(1.0), other_names()[2]


def test_a_process_group_beside_rpc(remote: lab.Group) -> None:
    assert remote.run(both).results == [(3.0, f"trainer{r}") for r in range(3)]


def test_where_rpc_runs_init_rpc_does_nothing_or_is_an_error(remote: lab.Group, capsys: pytest.CaptureFixture[str]) -> None:
    start = "from torch.distributed import rpc\nrpc.init_rpc({}, rank={}, world_size=3)"
    remote.run(uses_rpc)
    remote.run_cell(start.format("rpc.get_worker_info().name", "rpc.get_worker_info().id"), "<cell>", "cell 1")
    assert "init_rpc had nothing to do" in capsys.readouterr().out
    with pytest.raises(RankError, match=r"init_rpc\('other', rank=0, world_size=3\) is not what this group has initialised"):
        remote.run_cell(start.format("'other'", 0), "<cell>", "cell 1")
    assert remote.run(uses_rpc).results == [3] * 3


def as_the_group_in_one_rank() -> float:
    rpc.init_rpc(f"worker{my_rank()}", rank=my_rank(), world_size=3)
    return rpc.get_rpc_timeout()


def test_options_of_rpc_belong_to_init_rpc() -> None:
    with pytest.raises(TypeError, match=r"Group.*unexpected argument 'rpc_backend_options'"):
        lab.Group(2, runtime="rpc", rpc_backend_options=None)  # type: ignore[call-arg]


def test_a_function_on_some_ranks_finds_rpc_running(remote: lab.Group) -> None:
    assert remote[0].run(as_the_group_in_one_rank).results == [60.0]


# Waits without end


def other_ports() -> None:
    dist.init_process_group("gloo", init_method=f"tcp://localhost:{29500 + my_rank()}", rank=(my_rank() + 1) % 3, world_size=3)


def one_initialises() -> None:
    if my_rank() == 0:
        dist.init_process_group("gloo", init_method="tcp://localhost:29500", rank=1, world_size=3)


def too_many_expected() -> None:
    setup(my_rank(), 4)


def one_starts_rpc() -> None:
    if my_rank() == 0:
        rpc.init_rpc("worker0", rank=0, world_size=3)


def one_ends_rpc() -> None:
    if my_rank() == 1:
        rpc.shutdown()


# By program: the runtime, the reason, and the ranks that wait, each with its operation and the number of ranks that it
# waits for.
FOR_EVER: dict[Callable[..., None], tuple[str, Reason, list[tuple[int, str, int]]]] = {
    other_ports: ("torch", Reason.RENDEZVOUS, [(rank, "init_process_group", 3) for rank in range(3)]),
    one_initialises: ("torch", Reason.RETURNED, [(0, "init_process_group", 3)]),
    too_many_expected: ("torch", Reason.RENDEZVOUS, [(rank, "init_process_group", 4) for rank in range(3)]),
    one_starts_rpc: ("rpc", Reason.RETURNED, [(0, "init_rpc", 3)]),
    one_ends_rpc: ("rpc", Reason.RETURNED, [(1, "rpc.shutdown", 3)]),
}


@pytest.mark.parametrize("program", FOR_EVER, ids=lambda program: program.__name__)
def test_a_wait_without_end_is_reported(program: Callable[..., None], groups: dict[str, lab.Group], reported: Reported) -> None:
    which, reason, waits = FOR_EVER[program]
    group = groups[which]
    with pytest.raises(RankError if reason is Reason.RETURNED else DeadlockError):
        group.run(program)
    found = reported.deadlocks[-1]
    assert (found.reason, [(rank, p.name, size_of(p.group)) for rank, p in found.waits]) == (reason, waits)
    assert group.run(my_rank).results == [0, 1, 2]


def one_comes_alone(limit_s: float) -> str:
    if my_rank():
        return ""
    try:
        setup(1, 3, timeout=timedelta(seconds=limit_s))
    except dist.DistStoreError as error:
        return str(error)
    return "no error"


def test_a_time_limit_of_the_program_is_respected(three: lab.Group) -> None:
    def has_come_itself(limit_s: float) -> bool:
        reported = f"Timed out after {limit_s:g} seconds waiting for clients. 1/3 clients joined."
        return three.run(one_comes_alone, limit_s).results == [reported, "", ""]

    assert some_limit_does(has_come_itself, (1.5, *LIMITS_S))


# Ranks without a framework of their own


@pytest.fixture(scope="module")
def bare() -> Iterator[lab.Group]:
    """Its ranks import torch when a program does, which takes seconds, so a test replaces them only where it must."""
    with lab.Group(3, runtime="bare", timeout_s=200) as group:
        yield group


def trains_in_a_bare_rank(end: bool = True) -> tuple[float, int]:
    dist.init_process_group("gloo")
    value = torch.ones(10)
    dist.all_reduce(value)
    if dist.get_rank() == 0:
        dist.send(value, 1)
    elif dist.get_rank() == 1:
        dist.recv(value, 0)
    dist.barrier()
    if end:
        dist.destroy_process_group()
    return value[0].item(), os.getpid()


TRAINED = [("init_process_group", 0, -1), ("all_reduce", 40, -1), ("send", 40, 1), ("barrier", 0, -1)]


def calls_in_a_bare_rank() -> Any:
    rank = my_rank()
    rpc.init_rpc(f"bare{rank}", rank=rank, world_size=2)
    result = rpc.rpc_sync(f"bare{1 - rank}", add, args=(rank, 1))
    rpc.shutdown()
    return result


def leaves_one_behind() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank():
        dist.barrier()


def test_remote_calls_in_bare_ranks_are_recorded() -> None:
    with lab.Group(2, runtime="bare", timeout_s=200) as pair:  # each run has new ranks, which import torch
        for _ in range(2):
            run = pair.run(calls_in_a_bare_rank)
            assert run.results == [1, 2]
            assert {"init_rpc", "rpc_sync add", "rpc.shutdown"} <= set(names(run))


def test_collectives_in_bare_ranks_are_recorded_and_a_group_left_there_does_not_reach_the_next_run(bare: lab.Group) -> None:
    pids = []
    for end in (True, False, True):
        run = bare.run(trains_in_a_bare_rank, end)
        assert [value for value, _ in run.results] == [3.0] * 3
        assert [(s.name, s.nbytes, s.peer) for s in run.trace.filter(rank=0, kind="communication")] == TRAINED
        pids.append([pid for _, pid in run.results])
    ended, left, last = pids
    assert left == ended
    assert not set(last) & set(left)


def test_a_bare_group_that_one_rank_leaves_is_reported(
    bare: lab.Group, monkeypatch: pytest.MonkeyPatch, reported: Reported
) -> None:
    def all_wait(certain_after_s: float) -> bool:
        """Otherwise only one of them would be reported."""
        monkeypatch.setattr(RUNTIMES["bare"], "certain_after_s", certain_after_s)
        with pytest.raises(RankError) as caught:
            bare.run(leaves_one_behind)
        assert [(failure.rank, failure.cause) for failure in caught.value.failures] == [(0, Cause.DEADLOCK)]
        reason, waits = reported.deadlock()
        assert reason is Reason.RETURNED
        assert waits
        assert {name for _, name in waits} == {"barrier"}
        return [rank for rank, _ in waits] == [1, 2]

    assert some_limit_does(all_wait, (0.5, 5.0, 30.0))


def test_a_bare_group_does_not_import_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = in_cells.Cells(in_cells.new_main(monkeypatch))
    notebook("def loaded():\n    import sys\n    return 'torch' in sys.modules")
    with lab.Group(2, runtime="bare") as bare:
        assert bare.run(notebook.loaded).results == [False, False]
