"""What a step of training asks of a cluster: parameters, floating-point operations, activations and messages.

The sizes of a `Transformer` follow from its shape; those of any other module are counted while it computes shapes only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from labkit.costs.transformer import Transformer
from labkit.errors.lists import listed
from labkit.errors.wrong_calls import check_number

if TYPE_CHECKING:
    import torch
    from torch import nn

    from labkit.costs.passes import Counted


MOST_SAMPLES: Final = 10**10  # of a step: larger numbers take long to divide


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes per parameter: of itself, its gradient, the optimizer's state, and what kernels compute with."""

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    compute_bytes: float


@dataclass(frozen=True, slots=True)
class Parts:
    """The passes of a model as a rank of tensor parallelism has it; of a module, the last part is all of it."""

    first: Counted | None  # a transformer's embedding
    layer: Counted | None
    last: Counted  # its head and the loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What one step asks for. All sizes but the parameters are for one sample, such as a sequence."""

    samples: int  # of a step, of all ranks together
    tokens: int | None  # of a sample; None: unknown
    parameters: float  # Ψ
    trained: float  # the share of them that has gradients and optimizer state
    first_parameters: float  # of these, those of the embedding
    last_parameters: float  # and of the head, which a pipeline's last stage has; a copy if it is tied to the embedding
    tied: bool
    layers: int  # equal ones; a pipeline has whole layers in each stage, FSDP gathers one at a time
    flops: float  # of both passes, as MFU counts them
    buffer_bytes: float  # of a module's own buffers, of all samples together
    # A layer's output, which tensor parallelism sums and a pipeline sends. None: unknown, so neither is possible, and
    # nothing can be recomputed.
    hidden_bytes: float | None
    heads: int  # the most ranks among which a layer can be divided
    key_heads: int  # of keys and values, which ranks share if they are fewer
    parts: Callable[[int], Parts] = field(repr=False)  # by the number of ranks that divide a layer


def workload_of(
    model: Transformer | nn.Module,
    batch: Any,
    precision: Precision,
    *,
    sequence_parallel: bool = True,
    lora_rank: int | None = None,
) -> Workload:
    """Return what a step of a model asks for.

    The batch of a transformer is the number of its sequences, that of a module its inputs, a tensor or several. A
    `TypeError` or `ValueError` says that the batch does not suit the model. Operations of a transformer: 2·Ψ per token
    and 4·l·h·s for attention, of Chowdhery et al., "PaLM", 2022, appendix B.
    """
    if not isinstance(model, Transformer):
        if lora_rank is not None:
            raise ValueError(f"lora_rank={lora_rank!r}: a module has its adapters itself; freeze the others by requires_grad")
        return _of_module(model, batch, precision)
    expected = f"batch={batch!r}: expected the sequences of a step, from 1 to {MOST_SAMPLES:,}, or tokens_per_batch="
    check_number(batch, expected, whole=True, at_least=1, below=MOST_SAMPLES + 1)
    rank = 0
    if lora_rank is not None:
        expected = f"lora_rank={lora_rank!r}: expected a whole number from 1 to the width, {model.width}"
        check_number(lora_rank, expected, whole=True, at_least=1, below=model.width + 1)
        rank = int(lora_rank)
    tokens, head, adapters = model.sequence, model.vocabulary * model.width, model.lora_parameters(rank)
    # The embedding only reads its rows; as the head, it computes. Of frozen weights no gradients are computed.
    computing = model.active_parameters - model.embedding_parameters + model.shares_output * head
    per_token = (4 if rank else 6) * computing + 6 * adapters + 12 * model.layers * model.width * tokens
    parameters = model.parameters + adapters
    return Workload(
        samples=int(batch), tokens=tokens, parameters=parameters, layers=model.layers, heads=model.all_heads,
        key_heads=model.key_heads,
        trained=adapters / parameters if rank else 1.0, first_parameters=model.embedding_parameters, last_parameters=head,
        tied=model.shares_output, flops=tokens * per_token, buffer_bytes=0.0,
        hidden_bytes=tokens * model.width * max(2.0, precision.compute_bytes),
        parts=functools.partial(_parts, model, precision.compute_bytes > 2, sequence_parallel, rank),
    )  # fmt: skip


def _parts(model: Transformer, single: bool, sequence_parallel: bool, lora_rank: int, ranks: int) -> Parts:
    import torch

    from labkit.costs.transformer_parts import Cut, counted_parts

    divides = sequence_parallel and ranks > 1 and model.sequence % ranks == 0
    return Parts(*counted_parts(model, Cut(ranks, divides, lora_rank), torch.float32 if single else torch.bfloat16))


