"""Lets programs initialize and shut down torch.distributed or RPC themselves, also if labkit has initialized them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch.distributed import rpc

from labkit.comm.process_group_initialization import ProcessGroupInitialization
from labkit.comm.rendezvous import Rendezvous
from labkit.comm.stores import Stores
from labkit.recording.record import Recorder


class Initialization:
    """Replaces the functions by which a rank's program starts and ends communication.

    Args:
        recorder: this rank's recorder.
        rank, size: the rank's number, and the number of ranks.
        watch_rpc: starts recording remote calls; called before the program starts RPC, unless the group has.
        machines: the names and addresses of the group's machines, as in `Place`.
        own_store: address and port of the group's store; None if it has none.
        connect: opens a new connection to the group's store; None if it has none: then torch uses the program's
            address.
        rpc_given: the name and the options with which the group has initialized RPC.
        rpc_unused: whether no call has been made since.
    """

    def __init__(
        self,
        recorder: Recorder,
        rank: int,
        size: int,
        watch_rpc: Callable[[], None],
        machines: Collection[str] = (),
        own_store: tuple[str, int] | None = None,
        connect: Callable[[], Any] | None = None,
        rpc_given: tuple[str, Any] | None = None,
        rpc_unused: bool = False,
    ) -> None:
        self._notes: list[str] = []
        rendezvous = Rendezvous(recorder, rank, connect, machines)
        if connect is not None:
            rendezvous.install()
        Stores(recorder, rendezvous, own_store).install()
        self._process_group = ProcessGroupInitialization(rank, size, rendezvous, self._notes.append)
        self._process_group.install()
        self._rpc = None
        if rpc.is_available():
            from labkit.comm.rpc_initialization import RpcInitialization  # not every build of torch has RPC

            self._rpc = RpcInitialization(recorder, rank, size, rendezvous, self._notes.append, watch_rpc, rpc_given, rpc_unused)
            self._rpc.install()

    def begin_run(self, *, keep: bool, all_called: bool) -> None:
        """Prepare for a run of a function or a cell; see `worker.runtimes.base.Runtime.begin_run`.

        Args:
            keep: whether to keep what the previous program has initialized, as from one cell to the next.
            all_called: whether all ranks of the group run it.
        """
        self._process_group.begin_run(keep=keep)
        if self._rpc is not None:
            self._rpc.begin_run(keep=keep, all_called=all_called)

    @property
    def spent(self) -> bool:
        """Whether another program would need new processes."""
        return self._process_group.spent or (self._rpc is not None and self._rpc.spent)

    def notes(self) -> list[str]:
        """Return the notes for the student since the last call."""
        notes, self._notes[:] = list(self._notes), []
        return notes
