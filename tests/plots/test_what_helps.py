"""The figure of what would help."""

from __future__ import annotations

import matplotlib as mpl
import pytest

from labkit.errors.exceptions import LabError
from labkit.plots.what_helps import COSTS, SAVES, what_helps
from labkit.tracing.replaying.replay import replay

from replayed import ONE_GBIT, beside, blocking, waited  # isort: skip
from synthetic import alone, in_steps, made  # isort: skip

pytestmark = pytest.mark.usefixtures("plain")


def test_bars_have_the_lengths_and_the_words_of_what_is_saved() -> None:
    axes = what_helps(blocking())
    assert [round(bar.get_width(), 3) for bar in axes.patches] == [4, 3, 1, 0.5, 2]
    assert [tick.get_text() for tick in axes.get_yticklabels()][:2] == ["forward twice as fast", "rank 1 as fast as the others"]
    assert axes.texts[0].get_text() == "saves 4.00 ms"
    assert "forward twice as fast: saves 4.00 ms of 11.0 ms" in axes.figure.alt_text
    assert "11.0 ms" in axes.get_title(loc="left")
    assert "replayed" not in axes.get_title(loc="left")
    assert "replayed" in what_helps(replay(blocking(), faster={"forward": 2})).get_title(loc="left")
    # Ideals stand apart, as empty bars under a heading; also in the alternative text.
    assert [bar.get_fill() for bar in axes.patches] == [True, True, True, True, False]
    heading = "Ideals, which no change reaches:"
    assert axes.texts[-1].get_text() == heading
    assert f"saves 0.50 ms of 11.0 ms. {heading} communication takes no time: saves 2.00 ms" in axes.figure.alt_text


def test_a_change_for_the_worse_points_the_other_way_in_another_colour() -> None:
    axes = what_helps(replay(waited(), link=ONE_GBIT))
    last = axes.patches[-2]  # the last one is an ideal
    assert last.get_width() < 0
    assert mpl.colors.to_hex(last.get_facecolor()).upper() == COSTS.upper()
    assert mpl.colors.to_hex(axes.patches[0].get_facecolor()).upper() == SAVES.upper()
    assert axes.texts[-3].get_text() == "costs 5.00 ms"  # 10 to 30 in place of 5 to 25


def test_what_is_within_the_spread_is_pale_and_says_so() -> None:
    forward = (9, 8, 10, 12, 14)
    axes = what_helps(in_steps(5, lambda step: ("forward", forward[step]), ("optimizer", 2), ranks=1))
    assert [bar.get_alpha() for bar in axes.patches] == [1.0, 0.35]
    assert [("within the spread" in text.get_text()) for text in axes.texts] == [False, True]


def test_what_saves_nothing_says_so() -> None:
    axes = what_helps(replay(beside(), link=ONE_GBIT))  # all communication is hidden behind the backward pass
    words = zip((tick.get_text() for tick in axes.get_yticklabels()), (text.get_text() for text in axes.texts), strict=False)
    said = dict(words)
    assert said["communication takes no time"] == "saves nothing"
    assert said["backward twice as fast"] == "saves 10.0 ms"


def test_a_run_without_steps_saves_per_run() -> None:
    assert "saved per run" in what_helps(made([("forward", 0, 4)])).get_xlabel()
    assert "saved per step" in what_helps(alone()).get_xlabel()


def test_a_run_in_which_nothing_could_be_changed_is_not_drawn() -> None:
    with pytest.raises(LabError, match="what_helps: this run has no spans"):
        what_helps(made([("call", 0, 4)]))
