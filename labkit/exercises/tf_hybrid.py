"""Exercises of lesson 12: an epoch's arithmetic, a training loop for all replicas, and the loop of a chief."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from labkit.errors.exceptions import RankError
from labkit.exercises.explained import explaining
from labkit.exercises.judging import AnswerError, Exercise, OnRanks, Results, showing, takes_number_for_list, whole_number

__all__ = ["EXERCISES", "EXPLAINED"]

LESSON = "12_tf_hybrid"
TOLERANCE = 1e-9  # relative, in double precision
WORKERS, DEVICES = 2, 2
PER_REPLICA, FEATURES, STEPS, RATE = 2, 3, 3, 0.1  # of hybrid_train
BATCHES, EPOCHS = 4, 3  # of run_epochs
# TensorFlow's messages after common mistakes, and what they mean here.
EXPLAINED = (
    ("name 'tf' is not defined", "`tf` is not defined in the ranks: begin with `import tensorflow as tf`"),
    (
        "must be of the same length as values",
        "a per-replica result is no number: strategy.reduce('SUM', result, axis=None) adds the replicas' parts up",
    ),
    (
        "argument must be a string or a real number, not 'PerReplica'",
        "a per-replica result is no number: strategy.reduce('SUM', result, axis=None) adds the replicas' parts up",
    ),
    (
        "requires being in cross-replica context",
        'the function already runs in a replica: use tf.distribute.get_replica_context().all_reduce("SUM", ...) there',
    ),
    ("'ScheduledResult'", "schedule returns at once, so its result is no number yet: result.fetch() waits for it"),
)


# plan_epoch


def _plan_epoch(answer: Callable[..., Any], _: OnRanks) -> str:
    cases = [(1000, 8, [2, 2]), (1536, 16, [1]), (1000, 8, [4, 1, 2]), (70, 16, [2, 2, 2])]
    cases += [(random.randint(300, 999), random.randint(2, 9), [random.randint(1, 4) for _ in range(3)]) for _ in range(5)]
    for examples, per_replica, devices in cases:
        with showing(f"plan_epoch({examples}, {per_replica}, {devices})"):
            try:
                given = answer(examples, per_replica, list(devices))
            except RankError as error:
                if takes_number_for_list(error.failures[0].headline):
                    raise AnswerError("devices is a list: the number of devices of each worker, such as [2, 2]") from None
                raise
            _judge_plan(given, examples, per_replica, devices)
    return "Every device counts, only full steps are made, and each worker reads its share of them."


def _judge_plan(given: Any, examples: int, per_replica: int, devices: Sequence[int]) -> None:
    """Judge one plan.

    Raises:
        AnswerError: it is wrong.
    """
    details = (f"returned {given}",)
    if not isinstance(given, (tuple, list)) or len(given) != 3:
        raise AnswerError("expected three things: the global batch, the number of steps, and a list", *details)
    batch, steps, shares = given
    if isinstance(shares, Integral) or not hasattr(shares, "__len__") or len(shares) != len(devices):
        raise AnswerError("the third is a list with a number for each worker: append one in a loop over devices", *details)
    expected = per_replica * sum(devices)
    if batch != expected:
        if batch == per_replica * len(devices) != expected:
            raise AnswerError("the global batch has one part for each worker, and should have one for each device", *details)
        if batch == per_replica:
            raise AnswerError("that is the batch of one replica; the global batch is that of all devices together", *details)
        raise AnswerError("the global batch is per_replica × the number of all devices", *details)
    if steps != examples // expected:
        if steps == math.ceil(examples / expected):
            raise AnswerError("the last step is not full: round down", *details)
        if steps == examples / expected:
            raise AnswerError("a step is made or not: only whole steps count (//)", *details)
        raise AnswerError("the number of full steps is examples // the global batch", *details)
    right = [per_replica * own * steps for own in devices]
    if list(shares) != right:
        if list(shares) == [per_replica * own for own in devices]:
            raise AnswerError("these are the examples of one step: an epoch has several", *details)
        if list(shares) == [per_replica * steps for _ in devices]:
            raise AnswerError("each worker reads as much as one replica here: count its devices", *details)
        if math.isclose(sum(shares), examples) or sum(shares) > sum(right):
            raise AnswerError("the examples that are left over after the last full step are read by nobody", *details)
        raise AnswerError("worker i reads per_replica × devices[i] examples in each step", *details)
    if None in map(whole_number, (batch, steps, *shares)):
        raise AnswerError("all results are whole numbers: `/` gives a float, `//` a whole number", *details)


# hybrid_train


class _Trained(NamedTuple):
    """What one worker found.

    Args:
        losses: what the student returned; as text, if it is no list of numbers.
        copies: the weight on each of this worker's devices.
        distributed: whether the strategy has distributed a dataset.
    """

    losses: list[float] | str
    copies: list[list[float]]
    distributed: bool


def _problem(seed: int) -> tuple[Any, Any, Any]:
    """Make inputs (steps, batch, d), targets (steps, batch) and the first weight (d,)."""
    generator = np.random.default_rng(seed)
    size = PER_REPLICA * WORKERS * DEVICES
    return generator.normal(size=(STEPS, size, FEATURES)), generator.normal(size=(STEPS, size)), generator.normal(size=FEATURES)


def _train_on_rank(answer: Callable[..., Any], seed: int) -> _Trained:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    inputs, targets, start = _problem(seed)
    with strategy.scope():
        weight = tf.Variable(start)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    data = tf.data.Dataset.from_tensor_slices((inputs, targets)).repeat().unbatch().batch(targets.shape[1])
    asked = _distributed(strategy)
    losses = answer(strategy, weight, data.with_options(options), targets.shape[1], STEPS, RATE)
    copies = [part.numpy().tolist() for part in strategy.experimental_local_results(weight)]
    try:
        return _Trained([float(loss) for loss in losses], copies, bool(asked))
    except (TypeError, ValueError):
        kind = type(losses).__name__
        inner = {type(loss).__name__ for loss in losses} if isinstance(losses, (list, tuple)) else set()
        return _Trained(f"{kind} of {' and '.join(sorted(inner))}" if inner else kind, copies, bool(asked))


def _distributed(strategy: Any) -> list[str]:
    """Return a list to which the strategy adds the name of each method that has distributed a dataset."""
    asked: list[str] = []

    def noted(name: str, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        asked.append(name)
        return method(*args, **options)

    for name in ("experimental_distribute_dataset", "distribute_datasets_from_function"):
        setattr(strategy, name, functools.partial(noted, name, getattr(strategy, name)))
    return asked


def _serial(seed: int, factor: float = 1.0) -> tuple[list[float], Any]:
    """Return the losses and the last weight of one device whose gradients are multiplied by a factor."""
    inputs, targets, weight = _problem(seed)
    losses = []
    for x, y in zip(inputs, targets, strict=True):
        rest = x @ weight - y
        losses.append(float(np.mean(rest**2)))
        weight = weight - factor * RATE * 2 * x.T @ rest / len(y)
    return losses, weight


def _near(a: Any, b: Any) -> bool:
    return np.shape(a) == np.shape(b) and bool(np.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE))


def _hybrid_train(answer: Callable[..., Any], on: OnRanks) -> str:
    seed, size = random.randrange(10**6), PER_REPLICA * WORKERS * DEVICES
    with showing(
        f"hybrid_train(strategy, weight, data, {size}, {STEPS}, {RATE}) on {WORKERS} workers with {DEVICES} devices each"
    ):
        results = explaining(on, EXPLAINED, runtime="tensorflow")(WORKERS, _train_on_rank, answer, seed, devices_per_rank=DEVICES)
        _judge_trained(results, seed)
    return "Four replicas in two processes train as one device with the whole batch would."


def _judge_trained(results: Results, seed: int) -> None:
    ranks: list[_Trained] = list(results)
    losses, weight = _serial(seed)
    copies = [copy for rank in ranks for copy in rank.copies]
    _judge_copies(copies, weight, seed, distributed=ranks[0].distributed)
    got = ranks[0].losses
    if isinstance(got, str):
        raise AnswerError(
            "expected a list of numbers: strategy.reduce adds the parts of all replicas up, float(...) makes a number of it",
            f"returned {got}",
        )
    details = (f"returned {_short(got)}", f"expected {_short(losses)}")
    if len(got) != STEPS:
        raise AnswerError(f"expected a loss for each of the {STEPS} steps, got {len(got)}", *details)
    if all(_near(rank.losses, losses) for rank in ranks):
        exchanged = [span for name in ("all_reduce", "all_gather") for span in results.trace.filter(name=name)]
        if not any(span.nbytes >= FEATURES * 8 or not span.sized for span in exchanged):  # of a loss, it has 8 bytes
            raise AnswerError(
                "the numbers are right, but the replicas never exchanged a gradient: every worker computed the whole batch. "
                "Each of the four replicas gets a quarter of it: distribute the dataset, and run the step on the strategy"
            )
        return
    ratio = float(np.mean(np.divide(got, losses)))
    if _near(got, np.multiply(ratio, losses)):
        if not ranks[0].distributed:
            raise AnswerError(
                f"the losses are {ratio:.3g} times the expected ones: every replica computed the whole batch. Each of the four "
                "replicas gets a quarter of it: distribute the dataset",
                *details,
            )
        raise AnswerError(
            f"the weights are right, the losses are {ratio:.3g} times the expected ones: each replica divides its sum by the "
            "global batch, and the parts are added up",
            *details,
        )
    if any(not _near(rank.losses, got) for rank in ranks[1:]):
        raise AnswerError("the workers return different losses: add the replicas' parts up with strategy.reduce", *details)
    raise AnswerError("the weights are right, and the losses are not those of the whole batch before each update", *details)


def _judge_copies(copies: list[list[float]], weight: Any, seed: int, *, distributed: bool) -> None:
    """Judge the replicas' weights.

    Raises:
        AnswerError: they are not those of one device.
    """
    replicas = WORKERS * DEVICES
    details = (*(f"replica {i}: {_short(copy)}" for i, copy in enumerate(copies)), f"one device: {_short(weight)}")
    if all(_near(copy, weight) for copy in copies):
        return
    if all(_near(copy, _problem(seed)[2]) for copy in copies):
        raise AnswerError("the weight has not changed: update it with weight.assign_sub(rate * gradient)", *details)
    if not all(_near(copy, copies[0]) for copy in copies):
        raise AnswerError(
            "the replicas have drifted apart: each used its own gradient. Sum the gradients over all replicas before the update",
            *details,
        )
    for factor in (replicas, 1 / replicas, DEVICES, WORKERS):
        if all(_near(copy, _serial(seed, factor)[1]) for copy in copies):
            if factor < 1:
                cause = "each replica has divided by the global batch already, so the gradients are summed, not averaged"
            elif factor == replicas and not distributed:
                cause = "every replica got the whole batch, since nothing has distributed the dataset"
            else:
                cause = (
                    "the replicas' losses are summed, so each divides by the global batch; a mean over its own examples is too "
                    "large"
                )
            raise AnswerError(f"the gradients are {factor:g} times those of one device: {cause}", *details)
    raise AnswerError(
        "the replicas agree, but not with one device. Does strategy.experimental_distribute_dataset divide the batches, and "
        "are there exactly `steps` updates?",
        *details,
    )


def _short(numbers: Sequence[float]) -> str:
    return "[" + ", ".join(f"{number:.4f}" for number in numbers[:6]) + (", ...]" if len(numbers) > 6 else "]")


# run_epochs


class _Watched:
    """A coordinator that counts what the student's function calls.

    Args:
        coordinator: TensorFlow's.
    """

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator
        self.scheduled = 0
        self.waits: list[int] = []  # how many calls had been scheduled at each wait, by a join or by the first fetch
        self.open: list[int] = []  # of each call, how many earlier ones the student did not know to be done
        self._done: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coordinator, name)

    def schedule(self, fn: Any, args: Any = None, kwargs: Any = None) -> Any:
        if args is not None and not isinstance(args, (tuple, list)):
            raise TypeError("schedule's args is a tuple of arguments: args=(batch,)")
        self.open.append(self.scheduled - len(self._done))
        self.scheduled += 1
        return ScheduledResult(self, self._coordinator.schedule(fn, args=args, kwargs=kwargs), self.scheduled)

    def join(self) -> None:
        self._coordinator.join()
        self.done(range(1, self.scheduled + 1))

    def done(self, numbers: Iterable[int]) -> None:
        """Note that the student has waited for some calls."""
        if not self._done.issuperset(numbers) and self.waits[-1:] != [self.scheduled]:
            self.waits.append(self.scheduled)
        self._done.update(numbers)

    def fetch(self, value: Any) -> Any:
        return value.fetch() if isinstance(value, ScheduledResult) else [self.fetch(part) for part in value]


class ScheduledResult:
    """A result that notes when it is fetched, which waits for it. Errors that the student sees contain this name."""

    def __init__(self, watched: _Watched, value: Any, number: int) -> None:
        self._watched, self._value, self._number = watched, value, number

    def fetch(self) -> Any:
        value = self._value.fetch()
        self._watched.done([self._number])
        return value

    def get(self) -> Any:
        return self.fetch()


def _epochs_on_chief(answer: Callable[..., Any], losses: list[float]) -> tuple[Any, int, int, list[int], list[int]]:
    """Return what the student returned, the calls of `step` anywhere, those scheduled, the waits, the open calls."""
    import tensorflow as tf

    strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        calls = tf.Variable(0)

    def step(batch: object) -> object:
        calls.assign_add(1)
        return tf.reduce_mean(batch)

    watched = _Watched(coordinator)
    batches = [tf.constant([loss, loss]) for loss in losses]
    got = answer(watched, tf.function(step), batches, EPOCHS)
    coordinator.join()
    if isinstance(got, (list, tuple)):
        got = [float(value) if np.ndim(value) == 0 else [float(v) for v in value] for value in map(_fetched, got)]
    elif got is not None:
        got = float(got)
    return got, int(calls.numpy()), watched.scheduled, watched.waits, watched.open


def _fetched(value: Any) -> Any:
    if isinstance(value, ScheduledResult):
        raise TypeError("float() argument must be a string or a real number, not 'ScheduledResult'")
    return value


def _run_epochs(answer: Callable[..., Any], on: OnRanks) -> str:
    losses = [round(random.uniform(1, 9), 2) for _ in range(BATCHES)]
    jobs = {"chief": 1, "worker": 2, "ps": 1}
    with showing(f"run_epochs(coordinator, step, batches, {EPOCHS}) with {BATCHES} batches"):
        _judge_epochs(losses, *explaining(on, EXPLAINED, runtime="tensorflow")(jobs, _on_chief_only, answer, losses)[0])
    return "All workers are busy within an epoch, and no epoch begins before the one before it is done."


def _judge_epochs(losses: list[float], got: Any, calls: int, scheduled: int, waits: list[int], unfinished: list[int]) -> None:
    expected = [sum(losses) / BATCHES] * EPOCHS
    details = (f"batches with losses {losses}, {EPOCHS} epochs", f"returned {got}")
    if not scheduled:
        raise AnswerError("nothing was scheduled, so no worker had anything to do", *details)
    if scheduled != BATCHES * EPOCHS:
        raise AnswerError(f"expected {BATCHES * EPOCHS} scheduled calls, {BATCHES} in each epoch, got {scheduled}", *details)
    if calls != scheduled:
        raise AnswerError("the chief also called step itself: only workers should", *details)
    if len(waits) > EPOCHS:
        raise AnswerError(
            "the chief waits after each call (join or fetch), so one worker is always idle: schedule all batches first, and "
            "wait then",
            f"waited {len(waits)} times in {EPOCHS} epochs",
        )
    if waits != [BATCHES * (epoch + 1) for epoch in range(EPOCHS)] or any(unfinished[::BATCHES]):
        raise AnswerError(
            "the next epoch begins before all batches of this one are done: who waits between two epochs?", *details
        )
    if not isinstance(got, list) or not all(isinstance(value, float) for value in got):
        raise AnswerError("expected a list with one number for each epoch, the mean of its losses", *details)
    if len(got) != EPOCHS:
        raise AnswerError(f"expected {EPOCHS} numbers, one for each epoch, got {len(got)}", *details)
    if not np.allclose(got, expected, rtol=1e-5):
        if np.allclose(got, np.multiply(expected, BATCHES), rtol=1e-5):
            raise AnswerError("these are sums: divide by the number of batches", *details)
        if np.allclose(got, losses[-1], rtol=1e-5):
            raise AnswerError("these are the losses of the last batch: take the mean over all batches of the epoch", *details)
        raise AnswerError("these are not the means of the epochs' losses", *details, f"expected {expected}")


def _on_chief_only(answer: Callable[..., Any], losses: list[float]) -> Any:
    """Serve on workers and parameter servers until the chief has finished."""
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type != "chief":
        tf.distribute.Server(resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id).join()
    return _epochs_on_chief(answer, losses)


EXERCISES = (
    Exercise(
        "plan_epoch",
        LESSON,
        "plan_epoch(examples, per_replica, devices), worker i having devices[i] devices, returns the global batch, the number "
        "of full steps in an epoch, and a list with the number of examples that each worker reads in these steps.",
        _plan_epoch,
    ),
    Exercise(
        "hybrid_train",
        LESSON,
        "hybrid_train(strategy, weight, data, global_batch, steps, rate) runs on every worker: make `steps` steps on the "
        "distributed data, weight -= rate * gradient of the mean of (x·weight - y)² over the global batch; return the losses.",
        _hybrid_train,
    ),
    Exercise(
        "run_epochs",
        LESSON,
        "run_epochs(coordinator, step, batches, epochs) runs on the chief: in each epoch schedule step(batch) for all batches "
        "at the same time, wait until all are done, and return the list of the epochs' mean losses.",
        _run_epochs,
    ),
)
