"""The exercises of lesson 11: idle devices, layers under a memory limit, layouts of a pair, weights per device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

from labkit.teaching.exercises.calculations import Expected, calculation
from labkit.teaching.exercises.comparisons import whole_number, whole_numbers
from labkit.teaching.exercises.judging import AnswerError, Hint, OnRanks, exercise, explaining, showing

LESSON = "11_tf_model_parallel"

# --------------------------------------------------------------------------------------------------------- idle_devices

TimedSpan = tuple[str, float, float]
# The cases: spans, devices, length of the step in ms. In the second, spans overlap; in the third, a device has none; in
# the second and the last, a device's spans are not in the order of their starts.
TIMELINES: tuple[tuple[list[TimedSpan], list[str], float], ...] = (
    ([("CPU:0", 1.0, 4.0), ("CPU:1", 4.0, 8.0), ("CPU:0", 8.0, 9.0)], ["CPU:0", "CPU:1"], 10.0),
    ([("CPU:1", 6.0, 10.0), ("CPU:0", 2.0, 6.0), ("CPU:1", 7.0, 9.0), ("CPU:0", 0.0, 4.0)], ["CPU:0", "CPU:1"], 16.0),
    ([("GPU:1", 2.0, 3.0), ("GPU:0", 0.0, 2.0)], ["GPU:0", "GPU:1", "GPU:2"], 4.0),
    ([("CPU:0", 8.0, 9.0), ("CPU:0", 1.0, 4.0)], ["CPU:0"], 10.0),
)


def _other_timeline(random: Random) -> tuple[list[TimedSpan], list[str], float]:
    devices = [f"CPU:{i}" for i in range(random.randint(2, 3))]
    starts = [(random.choice(devices), random.uniform(0, 14)) for _ in range(6)]
    return [(device, start, start + random.uniform(1, 5)) for device, start in starts], devices, 20.0


@calculation(
    LESSON,
    "idle_devices(spans, devices, step_ms): spans are (device, start_ms, end_ms) within a step from 0 to step_ms, and may "
    "overlap. Return a dict with the share of the step, 0 to 1, in which each of `devices` is idle.",
    "Spans that overlap count once, and a device without spans is idle for the whole step.",
    TIMELINES,
    other=_other_timeline,
)
def _idle_devices(spans: list[TimedSpan], devices: list[str], step_ms: float) -> Expected:
    right = {device: 1 - _covered(spans, device) / step_ms for device in devices}
    mistakes: dict[Hint, dict[str, float]] = {
        "those are the shares in which a device computes; the rest is idle": {d: 1 - v for d, v in right.items()},
        "spans that overlap count twice: from 2 to 6 and from 0 to 4 ms, a device is busy for 6 ms, not for 8": {
            d: 1 - _added(spans, d) / step_ms for d in devices
        },
        ("a device's spans are in no order", "sort them by their start before you follow how far they reach"): {
            d: 1 - _unsorted(spans, d) / step_ms for d in devices
        },
        "these are shares of the time from a device's first span to its last; the step also has a beginning and an end": {
            d: 1 - _covered(spans, d) / _length(spans, d) for d in devices
        },
        "those are percentages; a share is between 0 and 1": {d: 100 * value for d, value in right.items()},
        ("those are milliseconds, not shares", "divide by the length of the step"): {d: v * step_ms for d, v in right.items()},
    }
    otherwise = "idle is what is left of the step when the time in which a device has any span is taken away"
    form = "a dict with a number for each device of `devices`; one without spans is idle for the whole step"
    return Expected(right, mistakes, otherwise, form)


def _of(spans: Sequence[TimedSpan], device: str) -> list[tuple[float, float]]:
    return sorted((start, end) for name, start, end in spans if name == device)


def _covered(spans: Sequence[TimedSpan], device: str) -> float:
    """Return for how many ms a device has at least one span."""
    return _reached(_of(spans, device))


def _unsorted(spans: Sequence[TimedSpan], device: str) -> float:
    """Return the result of the same loop without sorting."""
    return _reached([(start, end) for name, start, end in spans if name == device])


def _reached(spans: Sequence[tuple[float, float]]) -> float:
    covered, until = 0.0, -math.inf
    for start, end in spans:
        covered += max(end - max(start, until), 0.0)
        until = max(until, end)
    return covered


def _added(spans: Sequence[TimedSpan], device: str) -> float:
    return sum(end - start for start, end in _of(spans, device))


def _length(spans: Sequence[TimedSpan], device: str) -> float:
    """Return the time from the start of a device's first span to the end of its last one; 1 if it has none."""
    own = _of(spans, device)
    return max(end for _, end in own) - own[0][0] if own else 1.0


# --------------------------------------------------------------------------------------------------------- place_layers

# The cases: weights and outputs in bytes, the limit, the number of devices.
MODELS: tuple[tuple[list[int], list[int], int, int], ...] = (
    ([802816, 1048576, 1048576, 10240], [131072, 524288, 131072, 5120], 2_000_000, 2),
    ([4, 4, 4, 4], [9, 1, 9, 1], 12, 2),
    ([5, 1, 6, 2, 2], [3, 8, 2, 7, 1], 9, 3),
    ([3, 3, 3], [4, 4, 4], 9, 2),
    ([2, 2, 2, 2, 8, 1], [5, 4, 6, 3, 2, 1], 8, 4),
)


