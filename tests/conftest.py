"""Checks after every test that no process, listening port or shared memory of ours is left, and that this process is
unchanged.

Two things may stay for the next group: the server that forks ranks, and spare spawned ranks.
A group that a wider fixture opened before the test may keep its ranks, and a kernel that several tests share what it
has started.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from cells import Cells, new_main
from processes import START, adopts_orphans, below, kept, left_after, shared
from quick_run import note_started_processes, started

if TYPE_CHECKING:
    from reported import Reported

SESSION = "LABKIT_TEST_SESSION"  # inherited by every process that a test starts, also by one that has lost its parent
os.environ[SESSION] = str(os.getpid())
# On a busy machine, any test, program or notebook may wait for a framework to be imported and print the notice.
os.environ["LABKIT_SLOW_S"] = "180"

SETTLE_LIMIT_S = 60.0  # for processes that were asked to end

VARIABLES = ("PATH", "HOME", "PYTHONPATH", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TF_CONFIG")

KERNEL_THREADS_PARENT = 2  # on Linux

foreign: set[int] = set()  # processes found not to be ours: reading 200 environments at every test takes 40 ms


def pytest_configure(config: pytest.Config) -> None:
    # A shell that starts the tests in the background lets them ignore SIGINT; tests of Stop need KeyboardInterrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "not processes" in config.getoption("markexpr"):
        note_started_processes()


@pytest.fixture(autouse=True)
def no_processes_in_a_quick_run() -> Iterator[None]:
    """What wider fixtures have started since the test before counts as well."""
    yield
    lines, started[:] = list(started), []
    assert not lines, "the test starts processes; mark it with @pytest.mark.processes, which keeps it out of quick runs"


@pytest.fixture(autouse=True, scope="session")
def servers_have_pytest() -> Iterator[None]:
    from preloaded import preloaded  # labkit, which a test may want to import first

    with preloaded("pytest"):
        yield


@pytest.fixture(scope="module", params=START)
def start(request: pytest.FixtureRequest) -> str:
    """Return each of the ways in which ranks start."""
    return str(request.param)


@pytest.fixture(autouse=True)
def no_leftovers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compare what exists after the test with what existed before it."""
    state = _state()
    if "not processes" in request.config.getoption("markexpr"):  # a test that starts one fails anyway
        yield
        assert _state() == state, "the test changed this process for all later tests"
        return
    groups, processes, ports, memory = set(_groups()), _processes(), _listening(), _shared_memory()
    kernels = shared.copy()
    yield

    def left() -> list[psutil.Process]:
        may_stay = processes | _cached() | _ranks((groups | kept) & set(_groups())) | below(kernels & shared)
        return [p for p in _processes() - may_stay if not _is_pythons_own(p)]

    if left() or _listening() - ports or _shared_memory() - memory:
        gc.collect()  # an object in a cycle may hold on to it; not after each test, because with torch loaded it takes 0.15 s
        assert not [_describe(p) for p in _at_last(lambda: left_after(1, [p.pid for p in left()]))], "the test left processes"
        assert not _at_last(lambda: _listening() - ports), "the test left listening ports"
        assert not _at_last(lambda: _shared_memory() - memory), "the test left shared memory"
    assert _state() == state, "the test changed this process for all later tests"


