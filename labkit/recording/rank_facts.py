"""Facts about training that a rank notes for a comparison with those of other ranks after the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

SKETCH: Final = 16  # numbers of each tensor, of whatever size


class FactKind(Enum):
    """What a fact is about, and what its values are by name."""

    INPUTS = "a training forward pass of a data-parallel model: the digest of each input, and its number of rows"
    GRADIENTS = "DistributedDataParallel's gradients after a backward pass outside of no_sync: their digests"
    PARAMETERS = "an optimizer's parameters that are not sharded: their digests"
    LAST_PARAMETERS = "the same after the run"
    SAMPLES = "a training forward pass before the first step: the digests of its first input's rows; None if too many"
    FIRST_GRADIENTS = "the gradients of an optimizer's first step: their sketches"
    LAST_VALUES = "an optimizer's parameters after the run: their sketches"
    BUFFERS = "DistributedDataParallel's running means: their means, and the standard deviations of what they are means of"
    OPERAND = "what a rank has given to an all-gather or all-reduce: its digest; without a line in a backward pass"
    RATES = "the learning rates of an optimizer whose gradients DistributedDataParallel averages, by group of parameters"
    BYPASSED = "a training forward pass of a DistributedDataParallel's `module`: an optimizer's steps before DDP was called"
    NO_GRADIENTS = "an optimizer's first step without any gradient: such steps, and whether others had gradients"
    SAMPLER = (
        "a pass over a DistributedSampler: its seed, epoch and sizes, and how often the rank has trained until the next pass"
    )
    NO_SYNC = "backward passes inside of no_sync that reduced gradients: how many, and the number of reductions"
    LOSS = "a loss that is not finite"
    LOADER = "a DataLoader over which the rank has iterated: its number of workers"
    EMPTY_REPLICAS = "the replicas of TensorFlow's that have no samples in a batch, after as many batches as steps"
    RUN = "at the end: the threads of an operator of torch, the steps in which tensors were noted, and backward passes"


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact of one rank."""

    kind: FactKind
    step: int  # the number of optimizer steps before it
    line: str  # the student's line
    # what must be the same on the ranks to be compared: a process group and an operation's number, an optimizer, ...
    of: str = ""
    ranks: tuple[int, ...] = ()  # the ranks whose facts are compared; () for all that were called
    # its values by name. Tensors with the same bits have the same digest; a sketch is a few numbers that depend
    # linearly on a tensor's elements. None for a tensor that does not exist, or has neither.
    values: dict[str, Any] = field(default_factory=dict)
