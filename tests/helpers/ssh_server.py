"""A real sshd of the tests' own: its keys, its configuration, its log, and an `ssh` that reaches it."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Not PATH, in which tests put stand-ins for ssh.
PROGRAMS = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
START_LIMIT_S = 20.0  # sshd listens after some 20 ms
SESSION = "LABKIT_TEST_SESSION"
PRIVILEGE_SEPARATION = Path("/run/sshd")  # an sshd that root starts insists on it
# "StrictModes no", because temporary folders lie in a folder that everybody may write to.
SERVER = """HostKey {folder}/host
AuthorizedKeysFile {folder}/authorized_keys
AuthenticationMethods publickey
PermitRootLogin prohibit-password
UsePAM no
StrictModes no
PidFile none
UseDNS no
MaxStartups 100
"""
CLIENT = """Host *
 IdentityFile {folder}/client
 IdentitiesOnly yes
 IdentityAgent none
 UserKnownHostsFile {folder}/known_hosts
 GlobalKnownHostsFile none
 StrictHostKeyChecking yes
"""


def _find(program: str) -> str | None:
    return shutil.which(program, path=PROGRAMS)


def missing_for_ssh() -> str:
    """Why there can be no sshd here; empty if there can."""
    missing = [name for name in ("sshd", "ssh", "ssh-keygen", "setpriv") if _find(name) is None]
    return f"needs {', '.join(missing)} (Debian: openssh-server)" if missing else ""


@dataclass(frozen=True)
class Keys:
    """A key of a server and one of a client, in a folder that only this user reads."""

    folder: Path

    def make(self) -> Keys:
        self.folder.mkdir(mode=0o700)
        for name in ("host", "client"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(self.folder / name)]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=60)
        shutil.copy(self.folder / "client.pub", self.folder / "authorized_keys")
        return self

    def host_key(self) -> str:
        return (self.folder / "host.pub").read_text().strip()


def server_command(keys: Keys, addresses: Sequence[str], port: int) -> list[str]:
    """The command of an sshd which lets in the client's key only, and ends with the process that starts it."""
    config = keys.folder / f"sshd_config_{addresses[0]}"
    lines = [f"ListenAddress {address}:{port}" for address in addresses]
    if SESSION in os.environ:  # a command's environment begins empty; by this variable the tests find what they have left
        lines.append(f"SetEnv {SESSION}={os.environ[SESSION]}")
    config.write_text(SERVER.format(folder=keys.folder) + "\n".join([*lines, ""]))
    sshd = _find("sshd")
    assert sshd is not None, missing_for_ssh()
    if os.geteuid() == 0:
        PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
    log = keys.folder / f"sshd_log_{addresses[0]}"
    return ["setpriv", "--pdeathsig", "TERM", sshd, "-D", "-f", str(config), "-E", str(log)]


def make_ssh(keys: Keys, hosts: Mapping[str, tuple[str, int]]) -> Path:
    """A folder for PATH, whose `ssh` knows these hosts: name -> (address, port)."""
    known = keys.folder / "known_hosts"
    known.write_text("".join(f"{name} {keys.host_key()}\n" for name in hosts))
    config = keys.folder / "ssh_config"
    lines = [f"Host {name}\n HostName {address}\n Port {port}\n HostKeyAlias {name}" for name, (address, port) in hosts.items()]
    config.write_text("\n".join([*lines, CLIENT.format(folder=keys.folder)]))
    folder = keys.folder / "bin"
    folder.mkdir()
    ssh = folder / "ssh"
    ssh.write_text(f"#!/bin/sh\nexec {_find('ssh')} -F '{config}' \"$@\"\n")
    ssh.chmod(0o755)
    return folder


def wait_for_port(address: str, port: int, limit_s: float, log: Path) -> None:
    """Wait until something listens there."""
    until = time.monotonic() + limit_s
    while True:
        try:
            socket.create_connection((address, port), timeout=1).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise TimeoutError(f"{address}:{port}: {error}; {log.read_text() if log.exists() else 'no log'}") from error
            time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


@dataclass(frozen=True)
class SshServer:
    """An sshd that runs: pc1 and pc2 are this machine, by two of its addresses."""

    bin: Path  # put it first in PATH
    log: Path
    hosts: Mapping[str, tuple[str, int]]

    @property
    def ssh(self) -> str:
        return str(self.bin / "ssh")


@contextlib.contextmanager
def ssh_server(folder: Path) -> Iterator[SshServer]:
    """Run an sshd on two addresses of the loopback interface."""
    keys = Keys(folder / "keys").make()
    port = free_port()
    hosts = {"pc1": ("127.0.0.2", port), "pc2": ("127.0.0.3", port)}
    command = server_command(keys, [address for address, _ in hosts.values()], port)
    log = Path(command[-1])
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        for address, port in hosts.values():
            wait_for_port(address, port, START_LIMIT_S, log)
        yield SshServer(make_ssh(keys, hosts), log, hosts)
    finally:
        process.terminate()
        process.wait(timeout=20)
