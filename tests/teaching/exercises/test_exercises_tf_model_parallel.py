"""The exercises of lesson 11: right answers pass, and each typical mistake gets its own hint."""

from __future__ import annotations

import importlib.util
import itertools
import math

import numpy as np
import pytest
from answers import Answers, judge

pytestmark = pytest.mark.tf
if importlib.util.find_spec("tensorflow") is None:  # found, not imported: the notebook's process runs no TensorFlow
    pytest.skip("needs TensorFlow", allow_module_level=True)

answers = Answers()
right, wrong = answers.right, answers.wrong

# idle_devices


def busy_ms(spans, device):
    """How long a device has at least one span: one span after the other, in the order of their starts."""
    busy, until = 0.0, 0.0
    for start, end in sorted((start, end) for name, start, end in spans if name == device):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy


@right("idle_devices")
def idle_devices(spans, devices, step_ms):
    return {device: 1 - busy_ms(spans, device) / step_ms for device in devices}


@right("idle_devices")
def idle_by_sampling(spans, devices, step_ms):
    """Look at the middle of each stretch between two moments at which anything begins or ends."""
    moments = sorted({0.0, float(step_ms), *(t for _, *times in spans for t in times)})
    idle = dict.fromkeys(devices, 0.0)
    for start, end in itertools.pairwise(moments):
        for device in devices:
            if not any(name == device and s <= start and end <= e for name, s, e in spans):
                idle[device] += (end - start) / step_ms
    return idle


@wrong("idle_devices", "the shares in which a device computes")
def busy_shares(spans, devices, step_ms):
    return {device: busy_ms(spans, device) / step_ms for device in devices}


@wrong("idle_devices", "spans that overlap count twice")
def idle_with_spans_added(spans, devices, step_ms):
    return {d: 1 - sum(end - start for name, start, end in spans if name == d) / step_ms for d in devices}


@wrong("idle_devices", "a device's spans are in no order", cure="sort them by their start")
def idle_in_the_given_order(spans, devices, step_ms):
    busy, until = dict.fromkeys(devices, 0.0), dict.fromkeys(devices, 0.0)
    for device, start, end in spans:
        busy[device] += max(end - max(start, until[device]), 0.0)
        until[device] = max(until[device], end)
    return {device: 1 - busy[device] / step_ms for device in devices}


@wrong("idle_devices", "GPU:2 is missing")
def idle_of_those_with_spans(spans, devices, step_ms):
    return idle_devices(spans, {name for name, _, _ in spans}, step_ms)


@wrong("idle_devices", "the step also has a beginning and an end")
def idle_between_spans(spans, devices, step_ms):
    def length(device):
        times = [t for name, *own in spans if name == device for t in own]
        return max(times) - min(times) if times else 1.0

    return {device: 1 - busy_ms(spans, device) / length(device) for device in devices}


@wrong("idle_devices", "those are percentages")
def idle_percent(spans, devices, step_ms):
    return {device: 100 * share for device, share in idle_devices(spans, devices, step_ms).items()}


@wrong("idle_devices", "those are milliseconds", cure="the length of the step")
def idle_ms(spans, devices, step_ms):
    return {device: step_ms - busy_ms(spans, device) for device in devices}


@wrong("idle_devices", "expected a dict with a number for each device")
def idle_as_a_list(spans, devices, step_ms):
    return list(idle_devices(spans, devices, step_ms).values())


@wrong("idle_devices", "when the time in which a device has any span is taken away")
def idle_of_the_whole(spans, devices, step_ms):
    return dict.fromkeys(devices, 0.5)


# place_layers


def fits(weights, place, limit, devices):
    return all(sum(w for w, d in zip(weights, place, strict=True) if d == device) <= limit for device in range(devices))


def crossing(place, outputs):
    return sum(outputs[i] for i in range(len(place) - 1) if place[i + 1] != place[i])


@right("place_layers")
def place_layers(weights, outputs, limit, devices):
    places = itertools.combinations_with_replacement(range(devices), len(weights))
    return min((p for p in places if fits(weights, p, limit, devices)), key=lambda p: crossing(p, outputs))


@right("place_layers")
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


@wrong("place_layers", "Do you fill one device after the other?", cure="compare all places to cut")
def place_greedily(weights, outputs, limit, devices):
    place, device, held = [], 0, 0
    for weight in weights:
        if held + weight > limit:
            device, held = device + 1, 0
        held += weight
        place.append(device)
    return place


@wrong("place_layers", "divided as evenly as possible")
def place_evenly(weights, outputs, limit, devices):
    def fullest(place):
        return max(sum(w for w, d in zip(weights, place, strict=True) if d == device) for device in range(devices))

    return min(itertools.combinations_with_replacement(range(devices), len(weights)), key=fullest)


@wrong("place_layers", "bytes, and the limit is")
def place_on_one(weights, outputs, limit, devices):
    return [0] * len(weights)


@wrong("place_layers", "do not cut without need")
def place_on_all(weights, outputs, limit, devices):
    if sum(weights) <= limit:
        return [0] * (len(weights) - 1) + [1]
    return place_layers(weights, outputs, limit, devices)


@wrong("place_layers", "a device number goes down")
def place_in_turn(weights, outputs, limit, devices):
    return [i % devices for i in range(len(weights))]


@wrong("place_layers", "one for each layer, not one for each device")
def place_counts(weights, outputs, limit, devices):
    place = place_layers(weights, outputs, limit, devices)
    return [list(place).count(device) for device in range(devices)]


