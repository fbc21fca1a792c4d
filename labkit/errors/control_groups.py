"""Finds the files of this process's control groups, by which Linux limits a container's cores and memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def control_group_folders(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """The folders of this process's control groups, the innermost first: a limit of any of them holds for the process.

    Folders of version 1 have the controller; in those of version 2 its files may be missing. A container may see only a
    part of the hierarchy: the groups outside have no folder. Systems without control groups have none.

    The controller is "cpu" or "memory".

    Source: cgroups(7) and proc_pid_mountinfo(5).
    """
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:  # not Linux
        return
    paths: dict[str, PurePosixPath] = {}  # of this process, by controller; "" is version 2
    for group in groups:
        _, controllers, path = group.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), PurePosixPath(path)))
    for mount in mounts:
        place, _, file_system = mount.partition(" - ")
        _, _, _, inside, mounted, *_ = place.split(" ")
        kind, _, options = file_system.split(" ", 2)
        wanted = {"cgroup": controller, "cgroup2": ""}.get(kind, kind)
        if wanted not in paths or (wanted and wanted not in options.split(",")):
            continue
        # Without a namespace for control groups, a container's path begins outside what is mounted.
        own, top = paths[wanted], root / mounted.lstrip("/")
        below = own.relative_to(inside) if own.is_relative_to(inside) else PurePosixPath()
        yield from (top / part for part in (below, *below.parents))
