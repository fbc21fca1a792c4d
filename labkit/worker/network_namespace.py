"""A network for the libraries' sockets that only this notebook's ranks can enter, beside the machine's for the student's code.

torch's store and gloo, TensorPipe (RPC) and TensorFlow's gRPC authenticate nobody: whoever reaches a port of theirs by way of the
loopback interface may read, write, and run code. So these ports lie in a network namespace in which there is a loopback interface
and nothing else. A namespace belongs to a thread, and to the threads that it starts: what opens such sockets is run on a thread
that has entered; the thread of the student's code stays in the network of the machine.

    server ──makes, holds──> namespace          labkit's server, from which ranks are forked
      └──fork──> rank: main thread              the machine's network: downloads, a service on localhost
                   └── a thread that entered ──> the store's, gloo's and TensorPipe's own threads

Making one takes a right that root has in full; others have it in a user namespace of their own, which the server enters.

Source: network_namespaces(7), user_namespaces(7) and setns(2), the Linux man-pages.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import errno
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from labkit.errors.exceptions import LabError

__all__ = ["INTERFACES", "LOOPBACK_INTERFACE", "Network", "make", "wanted"]

VARIABLE: Final = "LABKIT_NETWORK"
PRIVATE: Final = "private"  # or an error
SHARED: Final = "shared"  # with the machine
WHERE_ALLOWED: Final = ""  # private where the system lets us, else the machine's
LIMIT_S: Final = 60.0  # for a network to be made, which takes 1 ms
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWNET: Final = 0x40000000
SIOCSIFFLAGS: Final = 0x8914
IFF_UP: Final = 1
LOOPBACK_INTERFACE: Final = "lo0" if sys.platform == "darwin" else "lo"
INTERFACES: Final = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")  # the variables that name torch's
CAPABILITY_VERSION_3: Final = 0x20080522
CAP_SYS_ADMIN: Final = 21

Result = TypeVar("Result")


def wanted(environment: Mapping[str, str]) -> str:
    """What these variables ask for: `PRIVATE`, `SHARED` or `WHERE_ALLOWED`.

    Raises:
        LabError: something else.
    """
    given = environment.get(VARIABLE, WHERE_ALLOWED)
    if given not in (PRIVATE, SHARED, WHERE_ALLOWED):
        raise LabError(
            f"{VARIABLE}={given!r}: expected 'private', 'shared', or nothing, which is 'private' where this system allows it"
        )
    return given


class Network:
    """Where the libraries' sockets are.

    Args:
        fd: the network namespace, or -1 for the network of the machine.
        why: then, why not one of the ranks' own.
    """

    def __init__(self, fd: int = -1, why: str = "") -> None:
        self._fd, self.why = fd, why

    @property
    def private(self) -> bool:
        """Whether it is the ranks' own."""
        return self._fd >= 0

    def unless_asked_outside(self, environment: Mapping[str, str]) -> Network:
        """This network, or the machine's where these variables name an interface for torch that the ranks' own has not.

        Raises:
            LabError: they insist on a network of the ranks' own as well.
        """
        named = {name: environment.get(name, LOOPBACK_INTERFACE) for name in INTERFACES}
        asked = [f"{name}={interface}" for name, interface in named.items() if interface != LOOPBACK_INTERFACE]
        if not self.private or not asked:
            return self
        if wanted(environment) == PRIVATE:
            raise LabError(f"{VARIABLE}=private and {asked[0]}: a private network has the interface 'lo' alone. Unset one.")
        return Network(why=f"{asked[0]} asks for it")

    def call(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Call something in this network; the threads that it starts stay there.

        Raises:
            OSError: this process may not enter, since it has given up the right.
        """
        if not self.private:
            return function(*args, **kwargs)
        results: list[Result] = []
        errors: list[BaseException] = []
        done = _thread.allocate_lock()
        done.acquire()

        def there() -> None:
            try:
                _do("setns", self._fd, CLONE_NEWNET)
                results.append(function(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001  # whoever waits for this thread raises it
                errors.append(error)
            finally:
                done.release()

        _thread.start_new_thread(there, ())
        with done:
            pass
        if errors:
            try:
                raise errors[0]
            finally:
                errors.clear()  # the error's traceback holds this frame
        return results[0]


def make(mode: str) -> Network:
    """The network for the ranks of this process, which must have one thread only; it takes on the right to enter it.

    Args:
        mode: as `wanted` gives it.

    Raises:
        LabError: `PRIVATE`, and the system does not let us.
    """
    if mode == SHARED:
        return Network(why=f"{VARIABLE} says so")
    try:
        if sys.platform != "linux":
            raise OSError("only Linux has private networks")
        # A root without the right is a container's: in a user namespace it would lose its power over other users' files.
        return Network(_made(as_owner=os.geteuid() != 0 or mode == PRIVATE))
    except OSError as error:
        why = error.strerror or str(error)
        if mode == PRIVATE:
            raise LabError(
                f"{VARIABLE}=private: this system does not let you make a private network ({why}). Remove the variable, or let "
                "an administrator allow unprivileged user namespaces."
            ) from None
        return Network(why=f"this system makes no other: {why}")


def _made(as_owner: bool) -> int:
    """A new network namespace, which this process may enter.

    A child makes it and tries it out: a user namespace cannot be left again, and some systems let users make one and then do
    nothing in it.
    """
    ours, childs = socket.socketpair()
    with ours, childs:
        child = os.fork()
        if child == 0:
            _make_and_send(childs, as_owner)
        childs.close()
        ours.settimeout(LIMIT_S)
        try:
            said, fds, _, _ = socket.recv_fds(ours, 16, 2)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if not fds:
        code = int(said or errno.EPERM)  # some systems end who tries
        raise OSError(code, os.strerror(code))
    network, *user = fds
    os.set_inheritable(network, False)  # no program that a rank starts
    for fd in user:
        try:
            _do("setns", fd, CLONE_NEWUSER)
            _keep_only(CAP_SYS_ADMIN)
        except OSError:
            os.close(network)
            raise
        finally:
            os.close(fd)
    return network


def _make_and_send(to: socket.socket, as_owner: bool) -> NoReturn:
    """In the child: make the namespaces, and send them or the number of the error."""
    with contextlib.suppress(BaseException):
        try:
            names = ["net"]
            try:
                _do("unshare", CLONE_NEWNET)
            except OSError:
                if not as_owner:
                    raise
                names.append("user")
                user, group = os.geteuid(), os.getegid()
                _do("unshare", CLONE_NEWUSER)
                Path("/proc/self/setgroups").write_text("deny")
                Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
                Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
                _do("unshare", CLONE_NEWNET)
            _raise_loopback()
            fds = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in names]
            _do("setns", fds[0], CLONE_NEWNET)  # as ranks will
            socket.send_fds(to, [b"made"], fds)
        except OSError as error:
            to.send(str(error.errno).encode())
    os._exit(0)


def _raise_loopback() -> None:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


def _keep_only(capability: int) -> None:
    """Give up the other rights of a user namespace's owner: with them, ranks could write files that nobody may write."""
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    mine = 1 << capability
    _do("capset", header, struct.pack("6I", mine, mine, 0, 0, 0, 0))


def _do(call: str, *args: Any) -> None:
    """A system call by its function in the C library."""
    if getattr(ctypes.CDLL(None, use_errno=True), call)(*args):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
