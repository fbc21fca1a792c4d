"""TensorFlow's ranks on two machines: their cluster, where their servers listen, and which GPUs they compute on."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
from typing import Any

import pytest
from made_up_machines import ADDRESSES, places, started_on

import labkit as lab
from labkit.errors.exceptions import LabError
from labkit.ipc.options import Options, Place
from labkit.ipc.protocol import Offer, RankConfig
from labkit.worker.network_namespace import PrivateNetwork
from labkit.worker.runtimes.tensorflow.runtime import TensorFlow

pytestmark = [pytest.mark.processes, pytest.mark.tf]
if importlib.util.find_spec("tensorflow") is None:  # found, not imported: the notebook's process runs no TensorFlow
    pytest.skip("needs TensorFlow", allow_module_level=True)

ON = ("pc1", "pc1", "pc2")


def train() -> dict[str, Any]:
    """Sum a value over the ranks; return this and what the rank knows of its place."""
    import tensorflow as tf

    from labkit.worker.runtimes.tensorflow.servers import duplicate

    config = json.loads(os.environ["TF_CONFIG"])
    task = config["task"]["index"]
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    value = strategy.run(
        lambda: tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.constant(task + 1.0))
    )
    port = int(config["cluster"]["worker"][task].rpartition(":")[2])
    devices = set()
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            with duplicate(fd) as one:
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and one.getsockname()[1] == port:
                    devices.add(one.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0"))
        except OSError:
            continue
    names = "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"
    return {
        "hosts": [address.rpartition(":")[0] for address in config["cluster"]["worker"]],
        "sum": float(value),
        "devices": devices,
        "dtensor": os.environ["DTENSOR_JOBS"].split(",") == config["cluster"]["worker"],
        "place": [os.environ[name] for name in names],
    }


def test_ranks_of_several_machines_are_one_cluster() -> None:
    with started_on(*ON), lab.Group(3, runtime="tensorflow", timeout_s=200) as group:
        found = group.run(train).results
    assert [one["hosts"] for one in found] == [[ADDRESSES[machine] for machine in ON]] * 3
    assert [one["sum"] for one in found] == [6.0] * 3
    assert [one["devices"] for one in found] == [{b""}] * 3, "bound to the loopback device, other machines could not connect"
    assert all(one["dtensor"] for one in found)
    assert [one["place"] for one in found] == [["0", "2", "0"], ["1", "2", "0"], ["0", "1", "1"]]


def test_ranks_that_share_another_machine_listen_within_it() -> None:
    with started_on("pc2", "pc2"), lab.Group(2, runtime="tensorflow", timeout_s=200) as group:
        found = group.run(train).results
    assert [one["hosts"] for one in found] == [["127.0.0.1"] * 2] * 2
    assert [one["sum"] for one in found] == [3.0] * 2
    assert [one["devices"] for one in found] == [{b"lo"}] * 2


def tensorflow_rank(place: Place, **options: Any) -> TensorFlow:
    named = Options(names=("0", "1", "2"), runtime="tensorflow", **options)
    return TensorFlow(RankConfig(0, named, place=place), PrivateNetwork(), lambda: None)


@pytest.mark.parametrize(
    ("gpus", "own", "notes"),
    [  # the GPUs that TensorFlow sees on each machine, and those that each rank gets
        ({"pc1": "ab", "pc2": "c"}, ("a", "b", "c"), set()),
        ({"pc1": "abc", "pc2": "de"}, ("a", "b", "d"), set()),
        ({"pc1": "", "pc2": ""}, ("", "", ""), set()),
        (
            {"pc1": "ab", "pc2": ""},
            ("", "", ""),
            {"1 rank on pc2 with 1 device each, and TensorFlow sees 0 GPUs: all ranks compute on the CPU."},
        ),
        (
            {"pc1": "a", "pc2": "b"},
            ("", "", ""),
            {"2 ranks on pc1 with 1 device each, and TensorFlow sees 1 GPU: all ranks compute on the CPU."},
        ),
    ],
)
def test_all_ranks_compute_on_gpus_of_their_machine_or_none_does(
    gpus: dict[str, str], own: tuple[str, ...], notes: set[str]
) -> None:
    ranks = [(tensorflow_rank(place), gpus[place.machine]) for place in places(ON)]
    offers = [Offer(gpus=tuple(rank._own(seen))) for rank, seen in ranks]
    shares = [rank._share(seen, offers) for rank, seen in ranks]
    assert tuple("".join(share) for share, _ in shares) == own
    assert {note for _, of_rank in shares for note in of_rank} == notes


def test_the_machine_without_enough_gpus_is_named() -> None:
    place = places(ON)[0]
    with pytest.raises(LabError, match=r"devices='cuda': 2 ranks on pc1 with 1 device each, and TensorFlow sees 1 GPU"):
        tensorflow_rank(place, devices="cuda")._share("a", [Offer()] * 3)
