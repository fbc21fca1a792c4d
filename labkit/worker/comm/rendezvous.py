"""Lets a program's processes meet in their group's own store, whatever address the program specifies.

In torch, a program specifies an address (`tcp://localhost:29500`, or MASTER_ADDR and MASTER_PORT) at which its rank 0
serves a store. In a rank of a group, all addresses of its machines become keys in the store that the group already has.
No port is opened, so none can be in use already. Each rendezvous has its own keys, so a second one at the same address
never reads stale values of the first.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from labkit.recording.group_keys import rendezvous_key
from labkit.recording.record import Recorder, clock, student_line
from labkit.recording.schema import TIMED
from labkit.recording.torch_internals import RENDEZVOUS
from labkit.worker.comm.operation import Operation

SCHEMES: Final = ("tcp", "env")  # torch's schemes that name an address
LOCAL: Final = frozenset({"127.0.0.1", "localhost", "::1", "0.0.0.0", ""})  # the last two occur in tutorials


class Address(NamedTuple):
    """A rendezvous as a program specifies it; -1 for unspecified numbers."""

    scheme: str
    where: str  # as the program writes it: "localhost:29500"
    rank: int
    size: int

    @classmethod
    def of(cls, url: str, rank: int = -1, size: int = -1) -> Address:
        """Combine an init_method, the other arguments (-1 for none), and for "env://" the environment.

        An init_method is "env://", "tcp://localhost:29500?rank=0&world_size=4" or "file:///shared/file".
        """
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query))
        from_env = os.environ if parts.scheme == "env" else {}
        rank = rank if rank >= 0 else int(query.get("rank") or from_env.get("RANK") or -1)
        size = size if size >= 0 else int(query.get("world_size") or from_env.get("WORLD_SIZE") or -1)
        where = parts.netloc or parts.path
        if parts.scheme == "env":
            where = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
        return cls(parts.scheme, where, rank, size)


class Rendezvous:
    """Redirects this rank's rendezvous to its group's store, and records the waits.

    Args:
        connect: opens a new connection to the group's store.
        machines: the names and addresses of the group's machines; none if all ranks are on this one.
    """

    def __init__(self, recorder: Recorder, connect: Callable[[], Any] | None = None, machines: Collection[str] = ()) -> None:
        self._ring, self._size, self._connect = recorder.ring, recorder.size, connect
        self._machines = machines
        self._operation: Operation | None = None  # the current call of a function of torch's
        self._timed = False  # see `waiting`
        self._visits: defaultdict[str, Iterator[int]] = defaultdict(lambda: itertools.count(1))

    def install(self) -> None:
        """Replace torch's handlers of addresses."""
        if not RENDEZVOUS.found:
            self._connect = None
            return
        handlers = RENDEZVOUS["_rendezvous_handlers"]
        for scheme in SCHEMES:
            handlers[scheme] = partial(self._handler, handlers[scheme])

    @property
    def in_groups_store(self) -> bool:
        """Whether this rank's group has a store; otherwise torch opens one at the program's address."""
        return self._connect is not None

    def others_may_come(self, asked: Address) -> bool:
        """Whether other processes than this group's may meet at an address, so that a wait there is never hopeless."""
        if asked.scheme not in SCHEMES or not self._is_here(asked.where):
            return True
        return self._connect is None and asked.size != self._size

    @contextlib.contextmanager
    def waiting(self, name: str, where: str, size: int, timed: bool = False) -> Iterator[None]:
        """Record that this rank is in the call `name`, which returns when `size` processes have entered it.

        `timed`: whether it may end without these ranks, by the program's time limit, or by other programs.
        """
        before = self._operation, self._timed
        group = rendezvous_key(where, size)
        self._timed = timed
        self._operation = self._blocked(name, clock(), group, next(self._visits[group]))
        try:
            yield
        except BaseException:
            self._operation.failed()
            raise
        else:
            self._operation.wait_ends()
        finally:
            self._operation, self._timed = before

    def meet(self, where: str, size: int, timeout: timedelta = default_pg_timeout) -> Any:
        """Wait until `size` processes have arrived, as part of the current call if there is one; return their store."""
        assert self._connect is not None, "a rank without a store of its group has torch meet where the program says"
        if self._operation is None:
            with self.waiting("rendezvous", where, size):
                return self.meet(where, size, timeout)
        store, group = self._connect(), rendezvous_key(where, size)
        generation, place = divmod(store.add(f"{group}/came", 1) - 1, size)
        under_way = self._operation
        self._operation = self._blocked(under_way.name, under_way.start_ns, group, generation + 1)
        under_way.withdrawn()
        store.set(f"{group}/{generation}/{place}", "here")
        keys = [f"{group}/{generation}/{i}" for i in range(size)]
        try:
            store.wait(keys, timeout)
        except dist.DistStoreError:
            came = sum(store.check([key]) for key in keys)
            seconds = timeout.total_seconds()
            raise dist.DistStoreError(
                f"Timed out after {seconds:g} seconds waiting for clients. {came}/{size} clients joined."
            ) from None
        return dist.PrefixStore(f"{group}/{generation}", store)

    def _blocked(self, name: str, start_ns: int, group: str, match: int) -> Operation:
        operation = Operation(self._ring, name, start_ns, group=group, match=match, line=student_line())
        operation.wait_begins(TIMED if self._timed else 0)
        return operation

    def _handler(self, torchs: Callable[..., Any], url: str, timeout: timedelta = default_pg_timeout, **kwargs: Any) -> Any:
        """Replace a handler of torch's: a generator of the store, the rank and the world size."""
        asked = Address.of(url)
        if asked.rank < 0 or asked.size < 1 or not self._is_here(asked.where):
            yield from torchs(url, timeout=timeout, **kwargs)  # reports missing numbers, or connects to another machine
            return
        yield self.meet(asked.where, asked.size, timeout), asked.rank, asked.size
        raise RuntimeError(f"Unable to perform re-rendezvous using {asked.scheme}:// method")  # torch's own message

    def _is_here(self, where: str) -> bool:
        """Whether an address belongs to a machine of the group."""
        host = where.rpartition(":")[0].strip("[]")
        if host in LOCAL or host in self._machines:
            return True
        try:
            family, kind, _, _, (address, *_) = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
            if self._machines:  # ranks on all machines must decide alike, whichever addresses their own can bind
                return address in self._machines
            with socket.socket(family, kind) as probe:
                probe.bind((address, 0))
        except OSError:
            return False
        return True
