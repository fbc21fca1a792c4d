"""The phases of training and the steps of programs without a `lab.` call."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import labkit as lab
from labkit.group.group import Group
from labkit.group.run import Run
from labkit.tracing.load import load_trace
from labkit.tracing.trace import Trace

pytestmark = pytest.mark.processes

STEPS = 4


@pytest.fixture(scope="module")
def one() -> Iterator[Group]:
    with Group(1) as group:
        yield group


@pytest.fixture(scope="module")
def pair() -> Iterator[Group]:
    with Group(2) as group:
        yield group


def batches(steps: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return [(torch.randn(8, 16), torch.randn(8, 4)) for _ in range(steps)]


class Network(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def network() -> nn.Module:
    torch.manual_seed(1)
    return Network()


def phases(run: Run | Trace, rank: int = 0) -> dict[str, int]:
    """How often each phase was recorded on a rank."""
    trace = run if isinstance(run, Trace) else run.trace
    return dict(Counter(span.name for span in trace.filter(rank=rank, kind="compute")))


def in_order(run: Run) -> str:
    """The first letters of the phases of rank 0, in order of their start."""
    return "".join(span.name[0] for span in run.trace.filter(rank=0, kind="compute"))


def plain(compiled: str = "", *, fullgraph: bool = False) -> float:
    warnings.simplefilter("error")  # torch warns where global hooks meet `torch.compile`
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message="Guards may run slower on Python 3.13.0")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fast: Any = torch.compile(model, backend=compiled, fullgraph=fullgraph) if compiled else model
    for x, y in batches():
        optimizer.zero_grad()
        loss = mse_loss(fast(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()


def test_a_plain_loop_shows_its_phases_its_lines_and_its_steps(one: Group) -> None:
    run = one.run(plain)
    assert in_order(run) == "fbo" * STEPS, "of a model, not of its layers"
    assert all(span.automatic for span in run.trace.filter(kind="compute"))
    first = plain.__code__.co_firstlineno
    assert {span.name: span.line for span in run.trace.filter(kind="compute")} == {
        name: f"test_phases.py, line {first + 9 + i}" for i, name in enumerate(("forward", "backward", "optimizer"))
    }
    assert len(run.trace.step_bounds()) == STEPS
    assert lab.step_ms(run) > 0
    ends = [span.end_ns for span in run.trace.filter(name="optimizer")]
    assert all(0 <= bound - end < 10**9 for bound, end in zip(run.trace.step_bounds()[:, 1], ends, strict=True))
    assert f"step {STEPS - 1}" in lab.timeline(run, step=-1).get_title(loc="left")


UNTOLD: Final = pytest.mark.xfail(
    torch.__version__ < "2.12", strict=True, reason="before torch 2.12, is_compiling() is false in the compiler's own pass"
)


@pytest.mark.parametrize(
    ("backend", "fullgraph"), [("eager", False), ("eager", True), pytest.param("aot_eager", False, marks=UNTOLD)]
)
def test_a_compiled_model_is_recorded_and_computes_the_same(one: Group, backend: str, fullgraph: bool) -> None:
    run = one.run(plain, backend, fullgraph=fullgraph)
    assert in_order(run) == "fbo" * STEPS, "the compiler's own backward pass, as by aot_eager, is not the program's"
    assert run.results == one.run(plain).results


def graphs(kind: str) -> tuple[list[int], int]:
    """Compile a model, or a function around it, train it, and return the sizes of torch's graphs and how many broke."""
    from torch._dynamo.utils import counters

    sizes = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        sizes.append(len(list(graph.graph.nodes)))
        return graph.forward

    torch._dynamo.reset()
    counters.clear()
    model: Any = network()
    if kind == "of layers":
        model = nn.Sequential(network(), nn.Linear(4, 4))
    if kind == "under DDP":  # the layers do not fit into one bucket
        model = nn.Sequential(network(), nn.Linear(4, 512), nn.Linear(512, 1024), nn.Linear(1024, 4))
        model = DistributedDataParallel(model, bucket_cap_mb=1)
    if kind == "with a hook":
        model.register_forward_hook(lambda *_: None)
    if kind == "compiles itself":
        model.compile(backend=keep, fullgraph=True)

    def around(x: torch.Tensor) -> Any:
        return model(x).sum()

    if kind == "compiles itself":
        fast = model
    else:
        fast = torch.compile(around if kind == "in a function" else model, backend=keep)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, _ in batches():
        fast(x).sum().backward()
        optimizer.step()
    return sizes, len(counters["graph_break"])


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", ["of layers", "with a hook", "compiles itself", "in a function", "under DDP"])
def test_the_wrappers_are_no_part_of_a_graph(one: Group, kind: str) -> None:
    run = one.run(graphs, kind)
    assert run.results == [graphs(kind)], "this process has no wrappers"
    assert phases(run).get("forward", 0) == (0 if kind == "in a function" else STEPS)
    assert len(run.trace.step_bounds()) == STEPS


