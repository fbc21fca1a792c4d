"""The exercises of lesson 17: right answers pass, and wrong ones get an explanation."""

from __future__ import annotations

import copy
import os
import shutil

import torch
from answers import Answers

answers = Answers()

right, wrong, mutant = answers.of("save_interval")
PER_GPU = "divide the GPU's time between failures by their number"


@right
def in_one_line(save_s, gpu_hours, gpus):
    return (7200 * save_s * gpu_hours / gpus) ** 0.5


mutant("3600 * gpu_hours / gpus", "3600 * gpu_hours", "of a job on one GPU", cure=PER_GPU)
mutant("3600 * gpu_hours / gpus", "gpu_hours / gpus", "save_s is in seconds", cure="3,600 seconds")
mutant("sqrt(2 * save_s", "sqrt(save_s", "half an interval on average", cure="the share of time lost")
mutant("sqrt(2 * save_s * failure_s)", "2 * save_s * failure_s", "the square of the interval", cure="square root")
mutant("3600 * gpu_hours / gpus", "3600 * gpu_hours * gpus", "not rarer", cure=PER_GPU)
mutant("sqrt(2 * save_s", "sqrt(4 * save_s", "to zero")

right, wrong, mutant = answers.of("goodput")


@right
def seconds_of_useful_steps(attempts, step_s):
    begins = [first for _, _, first, _ in attempts[1:]] + [attempts[-1][3]]
    useful = sum(begin - first for (_, _, first, _), begin in zip(attempts, begins, strict=True))
    return useful * step_s / (attempts[-1][1] - attempts[0][0])


mutant("attempts[-1][3] - attempts[0][2]", "sum(a[3] - a[2] for a in attempts)", "count twice", cure="is lost")
mutant("attempts[-1][1] - attempts[0][0]", "sum(a[1] - a[0] for a in attempts)", "the gaps", cure="from the first start")
mutant("attempts[-1][3] - attempts[0][2]", "attempts[-1][3]", "begin with step 0", cure="first step")
mutant("attempts[-1][1] - attempts[0][0]", "attempts[-1][1]", "begin at second 0", cure="first attempt's start")
mutant("useful * step_s / whole_s", "1 - useful * step_s / whole_s", "the share that is lost", cure="1 minus this")
mutant("useful * step_s / whole_s", "useful / whole_s", "useful steps times step_s")

right, wrong, mutant = answers.of("write_safely")


@right
def with_a_descriptor(path, data):
    with open(f"{path}~", "wb", buffering=0) as file:
        file.write(data)
        os.fsync(file)
    os.rename(f"{path}~", path)


@right
def with_the_open_of_a_notebook(path, data):
    from IPython.core.interactiveshell import _modified_open  # keeps the function that `io.open` was at its import

    with _modified_open(path + ".new", "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".new", path)


@wrong("before the content is on the disk", cure="file.flush()")
def waits_after_the_new_name(path, data):
    with open(path + ".new", "wb") as file:
        file.write(data)
        file.flush()
        os.replace(path + ".new", path)
        os.fsync(file.fileno())


@wrong("under its own name", cure="into a new file")
def in_place(path, data):
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


FLUSHED = "        file.flush()\n"
mutant(FLUSHED + "        os.fsync(file.fileno())\n", "", "before the content is on the disk", cure="os.fsync(file.fileno())")
mutant("        file.flush()\n", "", "before the content is on the disk", cure="file.flush()")


@wrong("does not have the new content", cure="os.replace(new, path)")
def only_beside_it(path, data):
    with open(path + ".new", "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@wrong("another file is left behind", cure="remove any other")
def with_a_backup(path, data):
    shutil.copy(path, path + ".old")
    with open(path + ".new", "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".new", path)


right, wrong, mutant = answers.of("everything")


@right
def copies_of_each(job):
    parts = {name: copy.deepcopy(getattr(job, name).state_dict()) for name in ("model", "optimizer", "schedule")}
    return {**parts, "order": job.order.get_state(), "random": torch.get_rng_state(), "step": job.step}


mutant("return copy.deepcopy(state)", "return state", "the thread writes a mixture", cure="copy.deepcopy")
mutant('        "random": torch.get_rng_state(),\n', "", "random is missing")
mutant('        "order": job.order.get_state(),\n', "", "order is missing")
mutant("job.order.get_state()", "torch.get_rng_state()", "at the time of the call")
mutant("job.order.get_state()", "job.order", "order is no state", cure="get_state()")
mutant('"step": job.step', '"step": 0', "at the time of the call")
mutant("return copy.deepcopy(state)", "return list(copy.deepcopy(state))", "no dictionary", cure="with the keys")
mutant('"step": job.step,', '"step": job.step, "loss": 0,', "no part of this name", cure="the keys are")

test_the_verdict_fits_the_answer = answers.test_of_verdicts()
test_every_exercise_has_right_and_wrong_answers_here = answers.test_of_completeness("when_machines_fail")
