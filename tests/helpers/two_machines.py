"""Two machines on this computer: namespaces of network, processes, memory, name and clock, joined by a switch.

```
this machine ─ veth ─┐                ┌─ pc1: veth or TAP ─ bridge (address) ─ sshd
                     └─ bridge: switch┤
                                      └─ pc2: veth or TAP ─ bridge (address) ─ sshd
```

All of it is held by three processes and goes with them: the switch ends with its stdin, a machine with its parent.
A machine's files, its Python among them, are this machine's; /dev/shm, /run and process numbers are its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ssh_server import Keys, make_ssh, missing_for_ssh, server_command, wait_for_port

START_LIMIT_S = 30.0
SSH_PORT = 22
AHEAD_S = {"pc1": 3600, "pc2": 7200}  # of this machine's monotonic clock: no two machines have been up equally long
NETWORK = "198.18.{}"  # of the range that is reserved for tests of networks (RFC 2544)
BURST_BYTES = 1 << 18  # more than the 64 KiB that TCP hands over at a time


def missing_for_machines() -> str:
    """Why there can be no such machines here; empty if there can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    missing = [name for name in ("ip", "tc", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)} (Debian: iproute2, util-linux)"
    if reason := missing_for_ssh():
        return reason
    if not os.path.exists("/dev/net/tun"):
        return "needs /dev/net/tun"
    tried = subprocess.run([*_UNSHARE, "--", "true"], capture_output=True, text=True, timeout=20, check=False)
    return f"cannot make namespaces: {tried.stderr.strip()}" if tried.returncode else ""


_UNSHARE = ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--time", "--fork", "--kill-child", "--mount-proc"]


@dataclass
class TwoMachines:
    """Machines pc1 and pc2, each with an sshd, and the cables between them and this machine."""

    bin: Path  # put it first in PATH: its `ssh` knows pc1 and pc2
    addresses: dict[str, str]
    here: str  # this machine's address, as they see it
    _switch: subprocess.Popen[bytes]
    _inits: dict[str, int]  # process 1 of each machine, by its number on this machine
    _delay_ms: float = 0.0
    _cut: set[str] = field(default_factory=set)

    @property
    def ssh(self) -> str:
        return str(self.bin / "ssh")

    def command(self, name: str, *command: str) -> list[str]:
        """A command line that runs a command on a machine, with this machine's environment and not by the network."""
        return ["nsenter", f"--target={self._inits[name]}", "--net", "--mount", "--pid", "--uts", "--ipc", "--time", *command]

    def cut(self, name: str) -> None:
        """Pull a machine's cable: nothing arrives any more, and no end is told."""
        self._cut.add(name)
        self._connect(name)

    def mend(self, name: str) -> None:
        """Plug the cable in again."""
        self._cut.discard(name)
        self._connect(name)

    def delay(self, ms: float) -> None:
        """Delay all that enters or leaves a machine: a round trip from here takes 2 × ms longer; 0: no delay."""
        assert self._switch.stdin
        self._delay_ms = ms
        self._switch.stdin.write(f"{ms}\n".encode())
        self._switch.stdin.flush()
        for name in self.addresses:
            self._connect(name)

    def limit(self, mb_s: float) -> None:
        """Limit what enters and what leaves each machine, in 10^6 bytes per second; 0: no limit."""
        for name in self.addresses:
            switch, init = self._switch.pid, self._inits[name]
            for process, device in ((switch, f"{name}-veth"), (switch, f"{name}-near"), (init, "veth"), (init, f"{name}-far")):
                _in(process, "tc", "qdisc", "del", "dev", device, "root", check=False)
                if mb_s:
                    rate = ("rate", f"{round(mb_s * 8e6)}bit", "burst", str(BURST_BYTES), "latency", "100ms")
                    _in(process, "tc", "qdisc", "add", "dev", device, "root", "tbf", *rate)

    def _connect(self, name: str) -> None:
        """One of the two ways into the machine is open, or none: both at once would be a loop."""
        cut, slow = name in self._cut, self._delay_ms > 0
        for device, up in ((f"{name}-veth", not cut and not slow), (f"{name}-near", not cut and slow)):
            if not up:
                _in(self._switch.pid, "ip", "link", "set", device, "down")
        # A TAP device does not see that its other end is down. A bridge forgets what was behind a port that goes down.
        _in(self._inits[name], "ip", "link", "set", f"{name}-far", "up" if slow and not cut else "down")
        if not cut:
            _in(self._switch.pid, "ip", "link", "set", f"{name}-near" if slow else f"{name}-veth", "up")


