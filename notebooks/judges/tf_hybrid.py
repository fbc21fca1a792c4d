"""Exercises of lesson 12: an epoch's arithmetic, a training loop for all replicas, the loop of a chief."""

from __future__ import annotations

import functools
import math
import os
import signal
import tempfile
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

from labkit.errors.exceptions import RankError
from labkit.errors.exit_reasons import Cause
from labkit.teaching.exercises.comparisons import equal, expect, listing, whole_number, wrong_if
from labkit.teaching.exercises.exercise import NUMBER_FOR_LIST, Results, exercise

LESSON = "12_tf_hybrid"
_near = functools.partial(equal, within=1e-9)  # in double precision
WORKERS, DEVICES = 2, 2
PER_REPLICA, FEATURES, STEPS, RATE = 2, 3, 3, 0.1  # of hybrid_train
BATCHES, EPOCHS = 4, 3  # of run_epochs
# TensorFlow's messages after common mistakes, and what they mean here.
PER_REPLICA_RESULT = (
    "a per-replica result is no number: strategy.reduce('SUM', result, axis=None) adds the replicas' parts up"
)
EXPLAINED = {
    "name 'tf' is not defined": "`tf` is not defined in the ranks: begin with `import tensorflow as tf`",
    "must be of the same length as values": PER_REPLICA_RESULT,
    "argument must be a string or a real number, not 'PerReplica'": PER_REPLICA_RESULT,
    "requires being in cross-replica context": "the function already runs in a replica: use "
        'tf.distribute.get_replica_context().all_reduce("SUM", ...) there',
    "'ScheduledResult'":
        "schedule returns at once, so its result is no number yet: result.fetch() waits for it",
}


def _plans(random: Random) -> list[tuple[int, int, list[int]]]:
    cases = [(1000, 8, [2, 2]), (1536, 16, [1]), (1000, 8, [4, 1, 2]), (70, 16, [2, 2, 2])]
    for _ in range(5):
        devices = [random.randint(1, 4) for _ in range(3)]
        cases.append((random.randint(300, 999), random.randint(2, 9), devices))
    return cases


