"""The sizes of TensorFlow's collectives, where operations of several graphs have the same name."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import labkit as lab
from labkit.plots.flows import flows_of

SMALL, LARGE = 1_000, 250_000  # elements of 4 bytes

pytestmark = [pytest.mark.processes, pytest.mark.tf]
if importlib.util.find_spec("tensorflow") is None:  # found, not imported: the notebook's process runs no TensorFlow
    pytest.skip("needs TensorFlow", allow_module_level=True)


@pytest.fixture(scope="module")
def group() -> Iterator[lab.Group]:
    with lab.Group(2, runtime="tensorflow", devices="cpu") as group:
        yield group


def reduced(strategy: Any, elements: int) -> Any:
    import tensorflow as tf

    return strategy.reduce("SUM", strategy.run(lambda: tf.ones([elements])), axis=None)


def two_functions() -> None:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    small, large = tf.function(lambda: reduced(strategy, SMALL)), tf.function(lambda: reduced(strategy, LARGE))
    for _ in range(3):
        small()
        large()


def one_function_with_two_shapes() -> None:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    both = tf.function(lambda x: strategy.reduce("SUM", strategy.run(lambda: x * 2), axis=None))
    for elements in (SMALL, LARGE) * 3:
        both(tf.ones([elements]))


def functions_in_a_function() -> None:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    small, large = tf.function(lambda: reduced(strategy, SMALL)), tf.function(lambda: reduced(strategy, LARGE))
    outer = tf.function(lambda: tf.reduce_sum(small()) + tf.reduce_sum(large()))
    for _ in range(3):
        outer()


def a_loop_in_a_function() -> None:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    @tf.function
    def looped(elements: int, times: Any) -> Any:
        total = tf.zeros([elements])
        for _ in tf.range(times):
            total += reduced(strategy, elements)
        return total

    looped(SMALL, tf.constant(3))
    looped(LARGE, tf.constant(3))


@pytest.mark.parametrize("program", [two_functions, one_function_with_two_shapes, functions_in_a_function, a_loop_in_a_function])
def test_collectives_of_one_name_have_their_own_sizes(group: lab.Group, program: Callable[[], None]) -> None:
    trace = group.run(program).trace
    for rank in (0, 1):
        sizes = Counter(s.nbytes if s.sized else None for s in trace.filter(name="all_reduce", rank=rank))
        assert sizes == {4 * SMALL: 3, 4 * LARGE: 3}
    in_order = [s.nbytes for s in sorted(trace.filter(name="all_reduce", rank=0), key=lambda s: s.start_ns)]
    pairs = [in_order[:2], in_order[2:4], in_order[4:]]
    if program is a_loop_in_a_function:
        assert in_order == [4 * SMALL] * 3 + [4 * LARGE] * 3
    elif program is not functions_in_a_function:  # there, either of the two may come first
        assert pairs == [[4 * SMALL, 4 * LARGE]] * 3


def fit_with_validation() -> None:
    import keras
    import tensorflow as tf

    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5)])
        model.compile("sgd", "mse", metrics=["mae"])
    data = tf.data.Dataset.from_tensor_slices((tf.ones([32, 6]), tf.zeros([32, 5]))).batch(8)
    model.fit(data, epochs=2, validation_data=data, verbose=0)


def fit_in_mixed_precision() -> None:
    """Keras scales the loss, and applies the gradients in a branch that it skips if one of them is infinite."""
    import keras
    import tensorflow as tf

    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        with tf.distribute.MultiWorkerMirroredStrategy().scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, dtype="float32")])
            model.compile("sgd", "mse")
        model.fit(tf.data.Dataset.from_tensor_slices((tf.ones([32, 6]), tf.zeros([32, 5]))).batch(8), verbose=0)
    finally:
        keras.mixed_precision.set_global_policy("float32")


@pytest.mark.parametrize(("fit", "steps"), [(fit_with_validation, 2 * 4), (fit_in_mixed_precision, 4)])
def test_keras_collectives_have_their_size(group: lab.Group, fit: Callable[[], None], steps: int) -> None:
    trace = group.run(fit).trace
    assert flows_of(trace).unsized == ()
    assert len([s for s in trace.filter(name="all_reduce", rank=0) if s.nbytes == 4 * (6 * 5 + 5)]) == steps
