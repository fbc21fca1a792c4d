"""What fills a rank's memory: compared with arithmetic by hand and torch's own tracker."""

import gc
import itertools
import mmap
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.functional import mse_loss

import labkit as lab
from labkit.plots.memory import memory_uses
from labkit.recording.record import Recorder, here
from labkit.recording.ring_buffer import RING_BYTES, RingReader, RingWriter
from labkit.recording.schema import MEMORY, MEMORY_KINDS
from labkit.tracing.load import load_trace
from labkit.tracing.trace import from_records
from labkit.worker.comm.memory_tracker import Tracker, track_memory


@pytest.fixture
def rank():
    """This process as a rank; `rank.usage()` returns its recorded values by kind, in order."""
    ring = mmap.mmap(-1, RING_BYTES)
    reader = RingReader(ring)
    here.start(Recorder(RingWriter(ring)))

    def trace():
        records = reader.read()
        return from_records([records], [reader.names()], ["rank 0"])

    def usage():
        curves = {}
        for scalar in trace().scalars:
            curves.setdefault(scalar.name.removeprefix(MEMORY), []).append(scalar.value)
        return curves

    yield SimpleNamespace(trace=trace, usage=usage, ring=here.recorder.ring)
    here.start(None)


BATCH, WIDTHS = 32, (64, 128, 10)


def mlp():
    torch.manual_seed(0)
    first, hidden, last = WIDTHS
    return nn.Sequential(nn.Linear(first, hidden), nn.ReLU(), nn.Linear(hidden, last))


def count(model):
    return sum(p.numel() for p in model.parameters())


def loss_of(model):
    return mse_loss(model(torch.ones(BATCH, WIDTHS[0])), torch.zeros(BATCH, WIDTHS[-1]))


def test_an_mlp_with_adam_by_hand(rank):
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    with track_memory(model, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
    n, (first, hidden, last) = count(model), WIDTHS
    usage = rank.usage()
    assert set(usage["parameters"]) == {4 * n}
    assert max(usage["gradients"]) == usage["gradients"][-1] == 4 * n
    assert 0 in usage["gradients"]  # zero_grad frees them
    # Two moments, and for each of the four parameters the number of steps, in four bytes.
    assert usage["optimizer state"][-1] == 2 * 4 * n + 4 * 4
    # The first layer keeps the batch; ReLU and the second layer the hidden values, once; the loss what it compares.
    assert max(usage["activations"]) == 4 * BATCH * (first + hidden + 2 * last)
    assert usage["activations"][-1] == 0
    assert set(usage) == {"parameters", "gradients", "optimizer state", "activations"}


def test_existing_memory_is_one_point_however_long_it_takes(rank):
    model, clock = mlp(), itertools.count(0, 10**9)
    with Tracker(rank.ring, [model], [], now=lambda: next(clock)).following():
        loss_of(model).backward()
    assert set(rank.usage()["parameters"]) == {4 * count(model)}


def test_it_agrees_with_torchs_own_tracker(rank):
    kinds = {"parameters": "Parameter", "gradients": "Gradient", "optimizer state": "Optstate"}
    theirs = {}
    for own in (True, False):
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters())
        tracker = track_memory(model) if own else MemTracker()
        with tracker:
            loss_of(model).backward()
            optimizer.step()
            if not own:
                snapshot = tracker.get_tracker_snapshot()[torch.device("cpu")]
                theirs = {kind.value: value for kind, value in snapshot.items() if kind != "Total"}
    usage = rank.usage()
    assert {kind: usage[kind][-1] for kind in kinds} == {kind: theirs[name] for kind, name in kinds.items()}


def test_nothing_counts_twice(rank):
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16, affine=False))
    model.append(model[0])  # a layer that is used twice
    data = torch.ones(1000, 16)
    with track_memory(model, model):
        kept = model(data[8:16])
        model(data[8:16])  # the same part of the data again; its graph is gone at once
    usage = rank.usage()
    assert usage["parameters"][-1] == 4 * (16 * 16 + 2 * 16) + 8  # the layer, the two buffers, and how many batches there were
    # The part of the data that is kept, not all of it; what BatchNorm takes and gives; its mean and deviation of the
    # batch.
    assert usage["activations"][-1] == 4 * (8 * 16 + 2 * 8 * 16 + 2 * 16)
    del kept


def test_gradients_in_buckets_and_existing_states(rank):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    loss_of(model).backward()
    optimizer.step()
    bucket = torch.zeros(count(model))
    for p, part in zip(model.parameters(), bucket.split([p.numel() for p in model.parameters()]), strict=True):
        p.grad = part.view_as(p)
    with track_memory(model, optimizer):
        pass
    usage = rank.usage()
    assert usage["gradients"] == usage["optimizer state"] == [4 * count(model)] * len(usage["gradients"])


