"""A private network namespace for the sockets of torch and TensorFlow, which only this notebook's ranks can enter.

torch's store and gloo, TensorPipe (RPC) and TensorFlow's gRPC have no authentication: any user of the machine who can
reach one of their ports on the loopback interface can read, write, and run code. These ports are therefore opened in a
network namespace with a loopback interface only. A namespace applies to a thread and to the threads that it starts: a
thread that has entered the namespace opens the sockets, and the thread of the student's code stays in the machine's
network.

    server ──creates──> namespace                labkit's server, from which ranks are forked
      └──fork──> rank: main thread               in the machine's network: downloads, services on localhost
                   └── thread in the namespace ──> the threads of the store, gloo and TensorPipe

Creating one requires a capability that root has; other users have it in a new user namespace, which the server enters.
Programs outside cannot reach the ranks, not even the notebook. So where nobody else has an account, it is not made
unless requested.

Source: network_namespaces(7), user_namespaces(7) and setns(2), the Linux man-pages.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import errno
import itertools
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from labkit.errors.exceptions import LabError

VARIABLE: Final = "LABKIT_NETWORK"
PRIVATE: Final = "private"  # a private network, or an error
SHARED: Final = "shared"  # the machine's network
WHERE_ALLOWED: Final = ""  # a private network if others use this machine and the system allows it, else the machine's
CREATION_LIMIT_S: Final = 60.0  # seconds for creating a network, which takes 1 ms
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWNET: Final = 0x40000000
SIOCSIFFLAGS: Final = 0x8914
IFF_UP: Final = 1
LOOPBACK_INTERFACE: Final = "lo0" if sys.platform == "darwin" else "lo"
INTERFACES: Final = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")  # environment variables that choose torch's interfaces
CAPABILITY_VERSION_3: Final = 0x20080522
CAP_SYS_ADMIN: Final = 21
PR_CAPBSET_DROP: Final = 24
ACCOUNTS: Final = Path("/etc/passwd")
SOURCES: Final = Path("/etc/nsswitch.conf")  # where accounts come from
LOCAL_SOURCES: Final = {"files", "compat", "altfiles", "systemd"}  # others, such as LDAP, have accounts of a whole site
FIRST_PERSON: Final = 1000  # smaller user ids belong to the system
NOBODY: Final = 65534
NO_LOGIN: Final = ("nologin", "false")

Result = TypeVar("Result")


def wanted(environment: Mapping[str, str]) -> str:
    """Return the mode that environment variables ask for: `PRIVATE`, `SHARED` or `WHERE_ALLOWED`."""
    given = environment.get(VARIABLE, WHERE_ALLOWED)
    if given not in (PRIVATE, SHARED, WHERE_ALLOWED):
        raise LabError(
            f"{VARIABLE}={given!r}: expected 'private', 'shared', or nothing, which means 'private' if this machine has other "
            "users and the system allows it"
        )
    return given


class PrivateNetwork:
    """The network in which the libraries open sockets: that of a network namespace, or the machine's if `fd` is -1.

    `why` says why there is no private network; "" if there is one.
    """

    def __init__(self, fd: int = -1, why: str = "") -> None:
        self._fd, self.why = fd, why

    @property
    def private(self) -> bool:
        """Whether it is a private network."""
        return self._fd >= 0

    def unless_several(self, machines: int, environment: Mapping[str, str]) -> PrivateNetwork:
        """Return this network, or the machine's if the ranks are on several: a private network has no others."""
        refusal = f"{VARIABLE}=private: in private networks, ranks of several machines cannot meet. Unset it."
        return self._unless(machines > 1, environment, "the ranks are on several machines", refusal)

    def unless_asked_outside(self, environment: Mapping[str, str]) -> PrivateNetwork:
        """Return this network, or the machine's if variables choose an interface that a private one does not have."""
        named = {name: environment.get(name, LOOPBACK_INTERFACE) for name in INTERFACES}
        asked = next((f"{name}={interface}" for name, interface in named.items() if interface != LOOPBACK_INTERFACE), "")
        refusal = f"{VARIABLE}=private and {asked}: a private network has only the interface 'lo'. Unset one."
        return self._unless(bool(asked), environment, f"{asked} asks for it", refusal)

    def _unless(self, unfit: bool, environment: Mapping[str, str], why: str, refusal: str) -> PrivateNetwork:
        if not self.private or not unfit:
            return self
        if wanted(environment) == PRIVATE:
            raise LabError(refusal)
        return PrivateNetwork(why=why)

    def call(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Call a function in this network; the threads that it starts stay there."""
        if not self.private:
            return function(*args, **kwargs)
        outcome: Future[Result] = Future()
        _thread.start_new_thread(self._call_inside, (outcome, function, args, kwargs))
        try:
            return outcome.result()
        finally:
            del outcome  # breaks a reference cycle: an error's traceback refers to this frame

    def _call_inside(self, outcome: Future[Result], function: Callable[..., Result], args: Any, kwargs: dict[str, Any]) -> None:
        try:
            system_call("setns", self._fd, CLONE_NEWNET)
            outcome.set_result(function(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001  # raised again in the calling thread
            outcome.set_exception(error)
            del outcome  # as above


def make(mode: str) -> PrivateNetwork:
    """Create the network for the ranks of this process, and the capability to enter it, with a single thread.

    A `LabError` if the mode is `PRIVATE`, and the system does not allow a private network.
    """
    if mode == SHARED:
        return PrivateNetwork(why=f"{VARIABLE}={SHARED}")
    if mode == WHERE_ALLOWED and not other_users(os.geteuid()):
        return PrivateNetwork(why=f"{VARIABLE}={PRIVATE} hides them")
    try:
        if sys.platform != "linux":
            raise OSError("only Linux has private networks")
        # Root without the capability is in a container; in a user namespace it could not write other users' files.
        return PrivateNetwork(_made(as_owner=os.geteuid() != 0 or mode == PRIVATE))
    except OSError as error:
        why = error.strerror or str(error)
        if mode == PRIVATE:
            raise LabError(
                f"{VARIABLE}=private: this system does not allow private networks ({why}). Remove the variable, or ask an "
                "administrator to allow unprivileged user namespaces."
            ) from None
        return PrivateNetwork(why=f"this system does not allow a private one: {why}")


def other_users(me: int) -> bool:
    """Whether people other than this user and root may have accounts here; True if that is unknown.

    Source: passwd(5) and nsswitch.conf(5), the Linux man-pages.
    """
    try:
        accounts = [line.split(":") for line in ACCOUNTS.read_text().splitlines() if line.count(":") == 6]
    except OSError:
        return True
    people = {int(uid) for _, _, uid, _, _, _, shell in accounts if os.path.basename(shell) not in NO_LOGIN}
    known = any(int(account[2]) == me for account in accounts)
    return not known or _has_directory() or any(uid >= FIRST_PERSON and uid not in (me, NOBODY) for uid in people)


def _has_directory() -> bool:
    """Whether accounts come from a directory, too, whose members cannot be listed."""
    try:
        lines = SOURCES.read_text().splitlines()
    except OSError:
        return False  # the C library then reads files only
    sources = " ".join(line.partition(":")[2] for line in lines if line.strip().startswith("passwd:")).split()
    return not {source for source in sources if not source.startswith("[")} <= LOCAL_SOURCES


def _made(as_owner: bool) -> int:
    """Create a network namespace that this process may enter, and return its file descriptor.

    A child process creates and tests it: a process cannot leave a user namespace again, and some systems let users
    create one but allow nothing inside it.
    """
    ours, childs = socket.socketpair()
    with ours, childs:
        child = os.fork()
        if child == 0:
            _make_and_send(childs, as_owner)
        childs.close()
        ours.settimeout(CREATION_LIMIT_S)
        try:
            data, fds, _, _ = socket.recv_fds(ours, 16, 2)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if not fds:
        code = int(data or errno.EPERM)  # no data: some systems kill a process that tries
        raise OSError(code, os.strerror(code))
    network, *user = fds
    os.set_inheritable(network, False)  # programs that a rank starts must not get it
    for fd in user:
        try:
            system_call("setns", fd, CLONE_NEWUSER)
            _set_capabilities(1 << CAP_SYS_ADMIN)  # with the others of an owner, ranks could write read-only files
        except OSError:
            os.close(network)
            raise
        finally:
            os.close(fd)
    return network


def _make_and_send(to: socket.socket, as_owner: bool) -> NoReturn:
    """In the child: create the namespaces, and send their file descriptors or the error number."""
    with contextlib.suppress(BaseException):
        try:
            names = ["net", "user"] if enter_new(as_owner) else ["net"]
            fds = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in names]
            system_call("setns", fds[0], CLONE_NEWNET)  # the same call as in the ranks
            socket.send_fds(to, [b"made"], fds)
        except OSError as error:
            to.send(str(error.errno).encode())
    os._exit(0)


def enter_new(as_owner: bool) -> bool:
    """Enter a new network namespace, with a loopback interface only; an `OSError` if the system does not allow it.

    If the system requires it and `as_owner` is set, it enters a new user namespace first, and returns True; the process
    must have a single thread.
    """
    as_user = False
    try:
        system_call("unshare", CLONE_NEWNET)
    except OSError:
        if not as_owner:
            raise
        as_user = True
        user, group = os.geteuid(), os.getegid()
        system_call("unshare", CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        system_call("unshare", CLONE_NEWNET)
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    return as_user


def drop_capabilities() -> None:
    """Drop all capabilities of this process, and of the programs that it starts."""
    with contextlib.suppress(OSError):  # there is no capability with this number
        for capability in itertools.count():
            system_call("prctl", PR_CAPBSET_DROP, capability, 0, 0, 0)
    _set_capabilities(0)


def _set_capabilities(mine: int) -> None:
    system_call("capset", struct.pack("Ii", CAPABILITY_VERSION_3, 0), struct.pack("6I", mine, mine, 0, 0, 0, 0))


def system_call(call: str, *args: Any) -> None:
    """Make a system call through its function in the C library; a text is a `bytes`. An `OSError` if it fails."""
    if getattr(ctypes.CDLL(None, use_errno=True), call)(*args):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
