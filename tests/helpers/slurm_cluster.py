"""A real Slurm on this computer: a controller, and two nodes with a daemon each, with all their files in one folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from ssh_server import PROGRAMS, free_port

NODES = ("node1", "node2")
START_LIMIT_S = 30.0
CONFIG = """ClusterName=labkit
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
MpiDefault=none
ReturnToService=2
SwitchType=switch/none
KillWait=5
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cores} RealMemory=2000
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cores} RealMemory=2000
PartitionName=all Nodes=node1,node2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def missing_for_slurm() -> str:
    """Why there can be no Slurm here; empty if there can."""
    if os.geteuid() != 0:
        return "needs root, for Slurm's daemons"
    wanted = ("slurmctld", "slurmd", "srun", "salloc", "munged", "setpriv")
    missing = [name for name in wanted if shutil.which(name, path=PROGRAMS) is None]
    return f"needs {', '.join(missing)} (Debian: slurmctld, slurmd, slurm-client, munge)" if missing else ""


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[Path]:
    """Run it; yields its configuration, for SLURM_CONF."""
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    config = folder / "slurm.conf"
    ports = [free_port() for _ in range(3)]
    config.write_text(CONFIG.format(host=socket.gethostname(), folder=folder, ports=ports, cores=os.cpu_count()))
    munge = [f"--{name}={folder}/munge.{suffix}" for name, suffix in _MUNGE]
    environment = os.environ | {"SLURM_CONF": str(config)}
    with contextlib.ExitStack() as stack:
        for command in (["munged", "--foreground", *munge], ["slurmctld", "-D"], *(["slurmd", "-D", "-N", n] for n in NODES)):
            program = shutil.which(command[0], path=PROGRAMS)
            assert program is not None
            log = stack.enter_context(open(folder / f"{command[0]}-{command[-1]}.out".replace("/", "-"), "wb"))
            quiet = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "env": environment}
            process = subprocess.Popen(["setpriv", "--pdeathsig", "TERM", program, *command[1:]], **quiet)  # type: ignore[call-overload]
            stack.callback(_end, process)
            time.sleep(0.3)
        _wait_for_nodes(environment)
        yield config


_MUNGE = (("socket", "socket"), ("key-file", "key"), ("pid-file", "pid"), ("log-file", "log"), ("seed-file", "seed"))


def _wait_for_nodes(environment: dict[str, str]) -> None:
    until = time.monotonic() + START_LIMIT_S
    while True:
        states = subprocess.run(["sinfo", "-h", "-N", "-o", "%T"], capture_output=True, text=True, env=environment, check=False)
        if states.stdout.split() == ["idle"] * len(NODES):
            return
        if time.monotonic() > until:
            raise TimeoutError(f"Slurm's nodes do not come up: {states.stdout} {states.stderr}")
        time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
