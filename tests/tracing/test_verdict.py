"""Programs that give wrong numbers without an error, and what is said about each; healthy ones yield no word."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import labkit as lab
from labkit.recording.rank_facts import Fact, FactKind
from labkit.tracing.silent_faults import FaultKind
from labkit.tracing.verdict import faults_of, verdict

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402  # after the check that it is there
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset  # noqa: E402

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def two() -> Iterator[lab.Group]:
    with lab.Group(2, timeout_s=200) as group:
        yield group


@pytest.fixture(scope="module")
def four() -> Iterator[lab.Group]:
    with lab.Group(4, timeout_s=200) as group:
        yield group


def net() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    torch.manual_seed(1 + dist.get_rank())  # from now on, each rank has its own data
    return model


def ddp() -> Any:
    return DistributedDataParallel(net())


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def normal() -> Any:
    return torch.randn(4, 8)


def backward(model: nn.Module, *batch: Any) -> None:
    model(*(batch or [normal()])).square().mean().backward()


def step(*optimizers: Any) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def train(model: nn.Module, steps: int = 3, batch: Callable[[], Any] = normal, finish: Any = None) -> None:
    optimizer = sgd(model)
    for _ in range(steps):
        backward(model, batch())
        if finish is not None:
            finish(model)
        step(optimizer)


def average(model: nn.Module) -> None:
    works = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
    for work, parameter in zip(works, model.parameters(), strict=True):
        work.wait()
        parameter.grad /= dist.get_world_size()


# Programs with a fault.


def never_waits() -> None:
    gradients = torch.randn(1000)
    dist.all_reduce(gradients, async_op=True)
    dist.barrier()


def skips_a_step() -> None:
    model = ddp()
    optimizer = sgd(model)
    for number in range(4):
        backward(model)
        if dist.get_rank() == 0 or number != 2:
            optimizer.step()
        optimizer.zero_grad()


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Linear(8, 1), nn.Linear(8, 1)
        torch.manual_seed(1 + dist.get_rank())

    def forward(self, x: Any) -> Any:
        return self.used(x)


def leaves_a_layer_out() -> None:
    train(DistributedDataParallel(Half()), steps=1)


def averages_nothing() -> None:
    train(net())


def reads_the_same() -> None:
    model = ddp()
    torch.manual_seed(5)
    train(model)


def reads_the_same_by_fsdp2() -> None:
    from torch.distributed.fsdp import fully_shard

    model = net()
    fully_shard(model)
    torch.manual_seed(5)
    train(model)


def batches_of_two_sizes() -> None:
    train(ddp(), batch=lambda: torch.randn(4 + dist.get_rank(), 8))


def statistics_of_one_rank() -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 1)))
    train(model, batch=lambda: torch.randn(16, 8) + 5 * dist.get_rank())


def equal_shards() -> None:
    torch.manual_seed(0)
    shard = torch.randn(4, 8)
    dist.all_gather([torch.empty(4, 8) for _ in range(dist.get_world_size())], shard)


def same_order() -> None:
    data = TensorDataset(torch.arange(32.0))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=True))
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(3):
        for (x,) in loader:
            backward(model, x[:, None])
            optimizer.step()


def padded_evaluation() -> None:
    data = TensorDataset(torch.arange(9.0))
    total = torch.zeros(1)
    with torch.no_grad():
        for (x,) in DataLoader(data, batch_size=3, sampler=DistributedSampler(data, shuffle=False)):
            total += x.sum()
    dist.all_reduce(total)


def forward_outside_of_no_sync() -> None:
    model = ddp()
    optimizer = sgd(model)
    for micro in range(4):
        loss = model(torch.randn(4, 8)).square().mean()
        with contextlib.nullcontext() if micro == 3 else model.no_sync():
            loss.backward()
    optimizer.step()


def backward_outside_of_no_sync() -> None:
    model = ddp()
    with model.no_sync():
        loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    sgd(model).step()


def loss_is_nan() -> None:
    backward(net(), torch.full((4, 8), math.nan) if dist.get_rank() == 1 else normal())


def global_rank_in_a_group() -> None:
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = columns[dist.get_rank() % 2]
    dist.broadcast(torch.ones(4), group_src=dist.get_rank(mine) * 0 + dist.get_global_rank(mine, 0), group=mine)


def goes_around_ddp() -> None:
    train(ddp().module)


def averages_over_one_rank() -> None:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    train(DistributedDataParallel(net(), process_group=groups[dist.get_rank()]))


def learning_rate_of_its_own() -> None:
    model = ddp()
    optimizer = sgd(model)
    for number in range(12):
        optimizer.param_groups[0]["lr"] = 0.01 * (1 - number / (20 + 5 * dist.get_rank()))
        backward(model)
        step(optimizer)


def seeds_of_their_own() -> None:
    data = TensorDataset(torch.arange(32.0))
    sampler = DistributedSampler(data, seed=dist.get_rank())
    model = DistributedDataParallel(nn.Linear(1, 1))
    for (x,) in DataLoader(data, batch_size=4, sampler=sampler):
        backward(model, x[:, None])


def optimizes_what_was_sharded_later() -> None:
    from torch.distributed.fsdp import fully_shard

    model = net()
    fully_shard(model)
    model(torch.randn(4, 8))
    optimizer = sgd(model)  # of the gathered parameters, which are freed
    for _ in range(3):
        backward(model)
        optimizer.step()


@pytest.mark.parametrize(
    ("program", "kind", "certain", "words"),
    [
        (never_waits, FaultKind.NEVER_WAITED_FOR, True, ["all_reduce", "wait()"]),
        (skips_a_step, FaultKind.OPTIMIZER_STEPS, True, ["4 times on rank 0", "3 times on rank 1"]),
        (
            leaves_a_layer_out,
            FaultKind.GRADIENTS_DIFFER,
            True,
            ["used.weight and used.bias", "unused.weight and unused.bias got none"],
        ),
        (backward_outside_of_no_sync, FaultKind.GRADIENTS_DIFFER, True, ["0.weight", "no_sync()"]),
        (averages_nothing, FaultKind.PARAMETERS_DIFFER, False, ["after 1 step", "0.weight, 0.bias, 2.weight and 2.bias"]),
        (reads_the_same, FaultKind.SAME_DATA, True, ["do the work of one", "DistributedSampler"]),
        (reads_the_same_by_fsdp2, FaultKind.SAME_INPUTS, False, ["were the same on rank 0 and rank 1"]),
        (batches_of_two_sizes, FaultKind.OTHER_BATCH_SIZES, False, ["4 and 5 rows"]),
        (statistics_of_one_rank, FaultKind.BUFFERS_DIFFER, False, ["0.running_mean", "SyncBatchNorm"]),
        (equal_shards, FaultKind.SAME_OPERANDS, False, ["all_gather"]),
        (same_order, FaultKind.SAME_ORDER, True, ["3 passes", "set_epoch"]),
        (padded_evaluation, FaultKind.PADDED_EVALUATION, False, ["10 samples, for a data set of 9: 1 sample came twice"]),
        (forward_outside_of_no_sync, FaultKind.NO_SYNC, True, ["3 all-reduces"]),
        (loss_is_nan, FaultKind.LOSS, True, ["nan on rank 1 after 0 steps"]),
        (goes_around_ddp, FaultKind.BYPASSED, True, ["called the module inside DistributedDataParallel on rank 0 and rank 1"]),
        (averages_over_one_rank, FaultKind.PARAMETERS_DIFFER, False, ["differ after 1 step"]),
        (learning_rate_of_its_own, FaultKind.OTHER_RATES, True, ["After 1 step", "rank 0 and rank 1 differ: 0.0095 and 0.0096"]),
        (seeds_of_their_own, FaultKind.OTHER_SEEDS, True, ["the seeds 0 and 1", "same seed"]),
        (
            optimizes_what_was_sharded_later,
            FaultKind.NO_GRADIENTS,
            True,
            ["stepped 3 times on rank 0 and rank 1", "never had a gradient, although there were 3 backward passes"],
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_fault(program: Callable[[], None], kind: FaultKind, certain: bool, words: list[str], two: lab.Group) -> None:
    run = two.run(program, check=True)
    (fault,) = verdict(run).faults
    assert (fault.kind, fault.kind.certain) == (kind, certain)
    for word in words:
        assert word in str(fault)
    (file, _, number) = fault.line.partition(", line ")
    if number:
        lines = {line for function in (program, train, backward, step) for *_, line in function.__code__.co_lines()}
        assert file == "test_verdict.py"
        assert int(number) in lines


def test_a_global_rank_in_a_group(four: lab.Group) -> None:
    (fault,) = verdict(four.run(global_rank_in_a_group)).faults
    assert (fault.kind, fault.kind.certain) == (FaultKind.OTHER_ROOT, False)


# Healthy programs.


def with_ddp() -> None:
    data = TensorDataset(torch.randn(63, 8))
    model, sampler = ddp(), DistributedSampler(data)
    optimizer = torch.optim.AdamW(model.parameters())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in DataLoader(data, batch_size=8, sampler=sampler):
            backward(model, x)
            step(optimizer)
        model.eval()
        with torch.no_grad():
            model(torch.ones(4, 8))
        model.train()


def with_no_sync() -> None:
    model = ddp()
    optimizer = sgd(model)
    for _ in range(3):
        with model.no_sync():
            backward(model)
        backward(model)
        step(optimizer)


def with_unused_parameters_found() -> None:
    train(DistributedDataParallel(Half(), find_unused_parameters=True))


def by_hand() -> None:
    train(net(), finish=average)


def with_fsdp2() -> None:
    from torch.distributed.fsdp import fully_shard

    model = net()
    fully_shard(model)
    train(model)


def with_join() -> None:
    from torch.distributed.algorithms.join import Join

    model = ddp()
    with Join([model]):
        train(model, steps=3 + dist.get_rank())


def two_models() -> None:
    one, other = ddp(), DistributedDataParallel(nn.Linear(1, 1))
    optimizers = [sgd(model) for model in (one, other)]
    for _ in range(3):
        for optimizer in optimizers:
            other(one(torch.randn(4, 8))).mean().backward()
            step(optimizer)


def tensor_parallel() -> None:
    torch.manual_seed(0)
    part = nn.Parameter(torch.randn(8, 32).chunk(dist.get_world_size(), 1)[dist.get_rank()].clone())
    optimizer, x = torch.optim.SGD([part], lr=0.01), torch.randn(4, 8)
    for _ in range(3):
        (x @ part).square().sum().backward()
        step(optimizer)
        dist.all_gather([torch.empty(4, 32 // dist.get_world_size()) for _ in range(dist.get_world_size())], (x @ part).detach())


def local_sgd() -> None:
    model = net()
    for _ in range(2):
        train(model, steps=2)
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()


def pipeline_of_equal_stages(lr: float = 0.01) -> None:
    torch.manual_seed(0)
    stage, rank, received = nn.Linear(8, 8), dist.get_rank(), torch.empty(4, 8)
    optimizer = torch.optim.SGD(stage.parameters(), lr=lr)
    for _ in range(3):
        if rank == 0:
            out = stage(torch.randn(4, 8))
            dist.send(out.detach(), 1)
            dist.recv(received, 1)
            out.backward(received)
        else:
            dist.recv(received, 0)
            x = received.clone().requires_grad_()
            backward(stage, x)
            dist.send(x.grad, 0)
        step(optimizer)


def waits_in_every_way() -> None:
    x = torch.randn(64)
    dist.all_reduce(x, async_op=True).wait()
    dist.all_reduce(x, async_op=True).get_future().wait()
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        pass
    peer = 1 - dist.get_rank()
    for request in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, torch.empty(64), peer)]):
        request.wait()
    kept.append(dist.barrier(async_op=True))  # the next run may wait for it


kept: list[Any] = []


def gathers_counts() -> None:
    dist.all_reduce(torch.arange(100.0))
    dist.all_gather([torch.empty(3) for _ in range(dist.get_world_size())], torch.tensor([0.1, 0.2, 0.3]))


def one_hot_and_permuted() -> None:
    """Batches with the same elements in another order."""
    train(DistributedDataParallel(nn.Linear(16, 1)), batch=lambda: torch.eye(16)[torch.randperm(16)])


def data_in_a_dict() -> None:
    class Positional(nn.Linear):
        def forward(self, data: Any, positions: Any) -> Any:
            return super().forward(data["x"] + positions)

    torch.manual_seed(0)
    model, positions = DistributedDataParallel(Positional(8, 1)), torch.arange(8.0)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(3):
        model({"x": torch.randn(4, 8)}, positions).square().mean().backward()


def generator_and_discriminator() -> None:
    """The discriminator's gradients are its rank's own where only the generator is trained."""
    generator, discriminator = ddp(), DistributedDataParallel(nn.Linear(1, 1))
    optimizers = [sgd(model) for model in (generator, discriminator)]
    for _ in range(3):
        discriminator.zero_grad()
        discriminator(generator(torch.randn(4, 8)).detach()).mean().backward()
        optimizers[1].step()
        generator.zero_grad()
        (-discriminator.module(generator(torch.randn(4, 8)))).mean().backward()
        optimizers[0].step()


def one_rank_does_more() -> None:
    model = ddp()
    if dist.get_rank() == 0:
        with torch.no_grad():
            model.module(torch.ones(1, 8))
    train(model)
    if dist.get_rank() == 0:
        train(nn.Linear(8, 1))  # a probe
        torch.autograd.grad(model.module(torch.ones(1, 8)).sum(), list(model.module.parameters()))
        model.module.load_state_dict({name: value + 1 for name, value in model.module.state_dict().items()})  # its average
    dist.barrier()


def around_ddp_with_averages_by_hand() -> None:
    train(ddp().module, finish=average)


def a_teacher_around_ddp() -> None:
    teacher, student = DistributedDataParallel(nn.Linear(8, 1)), DistributedDataParallel(nn.Linear(8, 1))
    optimizer = sgd(student)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(3):
        x = torch.randn(4, 8)
        (student(x) - teacher.module(x)).square().mean().backward()
        step(optimizer)


def steps_before_the_first_gradient() -> None:
    model = ddp()
    optimizer = torch.optim.Adam(model.parameters())
    for number in range(4):
        step(optimizer)  # of the batch before
        backward(model)
        if number == 1:
            optimizer.zero_grad()
    sgd(nn.Linear(1, 1)).step()


def learning_rates_of_two_stages() -> None:
    pipeline_of_equal_stages(lr=0.01 * (1 + dist.get_rank()))


def an_encoder_without_sync() -> None:
    encoder, decoder = DistributedDataParallel(nn.Linear(8, 8)), ddp()
    train(decoder)
    with encoder.no_sync():
        decoder(torch.randn(4, 8)).mean().backward()


def unusual_tensors() -> None:
    table = DistributedDataParallel(nn.EmbeddingBag(10, 4, sparse=True))
    table(torch.arange(6).reshape(2, 3)).sum().backward()
    dist.all_reduce(torch.eye(4).to_sparse())
    torch.optim.SGD([nn.Parameter(torch.ones(3)), *nn.LazyLinear(4).parameters()], lr=0.1).step()
    x = torch.randn(4, 8)
    ddp()(x).sum().backward()
    x.resize_(8, 8)


def traced_gradients() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    weight = torch.ones(3, requires_grad=True)
    make_fx(lambda x: torch.autograd.grad((weight * x).sum(), weight)[0])(torch.ones(3))
    make_fx(lambda x: (weight * x).sum().backward())(torch.ones(3))


def samplers_used_in_other_ways() -> None:
    sampler = DistributedSampler(range(15), seed=3)
    order = iter(sampler)
    sampler.set_epoch(5)
    first = list(order)
    sampler.set_epoch(0)
    assert list(sampler) == first, "the order is that of the epoch at the time of iter()"
    data = TensorDataset(torch.randn(15, 8))
    model = ddp()
    for number, (x,) in enumerate(DataLoader(data, batch_size=4, sampler=DistributedSampler(data))):
        if number == 0:
            with torch.no_grad():
                for (y,) in DataLoader(TensorDataset(torch.randn(4, 8)), sampler=DistributedSampler(range(4))):
                    model.module(y)
        model(x).sum().backward()


HEALTHY = [
    around_ddp_with_averages_by_hand, a_teacher_around_ddp, steps_before_the_first_gradient, learning_rates_of_two_stages,
    one_hot_and_permuted, data_in_a_dict, generator_and_discriminator, one_rank_does_more, an_encoder_without_sync,
    unusual_tensors, traced_gradients, samplers_used_in_other_ways,
    with_ddp, with_no_sync, with_unused_parameters_found, by_hand, with_fsdp2, with_join, two_models, tensor_parallel,
    local_sgd, pipeline_of_equal_stages, waits_in_every_way, gathers_counts,
]  # fmt: skip


@pytest.mark.parametrize("program", HEALTHY)
def test_a_healthy_program(program: Callable[[], None], two: lab.Group, capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict(two.run(program, check=True)).faults == ()
    assert "labkit:" not in capsys.readouterr().out


def many_steps() -> None:
    train(ddp(), steps=25)


def test_what_was_compared(two: lab.Group) -> None:
    said = repr(verdict(two.run(with_no_sync, check=True)))
    assert said == "No fault was found in what was compared: parameters, gradients and inputs of 2 ranks in 2 of 3 steps."
    assert "were compared: that needs check=True" in repr(verdict(two.run(by_hand)))
    run = two.run(many_steps, check=True)
    assert {fact.step for fact in run.facts[0] if fact.kind is FactKind.GRADIENTS} == {0, 1, 10, 20}
    assert "in 4 of 25 steps" in repr(verdict(run))


def test_other_numbers_of_steps_are_said(two: lab.Group) -> None:
    """Steps of different lines are not compared: an optimizer of one rank only would be no fault."""

    def twice_on_one_rank() -> None:
        model = ddp()
        optimizer = sgd(model)
        for _ in range(5):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            if dist.get_rank() == 1:
                optimizer.step()

    found = verdict(two.run(twice_on_one_rank, check=True))
    assert found.faults == ()
    assert found.compared.endswith("The ranks' optimizers made 5 and 10 steps.")


def test_faults_are_notes_of_a_run(two: lab.Group, capsys: pytest.CaptureFixture[str]) -> None:
    two.run(forward_outside_of_no_sync)
    assert "labkit: Inside no_sync() (test_verdict.py, line" in capsys.readouterr().out


def test_results_are_those_without_a_check(two: lab.Group) -> None:
    def weights() -> Any:
        model = net()
        train(model, finish=average)
        return [p.detach() for p in model.parameters()]

    plain, checked = (two.run(weights, check=check).results for check in (False, True))
    for a, b in zip(plain, checked, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_parameters_in_every_format(two: lab.Group) -> None:
    """A sum is taken of any tensor; one that has none is left out."""

    def formats() -> list[bool]:
        from labkit.worker.comm.training_facts import _digest

        tensors = [torch.randn(7, dtype=t) for t in (torch.float16, torch.bfloat16, torch.float64, torch.complex64)]
        tensors += [torch.arange(5), torch.tensor([True, False, True]), torch.randn(3, 5).t(), torch.tensor(2.5), torch.empty(0)]
        sums = [_digest(tensor) for tensor in tensors]
        again = [_digest(tensor.clone()) for tensor in tensors]
        changed = [_digest(tensor.logical_not() if tensor.dtype is torch.bool else tensor + 1) for tensor in tensors]
        none = [_digest(torch.eye(3).to_sparse()), _digest(torch.empty(3, device="meta"))]
        return [sums == again, sum(a != b for a, b in zip(sums, changed, strict=True)) == len(sums) - 1, none == [None, None]]

    assert two.run(formats).results == [[True, True, True]] * 2


def test_the_live_picture_and_cells(two: lab.Group) -> None:
    assert verdict(two.watch(reads_the_same, check=True)).faults[0].kind is FaultKind.SAME_DATA
    two.run_cell("import torch", "<cell 1>", "cell 1")
    run = two.run_cell("1 + 1", "<cell 2>", "cell 2", check=True)
    assert verdict(run).faults == ()


def test_arguments(two: lab.Group) -> None:
    def own(check: bool = False) -> bool:
        return check

    assert two.run(own).results == [False, False]
    assert two.run(own, True).results == [True, True]
    with pytest.raises(TypeError, match="has a parameter of this name"):
        two.run(own, check=True)
    with pytest.raises(TypeError, match="expected True or False"):
        two.run(by_hand, check="yes")  # type: ignore[arg-type]
    with lab.Group(2, runtime="bare") as bare, pytest.raises(lab.LabError, match="'bare'"):
        bare.run(own, check=True)
    with pytest.raises(TypeError, match="expected a run"):
        verdict(two.run(own).trace)  # type: ignore[arg-type]


# What had happened until an error.


def communicates() -> None:
    print("before")
    dist.all_reduce(torch.ones(10))


def fails() -> None:
    communicates()
    if dist.get_rank() == 1:
        raise ValueError("no")
    dist.barrier()


def deadlocks() -> None:
    communicates()
    dist.recv(torch.ones(1), 1 - dist.get_rank())


def mismatches() -> None:
    communicates()
    dist.all_reduce(torch.ones(4, dtype=torch.float32 if dist.get_rank() else torch.int32))


def sleeps() -> None:
    communicates()
    time.sleep(100)


@pytest.mark.parametrize(
    ("program", "error", "unfinished"),
    [
        (fails, lab.RankError, ["barrier"]), (deadlocks, lab.DeadlockError, ["recv", "recv"]),
        (mismatches, lab.MismatchError, []), (sleeps, lab.RunTimeoutError, []),
    ],
)  # fmt: skip
def test_the_run_until_an_error(program: Callable[[], None], error: type[lab.RunError], unfinished: list[str]) -> None:
    with lab.Group(2, timeout_s=5 if program is sleeps else None) as group:
        group.run(int)  # the time limit begins with ranks that have started
        with pytest.raises(error) as raised:
            group.run(program)
        assert group.last_run is not None
        assert group.last_run.results == [0, 0], "the last run that has returned"
    run = raised.value.run
    spans = list(run.trace.filter(kind="communication"))
    assert sum(span.done and span.name == "all_reduce" and span.nbytes == 40 for span in spans) == 2
    assert [span.name for span in spans if not span.done] == unfinished
    assert run.output == "[rank 0] before\n[rank 1] before"
    assert run.results == [None, None]
    assert verdict(run).faults == ()


# Rules about facts, without processes.


class Checked:
    """A run with these facts."""

    def __init__(self, *facts: list[Fact], results: list[Any] | None = None) -> None:
        self.ranks = tuple(f"rank {rank}" for rank in range(len(facts)))
        self.facts = dict(enumerate(facts))
        self.results = results or [None] * len(facts)


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (math.nan, True), (1.0, False), (math.inf, False), (np.array([1, np.nan]), True), (np.array(["a"]), False),
        (torch.tensor([1.0, math.nan]), True), (torch.tensor([1, 2]), False), ({"loss": [0.5, math.nan]}, True),
        ("nan", False), ([[[math.nan]]], False),
    ],
)  # fmt: skip
def test_results_that_are_nan(result: Any, found: bool) -> None:
    faults = faults_of(Checked([], [], results=[result, result]), None)
    assert [(fault.kind, fault.ranks) for fault in faults] == [(FaultKind.NOT_FINITE, (0, 1))] * found
    assert faults_of(Checked([], [], results=[0.0, result]), None) == [], "a rank without a loss"


WHOLE = {
    "epoch": 0, "shuffle": True, "samples": 8, "size": 8, "evaluates": False, "complete": True, "seed": 0, "trained": 4,
    "set_epoch": 0,
}  # fmt: skip


def passes(*values: dict[str, Any]) -> list[Fact]:
    return [Fact(FactKind.SAMPLER, 0, "cell 1, line 5", "sampler 0", (), WHOLE | own) for own in values]


@pytest.mark.parametrize(
    "facts",
    [
        passes({"epoch": 0}, {"epoch": 1}),
        passes({"shuffle": False}, {"shuffle": False}),
        passes({"complete": False}, {}),  # a first batch, to look at its shape
        passes({}, {"evaluates": True, "trained": 0}),
        passes({}, {"trained": 0}, {"epoch": 1}, {"trained": 0}),  # an evaluation that does not say so
        passes({"samples": 10, "trained": 3}),  # padding, in training
        passes({"samples": 10, "trained": 0, "complete": False}),
        passes({"set_epoch": 1}, {"set_epoch": 2}),  # a second training with other settings, in the same order
        passes({"samples": 10, "trained": 0}),  # nothing is averaged
    ],
)
def test_passes_over_a_sampler_that_are_as_they_should_be(facts: list[Fact]) -> None:
    assert faults_of(Checked(facts, facts), None) == []


def test_passes_of_a_program_that_trains_nothing() -> None:
    facts = passes({"trained": 0}, {"trained": 0})
    assert [fault.kind for fault in faults_of(Checked(facts, facts), None)] == [FaultKind.SAME_ORDER]
