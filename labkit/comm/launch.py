"""Programs that initialise and end torch.distributed or RPC themselves, in ranks where that is done already or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed import rpc

from labkit.comm.process_group_launch import ProcessGroupLaunch
from labkit.comm.rendezvous import Rendezvous
from labkit.comm.stores import Stores
from labkit.recording.record import Recorder

__all__ = ["Launch"]


class Launch:
    """What this rank's program calls to start and to end communication.

    Args:
        recorder: this rank's.
        rank, size: its number, and how many the group has.
        watch_rpc: has remote calls written down; called before the program starts RPC, where the group has not.
        own_port: of the group's store; -1 where it has none.
        connect: makes a new connection to the group's store; None where it has none, so that torch meets where the
            program says.
        rpc_given: the name and the options with which the group has initialised RPC.
        rpc_unused: whether no call has been made since.
    """

    def __init__(
        self,
        recorder: Recorder,
        rank: int,
        size: int,
        watch_rpc: Callable[[], None],
        own_port: int = -1,
        connect: Callable[[], Any] | None = None,
        rpc_given: tuple[str, Any] | None = None,
        rpc_unused: bool = False,
    ) -> None:
        self._notes: list[str] = []
        rendezvous = Rendezvous(recorder, rank, connect)
        if connect is not None:
            rendezvous.install()
        Stores(recorder, rendezvous, own_port).install()
        self._process_group = ProcessGroupLaunch(rank, size, rendezvous, self._notes.append)
        self._process_group.install()
        self._rpc = None
        if rpc.is_available():
            from labkit.comm.rpc_launch import RpcLaunch  # not every build of torch has RPC

            self._rpc = RpcLaunch(recorder, rank, size, rendezvous, self._notes.append, watch_rpc, rpc_given, rpc_unused)
            self._rpc.install()

    def begin_run(self, *, keep: bool, all_called: bool) -> None:
        """A function or a cell is about to run; see `worker.runtimes.base.Runtime.begin_run`."""
        self._process_group.begin_run(keep=keep)
        if self._rpc is not None:
            self._rpc.begin_run(keep=keep, all_called=all_called)

    @property
    def spent(self) -> bool:
        """Whether another program needs fresh processes."""
        return self._process_group.spent or (self._rpc is not None and self._rpc.spent)

    def notes(self) -> list[str]:
        """What the student should be told, since this was asked last."""
        notes, self._notes[:] = list(self._notes), []
        return notes
