"""Control groups as a process finds them in /proc and /sys, below a folder of a test."""

from __future__ import annotations

from pathlib import Path


def fake_control_groups(root: Path, version: str, path: str = "/", mounted_from: str = "/") -> Path:
    """Write what /proc says about a process's control groups, and return the folder that holds the groups' folders.

    Args:
        root: becomes the root of the file system.
        version: "v1", "v2", or "none" for a kernel without control groups.
        path: the process's group.
        mounted_from: the group that is mounted; in a container it may be the container's own.
    """
    own = root / "proc/self"
    own.mkdir(parents=True)
    mount = "36 32 0:33 {} {} rw,nosuid shared:9 - {}\n".format
    groups = {"v1": f"9:cpuset:/\n4:cpu,cpuacct:{path}\n3:memory:{path}\n1:name=systemd:/\n0::/\n", "v2": f"0::{path}\n"}
    mounts = {
        "v1": mount(mounted_from, "/sys/fs/cgroup/cpu,cpuacct", "cgroup cgroup rw,cpu,cpuacct")
        + mount(mounted_from, "/sys/fs/cgroup/memory", "cgroup cgroup rw,memory")
        + mount("/", "/sys/fs/cgroup/unified", "cgroup2 cgroup2 rw"),
        "v2": mount(mounted_from, "/sys/fs/cgroup", "cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot"),
    }
    (own / "cgroup").write_text(groups.get(version, ""))
    (own / "mountinfo").write_text(mount("/", "/", "ext4 /dev/root rw") + mounts.get(version, ""))
    return root / "sys/fs/cgroup"
