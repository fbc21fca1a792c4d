"""What a step asks for: transformers by formulas, other modules by counting."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import labkit as lab
from labkit.costs.workload import Precision, workload_of

MIXED = Precision(2, 2, 12)
SHAPE = lab.Transformer(layers=4, width=128, sequence=64, vocabulary=1000)


def test_gpt3_has_175_billion_parameters() -> None:
    gpt3 = lab.Transformer(layers=96, width=12288, sequence=2048, vocabulary=51200)
    assert gpt3.parameters == pytest.approx(174.6e9, rel=1e-3)  # table 1 of Narayanan et al.
    assert gpt3.heads == 192


def test_the_numbers_of_a_transformer() -> None:
    work, precision = workload_of(SHAPE, 8, None)
    assert precision == MIXED
    parameters = 4 * (12 * 128**2 + 13 * 128) + 1064 * 128
    assert (work.samples, work.parameters, work.layers, work.heads) == (8, parameters, 4, 2)
    assert work.forward_flops == 64 * (2 * parameters + 4 * 4 * 128 * 64)
    assert work.whole_bytes + work.divided_bytes == 34 * 64 * 128
    assert work.whole_bytes + work.divided_bytes / 2 == (10 + 24 / 2) * 64 * 128
    assert work.hidden_bytes == 2 * 64 * 128
    assert work.output_bytes == 4 * 64 * (128 + 1000)


def test_activations_in_32_bits_have_twice_the_size_except_masks() -> None:
    work, _ = workload_of(SHAPE, 8, Precision(4, 4, 8))
    assert work.whole_bytes + work.divided_bytes == (2 * 32 + 2) * 64 * 128
    assert work.hidden_bytes == 4 * 64 * 128


def test_a_module_is_counted_without_computing() -> None:
    net = nn.Sequential(nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 10))
    work, precision = workload_of(net, torch.empty(16, 100), None)
    assert precision == Precision(4, 4, 8)
    assert (work.samples, work.parameters, work.layers) == (16, 100 * 200 + 200 + 200 * 10 + 10, 2)
    assert work.forward_flops == 2 * (100 * 200 + 200 * 10)
    assert work.layers * work.whole_bytes == 4 * (100 + 200)  # inputs of both linear layers; that of the second is ReLU's
    assert work.hidden_bytes is None
    assert all(parameter.grad is None for parameter in net.parameters())


def test_a_module_with_buffers_and_two_inputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)
            self.linear = nn.Linear(8, 3, dtype=torch.float32)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.linear(self.norm(x) + y)

    net = Two()
    work, _ = workload_of(net, (torch.ones(4, 8), torch.ones(4, 8)), None)
    assert work.forward_flops == 2 * 8 * 3
    assert net.norm.num_batches_tracked == 0


@pytest.mark.parametrize(
    ("model", "batch", "error"),
    [
        (SHAPE, 0, ValueError),
        (SHAPE, torch.ones(3), TypeError),
        (nn.Linear(2, 2), 8, TypeError),
        (nn.Linear(2, 2), (), TypeError),
        (nn.Linear(2, 2), torch.tensor(1.0), TypeError),
    ],
)
def test_a_batch_that_does_not_suit_the_model_is_refused(model: object, batch: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="batch="):
        workload_of(model, batch, None)  # type: ignore[arg-type]


def test_a_module_without_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="with parameters"):
        workload_of(nn.ReLU(), torch.ones(3, 3), None)


@pytest.mark.parametrize(
    ("wrong", "error"), [({"layers": 0}, ValueError), ({"width": 1.5}, TypeError), ({"heads": 0}, ValueError)]
)
def test_wrong_shapes_are_refused(wrong: dict[str, int], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(wrong))):
        lab.Transformer(**{"layers": 1, "width": 64, "sequence": 8, "vocabulary": 10, **wrong})
