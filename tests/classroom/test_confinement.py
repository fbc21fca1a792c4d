"""What a submission's code must not do. Each attempt runs in a process of its own: an audit hook stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from labkit.classroom.confinement import Confinement, attempts

pytestmark = pytest.mark.processes

PROGRAM = """
import sys
from labkit.classroom.confinement import Confinement, cover, new_namespaces, watch
confinement = Confinement(({hidden!r},), ({libraries!r},), {log!r})
{before}
watch(confinement)
exec(compile({attempt!r}, "cell 1", "exec"), {{"hidden": {hidden!r}, "libraries": {libraries!r}, "log": {log!r}}})
"""
ATTEMPTS = {
    "open(hidden + '/secret.txt').read()": "opens secret.txt, which is not for submissions",
    "open(hidden + '/../hidden/secret.txt')": "opens secret.txt, which is not for submissions",
    "import os; os.listdir(hidden)": "opens hidden, which is not for submissions",
    "import os; os.open(hidden + '/secret.txt', os.O_RDONLY)": "opens secret.txt, which is not for submissions",
    "import pathlib; pathlib.Path(hidden, 'secret.txt').read_text()": "opens secret.txt, which is not for submissions",
    "import sys; sys.path.insert(0, hidden); import oracle": "opens hidden, which is not for submissions",
    "import linecache; linecache.getlines(libraries + '/judge.py')": "opens judge.py, which is not for submissions",
    "import subprocess; subprocess.run(['true'])": "starts another program (true)",
    "import os; os.system('true')": "starts another program (true)",
    "import socket; socket.create_connection(('192.0.2.1', 80), timeout=1)": "looks up the address of 192.0.2.1",
    "import socket; socket.socket().connect(('192.0.2.1', 80))": "connects to 192.0.2.1",
    "import sys; getattr(sys, '_get' + 'frame')(0)": "looks at the frames or objects of other code",
    "import inspect; inspect.stack()": "looks at the frames or objects of other code",
    "exec('import sys; sys._getframe(1)')": "looks at the frames or objects of other code",
    "try:\n    1 / 0\nexcept ArithmeticError as error:\n    error.__traceback__.tb_frame": (
        "looks at the frames or objects of other code"
    ),
    "import gc; gc.get_objects()": "looks at the frames or objects of other code",
    "import ctypes; ctypes.CDLL(None).getpid()": "calls C functions by ctypes",
    "import os; os.kill(os.getppid(), 0)": "sends signals to other processes",
    "import os, signal; signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 0)": "sends signals to other processes",
    "import os, _signal; _signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 0)": "sends signals to other processes",
    "import os, psutil; psutil.Process(os.getppid()).send_signal(0)": "sends signals to other processes",
    "from labkit.launch.descendants import kill_groups; kill_groups([2**30])": "sends signals to other processes",  # no process
    "import fcntl, os; fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())": "sends signals to other processes",
    "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU)": "sends signals to other processes",
    "import os; os.open('/', os.O_RDONLY)": "opens a folder by os.open or os.fwalk",
    "import os; next(os.fwalk('/'))": "opens a folder by os.open or os.fwalk",
    "import os; os.fspath = lambda _: '/'; open(hidden + '/secret.txt')": "opens secret.txt, which is not for submissions",
    "import labkit.classroom.confinement as c; c._state.inside = True; open(hidden + '/secret.txt')": (
        "opens secret.txt, which is not for submissions"
    ),
    "import labkit.classroom.confinement as c; c._forbidden = lambda *_: None; open(hidden + '/secret.txt')": (
        "opens secret.txt, which is not for submissions"
    ),
    "import os; os.path.realpath = os.path._joinrealpath = os.fsdecode = lambda *_, **__: '/'; open(hidden + '/secret.txt')": (
        "opens secret.txt, which is not for submissions"
    ),
    "import builtins; builtins.isinstance = lambda *_: False; open(hidden + '/secret.txt')": (
        "opens secret.txt, which is not for submissions"
    ),
    "class P(str):\n    startswith = partition = lambda *_: False\nopen(P(hidden + '/secret.txt'))": (
        "opens secret.txt, which is not for submissions"
    ),
    "import os; exec(compile('import sys; sys._getframe(0)', os.__file__, 'exec'))": (
        "changes code, or compiles it under the name of a library"
    ),
    "import marshal; marshal.loads(marshal.dumps(1))": "loads code by marshal",
    "import os; open(os.path.dirname(os.__file__) + '/labkit_was_here.py', 'w')": (
        "changes labkit_was_here.py, which is not in its own folder"
    ),
    "import os; os.mkdir('/labkit_was_here')": "changes labkit_was_here, which is not in its own folder",
    "import os; open('/proc/%d/environ' % os.getppid())": "looks at other processes",
    "import os; os.remove(log)": "changes the list of what it has tried",
    "import os; os.mkdir(log + '/forged')": "changes the list of what it has tried",
    "import os; os.rename(log, log + '2')": "changes the list of what it has tried",
    "import os; os.chmod(os.path.dirname(log), 0)": "changes the list of what it has tried",
    "f = lambda: 1\nf.__code__ = f.__code__": "changes code, or compiles it under the name of a library",
    "f = lambda: 1\nimport os\nf.__code__.replace(co_filename=os.__file__)": (
        "changes code, or compiles it under the name of a library"
    ),
}  # fmt: skip
ALLOWED = [
    "import collections; collections.namedtuple('A', 'b')",
    "import logging, warnings; logging.warning('x'); warnings.warn('x', stacklevel=2)",
    "import socket; s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname())",
    "import os; open('/proc/meminfo').close(); open('/proc/self/status').close(); open(os.devnull, 'w').close()",
    "import os, tempfile; open(tempfile.mktemp(), 'w').close(); os.listdir('/')",
    "import os, shutil, tempfile; path = tempfile.mkdtemp(); os.mkdir(path + '/a'); shutil.rmtree(path)",
    "import os, signal; signal.pidfd_send_signal(os.pidfd_open(os.getpid()), 0); os.open(os.devnull, os.O_WRONLY)",
    "import dataclasses; dataclasses.make_dataclass('A', ['b'])(1)",
    "import torch, torch.distributed, torch.fx",
]


def attempt(code: str, tmp_path: Path, before: str = "") -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run code after `watch`; return how it ended, and what was refused first."""
    for name in ("hidden", "libraries"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "hidden" / "secret.txt").write_text("secret")
    (tmp_path / "hidden" / "oracle.py").write_text("print('secret')")
    (tmp_path / "libraries" / "judge.py").write_text("secret = 1\n")
    log = tmp_path / "log"
    paths = {"hidden": str(tmp_path / "hidden"), "libraries": str(tmp_path / "libraries"), "log": str(log)}
    program = PROGRAM.format(attempt=code, before=before, **paths)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    return ended, attempts(Confinement((), (), str(log)))


