"""Closed forms compared with cases worked by hand, and with each other."""

from __future__ import annotations

import importlib
import pickle
from typing import Any

import numpy as np
import pytest
from latex import evaluated

import labkit as lab
from labkit import predict
from labkit.costs.link import Link, rounds_and_share
from labkit.costs.network import as_network
from labkit.recording.operations import OPERATION_TYPES, OperationType
from labkit.tracing.ideal_pipeline import schedule

LINK = Link(gbit_per_s=0.008, latency_us=1000)  # a million bytes per second, a millisecond


def test_the_module_is_a_public_name() -> None:
    assert lab.predict is predict
    assert importlib.import_module("labkit.costs.predict") is predict  # what `import labkit.costs.predict` finds
    assert dir(lab.predict) == sorted(predict.__all__)


@pytest.mark.parametrize(
    ("predicted", "ms"),
    [
        (predict.message(5000, LINK), 6),
        (predict.all_reduce(8000, 4, LINK, algorithm="tree"), 4 + 32),
        (predict.all_reduce(8000, 4, LINK, algorithm="halving"), 4 + 12),
        (predict.broadcast(8000, 4, LINK, algorithm="scatter"), 5 + 12),
        (predict.barrier(5, LINK), 3),
        (predict.rpc(5000, 1000, LINK, compute_s=0.01), 2 + 6 + 10),
        (predict.rpc(5000, 1000, LINK, compute_s=0.01, calls=3), 3 * (2 + 6 + 10)),
        (predict.rpc(5000, 1000, LINK, compute_s=0.01, calls=3, asynchronous=True), 2 + 3 * 5 + 1 + 10),
        (predict.rpc(1000, 5000, LINK, calls=3, asynchronous=True), 2 + 3 * 5 + 1),
        (predict.rpc(1000, 5000, LINK, asynchronous=True), 2 + 6),
        # 10 forward, 20 backward, two buckets of 4 kB: an all-reduce of 2 + 4 ms each
        (predict.data_parallel_step(0.01, 0.02, 8000, 2, LINK, overlap=False, optimizer_s=0.001), 10 + 20 + 2 + 8 + 1),
        (predict.data_parallel_step(0.01, 0.02, 8000, 2, LINK, buckets=2, optimizer_s=0.001), 10 + 20 + 6 + 1),
        # the link is the slower: the first of four buckets is there after 1 ms, then four times 2 + 2 ms
        (predict.data_parallel_step(0.01, 0.004, 8000, 2, LINK, buckets=4), 10 + 1 + 16),
        # an all-reduce of 2 + 4 ms takes 3 ms from the backward pass: that of the first bucket, for the last comes
        # after it
        (predict.data_parallel_step(0.01, 0.02, 8000, 2, LINK, buckets=2, overhead_s=0.003), 10 + 20 + 3 + 6),
        (predict.data_parallel_step(0.01, 0.004, 8000, 2, LINK, buckets=4, overhead_s=0.0001), 10 + 1 + 16),
        (predict.data_parallel_step(0.01, 0.02, 8000, 2, LINK, overlap=False, overhead_s=0.003), 10 + 20 + 2 + 8),
        (predict.tensor_parallel_layer(2, 10, 50, 2, LINK, value_bytes=2, compute_s=0.03), 15 + 4 * (2 + 2)),
        (predict.tensor_parallel_layer(2, 10, 50, 2, LINK, value_bytes=2, backward=False), 2 * (2 + 2)),
    ],
)
def test_times_worked_by_hand(predicted: predict.Prediction, ms: float) -> None:
    assert predicted == pytest.approx(ms / 1e3)
    assert predicted.unit == "s"


def test_one_rank_sends_nothing() -> None:
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter"):
        assert getattr(predict, name)(8000, 1, LINK) == 0


@pytest.mark.parametrize("name", [kind.name for kind in OPERATION_TYPES if kind.collective and kind.cost is not None])
def test_predictions_links_and_networks_of_one_node_agree_to_the_last_bit(name: str) -> None:
    for ranks in range(2, 20):
        for nbytes in (0, 12345, 1e9 + 1):
            closed = LINK.seconds(name, nbytes, ranks)
            assert as_network(LINK, ranks).seconds(name, nbytes) == closed
            if name in predict.__all__ and name != "barrier":
                assert getattr(predict, name)(nbytes, ranks, LINK) == closed


