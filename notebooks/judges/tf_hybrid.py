"""Exercises of lesson 12: an epoch's arithmetic, a training loop for all replicas, and the loop of a chief."""

from __future__ import annotations

import functools
import math
import os
import random
import signal
import tempfile
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from labkit.errors.exceptions import RankError
from labkit.errors.exit_reasons import Cause
from labkit.teaching.exercises.comparisons import equal, listing, whole_number
from labkit.teaching.exercises.judging import (
    NUMBER_FOR_LIST,
    AnswerError,
    Hint,
    OnRanks,
    Results,
    exercise,
    explaining,
    judge_result,
    reject,
    showing,
)

LESSON = "12_tf_hybrid"
TOLERANCE = 1e-9  # relative, in double precision
WORKERS, DEVICES = 2, 2
PER_REPLICA, FEATURES, STEPS, RATE = 2, 3, 3, 0.1  # of hybrid_train
BATCHES, EPOCHS = 4, 3  # of run_epochs
# TensorFlow's messages after common mistakes, and what they mean here.
EXPLAINED: dict[str, Hint] = {
    "name 'tf' is not defined": "`tf` is not defined in the ranks: begin with `import tensorflow as tf`",
    "must be of the same length as values": (
        "a per-replica result is no number: strategy.reduce('SUM', result, axis=None) adds the replicas' parts up"
    ),
    "argument must be a string or a real number, not 'PerReplica'": (
        "a per-replica result is no number: strategy.reduce('SUM', result, axis=None) adds the replicas' parts up"
    ),
    "requires being in cross-replica context": (
        'the function already runs in a replica: use tf.distribute.get_replica_context().all_reduce("SUM", ...) there'
    ),
    "'ScheduledResult'": "schedule returns at once, so its result is no number yet: result.fetch() waits for it",
}
LIST_FOR_NUMBER: dict[str, Hint] = dict.fromkeys(
    NUMBER_FOR_LIST, "devices is a list: the number of devices of each worker, such as [2, 2]"
)


# plan_epoch


@exercise(
    LESSON,
    "plan_epoch(examples, per_replica, devices), worker i having devices[i] devices, returns the global batch, the number "
    "of full steps in an epoch, and a list with the number of examples that each worker reads in these steps.",
    "Every device counts, only full steps are made, and each worker reads its share of them.",
)
def _plan_epoch(answer: Callable[..., Any], _: OnRanks) -> None:
    cases = [(1000, 8, [2, 2]), (1536, 16, [1]), (1000, 8, [4, 1, 2]), (70, 16, [2, 2, 2])]
    cases += [(random.randint(300, 999), random.randint(2, 9), [random.randint(1, 4) for _ in range(3)]) for _ in range(5)]
    for examples, per_replica, devices in cases:
        with showing(f"plan_epoch({examples}, {per_replica}, {devices})"), explaining(LIST_FOR_NUMBER):
            _judge_plan(answer(examples, per_replica, devices), examples, per_replica, devices)


