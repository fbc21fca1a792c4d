"""What exercises about gradients share: a small model with experts, its batches, and copies of its gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

__all__ = ["Experts", "Gradients", "gradients_of", "keeps", "random_batch"]

Gradients = dict[str, NDArray[Any]]


class Experts(nn.Module):
    """A trunk, partly frozen as in fine-tuning, and several experts of equal size; each example passes through one.

    Args:
        experts: the number of experts.
    """

    def __init__(self, experts: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(6, 5)
        self.trunk.bias.requires_grad_(False)
        self.experts = nn.ModuleList(nn.Linear(5, 3) for _ in range(experts))

    def forward(self, inputs: Tensor, expert: int = 0) -> Tensor:
        """Send all inputs (batch, 6) through one expert: (batch, 3)."""
        outputs: Tensor = self.experts[expert](torch.tanh(self.trunk(inputs)))
        return outputs


def random_batch(examples: int) -> tuple[Tensor, Tensor]:
    """Return inputs (examples, 6) and targets (examples, 3), the same in every process."""
    random = torch.Generator().manual_seed(1)
    return torch.randn(examples, 6, generator=random), torch.randn(examples, 3, generator=random)


def gradients_of(model: nn.Module) -> Gradients:
    """Return a copy of each parameter's `.grad`; parameters without a gradient are left out."""
    return {n: p.grad.detach().clone().numpy() for n, p in model.named_parameters() if p.grad is not None}


def keeps(a: Gradients, b: Gradients) -> bool:
    """Whether `a` contains all gradients of `b`, unchanged."""
    return all(n in a and np.array_equal(a[n], b[n]) for n in b)