@pytest.mark.parametrize("kind", [kind for kind in OPERATION_TYPES if kind.cost is not None], ids=lambda kind: kind.name)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 16])
def test_the_formula_shown_is_the_one_evaluated(kind: OperationType, ranks: int) -> None:
    if kind.name == "monitored_barrier" and ranks == 1:
        pytest.skip("rank 0 has nobody to hear from; the formula is for several ranks")
    assert kind.cost is not None
    rounds, share = rounds_and_share(kind.name, ranks)
    values = {"p": ranks, "alpha": 3, "n": 7000, "B": 11}
    assert evaluated(kind.cost.formula, values) == pytest.approx(rounds * 3 + share * 7000 / 11)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_memory_as_in_the_paper(stage: int, gigabytes: float) -> None:
    """Rajbhandari et al., figure 1: 7.5 billion parameters on 64 ranks."""
    assert predict.zero_memory(7.5e9, 64, stage) / 1e9 == pytest.approx(gigabytes, rel=0.01)


@pytest.mark.parametrize(("stage", "times"), [(0, 1), (1, 1), (2, 1), (3, 1.5)])
def test_traffic_as_in_the_paper(stage: int, times: float) -> None:
    """Rajbhandari et al., section 7: as much as data parallel, and half as much again for sharded parameters."""
    data_parallel = 2 * (3 / 4) * 4e6  # a ring all-reduce of a million float32 gradients on four ranks
    assert predict.zero_traffic(1e6, 4, stage) == pytest.approx(times * data_parallel)
    assert predict.zero_traffic(1e6, 4, stage, value_bytes=2) == pytest.approx(times * data_parallel / 2)
    assert predict.zero_traffic(1e6, 1, stage) == 0


def test_the_working_of_traffic_gives_its_value() -> None:
    assert predict.zero_traffic(2e6, 4, 3).working == (
        r"N &= \frac{3(p-1)}{p}\,4\,\text{B}\cdot\Psi \\ &= \frac{3 \cdot 3}{4} \cdot 4\,\text{B} \cdot 2 \cdot 10^{6} \\ "
        r"&= 18\,\text{MB}"
    )


def test_bubbles() -> None:
    assert predict.pipeline_bubble(4, 8) == pytest.approx(3 / 11)
    assert predict.pipeline_bubble(4, 8, schedule="1f1b") == predict.pipeline_bubble(4, 8)
    assert predict.pipeline_bubble(4, 8, schedule="interleaved 1f1b", chunks=2) == pytest.approx(3 / 19)
    assert predict.pipeline_bubble(1, 8) == 0


def test_overlap_costs_nothing_and_hides_at_most_the_backward_pass() -> None:
    for buckets in (1, 2, 5):
        for nbytes in (0, 4000, 80_000):
            apart = predict.data_parallel_step(0.01, 0.02, nbytes, 4, LINK, buckets=buckets, overlap=False)
            together = predict.data_parallel_step(0.01, 0.02, nbytes, 4, LINK, buckets=buckets)
            assert -1e-12 <= apart - together <= 0.02 * (1 - 1 / buckets) + 1e-12


def test_a_prediction_reads_well_and_is_a_number() -> None:
    predicted = predict.all_reduce(4e6, ranks=4, link=Link.ethernet_1g)
    assert repr(predicted) == str(predicted) == "48.3 ms"
    assert f"{predicted:.4f}" == "0.0483"
    assert type(predicted * 2) is float
    assert repr(predict.zero_memory(7.5e9, 64, 3)) == "1.88 GB"
    assert repr(predict.pipeline_bubble(4, 8)) == "27.3 %"
    sent = pickle.loads(pickle.dumps(predicted))
    assert (sent, sent.working) == (predicted, predicted.working)


