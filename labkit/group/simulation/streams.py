"""Records on which stream a simulated rank issues what follows, and for which events streams wait.

FSDP2 gathers the parameters of the next layer on other streams, while the default stream computes. On the CPU it calls
the same methods of `torch.cpu`, which do nothing there.
"""

from __future__ import annotations

from typing import Any

from torch import cpu

from labkit.group.simulation.rank_log import RankLog


def follow_streams(log: RankLog) -> None:
    """From now on in this process, record the streams and events of `torch.cpu` in `log`."""
    streams: list[Any] = [cpu.current_stream()]  # the default stream is number 0
    recorded: dict[int, tuple[Any, int]] = {}  # by the id of an event: the event, which must live on, and its number

    def number_of(stream: Any) -> int:
        stream = cpu.current_stream() if stream is None else stream
        if stream not in streams:
            streams.append(stream)
        return streams.index(stream)

    def record(event: Any, stream: Any = None) -> None:
        recorded[id(event)] = event, log.record_on(number_of(stream))

    def record_event(stream: Any, event: Any = None) -> Any:
        event = event or cpu.Event()
        record(event, stream)
        return event

    def wait(event: Any, stream: Any = None) -> None:
        if id(event) in recorded:
            log.wait_on(number_of(stream), recorded[id(event)][1])

    def wait_stream(stream: Any, other: Any) -> None:
        log.wait_on(number_of(stream), log.record_on(number_of(other)))

    class StreamContext(cpu.StreamContext):
        """Selects a stream."""

        def __enter__(self) -> None:
            super().__enter__()
            log.switch(number_of(None))

        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            log.switch(number_of(None))

    methods: dict[Any, dict[str, Any]] = {
        cpu.Stream: {"record_event": record_event, "wait_stream": wait_stream, "wait_event": lambda stream, e: wait(e, stream)},
        cpu.Event: {"record": record, "wait": wait, "synchronize": wait},
    }
    for owner, ours in methods.items():
        for name, function in ours.items():
            setattr(owner, name, function)
    cpu.stream = cpu.StreamContext = StreamContext  # type: ignore[misc]  # the one calls the other
