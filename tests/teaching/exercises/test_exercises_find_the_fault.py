"""The exercises of lesson 15: right answers pass, and each typical mistake gets its own hint."""

from __future__ import annotations

from answers import Answers

answers = Answers()

right, wrong, mutant = answers.of("name_the_faults")

right(("decides alone", "not waited for", "mean of means", "unused layer"))
ALONE, WAITED, MEANS, LAYER = "decides alone", "not waited for", "mean of means", "unused layer"
wrong("the line where the ranks parted", ["unequal batches", WAITED, MEANS, LAYER])
wrong("what do the crosses", [ALONE, "mean of means", MEANS, LAYER])
wrong("how much does each rank's gradient count", [ALONE, WAITED, "equal shards", LAYER])
wrong("what does the forward pass do with them", [ALONE, WAITED, MEANS, "own buffers"])
wrong("the table has no 'deadlock'", ["deadlock", WAITED, MEANS, LAYER])
wrong("expected a list of four names", "decides alone")

right, wrong, mutant = answers.of("fix_early_stopping")

mutant("dist.broadcast(decision, src=0)", "dist.all_reduce(decision, op=dist.ReduceOp.MAX)")
mutant("dist.broadcast(decision, src=0)", "dist.barrier()", "one rank leaves the loop", cure="broadcast the decision of rank 0")
mutant("stop = bool(decision)", "stop = bool(decided)", "NameError")
mutant("stop = bool(decision)", "stop = True", "not when one rank does")
mutant("while not stop:", "for _ in range(9):", "after how many steps")  # as many as the program makes with its own seed
mutant("waited == 3", "waited == 5", "after how many steps without improvement")
mutant("return model.module.weight.detach()", "return None", "returns what train() of early_stopping returns")

right, wrong, mutant = answers.of("fix_gradient_average")

WAIT, DIVIDE = "work.wait()", "p.grad /= ranks"
mutant("dist.all_reduce(p.grad, async_op=True) for", "dist.all_reduce(p.grad.div_(1), async_op=True) for")
mutant(WAIT, "pass", "still not waited for", cure="keep what each all_reduce returns")
mutant(DIVIDE, "pass", "added up, but not averaged", cure="divide each of them")
mutant("dist.all_reduce(p.grad, ", "dist.all_reduce(p.grad.clone(), ", "in other tensors", cure="give it p.grad itself")
mutant(DIVIDE, "p.grad /= ranks**2", "when is a gradient added up, divided and used")

right, wrong, mutant = answers.of("fix_sentences")

SUM = 'cross_entropy(model(words), following, reduction="sum")'
mutant(SUM, "cross_entropy(model(words), following) * len(words)")
mutant("/ total * ranks", "/ total", "what does DDP do with the sum", cure="multiply the loss by it")
mutant("/ total * ranks", "/ total * ranks**2", "too large, by the number of ranks", cure="ranks once")
mutant("/ total * ranks", "", "never divided by the number of words", cure="words of all ranks")
mutant("/ total * ranks", "/ len(words)", "a mean of two means", cure="add up the losses of the words")
mutant("float(len(words))", "float(len(words) + 5)", "over which words does each of your terms average")

right, wrong, mutant = answers.of("fix_adapt")

LAYERS = "self.body, self.score, self.spare = nn.Linear(8, 16), nn.Linear(16, 1), nn.Linear(16, 1)"
mutant(LAYERS, "self.body, self.score = nn.Linear(8, 16), nn.Linear(16, 1)")
mutant(", find_unused_parameters=True", "", "as it was", cure="leave the unused layer out")
mutant("self.body(x).tanh())", "self.body(x).tanh()) + self.spare(self.body(x).tanh())", "another one", cure="must not change")
mutant("lr=0.5", "lr=0.1", "is the model what it was")


test_the_verdict_fits_the_answer = answers.test_of_verdicts()
test_every_exercise_has_right_and_wrong_answers_here = answers.test_of_completeness("find_the_fault")
