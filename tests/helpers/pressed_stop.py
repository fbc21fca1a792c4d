"""Stop, pressed at a known moment of a run."""

from __future__ import annotations

import signal

import pytest

from labkit.group.output import Output


def stop_when_printed(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Presses Stop once, as soon as a given number of ranks have printed something."""
    seen: set[int] = set()
    feed = Output.feed

    def feed_and_stop(output: Output, rank: int, data: bytes) -> None:
        feed(output, rank, data)
        seen.add(rank)
        if len(seen) == count:
            monkeypatch.setattr(Output, "feed", feed)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Output, "feed", feed_and_stop)
