"""A process of a submission: its limits, what it cannot see and change, and that nothing of it is left."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import psutil
import pytest

from labkit.teaching.classroom.confined_process import MOST_OUTPUT, Limits, ProcessEnd, run_confined, why_unconfined

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def namespaces() -> None:
    if why := why_unconfined():
        pytest.skip(f"this system has no namespaces: {why}")


def run(code: str, tmp_path: Path, limits: Limits = Limits(60), *, confined: bool = False, text: str = "the input") -> ProcessEnd:  # noqa: B008  # it is frozen
    indented = code.replace("\n", "\n    ")
    program = f"import os, sys, time\ndef main(fd, cover):\n    result = os.fdopen(fd, 'w')\n    {indented}\n"
    (tmp_path / "submitted.py").write_text(program)
    return run_confined("submitted", text, limits, [str(tmp_path)], confined=confined)


@pytest.mark.parametrize("confined", [False, True])
def test_input_result_output_and_exit_code(confined: bool, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if confined:
        request.getfixturevalue("namespaces")
    code = (
        "print('printed'); print('error', file=sys.stderr); result.write(sys.stdin.read().upper()); result.flush(); os._exit(3)"
    )
    ended = run(code.replace("os._exit", "sys.stdout.flush(); os._exit"), tmp_path, confined=confined)
    assert (ended.result, sorted(ended.output.split())) == ("THE INPUT", ["error", "printed"])
    assert ended.why == "it ended with exit code 3"
    assert run("pass", tmp_path, confined=confined) == ProcessEnd("", "", "")


FORK = "for _ in range(30):\n    if os.fork() == 0: time.sleep(1000)\ntime.sleep(1000)"
HOARD = "hoard = []\nos.fork()\nwhile True: hoard.append(bytearray(os.urandom(1000) * 10_000)); time.sleep(0.01)"


@pytest.mark.parametrize(
    ("code", "limits", "why"),
    [
        ("while True: pass", Limits(1), "it was not finished after 1 s"),
        (HOARD, Limits(60, memory_mb=300), "of memory; allowed are 300"),
        (FORK, Limits(60, processes=20), "it started more than 20 processes"),
        ("open('big', 'wb').truncate(2**30 + 1)", Limits(60), "exit code 1"),
    ],
)
def test_limits(code: str, limits: Limits, why: str, tmp_path: Path) -> None:
    assert why in run(code, tmp_path, limits).why


def test_endless_output_is_cut(tmp_path: Path) -> None:
    assert len(run("while True: print('x' * 1000)", tmp_path, Limits(2)).output) == MOST_OUTPUT


def test_nothing_is_left(tmp_path: Path) -> None:
    daemon = "if os.fork() == 0:\n    os.setsid()\n    print(os.getpid(), os.getcwd(), flush=True)\n    time.sleep(1000)"
    ended = run(f"{daemon}\ntime.sleep(1)", tmp_path)
    assert ended.why == ""
    pid, folder = ended.output.split()
    until = time.monotonic() + 60  # a process that was killed may still need a core to end
    while is_left(int(pid)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_left(int(pid))
    assert not Path(folder).exists()


def is_left(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# Each returns what an attempt gives: an error's name, or what was found.
ATTEMPTS = """
import ctypes, json, socket, threading
libc = ctypes.CDLL(None, use_errno=True)
hidden, other, outside, parent = json.load(sys.stdin)
cover([hidden, other])
def of(attempt):
    try: return attempt()
    except OSError as error: return type(error).__name__
def remount():
    libc.unshare(0x10000000 | 0x20000)  # a user namespace of its own, in which it has all capabilities
    return [libc.umount2(os.fsencode(path), 2) for path in (hidden, other)]
found = {
    "reads": of(lambda: open(hidden + "/secret.txt").read()),
    "lists": os.listdir(hidden),
    "reads a file": open(other).read(),
    "reads in C": libc.open(os.fsencode(hidden + "/secret.txt"), 0),
    "writes": of(lambda: open(outside, "w").close()),
    "writes into its folder": of(lambda: open("own.txt", "w").write("own")),
    "connects": of(lambda: socket.create_connection(("192.0.2.1", 80), timeout=1)),
    "interfaces": [name for _, name in socket.if_nameindex()],
    "kills": of(lambda: os.kill(parent, 0)),
    "kills all": of(lambda: os.kill(-1, 0)),  # no signal is sent, whatever goes wrong here
    "sees": sorted(name for name in os.listdir("/proc") if name.isdigit()) == sorted(map(str, {1, os.getpid()})),
    "capabilities": {line.split()[1] for line in open("/proc/self/status") if line.startswith("Cap")} == {"0" * 16},
    "uncovers": remount(),
    "reads again": of(lambda: open(hidden + "/secret.txt").read()),
}
json.dump(found, result)
"""


@pytest.mark.usefixtures("namespaces")
def test_not_even_c_code_finds_the_files_the_network_and_other_processes(tmp_path: Path) -> None:
    hidden, other, outside = tmp_path / "hidden", tmp_path / "other.py", tmp_path / "outside.txt"
    hidden.mkdir()
    (hidden / "secret.txt").write_text("secret")
    other.write_text("secret = 1")
    given = json.dumps([str(hidden), str(other), str(outside), os.getpid()])
    ended = run(ATTEMPTS.strip(), tmp_path, confined=True, text=given)
    assert json.loads(ended.result or "{}") == {
        "reads": "FileNotFoundError", "lists": [], "reads a file": "", "reads in C": -1, "writes": "OSError",
        "writes into its folder": 3, "connects": "OSError", "interfaces": ["lo"], "kills": "ProcessLookupError",
        "kills all": "ProcessLookupError", "sees": True, "capabilities": True, "uncovers": [-1, -1],
        "reads again": "FileNotFoundError",
    }, ended.output  # fmt: skip
    assert (hidden / "secret.txt").read_text() == "secret", "it is covered only there"


@pytest.mark.usefixtures("namespaces")
def test_code_after_go_on_in_child_has_a_process_with_one_thread(tmp_path: Path) -> None:
    code = (
        "import threading\nfrom labkit.teaching.classroom.confined_process import go_on_in_child\n"
        "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\ncover([])\ngo_on_in_child()\n"
        "result.write(str(len(os.listdir('/proc/self/task'))))\nresult.flush()\nos._exit(7)"
    )
    assert run(code, tmp_path, confined=True) == ProcessEnd("1", "", "it ended with exit code 7")


def test_a_process_imports_nothing_from_its_folder_and_has_nothing_of_the_teachers_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHERS_TOKEN", "secret")
    code = "result.write(str([os.getcwd() in sys.path, 'TEACHERS_TOKEN' in os.environ, os.environ['HOME'] == os.getcwd()]))"
    assert run(code, tmp_path).result == "[False, False, True]"
