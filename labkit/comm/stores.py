"""Records waits for a key of a store, or for its server, which would be invisible since torch waits in C++.

The notebook, another group or another program may set a key of any store that they can open, or serve it. So a wait
for one is never part of a deadlock: like a wait with a time limit, it is announced after a while.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from labkit.comm.rendezvous import LOCAL, Rendezvous
from labkit.comm.torch_internals import in_place_of
from labkit.recording.group_keys import rendezvous_key, store_key
from labkit.recording.record import Recorder, clock, student_line
from labkit.recording.schema import TIMED

SHORTEST_NS: Final = 1_000_000  # shorter waits are not recorded
STANDARD: Final = (timedelta(seconds=300), default_pg_timeout)  # torch's default time limits of stores and process groups


class Stores:
    """Records how long this rank's program waits for stores.

    Args:
        recorder: this rank's recorder.
        rendezvous: knows whether a recorded call is running that opens a store itself.
        own: address and port of the group's store, whose connections are labkit's; None if it has none.
    """

    def __init__(self, recorder: Recorder, rendezvous: Rendezvous, own: tuple[str, int] | None = None) -> None:
        self._ring, self._rendezvous, self._own = recorder.ring, rendezvous, own

    def install(self) -> None:
        """Wrap the methods of torch's stores."""
        store = dist.Store
        store.get = in_place_of(store.get, self._get)  # type: ignore[method-assign]
        store.wait = in_place_of(store.wait, self._wait)  # type: ignore[method-assign]
        dist.TCPStore.__init__ = in_place_of(dist.TCPStore.__init__, self._open)  # type: ignore[method-assign]

    def _get(self, get: Callable[..., Any], store: Any, key: str) -> Any:
        if store.check([key]):
            return get(store, key)
        return self._waited("store.get", store_key(key), self._may_end(store), lambda: get(store, key))

    def _wait(self, wait: Callable[..., Any], store: Any, keys: list[str], *timeout: timedelta, **named: timedelta) -> Any:
        if store.check(keys):
            return None
        timed = bool(timeout or named) or self._may_end(store)
        return self._waited("store.wait", store_key(", ".join(keys)), timed, lambda: wait(store, keys, *timeout, **named))

    def _open(self, init: Callable[..., None], store: Any, *args: Any, **kwargs: Any) -> None:
        given = dict(zip(("host_name", "port", "world_size", "is_master", "timeout"), args, strict=False)) | kwargs
        if self._rendezvous.under_way or given.get("port") is None or self._is_own(given.get("host_name", ""), given["port"]):
            init(store, *args, **kwargs)
            return
        group = rendezvous_key(f"{given.get('host_name')}:{given['port']}", given.get("world_size") or 2)
        self._waited("TCPStore", group, True, lambda: init(store, *args, **kwargs), 1)

    def _may_end(self, store: Any) -> bool:
        """Whether a wait for a store's key may end without the ranks: by a time limit, or by another program."""
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        ours = isinstance(store, dist.HashStore) or (isinstance(store, dist.TCPStore) and self._is_own(store.host, store.port))
        return not ours or store.timeout not in STANDARD

    def _is_own(self, host: str, port: int) -> bool:
        """Whether the group's store listens at an address."""
        if self._own is None or port != self._own[1]:
            return False
        return host == self._own[0] or {host, self._own[0]} <= LOCAL

    def _waited(self, name: str, group: str, timed: bool, call: Callable[[], Any], match: int = 0) -> Any:
        line, start_ns = student_line(), clock()
        slot = self._ring.pend(name, start_ns, group=group, match=match, line=line)
        self._ring.waiting(slot, start_ns, TIMED if timed else 0)
        try:
            return call()
        finally:
            self._ring.unpend(slot)
            end_ns = clock()
            if end_ns - start_ns > SHORTEST_NS:
                self._ring.write_communication(
                    name, start_ns, end_ns, wait_start_ns=start_ns, wait_end_ns=end_ns, group=group, match=match, line=line
                )
