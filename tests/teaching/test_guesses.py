"""`guess`, `reveal` and `guesses`: what is sealed, what counts, what the figures say."""

import re

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from synthetic import run_of

import labkit as lab
from labkit.teaching.guesses import FILE, entries, guess, guesses, reveal
from labkit.tracing import step_times


@pytest.fixture(autouse=True)
def lesson(tmp_path, monkeypatch):
    """A notebook in a folder of its own; the fixture's value opens another notebook there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(step_times, "usable_cores", lambda: 2)
    monkeypatch.setattr(step_times, "machine_load", lambda: 0.0)

    def open_notebook(name):
        monkeypatch.setenv("JPY_SESSION_NAME", f"some/folder/{name}.ipynb")

    open_notebook("02_data_parallel")
    yield open_notebook
    plt.close("all")


def kept(tmp_path):
    return {(e.lesson, e.name): (e.guess, e.measured, e.changed) for e in entries(tmp_path)}


def texts(ax):
    return [text.get_text() for text in ax.texts]


def labels(ax):
    return [text.get_text() for text in ax.get_yticklabels()]


def drawn(ax):
    """By the label of its row, the value at which each marker lies."""
    points = {round(line.get_ydata()[0]): line.get_xdata()[0] for line in ax.lines if line.get_marker() not in ("None", "")}
    return {labels(ax)[row]: value for row, value in points.items()}


def test_a_guess_that_is_not_made_yet_is_not_kept(tmp_path):
    assert repr(guess(step_ms=...)) == "○ step: no guess yet. Replace the ... with your guess and run the cell again."
    ax = reveal(step_ms=10, predicted=9)
    assert ax.get_title(loc="left") == "Revealed without a guess"
    assert drawn(ax) == {"predicted": 9, "measured": 10}
    assert list(tmp_path.iterdir()) == []


def test_several_guesses_are_sealed_at_once(tmp_path):
    assert repr(guess(step_ms=12, sent_mb=..., speed_up=1.7)) == (
        "● step: 12 ms, sealed.\n"
        "○ sent: no guess yet. Replace the ... with your guess and run the cell again.\n"
        "● speed-up: 1.7, sealed."
    )
    assert kept(tmp_path) == {
        ("02_data_parallel", "step_ms"): (12, None, None),
        ("02_data_parallel", "speed_up"): (1.7, None, None),
    }


def test_the_figure_shows_guess_prediction_and_measurement_on_one_scale():
    guess(step_ms=12)
    ax = reveal(step_ms=10, predicted=9)
    assert drawn(ax) == {"your guess": 12, "predicted": 9, "measured": 10}
    assert texts(ax) == ["12 ms, 1.2 × measured", "9 ms, 0.9 × measured", "10 ms"]
    assert ax.get_title(loc="left") == "Your guess was 20 % too high"
    assert ax.get_xlabel() == "step (ms)"
    assert ax.get_xscale() == "linear"
    assert ax.get_xlim()[0] == 0


def test_values_far_apart_have_a_logarithmic_scale():
    guess(sent_mb=3)
    ax = reveal(sent_mb=0.011)
    assert ax.get_xscale() == "log"
    assert texts(ax) == ["3 MB, 273 × measured", "0.011 MB"]


@pytest.mark.parametrize(
    ("value", "title"),
    [(9.5, "Your guess was within 10 %"), (10, "Your guess was right"), (5, "Your guess was too low by a factor of 2")],
)
def test_the_title_says_how_far_the_guess_was(value, title):
    guess(step_ms=value)
    assert reveal(step_ms=10).get_title(loc="left") == title


def test_a_guess_may_be_changed_before_it_is_revealed():
    guess(step_ms=12)
    guess(step_ms=11)
    ax = reveal(step_ms=10)
    assert drawn(ax) == {"your guess": 11, "measured": 10}


def test_a_guess_changed_after_its_reveal_does_not_count_and_the_figure_says_so(tmp_path):
    guess(step_ms=12)
    reveal(step_ms=10)
    assert repr(guess(step_ms=10)) == "● step: 10 ms. It was already revealed, so this guess does not count."
    ax = reveal(step_ms=10.2)
    assert drawn(ax) == {"your guess": 12, "changed after the reveal": 10, "measured": 10.2}
    assert kept(tmp_path)["02_data_parallel", "step_ms"] == (12, 10, 10)


def test_running_the_notebook_again_changes_nothing(tmp_path):
    for measured in (10, 11):
        assert repr(guess(step_ms=12)) == "● step: 12 ms, sealed."
        assert labels(reveal(step_ms=measured)) == ["your guess", "measured"]
    assert kept(tmp_path)["02_data_parallel", "step_ms"] == (12, 10, None)


def test_a_guess_made_after_a_reveal_without_one_counts():
    """A student who ran the cells too early starts again; nothing was kept of the first reveal."""
    reveal(step_ms=10)
    guess(step_ms=12)
    assert drawn(reveal(step_ms=10))["your guess"] == 12


def test_two_lessons_may_guess_a_quantity_of_the_same_name(lesson, tmp_path):
    guess(step_ms=12)
    lesson("04_model_parallel")
    guess(step_ms=30)
    assert {key: value[0] for key, value in kept(tmp_path).items()} == {
        ("02_data_parallel", "step_ms"): 12,
        ("04_model_parallel", "step_ms"): 30,
    }


def test_without_a_notebooks_name_guesses_are_kept_all_the_same(monkeypatch, tmp_path):
    monkeypatch.delenv("JPY_SESSION_NAME")
    guess(step_ms=12)
    assert kept(tmp_path) == {("", "step_ms"): (12, None, None)}


@pytest.mark.parametrize(
    ("name", "prediction", "expected"),
    [
        ("step_ms", lab.predict.broadcast(0, ranks=2, link=lab.Link(gbit_per_s=1, latency_us=50)), 0.05),
        ("step_us", lab.predict.broadcast(0, ranks=2, link=lab.Link(gbit_per_s=1, latency_us=50)), 50),
        ("idle_percent", lab.predict.pipeline_bubble(stages=4, micro_batches=8), 100 * 3 / 11),
    ],
)
def test_a_prediction_is_converted_to_the_unit_of_the_quantity(name, prediction, expected):
    assert drawn(reveal(**{name: 1.0}, predicted=prediction))["predicted"] == pytest.approx(expected)


def test_a_prediction_of_seconds_is_no_number_of_bytes():
    prediction = lab.predict.barrier(ranks=2, link=lab.Link.ethernet_1g)
    with pytest.raises(ValueError, match=r"reveal\(sent_mb=\.\.\., predicted=.*\): the prediction, .*, is not in MB"):
        reveal(sent_mb=1, predicted=prediction)


@pytest.mark.parametrize("value", [np.float32(2.5), torch.tensor(2.5), 2.5])
def test_numbers_of_libraries_are_numbers(value):
    guess(step_ms=value)
    assert drawn(reveal(step_ms=value)) == {"your guess": 2.5, "measured": 2.5}


def test_a_choice_is_right_whatever_its_case_and_spaces():
    guess(waits="rank 1")
    assert repr(reveal(waits="Rank  1")) == "✓ waits: Rank  1. Your guess was rank 1."


def test_a_choice_that_is_wrong_stays_wrong_when_it_is_changed():
    guess(waits="rank 1")
    assert repr(reveal(waits="rank 0")) == "✗ waits: rank 0. Your guess was rank 1."
    guess(waits="rank 0")
    assert repr(reveal(waits="rank 0")) == "✗ waits: rank 0. Your guess was rank 1 (later changed to rank 0)."


def test_the_answer_of_a_choice_without_a_guess():
    assert repr(reveal(waits="rank 0")) == "○ waits: rank 0."


def test_text_of_a_student_is_no_markup():
    assert "<b>1" not in guess(waits="<b>1")._repr_html_()


@pytest.mark.parametrize(("sealed", "answer"), [(1.0, "rank 0"), ("rank 0", 1.0)])
def test_numbers_are_not_compared_with_texts(sealed, answer):
    guess(waits=sealed)
    with pytest.raises(lab.LabError, match="compare numbers with numbers"):
        reveal(waits=answer)


def test_the_calibration_of_the_course(lesson):
    for name, sealed, measured in [("a_ms", 10, 10), ("b_ms", 15, 10), ("c_ms", 10, 40)]:
        guess(**{name: sealed})
        reveal(**{name: measured})
    lesson("04_model_parallel")
    guess(d_ms=1, waits="rank 1", never_revealed=3)
    reveal(d_ms=1.5)
    reveal(waits="rank 0")
    reveal(unguessed_ms=3)
    ax = guesses()
    expected = {
        "02_data_parallel · a": 1,
        "02_data_parallel · b": 1.5,
        "02_data_parallel · c": 0.25,
        "04_model_parallel · d": 2 / 3,
    }
    assert drawn(ax) == pytest.approx(expected)
    assert ax.get_title(loc="left") == "3 of 4 guesses within a factor of 2, median factor 1.5; 0 of 1 choices right"


def test_large_numbers_on_the_axis_have_separators_and_no_exponent():
    for measured, tick in ((727_552, "400,000"), (3_000_000, "2,000,000"), (0.3, "0.2")):
        ax = reveal(weights=measured)
        ax.figure.canvas.draw()
        numbers = [label.get_text() for label in ax.get_xticklabels()]
        assert tick in numbers
        assert not [number for number in numbers if "e" in number]


def test_the_calibration_before_the_first_reveal():
    assert guesses().get_title(loc="left") == "No guess has been revealed yet"


@pytest.mark.parametrize(
    ("sealed", "measured", "at", "near"), [(0, 3, "left edge", 0), (3, 0, "right edge", 0), (0, 0, 1, 1), (3, 3, 1, 1)]
)
def test_a_guess_or_a_measurement_of_zero_counts_too(sealed, measured, at, near):
    guess(lost_ms=sealed)
    reveal(lost_ms=measured)
    ax = guesses()
    left, right = ax.get_xlim()
    edges = {"left edge": left, "right edge": right}
    assert drawn(ax) == pytest.approx({"02_data_parallel · lost": edges.get(at, at)})
    assert ax.get_title(loc="left").startswith(f"{near} of 1 guesses within a factor of 2")
    assert f"{sealed} ms for {measured} ms" in texts(ax)
    ax.figure.canvas.draw()


def test_a_small_whole_number_is_hit_or_missed():
    guess(stages=1, ranks=4, waits="rank 1")
    ax = reveal(stages=2)
    assert ax.get_title(loc="left") == "Your guess was 1 instead of 2"
    assert "1" in texts(ax)
    assert reveal(ranks=4).get_title(loc="left") == "Your guess was right"
    assert guesses().get_title(loc="left") == "1 of 2 counts right"
    reveal(waits="rank 1")
    assert guesses().get_title(loc="left") == "2 of 3 choices and counts right"
    guess(parameters=100)
    reveal(parameters=64)
    assert guesses().get_title(loc="left").startswith("1 of 1 guesses within a factor of 2, ")


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: guess(), TypeError, "guess(): expected what you guess and its value, as in lab.guess(step_ms=12)"),
        (lambda: guess(step_ms=-1), ValueError, "guess(step_ms=-1): expected a number from 0"),
        (lambda: guess(step_ms=float("nan")), ValueError, "guess(step_ms=nan): expected a number from 0"),
        (lambda: guess(step_ms="12 ms"), TypeError, "guess(step_ms='12 ms'): expected one number, in ms"),
        (lambda: guess(speed_up="twice"), TypeError, "guess(speed_up='twice'): expected one number, as in guess(speed_up=2)"),
        (lambda: guess(predicted=5), ValueError, "guess(predicted=...): this is the name of an argument of reveal"),
        (lambda: guess(step_ms=1e31), ValueError, "guess(step_ms=1e+31): expected a number from 0 to 1e30"),
        (lambda: guess(step_ms=[1]), TypeError, "guess(step_ms=[1]): expected one number from 0, a text or ..."),
        (lambda: guess(step_ms=True), TypeError, "guess(step_ms=True): expected one number from 0, a text or ..."),
        (lambda: guess(step_ms=np.ones(3)), TypeError, "expected one number from 0"),
        (lambda: guess(waits=" "), ValueError, "guess(waits=' '): expected a text of 1 to 200 characters"),
        (lambda: guess(12), TypeError, "guess()"),
        (lambda: reveal(), TypeError, "reveal(): no quantity; expected one, as in lab.reveal(step_ms=11.3, predicted=10.8)"),
        (lambda: reveal(a=1, b=2), TypeError, "reveal(): 2 quantities (a, b); expected one"),
        (lambda: reveal(step_ms=...), TypeError, "reveal(step_ms=Ellipsis): expected one number from 0"),
        (lambda: reveal(step_ms=1, predicted=-1), ValueError, "reveal(predicted=-1): expected a number from 0"),
        (lambda: reveal(sent_mb=run_of(1)), TypeError, "a run is measured by the time of its steps, which is not in MB"),
        (lambda: reveal(speed_up=run_of(1)), TypeError, "which is not in plain numbers"),
        (lambda: reveal(step_ms=[1, "2"]), TypeError, "expected one number from 0, a run, or a list of either"),
        (lambda: reveal(step_ms=[1, float("nan")]), ValueError, "reveal(step_ms=nan): expected a number from 0"),
        (lambda: reveal(step_ms=[1, -2]), ValueError, "reveal(step_ms=-2.0): expected a number from 0"),
        (lambda: reveal(fix={"log": run_of(1)}), ValueError, "expected at least two answers, each with a run or a number"),
    ],
)  # fmt: skip
def test_wrong_calls_are_explained(call, kind, message, tmp_path):
    with pytest.raises(kind, match=re.escape(message)):
        call()
    assert not (tmp_path / FILE).exists()


def test_a_measurement_that_found_nothing_reveals_nothing():
    guess(crossover_mb=3)
    assert repr(reveal(crossover_mb=None)) == "○ crossover: nothing was measured. A sealed guess stays sealed."
    assert "The formula says 2.5 MB." in repr(reveal(crossover_mb=None, predicted=2.5))
    guess(crossover_mb=2)
    assert drawn(reveal(crossover_mb=4))["your guess"] == 2


def test_a_count_has_an_axis_of_whole_numbers():
    assert all(float(tick).is_integer() for tick in reveal(messages=2, predicted=2).get_xticks())
    assert not all(float(tick).is_integer() for tick in reveal(sent_mb=2, predicted=2).get_xticks())


def test_a_text_in_place_of_a_revealed_number_is_refused_and_nothing_is_lost(tmp_path):
    guess(steps=5)
    reveal(steps=6)
    with pytest.raises(lab.LabError, match=r"guess\(steps='fast'\): 6 was revealed; compare numbers with numbers"):
        guess(steps="fast")
    assert drawn(reveal(steps=6)) == {"your guess": 5, "measured": 6}
    assert labels(guesses()) == ["02_data_parallel · steps"]


def test_a_rate_says_what_it_counts():
    assert repr(guess(tokens_per_s=500)) == "● tokens per second: 500, sealed."
    assert repr(guess(link_gbit_per_s=5)) == "● link: 5 Gbit/s, sealed."


def test_a_sum_of_predictions_is_converted_too():
    message = lab.predict.message(1e6, lab.Link(gbit_per_s=1, latency_us=0))  # 8 ms
    assert drawn(reveal(step_ms=20, predicted=message + message))["predicted"] == pytest.approx(16)


# Measurements with a spread, and busy machines


@pytest.mark.parametrize(
    ("name", "sealed", "measured", "title"),
    [
        ("step_ms", 11.5, run_of(9, 10, 10, 11), "Your guess was 15 % too high"),
        ("step_ms", 10.2, run_of(9, 10, 10, 11), "Your guess was within the spread"),
        ("step_ms", 10.2, run_of(2, 4, 10, 10, 20, 40), "Too close to call: measured 5.5 ms to 17.5 ms. Measure again"),
        ("step_ms", 90, run_of(2, 4, 10, 10, 20, 40), "Your guess was too high by a factor of 9"),
        ("speed_up", 2.5, [2.6, 1.25, 2.77], "Too close to call: measured 1.25 to 2.77. Measure again"),
        ("speed_up", 2.5, (run_of(50, 50), run_of(20, 20)), "Your guess was right"),
        ("speed_up", 2.5, (run_of(50, 50), run_of(20.01, 20.01)), "Your guess was right"),  # 2.499
        (
            "speed_up",
            2.5,
            ([run_of(50), run_of(90)], [run_of(20), run_of(60)]),
            "Too close to call: measured 0.833 to 4.5. Measure again",
        ),
        ("saves_percent", 45, (run_of(100, 100), run_of(68, 68)), "Your guess was 13 points too high"),
        ("saves_percent", 31, (run_of(100, 100), run_of(68, 68)), "Your guess was within 5 points"),
        ("saves_percent", 1, (run_of(100), run_of(94)), "Your guess was within 5 points"),
        ("saves_percent", 30, ([run_of(100), run_of(80)], run_of(68)), "Your guess was within the spread"),
        (
            "saves_percent",
            30,
            ([run_of(150), run_of(80)], run_of(68)),
            "Too close to call: measured 15 % to 54.7 %. Measure again",
        ),
        ("step_ms", 10, run_of(10, 10, load=6.2), "This machine was busy (load 6 on 2 cores): measure again"),
        ("speed_up", 2.5, (run_of(50), run_of(20, load=6.2)), "This machine was busy (load 6 on 2 cores): measure again"),
    ],
)
def test_a_guess_is_judged_by_what_the_measurements_decide(name, sealed, measured, title, tmp_path):
    guess(**{name: sealed})
    assert reveal(**{name: measured}).get_title(loc="left") == title
    _, revealed, _ = kept(tmp_path)["02_data_parallel", name]
    assert (revealed is None) == title.startswith(("Too close", "This machine"))


def test_the_figure_shows_the_spread():
    guess(step_ms=20)
    ax = reveal(step_ms=run_of(8, 10, 12, 14))
    assert texts(ax) == ["20 ms, 1.82 × measured", "11 ms (9.5 ms to 12.5 ms)"]
    assert (9.5, 12.5) in [tuple(line.get_xdata()) for line in ax.lines]
    assert texts(reveal(saves_percent=[30, 32], predicted=40)) == [
        " none was sealed",
        "40 %, 9 points too high",
        "31 % (30 % to 32 %)",
    ]
    assert texts(reveal(saves_percent=62.5, predicted=62.50001))[1:] == ["62.5 %", "62.5 %"], "no 1e-05 points"


def test_a_change_that_saves_nothing_reveals_nothing(tmp_path):
    guess(saves_percent=30)
    assert "nothing is saved, since a step takes longer" in repr(reveal(saves_percent=(run_of(50), run_of(60))))
    assert kept(tmp_path)["02_data_parallel", "saves_percent"] == (30, None, None)


LOG, DATA = run_of(125, 125, 131), run_of(90, 90, 96)


@pytest.mark.parametrize(
    ("sealed", "measured", "said"),
    [
        ("data", {"log": LOG, "data": DATA}, "✓ better fix: data. Your guess was data. Measured: log 125 ms"),
        ("log", {"log": LOG, "data": DATA}, "✗ better fix: data. Your guess was log."),
        ("log", {"log": [LOG, DATA], "data": [LOG, DATA]}, "○ better fix: log and data are too close to call. Measure again."),
        (
            "log",
            {"log": 127, "data": 127},
            "○ better fix: log and data are too close to call. Measure again. Measured: log 127, data",
        ),
        (
            "log",
            {"log": LOG, "data": run_of(170, load=6.2)},
            "○ better fix: This machine was busy (load 6 on 2 cores): measure again.",
        ),
        ("log", {"log": LOG, "data": run_of(190, 200, 200, load=6.2)}, "✓ better fix: log. Your guess was log."),
        ("log", {"log": LOG, "data": DATA, "batch": [5, 99, 150]}, "○ better fix: data and batch are too close to call."),
        ("data", {"log": 127, "data": 90}, "✓ better fix: data."),
    ],
)
def test_of_several_answers_the_smallest_is_right_unless_it_is_too_close_to_call(sealed, measured, said, tmp_path):
    guess(better_fix=sealed)
    note = repr(reveal(better_fix=measured))
    assert note.startswith(said)
    _, revealed, _ = kept(tmp_path)["02_data_parallel", "better_fix"]
    assert (revealed is None) == note.endswith("Your guess stays sealed.") == note.startswith("○")


def test_a_guess_that_is_no_answer_is_named_and_nothing_is_told(tmp_path):
    guess(better_fix="network")
    said = "○ better fix: your guess was network. Guess log or data, and run this again."
    assert repr(reveal(better_fix={"log": LOG, "data": DATA})) == said
    assert kept(tmp_path)["02_data_parallel", "better_fix"] == ("network", None, None)


def test_answers_without_a_guess_are_compared_too():
    assert repr(reveal(better_fix={"log": LOG, "data": DATA})).startswith("○ better fix: data. Measured: log 125 ms")


def test_when_the_answer_changes_the_first_one_is_named():
    guess(better_fix="log")
    reveal(better_fix="log")
    assert "Your guess was log. At the first reveal it was log, which counts." in repr(reveal(better_fix="data"))


@pytest.mark.parametrize(("name", "busy"), [("step_ms", True), ("speed_up", True), ("tokens_per_s", True), ("messages", False)])
def test_a_busy_machine_is_told_for_plain_numbers_that_depend_on_it(monkeypatch, name, busy):
    monkeypatch.setattr(step_times, "machine_load", lambda: 1e6)
    assert reveal(**{name: 30}).get_title(loc="left").startswith("This machine was busy") is busy


def test_a_replay_may_be_the_prediction():
    run = run_of(100, 100)
    ax = reveal(saves_percent=(run, run_of(68, 68)), predicted=(run, lab.replay(run, faster={"forward": 2})))
    assert drawn(ax) == pytest.approx({"predicted": 50, "measured": 32})