def _judge_plan(given: Any, examples: int, per_replica: int, devices: Sequence[int]) -> None:
    """Judge one plan."""
    details = (f"returned {given}",)
    if not isinstance(given, (tuple, list)) or len(given) != 3:
        raise AnswerError("expected three things: the global batch, the number of steps, and a list", *details)
    batch, steps, shares = given
    if isinstance(shares, Integral) or not hasattr(shares, "__len__") or len(shares) != len(devices):
        cure = "append one in a loop over devices"
        raise AnswerError("the third is a list with a number for each worker", *details, cure=cure)
    whole = per_replica * sum(devices)
    judge_result(
        batch, whole,
        {
            ("the global batch has one part for each worker", "it has one for each device"): per_replica * len(devices),
            "that is the batch of one replica; the global batch is that of all devices together": per_replica,
        },
        ("that is not the global batch: which devices take part in a step?", "it is per_replica × the number of all devices"),
        *details,
    )  # fmt: skip
    judge_result(
        steps, examples // whole,
        {
            ("the last step is not full", "round down"): -(-examples // whole),
            ("a step is made or not, and only whole steps count", "`//` rounds down"): examples / whole,
        },
        ("that is not the number of full steps: how often do the examples fill a global batch?", "examples // the global batch"),
        *details,
    )  # fmt: skip
    right, share = [per_replica * own * steps for own in devices], "worker i reads per_replica × devices[i] examples in each step"
    judge_result(
        list(shares), right,
        {
            "these are the examples of one step: an epoch has several": [per_replica * own for own in devices],
            ("each worker reads as much as one replica here", "count its devices"): [per_replica * steps for _ in devices],
        },
        ("the examples that are left over after the last full step are read by nobody", share)
        if sum(shares) > sum(right) else ("those are not the examples of each worker: how many devices has it?", share),
        *details,
    )  # fmt: skip
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


@exercise(
    LESSON,
    "hybrid_train(strategy, weight, data, global_batch, steps, rate) runs on every worker: make `steps` steps on the "
    "distributed data, weight -= rate * gradient of the mean of (x·weight - y)² over the global batch; return the losses.",
    "Four replicas in two processes train as one device with the whole batch would.",
)
def _hybrid_train(answer: Callable[..., Any], on: OnRanks) -> None:
    seed, size = random.randrange(10**6), PER_REPLICA * WORKERS * DEVICES
    with showing(
        f"hybrid_train(strategy, weight, data, {size}, {STEPS}, {RATE}) on {WORKERS} workers with {DEVICES} devices each"
    ):
        with explaining(EXPLAINED):
            results = on(WORKERS, _train_on_rank, answer, seed, runtime="tensorflow", devices_per_rank=DEVICES)
        _judge_trained(results, seed)


QUARTERS = "each of the four replicas gets a quarter of it: distribute the dataset"


def _judge_trained(results: Results, seed: int) -> None:
    ranks: list[_Trained] = list(results)
    losses, weight = _serial(seed)
    copies = [copy for rank in ranks for copy in rank.copies]
    _judge_copies(copies, weight, seed, distributed=ranks[0].distributed)
    got = ranks[0].losses
    if isinstance(got, str):
        raise AnswerError(
            "expected a list of numbers",
            f"returned {got}",
            cure="strategy.reduce adds the parts of all replicas up, float(...) makes a number of it",
        )
    details = (f"returned {_short(got)}", f"expected {_short(losses)}")
    if len(got) != STEPS:
        raise AnswerError(f"expected a loss for each of the {STEPS} steps, got {len(got)}", *details)
    if all(_near(rank.losses, losses) for rank in ranks):
        exchanged = [span for name in ("all_reduce", "all_gather") for span in results.trace.filter(name=name)]
        if not any(span.nbytes >= FEATURES * 8 or not span.sized for span in exchanged):  # of a loss, it has 8 bytes
            raise AnswerError(
                "the numbers are right, but the replicas never exchanged a gradient: every worker computed the whole batch",
                cure=f"{QUARTERS}, and run the step on the strategy",
            )
        return
    ratio = float(np.mean(np.divide(got, losses)))
    if _near(got, np.multiply(ratio, losses)):
        if not ranks[0].distributed:
            raise AnswerError(
                f"the losses are {ratio:.3g} times the expected ones: every replica computed the whole batch",
                *details,
                cure=QUARTERS,
            )
        raise AnswerError(
            f"the weights are right, the losses are {ratio:.3g} times the expected ones: each replica divides its sum by the "
            "global batch, and the parts are added up",
            *details,
        )
    if any(not _near(rank.losses, got) for rank in ranks[1:]):
        cure = "add the replicas' parts up with strategy.reduce"
        raise AnswerError("the workers return different losses", *details, cure=cure)
    raise AnswerError("the weights are right, and the losses are not those of the whole batch before each update", *details)


def _judge_copies(copies: list[list[float]], weight: Any, seed: int, *, distributed: bool) -> None:
    """Judge the replicas' weights."""
    replicas = WORKERS * DEVICES
    details = (*(f"replica {i}: {_short(copy)}" for i, copy in enumerate(copies)), f"one device: {_short(weight)}")
    if all(_near(copy, weight) for copy in copies):
        return
    if all(_near(copy, _problem(seed)[2]) for copy in copies):
        cure = "update it with weight.assign_sub(rate * gradient)"
        raise AnswerError("the weight has not changed", *details, cure=cure)
    if not all(_near(copy, copies[0]) for copy in copies):
        raise AnswerError(
            "the replicas have drifted apart: each used its own gradient",
            *details,
            cure="sum the gradients over all replicas before the update",
        )
    for factor in (replicas, 1 / replicas, DEVICES, WORKERS):
        if all(_near(copy, _serial(seed, factor)[1]) for copy in copies):
            if factor < 1:
                cause, cure = "each replica has divided by the global batch already", "sum the gradients, do not average them"
            elif factor == replicas and not distributed:
                cause, cure = "every replica got the whole batch", QUARTERS
            else:
                cause, cure = "the replicas' losses are summed", "divide each by the global batch; its own mean is too large"
            raise AnswerError(f"the gradients are {factor:g} times those of one device: {cause}", *details, cure=cure)
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
        """Wait for the value."""
        value = self._value.fetch()
        self._watched.done([self._number])
        return value

    def get(self) -> Any:
        """Wait for the value."""
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


@exercise(
    LESSON,
    "run_epochs(coordinator, step, batches, epochs) runs on the chief: in each epoch schedule step(batch) for all batches "
    "at the same time, wait until all are done, and return the list of the epochs' mean losses.",
    "All workers are busy within an epoch, and no epoch begins before the one before it is done.",
)
def _run_epochs(answer: Callable[..., Any], on: OnRanks) -> None:
    losses = [round(random.uniform(1, 9), 2) for _ in range(BATCHES)]
    jobs = {"chief": 1, "worker": 2, "ps": 1}
    with showing(f"run_epochs(coordinator, step, batches, {EPOCHS}) with {BATCHES} batches"), explaining(EXPLAINED):
        _judge_epochs(losses, *on(jobs, _on_chief_only, answer, losses, runtime="tensorflow")[0])


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
            "the chief waits after each call (join or fetch), so one worker is always idle",
            f"waited {len(waits)} times in {EPOCHS} epochs",
            cure="schedule all batches first, and wait then",
        )
    if waits != [BATCHES * (epoch + 1) for epoch in range(EPOCHS)] or any(unfinished[::BATCHES]):
        raise AnswerError(
            "the next epoch begins before all batches of this one are done: who waits between two epochs?", *details
        )
    if not isinstance(got, list) or not all(isinstance(value, float) for value in got):
        raise AnswerError("expected a list with one number for each epoch, the mean of its losses", *details)
    if len(got) != EPOCHS:
        raise AnswerError(f"expected {EPOCHS} numbers, one for each epoch, got {len(got)}", *details)
    judge_result(
        got, expected,
        {
            ("these are sums, not means", "divide by the number of batches"): [BATCHES * mean for mean in expected],
            ("you returned the losses of the last batch", "take the mean over all batches of the epoch"): [losses[-1]] * EPOCHS,
        },
        "these are not the means of the epochs' losses", *details, f"expected {expected}",
        same=functools.partial(equal, within=1e-5),
    )  # fmt: skip