def data_parallel(workers: int) -> None:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.Adam(model.parameters())
    loss_function = nn.MSELoss()
    everything = TensorDataset(*(torch.cat(parts) for parts in zip(*batches(), strict=True)))
    for x, y in DataLoader(everything, batch_size=8, num_workers=workers):
        optimizer.zero_grad()
        loss_function(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("workers", [0, 1])
def test_ddp_with_a_data_loader(pair: Group, workers: int) -> None:
    run = pair.run(data_parallel, workers)
    for rank in (0, 1):
        found = phases(run, rank)
        # The loader's start, each batch, and its end. The loss is a module, too.
        assert found == {"data": STEPS + 2, "forward": 2 * STEPS, "backward": STEPS, "optimizer": STEPS}
        backward = run.trace.filter(rank=rank, name="backward").spans
        reduced = run.trace.filter(rank=rank, name="all_reduce").spans
        inside = [r for r in reduced if any(b.start_ns <= r.start_ns <= b.end_ns for b in backward)]
        assert len(inside) >= STEPS, "gradients are reduced during the backward pass"
    assert len(run.trace.step_bounds()) == STEPS


def sharded() -> None:
    model = network()
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    for x, y in batches():
        mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_fsdp(pair: Group) -> None:
    run = pair.run(sharded)
    assert in_order(run) == "fbo" * STEPS
    gathers = run.trace.filter(rank=0, name="all_gather_into_tensor").spans
    computing = run.trace.filter(rank=0, kind="compute").spans
    around = {span.name for g in gathers for span in computing if span.start_ns <= g.start_ns <= span.end_ns}
    assert around == {"forward", "backward"}


def redundancy_free() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    for x, y in batches():
        mse_loss(model(x), y).backward()
        optimizer.step()


def test_an_optimizer_inside_another_is_not_recorded(pair: Group) -> None:
    assert phases(pair.run(redundancy_free))["optimizer"] == STEPS


class Block(nn.Module):
    """A layer whose first part is computed again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.last, self.reentrant = network(), nn.Linear(4, 4), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.last(checkpoint(self.inner, x, use_reentrant=self.reentrant))
        return made


def recomputing(reentrant: bool) -> None:
    model = Block(reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        mse_loss(model(x.requires_grad_()), y).backward()
        optimizer.step()


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_told_from_forward(one: Group, reentrant: bool) -> None:
    run = one.run(recomputing, reentrant)
    assert in_order(run) == "fbro" * STEPS
    assert phases(run)["recomputation"] == STEPS


def adversarial() -> None:
    generator, critic = nn.Linear(4, 16), nn.Linear(16, 1)
    of_generator, of_critic = (torch.optim.Adam(m.parameters()) for m in (generator, critic))
    for x, _ in batches():
        fake = generator(torch.randn(8, 4))
        of_critic.zero_grad()
        (critic(fake.detach()).mean() - critic(x).mean()).backward()
        of_critic.step()
        of_generator.zero_grad()
        (-critic(fake).mean()).backward()
        of_generator.step()


def test_two_optimizers_make_one_step(one: Group) -> None:
    run = one.run(adversarial)
    assert in_order(run) == "fffbofbo" * STEPS
    assert len(run.trace.step_bounds()) == STEPS


def accumulating(micro_batches: int) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(batches(STEPS * micro_batches)):
        mse_loss(model(x), y).backward()
        if (i + 1) % micro_batches == 0:
            optimizer.step()
            optimizer.zero_grad()


def test_accumulated_micro_batches_make_one_step(one: Group) -> None:
    run = one.run(accumulating, 3)
    assert in_order(run) == "fbfbfbo" * STEPS
    assert len(run.trace.step_bounds()) == STEPS


def closures() -> None:
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    for x, y in batches():

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]  # a tensor, as in torch's documentation


def test_passes_inside_an_optimizer_are_recorded(one: Group) -> None:
    run = one.run(closures)
    found = phases(run)
    assert found["optimizer"] == STEPS
    assert found["forward"] == found["backward"] > STEPS
    assert len(run.trace.step_bounds()) == STEPS


def failing_step() -> None:
    failing = torch.optim.SGD(network().parameters(), lr=0.1)

    def fails() -> float:
        raise ValueError("no loss")

    for _ in range(2):
        try:
            failing.step(fails)
        except ValueError:
            plain()


def test_an_optimizer_that_failed_hides_no_other(one: Group) -> None:
    assert phases(one.run(failing_step)) == {"forward": 2 * STEPS, "backward": 2 * STEPS, "optimizer": 2 * STEPS}


class Twice(torch.optim.SGD):
    """An optimizer that steps by two steps of its base class."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        return super().step(closure)


def stepping_twice() -> None:
    torch.optim.SGD([nn.Parameter(torch.ones(1))])  # torch calls its hooks in the base class, too, once it has been used
    model = network()
    optimizer = Twice(model.parameters(), lr=0.1)
    for x, y in batches():
        mse_loss(model(x), y).backward()
        optimizer.step()


def test_a_step_that_calls_those_of_its_base_class_is_one(one: Group) -> None:
    run = one.run(stepping_twice)
    assert in_order(run) == "fbo" * STEPS
    assert len(run.trace.step_bounds()) == STEPS


def scheduled() -> None:
    optimizers = [torch.optim.SGD(network().parameters(), lr=0.1) for _ in range(2)]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in optimizers]
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    optimizers[0].step()
    optimizers[1].step()
    for optimizer in optimizers:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.zeros_like(parameter)
    scaler.scale(torch.ones(()))
    scaler.step(optimizers[0])
    scaler.step(optimizers[1])
    for scheduler in schedulers:
        scheduler.step()


