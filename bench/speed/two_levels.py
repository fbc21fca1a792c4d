"""Predictions over a network of two nodes beside measurements: collectives, messages, all-reduces written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import labkit as lab
from bench.speed.repetitions import Times, repeated, seconds
from labkit.errors.units import in_words

NETWORK: Final = lab.Network(
    nodes=2, inside=lab.Link(gbit_per_s=2, latency_us=1000), between=lab.Link(gbit_per_s=0.5, latency_us=10_000)
)
RANKS: Final = 4
LARGE: Final = 1_000_000  # bytes
SMALL: Final = 4_000


def exchange(x: torch.Tensor, to: int, other: torch.Tensor, source: int) -> None:
    """Send one tensor while another arrives."""
    sent, received = dist.isend(x, to), dist.irecv(other, source)
    assert sent is not None
    assert received is not None
    received.wait()
    sent.wait()


def ring(x: torch.Tensor) -> None:
    """An all-reduce around a ring: each step sends a part to the next rank and receives one from the last."""
    rank, p = dist.get_rank(), dist.get_world_size()
    parts, other = list(x.chunk(p)), torch.empty(len(x) // p)
    for step in range(p - 1):
        exchange(parts[(rank - step) % p], (rank + 1) % p, other, (rank - 1) % p)
        parts[(rank - step - 1) % p] += other
    for step in range(p - 1):
        exchange(parts[(rank + 1 - step) % p], (rank + 1) % p, parts[(rank - step) % p], (rank - 1) % p)


def tree(x: torch.Tensor) -> None:
    """An all-reduce up a binomial tree to rank 0 and down again, for a power of two ranks."""
    rank, p, other = dist.get_rank(), dist.get_world_size(), torch.empty_like(x)
    distances = [1 << k for k in range((p - 1).bit_length())]
    for distance in distances:
        if rank % (2 * distance) == distance:
            dist.send(x, rank - distance)
        elif rank % (2 * distance) == 0:
            dist.recv(other, rank + distance)
            x += other
    for distance in reversed(distances):
        if rank % (2 * distance) == 0:
            dist.send(x, rank + distance)
        elif rank % (2 * distance) == distance:
            dist.recv(x, rank - distance)


def timed(nbytes: int) -> dict[str, Times]:
    """In a rank: the times of everything."""
    rank, x = dist.get_rank(), torch.ones(nbytes // 4)
    other, quarters, halves = torch.empty_like(x), list(x.clone().chunk(RANKS)), list(x.clone().chunk(2))
    mine, part = quarters[0].clone(), halves[0].clone()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    local, node = mesh.get_group("local"), mesh.get_group("node")

    def hierarchical() -> None:
        dist.reduce_scatter(part, halves, group=local)
        dist.all_reduce(part, group=node)
        dist.all_gather(halves, part, group=local)

    def message(source: int, destination: int) -> Callable[[], None]:
        def action() -> None:
            if rank == source:
                dist.send(x, destination)
            elif rank == destination:
                dist.recv(x, source)

        return action

    actions: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(x),
        "broadcast": lambda: dist.broadcast(x, 0),
        "all_gather": lambda: dist.all_gather(quarters, mine),
        "all_to_all": lambda: dist.all_to_all_single(other, x),
        "all_reduce inside each node": lambda: dist.all_reduce(x, group=local),
        "a message inside a node": message(0, 1),
        "a message between nodes": message(1, 2),
        "all_reduce by hand, ring": lambda: ring(x),
        "all_reduce by hand, tree": lambda: tree(x),
        "all_reduce by level, with subgroups": hierarchical,
    }
    return {name: repeated(action) for name, action in actions.items()}


def predicted(nbytes: int, network: lab.Network) -> dict[str, float]:
    """The same from the formulas."""
    of: Callable[..., float] = lab.predict.all_reduce
    return {
        "all_reduce": of(nbytes, RANKS, network),
        "broadcast": lab.predict.broadcast(nbytes, RANKS, network),
        "all_gather": lab.predict.all_gather(nbytes, RANKS, network),
        "all_to_all": lab.predict.all_to_all(nbytes, RANKS, network),
        "all_reduce inside each node": of(nbytes, [0, 1], network),
        "a message inside a node": lab.predict.message(nbytes, network, ranks=(0, 1)),
        "a message between nodes": lab.predict.message(nbytes, network, ranks=(1, 2)),
        "all_reduce by hand, ring": of(nbytes, RANKS, network, algorithm="ring"),
        "all_reduce by hand, tree": of(nbytes, RANKS, network, algorithm="tree"),
        "all_reduce by level, with subgroups": of(nbytes, RANKS, network, algorithm="hierarchical"),
    }


def two_levels() -> Iterator[tuple[str, float, float]]:
    """Four ranks on two nodes, with large tensors and with small ones."""
    with lab.Group(RANKS, link=NETWORK) as group:
        network = group.link
        assert isinstance(network, lab.Network)
        for nbytes in (LARGE, SMALL):
            results = group.run(timed, nbytes).results
            for name, formula_s in predicted(nbytes, network).items():
                if nbytes == SMALL and "inside" in name:
                    continue  # gloo's own time exceeds the link's
                yield f"{name}, {in_words(nbytes, 'B')}, 2 nodes of 2 ranks", formula_s, seconds([r[name] for r in results])