def test_the_working() -> None:
    working = predict.all_reduce(4e6, ranks=4, link=Link.ethernet_1g).working
    assert working == (
        r"T &= 2(p-1)\,\alpha + \frac{2(p-1)}{p}\,\frac{n}{B} "
        r"\\ &= 6 \cdot 50\,\text{µs} + 1.5 \cdot \frac{8 \cdot 4\,\text{MB}}{1\,\text{Gbit/s}} "
        r"\\ &= 48.3\,\text{ms}"
    )
    assert working._repr_latex_() == f"$$\\begin{{aligned}}{working}\\end{{aligned}}$$"
    assert predict.zero_memory(7.5e9, 64, 2).working.startswith(r"M &= \left(w + \frac{g}{p} + \frac{K}{p}\right)\Psi \\")


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: predict.all_reduce(1, 2, 1e9), TypeError, "expected a Link, as in lab.Link"),  # type: ignore[arg-type]
        (lambda: predict.all_reduce(1, 2, LINK, algorithm="star"), ValueError, "expected 'ring', 'tree', 'halving'"),
        (lambda: predict.all_reduce(1, 6, LINK, algorithm="halving"), ValueError, "holds for powers of two"),
        (lambda: predict.broadcast(1, 2, LINK, algorithm="ring"), ValueError, "expected 'tree' or 'scatter'"),
        (lambda: predict.pipeline_bubble(4, 8, schedule="zb"), ValueError, "expected 'gpipe', '1f1b' or 'interleaved 1f1b'"),
        (lambda: predict.pipeline_bubble(4, 8, chunks=2), ValueError, "only schedule='interleaved 1f1b'"),
        (lambda: predict.zero_memory(1, 2, 4), ValueError, "stage=4: expected 0"),
        (lambda: predict.zero_traffic(1, 2, 4), ValueError, "stage=4: expected 0"),
    ],
)
def test_invalid_arguments(call: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call()


NUMBERS = {
    predict.message: (1e6, LINK),
    predict.all_reduce: (1e6, 4, LINK),
    predict.all_reduce_crossover: (4, LINK),
    predict.all_gather: (1e6, 4, LINK),
    predict.reduce_scatter: (1e6, 4, LINK),
    predict.all_to_all: (1e6, 4, LINK),
    predict.broadcast: (1e6, 4, LINK),
    predict.reduce: (1e6, 4, LINK),
    predict.gather: (1e6, 4, LINK),
    predict.scatter: (1e6, 4, LINK),
    predict.barrier: (4, LINK),
    predict.rpc: (1e6, 1e6, LINK),
    predict.data_parallel_step: (0.1, 0.2, 1e6, 4, LINK),
    predict.pipeline_bubble: (4, 8),
    predict.tensor_parallel_layer: (1, 128, 64, 4, LINK),
    predict.zero_memory: (1e6, 4, 2),
    predict.zero_traffic: (1e6, 4, 2),
}


@pytest.mark.parametrize("function", NUMBERS, ids=lambda f: f.__name__)
def test_no_prediction_accepts_an_invalid_number(function: Any) -> None:
    """Each argument in turn: negative, not a number, infinite, zero ranks, of another type."""
    good = NUMBERS[function]
    assert {f.__name__ for f in NUMBERS} == set(predict.__all__)
    function(*good)
    for place, value in enumerate(good):
        wrong: list[Any] = [-1, float("nan"), float("inf"), None, "4", True, [1]]
        if isinstance(value, int):
            wrong += [1.5] if (function, place) in ((predict.zero_memory, 2), (predict.zero_traffic, 2)) else [0, 1.5]
        for bad in wrong:
            with pytest.raises((TypeError, ValueError), match="expected"):
                function(*good[:place], bad, *good[place + 1 :])


@pytest.mark.parametrize("function", NUMBERS, ids=lambda f: f.__name__)
def test_whole_numbers_of_numpy_are_whole_numbers(function: Any) -> None:
    good = NUMBERS[function]
    assert function(*(np.int64(value) if isinstance(value, int) else value for value in good)) == function(*good)


def test_a_sum_of_predictions_in_one_unit_is_a_prediction() -> None:
    message, step = predict.message(1e6, LINK), predict.data_parallel_step(0.1, 0.2, 1e6, 4, LINK)
    both = message + step
    assert (float(both), both.unit) == (float(message) + float(step), "s")
    assert both.working.startswith(f"T &= {message.formula} + {step.formula} ")
    assert both.source == f"{message.source}; {step.source}"
    assert sum([message, step]).in_unit("ms") == pytest.approx(1e3 * (message + step))
    for plain in (message + 0.5, 0.5 + message, message + predict.zero_traffic(1e6, 4, 2), 2 * message, message - step):
        assert type(plain) is float


def test_a_misspelt_formula_is_suggested() -> None:
    with pytest.raises(AttributeError, match=r"lab\.predict has no 'allreduce'; did you mean 'all_reduce'\?"):
        lab.predict.allreduce  # noqa: B018  # type: ignore[attr-defined]
    assert not hasattr(predict, "__path__")


SPELLINGS = ("interleaved 1f1b", "Interleaved 1F1B", "interleaved_1f1b", "interleaved", "ScheduleInterleaved1F1B")


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_schedule_has_the_same_name_everywhere(name: str) -> None:
    drawn = schedule(name, stages=8, ranks=4, micro_batches=8)
    assert drawn.bubble == pytest.approx(predict.pipeline_bubble(4, 8, schedule=name, chunks=2))


@pytest.mark.parametrize(("name", "error"), [("zigzag", ValueError), ("", ValueError), (None, TypeError), (1, TypeError)])
def test_an_unknown_schedule_is_refused_everywhere(name: Any, error: type[Exception]) -> None:
    expected = "expected 'gpipe', '1f1b' or 'interleaved 1f1b'"
    with pytest.raises(error, match=expected):
        schedule(name, stages=4, micro_batches=8)
    with pytest.raises(error, match=expected):
        predict.pipeline_bubble(4, 8, schedule=name)