def _in(process: int, *command: str, check: bool = True) -> None:
    """Run a command in the network of a process."""
    entered = ["nsenter", f"--target={process}", "--net", *command]
    done = subprocess.run(entered, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0 or not check, (command, done.stderr)


def _here(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)


@contextlib.contextmanager
def two_machines(folder: Path) -> Iterator[TwoMachines]:
    """Run two machines; needs root."""
    names = ["pc1", "pc2"]
    number = os.getpid() % 254
    network = NETWORK.format(number)
    here, cable = f"{network}.1", f"labkit{number}"
    addresses = {name: f"{network}.{2 + index}" for index, name in enumerate(names)}
    keys = Keys(folder / "keys").make()
    with contextlib.ExitStack() as stack:
        command = ["unshare", "--net", sys.executable, "-IS", str(Path(__file__).with_name("network_switch.py")), *names]
        switch = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        stack.callback(_end_switch, switch)
        assert switch.stdout
        assert switch.stdout.readline() == b"ready\n"
        _in(switch.pid, "ip", "link", "add", "switch", "type", "bridge")
        _in(switch.pid, "ip", "link", "set", "switch", "up")
        _here("ip", "link", "add", cable, "type", "veth", "peer", "name", "notebook", "netns", str(switch.pid))
        stack.callback(_here, "ip", "link", "delete", cable)  # it would go with the switch's namespace, but later
        _here("ip", "address", "add", f"{here}/24", "dev", cable)
        _here("ip", "link", "set", cable, "up")
        _in(switch.pid, "ip", "link", "set", "notebook", "master", "switch", "up")
        inits = {}
        for name, address in addresses.items():
            inits[name] = stack.enter_context(_machine(name, server_command(keys, [address], SSH_PORT)))
            _plug(switch.pid, inits[name], name, address)
        machines = TwoMachines(
            make_ssh(keys, {name: (address, SSH_PORT) for name, address in addresses.items()}), addresses, here, switch, inits
        )
        for name, address in addresses.items():
            machines.mend(name)
            # sshd cannot listen at its address before the machine has it; so only now does the machine go on.
            (Path("/proc") / str(inits[name]) / "root" / "run" / "go").touch()
            wait_for_port(address, SSH_PORT, START_LIMIT_S, keys.folder / f"sshd_log_{address}")
        yield machines


def _end_switch(switch: subprocess.Popen[bytes]) -> None:
    assert switch.stdin
    assert switch.stdout
    switch.stdin.close()
    switch.wait(timeout=20)
    switch.stdout.close()


@contextlib.contextmanager
def _machine(name: str, sshd: list[str]) -> Iterator[int]:
    """Run a machine whose process 1 is sshd; yields the number of that process on this machine."""
    script = f"""
        mount -t tmpfs shm /dev/shm && mount -t tmpfs run /run && mkdir -m 755 /run/sshd || exit
        hostname {name}
        echo ready
        until [ -e /run/go ]; do sleep 0.02; done
        exec {" ".join(f"'{word}'" for word in sshd[sshd.index("TERM") + 1 :])}
    """
    clock = (f"--monotonic={AHEAD_S[name]}", f"--boottime={AHEAD_S[name]}")
    command = ["setpriv", "--pdeathsig", "KILL", *_UNSHARE, *clock, "sh", "-c", script]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert process.stdout
    children: list[str] = []
    try:
        assert process.stdout.readline() == b"ready\n"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        yield int(children[0])
    finally:
        for child in children:
            os.kill(int(child), signal.SIGKILL)  # with process 1 all others of the machine end
        process.wait(timeout=20)
        process.stdout.close()


def _plug(switch: int, init: int, name: str, address: str) -> None:
    """Lay both cables of a machine; neither is up."""
    _in(switch, "ip", "link", "add", f"{name}-veth", "type", "veth", "peer", "name", "veth", "netns", str(init))
    _in(switch, "ip", "link", "set", f"{name}-far", "netns", str(init))
    for device in ("veth", "near"):
        _in(switch, "ip", "link", "set", f"{name}-{device}", "master", "switch")
    _in(init, "ip", "link", "set", "lo", "up")
    _in(init, "ip", "link", "add", "eth0", "type", "bridge")
    _in(init, "ip", "link", "set", "veth", "master", "eth0", "up")
    _in(init, "ip", "link", "set", f"{name}-far", "master", "eth0")
    _in(init, "ip", "address", "add", f"{address}/24", "dev", "eth0")
    _in(init, "ip", "link", "set", "eth0", "up")
