"""A stand-in for the ssh client: runs the remote command on this machine, as sshd would on another.

Usage: fake_ssh.py HOMES [ssh's options] [--] [user@]host command...

HOMES is a folder with the home directories of the hosts. What happens is decided by the name of the host: "unknown"
cannot be resolved, "locked" refuses the key, all others accept; pc1 has the address 127.0.0.2, pc2 has 127.0.0.3.
An option that is not listed here is an error, so that no test passes with an option that this program ignores.
"""

import getpass
import os
import signal
import subprocess
import sys
import threading

FAILED = 255  # ssh's own exit code; all others are those of the remote command
SETTINGS = {"batchmode", "connecttimeout", "serveraliveinterval", "serveralivecountmax"}
FLAGS = "Tax"
TESTS_SESSION = "LABKIT_TEST_SESSION"  # not in a real ssh: by this the tests find processes that were left on the host


def fail(text: str) -> None:
    print(text, file=sys.stderr)
    sys.exit(FAILED)


def read_arguments(arguments: list[str]) -> tuple[str, str]:
    """The host and the command. Like ssh, takes options before and after the host, up to the first `--`."""
    host = ""
    while arguments:
        argument = arguments.pop(0)
        if argument == "--":
            host = host or (arguments.pop(0) if arguments else "")
            break
        if argument.startswith("-o"):
            setting = argument[2:] or (arguments.pop(0) if arguments else "")
            name = setting.partition("=")[0].strip()
            if name.lower() not in SETTINGS:
                fail(f"command-line: line 0: Bad configuration option: {name.lower()}")
        elif argument.startswith("-"):
            if argument[1:].strip(FLAGS) or argument == "-":
                fail(f"unknown option -- {argument[1:2]}\nusage: ssh [-{FLAGS}] [-o option] destination command")
        elif host:
            arguments.insert(0, argument)
            break
        else:
            host = argument
    if not host or not arguments:
        fail("usage: ssh [options] destination command")
    return host, " ".join(arguments)


def copy(source: int, destination: int) -> None:
    """Copy until the source ends or nobody reads the destination; then close both."""
    try:
        while data := os.read(source, 1 << 16):
            while data:
                data = data[os.write(destination, data) :]
    except BrokenPipeError:
        pass
    os.close(destination)
    os.close(source)


def main(homes: str, arguments: list[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: os._exit(FAILED))  # ssh, too, ends with its own exit code and without a word
    destination, command = read_arguments(arguments)
    user, _, host = destination.rpartition("@")
    user = user or getpass.getuser()
    if host == "unknown":
        fail(f"ssh: Could not resolve hostname {host}: Name or service not known")
    if host == "locked":
        fail(f"{user}@{host}: Permission denied (publickey).")
    home = os.path.join(homes, host)
    os.makedirs(home, exist_ok=True)
    number = int(host[-1]) if host[-1:].isdigit() else 0
    environment = {"HOME": home, "PATH": "/usr/local/bin:/usr/bin:/bin", "USER": user, "LOGNAME": user, "SHELL": "/bin/sh"}
    environment |= {"LANG": "C.UTF-8", "SSH_CONNECTION": f"127.0.0.1 50000 127.0.0.{number + 1} 22"}
    environment |= {name: os.environ[name] for name in (TESTS_SESSION,) if name in os.environ}
    # Pipes of its own and a session of its own: whoever kills this program ends the command's stdin, not the command.
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(["/bin/sh", "-c", command], **pipes, cwd=home, env=environment, start_new_session=True)
    assert process.stdin
    assert process.stdout
    assert process.stderr
    stdin, *outputs = (os.dup(pipe.fileno()) for pipe in (process.stdin, process.stdout, process.stderr))
    for pipe in (process.stdin, process.stdout, process.stderr):
        pipe.close()
    threading.Thread(target=copy, args=(0, stdin), daemon=True).start()
    threads = [threading.Thread(target=copy, args=pair, daemon=True) for pair in zip(outputs, (1, 2), strict=True)]
    for thread in threads:
        thread.start()
    code = process.wait()
    for thread in threads:  # like ssh, waits for children that keep the command's output open
        thread.join()
    return code if code >= 0 else FAILED


if __name__ == "__main__":
    code = main(sys.argv[1], sys.argv[2:])
    os._exit(code)  # the thread that reads stdin may be reading still