@wrong("place_layers", "there are the devices 0 to 1")
def place_from_one(weights, outputs, limit, devices):
    return [device + 1 for device in place_layers(weights, outputs, limit, devices)]


@wrong("place_layers", "expected a list with the number of a device")
def place_by_name(weights, outputs, limit, devices):
    return [f"CPU:{device}" for device in place_layers(weights, outputs, limit, devices)]


# pair_layouts


@right("pair_layouts")
def pair_layouts(mesh):
    return ["unsharded", "model"], ["model", "unsharded"], 1


@right("pair_layouts")
def pair_of_layout_objects(mesh):
    from tensorflow.experimental import dtensor

    columns = dtensor.Layout([dtensor.UNSHARDED, mesh.dim_names[0]], mesh)
    return [columns, dtensor.Layout.batch_sharded(mesh, "model", rank=2), 1]


@wrong("pair_layouts", "rows, then columns", cure="the other order")
def pair_in_the_other_order(mesh):
    return ["model", "unsharded"], ["unsharded", "model"], 1


@wrong("pair_layouts", "both by columns", cure="with columns, then rows")
def pair_of_columns(mesh):
    return ["unsharded", "model"], ["unsharded", "model"], 1


@wrong("pair_layouts", "both by rows", cure="with columns, then rows")
def pair_of_rows(mesh):
    return ["model", "unsharded"], ["model", "unsharded"], 1


@wrong("pair_layouts", "saves no memory", cure="divide both matrices")
def pair_of_copies(mesh):
    return ["unsharded", "unsharded"], ["unsharded", "unsharded"], 0


@wrong("pair_layouts", "those of a whole training step", cure="has only g")
def pair_with_two_sums(mesh):
    return *pair_layouts(mesh)[:2], 2


@wrong("pair_layouts", "the number is not", cure="is an all-reduce")
def pair_without_a_sum(mesh):
    return *pair_layouts(mesh)[:2], 0


@wrong("pair_layouts", "the name of the mesh dimension")
def pair_of_an_unknown_name(mesh):
    return ["unsharded", "columns"], ["columns", "unsharded"], 1


@wrong("pair_layouts", "can divide only one of the two dimensions")
def pair_with_both_dimensions_divided(mesh):
    return ["model", "model"], ["model", "unsharded"], 1


@wrong("pair_layouts", "expected three values")
def pair_without_a_number(mesh):
    return pair_layouts(mesh)[:2]


# weights_per_device


@right("weights_per_device")
def weights_per_device(shapes, layouts, mesh):
    return sum(
        math.prod(side // mesh.get(name, 1) for side, name in zip(shape, layout, strict=True))
        for shape, layout in zip(shapes, layouts, strict=True)
    )


@right("weights_per_device")
def weights_by_division(shapes, layouts, mesh):
    held = 0.0
    for shape, layout in zip(shapes, layouts, strict=True):
        part = float(math.prod(shape))
        for name in layout:
            if name != "unsharded":
                part /= mesh[name]
        held += part
    return held


@wrong("weights_per_device", "that is the whole model")
def weights_of_the_model(shapes, layouts, mesh):
    return sum(map(math.prod, shapes))


@wrong("weights_per_device", "unsharded weights are copied")
def weights_divided_by_all(shapes, layouts, mesh):
    return weights_of_the_model(shapes, layouts, mesh) / math.prod(mesh.values())


@wrong("weights_per_device", "those are bytes")
def weights_in_bytes(*args):
    return 4 * weights_per_device(*args)


@wrong("weights_per_device", "not by all devices")
def weights_divided_by_the_mesh(shapes, layouts, mesh):
    size = math.prod(mesh.values())
    parts = [math.prod(s) / (size if set(layout) != {"unsharded"} else 1) for s, layout in zip(shapes, layouts, strict=True)]
    return sum(parts)


@wrong("weights_per_device", "a layout may name two mesh dimensions", cure="divide by both")
def weights_divided_once(shapes, layouts, mesh):
    held = 0
    for shape, layout in zip(shapes, layouts, strict=True):
        named = [mesh[name] for name in layout if name in mesh]
        held += math.prod(shape) // (named[0] if named else 1)
    return held


@wrong("weights_per_device", "what all devices hold together")
def weights_of_all_devices(shapes, layouts, mesh):
    return weights_per_device(shapes, layouts, mesh) * math.prod(mesh.values())


@wrong("weights_per_device", "the sides of a part are added up", cure="multiply them")
def weights_with_sides_added(shapes, layouts, mesh):
    return sum(
        sum(side / mesh.get(name, 1) for side, name in zip(shape, layout, strict=True))
        for shape, layout in zip(shapes, layouts, strict=True)
    )


@wrong("weights_per_device", "expected one number")
def weights_per_weight(shapes, layouts, mesh):
    return [weights_per_device([shape], [layout], mesh) for shape, layout in zip(shapes, layouts, strict=True)]


@right("weights_per_device")
def weights_by_numpy(shapes, layouts, mesh):
    """The answer is a number of numpy's, not an int."""
    parts = [[mesh.get(name, 1) for name in layout] for layout in layouts]
    return sum(np.prod(shape) // np.prod(part) for shape, part in zip(shapes, parts, strict=True))


@pytest.mark.parametrize("answer", answers.parameters())
@pytest.mark.processes
def test_the_verdict_names_the_mistake(answer) -> None:
    judge(answer)


def test_every_exercise_has_right_and_wrong_answers_here() -> None:
    answers.complete("tf_model_parallel")