@exercise(
    LESSON, "Every device counts, only full steps are made, and each worker reads its share of them.", _plans,
    errors=dict.fromkeys(
        NUMBER_FOR_LIST, "devices is a list: the number of devices of each worker, such as [2, 2]"
    ),
)
def plan_epoch(answer: Any, examples: int, per_replica: int, devices: list[int]) -> None:
    """plan_epoch(examples, per_replica, devices), worker i having devices[i] devices, returns the global
    batch, the number of full steps in an epoch, and a list with the number of examples that each worker reads
    in these steps."""
    given = answer(examples, per_replica, devices)
    shown = f"returned {given}"
    wrong_if(not isinstance(given, (tuple, list)) or len(given) != 3,
             "expected three things: the global batch, the number of steps, and a list", "", shown)
    batch, steps, shares = given
    of_each = not isinstance(shares, Integral) and hasattr(shares, "__len__") and len(shares) == len(devices)
    wrong_if(not of_each, "the third is a list with a number for each worker",
             "append one in a loop over devices", shown)
    whole = per_replica * sum(devices)
    expect(batch, whole, [
        (per_replica * len(devices), "the global batch has one part for each worker",
         "it has one for each device"),
        (per_replica, "that is the batch of one replica; the global batch is that of all devices together"),
    ], "that is not the global batch: which devices take part in a step?",
       "it is per_replica × the number of all devices", shown)
    expect(steps, examples // whole, [
        (-(-examples // whole), "the last step is not full", "round down"),
        (examples / whole, "a step is made or not, and only whole steps count", "`//` rounds down"),
    ], "that is not the number of full steps: how often do the examples fill a global batch?",
       "examples // the global batch", shown)
    right = [per_replica * own * steps for own in devices]
    otherwise = "those are not the examples of each worker: how many devices has it?"
    if sum(shares) > sum(right):
        otherwise = "the examples that are left over after the last full step are read by nobody"
    expect(list(shares), right, [
        ([per_replica * own for own in devices], "these are the examples of one step: an epoch has several"),
        ([per_replica * steps for _ in devices], "each worker reads as much as one replica here",
         "count its devices"),
    ], otherwise, "worker i reads per_replica × devices[i] examples in each step", shown)
    wrong_if(None in map(whole_number, (batch, steps, *shares)),
             "all results are whole numbers: `/` gives a float, `//` a whole number", "", shown)


class _Trained(NamedTuple):
    """What one worker found."""

    losses: list[float] | str  # what the student returned; as text, if it is no list of numbers
    copies: list[list[float]]  # the weight on each of this worker's devices
    distributed: bool  # whether the strategy has distributed a dataset


def _problem(seed: int) -> tuple[Any, Any, Any]:
    """Make inputs (steps, batch, d), targets (steps, batch) and the first weight (d,)."""
    generator = np.random.default_rng(seed)
    size = PER_REPLICA * WORKERS * DEVICES
    inputs = generator.normal(size=(STEPS, size, FEATURES))
    return inputs, generator.normal(size=(STEPS, size)), generator.normal(size=FEATURES)


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
        inner = {type(loss).__name__ for loss in losses} if isinstance(losses, (list, tuple)) else set()
        kind = type(losses).__name__ + (f" of {' and '.join(sorted(inner))}" if inner else "")
        return _Trained(kind, copies, bool(asked))


def _distributed(strategy: Any) -> list[Any]:
    """Return a list to which the strategy adds each method that has distributed a dataset."""
    asked: list[Any] = []

    def noted(method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        asked.append(method)
        return method(*args, **options)

    for name in ("experimental_distribute_dataset", "distribute_datasets_from_function"):
        setattr(strategy, name, functools.partial(noted, getattr(strategy, name)))
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


QUARTERS = "each of the four replicas gets a quarter of it: distribute the dataset"


@exercise(
    LESSON, "Four replicas in two processes train as one device with the whole batch would.",
    lambda random: [(random.getrandbits(30),)], on_ranks=_train_on_rank, ranks=WORKERS, runtime="tensorflow",
    devices_per_rank=DEVICES, errors=EXPLAINED,
    call=f"hybrid_train(strategy, weight, data, {PER_REPLICA * WORKERS * DEVICES}, {STEPS}, {RATE}) on "
         f"{WORKERS} workers with {DEVICES} devices each",
)
def hybrid_train(results: Results, seed: int) -> None:
    """hybrid_train(strategy, weight, data, global_batch, steps, rate) runs on every worker: make `steps`
    steps on the distributed data, weight -= rate * gradient of the mean of (x·weight - y)² over the global
    batch; return the losses."""
    ranks: list[_Trained] = list(results)
    losses, weight = _serial(seed)
    copies = [copy for rank in ranks for copy in rank.copies]
    _judge_copies(copies, weight, seed, distributed=ranks[0].distributed)
    got: Any = ranks[0].losses
    wrong_if(isinstance(got, str), "expected a list of numbers",
             "strategy.reduce adds the parts of all replicas up, float(...) makes a number of it",
             f"returned {got}")
    shown = f"returned {_short(got)}", f"expected {_short(losses)}"
    wrong_if(len(got) != STEPS, f"expected a loss for each of the {STEPS} steps, got {len(got)}", "", *shown)
    if all(_near(rank.losses, losses) for rank in ranks):
        exchanged = [span for name in ("all_reduce",
                                       "all_gather") for span in results.trace.filter(name=name)]
        # An exchange of a loss has 8 bytes.
        wrong_if(not any(span.nbytes >= FEATURES * 8 or not span.sized for span in exchanged),
                 "the numbers are right, but the replicas never exchanged a gradient: every worker computed "
                 "the whole batch",
                 f"{QUARTERS}, and run the step on the strategy")
        return
    ratio = float(np.mean(np.divide(got, losses)))
    scaled = _near(got, np.multiply(ratio, losses))
    wrong_if(scaled and not ranks[0].distributed,
             f"the losses are {ratio:.3g} times the expected ones: every replica computed the whole batch",
             QUARTERS, *shown)
    wrong_if(scaled,
             f"the weights are right, the losses are {ratio:.3g} times the expected ones: each replica "
             "divides its sum by the global batch, and the parts are added up", "", *shown)
    wrong_if(any(not _near(rank.losses, got) for rank in ranks[1:]), "the workers return different losses",
             "add the replicas' parts up with strategy.reduce", *shown)
    wrong_if(True,
             "the weights are right, and the losses are not those of the whole batch before each update",
             "", *shown)


def _judge_copies(copies: list[list[float]], weight: Any, seed: int, *, distributed: bool) -> None:
    """Judge the replicas' weights."""

    def all_near(other: Any) -> bool:
        return all(_near(copy, other) for copy in copies)

    if all_near(weight):
        return
    replicas = WORKERS * DEVICES
    shown = [f"replica {i}: {_short(copy)}" for i, copy in enumerate(copies)]
    shown.append(f"one device: {_short(weight)}")
    wrong_if(all_near(_problem(seed)[2]), "the weight has not changed",
             "update it with weight.assign_sub(rate * gradient)", *shown)
    wrong_if(not all_near(copies[0]), "the replicas have drifted apart: each used its own gradient",
             "sum the gradients over all replicas before the update", *shown)
    for factor in (replicas, 1 / replicas, DEVICES, WORKERS):
        cause = "the replicas' losses are summed"
        cure = "divide each by the global batch; its own mean is too large"
        if factor < 1:
            cause = "each replica has divided by the global batch already"
            cure = "sum the gradients, do not average them"
        elif factor == replicas and not distributed:
            cause, cure = "every replica got the whole batch", QUARTERS
        wrong_if(all_near(_serial(seed, factor)[1]),
                 f"the gradients are {factor:g} times those of one device: {cause}", cure, *shown)
    wrong_if(True,
             "the replicas agree, but not with one device. Does strategy.experimental_distribute_dataset "
             "divide the batches, and are there exactly `steps` updates?", "", *shown)


def _short(numbers: Sequence[float]) -> str:
    inside = ", ".join(f"{number:.4f}" for number in numbers[:6])
    return f"[{inside}, ...]" if len(numbers) > 6 else f"[{inside}]"


class _Watched:
    """A coordinator that counts what the student's function calls."""

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator
        self.scheduled = 0
        self.waits: list[int] = []  # how many calls were scheduled at each wait, by a join or the first fetch
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
    """A result that notes when it is fetched, which waits for it. The student sees this name in errors."""

    def __init__(self, watched: _Watched, value: Any, number: int) -> None:
        self._watched, self._value, self._number = watched, value, number

    def fetch(self) -> Any:
        """Wait for the value."""
        value = self._value.fetch()
        self._watched.done([self._number])
        return value

    get = fetch


def _epochs_on_chief(
    answer: Callable[..., Any], losses: list[float]
) -> tuple[Any, int, int, list[int], list[int]]:
    """Return what the student returned, all calls of `step`, those scheduled, the waits, the open calls."""
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
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
        values = list(map(_fetched, got))
        got = [float(value) if np.ndim(value) == 0 else [float(v) for v in value] for value in values]
    elif got is not None:
        got = float(got)
    return got, int(calls.numpy()), watched.scheduled, watched.waits, watched.open


def _fetched(value: Any) -> Any:
    if isinstance(value, ScheduledResult):
        raise TypeError("float() argument must be a string or a real number, not 'ScheduledResult'")
    return value


def _on_chief_only(answer: Callable[..., Any], losses: list[float]) -> Any:
    """Serve on workers and parameter servers until the chief has finished."""
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type != "chief":
        job, task = resolver.task_type, resolver.task_id
        tf.distribute.Server(resolver.cluster_spec(), job_name=job, task_index=task).join()
    return _epochs_on_chief(answer, losses)


@exercise(
    LESSON, "All workers are busy within an epoch, and no epoch begins before the one before it is done.",
    lambda random: [([round(random.uniform(1, 9), 2) for _ in range(BATCHES)],)], on_ranks=_on_chief_only,
    ranks={"chief": 1, "worker": 2, "ps": 1}, runtime="tensorflow", errors=EXPLAINED,
    call=f"run_epochs(coordinator, step, batches, {EPOCHS}) with {BATCHES} batches",
)
def run_epochs(results: Results, losses: list[float]) -> None:
    """run_epochs(coordinator, step, batches, epochs) runs on the chief: in each epoch schedule step(batch)
    for all batches at the same time, wait until all are done, and return the list of the epochs' mean
    losses."""
    got, calls, scheduled, waits, unfinished = results[0]
    right = [sum(losses) / BATCHES] * EPOCHS
    shown = f"batches with losses {losses}, {EPOCHS} epochs", f"returned {got}"
    wrong_if(not scheduled, "nothing was scheduled, so no worker had anything to do", "", *shown)
    wrong_if(scheduled != BATCHES * EPOCHS,
             f"expected {BATCHES * EPOCHS} scheduled calls, {BATCHES} in each epoch, got {scheduled}",
             "", *shown)
    wrong_if(calls != scheduled, "the chief also called step itself: only workers should", "", *shown)
    wrong_if(len(waits) > EPOCHS,
             "the chief waits after each call (join or fetch), so one worker is always idle",
             "schedule all batches first, and wait then", f"waited {len(waits)} times in {EPOCHS} epochs")
    wrong_if(waits != [BATCHES * (epoch + 1) for epoch in range(EPOCHS)] or any(unfinished[::BATCHES]),
             "the next epoch begins before all batches of this one are done: who waits between two epochs?",
             "", *shown)
    wrong_if(not isinstance(got, list) or not all(isinstance(value, float) for value in got),
             "expected a list with one number for each epoch, the mean of its losses", "", *shown)
    wrong_if(len(got) != EPOCHS, f"expected {EPOCHS} numbers, one for each epoch, got {len(got)}", "", *shown)
    expect(got, right, [
        ([BATCHES * mean for mean in right], "these are sums, not means", "divide by the number of batches"),
        ([losses[-1]] * EPOCHS, "you returned the losses of the last batch",
         "take the mean over all batches of the epoch"),
    ], "these are not the means of the epochs' losses", "", *shown, f"expected {right}",
       same=functools.partial(equal, within=1e-5))


TRAINED, EVERY, DIES_AT = 8, 2, 5  # killed in step 5, when the checkpoint of 4 finished steps is the latest
FINISHED = DIES_AT // EVERY * EVERY
COUNTER = "step/.ATTRIBUTES/VARIABLE_VALUE"  # the name of `checkpoint.step` in a checkpoint


class _Resumed(NamedTuple):
    """What one process found."""

    stored: int  # the finished steps that the latest checkpoint counted at the start; -1 without this number
    trained: list[int]  # the batches
    weight: float  # at the end
    counted: int  # the finished steps that `checkpoint.step` counts at the end


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
    "Killed in the middle, it continues from the latest checkpoint and ends like a training without a death.",
    errors=EXPLAINED, call=f"train_safely(folder, checkpoint, data, train_step, {TRAINED}, {EVERY})",
)
def train_safely(answer: Any) -> None:
    """train_safely(folder, checkpoint, data, train_step, steps, every): restore the latest checkpoint in
    folder, if any; train the batches that are still due until `steps` are done in all; count them in
    checkpoint.step and save after every `every` steps."""
    with tempfile.TemporaryDirectory() as parent:
        folder, log = Path(parent, "checkpoints"), Path(parent, "saves.log")
        folder.mkdir()

        def run(dies_at: int | None) -> _Resumed:
            arguments = answer, str(folder), str(log), dies_at
            results: list[_Resumed] = answer.on(1, _train_and_die, *arguments, runtime="tensorflow")
            return results[0]

        try:
            alive = run(DIES_AT)
        except RankError as error:
            if error.failures[0].cause is not Cause.KILLED:
                raise
        else:
            wrong_if(True, f"it never trained batch {DIES_AT}",
                     "call train_step(batch) for each batch of data until `steps` are done",
                     f"given steps = {TRAINED}; trained the batches {alive.trained}")
        _judge_saves(folder, [int(line) for line in log.read_text().split()] if log.exists() else [])
        _judge_resumed(run(None))


def _judge_saves(folder: Path, saved: list[int]) -> None:
    """Judge what the first process saved before it was killed: after how many steps, and where."""
    due = list(range(EVERY, DIES_AT, EVERY))
    killed = f"killed in step {DIES_AT}, every = {EVERY}"
    shown = killed, f"it saved when {listing(saved) or 'no'} steps were done, expected {listing(due)}"
    saves = any(folder.glob("*.index"))
    beside = sorted(folder.parent.glob("*.index"))
    wrong_if(beside and not saves, "the checkpoints are beside the folder",
             "the prefix is the beginning of a file's path: let it begin with the folder and a slash",
             *(path.name for path in beside))
    wrong_if(not saves, "killed in the middle, it left no checkpoint in the folder",
             "save after every `every` steps, not only at the end", killed)
    wrong_if(saved and saved == list(range(1, len(saved) + 1)),
             f"it saves after every step, not after every {EVERY}",
             "save if checkpoint.step is a multiple of `every`, after it has counted the step", *shown)
    # Nothing: the answer saves another object.
    wrong_if(saved not in ([], due),
             "it does not save when `every` steps are done: how many are done at that moment?",
             "count the step in checkpoint.step first, then ask whether it is a multiple", *shown)


def _judge_resumed(resumed: _Resumed) -> None:
    """Judge the process that starts after the death."""
    stored, trained, weight, counted = resumed
    due, again = list(range(FINISHED, TRAINED)), list(range(TRAINED))
    shown = (
        f"the checkpoint is of {FINISHED} finished steps, steps = {TRAINED}",
        f"it then trained the batches {trained}",
    )
    wrong_if(trained == again and stored == 0,
             "it begins again at batch 0, for the checkpoint says that 0 steps are finished",
             "add 1 to checkpoint.step in every step, before you save", *shown)
    wrong_if(trained == again, "it begins again at batch 0, although the folder has a checkpoint",
             "restore tf.train.latest_checkpoint(folder) before the first step, if there is one", *shown)
    wrong_if(trained == list(range(len(due))),
             "it makes the right number of steps, but reads the data from the beginning",
             "leave out the finished ones: data.skip(...)", *shown)
    wrong_if(trained[: len(due)] == due != trained,
             "it makes too many steps: `steps` counts those before the death as well",
             "stop after steps - finished further steps", *shown)
    wrong_if(trained[:1] == [FINISHED - 1],
             f"batch {FINISHED - 1} is trained twice: the checkpoint of {FINISHED} finished steps says that "
             "fewer are finished",
             "add 1 to checkpoint.step before you save, not afterwards", *shown)
    wrong_if(trained[:1] == [FINISHED + 1],
             f"batch {FINISHED} is left out: checkpoint.step is the number of finished steps",
             f"batches count from 0, so after {FINISHED} steps batch {FINISHED} is the next", *shown)
    wrong_if(trained != due, f"expected the batches {due[0]} to {due[-1]}",
             "leave out as many batches as checkpoint.step says, and stop when `steps` are done", *shown)
    right = 1.0
    for batch in range(TRAINED):
        right = right / 2 + batch
    wrong_if(not math.isclose(weight, right, rel_tol=1e-12),
             "the batches are right, the weight is not that of a training without a death: is it restored "
             "before the first step?",
             "restore the given checkpoint, which holds the weight as well as the step",
             f"weight {weight:.6f}, expected {right:.6f}")
    wrong_if(counted != TRAINED, f"at the end, checkpoint.step counts {counted} finished steps of {TRAINED}",
             "add 1 for each step, not only for those after which you save", *shown)
