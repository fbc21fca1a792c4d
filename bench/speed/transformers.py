"""A training of any `lab.Transformer` in plain torch, with each strategy of `lab.plan`, as a user would write it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.nn.functional import cross_entropy, dropout, gelu, scaled_dot_product_attention, silu, softmax
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import labkit as lab

ATEN = torch.ops.aten
KEPT = (
    ATEN.mm.default, ATEN.addmm.default, ATEN._scaled_dot_product_flash_attention_for_cpu.default,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Training:
    """How to train: the names and meanings are those of the arguments of `lab.plan`."""

    strategy: str = "one rank"
    micro_batch: int = 1
    accumulate: int = 1
    recompute: str = "none"
    mixed: bool = False  # parameters in float32, FSDP2 or autocast computes in bfloat16


class Attention(nn.Module):
    """Causal attention, in which groups of heads may share keys and values."""

    def __init__(self, shape: lab.Transformer) -> None:
        super().__init__()
        self.shape, self.head, gpt = shape, shape.width // shape.all_heads, shape.style == "gpt"
        keys = shape.key_heads * self.head
        self.query, self.key, self.value = (nn.Linear(shape.width, n, bias=gpt) for n in (shape.width, keys, keys))
        self.output = nn.Linear(shape.width, shape.width, bias=gpt)

    def forward(self, x: Tensor, turns: Tensor | None) -> Tensor:
        """Return what is added to `x`, shape (batch, tokens, width)."""
        query, key, value = (
            part(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        if turns is not None:
            query, key = rotated(query, turns), rotated(key, turns)
        shared = query.shape[1] // key.shape[1]
        if shared > 1:
            key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
        if self.shape.attention == "flash":
            found = scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            scores = query @ key.transpose(-1, -2) * self.head**-0.5
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
            found = dropped(softmax(scores.masked_fill(later, float("-inf")), -1), self.shape) @ value
        return dropped(self.output(found.transpose(1, 2).flatten(2)), self.shape)


def dropped(x: Tensor, shape: lab.Transformer) -> Tensor:
    """Drop a tenth of the values, if the shape says so."""
    return dropout(x, 0.1) if shape.dropout else x


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary positions as in Meta's code of Llama."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


class Mlp(nn.Module):
    """Two products with GELU between them, or the three of SwiGLU."""

    def __init__(self, shape: lab.Transformer) -> None:
        super().__init__()
        self.shape, gpt = shape, shape.style == "gpt"
        self.gate = None if gpt else nn.Linear(shape.width, shape.inner_width, bias=False)
        self.up = nn.Linear(shape.width, shape.inner_width, bias=gpt)
        self.down = nn.Linear(shape.inner_width, shape.width, bias=gpt)

    def forward(self, x: Tensor) -> Tensor:
        """Return what is added to `x`, shape (batch, tokens, width)."""
        inner = gelu(self.up(x)) if self.gate is None else silu(self.gate(x)) * self.up(x)
        return dropped(self.down(inner), self.shape)


class Block(nn.Module):
    """Attention and the MLP, each after a norm."""

    def __init__(self, shape: lab.Transformer) -> None:
        super().__init__()
        self.norm_1, self.attention = norm(shape), Attention(shape)
        self.norm_2, self.mlp = norm(shape), Mlp(shape)

    def forward(self, x: Tensor, turns: Tensor | None) -> Tensor:
        """Return the next value of the residual stream."""
        x = x + self.attention(self.norm_1(x), turns)
        result: Tensor = x + self.mlp(self.norm_2(x))
        return result


def norm(shape: lab.Transformer) -> nn.Module:
    """LayerNorm; for Llama without bias, since torch has one kernel for RMSNorm on GPUs, but seven for CPUs."""
    return nn.LayerNorm(shape.width, bias=shape.style == "gpt")


class Model(nn.Module):
    """A transformer, or a stage of it: the first has the embedding, the last the output."""

    def __init__(self, shape: lab.Transformer, recompute: str, layers: int, *, first: bool = True, last: bool = True) -> None:
        super().__init__()
        self.shape, self.recompute, gpt = shape, recompute, shape.style == "gpt"
        self.words = nn.Embedding(shape.vocabulary, shape.width) if first else None
        self.places = nn.Embedding(shape.sequence, shape.width) if first and gpt else None
        self.blocks = nn.ModuleList(Block(shape) for _ in range(layers))
        self.norm = norm(shape) if last else None
        self.output = nn.Linear(shape.width, shape.vocabulary, bias=False) if last else None
        self.turns: Tensor | None = None
        self.tie()

    def tie(self) -> None:
        """Let the output share the weights of the embedding, if the shape says so."""
        if self.shape.shares_output and self.words is not None and self.output is not None:
            self.output.weight = self.words.weight

    def allocate(self) -> Model:
        """Give the parameters of a model on the meta device memory."""
        self.to_empty(device=lab.device())
        self.tie()
        if self.shape.style == "llama":
            size = self.shape.width // self.shape.all_heads // 2
            self.turns = torch.empty(self.shape.sequence, size, dtype=torch.cfloat, device=lab.device())
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of each next token, or what the next stage takes."""
        if self.words is not None:
            x = self.words(x)
        if self.places is not None:
            x = x + self.places.weight
        for block in self.blocks:
            x = self._through(block, x)
        if self.output is None or self.norm is None:
            return x
        result: Tensor = self.output(self.norm(x))
        return result

    def _through(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.recompute == "none":
            return block(x, self.turns)  # type: ignore[no-any-return]
        contexts: Any = {}
        if self.recompute == "selective":
            contexts = {"context_fn": partial(create_selective_checkpoint_contexts, keeps_products)}
        return checkpoint(block, x, self.turns, use_reentrant=False, **contexts)  # type: ignore[no-any-return]


def keeps_products(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    """Keep the results of matrix products with weights, and of fused attention."""
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the loss, computed in 32 bits."""
    return cross_entropy(scores.flatten(0, 1).float(), targets.flatten())


def train(shape: lab.Transformer, how: Training, steps: int = 3) -> None:
    """Train a model of this shape on random tokens."""
    torch.set_default_dtype(torch.float32 if how.mixed else torch.bfloat16)
    if how.strategy.startswith("pipeline"):
        train_stage(shape, how, steps)
        return
    with torch.device("meta"):
        model = Model(shape, how.recompute, shape.layers)
    parallel = distributed(model, how)
    # The default on GPUs, where it refuses to change DTensors and other tensors at one time.
    groups = [[p for p in model.parameters() if isinstance(p, DTensor) == sharded] for sharded in (True, False)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups if group], foreach=True)
    tensor_parallel = how.strategy.startswith("TP")
    for _ in lab.steps(range(steps)):
        for number in range(how.accumulate):
            words, targets = batch(shape, how.micro_batch)
            with (
                synchronized(parallel, how, last=number == how.accumulate - 1),
                loss_parallel() if tensor_parallel else nullcontext(),
                torch.autocast("cpu", torch.bfloat16, enabled=how.mixed and not isinstance(parallel, FSDPModule)),
            ):
                (loss_of(parallel(words), targets) / how.accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()


def batch(shape: lab.Transformer, sequences: int) -> tuple[Tensor, Tensor]:
    """Return random words, and for each the one that follows, shapes (sequences, tokens)."""
    words = torch.randint(0, shape.vocabulary, (sequences, shape.sequence + 1), device=lab.device())
    return words[:, :-1], words[:, 1:]


def distributed(model: Model, how: Training) -> nn.Module:
    """Distribute a model on the meta device, and allocate this rank's part."""
    ranks = dist.get_world_size()
    if how.strategy.startswith("DDP"):
        return DistributedDataParallel(model.allocate())
    if how.strategy.startswith(("FSDP2", "ZeRO-2", "HSDP")):
        names: tuple[str, ...] = ("shard",)
        sizes: tuple[int, ...] = (ranks,)
        if how.strategy.startswith("HSDP"):
            names, sizes = ("replicate", "shard"), tuple(map(int, how.strategy.split()[1].split("×")))
        options: dict[str, Any] = {"mesh": init_device_mesh("cpu", sizes, mesh_dim_names=names)}
        if how.mixed:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if how.strategy.startswith("ZeRO-2"):
            options["reshard_after_forward"] = False
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
    elif how.strategy.startswith("TP"):
        mesh = init_device_mesh("cpu", (ranks,))
        whole = (Replicate(), None), (Replicate(),)  # the gradients of these inputs are summed once, not for each product
        inner: dict[str, Any] = {
            name: PrepareModuleInput(input_layouts=layout, desired_input_layouts=layout)
            for name, layout in zip(("attention", "mlp"), whole, strict=True)
        }
        inner |= {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        inner |= {"attention.output": RowwiseParallel(), "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
        if model.shape.style == "llama":
            inner["mlp.gate"] = ColwiseParallel()
        for block in model.blocks:
            parallelize_module(block, mesh, inner)
        outer = {
            "words": RowwiseParallel(input_layouts=Replicate()),
            "output": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        }
        parallelize_module(model, mesh, outer)
    return model.allocate()


def synchronized(model: nn.Module, how: Training, *, last: bool) -> AbstractContextManager[None]:
    """Let DDP sum the gradients of the last micro-batch only, and ZeRO-2 keep the parameters until then."""
    if isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    if isinstance(model, FSDPModule) and how.strategy.startswith("ZeRO-2"):
        model.set_reshard_after_backward(last)
    return nullcontext()


def train_stage(shape: lab.Transformer, how: Training, steps: int) -> None:
    """Train one stage of a pipeline."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    first, last = rank == 0, rank == ranks - 1
    with torch.device("meta"):
        model = Model(shape, how.recompute, shape.layers // ranks, first=first, last=last)
    model.allocate()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    hidden, scores = (
        torch.empty(how.micro_batch, shape.sequence, size, device="meta", requires_grad=True)
        for size in (shape.width, shape.vocabulary)
    )
    taken = torch.empty(how.micro_batch, shape.sequence, dtype=torch.long, device="meta") if first else hidden
    stage = PipelineStage(model, rank, ranks, lab.device(), input_args=taken, output_args=scores if last else hidden)
    schedule = Schedule1F1B(stage, n_microbatches=how.accumulate, loss_fn=loss_of)
    for _ in lab.steps(range(steps)):
        words, targets = batch(shape, how.micro_batch * how.accumulate)
        given: Any = {"target": targets} if last else {}
        schedule.step(*([words.contiguous()] if first else []), return_outputs=False, **given)  # torch 2.10 checks strides
        optimizer.step()
        optimizer.zero_grad()
