"""Delays remote procedure calls on an emulated link: the callee starts and the caller resumes when a message arrives.

Calls, replies and values fetched through an RRef are messages. For torch's own functions, which run in C++, only the
caller is delayed. Other messages that torch sends in C++, such as the gradients of a distributed backward pass, are not
delayed at all.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from labkit.recording.group_keys import call_key
from labkit.recording.record import clock
from labkit.worker.comm.descriptions import nbytes_of
from labkit.worker.comm.emulated_link import SlowLink, hold_until, pass_on
from labkit.worker.comm.futures import Futures
from labkit.worker.comm.operation import Operation


class SlowCalls:
    """Delays this rank's calls, and those that it serves.

    The methods identify a call by `pair`, the key of its caller and callee ("" for torch's own functions, which run in
    C++), and `number`, its number on the caller.
    """

    def __init__(self, slow: SlowLink, futures: Futures) -> None:
        self._slow, self._futures = slow, futures
        self._fetched = itertools.count(1)

    def call(self, operation: Operation, pair: str, number: int) -> None:
        """On the caller: schedule a call of `operation.nbytes`; does nothing for torch's own functions."""
        if pair:
            self._send(self._slow.rank, operation.peer, operation.nbytes, f"call {pair}", number, operation.start_ns)

    def arrives(self, pair: str, number: int) -> None:
        """On the callee: sleep until a received call has arrived over the emulated link."""
        hold_until(self._slow.shared_link.due_ns(f"call {pair}", number))

    def reply(self, caller: int, number: int, nbytes: int, at_ns: int, *, travels: bool) -> None:
        """On the callee: schedule a reply, or announce a value that stays there for an RRef, if it does not travel."""
        pair = call_key(caller, self._slow.rank)
        if travels:
            self._send(self._slow.rank, caller, nbytes, f"reply {pair}", number, at_ns)
        else:
            self._slow.shared_link.arrive(f"value {pair}", number, at_ns, self._slow.nothing)

    def until_reply(self, operation: Operation, result: Any, pair: str, number: int) -> Any:
        """On the caller: return a future that completes when the reply has arrived over the emulated link.

        For a function that runs in C++, the compute time is unknown: only the two messages are counted.
        """
        held: Any = torch.futures.Future()

        def came(done: Any) -> None:
            operation.backend_ns = clock()
            due_ns = self._slow.shared_link.due_ns(f"reply {pair}", number) if pair else self._there_and_back_ns(operation, done)
            self._slow.at(due_ns, lambda: complete(done))

        def complete(done: Any) -> None:
            operation.completed()
            pass_on(done, held)

        self._futures.tell(result, came)
        return held

    def fetched(self, operation: Operation, pair: str, number: int) -> None:
        """On the caller of `to_here`: sleep until the value has arrived over the emulated link."""
        operation.backend_ns = clock()
        asked_ns = operation.start_ns + round(self._slow.to(operation.peer).latency_s * 1e9)
        there_ns = self._slow.shared_link.due_ns(f"value {pair}", number) if pair else 0
        group, number, start_ns = f"fetched by {self._slow.rank}", next(self._fetched), max(asked_ns, there_ns)
        self._send(operation.peer, self._slow.rank, operation.nbytes, group, number, start_ns)
        hold_until(self._slow.shared_link.due_ns(group, number))

    def _there_and_back_ns(self, operation: Operation, done: Any) -> int:
        try:
            value = done.value()
        except Exception:  # noqa: BLE001  # raised where the result is waited for
            value = None
        link = self._slow.to(operation.peer)
        return operation.start_ns + round((link.seconds("send", operation.nbytes) + link.seconds("send", nbytes_of(value))) * 1e9)

    def _send(self, source: int, destination: int, nbytes: int, group: str, number: int, at_ns: int) -> None:
        self._slow.message(source, destination, nbytes, group, number, at_ns, ends=1)