def test_the_line_of_a_step_is_the_programs_however_many_wrappers_it_has(one: Group) -> None:
    lines = [span.line for span in one.run(scheduled).trace.filter(name="optimizer")]
    first = scheduled.__code__.co_firstlineno
    assert lines == [f"test_phases.py, line {first + offset}" for offset in (4, 5, 10, 11)]


def created_anew() -> None:
    model = network()
    for x, y in batches():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mse_loss(model(x), y).backward()
        optimizer.step()


def test_an_optimizer_for_each_step_makes_as_many_steps(one: Group) -> None:
    assert len(one.run(created_anew).trace.step_bounds()) == STEPS


def gradient_of_an_input() -> None:
    critic = nn.Linear(16, 1)
    for x, _ in batches():
        (slope,) = torch.autograd.grad(critic(x.requires_grad_()).sum(), x, create_graph=True)
        slope.norm().backward()


def test_gradients_of_inputs_are_backward_passes(one: Group) -> None:
    run = one.run(gradient_of_an_input)
    assert in_order(run) == "fbb" * STEPS
    assert len(run.trace.step_bounds()) == 0, "no optimizer, no step"


def own_spans(step: Callable[..., Any]) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in step(batches()):
        with lab.span("prediction"):
            output = model(x)
        mse_loss(output, y).backward()
        with lab.span("update"):
            optimizer.step()


def test_the_programs_own_spans_and_steps_take_precedence(one: Group) -> None:
    assert phases(one.run(own_spans, list)) == {"prediction": STEPS, "backward": STEPS, "update": STEPS}
    without, marked = (one.run(own_spans, step).trace for step in (list, lab.steps))
    assert [span.automatic for span in without.filter(kind="step")] == [True] * STEPS
    assert [span.automatic for span in marked.filter(kind="step")] == [False] * STEPS
    assert len(marked.filter(kind="step")) == STEPS


def forking() -> list[str]:
    """A child that computes after a fork records nothing into its parent's ring."""
    child = os.fork()
    if not child:
        for _ in range(3):  # one more than the parent, which would overwrite as many
            network()(torch.ones(1, 16))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    network()(torch.ones(1, 16))
    return []


def test_a_forked_child_records_nothing(one: Group) -> None:
    assert phases(one.run(forking)) == {"forward": 1}


def converted() -> None:
    """What torch makes of modules: none of it may meet the wrapper's code."""
    x = torch.ones(2, 16)
    made = [
        torch.jit.script(network()),
        torch.jit.trace(network(), x),
        torch.export.export(network(), (x,)).module(),
        torch.fx.symbolic_trace(network()),
        torch.func.vmap(network()),
    ]
    for module in made:
        assert torch.equal(module(x), network()(x))


def test_modules_can_be_converted(one: Group) -> None:
    one.run(converted)


SCRIPT = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.ones(8, 16)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_a_recorded_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "labkit", str(script)]
    subprocess.run(command, env=os.environ | {"LABKIT_TRACE": str(tmp_path / "trace")}, check=True, timeout=120)
    trace = load_trace(tmp_path / "trace")
    for rank in (0, 1):
        assert phases(trace, rank) == {"forward": 4, "backward": 4, "optimizer": 4}
    assert len(trace.step_bounds()) == 4


def test_data_loaded_by_a_thread_of_its_own(one: Group) -> None:
    def train() -> None:
        model, loaded = Network(), queue.SimpleQueue()

        def load() -> None:
            for x, _ in DataLoader(TensorDataset(*batches(1)[0]), batch_size=4):
                loaded.put(x)

        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
        model(loaded.get()).sum().backward()

    run = one.run(train)
    threads = {(s.name, s.own_thread) for s in run.trace.filter(kind="compute")}
    assert threads == {("data", True), ("forward", False), ("backward", False)}
