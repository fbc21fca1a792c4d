"""The exercises of lesson 14: memory, a mesh, the cheapest cluster, a plan's limit, TensorFlow's choices."""

from __future__ import annotations

import math
from functools import cache
from random import Random
from typing import Any, Final

from labkit.costs.cluster import Cluster
from labkit.costs.device import Device
from labkit.costs.estimate import Estimate
from labkit.costs.link import Link
from labkit.costs.network import Network
from labkit.costs.plan import plan
from labkit.costs.transformer import Transformer
from labkit.errors.wrong_calls import did_you_mean, one_number
from labkit.teaching.exercises.comparisons import Hint, equal, expect, expect_numbers, wrong_if
from labkit.teaching.exercises.exercise import exercise

LESSON = "14_choose_a_strategy"


def _other_memory(random: Random) -> tuple[Any, ...]:
    stages, tensor, shards = (2 ** random.randrange(4) for _ in range(3))
    layers, micro_batches = stages * random.randint(4, 12), random.randint(1, 12)
    layer_bytes, zero = random.uniform(5e7, 2e8), random.randrange(4)
    return random.uniform(1e9, 8e10), layers, layer_bytes, stages, tensor, shards, zero, micro_batches


@exercise(
    LESSON,
    "Stages and tensor parallelism divide everything, shards what their ZeRO stage says; 1F1B keeps a "
    "micro-batch per stage.",
    [
        (8e9, 32, 1e8, 4, 2, 16, 2, 8),
        (8e9, 32, 1e8, 1, 1, 8, 3, 2),
        (70e9, 80, 2e8, 8, 8, 1, 0, 4),
        (1e9, 24, 5e7, 1, 4, 2, 1, 4),
    ],
    other=_other_memory,
)
def strategy_memory(
    answer: Any, parameters: float, layers: int, layer_bytes: float, stages: int, tensor: int, shards: int,
    zero: int, micro_batches: int,
) -> None:
    """strategy_memory(parameters, layers, layer_bytes, stages, tensor, shards, zero, micro_batches) returns a
    dictionary with the bytes of a rank of the first stage: parameters, gradients, optimizer and
    activations."""

    def memory(own: float, zero: int, shards: int, kept: float) -> dict[str, float]:
        divided = [shards if zero >= least else 1 for least in (3, 2, 1)]
        state = [size * own / parts for size, parts in zip((2, 2, 12), divided, strict=True)]
        kinds = "parameters", "gradients", "optimizer", "activations"
        return dict(zip(kinds, [*state, kept * layer_bytes], strict=True))

    def otherwise(given: dict[str, float]) -> Hint:
        # No kind is wrong in a right answer: this is asked before the comparison.
        kind = next((kind for kind in right if not equal(given[kind], right[kind])), "")
        if kind == "activations":
            return ("the bytes of the activations are not right",
                    "layers of the stage × micro-batches under way × layer_bytes, which is of one rank already")
        return (f"the bytes of the {kind} are not right",
                "2 bytes per parameter, 2 for its gradient from ZeRO stage 2 sharded, 12 for Adam from stage 1; "
                "stage 3 shards all")

    own, of_stage = parameters / (stages * tensor), layers / stages
    kept = min(micro_batches, stages) * of_stage
    right = memory(own, zero, shards, kept)
    given = answer(parameters, layers, layer_bytes, stages, tensor, shards, zero, micro_batches)
    expect_numbers(given, right, [
        (memory(own, zero, shards, micro_batches * of_stage),
         "here 1F1B keeps the activations of all micro-batches, as GPipe does",
         "the first stage sends off as many micro-batches as there are stages; then each backward frees one"),
        (memory(own, zero, shards, of_stage),
         "here the first stage keeps one micro-batch, which is so on the last stage",
         "how many does the first stage send off before the first gradient comes back?"),
        (memory(own, zero, shards, min(micro_batches, stages) * layers),
         "here a stage keeps the activations of all layers; it has only its own"),
        (memory(own, 3, shards, kept),
         "the shards divide parameters, gradients and optimizer state alike, whatever the ZeRO stage",
         "stage 1 shards the optimizer state, 2 also the gradients, 3 also the parameters"),
        (memory(own, 0, shards, kept), "nothing is sharded here, whatever the ZeRO stage",
         "stage 1 shards the optimizer state, 2 also the gradients"),
        (memory(parameters / stages, zero, shards, kept),
         "tensor parallelism divides parameters, gradients and optimizer state, too"),
        (memory(parameters / tensor, zero, shards, kept),
         "a rank has the parameters of its own stage only"),
        (memory(own, zero, shards, kept / shards),
         "shards divide the state of the model; activations belong to a rank's own data",
         "do not divide the activations by the shards"),
    ], otherwise, form="a dictionary with four numbers")


