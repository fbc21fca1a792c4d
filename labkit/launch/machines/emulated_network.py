"""The network of emulated machines: network namespaces, joined by a switch whose cables are slow and can be pulled.

    notebook's namespace: TAP device ─┐
    pc1's namespace:      TAP device ─┼─ this process, the switch
    pc2's namespace:      TAP device ─┘

A namespace has network interfaces of its own, and no others, so whatever its programs send passes through the switch.
This process creates the namespaces, starts the agents in them, and connects the relay, which is outside, to an agent:
a socket belongs to the namespace in which it was created, and can be handed on.

It is run as `python -m labkit.launch.machines.emulated_network FOLDER LATENCY_S BYTES_PER_S NAME...`, prints a line
once it serves requests at the Unix socket `FOLDER/socket`, and ends with its stdin.

Source: network_namespaces(7), the Linux man-pages; the kernel's documentation of TUN/TAP devices.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from labkit.launch.machines.engines import AGENT
from labkit.launch.machines.facts import ADDRESS
from labkit.worker import network_namespace

READY: Final = "ready"
NOTEBOOK: Final = "notebook"  # the port of the relay's side
NETWORK: Final = "198.18.0.{}"  # of the range that is reserved for tests of networks (RFC 2544)
TUNSETIFF, TUNSETOFFLOAD, TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR, IFF_UP = 0x2, 0x1000, 0x4000, 0x1
OFFLOADS: Final = 0x01 | 0x02  # TUN_F_CSUM | TUN_F_TSO4: the kernel hands over up to 64 KiB of TCP, not 1,500 bytes
SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK = 0x8914, 0x8916, 0x891C
HEADER_BYTES: Final = 10  # of virtio, before each frame
FRAME_BYTES: Final = 1 << 17  # more than any frame
FRAMES: Final = 64  # read at once; then the other ports have their turn
QUEUE_S, QUEUE_BYTES = 0.1, 1 << 19  # what waits for a cable for longer, and is more, is lost, as in any switch
CONNECT_S: Final = 10.0


class _Port:
    """A machine, and its cable."""

    def __init__(self, name: str, address: str, cores: Collection[int]) -> None:
        self.name, self.address, self.cores = name, address, cores
        self.network, self.tap = _namespace(address)
        self.pulled = False
        self.waiting: deque[tuple[int, bytes]] = deque()  # frames to the machine: when it gets them, ns, and the frame
        self.free_ns = [0, 0]  # when the cable is free, from and to the machine

    def read(self) -> bytes | None:
        try:
            return os.read(self.tap, FRAME_BYTES)
        except BlockingIOError:
            return None

    def deliver(self, now_ns: int) -> None:
        while self.waiting and self.waiting[0][0] <= now_ns:
            _, frame = self.waiting.popleft()
            if not self.pulled:
                with contextlib.suppress(OSError):  # its queue is full: the frame is lost
                    os.write(self.tap, frame)


class _Switch:
    """Passes frames on, each at the time at which it would arrive over the cables of two machines."""

    def __init__(self, ports: Sequence[_Port], latency_s: float, bytes_per_s: float) -> None:
        self._ports, self._latency_ns, self._byte_ns = ports, round(latency_s * 1e9), 1e9 / bytes_per_s
        self._queue_ns = max(QUEUE_S * 1e9, QUEUE_BYTES * self._byte_ns)
        self._of_address: dict[bytes, _Port] = {}  # by the Ethernet address that was seen there

    def serve(self) -> None:
        by_tap = {port.tap: port for port in self._ports}
        while True:
            due_ns = min((port.waiting[0][0] for port in self._ports if port.waiting), default=None)
            limit_s = None if due_ns is None else max(0.0, (due_ns - time.monotonic_ns()) / 1e9)
            readable, _, _ = select.select([0, *by_tap], [], [], limit_s)
            if 0 in readable and not os.read(0, 1):
                return
            for tap in readable:
                if tap in by_tap:
                    self._take(by_tap[tap])
            for port in self._ports:
                port.deliver(time.monotonic_ns())

    def _take(self, source: _Port) -> None:
        for _ in range(FRAMES):
            frame = source.read()
            if frame is None:
                return
            if source.pulled:
                continue
            to, of = frame[HEADER_BYTES : HEADER_BYTES + 6], frame[HEADER_BYTES + 6 : HEADER_BYTES + 12]
            self._of_address[of] = source
            others = [port for port in self._ports if port is not source]
            for target in [self._of_address[to]] if to in self._of_address else others:  # a new one, or all of them
                self._send(frame, source, target)

    def _send(self, frame: bytes, source: _Port, target: _Port) -> None:
        now_ns, takes_ns = time.monotonic_ns(), round(len(frame) * self._byte_ns)
        left_ns = max(now_ns, source.free_ns[0]) + takes_ns
        arrives_ns = max(left_ns, target.free_ns[1] + takes_ns)
        if arrives_ns - now_ns - takes_ns <= self._queue_ns:
            source.free_ns[0], target.free_ns[1] = left_ns, arrives_ns
            target.waiting.append((arrives_ns + self._latency_ns, frame))


def _namespace(address: str) -> tuple[network_namespace.PrivateNetwork, int]:
    """Create a network namespace with an interface; return it, and the file descriptor of the interface's other end.

    This thread is in the namespace afterwards.
    """
    network_namespace.enter_new(as_owner=True)
    namespace = os.open("/proc/self/ns/net", os.O_RDONLY)
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH", b"eth0", IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(tap, TUNSETVNETHDRSZ, struct.pack("i", HEADER_BYTES))
    fcntl.ioctl(tap, TUNSETOFFLOAD, OFFLOADS)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for request, value in ((SIOCSIFADDR, address), (SIOCSIFNETMASK, "255.255.255.0")):
            fcntl.ioctl(any_socket, request, struct.pack("16sHH4s8x", b"eth0", socket.AF_INET, 0, socket.inet_aton(value)))
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"eth0", IFF_UP))
    return network_namespace.PrivateNetwork(namespace), tap


class _Agents:
    """Starts agents in the machines' namespaces, and answers requests; the first port is the notebook's."""

    def __init__(self, ports: Sequence[_Port]) -> None:
        self._here, *machines = ports
        self._machines = {port.name: port for port in machines}
        self._running: list[subprocess.Popen[bytes]] = []

    def serve(self, server: socket.socket) -> None:
        """Answer the requests that `ask` sends. Does not return."""
        while True:
            client, _ = server.accept()
            threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):  # whoever asked has ended
            request, name = json.loads(client.recv(1 << 12))
            port = self._machines[name]
            if request == "connect":
                near: list[socket.socket] = []
                try:
                    near = self._start(port)
                    socket.send_fds(client, [b"done"], [end.fileno() for end in near])
                except OSError as error:
                    client.send((error.strerror or str(error)).encode())
                finally:  # the relay has its own by now, or has given up: then the agent ends
                    for end in near:
                        end.close()
            else:
                port.pulled = request == "pull"
                client.send(b"done")

    def _start(self, port: _Port) -> list[socket.socket]:
        """Start an agent; return the connections to its stdin and from its stdout."""
        # Two: asyncio takes a socket at which something arrives for a stdout whose reader has ended.
        pairs = [self._connected(port), self._connected(port)]
        (_, stdin), (_, stdout) = pairs
        with stdin, stdout:
            agent = port.network.call(self._agent, port, stdin, stdout)
        threading.Thread(target=agent.wait, daemon=True).start()
        self._running = [one for one in self._running if one.returncode is None] + [agent]
        return [near for near, _ in pairs]

    @staticmethod
    def _agent(port: _Port, stdin: socket.socket, stdout: socket.socket) -> subprocess.Popen[bytes]:
        os.sched_setaffinity(0, port.cores)  # of this thread, and so of the processes that it starts
        return subprocess.Popen(
            [sys.executable, "-u", "-m", AGENT],
            stdin=stdin.fileno(),
            stdout=stdout.fileno(),
            env={**os.environ, ADDRESS: port.address},
        )

    def _connected(self, port: _Port) -> tuple[socket.socket, socket.socket]:
        """Return a connection over the network, from here and to a machine: both ends."""
        with port.network.call(socket.create_server, (port.address, 0)) as server:
            server.settimeout(CONNECT_S)
            near = self._here.network.call(socket.create_connection, server.getsockname(), CONNECT_S)
            far, _ = server.accept()
        for end in (near, far):
            end.settimeout(None)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return near, far

    def end(self) -> None:
        for agent in self._running:
            agent.kill()


def _shares(machines: int) -> list[list[int]]:
    """Divide the cores that this process may use among machines; if these had fewer than two each, all have all."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // machines
    if each < 2:  # two ranks of a machine would take turns, which takes longer than their messages
        return [cores] * machines
    return [cores[i * each : (i + 1) * each] for i in range(machines)]


def ask(folder: str, request: str, machine: str, limit_s: float) -> tuple[str, list[int]]:
    """In another process: ask the network to "connect", "pull" or "plug_in" a machine.

    Return "done" or what has failed; and, if asked to connect, file descriptors to the agent and from it.
    """
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(limit_s)
        client.connect(str(Path(folder) / "socket"))
        client.send(json.dumps([request, machine]).encode())
        said, fds, _, _ = socket.recv_fds(client, 1 << 12, 2)
    return said.decode(), fds


def main(folder: str, latency_s: str, bytes_per_s: str, *names: str) -> None:
    """Run the network until stdin ends."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(Path(folder) / "socket"))
        try:
            shares = [(), *_shares(len(names))]
            ports = [
                _Port(name, NETWORK.format(1 + i), cores)
                for i, (name, cores) in enumerate(zip((NOTEBOOK, *names), shares, strict=True))
            ]
        except OSError as error:
            print(f"{error.filename or 'network namespaces'}: {error.strerror}", flush=True)
            return
        server.listen()
        agents = _Agents(ports)
        threading.Thread(target=agents.serve, args=(server,), daemon=True).start()
        print(READY, flush=True)
        _Switch(ports, float(latency_s), float(bytes_per_s)).serve()
        agents.end()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
