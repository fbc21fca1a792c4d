"""The exercises of lesson 11: right answers pass, and each typical mistake gets its own hint."""

from __future__ import annotations

import importlib.util
import itertools
import math

import numpy as np
import pytest
from answers import Answers

pytestmark = pytest.mark.tf
if importlib.util.find_spec("tensorflow") is None:  # found, not imported: the notebook's process runs no TensorFlow
    pytest.skip("needs TensorFlow", allow_module_level=True)

answers = Answers()

right, wrong, mutant = answers.of("idle_devices")


@right
def idle_by_sampling(spans, devices, step_ms):
    """Look at the middle of each stretch between two moments at which anything begins or ends."""
    moments = sorted({0.0, float(step_ms), *(t for _, *times in spans for t in times)})
    idle = dict.fromkeys(devices, 0.0)
    for start, end in itertools.pairwise(moments):
        for device in devices:
            if not any(name == device and s <= start and end <= e for name, s, e in spans):
                idle[device] += (end - start) / step_ms
    return idle


IDLE, SORTED = "1 - busy_ms(spans, device) / step_ms", "sorted(times for name, *times in spans if name == device)"
ADDED = "1 - sum(end - start for name, start, end in spans if name == device) / step_ms"
ALL = f"{{device: {IDLE} for device in devices}}"
TIMES = "[time for name, *times in spans if name == device for time in times] or [1, 0]"
BETWEEN = f"1 - busy_ms(spans, device) / abs(max({TIMES}) - min({TIMES}))"
mutant(IDLE, ADDED, "spans that overlap count twice")
mutant("1 - busy_ms", "busy_ms", "the shares in which a device computes")
mutant(SORTED, SORTED.removeprefix("sorted"), "a device's spans are in no order", cure="sort them by their start")
mutant("for device in devices", "for device in {name for name, _, _ in spans}", "GPU:2 is missing")
mutant(IDLE, BETWEEN, "the step also has a beginning and an end")
mutant(IDLE, f"100 * ({IDLE})", "those are percentages")
mutant(IDLE, "step_ms - busy_ms(spans, device)", "those are milliseconds", cure="the length of the step")
mutant(ALL, f"[{IDLE} for device in devices]", "expected a dict with a number for each device")
mutant(IDLE, "0.5", "when the time in which a device has any span is taken away")


right, wrong, mutant = answers.of("place_layers")


@right
def place_step_by_step(weights, outputs, limit, devices):
    """Dynamic programming: the cheapest way to place the first layers on so many devices."""
    best = {(0, 0): (0, [])}  # by the number of layers and of devices
    for count in range(1, len(weights) + 1):
        for used in range(1, devices + 1):
            found = []
            for before in range(count):
                if (before, used - 1) in best and sum(weights[before:count]) <= limit:
                    sent, place = best[before, used - 1]
                    found.append((sent + (outputs[before - 1] if before else 0), place + [used - 1] * (count - before)))
            if found:
                best[count, used] = min(found)
    return min(way for (count, _), way in best.items() if count == len(weights))[1]


@wrong("Do you fill one device after the other?", cure="compare all places to cut")
def place_greedily(weights, outputs, limit, devices):
    place, device, held = [], 0, 0
    for weight in weights:
        if held + weight > limit:
            device, held = device + 1, 0
        held += weight
        place.append(device)
    return place


PLACES, BEST = "    places = itertools", "min(possible, key=lambda place: crossing(place, outputs))"
RETURN, LAST = f"return {BEST}", "[0] * (len(weights) - 1) + [1]"
HELD_BY = "sum(weight for weight, own in zip(weights, place, strict=True) if own == device)"
EVENLY = f"return min(possible, key=lambda place: max({HELD_BY} for device in range(devices)))"
mutant(RETURN, EVENLY, "divided as evenly as possible")
mutant(RETURN, "return [0] * len(weights)", "bytes, and the limit is")
mutant(RETURN, f"return {LAST} if sum(weights) <= limit else {BEST}", "do not cut without need")
mutant(RETURN, "return [i % devices for i in range(len(weights))]", "a device number goes down")
mutant(RETURN, f"place = {BEST}\n    return [place.count(d) for d in range(devices)]", "not one for each device")
mutant(RETURN, f"return [device + 1 for device in {BEST}]", "there are the devices 0 to 1")
BY_NAME = f'return [f"CPU:{{device}}" for device in {BEST}]'
mutant(RETURN, BY_NAME, "expected a list with the number of a device")


