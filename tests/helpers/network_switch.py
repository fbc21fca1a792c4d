"""A network switch with cables that can be cut, delayed and limited, in a network namespace of its own.

Run as a program in a fresh namespace (`unshare --net`). It makes one pair of TAP devices per machine, prints a line,
and passes frames between the two ends of a pair. Each line of stdin is a new one-way delay in milliseconds; it ends
with its stdin. Where the kernel has no netem, this is what delays: while a machine's cable leads through its TAP
devices, every frame waits here. A frame begins with a virtio header, so that the kernel hands over up to 64 KiB of
TCP at a time, not 1,500 bytes.
"""

import collections
import fcntl
import os
import selectors
import struct
import sys
import time

TUNSETIFF, TUNSETOFFLOAD, TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x2, 0x1000, 0x4000
OFFLOADS = 0x01 | 0x02  # TUN_F_CSUM | TUN_F_TSO4
HEADER_BYTES = 10
FRAME_BYTES = 1 << 17  # more than any frame
QUEUE_BYTES = 64 << 20  # in one direction; what arrives when it is full is lost, as in any switch


def tap(name: str) -> int:
    """A new TAP device; it goes with its descriptor."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(fd, TUNSETVNETHDRSZ, struct.pack("i", HEADER_BYTES))
    fcntl.ioctl(fd, TUNSETOFFLOAD, OFFLOADS)
    return fd


class Direction:
    """The frames that wait on their way out of one device."""

    def __init__(self, out: int) -> None:
        self.out = out
        self.waiting: collections.deque[tuple[int, bytes]] = collections.deque()  # (when to deliver, frame)
        self.nbytes = 0

    def take(self, source: int, delay_ns: int) -> None:
        for _ in range(64):  # the other directions have their turn
            try:
                frame = os.read(source, FRAME_BYTES)
            except (BlockingIOError, OSError):  # nothing more, or the device is down: its cable is cut
                return
            if self.nbytes + len(frame) <= QUEUE_BYTES:
                self.nbytes += len(frame)
                self.waiting.append((time.monotonic_ns() + delay_ns, frame))

    def deliver(self) -> None:
        while self.waiting and self.waiting[0][0] <= time.monotonic_ns():
            _, frame = self.waiting.popleft()
            self.nbytes -= len(frame)
            try:
                os.write(self.out, frame)
            except OSError:  # the device is down: its cable is cut
                pass


def main(machines: list[str]) -> None:
    selector = selectors.DefaultSelector()
    directions = []
    for name in machines:
        ends = [tap(f"{name}-near"), tap(f"{name}-far")]
        for source, out in (ends, ends[::-1]):
            directions.append(Direction(out))
            selector.register(source, selectors.EVENT_READ, directions[-1])
    selector.register(0, selectors.EVENT_READ)
    print("ready", flush=True)
    delay_ns = 0
    while True:
        due = min((direction.waiting[0][0] for direction in directions if direction.waiting), default=None)
        ready = selector.select(None if due is None else max(0.0, (due - time.monotonic_ns()) / 1e9))
        for key, _ in ready:
            if key.data is not None:
                key.data.take(key.fd, delay_ns)
            elif line := os.read(0, 100):
                delay_ns = int(float(line.split()[-1]) * 1e6)
            else:
                return
        for direction in directions:
            direction.deliver()


if __name__ == "__main__":
    main(sys.argv[1:])
