"""`busy_shares`: the share of the steps in which each rank or device computes."""

import pytest

from labkit.errors.exceptions import LabError
from labkit.plots.busy import busy_shares
from labkit.recording.schema import READING
from labkit.tracing.trace import Trace

from synthetic import made  # isort: skip


def steps(count):
    return [("step", 10 * number, 10 * (number + 1)) for number in range(count)]


def test_each_device_has_its_own_share_and_the_call_around_them_does_not_count():
    spans = [*steps(2), ("train_step", 0, 20)]  # the call, which lasts as long as both devices work
    for start in (0, 10):
        for begin, end, device in ((0, 4, 0), (2, 5, 0), (5, 7, 1)):  # what overlaps counts once
            spans.append(("forward", start + begin, start + end, {"device": f"CPU:{device}", "measured": True}))
    assert busy_shares(made(spans)) == {"CPU:0": pytest.approx(0.5), "CPU:1": pytest.approx(0.2)}


def test_ranks_without_devices_and_waiting_is_not_computing():
    trace = made([*steps(1), ("forward", 0, 3), ("recv", 3, 10, (3, 10))], [*steps(1), ("forward", 3, 9)])
    assert busy_shares(trace) == {"rank 0": pytest.approx(0.3), "rank 1": pytest.approx(0.6)}


@pytest.mark.parametrize(
    ("spans", "share"),
    [
        ([*steps(3), ("forward", 0, 10), ("forward", 10, 15)], 0.25),  # of three steps the first does not count
        # Nor does one in which TensorFlow's profiler is read.
        ([*steps(4), *(("forward", at, at + 6) for at in (0, 10, 20, 30)), (READING, 26, 30)], 0.6),
        ([("call", 0, 10), ("forward", 0, 5)], 0.5),  # without steps, the whole run
    ],
)
def test_which_part_of_a_run_counts(spans, share):
    assert busy_shares(made(spans)) == {"rank 0": pytest.approx(share)}


def test_a_run_that_recorded_nothing():
    with pytest.raises(LabError, match="busy_shares: the ranks recorded nothing"):
        busy_shares(Trace(ranks=["rank 0"]))
