"""What a step asks for: transformers by formulas, other modules by counting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import labkit as lab
from labkit.costs.workload import Precision, Workload, module_bytes, workload_of

MIXED = Precision(2, 2, 12, 2)
SINGLE = Precision(4, 4, 8, 4)
SHAPE = lab.Transformer(layers=4, width=128, sequence=64, vocabulary=1000)
# Published counts: model cards and the totals of their safetensors files.
PUBLISHED = {
    "gpt2": 124_439_808, "gpt2_xl": 1_557_611_200, "gpt_neox_20b": 20_554_567_680, "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320, "llama2_70b": 68_976_648_192, "llama3_8b": 8_030_261_248, "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800, "mistral_7b": 7_241_732_096, "mixtral_8x7b": 46_702_792_704, "qwen2_5_7b": 7_615_616_512,
}  # fmt: skip


def work_of(model: Any, batch: Any, precision: Precision = SINGLE, lora_rank: int | None = None) -> Workload:
    return workload_of(model, batch, precision, sequence_parallel=True, lora_rank=lora_rank)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_predefined_model_has_the_published_number_of_parameters(name: str) -> None:
    assert getattr(lab.Transformer, name).parameters == pytest.approx(PUBLISHED[name], rel=1e-3)


def test_the_router_chooses_two_of_eight_experts() -> None:
    mixtral = lab.Transformer.mixtral_8x7b
    assert mixtral.active_parameters == pytest.approx(12.88e9, rel=1e-3)
    assert lab.Transformer.llama3_8b.active_parameters == lab.Transformer.llama3_8b.parameters


def test_gpt3_has_175_billion_parameters() -> None:
    gpt3 = lab.Transformer(layers=96, width=12288, sequence=2048, vocabulary=51200)
    assert gpt3.parameters == pytest.approx(174.6e9, rel=1e-3)  # table 1 of Narayanan et al.
    assert gpt3.all_heads == 192


def test_the_numbers_of_a_transformer() -> None:
    work = work_of(SHAPE, 8, MIXED)
    parameters = 4 * (12 * 128**2 + 13 * 128) + 1064 * 128 + 2 * 128
    assert (work.samples, work.tokens, work.parameters, work.layers, work.heads) == (8, 64, parameters, 4, 2)
    assert (work.first_parameters, work.last_parameters, work.tied) == (1064 * 128, 1000 * 128, True)
    assert work.flops == 64 * (6 * (parameters - 64 * 128) + 12 * 4 * 128 * 64)  # the table of positions computes nothing
    assert work.hidden_bytes == 2 * 64 * 128
    assert work_of(SHAPE, 8).hidden_bytes == 4 * 64 * 128
    assert work.trained == 1


def test_loras_adapters_have_the_published_number_of_parameters() -> None:
    # peft prints "trainable params: 39,976,960" for Llama 2 7B, r=16, target_modules="all-linear".
    work = work_of(lab.Transformer.llama2_7b, 8, lora_rank=16)
    assert work.parameters - lab.Transformer.llama2_7b.parameters == 39_976_960
    assert work.trained * work.parameters == pytest.approx(39_976_960)
    computing = lab.Transformer.llama2_7b.parameters - 32000 * 4096
    assert work.flops == 4096 * (4 * computing + 6 * 39_976_960 + 12 * 32 * 4096 * 4096)


def test_a_module_computes_in_16_bits_if_the_plan_says_so() -> None:
    net = nn.Linear(1000, 1000, bias=False)
    single, mixed = (work_of(net, torch.empty(16, 1000), each).parts(1).last.at(16).forward[0] for each in (SINGLE, MIXED))
    assert (single.wide, mixed.wide) == (True, False)
    assert (mixed.read_bytes, mixed.written_bytes) == (single.read_bytes / 2, single.written_bytes / 2)


def test_what_a_forward_pass_stores_in_a_module_is_undone() -> None:
    class Caching(nn.Linear):
        mask: torch.Tensor | None = None

        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__(inputs, outputs)
            self.results: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.results.append(x)
            if self.mask is None:
                self.mask = torch.ones(200)
                self.register_buffer("seen", torch.ones(200))
            return super().forward(x) * self.mask

    net = Caching(100, 200)
    calls: list[int] = []
    handle = net.register_forward_hook(lambda *_: calls.append(1))
    assert work_of(net, torch.empty(16, 100)).flops == work_of(net, torch.empty(16, 100)).flops
    assert net.mask is None
    assert net.results == []
    assert set(net.state_dict()) == {"weight", "bias"}
    handle.remove()
    counted = len(calls)
    net(torch.empty(16, 100))
    assert len(calls) == counted, "the handle still removes the hook"


def test_work_that_does_not_depend_on_the_samples_is_done_once() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = (nn.Parameter(torch.empty(64, 64)) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ (self.one @ self.other)

    of_sample, once = 2 * 2 * 64**2, 3 * 2 * 64**3  # no gradient of the inputs
    assert work_of(Product(), torch.empty(16, 64)).flops == of_sample + once / 16


def test_an_lstm_is_counted_as_its_matrix_products() -> None:
    tokens, size = 10, 64
    flops = {kind: work_of(kind(size, size, batch_first=True), torch.empty(16, tokens, size)).flops for kind in (nn.LSTM, nn.GRU)}
    assert flops[nn.LSTM] == pytest.approx(4 / 3 * flops[nn.GRU])  # four gates and three


def test_a_module_is_counted_without_computing() -> None:
    net = nn.Sequential(nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 10))
    work = work_of(net, torch.empty(16, 100))
    assert (work.samples, work.parameters, work.layers) == (16, 100 * 200 + 200 + 200 * 10 + 10, 1)
    assert work.first_parameters == 100 * 200 + 200  # the largest layer; FSDP gathers the others one by one
    assert work.flops == 2 * (2 * 100 * 200 + 3 * 200 * 10)  # the inputs need no gradients
    assert work.parts(1).last.at(16).saved_bytes == 4 * 16 * (200 + 10)  # the output, and that of ReLU, twice used
    assert work.hidden_bytes is None
    assert all(parameter.grad is None for parameter in net.parameters())


def test_a_module_is_counted_whatever_the_caller_has_set() -> None:
    autocast, anomalies = torch.autocast("cpu", torch.bfloat16), torch.autograd.set_detect_anomaly(True)
    with torch.inference_mode(), torch.device("meta"), autocast, anomalies:
        work = work_of(nn.Linear(100, 200), torch.empty(16, 100))
    assert len(work.parts(1).last.at(16).backward) == 2  # the gradients of weight and bias


def test_frozen_parameters_of_a_module_have_no_gradients() -> None:
    net = nn.Sequential(nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 10))
    net[0].requires_grad_(False)
    work = work_of(net, torch.empty(16, 100))
    assert work.trained == pytest.approx(2010 / 22210)
    assert [kernel.name for kernel in work.parts(1).last.at(16).backward].count("mm") == 1  # of the last layer's weight


def test_the_backward_pass_starts_from_the_loss_alone() -> None:
    class WithLoss(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            found = super().forward(x)
            return (found, found.square().mean()) if self.both else found.square().mean()

    single, both = (WithLoss(100, 50) for _ in range(2))
    single.both, both.both = False, True
    passes = [work_of(net, torch.empty(16, 100)).parts(1).last.at(16) for net in (single, both)]
    assert passes[0].backward == passes[1].backward


def test_a_module_with_buffers_and_two_inputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)
            self.linear = nn.Linear(8, 3, dtype=torch.float32)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.linear(self.norm(x) + y)

    net = Two()
    work = work_of(net, (torch.ones(4, 8), torch.ones(4, 8)))
    assert work.flops == 3 * 2 * 8 * 3
    assert work.buffer_bytes == 2 * 4 * 8 + 8
    assert net.norm.num_batches_tracked == 0


class Detached(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).detach()


class Odd(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu() if len(x) % 2 else super().forward(x)


class Decides(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("model", "batch", "error"),
    [
        (SHAPE, 0, ValueError),
        (SHAPE, torch.ones(3), TypeError),
        (nn.Linear(2, 2), 8, TypeError),
        (nn.Linear(2, 2), (), TypeError),
        (nn.Linear(2, 2), torch.tensor(1.0), TypeError),
        (nn.Linear(2, 2), torch.ones(0, 2), TypeError),
    ],
)
def test_a_batch_that_does_not_suit_the_model_is_refused(model: object, batch: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="batch="):
        work_of(model, batch)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (nn.ReLU(), "ReLU: expected a module with parameters"),
        (nn.Embedding(0, 8), "Embedding: expected a module with parameters"),
        (nn.Linear, r"Linear: expected a module; this is its class, so call it: Linear\(...\)"),
        ("gpt", r"'gpt': expected a lab\.Transformer or a module"),
        (nn.LazyLinear(3), "lazy layers"),
    ],
)
def test_a_model_that_cannot_be_planned_is_named(model: Any, says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        module_bytes(model)


@pytest.mark.parametrize(
    ("model", "inputs", "says"),
    [
        (Decides(2, 2), torch.ones(8, 2), "Decides.*decides by the numbers in a tensor"),
        (Odd(4, 4), torch.ones(8, 4), "Odd.*other operators for other numbers of samples"),
        (Detached(4, 4), torch.ones(8, 4), "Detached.*no tensor of its output"),
        (nn.Linear(4, 4), torch.ones(8, 5), r"Linear.*inputs of the shape \(n, 5\), n = 2, 3, 5 and 8: "),
    ],
)
def test_a_step_that_cannot_be_counted_blames_the_model(model: Any, inputs: torch.Tensor, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        work_of(model, inputs)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"layers": 0}, ValueError),
        ({"width": 1.5}, TypeError),
        ({"heads": -1}, ValueError),
        ({"style": "bert"}, ValueError),
        ({"heads": 3}, ValueError),
        ({"kv_heads": 3, "heads": 4}, ValueError),
        ({"active_experts": 2}, ValueError),
        ({"tied": "no"}, TypeError),
        ({"dropout": "yes"}, TypeError),
    ],
)
def test_wrong_shapes_are_refused(wrong: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(wrong))):
        lab.Transformer(**{"layers": 1, "width": 64, "sequence": 8, "vocabulary": 10, **wrong})
