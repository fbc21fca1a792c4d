"""The exercises of lesson 05: right answers pass, and wrong ones get an explanation."""

from __future__ import annotations

from answers import Answers

import labkit as lab

answers = Answers()

right, wrong, mutant = answers.of("bubble")


@right
def bubble_of_the_schedule(forward, backward, micro_batches):
    return lab.schedule("gpipe", stages=len(forward), micro_batches=micro_batches, forward=forward, backward=backward).bubble


SHARE = "1 - work / (len(forward) * step)"
SLOWEST = "(max(forward) + max(backward))"
mutant(SHARE, f"torch.tensor({SHARE}, dtype=torch.float64)")  # right
mutant(SHARE, "(len(forward) - 1) / (micro_batches + len(forward) - 1)", "holds for equal stages")
mutant(SHARE, f"100 * ({SHARE})", "right as a percentage")
mutant(SHARE, "(len(forward) * step - work) / work", "relative to the work")
mutant(SHARE, "work / (len(forward) * step)", "the share in which the ranks work")
mutant(SHARE, "len(forward) / (micro_batches + len(forward))", "one stage too many")
mutant(
    SLOWEST,
    "max(f + b for f, b in zip(forward, backward, strict=True))",
    "can belong to different stages",
    cure="take the two maxima separately",
)
mutant(SHARE, "1 - work / step", "one rank's step is compared", cure="s ranks have s times the step")
mutant(SHARE, "len(forward) * step - work", "the idle seconds of all ranks", cure="divide by the seconds of all ranks")
mutant(SHARE, "0.123", "when does the first micro-batch leave")
mutant(SHARE, "'27 %'", "expected one number")


right, wrong, mutant = answers.of("balanced_stages")


@right
def balanced_by_limits(costs, stages):
    """The smallest limit that a greedy filling does not exceed."""
    for limit in range(max(costs), sum(costs) + 1):
        sizes, cost = [0], 0
        for c in costs:
            if cost + c > limit:
                sizes.append(0)
                cost = 0
            sizes[-1] += 1
            cost += c
        if len(sizes) <= stages:
            break
    while len(sizes) < stages:  # fewer stages are enough: divide one
        i = sizes.index(max(sizes))
        sizes[i : i + 1] = [1, sizes[i] - 1]
    return sizes


@wrong("filling each stage up to the mean", cure="smallest limit")
def balanced_by_filling(costs, stages):
    sizes, cost, size = [], 0, 0
    for i, c in enumerate(costs):
        cost, size = cost + c, size + 1
        missing = stages - len(sizes) - 1
        if missing and (cost >= sum(costs) / stages or len(costs) - i - 1 == missing):
            sizes.append(size)
            cost = size = 0
    return [*sizes, size]


BALANCED = "return best(len(costs), stages)[1]"
SIZES = BALANCED.replace("return", "sizes =") + "\n    return "
BY_COUNT = "[len(costs) * (i + 1) // stages - len(costs) * i // stages for i in range(stages)]"
mutant(BALANCED, f"return {BY_COUNT}", "equal numbers of layers")
mutant(BALANCED, "return [len(costs), *[0] * (stages - 1)]", "at least 1 each")
mutant(BALANCED, f"{SIZES}[sum(sizes[:i]) for i in range(1, stages)]", "cuts")
mutant(BALANCED, f"{SIZES}sizes[2:]", "expected one number per stage: 4 numbers")
mutant(BALANCED, f"{SIZES}[costs[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(stages)]", "not their costs")
mutant(BALANCED, "return [len(costs) // stages] * (stages - 1) + [1]", "but the model has")
mutant(BALANCED, "return [1] * (stages - 1) + [len(costs) - stages + 1]", "another split has a faster slowest stage")
mutant(BALANCED, "return max(costs)", "expected a list with the number of layers")
mutant(BALANCED, f"{SIZES}[size + 0.5 for size in sizes]", "is not a whole number")


right, wrong, mutant = answers.of("gpipe_step")

FORWARDS, IN_ORDER = "[forward(stage, x, pending) for x in xs]", "zip(xs, ts, kept, strict=True)"
PARTS = "inputs.tensor_split(micro_batches), targets.tensor_split(micro_batches)"
ACTIVATION, OF_INPUT = "pending.append(dist.isend(y.detach(), rank + 1))", "dist.isend(x.grad, rank - 1)"
WEIGHT, RECEIVED = "len(x) / len(inputs)", "x = torch.empty_like(x)\n        dist.recv(x, rank - 1)"
ONE_AT_A_TIME = FORWARDS.replace("[", "(").replace("]", ")")
LATER_RANKS = f"{FORWARDS} if dist.get_rank() == 0 else {ONE_AT_A_TIME}"
ONE_MORE = """if dist.get_rank() == 0:
        dist.send(torch.zeros(1), 1)
    if dist.get_rank() == 1:
        dist.recv(torch.zeros(1), 0)
    for sending in pending:"""