def _on_chief_only(answer: Callable[..., Any], losses: list[float]) -> Any:
    """Serve on workers and parameter servers until the chief has finished."""
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type != "chief":
        tf.distribute.Server(resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id).join()
    return _epochs_on_chief(answer, losses)


TRAINED, EVERY, DIES_AT = 8, 2, 5  # killed in step 5, when the checkpoint of 4 finished steps is the latest
COUNTER = "step/.ATTRIBUTES/VARIABLE_VALUE"  # the name of `checkpoint.step` in a checkpoint


class _Resumed(NamedTuple):
    """What one process found.

    Args:
        stored: the finished steps that the latest checkpoint counted at the start; -1 if there was no such number.
        trained: the batches.
        weight: the weight at the end.
        counted: the finished steps that `checkpoint.step` counts at the end.
    """

    stored: int
    trained: list[int]
    weight: float
    counted: int


def _train_and_die(answer: Callable[..., Any], folder: str, log: str, dies_at: int | None) -> _Resumed:
    """Train in `folder`, and write into the file `log` after how many steps something was saved."""
    import tensorflow as tf

    class Logged(tf.train.Checkpoint):  # type: ignore[misc]  # TensorFlow has no types
        def _write(self, *args: Any, **options: Any) -> Any:  # called by `save` and by a CheckpointManager
            with Path(log).open("a") as lines:
                lines.write(f"{len(trained)}\n")
            return super()._write(*args, **options)

    weight = tf.Variable(1.0, dtype=tf.float64)
    checkpoint = Logged(step=tf.Variable(0, dtype=tf.int64), weight=weight)
    trained: list[int] = []
    latest, stored = tf.train.latest_checkpoint(folder), -1
    if latest and COUNTER in dict(tf.train.list_variables(latest)):
        stored = int(tf.train.load_variable(latest, COUNTER))

    def train_step(batch: Any) -> None:
        trained.append(int(batch))
        if int(batch) == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        weight.assign(weight / 2 + tf.cast(batch, tf.float64))

    answer(folder, checkpoint, tf.data.Dataset.range(10**6), train_step, TRAINED, EVERY)
    return _Resumed(stored, trained, float(weight.numpy()), int(checkpoint.step.numpy()))