STATE_BYTES: Final = 16  # per parameter, in mixed precision with Adam


@exercise(
    LESSON,
    "The model is divided no more than it must be: inside a node as far as that goes, then into stages.",
    [(70e9, 80, 16, 8), (7e9, 80, 2, 8), (1e9, 80, 1, 4), (13e9, 24, 4, 4), (7e9, 16, 8, 2), (5e9, 80, 2, 8)],
    other=lambda random: (
        random.uniform(1e9, 6e10), random.uniform(16, 80), random.choice([8, 16]), random.choice([8, 16])
    ),
)
def mesh_for(answer: Any, parameters: float, memory_gb: float, nodes: int, per_node: int) -> None:
    """mesh_for(parameters, memory_gb, nodes, per_node) returns the sizes [pp, dp, tp] of a mesh, powers of
    two: the model is divided among as few ranks as its 16 bytes per parameter allow, by tensor parallelism
    first, but only inside a node."""
    ranks = nodes * per_node

    def mesh(parts: int, most_tensor: int = per_node) -> list[int]:
        tensor = min(parts, most_tensor)
        return [parts // tensor, ranks // parts, tensor]

    def parts_for(state_bytes: float) -> int:
        return int(2 ** math.ceil(max(0.0, math.log2(state_bytes * parameters / (memory_gb * 1e9)))))

    def otherwise(given: list[int]) -> Hint:
        if math.prod(given) != ranks:
            return (f"{given[0]} × {given[1]} × {given[2]} ranks are not {ranks}",
                    "dp = nodes · per_node / (pp · tp)")
        held = STATE_BYTES * parameters / (given[0] * given[2]) / 1e9
        if held > memory_gb:
            return (f"it does not fit: a rank would hold {held:.4g} GB",
                    "divide by pp · tp, and round up to a power of two")
        if sorted(given) == sorted(right):
            return ("these are the right sizes in another order", "return [pp, dp, tp]")
        return ("the model is divided among more ranks than it needs", "first tp, up to per_node, then pp")

    parts = parts_for(STATE_BYTES)
    right = mesh(parts)
    expect_numbers(answer(parameters, memory_gb, nodes, per_node), right, [
        (mesh(parts, ranks), "the tensor-parallel ranks are on several nodes",
         "its all-reduces are exposed in every layer: tp is at most per_node, and stages divide the rest"),
        (mesh(parts, 1), "the model is divided into stages only",
         "tensor parallelism inside a node comes first: it has no bubble"),
        (mesh(parts_for(2)), "this has room for the parameters alone, 2 bytes each",
         "gradients and Adam's state count, too: 16 bytes"),
        (mesh(parts_for(4)), "this has room for parameters and gradients only",
         "Adam's state takes 12 bytes more: 16 in all"),
        (mesh(ranks), "this divides the model among all ranks, so that there is one replica",
         "as few parts as fit: every further rank is a replica, which communicates less"),
    ], otherwise, form="three whole numbers, [pp, dp, tp]")


_FAST: Final = Link(gbit_per_s=3200, latency_us=2)
_SLOW: Final = Link(gbit_per_s=25, latency_us=20)
_SMALL: Final = Device(tflop_per_s=100, gbyte_per_s=600, memory_gb=24, name="small")
_TINY: Final = Device(tflop_per_s=650, gbyte_per_s=600, memory_gb=4, name="tiny")
SEVEN_B: Final = Transformer(layers=32, width=4096, sequence=2048, vocabulary=32000)
BATCH: Final = 64
Offers = list[tuple[float, Cluster]]  # price per hour, and cluster


def _nodes(count: int, device: Device, between: Link = _FAST) -> Cluster:
    network = Network(nodes=count, inside=Link.nvlink4, between=between)
    return Cluster(ranks=8 * count, device=device, link=network)


OFFERS: Final[Offers] = [  # each known mistake chooses another one
    (180.0, _nodes(4, Device.h100)),  # the fastest
    (5.5, _nodes(1, _SMALL)),  # the lowest price per hour, but late
    (30.0, _nodes(1, Device.h100)),  # right
    (5.0, _nodes(1, _TINY)),  # too little memory
    (26.0, _nodes(4, _SMALL)),  # the lowest price per hour of those in time
    (9.0, _nodes(2, _SMALL)),  # the cheapest, but late
]
OTHER_OFFERS: Final[Offers] = [
    (180.0, _nodes(4, Device.h100, _SLOW)),
    (85.0, _nodes(2, Device.h100, _SLOW)),
    (95.0, _nodes(2, Device.h100)),
]


@cache
def _best(model: Transformer, batch: int, cluster: Cluster) -> tuple[float, bool]:
    """Return the seconds of the first row's step, and whether it fits."""
    row = plan(model, batch, cluster).rows[0]
    return row.step_s, row.fits


def _at_other_prices(random: Random) -> Offers:
    offers = [(round(price * random.uniform(0.6, 1.6), 2), cluster) for price, cluster in OFFERS]
    random.shuffle(offers)
    return offers


@exercise(
    LESSON, "The right offer is neither the fastest nor the one with the lowest price per hour.",
    [(OFFERS, SEVEN_B, BATCH, 10_000, 6.0), (OTHER_OFFERS, SEVEN_B, BATCH, 50_000, 20.0)],
    other=lambda random: (_at_other_prices(random), SEVEN_B, BATCH, 10_000, 6.0),
    call="cheapest(offers, model, batch={batch}, steps={steps}, hours={hours})",
)
def cheapest(answer: Any, offers: Offers, model: Transformer, batch: int, steps: int, hours: float) -> None:
    """cheapest(offers, model, batch, steps, hours) returns the index of the offer that costs least of those
    that finish in time. `offers` is a list of pairs: price per hour, and a lab.Cluster."""
    best = [_best(model, batch, cluster) for _, cluster in offers]
    needed = [steps * step_s / 3600 for step_s, _ in best]
    fits = [k for k, (_, fits) in enumerate(best) if fits]
    in_time = [k for k in fits if needed[k] <= hours]

    def price(k: int) -> float:
        return offers[k][0]

    def total(k: int) -> float:
        return price(k) * needed[k]

    without_memory = [k for k, hours_needed in enumerate(needed) if hours_needed <= hours]
    expect_numbers(answer(offers, model, batch, steps, hours), min(in_time, key=total), [
        (min(without_memory, key=total), "nothing fits on this cluster",
         "`fitting` has only the strategies that fit; it may be empty"),
        (min(fits, key=total), "this offer is the cheapest, but it finishes too late"),
        (min(fits, key=price), "this offer has the lowest price per hour, and finishes too late",
         "multiply by the hours that it needs"),
        (min(in_time, key=price), "this offer has the lowest price per hour of those in time",
         "multiply by the hours that it needs"),
        (min(in_time, key=needed.__getitem__),
         "this offer is the fastest; another one finishes in time and costs less"),
    ], "another offer finishes in time and costs less", "an offer costs price · steps · step_s / 3600")


def _rows(_: Random) -> list[tuple[Estimate, str]]:
    """Rows of plans, and what limits each."""
    small = Transformer(layers=4, width=256, sequence=32, vocabulary=64)
    device = Device(tflop_per_s=0.05, gbyte_per_s=8)

    def row(name: str, inside: float, between: float, batch: int = 8, factor: float = 1) -> Estimate:
        links = [Link(gbit_per_s=rate, latency_us=100) for rate in (inside, between)]
        network = Network(nodes=2, inside=links[0], between=links[1])
        faster = Device(tflop_per_s=factor * device.tflop_per_s, gbyte_per_s=factor * device.gbyte_per_s)
        cluster = Cluster(ranks=4, device=faster, link=network)
        return plan(small, batch, cluster, parameter_bytes=4)[name]

    return [
        (row("DDP 2 × pipeline 2", 0.2, 0.1), "replicate"),
        (row("pipeline 4", 50, 50, batch=64), "compute"),
        (row("pipeline 2 × TP 2", 0.02, 10), "tensor"),
        (row("pipeline 4", 0.2, 0.05, factor=4), "pipeline"),
        (row("FSDP2 4", 1, 0.1), "shard"),
    ]


@exercise(
    LESSON, "Five plans, each slow for another reason; the factor is the most that removing this part can gain.",
    _rows, call="slow_part(row) with the row {row.name!r}",
)
def slow_part(answer: Any, row: Estimate, part: str) -> None:
    """slow_part(row) returns a pair: the part of a row of a plan that takes longest ("compute", "bubble" or
    an axis such as "replicate"), and how many times as fast the step would be if this part took no time."""
    parts = {"compute": row.compute_s, "bubble": row.bubble_s, **row.exposed_s}
    given = answer(row)
    wrong_if(not isinstance(given, tuple | list) or len(given) != 2 or not isinstance(given[0], str),
             f"given {given!r}: expected a pair, such as ('bubble', 1.5)")
    name, factor = given[0], one_number(given[1])
    wrong_if(name not in parts, f"{name!r} is no part of this row: {did_you_mean(name, list(parts))}")
    wrong_if(name != part and name == max(row.exposed_s, key=row.exposed_s.__getitem__),
             f"{name} is the longest communication, but {part} takes longer: computing and bubble are parts, "
             "too")
    wrong_if(name != part,
             f"{name} takes {parts[name] / row.step_s:.0%} of the step; another part takes longer")
    wrong_if(factor is None,
             f"given {given[1]!r}: expected a number, how many times as fast the step would be")
    left_s = row.step_s - parts[part]
    expect(factor, row.step_s / left_s, [
        (parts[part] / row.step_s, "this is the share of the step that the part takes",
         "what is left of the step without it?"),
        (left_s / row.step_s, "this is upside down: it would be faster, so the factor is above 1"),
        (row.step_s / parts[part], "this divides the step by the part",
         "the new step is the old one without the part"),
        (left_s, "these are the seconds that are left; how many times as fast is that?"),
    ], "the factor is not right", "old step divided by the step without this part")


RIGHT: Final = {
    "A": "MirroredStrategy", "B": "MultiWorkerMirroredStrategy", "C": "ParameterServerStrategy",
    "D": "OneDeviceStrategy", "E": "DTensor", "F": "PyTorch FSDP2",
}
# Why the nearest alternative is rejected; any other choice gets the question of the situation.
REJECTED: Final = {
    ("A", "MultiWorkerMirroredStrategy"):
        "one machine needs no processes: one program drives all its devices",
    ("B", "MirroredStrategy"): "it sees the devices of one machine only",
    ("B", "ParameterServerStrategy"): "its updates are asynchronous, so two runs differ",
    ("C", "MultiWorkerMirroredStrategy"):
        "its all-reduces wait for the slowest worker, and one death ends the training of all",
    ("C", "MirroredStrategy"): "it copies the tables to every device, and sees one machine only",
    ("D", "MirroredStrategy"):
        "with one device there is nothing to mirror; its loop works unchanged with a simpler strategy",
    ("E", "MirroredStrategy"): "it copies the whole matrix to each device, where it does not fit",
    ("E", "PyTorch FSDP2"):
        "it gathers a layer before it computes it, and the whole matrix does not fit on a device",
    ("E", "ParameterServerStrategy"):
        "the servers hold the matrix, but each worker needs all of it to compute",
    ("F", "MirroredStrategy"): "every device would hold 7 billion times 16 bytes, 112 GB",
    ("F", "DTensor"):
        "a layout could shard the state, but optimizer, mixed precision and checkpoints are then your own "
        "work",
}
QUESTIONS: Final = {
    "A": "how many machines are there, and does a copy of the model fit on a device?",
    "B": "how many machines are there, and must all replicas stay equal?",
    "C": "do the workers have the same speed, may one die, and where do the tables fit?",
    "D": "how many devices are there?",
    "E": "what is too large for one device: the data, the model, or a single layer?",
    "F": "how many bytes does a rank hold, and which framework shards all of them?",
}


@exercise(
    LESSON, "Six right choices. Could you defend each against the nearest alternative?",
    call="tensorflow_choices()",
)
def tensorflow_choices(answer: Any) -> None:
    """tensorflow_choices() returns a dictionary with the best choice for each of the situations A to F, one
    of: MirroredStrategy, MultiWorkerMirroredStrategy, ParameterServerStrategy, OneDeviceStrategy, DTensor,
    PyTorch FSDP2."""
    given = answer()
    wrong_if(not isinstance(given, dict), f"given {given!r}: expected a dictionary with the keys A to F")
    for letter in RIGHT:
        wrong_if(letter not in given, f"{letter} is missing: expected a dictionary with the keys A to F")
    for letter, right in RIGHT.items():
        choice = given[letter]
        among = did_you_mean(str(choice), list(RIGHT.values()))
        wrong_if(choice not in RIGHT.values(), f"{letter}: {choice!r} is none of the choices; {among}")
        why = REJECTED.get((letter, choice), QUESTIONS[letter])
        wrong_if(choice != right, f"{letter}: {choice} is not the best choice: {why}")
