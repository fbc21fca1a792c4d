"""What ranks use of memory and GPUs."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from labkit.launch.resource_usage import Gpus, Load, ResourceMonitor, followed, gpus_of, own_bytes

from synthetic import MS  # isort: skip


def processes(*pids):
    return [SimpleNamespace(pid=pid) for pid in pids]


def test_reading_memory_takes_a_bounded_share_of_time():
    cpu = iter(range(0, 10**12, 20 * MS))  # each reading costs 20 ms
    looks = []
    usage = ResourceMonitor(processes(7), read=lambda pid: looks.append(pid) or 5, clock=lambda: next(cpu))
    for now_ms in range(0, 13_000, 200):
        assert usage.sample(now_ms * MS) == (Load(5),)
    assert looks == [7, 7, 7]  # every 6 s


def test_the_memory_of_a_process_is_tracked_from_its_private_memory(monkeypatch):
    own, unshared = {7: 50, 8: 0}, {7: 200, 8: 0}
    monkeypatch.setattr("labkit.launch.resource_usage.own_bytes", own.get)
    monkeypatch.setattr("labkit.launch.resource_usage._unshared_bytes", unshared.get)
    read = followed([7, 8])
    own.clear()  # not asked again
    assert (read(7), read(8)) == (50, 0)
    unshared[7] = 230
    assert read(7) == 80
    unshared[7] = 0  # it has ended
    assert read(7) == 0


@pytest.mark.processes
def test_memory_taken_by_a_real_process_is_seen():
    code = "print('here', flush=True); input(); kept = bytearray(b'x') * (1 << 26); print('taken', flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-S", "-c", code], **pipes) as process:
        assert process.stdout.readline() == "here\n"
        read = followed([process.pid])
        before = read(process.pid)
        print(file=process.stdin, flush=True)
        assert process.stdout.readline() == "taken\n"
        assert read(process.pid) - before == pytest.approx(1 << 26, rel=0.1)
        process.kill()
    assert read(process.pid) == 0


def test_a_process_that_has_ended_has_no_memory():
    assert own_bytes(os.getpid()) > 1 << 20
    assert own_bytes(2**22 + 1) == 0


class Nvml:
    """The module `pynvml`, pretended: this has not run on a GPU. A handle is 100 and the number of the GPU."""

    class NVMLError(Exception):
        pass

    def __init__(self, *uuids):
        self.uuids = uuids

    def nvmlInit(self):  # noqa: N802
        if not self.uuids:
            raise self.NVMLError("NVML Shared Library Not Found")

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        if index >= len(self.uuids):
            raise self.NVMLError("Invalid Argument")
        return 100 + index

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        return 100 + self.uuids.index(uuid)

    def nvmlDeviceGetUtilizationRates(self, handle):  # noqa: N802
        return SimpleNamespace(gpu=handle - 20, memory=3)

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        return SimpleNamespace(total=10**10, free=0, used=handle * 10**6)


def test_each_ranks_gpus_are_read(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus = Gpus(Nvml("GPU-a", "GPU-b", "GPU-c", "GPU-d"))
    usage = ResourceMonitor(processes(7, 8, 9), [[0, 1], [3], [4]], read=lambda pid: pid, gpus=gpus)
    assert usage.sample(0) == (Load(201_000_000, 80), Load(103_000_000, 83), Load(9))  # there is no GPU 4
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-b")
    gpus = Gpus(Nvml("GPU-a", "GPU-b", "GPU-c", "GPU-d"))
    assert [gpus.read(0), gpus.read(1)] == [(82, 102_000_000), (81, 101_000_000)]


@pytest.mark.parametrize("module", [None, Nvml()], ids=["not installed", "no driver"])
def test_without_nvml_the_memory_of_the_processes_is_shown(module, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert ResourceMonitor(processes(7), [[0]], read=lambda pid: pid).sample(0) == (Load(7),)


def test_which_gpus_a_rank_has(monkeypatch):
    monkeypatch.setattr("labkit.launch.resource_usage.gpu_count", lambda: 4)
    assert gpus_of(2, "auto") == [[0, 1], [2, 3]]
    assert gpus_of(8, "cuda")[5] == [1]
    assert gpus_of(2, "cpu") == [[], []]