@exercise(
    LESSON,
    "train_safely(folder, checkpoint, data, train_step, steps, every): restore the latest checkpoint in folder, if any; "
    "train the batches that are still due until `steps` are done in all; count them in checkpoint.step and save after "
    "every `every` steps.",
    "Killed in the middle, it continues from the latest checkpoint and ends like a training without a death.",
)
def _train_safely(answer: Callable[..., Any], on: OnRanks) -> None:
    expected = 1.0
    for batch in range(TRAINED):
        expected = expected / 2 + batch
    call = f"train_safely(folder, checkpoint, data, train_step, {TRAINED}, {EVERY})"
    with tempfile.TemporaryDirectory() as parent, showing(call), explaining(EXPLAINED):
        folder, log = Path(parent, "checkpoints"), Path(parent, "saves.log")
        folder.mkdir()
        try:
            (alive,) = on(1, _train_and_die, answer, str(folder), str(log), DIES_AT, runtime="tensorflow")
        except RankError as error:
            if error.failures[0].cause is not Cause.KILLED:
                raise
        else:
            raise AnswerError(
                f"it never trained batch {DIES_AT}",
                f"given steps = {TRAINED}; trained the batches {alive.trained}",
                cure="call train_step(batch) for each batch of data until `steps` are done",
            )
        _judge_saves(folder, [int(line) for line in log.read_text().split()] if log.exists() else [])
        (resumed,) = on(1, _train_and_die, answer, str(folder), str(log), None, runtime="tensorflow")
        _judge_resumed(resumed, expected)


def _judge_saves(folder: Path, saved: list[int]) -> None:
    """Judge what the first process saved before it was killed: after how many steps, and where."""
    due = list(range(EVERY, DIES_AT, EVERY))
    when = f"it saved when {listing(saved) or 'no'} steps were done, expected {listing(due)}"
    details = (f"killed in step {DIES_AT}, every = {EVERY}", when)
    if not any(folder.glob("*.index")):
        if any(folder.parent.glob("*.index")):
            raise AnswerError(
                "the checkpoints are beside the folder",
                *sorted(str(path.relative_to(folder.parent)) for path in folder.parent.glob("*.index")),
                cure="the prefix is the beginning of a file's path: let it begin with the folder and a slash",
            )
        raise AnswerError(
            "killed in the middle, it left no checkpoint in the folder",
            f"killed in step {DIES_AT}, every = {EVERY}",
            cure="save after every `every` steps, not only at the end",
        )
    if saved and saved == list(range(1, len(saved) + 1)):
        cure = "save if checkpoint.step is a multiple of `every`, after it has counted the step"
        raise AnswerError(f"it saves after every step, not after every {EVERY}", *details, cure=cure)
    if saved not in ([], due):  # nothing: the answer saves another object
        hint = "it does not save when `every` steps are done: how many are done at that moment?"
        raise AnswerError(hint, *details, cure="count the step in checkpoint.step first, then ask whether it is a multiple")


def _judge_resumed(resumed: _Resumed, expected: float) -> None:
    """Judge the process that starts after the death."""
    stored, trained, weight, counted = resumed
    first = DIES_AT // EVERY * EVERY
    due = list(range(first, TRAINED))
    details = (f"the checkpoint is of {first} finished steps, steps = {TRAINED}", f"it then trained the batches {trained}")
    again, repeated = list(range(TRAINED)), f"the checkpoint of {first} finished steps says that fewer are finished"
    faults: dict[Hint, bool] = {
        (
            "it begins again at batch 0, for the checkpoint says that 0 steps are finished",
            "add 1 to checkpoint.step in every step, before you save",
        ): trained == again and stored == 0,
        (
            "it begins again at batch 0, although the folder has a checkpoint",
            "restore tf.train.latest_checkpoint(folder) before the first step, if there is one",
        ): trained == again,
        (
            "it makes the right number of steps, but reads the data from the beginning",
            "leave out the finished ones: data.skip(...)",
        ): trained == list(range(len(due))),
        (
            "it makes too many steps: `steps` counts those before the death as well",
            "stop after steps - finished further steps",
        ): trained[: len(due)] == due != trained,
        (
            f"batch {first - 1} is trained twice: {repeated}",
            "add 1 to checkpoint.step before you save, not afterwards",
        ): trained[:1] == [first - 1],
        (
            f"batch {first} is left out: checkpoint.step is the number of finished steps",
            f"batches count from 0, so after {first} steps batch {first} is the next",
        ): trained[:1] == [first + 1],
        (
            f"expected the batches {due[0]} to {due[-1]}",
            "leave out as many batches as checkpoint.step says, and stop when `steps` are done",
        ): trained != due,
    }
    reject(faults, *details)
    if not math.isclose(weight, expected, rel_tol=1e-12):
        raise AnswerError(
            "the batches are right, the weight is not that of a training without a death: is it restored before the first step?",
            f"weight {weight:.6f}, expected {expected:.6f}",
            cure="restore the given checkpoint, which holds the weight as well as the step",
        )
    if counted != TRAINED:
        hint = f"at the end, checkpoint.step counts {counted} finished steps of {TRAINED}"
        raise AnswerError(hint, *details, cure="add 1 for each step, not only for those after which you save")
