"""The colour of each operation that moves bytes between ranks: the same in every figure."""

from __future__ import annotations

from typing import Final

__all__ = ["OPERATIONS", "colour_of"]

# By how the names of operations begin, the colour that they have in every figure: warm as all communication is, and apart for
# colour-blind eyes as well. Those of Okabe and Ito that no compute has, and others found by search to be far from them.
OPERATIONS: Final = {
    "all_reduce": "#D26978",
    "all_gather": "#E69F00",
    "all_to_all": "#C3A55A",
    "reduce_scatter": "#CC79A7",
    "reduce": "#780000",  # after the one of which it is the beginning
    "broadcast": "#A52D96",
    "gather": "#78693C",
    "scatter": "#FFB4FF",
    "send": "#7A3E65",
    "rpc": "#D55E00",
    "remote": "#D55E00",
    "reply": "#F0E442",
    "value": "#F0E442",
    "gradients": "#CC79A7",
    "received": "#CC79A7",  # gradients of a distributed backward pass
    "to_here": "#E69F00",  # as all_gather, which no group with remote calls has beside it as a rule
    "": "#690F2D",  # all that this table does not know
}


def colour_of(name: str) -> str:
    """Of an operation as a trace calls it: "all_gather_into_tensor", "rpc_async Shard.forward"."""
    return next(colour for begin, colour in OPERATIONS.items() if name.startswith(begin))
