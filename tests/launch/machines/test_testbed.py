"""What tests of several machines rely on: the stand-in for ssh, a real sshd, machines of namespaces, a real Slurm."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from slurm_cluster import missing_for_slurm, slurm_cluster
from ssh_server import SshServer
from two_machines import AHEAD_S, TwoMachines, missing_for_machines, two_machines

pytestmark = pytest.mark.processes

LIMIT_S = 60.0
BINARY = bytes(range(256)) * 40_000  # 10 MB, with all bytes that a terminal would change
COMMON = ("-o", "BatchMode=yes", "-T", "--")


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoMachines]:
    if reason := missing_for_machines():
        pytest.skip(reason)
    with two_machines(tmp_path_factory.mktemp("machines")) as two:
        yield two


def output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=LIMIT_S, check=True)
    return done.stdout.strip()


def refused(*command: str) -> tuple[int, str]:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=LIMIT_S, check=False)
    return done.returncode, done.stderr.strip()


def echoed(command: Sequence[str], data: bytes) -> bytes:
    """What a command answers that runs `cat` on a machine."""
    return subprocess.run(command, input=data, capture_output=True, timeout=LIMIT_S, check=True).stdout


def one_byte_at_a_time(command: Sequence[str], times: int) -> float:
    """The shortest round trip of one byte, in seconds: no end holds back what it has."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin
        assert process.stdout
        seconds = []
        for _ in range(times):
            began = time.perf_counter()
            process.stdin.write(b"\x00")
            assert process.stdout.read(1) == b"\x00"
            seconds.append(time.perf_counter() - began)
        process.stdin.close()
        assert process.wait(timeout=LIMIT_S) == 0
    return min(seconds)


def wait_for(file: Path) -> None:
    until = time.monotonic() + LIMIT_S
    while not file.exists():
        assert time.monotonic() < until, f"no {file.name}"
        time.sleep(0.02)


def kill_while_it_runs(ssh: str, folder: Path) -> None:
    """Kill ssh; the remote command must see its stdin end, and run on."""
    command = f"touch {folder}/running; cat; touch {folder}/ended; sleep 0.2; touch {folder}/went_on"
    with subprocess.Popen([ssh, *COMMON, "pc1", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        wait_for(folder / "running")
        time.sleep(0.2)
        assert not (folder / "ended").exists()
        process.send_signal(signal.SIGKILL)
        wait_for(folder / "went_on")


def fake(ssh_python: str) -> str:
    return str(Path(ssh_python).with_name("ssh"))


def test_the_stand_in_for_ssh_runs_a_command_in_an_environment_of_its_own(
    ssh_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOT_THERE", "1")
    ssh = fake(ssh_python)
    assert output(ssh, *COMMON, "pc2", "echo $SSH_CONNECTION").split()[2] == "127.0.0.3"
    lines = output(ssh, *COMMON, "ada@pc1", "pwd; echo $HOME; echo $USER; echo $NOT_THERE; echo 'a  b'").split("\n")
    assert lines[0] == lines[1] != os.path.expanduser("~")
    assert lines[2:] == ["ada", "", "a  b"]
    assert echoed([ssh, *COMMON, "pc1", "cat"], BINARY) == BINARY
    assert refused(ssh, *COMMON, "pc1", "exit 7") == (7, "")
    kill_while_it_runs(ssh, tmp_path)


def test_the_stand_in_for_ssh_refuses_what_ssh_refuses(ssh_python: str) -> None:
    ssh = fake(ssh_python)
    assert refused(ssh, *COMMON, "unknown", "true") == (
        255,
        "ssh: Could not resolve hostname unknown: Name or service not known",
    )
    code, said = refused(ssh, *COMMON, "locked", "true")
    assert code == 255
    assert said.endswith("Permission denied (publickey).")
    assert refused(ssh, "-o", "NoSuchOption=1", "pc1", "true")[0] == 255


def test_a_real_sshd_does_what_its_stand_in_does(sshd: SshServer, tmp_path: Path) -> None:
    # A shell may print before it runs the command, as the user's startup files tell it to.
    assert output(sshd.ssh, *COMMON, "pc2", "echo $SSH_CONNECTION").split()[-2] == "127.0.0.3"
    assert echoed([sshd.ssh, *COMMON, "pc1", "cat"], BINARY).endswith(BINARY)
    assert refused(sshd.ssh, *COMMON, "pc1", "exit 7")[0] == 7
    assert refused(sshd.ssh, "-o", "NoSuchOption=1", "pc1", "true")[0] == 255
    kill_while_it_runs(sshd.ssh, tmp_path)


def test_machines_of_namespaces_have_their_own_name_processes_memory_and_clock(machines: TwoMachines) -> None:
    clock = f"{sys.executable} -c 'import time; print(time.monotonic())'"
    for name, ahead_s in AHEAD_S.items():
        assert output(machines.ssh, *COMMON, name, "hostname").endswith(name)
        assert output(*machines.command(name, "ls", "/dev/shm")) == ""
        assert output(*machines.command(name, "cat", "/proc/1/comm")) == "sshd"
        assert abs(float(output(*machines.command(name, "sh", "-c", clock))) - time.monotonic() - ahead_s) < LIMIT_S
    assert output(machines.ssh, *COMMON, "pc2", "echo $SSH_CONNECTION").split()[-4::2] == [
        machines.here,
        machines.addresses["pc2"],
    ]


def test_cables_can_be_cut_delayed_and_limited(machines: TwoMachines) -> None:
    def reaches(name: str, limit_s: float = LIMIT_S) -> bool:  # after a cut, the kernel tries again only each second
        try:
            socket.create_connection((machines.addresses[name], 22), timeout=limit_s).close()
        except TimeoutError:
            return False
        return True

    for delay_ms in (0, 20):
        machines.delay(delay_ms)
        machines.cut("pc1")
        assert (reaches("pc1", 1), reaches("pc2")) == (False, True)
        machines.mend("pc1")
        assert reaches("pc1")
    assert one_byte_at_a_time([machines.ssh, *COMMON, "pc1", "cat"], 5) > 0.04
    machines.delay(0)
    assert one_byte_at_a_time([machines.ssh, *COMMON, "pc1", "cat"], 50) < 0.02
    machines.limit(5)
    began = time.monotonic()
    assert echoed([machines.ssh, *COMMON, "pc1", "cat"], BINARY).endswith(BINARY)
    assert time.monotonic() - began > len(BINARY) / 5e6 * 0.9
    machines.limit(0)


@pytest.mark.skipif(bool(missing_for_slurm()), reason=missing_for_slurm() or "can be had")
def test_a_real_slurm_connects_the_stdin_and_stdout_of_a_step_on_each_node(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    # pytest's own folders are not accessible to others, as munge wants it.
    with tempfile.TemporaryDirectory() as folder, slurm_cluster(Path(folder)) as config:
        monkeypatch.setenv("SLURM_CONF", str(config))
        subprocess.run(["salloc", "--no-shell", "--nodes=2"], capture_output=True, timeout=LIMIT_S, check=True)
        job = output("squeue", "--noheader", "--format=%i")
        try:
            for node in ("node1", "node2"):
                step = ["srun", f"--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--unbuffered"]
                assert output(*step, "sh", "-c", "echo $SLURMD_NODENAME") == node
                assert echoed([*step, "cat"], BINARY) == BINARY
                one_byte_at_a_time([*step, "cat"], 3)  # without --unbuffered, it would wait for a line's end for ever
        finally:
            output("scancel", job)