right, wrong, mutant = answers.of("pair_layouts")


@right
def pair_of_layout_objects(mesh):
    from tensorflow.experimental import dtensor

    columns = dtensor.Layout([dtensor.UNSHARDED, mesh.dim_names[0]], mesh)
    return [columns, dtensor.Layout.batch_sharded(mesh, "model", rank=2), 1]


COLUMNS, ROWS = '["unsharded", "model"]', '["model", "unsharded"]'
PAIR = f"return {COLUMNS}, {ROWS}, 1"
ONE_DIMENSION, STEP = "can divide only one of the two dimensions", "those of a whole training step"
mutant(PAIR, f"return {ROWS}, {COLUMNS}, 1", "rows, then columns", cure="the other order")
mutant(PAIR, f"return {COLUMNS}, {COLUMNS}, 1", "both by columns", cure="with columns, then rows")
mutant(PAIR, f"return {ROWS}, {ROWS}, 1", "both by rows", cure="with columns, then rows")
mutant(PAIR, 'return 2 * (["unsharded"] * 2,) + (0,)', "saves no memory", cure="divide both matrices")
mutant(", 1", ", 2", STEP, cure="has only g")
mutant(", 1", ", 0", "the number is not", cure="is an all-reduce")
mutant(", 1", ", None", "the third value is a number")
mutant(PAIR, PAIR.replace("model", "columns"), "the name of the mesh dimension")
mutant(COLUMNS, '["model", "model"]', ONE_DIMENSION)
mutant(", 1", "", "expected three values")


right, wrong, mutant = answers.of("weights_per_device")


@right
def weights_by_division(shapes, layouts, mesh):
    held = 0.0
    for shape, layout in zip(shapes, layouts, strict=True):
        part = float(math.prod(shape))
        for name in layout:
            if name != "unsharded":
                part /= mesh[name]
        held += part
    return held


@right
def weights_by_numpy(shapes, layouts, mesh):
    """The answer is a number of numpy's, not an int."""
    parts = [[mesh.get(name, 1) for name in layout] for layout in layouts]
    return sum(np.prod(shape) // np.prod(part) for shape, part in zip(shapes, parts, strict=True))


HELD = "sum(part(*one, mesh) for one in zip(shapes, layouts, strict=True))"
PART = "math.prod(side // mesh.get(name, 1) for side, name in sides)"
ONCE = "math.prod(shape) // next((mesh[name] for name in layout if name in mesh), 1)"
ALL_DEVICES = "math.prod(mesh.values())"
BY_ALL = f"math.prod(shape) // ({ALL_DEVICES} if set(layout) != {{'unsharded'}} else 1)"
mutant(PART, BY_ALL, "not by all devices")
mutant(PART, ONCE, "a layout may name two mesh dimensions", cure="divide by both")
mutant("side // mesh.get(name, 1)", "side", "that is the whole model")
mutant(HELD, f"sum(map(math.prod, shapes)) / {ALL_DEVICES}", "unsharded weights are copied")
mutant(HELD, f"4 * {HELD}", "those are bytes")
mutant(HELD, f"{ALL_DEVICES} * {HELD}", "what all devices hold together")
mutant("return math.prod", "return sum", "the sides of a part are added up", cure="multiply them")
mutant(HELD, HELD.replace("sum(", "list("), "expected one number")


test_the_verdict_fits_the_answer = answers.test_of_verdicts()
test_every_exercise_has_right_and_wrong_answers_here = answers.test_of_completeness("tf_model_parallel")
