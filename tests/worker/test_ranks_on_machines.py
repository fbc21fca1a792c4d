"""Ranks of torch on two machines: their environment, where they meet and listen, and what they communicate through."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psutil
import pytest
from made_up_machines import ADDRESSES, places, started_on

import labkit as lab
from labkit.errors.exceptions import LabError
from labkit.ipc.options import Options, Place
from labkit.ipc.protocol import Offer, RankConfig
from labkit.worker.network_namespace import PrivateNetwork
from labkit.worker.runtimes.torch import THROUGH_HOST, Rpc, Torch

pytest.importorskip("torch")

ON = ("pc1", "pc1", "pc2")
LIMIT_S = 20  # for ranks that wait elsewhere: the test fails soon
INTERFACES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture(scope="module")
def three() -> Iterator[lab.Group]:
    with started_on(*ON), lab.Group(3, timeout_s=200) as group:
        yield group


@pytest.fixture(scope="module")
def remote() -> Iterator[lab.Group]:
    with started_on("pc1", "pc2"), lab.Group(2, runtime="rpc", timeout_s=200) as group:
        yield group


def surroundings() -> dict[str, Any]:
    names = (
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
        *INTERFACES,
    )  # fmt: skip
    found: dict[str, Any] = {name: os.environ.get(name) for name in names}
    sockets = psutil.Process().net_connections("tcp")
    return found | {"listens": {(s.laddr.ip, s.laddr.port) for s in sockets if s.status == psutil.CONN_LISTEN}}


@pytest.mark.processes
def test_the_environment_is_torchruns_on_several_machines(three: lab.Group) -> None:
    found = three.run(surroundings).results
    for variable, values in {
        "RANK": "012",
        "WORLD_SIZE": "333",
        "LOCAL_RANK": "010",
        "LOCAL_WORLD_SIZE": "221",
        "GROUP_RANK": "001",
        "GROUP_WORLD_SIZE": "222",
    }.items():
        assert [one[variable] for one in found] == list(values), variable
    assert {one["MASTER_ADDR"] for one in found} == {ADDRESSES["pc1"]}
    (port,) = {int(one["MASTER_PORT"]) for one in found}
    assert (ADDRESSES["pc1"], port) in found[0]["listens"], "the group's store is where the others reach rank 0"
    assert {one[name] for one in found for name in INTERFACES} == {"lo"}


@pytest.mark.processes
@pytest.mark.parametrize("runtime", ["torch", "bare"])
def test_frameworks_choose_an_interface_that_is_not_given(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in INTERFACES:
        monkeypatch.delenv(name, raising=False)
    with started_on("pc1", "pc2", interface=""), lab.Group(2, runtime=runtime, timeout_s=200) as group:
        found = group.run(surroundings).results
    assert {one[name] for one in found for name in INTERFACES} == {None}
    assert [one["MASTER_ADDR"] for one in found] == [ADDRESSES["pc1"]] * 2


@pytest.mark.processes
def test_collectives_over_several_machines(three: lab.Group) -> None:
    def total() -> float:
        import torch
        import torch.distributed as dist

        value = torch.tensor(float(dist.get_rank() + 1))
        dist.all_reduce(value)
        return value.item()

    assert three.run(total).results == [6.0] * 3


@pytest.mark.processes
@pytest.mark.parametrize("host", ["pc2", ADDRESSES["pc2"], "pc1", "localhost"])
def test_a_program_may_meet_at_any_machine_of_its_group(three: lab.Group, host: str) -> None:
    """In the group's store: no rank listens at that address, and most of the names cannot be resolved."""

    def program(host: str) -> float:
        import torch
        import torch.distributed as dist

        method, rank = f"tcp://{host}:29500", (int(os.environ["RANK"]) + 1) % 3
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=3, timeout=timedelta(seconds=LIMIT_S))
        value = torch.tensor(float(dist.get_rank()))
        dist.broadcast(value, src=2)
        return value.item()

    assert three.run(program, host).results == [2.0] * 3


@pytest.mark.processes
def test_remote_calls_between_machines(remote: lab.Group) -> None:
    def call() -> Any:
        from torch.distributed import rpc

        other = f"worker{1 - int(os.environ['RANK'])}"
        return rpc.rpc_sync(other, os.getenv, args=("GROUP_RANK",))

    assert remote.run(call).results == ["1", "0"]


# What messages go through


def torch_rank(place: Place, size: int, **options: Any) -> Torch:
    named = Options(names=tuple(f"rank {i}" for i in range(size)), runtime="torch", **options)
    return Torch(RankConfig(0, named, place=place), PrivateNetwork(), lambda: None)


@pytest.mark.parametrize(
    ("gpus", "why"),
    [
        (("a", "b", "c"), ""),
        (("a b", "c d", "e f"), ""),
        (("", "", ""), ""),
        (("a", "b", "b"), f"3 ranks share 2 GPUs and compute in turns: NCCL needs one per rank. {THROUGH_HOST}"),
        (("a", "", ""), f"no GPU for rank 1 and rank 2: NCCL needs one per rank. {THROUGH_HOST}"),
    ],
)
def test_all_ranks_use_nccl_or_none_does(gpus: tuple[str, ...], why: str) -> None:
    offers = [Offer(gpus=tuple(names.split())) for names in gpus]
    assert {torch_rank(place, 3)._about_gpus(offers) for place in places(ON)} == {why}


def test_remote_calls_do_not_use_nccl() -> None:
    ranks = RankConfig(0, Options(names=("a", "b", "c"), runtime="rpc"), place=Place()), PrivateNetwork(), lambda: None
    said = [Rpc(*ranks)._about_gpus([Offer(gpus=(name,)) for name in names]) for names in ("aab", "abc")]
    assert said == ["3 ranks share 2 GPUs and compute in turns.", ""]


@pytest.mark.processes
def test_gpus_are_hidden_from_ranks_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def visible() -> str | None:
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    for devices in ("cpu", "auto"):
        with lab.Group(1, devices=devices) as group:
            for chosen in ("0", "0,1"):
                monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
                assert group.run(visible).results == ["" if devices == "cpu" else chosen]


def test_a_rank_has_gpus_of_its_own_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert [torch_rank(place, 3)._own_devices() for place in places(ON)] == [["cuda:0"], ["cuda:1"], ["cuda:0", "cuda:1"]]
    assert torch_rank(places(ON)[0], 3, devices="cpu")._own_devices() == ["cpu"]


def test_a_private_network_is_left_by_ranks_of_several_machines() -> None:
    private = PrivateNetwork(fd=1)
    assert private.unless_several(1, {}) is private
    assert not private.unless_several(2, {}).private
    with pytest.raises(LabError, match="LABKIT_NETWORK=private: in private networks, ranks of several machines cannot meet"):
        private.unless_several(2, {"LABKIT_NETWORK": "private"})
