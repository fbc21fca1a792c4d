"""The live picture of a rank that writes a million records per second gets few spans, and their sums are right."""

import mmap

import matplotlib.pyplot as plt
import numpy as np
import pytest

from labkit.plots.bars import STYLES
from labkit.plots.live.progress import Progress
from labkit.plots.live.recent import Recent
from labkit.plots.timeline import timeline
from labkit.recording.ring_buffer import RING_BYTES, RingReader, RingWriter
from labkit.recording.schema import STEPS_IN_ALL, WAIT
from labkit.tracing.downsample import FEW, MOST, downsample
from labkit.tracing.trace import Trace, from_records

from synthetic import alone  # isort: skip

STEPS = 8000


@pytest.fixture(scope="module")
def written():
    """A loop of 8,000 steps after one of 4,000: forward, backward and a pause in each, in 10 µs, and a loss."""
    ring = mmap.mmap(-1, RING_BYTES)
    writer, reader, at = RingWriter(ring), RingReader(ring), 0
    for length in (STEPS // 2, STEPS):
        writer.write_scalar(STEPS_IN_ALL, at, length)
        for i in range(length):
            writer.write("forward", 0, at, at + 3000)
            writer.write("backward", 0, at + 3000, at + 8000)
            writer.write_scalar("loss", at + 8000, i)
            writer.write("step", 2, at, at + 10_000)
            at += 10_000
    return reader.read(), reader.names(), at


def reported(written):
    rows, names, end_ns = written
    few = downsample(rows, names.index(STEPS_IN_ALL))
    return few, from_records([few], [names], ["rank 0"], start_ns=0, end_ns=end_ns)


def test_few_records_are_unchanged(written):
    rows, names, _ = written
    some = rows[:FEW]
    assert downsample(some, names.index(STEPS_IN_ALL)) is some


def test_spans_are_unchanged_if_only_values_are_thinned(written):
    rows, names, _ = written
    some = rows[: 2 * MOST]
    few = downsample(some, names.index(STEPS_IN_ALL))
    assert (few["kind"] == 0).sum() == MOST
    assert not (few["count"][few["kind"] == 0] > 1).any()
    assert (few["kind"] == 3).sum() < 25
    assert few[few["kind"] == 3][-1] == some[some["kind"] == 3][-1]  # the last value is kept


def test_waits_are_left_out_of_many_records(written):
    rows, names, _ = written
    some = rows[: 2 * MOST].copy()
    some["kind"][::2] = WAIT
    assert not (downsample(some, names.index(STEPS_IN_ALL))["kind"] == WAIT).any()


def test_many_become_few(written):
    few, _ = reported(written)
    assert len(few) < MOST + 200
    assert len(written[0]) == 1.5 * STEPS * 4 + 2


def test_the_latest_spans_are_unchanged(written):
    few, _ = reported(written)
    rows = written[0]
    assert np.array_equal(few[(few["kind"] == 0) & (few["count"] == 1)], rows[rows["kind"] == 0][-MOST // 2 :])
    assert few[-1] == rows[-1]


def test_the_steps_of_each_loop_are_counted(written):
    progress = Progress(1)
    progress.add(reported(written)[1])
    assert progress.done == 1.5 * STEPS
    assert progress.fraction == 1
    steps, rate, _, loss = progress.parts()
    assert (steps, rate, loss) == ("8000 of 8000 steps", "100000 steps/s", "loss 7999")


def test_the_picture_keeps_the_share_of_each_kind(written):
    _, trace = reported(written)
    recent = Recent(("rank 0",), 0)
    nothing = from_records([written[0][:0]], [[""]], ["rank 0"])
    recent.add(trace, trace.end_ns)
    recent.add(nothing, 3 * trace.end_ns)
    compute, _ = recent.binned(0)
    share = dict(zip(STYLES, compute.sum(axis=1) / trace.end_ns, strict=True))
    assert share["forward"] == pytest.approx(0.3, abs=0.03)
    assert share["backward"] == pytest.approx(0.5, abs=0.04)


def test_lost_records_are_reported():
    trace = Trace(alone().columns, ranks=["rank 0"], dropped=[1234])
    assert repr(trace) == f"<Trace of 1 ranks, {len(trace)} spans, 0 scalars, 1234 records lost>"
    ax = timeline(trace)
    assert ax.get_xlabel().endswith("[ms]   (1234 records were lost: written faster than read)")
    plt.close(ax.figure)
    assert "lost" not in repr(alone())


def test_a_span_that_represents_many_is_not_drawn_as_one(written):
    _, trace = reported(written)
    recent = Recent(("rank 0",), 0)
    recent.add(trace, trace.end_ns)
    assert not (recent._rows["count"] > 1).any()
    assert 0 < recent.dropped_ns < trace.end_ns