def module_bytes(model: nn.Module) -> tuple[float, ...]:
    """Return the bytes of a module's parameter, and of a trained one.

    A `TypeError` or `ValueError` says what is wrong with the module.
    """
    from torch import nn

    if isinstance(model, type) and issubclass(model, nn.Module):
        raise TypeError(f"model={model.__name__}: expected a module; this is its class, so call it: {model.__name__}(...)")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r}: expected a lab.Transformer or a module of torch")
    name = type(model).__name__
    parameters = list(model.parameters())
    if any(isinstance(each, nn.UninitializedParameter) for each in parameters):
        raise ValueError(f"model={name}: it has lazy layers, whose sizes are unknown until the module is called once")
    if not any(each.numel() for each in parameters):
        raise ValueError(f"model={name}: expected a module with parameters")
    trained = [each for each in parameters if each.requires_grad and each.numel()]
    return tuple(
        sum(each.nbytes for each in part) / sum(each.numel() for each in part) for part in (parameters, trained or parameters)
    )


def _of_module(model: nn.Module, batch: Any, precision: Precision) -> Workload:
    """Return what a step of a module asks for: it computes shapes only, with neither numbers nor memory."""
    import torch

    inputs = batch if isinstance(batch, list | tuple) else (batch,)
    if not inputs or not all(isinstance(each, torch.Tensor) and each.dim() and len(each) for each in inputs):
        raise TypeError(f"batch={type(batch).__name__}: expected the inputs of a step, a tensor with samples, or a tuple of them")
    samples = len(inputs[0])
    if any(len(each) != samples for each in inputs):
        counts = listed([str(len(each)) for each in inputs])
        raise ValueError(f"batch: the first dimensions are {counts}; expected inputs with equally many samples")
    own = module_bytes(model)[0]
    if precision.compute_bytes > 2 and precision.compute_bytes != own:
        raise ValueError(f"compute_bytes={precision.compute_bytes:g}: expected 2, or the {own:g} of the module's own parameters")
    whole = _counted_module(model, inputs, torch.bfloat16 if precision.compute_bytes <= 2 < own else None)
    passes = whole.at(samples)
    count = sum(each.numel() for each in model.parameters())
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    parts = [sum(each.numel() for each in module.parameters(recurse=False)) for module in model.modules()]
    layers = max(1, len(list(filter(None, parts))) - 1)  # beside the largest, which FSDP gathers whole
    return Workload(
        samples=samples, tokens=None, parameters=count, trained=trained / count, layers=layers, heads=1, key_heads=1,
        first_parameters=max(parts), last_parameters=0, tied=False, hidden_bytes=None,
        flops=sum(kernel.flops for kernel in passes.forward + passes.backward) / samples,
        buffer_bytes=sum(each.nbytes for each in model.buffers()), parts=functools.partial(_whole, whole),
    )  # fmt: skip


def _whole(counted: Counted, _: int) -> Parts:
    return Parts(None, None, counted)


def _counted_module(model: nn.Module, inputs: Sequence[torch.Tensor], dtype: torch.dtype | None) -> Counted:
    """Count a module's passes; a `ValueError` says why they cannot be counted."""
    import torch

    from labkit.costs.passes import SAMPLES, Counted

    def some(given: torch.Tensor, samples: int) -> torch.Tensor:
        cast = dtype if given.is_floating_point() else None
        return torch.empty(samples, *given.shape[1:], dtype=cast or given.dtype)

    counts = (*SAMPLES, len(inputs[0]))
    name, shapes = type(model).__name__, ", ".join(f"({', '.join(map(str, ('n', *each.shape[1:])))})" for each in inputs)
    try:
        return Counted(model, lambda samples: [some(each, samples) for each in inputs], counts, dtype=dtype)
    except Exception as error:  # noqa: BLE001  # whatever the module's own code raises
        if type(error).__name__ in ("DynamicOutputShapeException", "DataDependentOutputException"):
            why = "it decides by the numbers in a tensor, and a plan knows shapes only"
        else:
            why = (str(error).splitlines() or [type(error).__name__])[0]
        shapes += f", n = {listed(list(map(str, sorted(set(counts)))))}"
        raise ValueError(f"model={name}: its step cannot be counted with inputs of the shape {shapes}: {why}") from None