@pytest.mark.parametrize("code", ATTEMPTS)
def test_an_attempt_is_refused_and_written_down_even_if_its_exception_is_swallowed(code: str, tmp_path: Path) -> None:
    indented = code.replace("\n", "\n    ")
    ended, log = attempt(f"try:\n    {indented}\nexcept BaseException:\n    pass\nprint('went on')", tmp_path)
    assert ended.stdout == "went on\n", ended.stderr
    assert log == [ATTEMPTS[code]]


def test_the_first_attempt_is_kept_and_nothing_that_is_written_into_open_files(tmp_path: Path) -> None:
    forge = "for fd in range(3, 50):\n    try: os.write(fd, b'forged\\n'); os.ftruncate(fd, 0)\n    except OSError: pass\n"
    tries = "for name in ('/secret.txt', '/oracle.py', '/a/b|\\n'):\n    try: open(hidden + name)\n    except OSError: pass\n"
    _, log = attempt(f"import os\n{forge}", tmp_path / "none")
    assert log == []
    _, log = attempt(f"import os\n{forge}{tries}{forge}os.closerange(3, 50)", tmp_path / "three")
    assert log == ["opens secret.txt, which is not for submissions"]
    _, log = attempt(f"import os\nos.closerange(3, 50)\n{tries}", tmp_path / "closed")
    assert log == ["opens secret.txt, which is not for submissions"]


@pytest.mark.parametrize("name", ["a/b", "ü" * 300, "\udc80\n", "x" * 5000])
def test_whatever_an_attempt_is_called_it_is_noted(name: str, tmp_path: Path) -> None:
    code = f"try: open(hidden + '/' + {name!r})\nexcept (OSError, ValueError, UnicodeError): pass\nimport os\nos.system({name!r})"
    _, log = attempt(code, tmp_path)
    assert len(log) == 1


@pytest.mark.parametrize("put", [lambda log: log.touch(), os.mkfifo, lambda log: log.symlink_to("/dev/zero")])
def test_whatever_is_in_the_place_of_the_list_of_attempts_it_is_read_and_gone(put: Any, tmp_path: Path) -> None:
    confinement = Confinement((), (), str(tmp_path / "log"))
    assert attempts(confinement) == []
    put(tmp_path / "log")
    assert attempts(confinement) == ["changes the list of what it has tried"]


def test_a_busy_thread_does_not_distract_the_guard(tmp_path: Path) -> None:
    code = (
        "import os, sys, threading\nsys.setswitchinterval(1e-6)\n"
        "def busy():\n    while True: os.stat('/'); open('/dev/null').close()\n"
        "[threading.Thread(target=busy, daemon=True).start() for _ in range(4)]\n"
        "read = 0\n"
        "for _ in range(2000):\n"
        "    try: open(hidden + '/secret.txt').close(); read += 1\n"
        "    except PermissionError: pass\n"
        "print(read)\nos._exit(0 * os.write(1, f'{read}\\n'.encode()))"
    )
    ended, _ = attempt(code, tmp_path)
    assert ended.stdout.startswith("0\n"), ended.stdout + ended.stderr


@pytest.mark.parametrize("code", ALLOWED)
def test_what_libraries_do_is_allowed(code: str, tmp_path: Path) -> None:
    ended, log = attempt(code, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert log == []


COVERED = """
why = new_namespaces()
if why:
    sys.exit(f"no namespaces: {why}")
cover(confinement)
"""


def test_in_namespaces_not_even_c_code_finds_the_files_or_the_network(tmp_path: Path) -> None:
    look = (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.open(os.fsencode(hidden + '/secret.txt'), 0), os.listdir('/sys/class/net') if 0 else "
        "open('/proc/net/dev').read().count(':'), libc.umount(os.fsencode(hidden)))"
    )
    # `-c` code has the file name "<string>", as code of a submission that `exec` runs: watch() comes after it.
    program = COVERED + f"hidden = confinement.hidden[0]\nexec({look!r})"
    ended, _ = attempt("pass", tmp_path, program)
    if "no namespaces" in ended.stderr:
        pytest.skip(ended.stderr.strip())
    assert ended.stdout == "-1 1 -1\n", ended.stderr
    assert (tmp_path / "hidden" / "secret.txt").read_text() == "secret", "it is covered only there"


def test_the_confinement_travels_as_json() -> None:
    import dataclasses
    import json

    confinement = Confinement(("/a",), (), "/log")
    assert Confinement(**json.loads(json.dumps(dataclasses.asdict(confinement)))).log == "/log"
