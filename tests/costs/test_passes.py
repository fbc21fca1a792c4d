"""What passes compute and keep: parts of a transformer beside published formulas, and modules counted by hand."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import labkit as lab
from labkit.costs.device import Kernel
from labkit.costs.passes import Counted, _count
from labkit.costs.transformer_parts import Cut, counted_parts

HEADS, WIDTH, TOKENS, SAMPLES = 16, 1024, 512, 3
VALUES = SAMPLES * TOKENS * WIDTH  # of one hidden tensor
WHOLE = Cut(1, sequence=False)


def model(**changes: object) -> lab.Transformer:
    shape = {"layers": 2, "width": WIDTH, "sequence": TOKENS, "vocabulary": 1000, "heads": HEADS}
    return lab.Transformer(**(shape | changes))  # type: ignore[arg-type]


def layer(cut: Cut = WHOLE, **changes: object) -> Counted:
    return counted_parts(model(**changes), cut, torch.bfloat16)[1]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_layer_keeps_what_korthikanti_et_al_derive(ranks: int) -> None:
    found = layer(Cut(ranks, sequence=False), attention="math", dropout=True).at(SAMPLES)
    expected = 10 + 24 / ranks + 5 * HEADS * TOKENS / WIDTH / ranks  # bytes per value, equation 2
    assert found.saved_bytes / VALUES == pytest.approx(expected, rel=1e-3)


def test_flash_attention_keeps_no_matrix_of_all_pairs() -> None:
    math, flash = (layer(attention=kind).at(SAMPLES) for kind in ("math", "flash"))
    pairs = 2 * SAMPLES * HEADS * TOKENS**2
    assert math.saved_bytes - flash.saved_bytes == pytest.approx(pairs, rel=0.01)


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_layer_computes_what_the_formula_says(ranks: int) -> None:
    def flops(attention: str) -> float:
        return sum(kernel.flops for kernel in layer(Cut(ranks, sequence=False), attention=attention).at(SAMPLES).forward)

    products, pairs = 24 * VALUES * WIDTH / ranks, 4 * VALUES * TOKENS / ranks  # equation 2 of Narayanan et al.
    assert flops("math") == pytest.approx(products + pairs)
    assert flops("flash") == pytest.approx(products + pairs / 2)  # the causal mask leaves half


def test_the_backward_pass_has_twice_the_products_of_the_forward_pass() -> None:
    found = layer(attention="math").at(SAMPLES)
    forward, backward = (sum(kernel.flops for kernel in part) for part in (found.forward, found.backward))
    assert backward == 2 * forward
    frozen = layer(Cut(1, sequence=False, lora_rank=1), attention="math").at(SAMPLES)
    weights = 24 * VALUES * WIDTH
    assert sum(kernel.flops for kernel in frozen.backward) == pytest.approx(backward - weights, rel=0.01)
    assert frozen.saved_bytes > found.saved_bytes, "adapters need the same inputs as weights"


def test_sequence_parallelism_divides_what_tensor_parallelism_leaves_whole() -> None:
    whole, divided = (layer(Cut(4, sequence=sequence)).at(SAMPLES) for sequence in (False, True))
    assert divided.output_bytes == whole.output_bytes / 4
    assert divided.saved_bytes < 0.8 * whole.saved_bytes
    assert sum(k.flops for k in divided.forward) == sum(k.flops for k in whole.forward)


def test_grouped_heads_and_experts_have_smaller_products() -> None:
    def products(**changes: object) -> float:
        return sum(kernel.flops for kernel in layer(style="llama", attention="math", **changes).at(SAMPLES).forward)

    grouped = 2 * VALUES * WIDTH * 2 * 12 / 16  # keys and values of 4 in place of 16 heads
    assert products() - products(kv_heads=4) == pytest.approx(grouped)
    router = 2 * VALUES * 8
    of_expert = 3 * 2 * VALUES * 4 * WIDTH
    assert products(experts=8, active_experts=2) - products() == pytest.approx(of_expert + router)


def test_logits_in_32_bits_are_kept_and_their_gradients_come_on_top() -> None:
    head = counted_parts(model(vocabulary=50_000), WHOLE, torch.bfloat16)[2].at(SAMPLES)
    logits = 4 * SAMPLES * TOKENS * 50_000
    assert head.saved_bytes == pytest.approx(logits, rel=0.05)
    assert max(head.live_bytes) == pytest.approx(3 * logits, rel=0.05)  # of the log-probabilities, and of the logits


def test_numbers_grow_linearly_with_the_samples() -> None:
    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).relu()

    found = Counted(Net(10, 20, bias=False), lambda samples: [torch.empty(samples, 10)]).at(64)
    product, relu = found.forward
    assert product == Kernel("mm", 2 * 64 * 10 * 20, 4 * (64 * 10 + 10 * 20), 4 * 64 * 20, wide=True)
    assert (relu.flops, relu.read_bytes, relu.written_bytes) == (0, 4 * 64 * 20, 4 * 64 * 20)
    assert (found.saved_bytes, found.output_bytes) == (4 * 64 * 20, 4 * 64 * 20)  # the input is the program's own
    assert found.products_bytes == 2 * 4 * 64 * 20  # the product and the output


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)), (256,)),
        (nn.TransformerEncoderLayer(64, 4, batch_first=True), (16, 64)),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten()), (3, 8, 8)),
        (nn.LSTM(64, 64, batch_first=True), (10, 64)),
    ],
    ids=["mlp", "encoder", "convolution", "lstm"],
)
def test_what_is_extrapolated_is_what_a_large_batch_needs(module: nn.Module, shape: tuple[int, ...]) -> None:
    """For few samples gradients of weights need most memory, for many the activations."""

    def inputs(samples: int) -> list[torch.Tensor]:
        return [torch.empty(samples, *shape)]

    assert Counted(module, inputs).at(4096) == _count(module, inputs, 4096, None)


def test_attention_with_dropout_is_fused_as_on_gpus() -> None:
    def saved(dropout: float) -> float:
        encoder = nn.TransformerEncoderLayer(64, 4, 64, dropout, batch_first=True)
        return Counted(encoder, lambda samples: [torch.empty(samples, 1024, 64)]).at(1).saved_bytes

    assert saved(0.1) - saved(0.0) < 4 * 1024**2, "less than one matrix of all pairs"


@functools.lru_cache
def angles(count: int) -> torch.Tensor:
    return torch.arange(float(count))


SEEN: list[torch.Tensor] = []
HIDDEN = [nn.Linear(8, 8)]


@pytest.mark.parametrize(
    "forward",
    [lambda net, x: net(x) * angles(8), lambda net, x: SEEN.append(net(x)) or net(x), lambda net, x: HIDDEN[0](net(x))],
    ids=["cache", "list", "layer of nobody"],
)
def test_tensors_that_stay_elsewhere_are_refused(forward: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return forward(self.net, x)

    with pytest.raises(ValueError, match="it keeps tensors elsewhere"):
        Counted(Net(), lambda samples: [torch.empty(samples, 8)])


def test_a_convolution_of_many_samples_has_the_operators_of_few() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.linear = nn.Conv2d(8, 16, 2), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.convolution(x).permute(0, 2, 3, 1))

    def channels_last(samples: int) -> list[torch.Tensor]:
        return [torch.empty(samples, 32, 32, 8, requires_grad=True).permute(0, 3, 1, 2)]

    Counted(Net(), channels_last, (2, 3, 5, 64))


def test_what_follows_for_five_samples_must_follow_for_all() -> None:
    class Few(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x[:8])

    def inputs(samples: int) -> list[torch.Tensor]:
        return [torch.empty(samples, 8)]

    assert Counted(Few(8, 8), inputs).at(8).forward == Counted(nn.Linear(8, 8), inputs).at(8).forward
    with pytest.raises(ValueError, match="does not grow linearly"):
        Counted(Few(8, 8), inputs, (2, 3, 5, 64))


def test_each_kernel_takes_at_least_its_launch() -> None:
    slow = lab.Device(tflop_per_s=1e6, gbyte_per_s=1e8, launch_us=10)
    part = layer()
    passes = part.at(1)
    least_s = [len(kernels) * 10e-6 for kernels in (passes.forward, passes.backward)]
    forward_s, backward_s = part.cost(1, slow, "none")[:2]
    assert [forward_s, backward_s] == pytest.approx(least_s, rel=0.1)
    assert part.cost(1, slow, "layer")[:2] == (forward_s, backward_s + forward_s)
    again = part.cost(1, slow, "selective").backward_s - backward_s
    kept = sum(kernel.name in ("mm", "addmm") or "attention" in kernel.name for kernel in passes.forward)
    assert kept == 7
    assert again == pytest.approx(forward_s - kept * 10e-6, rel=0.1)