@exercise(
    LESSON,
    "place_layers(weights, outputs, limit, devices) returns the device number of each layer, never going down, so that no "
    "device holds more than `limit` bytes of weights, and as few bytes of outputs as possible cross between devices.",
    "Every device keeps to its limit, and the cuts together send the fewest bytes.",
)
def _place_layers(answer: Any, _: OnRanks) -> None:
    for weights, outputs, limit, devices in MODELS:
        given = answer(list(weights), list(outputs), limit, devices)
        case = f"place_layers({weights}, {outputs}, {limit}, {devices})"
        best = min(_placements(weights, limit, devices), key=lambda place: _crossing(place, outputs))
        details = (case, f"given {given!r}", f"one answer: {best}")
        given = whole_numbers(given, "a list with the number of a device for each layer", *details)
        if len(given) != len(weights):
            raise AnswerError(
                f"the list has {len(given)} numbers for {len(weights)} layers: one for each layer, not one for each device",
                *details,
            )
        if min(given) < 0 or max(given) >= devices:
            raise AnswerError(f"there are the devices 0 to {devices - 1}", *details)
        if any(after < before for before, after in itertools.pairwise(given)):
            raise AnswerError("a device number goes down: layers stay in order, so a later layer is never on an earlier device",
                              *details)  # fmt: skip
        held = [sum(w for w, d in zip(weights, given, strict=True) if d == device) for device in range(devices)]
        if max(held) > limit:
            full = held.index(max(held))
            raise AnswerError(f"device {full} holds {held[full]} bytes, and the limit is {limit}", *details)
        sent, least = _crossing(given, outputs), _crossing(best, outputs)
        if sent == least:
            continue
        if not least:
            raise AnswerError("everything fits on one device, and then nothing crosses: do not cut without need", *details)
        if _close_to_even(weights, given, devices):
            raise AnswerError(
                f"the weights are divided as evenly as possible, but {sent} bytes cross, and {least} would do: a cut where the "
                "output is small may be uneven", *details,
            )  # fmt: skip
        raise AnswerError(
            f"{sent} bytes cross, and {least} would do. Do you fill one device after the other? That cuts wherever one is full",
            *details, cure="compare all places to cut",
        )  # fmt: skip


def _placements(weights: Sequence[int], limit: int, devices: int) -> Iterator[list[int]]:
    """All lists of ascending device numbers under which no device is over the limit."""
    for place in itertools.combinations_with_replacement(range(devices), len(weights)):
        if all(sum(w for w, d in zip(weights, place, strict=True) if d == device) <= limit for device in range(devices)):
            yield list(place)


def _crossing(place: Sequence[int], outputs: Sequence[int]) -> int:
    return sum(size for size, (before, after) in zip(outputs, itertools.pairwise(place), strict=False) if after != before)


def _close_to_even(weights: Sequence[int], given: Sequence[int], devices: int) -> bool:
    def fullest(place: Sequence[int]) -> int:
        return max(sum(w for w, d in zip(weights, place, strict=True) if d == device) for device in range(devices))

    return fullest(given) == min(fullest(place) for place in _placements(weights, sum(weights), devices))


# --------------------------------------------------------------------------------------------------------- pair_layouts

WHOLE, PARTS = "unsharded", "model"
SIZE = 12  # sides of the matrices; can be divided by 2 and 3


def _pair_on_rank(answer: Callable[..., Any], devices: int) -> dict[str, Any]:
    """Compute the pair with the student's layouts; return them, the parts' shapes, and whether the product is right."""
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
    return {"layouts": [list(own) for own in names], "count": count, "shapes": shapes, "right": bool(np.allclose(result, right))}


# What TensorFlow says after common mistakes in pair_layouts.
TWO_NAMES = f'a layout has two names, each "{WHOLE}" or the name of the mesh dimension, "{PARTS}"'
IN_LAYOUTS: dict[str, Hint] = {
    "A dimension sharding must": TWO_NAMES,
    "was repeated in sharding specification": (
        f'"{PARTS}" can divide only one of the two dimensions of a matrix; the other one stays "{WHOLE}"'
    ),
}


@exercise(
    LESSON,
    "pair_layouts(mesh) returns (layout of a, layout of b, number of all-reduces) for relu(x @ a) @ b with a whole x and a "
    "whole result: as few all-reduces as possible, and each device holds only its share of a and b.",
    "Columns, then rows: no device holds more than its share, and one all-reduce adds up the products.",
)
def _pair_layouts(answer: Any, on: OnRanks) -> None:
    for devices in (2, 3):
        with showing(f"pair_layouts(mesh) on {devices} devices"), explaining(IN_LAYOUTS):
            (found,) = on(1, _pair_on_rank, answer, devices, runtime="tensorflow", devices_per_rank=devices)
            _judge_pair(found)


