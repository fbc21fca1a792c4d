"""A transformer of the size of Llama 3.1 8B, trained with FSDP2, as torchtitan's published runs do."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import labkit as lab


@dataclass(frozen=True)
class Shape:
    """The sizes of a model; the defaults are those of Llama 3.1 8B.

    Attributes:
        heads, key_heads: of attention; several heads share a key.
    """

    width: int = 4096  # of the residual stream
    layers: int = 32  # the number of blocks
    heads: int = 32
    key_heads: int = 8
    hidden: int = 14336  # of the feed-forward network
    tokens: int = 128256  # in the vocabulary
    length: int = 8192  # of a sequence, in tokens


LLAMA_8B = Shape()


class Attention(nn.Module):
    """Causal attention with rotated positions, in which groups of heads share keys and values."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = shape.width // shape.heads
        keys = shape.key_heads * self.head
        self.query, self.key, self.value = (nn.Linear(shape.width, n, bias=False) for n in (shape.width, keys, keys))
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Return what is added to `x`, shape (batch, length, width)."""
        query, key, value = (
            part(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        query, key = (_rotated(part, cosine, sine) for part in (query, key))
        shared = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(shared, dim=1) for part in (key, value))
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return result


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class Block(nn.Module):
    """Attention and a gated feed-forward network; of its matrix products, each second one is computed again."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.gate, self.up = (nn.Linear(shape.width, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(shape.width) for _ in range(2))

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Return the next value of the residual stream."""
        contexts = partial(create_selective_checkpoint_contexts, _every_second_product())
        result: Tensor = checkpoint(self._forward, x, cosine, sine, use_reentrant=False, context_fn=contexts)
        return result

    def _forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x), cosine, sine)
        y = self.norms[1](x)
        result: Tensor = x + self.down(silu(self.gate(y)) * self.up(y))
        return result


def _every_second_product() -> Any:
    """Return a policy that keeps the results of attention and of each second matrix product."""
    count = {False: 0, True: 0}  # of products, by whether they are computed again

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        name = operator.overloadpacket.__name__
        if name == "mm":
            count[context.is_recompute] += 1
            keep = count[context.is_recompute] % 2 == 1
        else:
            keep = "scaled_dot_product" in name
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


class Transformer(nn.Module):
    """The whole model, from tokens to their scores."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.tokens, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm, self.out = nn.RMSNorm(shape.width), nn.Linear(shape.width, shape.tokens, bias=False)
        half = shape.width // shape.heads // 2
        angles = torch.rand(shape.length, half)
        self.register_buffer("cosine", angles.cos().bfloat16())
        self.register_buffer("sine", angles.sin().bfloat16())

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of each next token."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cosine, self.sine)
        result: Tensor = self.out(self.norm(x))
        return result


def train(shape: Shape, batch: int, steps: int) -> None:
    """Train it as one of the ranks of FSDP2: parameters in float32, computing in bfloat16, AdamW."""
    import torch.distributed as dist

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = Transformer(shape)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in lab.steps(range(steps)):
        tokens = torch.randint(0, shape.tokens, (batch, shape.length + 1))
        scores = model(tokens[:, :-1])
        cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
