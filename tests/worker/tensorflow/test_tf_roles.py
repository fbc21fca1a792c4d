"""In a cluster with parameter servers, only the chief makes a strategy."""

from __future__ import annotations

import importlib.util

import pytest

import labkit as lab

pytestmark = [pytest.mark.processes, pytest.mark.tf]
if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("needs TensorFlow", allow_module_level=True)


def coordinate_on_all_ranks() -> float:
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    coordinator = tf.distribute.coordinator.ClusterCoordinator(tf.distribute.ParameterServerStrategy(resolver))
    one = coordinator.schedule(tf.function(lambda: tf.ones(())))
    coordinator.join()
    return float(one.fetch())


def test_a_worker_or_server_that_makes_the_chiefs_strategy_gets_an_error() -> None:
    with lab.Group({"chief": 1, "worker": 1, "ps": 1}, runtime="tensorflow", timeout_s=200) as group:
        with pytest.raises(lab.RankError, match="belongs to the chief") as failed:
            group.run(coordinate_on_all_ranks)
        assert failed.value.rank in (1, 2)
        assert "SIGSEGV" not in str(failed.value)
        assert group["chief"].run(coordinate_on_all_ranks).results == [1.0]