COLUMNS_THEN_ROWS = "with columns, then rows, each device has the part of the hidden layer that its rows need"


def _judge_pair(found: dict[str, Any]) -> None:
    if "returned" in found:
        raise AnswerError(
            "expected three values: the layout of a, the layout of b, each with two names, and a number",
            f"given {found['returned']}",
        )
    a, b = found["layouts"]
    details = (f"a: {a}, each device has {found['shapes'][0]}", f"b: {b}, each device has {found['shapes'][1]}")
    columns, rows, whole = [WHOLE, PARTS], [PARTS, WHOLE], [WHOLE, WHOLE]
    if whole in (a, b):
        raise AnswerError("a copy on each device saves no memory", *details, cure="divide both matrices")
    for pair, hint, cure in (
        (
            (rows, columns),
            "rows, then columns: the hidden layer must be added up, and the output gathered",
            "try the other order",
        ),
        ((columns, columns), "both by columns: what does the second product need of the hidden layer?", COLUMNS_THEN_ROWS),
        (
            (rows, rows),
            "both by rows: the first product must be added up before ReLU, and then the second one",
            COLUMNS_THEN_ROWS,
        ),
    ):
        if (a, b) == pair:
            raise AnswerError(hint, *details, cure=cure)
    if (a, b) != (columns, rows) or not found["right"]:
        raise AnswerError(TWO_NAMES, *details)
    if whole_number(found["count"]) is None:
        raise AnswerError("the third value is a number: how many all-reduces the forward pass has", f"given {found['count']!r}")
    if found["count"] != 1:
        hint, cure = "the layouts are right, the number is not", "adding up the products with each device's rows is an all-reduce"
        if found["count"] == 2:
            hint, cure = f"{hint}: two are those of a whole training step", "the forward pass has only g"
        raise AnswerError(hint, f"given {found['count']}", cure=cure)


# --------------------------------------------------------------------------------------------------- weights_per_device

Shape = tuple[int, ...]
# The cases: shapes, layouts, mesh.
MESHES: tuple[tuple[list[Shape], list[list[str]], dict[str, int]], ...] = (
    ([(784, 256), (256, 1024), (1024, 256), (256, 10)],
     [[WHOLE, WHOLE], [WHOLE, "model"], ["model", WHOLE], [WHOLE, WHOLE]], {"model": 2}),
    ([(8, 16), (16,), (16, 8)], [[WHOLE, "model"], ["model"], ["model", WHOLE]], {"batch": 2, "model": 4}),
    ([(12, 6), (6,), (6, 12)], [["batch", "model"], [WHOLE], [WHOLE, "batch"]], {"batch": 3, "model": 2}),
)  # fmt: skip


def _other_weights(random: Random) -> tuple[list[Shape], list[list[str]], dict[str, int]]:
    mesh = {"batch": random.randint(2, 4), "model": random.randint(2, 4)}
    shapes = [(12 * random.randint(1, 9), 12 * random.randint(1, 9)) for _ in range(3)]  # 2, 3 and 4 divide the sides
    pairs = [[WHOLE, WHOLE], [WHOLE, "model"], ["model", WHOLE], ["batch", "model"], [WHOLE, "batch"]]
    return [*shapes], [random.choice(pairs) for _ in shapes], mesh


@calculation(
    LESSON,
    "weights_per_device(shapes, layouts, mesh) returns how many numbers one device holds of weights with these shapes and "
    'DTensor layouts, on a mesh such as {"batch": 2, "model": 4}.',
    "Along a mesh dimension that a layout does not name, a weight is copied; along the others it is divided.",
    MESHES,
    other=_other_weights,
)
def _weights_per_device(shapes: list[Shape], layouts: list[list[str]], mesh: dict[str, int]) -> Expected:
    cases = list(zip(shapes, layouts, strict=True))
    right = sum(math.prod(shape) // math.prod(mesh.get(name, 1) for name in layout) for shape, layout in cases)
    total, size = sum(math.prod(shape) for shape in shapes), math.prod(mesh.values())
    mistakes: dict[Hint, float] = {
        "that is the whole model: a dimension with the name of a mesh dimension is divided by its size": total,
        "those are bytes; the question is how many numbers": right * 4,
        "divide by the mesh dimensions that a layout names, not by all devices: along others, weights are copied": sum(
            math.prod(shape) / (size if any(n != WHOLE for n in layout) else 1) for shape, layout in cases
        ),
        "unsharded weights are copied to every device: only divide the dimensions that name a mesh dimension": total / size,
        ("a layout may name two mesh dimensions", "divide by both"): sum(
            math.prod(shape) / next((mesh[n] for n in layout if n in mesh), 1) for shape, layout in cases
        ),
        "that is what all devices hold together: asked is one device": right * size,
        ("the sides of a part are added up", "multiply them"): sum(
            sum(side / mesh.get(n, 1) for side, n in zip(shape, layout, strict=True)) for shape, layout in cases
        ),
    }
    otherwise = "divide each side of a weight by the size of the mesh dimension that the layout names for it"
    return Expected(right, mistakes, otherwise)
