"""How bytes, times and rates are formatted: the unit fits the number, in every table and figure."""

import matplotlib.pyplot as plt
import pytest

from labkit.errors.units import bytes_in_words, clock_time, in_words, percent, rate_in_words, time_in_words, unit_of_bytes
from labkit.plots.live.recent import Progress
from labkit.plots.memory import memory
from labkit.plots.traffic import traffic
from labkit.recording.schema import MEMORY

from synthetic import MS, Book  # isort: skip


BYTES = {0: "0 B", 94: "94 B", 999.6: "1.00 kB", 1536: "1.54 kB", 94_000: "94.0 kB", 999_700: "1.00 MB", 4.194e6: "4.19 MB"}


def test_bytes_have_the_unit_that_fits() -> None:
    assert {nbytes: bytes_in_words(nbytes) for nbytes in BYTES} == BYTES


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (94e-6, "s", "94 µs"), (0.0161, "s", "16.1 ms"), (2**20, "iB", "1 MiB"), (3 * 2**29, "iB", "1.50 GiB"),
        (12, "iB", "12 B"),
        (1, "s", "1 s"), (0.99999, "s", "1.00 s"), (3.4e-6, "s", "3.40 µs"), (2e-8, "s", "20 ns"), (512, "B", "512 B"),
        (999_999, "B", "1.00 MB"), (64 * 4**9, "B", "16.8 MB"), (0.5, "", "50 %"), (1 / 3, "", "33.3 %"),
        (20, "bit/s", "20 bit/s"), (1e9, "bit/s", "1 Gbit/s"), (0.273, "", "27.3 %"), (0, "B", "0 B"), (0, "s", "0 s"),
    ],
)  # fmt: skip
def test_any_quantity_has_the_unit_that_fits(value: float, unit: str, words: str) -> None:
    assert in_words(value, unit) == words


def test_times_and_units_of_axes() -> None:
    assert [time_in_words(ns) for ns in (12, 1_200, 67.7 * MS, 2.5e9)] == ["12.0 ns", "1200 ns", "67.7 ms", "2.50 s"]
    assert unit_of_bytes(1500) == ("kB", 1e3)


@pytest.mark.usefixtures("plain")
def test_a_few_bytes_beside_many_keep_their_digits_in_traffic() -> None:
    book = Book()
    for source, nbytes in ((0, 94), (1, 4_000_000)):
        group = f"p2p {source}>{1 - source}"
        for rank, name in ((source, "send"), (1 - source, "recv")):
            book.travel(rank, name, 1, 2, nbytes=nbytes, peer=1 - rank, group=group, match=1)
    ax = traffic(book.trace(2))
    said = [text.get_text() for axes in ax.figure.axes for text in axes.texts]
    assert {"94 B", "4.0"} <= set(said)
    assert not any("e-" in text for text in said)


@pytest.mark.usefixtures("plain")
def test_a_few_bytes_beside_many_keep_their_digits_in_memory() -> None:
    book = Book()
    book.whole(0, "call", 0, 100)
    book.scalar(0, f"{MEMORY}parameters", 10, 2 << 20)
    book.scalar(0, f"{MEMORY}optimizer state", 20, 16)
    ax = memory(book.trace(1))
    assert ax.texts[0].get_text() == "rank 0: peak 2.10 MB = parameters 2.10 + optimizer state 16 B"
    plt.close(ax.figure)


def test_slow_steps_are_shown_by_their_duration() -> None:
    book, progress = Book(), Progress(1)
    for step in range(2):
        book.whole(0, "step", step * 400_000, (step + 1) * 400_000)
    progress.add(book.trace(1))
    assert progress.parts() == ("2 steps", "400 s per step", "")


@pytest.mark.parametrize(
    ("seconds", "whole", "tenths"),
    [
        (0.24, "0 s", "0.2 s"), (59.4, "59 s", "59.4 s"), (200, "3 min 20 s", "3 min 20 s"), (61.9, "1 min 2 s", "1 min 1 s"),
        (7500, "2 h 5 min", "2 h 5 min"),
    ],
)  # fmt: skip
def test_durations_as_a_clock_shows_them(seconds: float, whole: str, tenths: str) -> None:
    assert (clock_time(seconds), clock_time(seconds, tenths=True)) == (whole, tenths)


@pytest.mark.parametrize(
    ("per_s", "words"),
    [(0.0025, "400 s per step"), (0.5, "0.5 steps/s"), (12.34, "12.3 steps/s"), (123456.0, "123456 steps/s")],
)
def test_rates(per_s: float, words: str) -> None:
    assert rate_in_words(per_s, "step") == words


def test_whole_percent() -> None:
    assert [percent(share) for share in (0, 0.054, 1)] == ["0 %", "5 %", "100 %"]
