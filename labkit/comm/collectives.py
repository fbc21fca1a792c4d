"""The methods of torch's process group that are collectives, and what the student calls them."""

from __future__ import annotations

from typing import Final

__all__ = ["COLLECTIVES", "WITH_ROOT"]

# A method of torch's process group, and what the student calls it. Some have two names: that of torch 2.11, and that since 2.13.
COLLECTIVES: Final = {
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "all_gather_single_coalesced": "all_gather_into_tensor_coalesced",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "gather": "gather",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "scatter": "scatter",
}
WITH_ROOT: Final = ("broadcast", "gather", "reduce", "scatter")