BY_SHARE = "by its share of the examples"
mutant(PARTS, PARTS.replace("tensor_split", "chunk"))  # right: with these sizes, as many parts
mutant(ACTIVATION, "dist.send(y.detach(), rank + 1)")  # right: nobody sends in the other direction
mutant(IN_ORDER, f"[*{IN_ORDER}][::-1]")  # right: from the last micro-batch
mutant("(share * mse_loss(y, target))", "mse_loss(y, target)", "losses were added up", cure=BY_SHARE)
mutant(WEIGHT, "1 / micro_batches", "every micro-batch counts the same", cure=BY_SHARE)
mutant(WEIGHT, "len(x)", "neither divided by the number of examples nor means", cure="by its share")
mutant(
    "        backward(*passed",
    "        stage.zero_grad()\n        backward(*passed",
    "only the last micro-batch's gradients are left",
    cure="nothing may clear it in between",
)
mutant(
    OF_INPUT,
    "dist.isend(torch.ones_like(y), rank - 1)",
    "Which gradient do you send back",
    cure="send back the gradient of your stage's input",
)
mutant("x.requires_grad_()", "pass", "does not require a gradient", cure="requires_grad_()")
mutant(PARTS, PARTS.replace("micro_batches", "1"), "expected one per micro-batch")
mutant(FORWARDS, ONE_AT_A_TIME, "only one rank works at a time", cure="run all forward passes first")
mutant(FORWARDS, LATER_RANKS, "all forward passes before the first backward pass")
mutant(IN_ORDER, "zip(xs[1:], ts, kept)", "every micro-batch needs its own", cure="still in the pipeline")
mutant("for sending in pending:", ONE_MORE, "rank 0 sent 4 messages, expected 3")
mutant(RECEIVED, "dist.recv(torch.empty_like(x), rank - 1)", "Only rank 0 may use `inputs`", cure="from their neighbours")


right, wrong, mutant = answers.of("one_f_one_b_step")

AHEAD = "ahead = min(micro_batches, dist.get_world_size() - 1 - dist.get_rank())"
LISTS, LOOP = "kept, pending, done = [], [], 0", "for i, x in enumerate(xs):"
# The number of passes before the first backward pass is not limited; with 2 micro-batches on 4 ranks there are fewer.
TOO_FAR = """ahead = dist.get_world_size() - 1 - dist.get_rank()
    kept, pending, done = [], [], 0
    for i in range(max(ahead, micro_batches)):
        x = xs[i]"""
COOL_DOWN = """
    for i in range(done, micro_batches):
        backward(*kept.pop(0), ts[i], len(xs[i]) / len(inputs), pending)
    for sending in pending:
        sending.wait()"""
BLOCKING = f"{LISTS}\n    pending = type('Sends', (list,), {{'append': lambda _, sending: sending.wait()}})()"
mutant(" - 1 - dist.get_rank()", " - 1")  # right: a warm-up of s
mutant(LISTS, BLOCKING, "each waits until the other receives", cure="use dist.isend")
mutant(
    AHEAD,
    f"xs, ts = {PARTS.replace('tensor_split', 'chunk')}\n    micro_batches = len(xs)\n    {AHEAD}",
    "may give fewer parts than you ask for",
    cure="`tensor_split(m)` always gives m",
)
mutant(AHEAD, "ahead = micro_batches", "as in GPipe", cure="each forward pass is followed by a backward pass")
mutant(AHEAD, "ahead = 0", "the pipeline never fills", cure="forward passes come before it")
mutant(COOL_DOWN, "", "every micro-batch needs its own", cure="when the last forward pass is over")
mutant(
    f"{AHEAD}\n    {LISTS}\n    {LOOP}",
    TOO_FAR,
    "asked for a micro-batch that does not exist",
    cure="the warm-up has at most",
)
mutant(
    LISTS,
    f"{LISTS}\n    len = lambda part: micro_batches if part is inputs else 1",
    "every micro-batch counts the same",
    cure=BY_SHARE,
)


test_the_verdict_fits_the_answer = answers.test_of_verdicts()
test_every_exercise_has_right_and_wrong_answers_here = answers.test_of_completeness("pipeline_parallel")