def test_other_is_the_rest_of_the_allocators_memory(rank):
    """On CUDA. Here the allocator is simulated."""
    model, held = mlp(), itertools.count(500_000, 1000)
    with Tracker(rank.ring, [model], [], allocated=lambda: next(held), now=itertools.count(step=10**9).__next__).following():
        loss_of(model).backward()
    by_time = {}
    for scalar in rank.trace().scalars:
        by_time.setdefault(scalar.time_ns, {})[scalar.name] = scalar.value
    first, *_ = by_time.values()
    assert sum(first.values()) == 500_000
    last = list(by_time.values())[-1]
    assert sum(last.values()) == next(held) - 1000


def test_points_are_thinned_but_peaks_are_kept(rank):
    now = itertools.count(0, 1000).__next__  # a thousand counts take a millisecond
    tracker = Tracker(rank.ring, [], [], now=now)
    with tracker.following():
        for _ in range(3):
            for _ in range(1037):
                tracker.count("activations", 8)
            for _ in range(1037):
                tracker.count("activations", -8)
    values = rank.usage()["activations"]
    assert values.count(8 * 1037) == 3
    assert 20 < len(values) < 80


def test_an_inplace_change_of_a_saved_tensor_is_still_an_error(rank):
    x = torch.ones(3, requires_grad=True)
    with track_memory(nn.Linear(1, 1)):
        y = x.exp()
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_gradients_are_unchanged_by_tracking(rank):
    def gradients():
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(3), nn.Dropout())
        torch.manual_seed(1)
        model(torch.ones(2, 1, 8, 8))
        return model

    model = gradients()
    found = []
    for follow in (True, False):
        torch.manual_seed(2)
        model.zero_grad()
        with track_memory(model) if follow else torch.enable_grad():
            loss = model(torch.ones(2, 1, 8, 8)).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_afterwards_nothing_is_recorded_and_nothing_is_kept_alive(rank):
    model = mlp()
    with track_memory(model):
        loss = loss_of(model)
    rank.trace()
    loss.backward()
    del loss
    gc.collect()
    assert not rank.trace().scalars
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters() if p._post_accumulate_grad_hooks is not None)
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in model.modules())


def test_outside_a_group_it_does_nothing():
    with lab.track_memory("anything"):
        pass


@pytest.mark.parametrize("wrong", [(), ("model",), (mlp(), "optimizer"), (torch.optim.SGD(mlp().parameters()),)])
def test_it_expects_modules(rank, wrong):
    with pytest.raises(TypeError, match=r"track_memory\(.*expected modules and optimizers, as in track_memory\(model, optim"):
        track_memory(*wrong)


LAYERS, WIDTH, ROWS = 4, 64, 8
WHOLE = 4 * LAYERS * WIDTH * WIDTH  # bytes of all parameters


@pytest.fixture(scope="module")
def two_ranks():
    with lab.Group(2, devices="cpu") as group:
        yield group


def sharded(one_group, reshard, make_optimizer, steps=2):
    """Some steps of a model whose layers FSDP2 gathers all at once, or each by itself."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for layer in () if one_group else model:
        fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    optimizer = make_optimizer(model.parameters())
    with lab.track_memory(model, optimizer):
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(torch.ones(ROWS, WIDTH)).sum()
            lab.record(forward_is_over=1)
            loss.backward()
            lab.record(backward_is_over=1)
            optimizer.step()


def at(run, name):
    """The memory of rank 0 by kind at the last record."""
    usage = memory_uses(run.trace)[0]
    moment = [s.time_ns for s in run.trace.scalars if s.name == name and s.rank == 0][-1]
    values = usage.nbytes[:, np.searchsorted(usage.time_ns, moment) - 1].tolist()
    return {kind: value for kind, value in zip(MEMORY_KINDS, values, strict=True) if value}


@pytest.mark.parametrize("make_optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
@pytest.mark.parametrize("one_group", [True, False], ids=["one group", "a group per layer"])
@pytest.mark.processes
def test_gathered_parameters_disappear_when_fsdp_frees_them(two_ranks, one_group, reshard, make_optimizer, tmp_path):
    run = two_ranks.run(sharded, one_group, reshard, make_optimizer)
    # Two moments, and for each parameter the number of steps, in four bytes.
    state = {"optimizer state": WHOLE + 4 * LAYERS} if make_optimizer is torch.optim.AdamW else {}
    stays = {"parameters": WHOLE / 2} | state
    activations = {"activations": 4 * LAYERS * ROWS * WIDTH}
    kept = {} if reshard else {"gathered parameters": WHOLE}
    assert at(run, "forward_is_over") == stays | kept | activations
    assert at(run, "backward_is_over") == stays | {"gradients": WHOLE / 2}
    trace = load_trace(run.trace.save(tmp_path / "trace.json"))
    assert [usage.rank for usage in memory_uses(trace)] == [0, 1]
    for usage in memory_uses(trace):
        gathered = usage.nbytes[MEMORY_KINDS.index("gathered parameters")]
        assert gathered.max() == (WHOLE if one_group or not reshard else WHOLE / LAYERS)
        assert gathered[-1] == 0


@pytest.mark.processes
def test_the_peak_of_a_first_step_with_adamw_is_at_the_optimizer(two_ranks):
    usage = memory_uses(two_ranks.run(sharded, True, True, torch.optim.AdamW, steps=1).trace)[0]
    peak = dict(zip(MEMORY_KINDS, usage.nbytes[:, usage.peak].tolist(), strict=True))
    expected = {"parameters": WHOLE / 2, "gradients": WHOLE / 2, "optimizer state": WHOLE + 4 * LAYERS}
    assert {kind: value for kind, value in peak.items() if value} == expected


@pytest.mark.processes
def test_gathered_parameters_that_fsdp_keeps_count_until_the_backward_pass():
    with lab.Group(4, devices="cpu") as group:
        run = group.run(sharded, True, 2, torch.optim.SGD)
    activations = 4 * LAYERS * ROWS * WIDTH
    assert at(run, "forward_is_over") == {"parameters": WHOLE / 4, "gathered parameters": WHOLE / 2, "activations": activations}
    assert at(run, "backward_is_over") == {"parameters": WHOLE / 4, "gradients": WHOLE / 4}


def replicated(gradient_as_bucket_view):
    """One step under DistributedDataParallel; returns the bytes of the buckets, as torch reports them."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    model[1].requires_grad_(False)
    ddp = nn.parallel.DistributedDataParallel(
        model, bucket_cap_mb=4 * WIDTH**2 / 2**20, gradient_as_bucket_view=gradient_as_bucket_view
    )
    with lab.track_memory(ddp):
        for _ in range(2):  # after the first step, torch divides the gradients into buckets anew
            ddp(torch.ones(ROWS, WIDTH)).sum().backward()
        lab.record(steps_are_over=1)
    data = ddp._get_ddp_logging_data()
    sizes = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
    return sum(map(int, str(sizes).split(",")))


