"""What a step of training asks of a cluster: parameters, floating-point operations, activations and messages.

The sizes of a `Transformer` follow from its shape; those of any other module are counted while it computes shapes only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.errors.wrong_calls import check_number, public_class

if TYPE_CHECKING:
    from torch import nn


@public_class
@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """A decoder-only transformer: `lab.Transformer(layers=32, width=4096, sequence=8192, vocabulary=128256)`.

    Args:
        layers: l, the number of layers.
        width: h, the size of a token's vector.
        sequence: s, the tokens of a sequence.
        vocabulary: V, the number of different tokens.
        heads: the number of attention heads, among which tensor parallelism divides a layer; default: width / 64.
        parameters: the number of parameters; default: 12·l·h² + 13·l·h + (V + s)·h, as in GPT-3.

    Raises:
        TypeError: an argument is not a whole number.
        ValueError: it is less than 1.

    Source: the default: D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
        Megatron-LM", SC21, equation 2.
    """

    layers: int
    width: int
    sequence: int
    vocabulary: int
    heads: int | None = None
    parameters: int | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None or name not in ("heads", "parameters"):
                check_number(value, f"Transformer({name}={value!r}): expected a whole number from 1", whole=True, at_least=1)
        if self.heads is None:
            object.__setattr__(self, "heads", max(1, self.width // 64))
        if self.parameters is None:
            layer = 12 * self.width**2 + 13 * self.width
            object.__setattr__(self, "parameters", self.layers * layer + (self.vocabulary + self.sequence) * self.width)


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes per parameter: of the parameter itself, of its gradient, and of the optimizer's state for it."""

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What one step asks for. All sizes but the parameters are for one sample, such as a sequence."""

    samples: int  # of a step, of all ranks together
    parameters: float  # Ψ
    layers: int  # equal ones; a pipeline has whole layers in each stage, FSDP gathers one at a time
    forward_flops: float  # of the forward pass; the backward pass has twice as many
    whole_bytes: float  # activations of a layer that tensor parallelism does not divide
    divided_bytes: float  # and that it divides
    # A layer's output, which tensor parallelism sums and a pipeline sends. None: unknown, so neither is possible, and
    # nothing can be recomputed.
    hidden_bytes: float | None
    output_bytes: float  # the outputs after the last layer, kept for the backward pass
    heads: int  # the most ranks among which a layer can be divided


def workload_of(model: Transformer | nn.Module, batch: Any, precision: Precision | None) -> tuple[Workload, Precision]:
    """Return what a step of a model asks for, and its bytes per parameter.

    The batch of a transformer is the number of its sequences, that of a module its inputs, a tensor or several. Without
    a precision, a transformer has mixed precision with Adam, a module its own parameters' with Adam. A `TypeError` or
    `ValueError` says that the batch does not suit the model.
    """
    if isinstance(model, Transformer):
        check_number(batch, f"batch={batch!r}: expected a number of sequences, a whole number from 1", whole=True, at_least=1)
        precision = precision or Precision(2, 2, 12)
        return _of_transformer(model, batch, precision.parameter_bytes), precision
    return _of_module(model, batch, precision)


def _of_transformer(model: Transformer, sequences: int, value_bytes: float) -> Workload:
    """Return what a step of a transformer asks for.

    Operations: 2·Ψ per token and 4·l·h·s for attention, of Chowdhery et al., "PaLM", 2022, appendix B. Activations of a
    layer: s·h·(10 + 24/t) in 16 bits, of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
    Models", 2022, equation 2, without the attention matrix, which fused kernels do not keep. Of the 34 bytes, 2 are
    masks of dropout, which do not depend on the precision: 1 of the 10 and 1 of the 24.
    """
    assert model.parameters is not None
    assert model.heads is not None
    tokens, hidden = model.sequence, model.sequence * model.width
    half = value_bytes / 2
    return Workload(
        samples=sequences, parameters=model.parameters, layers=model.layers, heads=model.heads,
        forward_flops=tokens * (2 * model.parameters + 4 * model.layers * model.width * tokens),
        whole_bytes=hidden * (9 * half + 1), divided_bytes=hidden * (23 * half + 1), hidden_bytes=hidden * value_bytes,
        output_bytes=4 * hidden * half + 4 * tokens * model.vocabulary,  # the logits in 32 bits, as Korthikanti et al. have
    )  # fmt: skip


def _of_module(model: nn.Module, batch: Any, precision: Precision | None) -> tuple[Workload, Precision]:
    """Return what a step of a module asks for: it computes shapes only, with neither numbers nor memory."""
    import torch
    from torch.func import functional_call
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils.flop_counter import FlopCounterMode

    inputs = batch if isinstance(batch, list | tuple) else (batch,)
    if not inputs or not all(isinstance(each, torch.Tensor) and each.dim() for each in inputs):
        raise TypeError(f"batch={type(batch).__name__}: expected the inputs of a step, a tensor, or a tuple of tensors")
    parameters = list(model.parameters())
    if not parameters:
        raise ValueError(f"model={type(model).__name__}: expected a module with parameters")
    shapes = {name: each.detach().to("meta") for name, each in (*model.named_parameters(), *model.named_buffers())}
    for name, _ in model.named_parameters():
        if shapes[name].is_floating_point():
            shapes[name].requires_grad_()
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        functional_call(model, shapes, tuple(each.to("meta") for each in inputs))
    own = {StorageWeakRef(each.untyped_storage()) for each in shapes.values()}
    saved = {StorageWeakRef(each.untyped_storage()): each.untyped_storage().nbytes() for each in kept}  # views share one
    activations = sum(nbytes for storage, nbytes in saved.items() if storage not in own)
    count, samples = sum(each.numel() for each in parameters), len(inputs[0])
    size = sum(each.nbytes for each in parameters) / count
    layers = sum(1 for module in model.modules() if next(module.parameters(recurse=False), None) is not None)
    work = Workload(
        samples=samples, parameters=count, layers=layers, forward_flops=counter.get_total_flops() / samples,
        whole_bytes=activations / samples / layers, divided_bytes=0.0, hidden_bytes=None, output_bytes=0.0, heads=1,
    )  # fmt: skip
    return work, precision or Precision(size, size, 2 * size)