@pytest.fixture(autouse=True)
def pytests_own_filters_stay_out_of_ranks(
    no_leftovers: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytest's filter of warnings must not reach ranks; the student's have a test file of their own."""
    if "labkit.worker.process_state" in sys.modules and "notebooks_filters" not in request.fixturenames:
        monkeypatch.setattr("labkit.worker.process_state.NotebookFilters.news", lambda _: None)


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> Cells:
    """A notebook's namespace: what its cells define is pickled as a notebook's definitions are."""
    return Cells(new_main(monkeypatch))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure, runs wait until all other ranks have answered, however late they are."""
    monkeypatch.setattr("labkit.group.run.GRACE_S", 60.0)


@pytest.fixture(scope="module", params=["fork", "spawn"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Two ranks without a framework, started both ways, that have run once."""
    import labkit as lab

    with lab.Group(2, runtime="bare", start=request.param, timeout_s=200) as group:
        group.run(int)
        yield group


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> Reported:
    """What runs report about deadlocks and mismatches, as typed values."""
    from reported import collect

    return collect(monkeypatch)


@pytest.fixture
def plain() -> Iterator[None]:
    """Figures independent of the user's settings, in matplotlib's bundled font; closed afterwards."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    with plt.rc_context():
        mpl.rcdefaults()
        plt.rcParams["font.family"] = "DejaVu Sans"
        yield
        plt.close("all")


def _at_last(look: Callable[[], Collection[Any]]) -> Collection[Any]:
    """What is still there after ending threads and processes have had time to end."""
    until = time.monotonic() + SETTLE_LIMIT_S
    while (found := look()) and time.monotonic() < until:
        time.sleep(0.01)
    return found


def _processes() -> set[psutil.Process]:
    """The processes that this session started, directly or not."""
    found = set()
    for pid in set(psutil.pids()) - foreign:
        try:
            process = psutil.Process(pid)
            if process.environ().get(SESSION) == str(os.getpid()) and pid != os.getpid() and not _elsewhere(pid):
                found.add(process)
            else:
                foreign.add(pid)
        except psutil.ZombieProcess:
            if _parent(pid) == os.getpid():
                found.add(process)
        except psutil.AccessDenied:  # another user's
            foreign.add(pid)
        except psutil.NoSuchProcess:  # it has ended; or it is a thread of the kernel, which has no environment
            if _parent(pid) == KERNEL_THREADS_PARENT:
                foreign.add(pid)
    return found


def _elsewhere(pid: int) -> bool:
    """Whether a process is on a machine made of namespaces; the tests of these look for what is left there."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid")
    return False


def _parent(pid: int) -> int | None:
    try:
        return psutil.Process(pid).ppid()
    except psutil.Error:
        return None


def _is_pythons_own(process: psutil.Process) -> bool:
    return "multiprocessing.resource_tracker" in _command(process)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _describe(process: psutil.Process) -> str:
    return f"{process.pid} {_command(process)[:200]}"


def _listening() -> set[int]:
    process = psutil.Process()
    connections = process.net_connections if hasattr(process, "net_connections") else process.connections  # before psutil 6
    return {c.laddr.port for c in connections("tcp") if c.status == psutil.CONN_LISTEN}


def _state() -> dict[str, Any]:
    """The state of this process that later tests rely on."""
    hard_limits = {name: resource.getrlimit(getattr(resource, name))[1] for name in dir(resource) if name.startswith("RLIMIT_")}
    variables = {name: value for name, value in os.environ.items() if name in VARIABLES or name.startswith("LABKIT_")}
    handler = signal.getsignal(signal.SIGCHLD)
    return {"folder": os.getcwd(), **hard_limits, "SIGCHLD": handler, "adopts orphans": adopts_orphans(), **variables}


def _shared_memory() -> set[str]:
    """Named segments that labkit, torch or multiprocessing made in this process, wherever the system shows them as
    files."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return set()
    ours = ("labkit", f"torch_{os.getpid()}_")
    return {f.name for f in folder.iterdir() if f.name.startswith(ours)}


def _notebook() -> Any:
    """What labkit holds for this process; None where no test has imported it."""
    module = sys.modules.get("labkit.group.open_groups")
    return None if module is None else module.notebook


def _groups() -> list[Any]:
    notebook = _notebook()
    return [] if notebook is None else list(notebook.groups)


def _ranks(groups: set[Any]) -> set[psutil.Process]:
    pools = [group._pool for group in groups]  # read once: another thread may be closing the group
    return _existing([member.process.pid for pool in pools if pool is not None for member in pool.members])


def _cached() -> set[psutil.Process]:
    """Servers and spare ranks; relays, and their agents on this machine with their servers."""
    notebook = _notebook()
    starters = [] if notebook is None else list(notebook.starters.values())
    servers = [starter._process.pid for starter in starters if hasattr(starter, "_process")]
    found = set()
    if any(type(starter).__name__ == "RelayStarter" for starter in starters):  # what sshd starts is not below the relay
        found = {p for p in _processes() if any("labkit.launch.machines" in _command(q) for q in (p, _existing_parent(p)) if q)}
    return found | _existing(servers + [spare.pid for starter in starters for spare in getattr(starter, "_spares", [])])


def _existing_parent(process: psutil.Process) -> psutil.Process | None:
    with contextlib.suppress(psutil.Error):
        return process.parent()
    return None


def _existing(pids: list[int]) -> set[psutil.Process]:
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.add(psutil.Process(pid))
    return found
