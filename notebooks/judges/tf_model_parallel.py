"""The exercises of lesson 11: idle devices, layers under a limit, layouts of a pair, weights per device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

from labkit.teaching.exercises.comparisons import expect_numbers, whole_number, whole_numbers, wrong_if
from labkit.teaching.exercises.exercise import Results, exercise

LESSON = "11_tf_model_parallel"

TimedSpan = tuple[str, float, float]
# The cases: spans, devices, length of the step in ms. In the second, spans overlap; in the third, a device has
# none; in the second and the last, a device's spans are not in the order of their starts.
TIMELINES: tuple[tuple[list[TimedSpan], list[str], float], ...] = (
    ([("CPU:0", 1.0, 4.0), ("CPU:1", 4.0, 8.0), ("CPU:0", 8.0, 9.0)], ["CPU:0", "CPU:1"], 10.0),
    ([("CPU:1", 6.0, 10.0), ("CPU:0", 2.0, 6.0), ("CPU:1", 7.0, 9.0), ("CPU:0", 0.0, 4.0)], ["CPU:0",
                                                                                             "CPU:1"],
     16.0),
    ([("GPU:1", 2.0, 3.0), ("GPU:0", 0.0, 2.0)], ["GPU:0", "GPU:1", "GPU:2"], 4.0),
    ([("CPU:0", 8.0, 9.0), ("CPU:0", 1.0, 4.0)], ["CPU:0"], 10.0),
)


def _other_timeline(random: Random) -> tuple[list[TimedSpan], list[str], float]:
    devices = [f"CPU:{i}" for i in range(random.randint(2, 3))]
    starts = [(random.choice(devices), random.uniform(0, 14)) for _ in range(6)]
    return [(device, start, start + random.uniform(1, 5)) for device, start in starts], devices, 20.0


@exercise(
    LESSON,
    "Spans that overlap count once, and a device without spans is idle for the whole step.", TIMELINES,
    other=_other_timeline,
)
def idle_devices(answer: Any, spans: list[TimedSpan], devices: list[str], step_ms: float) -> None:
    """idle_devices(spans, devices, step_ms): spans are (device, start_ms, end_ms) within a step from 0 to
    step_ms, and may overlap. Return a dict with the share of the step, 0 to 1, in which each of `devices` is
    idle."""
    own = {d: [(start, end) for name, start, end in spans if name == d] for d in devices}
    busy_ms = {d: _reached(sorted(times)) for d, times in own.items()}
    right = {d: 1 - busy / step_ms for d, busy in busy_ms.items()}
    # From the start of a device's first span to the end of its last one; 1 if it has none.
    lengths = {d: max(map(max, times)) - min(map(min, times)) if times else 1.0 for d, times in own.items()}
    expect_numbers(answer(spans, devices, step_ms), right, [
        ({d: 1 - share for d, share in right.items()},
         "those are the shares in which a device computes; the rest is idle"),
        ({d: 1 - sum(end - start for start, end in times) / step_ms for d, times in own.items()},
         "spans that overlap count twice: from 2 to 6 and from 0 to 4 ms, a device is busy for 6 ms, not for "
         "8"),
        ({d: 1 - _reached(times) / step_ms for d, times in own.items()},
         "a device's spans are in no order", "sort them by their start before you follow how far they reach"),
        ({d: 1 - busy_ms[d] / length for d, length in lengths.items()},
         "these are shares of the time from a device's first span to its last; the step also has a beginning "
         "and an end"),
        ({d: 100 * share for d, share in right.items()}, "those are percentages; a share is between 0 and 1"),
        ({d: share * step_ms for d, share in right.items()}, "those are milliseconds, not shares",
         "divide by the length of the step"),
    ], "idle is what is left of the step when the time in which a device has any span is taken away",
       form="a dict with a number for each device of `devices`; one without spans is idle for the whole step")


def _reached(spans: Sequence[tuple[float, float]]) -> float:
    """Return for how many ms there is at least one span; right for spans in the order of their starts."""
    covered, until = 0.0, -math.inf
    for start, end in spans:
        covered += max(end - max(start, until), 0.0)
        until = max(until, end)
    return covered


# The cases: weights and outputs in bytes, the limit, the number of devices.
MODELS: tuple[tuple[list[int], list[int], int, int], ...] = (
    ([802816, 1048576, 1048576, 10240], [131072, 524288, 131072, 5120], 2_000_000, 2),
    ([4, 4, 4, 4], [9, 1, 9, 1], 12, 2),
    ([5, 1, 6, 2, 2], [3, 8, 2, 7, 1], 9, 3),
    ([3, 3, 3], [4, 4, 4], 9, 2),
    ([2, 2, 2, 2, 8, 1], [5, 4, 6, 3, 2, 1], 8, 4),
)


@exercise(LESSON, "Every device keeps to its limit, and the cuts together send the fewest bytes.", MODELS)
def place_layers(answer: Any, weights: list[int], outputs: list[int], limit: int, devices: int) -> None:
    """place_layers(weights, outputs, limit, devices) returns the device number of each layer, never going
    down, so that no device holds more than `limit` bytes of weights, and as few bytes of outputs as possible
    cross between devices."""
    returned = answer(weights, outputs, limit, devices)
    best = min(_placements(weights, limit, devices), key=lambda place: _crossing(place, outputs))
    shown = f"given {returned!r}", f"one answer: {best}"
    given = whole_numbers(returned, "a list with the number of a device for each layer", *shown)
    wrong_if(len(given) != len(weights),
             f"the list has {len(given)} numbers for {len(weights)} layers: one for each layer, not one for "
             "each device", "", *shown)
    wrong_if(min(given) < 0 or max(given) >= devices, f"there are the devices 0 to {devices - 1}", "", *shown)
    wrong_if(any(after < before for before, after in itertools.pairwise(given)),
             "a device number goes down: layers stay in order, so a later layer is never on an earlier "
             "device", "", *shown)
    held = _held(weights, given, devices)
    wrong_if(max(held) > limit,
             f"device {held.index(max(held))} holds {max(held)} bytes, and the limit is {limit}", "", *shown)
    sent, least = _crossing(given, outputs), _crossing(best, outputs)
    if sent == least:
        return
    wrong_if(not least, "everything fits on one device, and then nothing crosses: do not cut without need",
             "", *shown)
    evenly = min(max(_held(weights, place, devices)) for place in _placements(weights, sum(weights), devices))
    wrong_if(max(held) == evenly,
             f"the weights are divided as evenly as possible, but {sent} bytes cross, and {least} would do: "
             "a cut where the output is small may be uneven", "", *shown)
    wrong_if(True,
             f"{sent} bytes cross, and {least} would do. Do you fill one device after the other? That cuts "
             "wherever one is full", "compare all places to cut", *shown)


def _held(weights: Sequence[int], place: Sequence[int], devices: int) -> list[int]:
    """Return the bytes of weights on each device."""
    held = [0] * devices
    for weight, device in zip(weights, place, strict=True):
        held[device] += weight
    return held


def _placements(weights: Sequence[int], limit: int, devices: int) -> Iterator[list[int]]:
    """All lists of ascending device numbers under which no device is over the limit."""
    for place in itertools.combinations_with_replacement(range(devices), len(weights)):
        if max(_held(weights, place, devices)) <= limit:
            yield list(place)


def _crossing(place: Sequence[int], outputs: Sequence[int]) -> int:
    cuts = zip(outputs, itertools.pairwise(place), strict=False)
    return sum(size for size, (before, after) in cuts if after != before)


WHOLE, PARTS = "unsharded", "model"
SIZE = 12  # sides of the matrices; can be divided by 2 and 3


def _pair_on_rank(answer: Callable[..., Any], devices: int) -> dict[str, Any]:
    """Compute with the student's layouts; return them, the parts' shapes, whether the product is right."""
    import numpy as np
    import tensorflow as tf
    from tensorflow.experimental import dtensor

    mesh = dtensor.create_mesh([(PARTS, devices)], devices=[f"CPU:{i}" for i in range(devices)])
    given = answer(mesh)
    if not isinstance(given, (tuple, list)) or len(given) != 3:
        return {"returned": repr(given)}
    *layouts, count = given
    names = [layout.sharding_specs if isinstance(layout, dtensor.Layout) else layout for layout in layouts]
    if not all(isinstance(own, (list, tuple)) and len(own) == 2 for own in names):
        return {"returned": repr(given)}
    random = np.random.default_rng(0)
    arrays = [random.standard_normal((SIZE, SIZE)) for _ in range(3)]

    def put(array: Any, layout: Any) -> Any:
        copies = dtensor.copy_to_mesh(array, dtensor.Layout.replicated(mesh, 2))
        return dtensor.relayout(copies, dtensor.Layout(list(layout), mesh))

    x, a, b = (put(array, layout) for array, layout in zip(arrays, ([WHOLE, WHOLE], *names), strict=True))

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow ships no types
    def product() -> object:  # no name that AutoGraph would look up: a rank has only what the judge uses
        return dtensor.relayout(tf.nn.relu(x @ a) @ b, dtensor.Layout.replicated(mesh, 2))

    result = product().numpy()
    right = np.maximum(arrays[0] @ arrays[1], 0) @ arrays[2]
    shapes = [[tuple(part.shape) for part in dtensor.unpack(tensor)] for tensor in (a, b)]
    layouts = [list(own) for own in names]
    return {"layouts": layouts, "count": count, "shapes": shapes, "right": bool(np.allclose(result, right))}


# What TensorFlow says after common mistakes in pair_layouts.
TWO_NAMES = f'a layout has two names, each "{WHOLE}" or the name of the mesh dimension, "{PARTS}"'
IN_LAYOUTS = {
    "A dimension sharding must": TWO_NAMES,
    "was repeated in sharding specification":
        f'"{PARTS}" can divide only one of the two dimensions of a matrix; the other one stays "{WHOLE}"',
}
COLUMNS_THEN_ROWS = "with columns, then rows, each device has the part of the hidden layer that its rows need"


@exercise(
    LESSON,
    "Columns, then rows: no device holds more than its share, and one all-reduce adds up the products.",
    [(2,), (3,)], on_ranks=_pair_on_rank, ranks=1, runtime="tensorflow",
    devices_per_rank=lambda devices: devices, errors=IN_LAYOUTS,
    call=lambda devices: f"pair_layouts(mesh) on {devices} devices",
)
def pair_layouts(results: Results, _: int) -> None:
    """pair_layouts(mesh) returns (layout of a, layout of b, number of all-reduces) for relu(x @ a) @ b with a
    whole x and a whole result: as few all-reduces as possible, and each device holds only its share of a and
    b."""
    found = results[0]
    wrong_if("returned" in found,
             "expected three values: the layout of a, the layout of b, each with two names, and a number",
             "", f"given {found.get('returned')}")
    a, b = found["layouts"]
    shown = f"a: {a}, each device has {found['shapes'][0]}", f"b: {b}, each device has {found['shapes'][1]}"
    columns, rows, whole = [WHOLE, PARTS], [PARTS, WHOLE], [WHOLE, WHOLE]
    wrong_if(whole in (a, b), "a copy on each device saves no memory", "divide both matrices", *shown)
    wrong_if((a, b) == (rows, columns),
             "rows, then columns: the hidden layer must be added up, and the output gathered",
             "try the other order", *shown)
    wrong_if((a, b) == (columns, columns),
             "both by columns: what does the second product need of the hidden "
             "layer?", COLUMNS_THEN_ROWS, *shown)
    wrong_if((a, b) == (rows, rows),
             "both by rows: the first product must be added up before ReLU, and then the second one",
             COLUMNS_THEN_ROWS, *shown)
    wrong_if((a, b) != (columns, rows) or not found["right"], TWO_NAMES, "", *shown)
    count = found["count"]
    wrong_if(whole_number(count) is None,
             "the third value is a number: how many all-reduces the forward pass has", "", f"given {count!r}")
    wrong_if(count == 2, "the layouts are right, the number is not: two are those of a whole training step",
             "the forward pass has only g", f"given {count}")
    wrong_if(count != 1, "the layouts are right, the number is not",
             "adding up the products with each device's rows is an all-reduce", f"given {count}")


Shape = tuple[int, ...]
# The cases: shapes, layouts, mesh.
MESHES: tuple[tuple[list[Shape], list[list[str]], dict[str, int]], ...] = (
    ([(784, 256), (256, 1024), (1024, 256), (256, 10)],
     [[WHOLE, WHOLE], [WHOLE, "model"], ["model", WHOLE], [WHOLE, WHOLE]], {"model": 2}),
    ([(8, 16), (16,), (16, 8)], [[WHOLE, "model"], ["model"], ["model", WHOLE]], {"batch": 2, "model": 4}),
    ([(12, 6), (6,), (6, 12)], [["batch", "model"], [WHOLE], [WHOLE, "batch"]], {"batch": 3, "model": 2}),
)


def _other_weights(random: Random) -> tuple[list[Shape], list[list[str]], dict[str, int]]:
    mesh = {"batch": random.randint(2, 4), "model": random.randint(2, 4)}
    # 2, 3 and 4 divide the sides.
    shapes = [(12 * random.randint(1, 9), 12 * random.randint(1, 9)) for _ in range(3)]
    pairs = [[WHOLE, WHOLE], [WHOLE, "model"], ["model", WHOLE], ["batch", "model"], [WHOLE, "batch"]]
    return [*shapes], [random.choice(pairs) for _ in shapes], mesh


@exercise(
    LESSON,
    "Along a mesh dimension that a layout does not name, a weight is copied; along the others it is divided.",
    MESHES, other=_other_weights,
)
def weights_per_device(
    answer: Any, shapes: list[Shape], layouts: list[list[str]], mesh: dict[str, int]
) -> None:
    """weights_per_device(shapes, layouts, mesh) returns how many numbers one device holds of weights with
    these shapes and DTensor layouts, on a mesh such as {"batch": 2, "model": 4}."""
    weights = list(zip(shapes, layouts, strict=True))
    right = sum(math.prod(shape) // math.prod(mesh.get(n, 1) for n in layout) for shape, layout in weights)
    total, size = sum(math.prod(shape) for shape in shapes), math.prod(mesh.values())
    by_all = [math.prod(shape) / (size if {*layout} != {WHOLE} else 1) for shape, layout in weights]
    by_one = [math.prod(shape) / next((mesh[n] for n in layout if n in mesh), 1) for shape, layout in weights]
    sides = [
        side / mesh.get(n, 1) for shape, layout in weights for side, n in zip(shape, layout, strict=True)
    ]
    expect_numbers(answer(shapes, layouts, mesh), right, [
        (total,
         "that is the whole model: a dimension with the name of a mesh dimension is divided by its size"),
        (right * 4, "those are bytes; the question is how many numbers"),
        (sum(by_all),
         "divide by the mesh dimensions that a layout names, not by all devices: along others, weights are "
         "copied"),
        (total / size,
         "unsharded weights are copied to every device: only divide the dimensions that name a mesh "
         "dimension"),
        (sum(by_one), "a layout may name two mesh dimensions", "divide by both"),
        (right * size, "that is what all devices hold together: asked is one device"),
        (sum(sides), "the sides of a part are added up", "multiply them"),
    ], "divide each side of a weight by the size of the mesh dimension that the layout names for it")
