"""The default process group that labkit creates: detached when the program destroys it, and restored later."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch.distributed.distributed_c10d as c10d
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

from labkit.worker.comm.torch_internals import DEFAULT_GROUP

# torch's tables of all groups, by group or name. `destroy_process_group` empties them.
TABLES: Final = (
    "pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg", "pg_coalesce_state",
)  # fmt: skip


class DefaultGroup:
    """The default group that labkit has created: torch's default group at the time of construction."""

    def __init__(self) -> None:
        self.group: Any = c10d.GroupMember.WORLD
        self._tables: dict[str, dict[Any, Any]] | None = None  # while it is detached
        self._groups = 0  # torch's count of groups
        self._timeout: timedelta | None = None  # set by the program
        # Whether NCCL transfers GPU tensors, since each rank has its own GPU.
        self.moves_by_nccl = "nccl" in c10d.get_backend_config(self.group)

    @property
    def in_place(self) -> bool:
        """Whether it is torch's default group at present."""
        return self._tables is None

    def unset(self, destroy: Callable[[Any], None]) -> None:
        """Detach the default group from torch, and destroy the groups that the program has created from it.

        Args:
            destroy: torch's own `destroy_process_group`.
        """
        world = DEFAULT_GROUP["_world"]
        for group in [group for group in world.pg_map if group is not self.group]:
            destroy(group)
        self._tables = {name: dict(getattr(world, name)) for name in TABLES}
        self._groups = world.group_count
        for name in TABLES:
            getattr(world, name).clear()
        world.group_count = 0
        DEFAULT_GROUP["_unregister_process_group"](self.group.group_name)
        c10d.GroupMember.WORLD = None

    def restore(self) -> None:
        """Make it torch's default group again."""
        assert self._tables is not None
        world = DEFAULT_GROUP["_world"]
        for name, table in self._tables.items():
            getattr(world, name).update(table)
        world.group_count = self._groups
        DEFAULT_GROUP["_register_process_group"](self.group.group_name, self.group)
        c10d.GroupMember.WORLD = self.group
        self._tables = None

    def set_timeout(self, timeout: timedelta | None) -> None:
        """Set the time limit of its operations; None: torch's default."""
        if timeout != self._timeout:
            standard = default_pg_nccl_timeout if self.moves_by_nccl else default_pg_timeout
            self.group.set_timeout(timeout or standard)
            self._timeout = timeout