@pytest.mark.parametrize("as_views", [False, True])
@pytest.mark.processes
def test_the_buckets_of_data_parallel_training_count_once(two_ranks, as_views):
    run = two_ranks.run(replicated, as_views)
    trained = 4 * (WIDTH * WIDTH + WIDTH + WIDTH * 3 + 3)
    assert run.results[0] == trained
    kinds = at(run, "steps_are_over")
    assert kinds.get("gradients") == trained
    assert kinds.get("buckets") == (None if as_views else trained)


def tensor_parallel(gathered):
    """One step of a model of two layers that DTensor splits; with `gathered`, its input is split as well."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH, bias=False))
    first = ColwiseParallel(input_layouts=Shard(0) if gathered else Replicate())
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": first, "2": RowwiseParallel()})
    with lab.track_memory(model):
        out = model(torch.ones(ROWS // 2 if gathered else ROWS, WIDTH))
        lab.record(forward_is_over=1)
        out.sum().backward()


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.processes
def test_activations_of_dtensors_are_this_ranks_own(two_ranks, gathered):
    run = two_ranks.run(tensor_parallel, gathered)
    # The first layer keeps the whole input; ReLU and the second layer keep this rank's half of the hidden values, once.
    expected = {"parameters": 4 * 2 * WIDTH * WIDTH, "activations": 4 * ROWS * (WIDTH + WIDTH)}
    assert at(run, "forward_is_over") == expected


def test_shards_that_the_program_keeps_itself(rank):
    """As in ZeRO 3 by hand: the weight is emptied, gathered for use, and its gradient goes to the shard at once."""
    layer = nn.Linear(16, 16, bias=False)
    shard = layer.weight.data.view(-1)[:64].clone()
    layer.weight.untyped_storage().resize_(0)

    def keep_my_part(p):
        shard.grad, p.grad = p.grad.view(-1)[:64].clone(), None
        p.untyped_storage().resize_(0)

    layer.weight.register_post_accumulate_grad_hook(keep_my_part)
    optimizer = torch.optim.SGD([shard], momentum=0.9)
    with track_memory(layer):
        layer.weight.untyped_storage().resize_(4 * 256)
        layer(torch.ones(2, 16)).sum().backward()
        optimizer.step()
    usage = rank.usage()
    assert set(usage["parameters"]) == {4 * 64}
    assert (max(usage["gathered parameters"]), usage["gathered parameters"][-1]) == (4 * 256, 0)
    assert (max(usage["gradients"]), usage["gradients"][-1]) == (4 * 256, 4 * 64)  # the whole one, until it is freed
    assert usage["optimizer state"][-1] == 4 * 64


def test_the_last_change_has_its_own_time(rank):
    now = SimpleNamespace(ns=0)
    tracker = Tracker(rank.ring, [], [], now=lambda: now.ns)
    with tracker.following():
        now.ns = 10
        tracker.count("activations", 8)
        now.ns = 1000
    assert [(s.time_ns, s.value) for s in rank.trace().scalars] == [(10, 8), (1000, 8)]
