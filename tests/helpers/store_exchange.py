"""Values that ranks exchange through their store: no operation, so no judge that counts messages may accept it."""

from __future__ import annotations

import pickle
from typing import Any


def through_the_store(value: Any) -> list[Any]:
    """Return the values of all ranks, in order; each rank calls this once in a run."""
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    calls = store.add(f"calls of rank {dist.get_rank()}", 1)
    store.set(f"{calls} of rank {dist.get_rank()}", pickle.dumps(value))
    return [pickle.loads(store.get(f"{calls} of rank {rank}")) for rank in range(dist.get_world_size())]
