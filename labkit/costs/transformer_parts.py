"""The parts of a transformer as modules, as one rank of tensor parallelism has them: embedding, layer and head."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import cross_entropy, embedding, gelu, scaled_dot_product_attention, silu, softmax

from labkit.costs.passes import SAMPLES, Counted

if TYPE_CHECKING:
    from labkit.costs.transformer import Transformer


@dataclass(frozen=True, slots=True)
class Cut:
    """What a rank of tensor parallelism has of a layer."""

    ranks: int
    sequence: bool  # whether it divides the tokens between the matrix products, too
    lora_rank: int = 0  # if it is not 0, the weights are frozen, and have adapters


@functools.lru_cache(maxsize=1 << 5)
def counted_parts(model: Transformer, cut: Cut, dtype: torch.dtype) -> tuple[Counted, Counted, Counted]:
    """Count the embedding, one layer and the head of a transformer."""
    local = model.sequence // cut.ranks if cut.sequence else model.sequence

    def hidden(samples: int) -> torch.Tensor:
        return torch.empty(samples, local, model.width, dtype=dtype, requires_grad=True)

    def words(samples: int) -> torch.Tensor:
        return torch.empty(samples, model.sequence, dtype=torch.long)

    with torch.device("meta"):
        first, layer, head = (part(model, cut).to(dtype) for part in (_Embedding, _Layer, _Head))
    for part in (first, layer, head):
        for name, parameter in part.named_parameters():
            parameter.requires_grad_(not cut.lora_rank or "adapter" in name)
    return (
        Counted(first, lambda samples: [words(samples)]),
        Counted(layer, lambda samples: [hidden(samples)], [model.experts * samples for samples in SAMPLES]),  # all have some
        Counted(head, lambda samples: [hidden(samples), words(samples)]),
    )


class _Embedding(nn.Module):
    def __init__(self, model: Transformer, cut: Cut) -> None:
        super().__init__()
        self.cut = cut
        self.words = nn.Parameter(torch.empty(model.vocabulary // cut.ranks, model.width))
        self.places = nn.Parameter(torch.empty(model.sequence, model.width)) if model.style == "gpt" else None

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found = embedding(words, self.words)
        return _scattered(found if self.places is None else found + self.places, self.cut)


class _Layer(nn.Module):
    def __init__(self, model: Transformer, cut: Cut) -> None:
        super().__init__()
        gpt = model.style == "gpt"
        self.model, self.cut, width = model, cut, model.width
        self.heads, self.shared = model.all_heads // cut.ranks, max(1, model.key_heads // cut.ranks)
        self.size = width // model.all_heads
        self.inner = model.inner_width // cut.ranks
        self.norms = nn.ModuleList(_norm(model) for _ in range(2))
        rank = cut.lora_rank
        self.query = _Linear(width, self.heads * self.size, gpt, rank)
        self.key, self.value = (_Linear(width, self.shared * self.size, gpt, rank) for _ in range(2))
        self.output = _Linear(self.heads * self.size, width, gpt, rank)
        products, count = 1 if gpt else 2, model.experts
        up = self.inner * products
        if count == 1:
            self.up, self.down = _Linear(width, up, gpt, products * rank), _Linear(self.inner, width, gpt, rank)
        else:
            self.router = nn.Linear(width, count, bias=False)
            self.experts_up = nn.Parameter(torch.empty(count, width, up))
            self.experts_down = nn.Parameter(torch.empty(count, self.inner, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + _scattered(self._attention(_gathered(self.norms[0](x), self.cut)), self.cut)
        return x + _scattered(self._mlp(_gathered(self.norms[1](x), self.cut)), self.cut)

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        samples, tokens, _ = x.shape
        query, key, value = (
            part(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        if self.model.style == "llama":
            query, key = _rotated(query), _rotated(key)
        if self.shared < self.heads:
            key, value = (part.repeat_interleave(self.heads // self.shared, 1) for part in (key, value))
        if self.model.attention == "flash":
            found = scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            found = self._dropped(softmax(query @ key.transpose(-1, -2), -1)) @ value
        return self._dropped(self.output(found.transpose(1, 2).reshape(samples, tokens, -1)))

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        if self.model.experts == 1:
            return self._dropped(self.down(self._activated(self.up(x))))
        experts, active = self.model.experts, self.model.active_experts
        share = self.router(x).softmax(-1)[..., :active, None]
        copies = x.flatten(0, 1).repeat_interleave(active, 0)
        full = copies.unflatten(0, (experts, -1))  # equally many for each expert
        found = (self._activated(full @ self.experts_up) @ self.experts_down).flatten(0, 1)
        return self._dropped((found.view(*x.shape[:2], active, -1) * share).sum(2))

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        return torch.native_dropout(x, 0.1, True)[0] if self.model.dropout else x

    def _activated(self, x: torch.Tensor) -> torch.Tensor:
        if self.model.style == "gpt":
            return gelu(x)
        gate, up = x.chunk(2, -1)
        return silu(gate) * up


class _Linear(nn.Module):
    """A linear layer, with LoRA's adapters beside it if `rank` is not 0: two narrow ones, whose result is added."""

    def __init__(self, inputs: int, outputs: int, bias: bool, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=bias)
        self.adapter: nn.Module | None = None
        if rank:
            self.adapter = nn.Sequential(nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.base(x)
        return found if self.adapter is None else found + self.adapter(x) * 2.0


class _Head(nn.Module):
    def __init__(self, model: Transformer, cut: Cut) -> None:
        super().__init__()
        self.cut, self.norm = cut, _norm(model)
        self.words = nn.Linear(model.width, model.vocabulary // cut.ranks, bias=False)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scores = self.words(_gathered(self.norm(x), self.cut)).float()
        return cross_entropy(scores.flatten(0, 1), targets.flatten())


def _norm(model: Transformer) -> nn.Module:
    return nn.LayerNorm(model.width, bias=model.style == "gpt")  # an RMSNorm reads and writes as much


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions, computed in 32 bits."""
    turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * torch.empty(
        x.shape[2], x.shape[3] // 2, dtype=torch.cfloat
    )
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


def _gathered(x: torch.Tensor, cut: Cut) -> torch.Tensor:
    """All tokens, of which each rank had a part."""
    return x.repeat(1, cut.ranks, 1) if cut.sequence else x


def _scattered(x: torch.Tensor, cut: Cut) -> torch.Tensor:
    """This rank's part of the tokens."""
    return x[:, : x.shape[1] // cut.ranks].clone() if cut.sequence else x
