"""The critical path as a line over a timeline."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from labkit.errors.exceptions import LabError
from labkit.plots.timeline import timeline
from labkit.tracing.replaying.critical_path import critical_path

from replayed import blocking  # isort: skip
from synthetic import data_parallel, gpu_and_cpu, model_parallel  # isort: skip

pytestmark = pytest.mark.usefixtures("plain")


def path_lines(axes: Any) -> list[Any]:
    return [line for line in axes.get_lines() if line.get_label() == "critical path"]


def legend(axes: Any) -> list[str]:
    return [text.get_text() for line in axes.artists if hasattr(line, "get_texts") for text in line.get_texts()]


def test_the_line_runs_along_the_rows_of_the_ranks_on_the_path() -> None:
    axes = timeline(blocking(), critical_path=True)
    (line,) = path_lines(axes)
    x, y = line.get_data()
    assert (x[0], x[-1]) == (0, 11)
    assert np.all(np.diff(x) >= 0)
    assert [int(each) for each in y[::2]] == [piece.rank for piece in critical_path(blocking())]
    compute, communication = (float(np.mod(y[2 * i], 1)) for i in (0, 1))
    assert 0.5 < compute < 0.6  # at the lower edges of the two lanes: between them are the captions
    assert 0.8 < communication < 0.9
    without = timeline(blocking())
    assert not path_lines(without), "unless it is asked for"
    for drawn, said in ((axes, True), (without, False)):
        assert ("critical path" in legend(drawn)) == ("critical path" in drawn.figure.alt_text) == said


def test_each_of_several_runs_has_its_own_within_its_rows() -> None:
    axes = timeline({"a": data_parallel(2), "b": model_parallel()}, critical_path=True)
    first, second = (np.array(line.get_data()[1]) for line in path_lines(axes))
    assert first.max() < second.min()


def test_a_chosen_step_has_the_path_of_that_step() -> None:
    trace = data_parallel(4)
    (line,) = path_lines(timeline(trace, step=1, critical_path=True))
    start, end = trace.step_bounds()[1]
    assert line.get_data()[0][-1] == pytest.approx((end - start) / 1e6)


def test_a_run_that_cannot_be_replayed_says_so() -> None:
    with pytest.raises(LabError, match="runs on a GPU"):
        timeline(gpu_and_cpu(), critical_path=True)
