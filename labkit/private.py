"""A network of this notebook's ranks alone: nobody else on the machine, other users included, can reach a port of theirs.

torch's store and gloo, TensorPipe (RPC) and TensorFlow's gRPC authenticate nobody, so that on a machine of several users each of
them can connect to the others' ranks by way of the loopback interface. With `LABKIT_NETWORK=private` the server that ranks are
forked from moves to a network namespace of its own, in which there is a loopback interface and nothing else; ranks inherit it.
They reach one another, and neither the internet nor anything else on this machine.

Source: network_namespaces(7) and user_namespaces(7), the Linux man-pages.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from labkit.errors import LabError

__all__ = ["enter", "wanted"]

VARIABLE: Final = "LABKIT_NETWORK"
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWNET: Final = 0x40000000
SIOCSIFFLAGS: Final = 0x8914
IFF_UP: Final = 1


def wanted(environment: Mapping[str, str]) -> bool:
    """Whether these variables ask for it.

    Raises:
        LabError: they ask for something else.
    """
    given = environment.get(VARIABLE, "")
    if given not in ("", "private"):
        raise LabError(f"{VARIABLE}={given!r}: expected 'private', or nothing for the network of this machine")
    return given == "private"


def enter() -> None:
    """Move this process, which must have one thread only, to a network of its own.

    Raises:
        LabError: the system does not let it.
    """
    if sys.platform != "linux":
        raise LabError(f"{VARIABLE}=private: only Linux has private networks. Remove the variable to use this machine's.")
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):  # which root may do; others as owners of a user namespace
        if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET):
            why = os.strerror(ctypes.get_errno())
            raise LabError(
                f"{VARIABLE}=private: this system lets no user make a private network ({why}). Remove the variable, "
                "or let an administrator allow unprivileged user namespaces."
            )
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
