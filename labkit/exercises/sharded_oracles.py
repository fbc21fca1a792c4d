"""What the exercise on ZeRO trains, and what one process would get: a network of sizes that ranks do not divide."""

from __future__ import annotations

from typing import Any, Final

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

__all__ = ["INPUTS", "OUTPUTS", "PER_RANK", "STEPS", "Weights", "batch", "network", "serial", "weights"]

INPUTS: Final = 5
HIDDEN: Final = 7
OUTPUTS: Final = 3
PER_RANK: Final = 4  # examples of each rank in a step
STEPS: Final = 3

Weights = dict[str, NDArray[Any]]


def network() -> nn.Module:
    """Build the network, with the same weights in every process: tensors of 35, 7, 21 and 3 numbers."""
    random = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUTPUTS))
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=random) / 2
    return model


def batch(ranks: int, step: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of all ranks together."""
    random = torch.Generator().manual_seed(100 + step)
    count = PER_RANK * ranks
    return torch.randn(count, INPUTS, generator=random), torch.randn(count, OUTPUTS, generator=random)


def weights(model: nn.Module) -> Weights:
    """Return a copy of each parameter."""
    return {name: p.detach().clone().numpy() for name, p in model.named_parameters()}


def serial(ranks: int, *, scale: float = 1.0, clear: bool = True) -> Weights:
    """Return the weights after one process has trained with the batches of all ranks.

    Args:
        ranks: how many ranks' batches to use.
        scale: what to multiply each gradient with.
        clear: whether to clear the gradients after each step.
    """
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(STEPS):
        inputs, targets = batch(ranks, number)
        (scale * nn.functional.mse_loss(model(inputs), targets)).backward()
        optimizer.step()
        if clear:
            optimizer.zero_grad()
    return weights(model)
