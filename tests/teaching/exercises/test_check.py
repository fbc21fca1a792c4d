"""`check`: what a verdict looks like, what counts as not written yet, and what happens when an answer fails."""

from __future__ import annotations

import dataclasses
import importlib
import io
import itertools
import json
import os
import random
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch
import torch.distributed as dist
from kernels import Kernel, shared_kernel
from time_limits import some_limit_does
from torch import nn

import labkit.teaching.exercises.data_parallel
from labkit import LabError
from labkit.errors.exceptions import Stopped
from labkit.teaching.exercises import answer_ranks, exercise_names, find
from labkit.teaching.exercises.check import Verdict, check, is_unwritten
from labkit.teaching.exercises.comparisons import AnswerError, compare, factor, listing
from labkit.teaching.exercises.exercise import Exercise
from labkit.teaching.guesses import Note

MODULE = sys.modules[check.__module__]  # `labkit.check` is the function: the public name wins over the file's
NOTEBOOKS = Path(__file__).resolve().parents[3] / "notebooks"


@pytest.fixture(autouse=True, scope="module")
def answers_are_preloaded() -> None:
    """Not here: with the answers, ranks would hold the judges that a test below looks for."""


# What a verdict looks like


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("each rank waits", "Each rank waits"),
        ("a rank waits", "A rank waits"),
        ("x is whole", "x is whole"),
        ("trainer2 was answered", "trainer2 was answered"),
        ("dist.all_reduce works in place", "dist.all_reduce works in place"),
    ],
)
def test_a_sentence_begins_with_a_capital_but_a_name_does_not(given: str, shown: str) -> None:
    assert MODULE._sentence(given) == shown


def test_a_verdict_reads_the_same_as_text_and_in_a_notebook() -> None:
    verdict = Verdict("my_share", False, "Items < 2 are lost", ("rank 0: []", "rank 1: [2]"))
    assert repr(verdict) == "✗ my_share: wrong\n  Items < 2 are lost\n  rank 0: []\n  rank 1: [2]"
    html = verdict._repr_html_()
    for part in ("✗ my_share: wrong", "Items &lt; 2 are lost", "rank 0: []\nrank 1: [2]"):
        assert part in html
    assert not verdict


def test_names_in_backticks_are_code_in_a_notebook() -> None:
    html = Verdict("x", False, "Call `f(a < b)` first")._repr_html_()
    assert "Call <code>f(a &lt; b)</code> first" in html


def test_the_three_states_have_their_own_symbol() -> None:
    assert repr(Verdict("x", True, "Good.")) == "✓ x: passed\n  Good."
    assert repr(Verdict("x", False, "Do this.", written=False)) == "○ x: not written yet\n  Do this."
    assert bool(Verdict("x", True, "Good."))


@pytest.mark.parametrize("state", ["passed", "wrong", "not written yet"])
def test_the_colour_of_a_state_is_legible_in_light_and_dark_themes(state: str) -> None:
    verdict = Verdict("x", state == "passed", "Do this.", written=state != "not written yet")
    assert verdict.state == state
    red, green, blue = bytes.fromhex(verdict._repr_html_().partition("color:#")[2][:6])
    assert (green > max(red, blue)) == (state == "passed")
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red / 255, green / 255, blue / 255)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]  # as WCAG 2 defines it
    assert 1.05 / (luminance + 0.05) > 3.5, "on white"
    assert (luminance + 0.05) / (0.0056 + 0.05) > 3.5, "on JupyterLab's dark page, #111111"


def test_long_messages_are_wrapped_and_details_kept_as_they_are() -> None:
    lines = repr(Verdict("x", False, "word " * 60, ("y" * 150,))).splitlines()
    assert all(len(line) <= 112 for line in lines[:-1])
    assert lines[-1] == "  " + "y" * 150


@pytest.mark.parametrize("shown", [Verdict("x", True, "größe → 2"), Note("größe → 2", "✓")])
def test_a_verdict_can_be_printed_in_a_terminal_without_utf_8(shown, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    print(shown)
    terminal.flush()
    assert b"gr\\xf6\\xdfe \\u2192 2" in terminal.buffer.getvalue()


# What counts as not written yet


def stub_with_dots(model): ...


def stub_with_docstring(model):
    """Average the gradients."""


def stub_with_pass(model):
    pass


def stub_with_a_hole(model):
    for p in model.parameters():
        if p.grad is not None:
            ...  # your two lines


def stub_with_a_value_to_fill_in(base, base_batch, per_rank, ranks):
    factor = ...
    return base * factor


def stub_that_returns_dots(items):
    return ...


class StubClass(nn.Module):
    def forward(self, x):
        """Carry x across."""


def not_implemented(items):
    raise NotImplementedError


def written(x):
    return x[..., 0]


@pytest.mark.parametrize(
    "stub",
    [
        ...,
        None,
        stub_with_dots,
        stub_with_docstring,
        stub_with_pass,
        stub_with_a_hole,
        stub_with_a_value_to_fill_in,
        stub_that_returns_dots,
        StubClass,
    ],
)
def test_a_stub_is_recognised_without_running_it(stub) -> None:
    assert is_unwritten(stub)


@pytest.mark.parametrize("answer", [written, 0.0, nn.Linear, lambda x: x, len, not_implemented])
def test_a_written_answer_is_run(answer) -> None:
    assert not is_unwritten(answer)


def test_an_unchanged_stub_shows_the_target_and_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_ranks, "Group", None)
    verdict = check("average_gradients", stub_with_a_hole)
    assert (verdict.state, verdict.passed) == ("not written yet", False)
    assert "Average them over all ranks, in place" in verdict.message
    assert verdict.message == check("average_gradients").message


def test_without_an_answer_the_task_is_repeated_with_the_call_that_judges() -> None:
    verdict = check("row_linear")
    assert not verdict.written
    assert verdict.details == ('lab.check("row_linear", row_linear) judges your answer',)
    assert not check("waiting_share", ...).details, "a number that is not filled in yet"


@pytest.mark.parametrize("name", ["my_share", "scaled_learning_rate"])
@pytest.mark.processes
def test_not_implemented_counts_as_not_written_wherever_it_runs(name: str) -> None:
    def answer(*_):
        raise NotImplementedError

    assert check(name, answer).state == "not written yet"


# What happens when an answer fails


VALUES = ("waiting_share", "which_pays", "name_the_faults")  # exercises whose answers are no functions


@pytest.mark.parametrize("name", [e for names in exercise_names().values() for e in names if e not in VALUES])
def test_a_result_instead_of_the_function_is_explained(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_ranks, "Group", None)
    verdict = check(name, [0, 4, 8])
    assert verdict.message == "Given [0, 4, 8]: pass the function itself, not its return value"
    assert verdict.details == (f'lab.check("{name}", {name})',)


@pytest.mark.processes
def test_an_answer_that_raises_on_a_rank_of_its_own_is_shown_with_its_line_and_call() -> None:
    def answer(ms, nbytes, limit):
        return ms[99]

    verdict = check("best_cut", answer)
    assert verdict.message == "best_cut failed: IndexError: list index out of range"
    assert any('File "test_check.py", line' in line for line in verdict.details)
    assert "    return ms[99]" in verdict.details
    assert verdict.details[-1] == "last call: best_cut([1, 1, 1, 1], [1, 1, 1, 1], 4)"


@pytest.mark.processes
def test_an_answer_with_other_parameters_is_the_students_mistake() -> None:
    def best_cut(ms, nbytes):
        return 1

    verdict = check("best_cut", best_cut)
    assert not verdict
    assert "takes 2 positional arguments but 3 were given" in verdict.message
    assert verdict.details[0].startswith("best_cut(ms, nbytes, limit)")


@pytest.mark.processes
def test_an_answer_that_raises_on_a_rank_is_shown_with_its_line() -> None:
    verdict = check("my_share", lambda items: [items][dist.get_rank() + 1 :][0])
    assert "failed: IndexError: list index out of range" in verdict.message
    assert any("test_check.py" in line for line in verdict.details)


def judges_best_cut(judge: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    own = dataclasses.replace(find("best_cut"), judge=judge)
    monkeypatch.setattr(MODULE, "find", lambda name: own if name == "best_cut" else find(name))


def test_our_own_errors_are_not_attributed_to_the_student(monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a judge of labkit: its frames are not the student's, this test's are.
    code = compile("def judge(answer):\n    raise KeyError('ours')\n", labkit.teaching.exercises.__file__, "exec")
    space: dict = {}
    exec(code, space)
    judges_best_cut(space["judge"], monkeypatch)
    with pytest.raises(KeyError, match="ours"):
        check("best_cut", lambda _: 1)


@pytest.mark.processes
def test_stop_names_the_check_and_no_function_of_the_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        raise Stopped("_on_rank", ["rank 0 was computing"])

    monkeypatch.setattr(answer_ranks.Group, "run", stopped)
    with pytest.raises(Stopped) as caught:
        check("introduce", lambda: "me")
    assert str(caught.value).startswith('lab.check("introduce") was stopped.\n    rank 0 was computing')


@pytest.mark.processes
def test_a_missing_rank_is_named() -> None:
    def answer(model):
        if dist.get_rank() == 0:
            dist.barrier()

    verdict = check("average_gradients", answer)
    assert verdict.message.startswith("rank 1 ")
    assert "barrier (test_check.py, line" in verdict.message
    assert any(line.startswith("rank 0 ") and "barrier" in line for line in verdict.details)


@pytest.mark.processes
def test_a_deadlock_in_an_answer_names_the_ranks() -> None:
    def answer(model):
        dist.recv(torch.ones(1), (dist.get_rank() + 1) % dist.get_world_size())

    verdict = check("average_gradients", answer)
    assert verdict.message.startswith("Deadlock: ")
    assert "recv (test_check.py, line" in verdict.message
    assert len(verdict.details) == 5, "the call, a hint, and a line for each rank"


@pytest.mark.processes
def test_ranks_that_never_end_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(model):
        while dist.get_rank() == 0:
            pass
        dist.barrier()

    def names_the_barrier(limit_s: float) -> bool:
        monkeypatch.setattr(answer_ranks, "RUN_LIMIT_S", limit_s)
        verdict = check("average_gradients", answer)
        assert verdict.message == (
            f"Not finished after {limit_s:.0f} s: does every loop end, and do all ranks call the same operations in "
            "the same order?"
        )
        return any("barrier" in line for line in verdict.details)

    assert some_limit_does(names_the_barrier)


def for_ever(*_, **__):
    while True:
        pass


def asleep(*_, **__):
    threading.Event().wait()


def stubborn(*_, **__):
    while True:
        try:
            for_ever()
        except BaseException:  # noqa: BLE001, S112  # that is the point
            continue


@pytest.mark.parametrize("answer", [for_ever, asleep, stubborn])
@pytest.mark.parametrize("name", ["best_cut", "draw_indices"])
@pytest.mark.processes
def test_an_answer_that_never_ends_is_stopped_whatever_it_catches(name: str, answer, monkeypatch: pytest.MonkeyPatch) -> None:
    def names_the_line(limit_s: float) -> bool:
        monkeypatch.setattr(answer_ranks, "RUN_LIMIT_S", limit_s)
        verdict = check(name, answer)
        assert not verdict
        assert verdict.message == f"Not finished after {limit_s:.0f} s, so it was stopped: does every loop end?"
        assert verdict.details[0].startswith(f"{name}(")
        return any("test_check.py, line" in line for line in verdict.details)

    assert some_limit_does(names_the_line)


def returns_coroutine(*_):
    async def inner():
        return 1

    return inner()


def raises_generator_exit(*_):
    raise GeneratorExit


class Equal(int):
    """Equal to whatever the judge expects."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return True


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda *_: sys.exit(), "it called exit()"),
        (lambda *_: sys.exit(0), "it called exit()"),
        (lambda *_: os._exit(3), "os._exit"),
        (raises_generator_exit, "GeneratorExit"),
        (returns_coroutine, "coroutine"),
        (lambda *_: 10**400, "Given 1000000"),
        (lambda *_: Equal(1), "Given an object of type Equal: expected numbers"),
        (lambda *_: [Equal(1)], "Given an object of type Equal: expected numbers"),
        (lambda *_: np.array([Equal(1)], object), "Given an object of type Equal: expected numbers"),
        (lambda *_: itertools.count(), "Given [0, 1, 2, 3,"),
        (lambda *_: ANY, "Given an object of type _ANY: expected numbers"),
        (lambda *_: print, "Given an object of type builtin_function_or_method: expected numbers"),
    ],
)
@pytest.mark.processes
def test_an_unusual_answer_gets_a_verdict_that_shows_the_call(answer, words: str) -> None:
    verdict = check("bubble", answer)
    assert not verdict.passed
    assert verdict.written
    assert words in verdict.message
    assert len(verdict.message) < 3000
    assert any("bubble(" in line and "[2.0, 2.0, 2.0, 2.0]" in line for line in verdict.details)


@pytest.mark.parametrize("answer", [lambda *_: sys.exit(0), raises_generator_exit, returns_coroutine])
@pytest.mark.processes
def test_an_unusual_answer_on_several_ranks_gets_a_verdict(answer) -> None:
    verdict = check("average_gradients", answer)
    assert not verdict.passed
    assert verdict.written


@pytest.mark.parametrize("name", ["bubble", "average_gradients"])
def test_a_function_whose_lines_a_call_does_not_run_is_refused(name: str) -> None:
    async def awaiting(*_):
        return 1

    async def both(*_):
        yield 1

    def yielding(*_):
        yield 1

    assert check(name, awaiting).message.startswith("It is an `async def`")
    assert check(name, both).message.startswith("It is an `async def`")
    assert check(name, yielding).message.startswith("It contains `yield`")


@pytest.mark.processes
def test_what_a_generator_yields_is_a_list_for_the_judge() -> None:
    assert check("coordinates", lambda rank, shape: (int(place) for place in np.unravel_index(rank, shape)))


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with shared_kernel(tmp_path_factory.mktemp("kernel"), LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0") as running:
        yield running


@pytest.mark.processes
def test_in_a_notebook_the_answers_prints_and_figures_appear_and_its_lines_are_those_of_the_cell(kernel: Kernel) -> None:
    kernel("import labkit as lab, matplotlib.pyplot as plt")
    cell = kernel("""
        def best_cut(ms, nbytes, limit):
            print("größe → 中文", ms)
            plt.plot(ms)
            plt.show()
            return ms[99]

        lab.check("best_cut", best_cut)
    """)
    assert cell.error is None
    assert "größe → 中文 [1, 1, 1, 1]" in cell.stdout
    assert any("image/png" in display for display in cell.displays)
    assert cell.result is not None
    assert re.search(r'File "cell \d+", line 5, in best_cut', cell.result), cell.result


@pytest.mark.processes
def test_stop_ends_an_answer_that_swallows_every_exception(kernel: Kernel) -> None:
    cell = kernel(
        """
        def best_cut(ms, nbytes, limit):
            print("begun", flush=True)
            while True:
                try:
                    while True: pass
                except BaseException:
                    continue

        lab.check("best_cut", best_cut)
        """,
        when=lambda cell: any("begun" in str(state) for state in cell.states),
        then=kernel.manager.interrupt_kernel,
    )
    assert cell.error is not None
    assert cell.error[0] == "Stopped"
    assert 'lab.check("best_cut") was stopped.' in cell.error[2]
    assert kernel("print(1 + 1)").stdout == "2\n"


# What an answer may see


def imports_the_oracle(model):
    from labkit.teaching.exercises.data_parallel import _serial_average

    return _serial_average(dist.get_world_size())


def finds_the_oracle(model):
    return sys.modules["labkit.teaching.exercises.data_parallel"]


def looks_at_its_callers(model):
    return sys._getframe(1).f_locals


def refers_to_the_oracle(model):
    return oracle(3)


oracle = labkit.teaching.exercises.data_parallel._serial_average


@pytest.mark.parametrize("cheat", [imports_the_oracle, finds_the_oracle, looks_at_its_callers, refers_to_the_oracle])
def test_an_answer_that_looks_at_its_judge_is_refused(cheat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_ranks, "Group", None)
    as_in_a_cell = FunctionType(cheat.__code__, globals(), cheat.__name__)  # no other process can import it
    verdict = check("average_gradients", as_in_a_cell)
    assert not verdict.passed
    assert verdict.message.startswith("It looks at the code that judges it")


def peeks(*_):
    """Tell what an answer finds on its rank; the names are not written out, so that it is run."""
    frame_of, before, own, shared, hidden = (
        name.replace("-", "") for name in ("_get-frame", "f_-back", "f_-locals", "f_-globals", "labkit-.exercises")
    )
    modules = [name for name, module in sys.modules.items() if name.startswith(hidden) and module is not None]
    frame, seen = getattr(sys, frame_of)(), set()
    while frame is not None:
        seen |= getattr(frame, own).keys() | getattr(frame, shared).keys()
        frame = getattr(frame, before)
    oracles = seen & {"_serial_average", "_serial_layers", "_unravel", "_judge_coordinates", "right", "expected"}
    try:
        importlib.import_module(f"{hidden}.data_parallel")
    except ImportError:
        raise RuntimeError(f"found {modules} {sorted(oracles)}, and {seen & {'answer'}}") from None


@pytest.mark.parametrize("name", ["coordinates", "average_gradients"])
@pytest.mark.processes
def test_ranks_hold_no_judge_and_no_oracle(name: str) -> None:
    as_in_a_cell = FunctionType(peeks.__code__, globals(), name)  # this module has imported the exercises
    assert check(name, as_in_a_cell).message.endswith("failed: RuntimeError: found [] [], and {'answer'}")


def test_the_random_numbers_of_the_notebook_go_on_as_if_nothing_was_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(*_: object) -> str:
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)
        raise AnswerError("wrong")

    judges_best_cut(judge, monkeypatch)
    numbers = []
    for judged in (False, True):
        random.seed(5)
        np.random.seed(5)  # noqa: NPY002
        torch.manual_seed(5)
        if judged:
            check("best_cut", written)
        numbers.append((random.random(), np.random.random(), torch.rand(()).item()))  # noqa: NPY002
    assert numbers[0] == numbers[1]


# Hints


@pytest.mark.parametrize(("hint", "more"), [("x is off by a factor", ". Divide by p"), ("by which factor?", " Divide by p")])
def test_the_second_wrong_answer_is_told_more(hint: str, more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(*_: object) -> None:
        if not right:
            raise AnswerError(hint, cure="divide by p")

    judges_best_cut(judge, monkeypatch)
    monkeypatch.setattr(MODULE, "wrong_tries", Counter())
    right = False
    pointing = check("best_cut", written)
    assert pointing.message.casefold() == hint
    assert pointing.details == ("After another wrong answer, the verdict says more.",)
    check("best_cut", stub_with_pass)  # is no answer, and no try
    check("average_gradients", [])
    telling = check("best_cut", written)
    assert (telling.message, telling.details) == (pointing.message + more, ())
    right = True
    assert check("best_cut", written)
    right = False
    assert check("best_cut", written) == pointing


def test_an_unknown_exercise_names_close_ones() -> None:
    with pytest.raises(LabError, match=r"no exercise is called 'draw_index'; did you mean 'draw_indices' or"):
        check("draw_index", None)
    with pytest.raises(LabError, match=r"did you mean 'TwoDevices'"):
        check("twodevices", None)
    with pytest.raises(LabError, match=r"there are: .*introduce, my_share, waiting_share, link_from_times"):
        check("zzz", None)


# The list of exercises


def exercises_of(file: str) -> list[Exercise]:
    module = importlib.import_module(f"labkit.teaching.exercises.{file}")
    return [value for value in vars(module).values() if isinstance(value, Exercise)]


@pytest.mark.parametrize("file", exercise_names())
def test_the_exercises_of_a_file_are_known_without_importing_it(file: str) -> None:
    exercises = exercises_of(file)
    assert tuple(e.name for e in exercises) == exercise_names()[file]
    assert all((NOTEBOOKS / f"{e.lesson}.ipynb").is_file() for e in exercises)
    assert all(e.target.endswith((".", "?")) for e in exercises)


@pytest.mark.parametrize("file", exercise_names())
def test_every_exercise_is_in_its_lesson_and_in_its_solutions(file: str) -> None:
    exercises = exercises_of(file)
    for folder in (NOTEBOOKS, NOTEBOOKS / "solutions"):
        path = folder / f"{exercises[0].lesson}.ipynb"
        cells = json.loads(path.read_text())["cells"]
        code = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        assert [e.name for e in exercises if f'lab.check("{e.name}"' not in code] == [], path.name


@pytest.mark.parametrize("solutions", sorted((NOTEBOOKS / "solutions").glob("*.ipynb")), ids=lambda path: path.stem)
def test_every_stored_verdict_of_the_solutions_is_a_pass(solutions: Path) -> None:
    for cell in json.loads(solutions.read_text())["cells"]:
        if cell["cell_type"] == "code" and "lab.check(" in "".join(cell["source"]):
            verdicts = ["".join(output["data"]["text/plain"]) for output in cell["outputs"] if "data" in output]
            assert [verdict[0] for verdict in verdicts] == ["✓"], verdicts


# Comparing


def expect(**arrays: list[float]) -> dict:
    import numpy as np

    return {name: np.array(values, np.float32) for name, values in arrays.items()}


def test_rounding_is_not_a_difference() -> None:
    compare([expect(w=[1.0, 2.0]), expect(w=[1.00001, 2.0])], expect(w=[1.0, 2.00001]), subject="the weights")


def test_an_unexplained_factor_is_reported() -> None:
    with pytest.raises(AnswerError, match="the weights are off by a factor: each is 5 times what it should be on 2 ranks"):
        compare([expect(w=[5.0, 10.0])] * 2, expect(w=[1.0, 2.0]), subject="the weights")


def test_a_missing_array_and_a_wrong_shape_are_reported() -> None:
    with pytest.raises(AnswerError, match="the weights of w are missing on rank 1"):
        compare([expect(w=[1.0]), expect()], expect(w=[1.0]), subject="the weights")
    with pytest.raises(AnswerError, match="the weights of w have the wrong shape on rank 0") as caught:
        compare([expect(w=[1.0, 1.0])], expect(w=[1.0]), subject="the weights")
    assert caught.value.details == ("given (2,), expected (1,)",)


def test_the_factor_between_arrays() -> None:
    assert factor([[1.0, 2.0], [4.0]], [[2.0, 4.0], [8.0]]) == pytest.approx(0.5)
    assert factor([[1.0, 2.0]], [[1.0, 1.0]]) is None
    assert factor([[0.0, 0.0]], [[1.0, 2.0]]) is None
    assert factor([[1.0]], [[0.0]]) is None


def test_lists_are_written_out_and_cut() -> None:
    assert listing([1]) == "1"
    assert listing([1, 2, 3]) == "1, 2 and 3"
    assert listing(range(9), most=2) == "0, 1 and 7 more"


@pytest.mark.parametrize("name", ["break_even", "scaled_learning_rate", "memory_per_rank"])
@pytest.mark.parametrize(
    ("returned", "hint"),
    [
        (None, "The function returns nothing: print only shows the number; `return` gives it to the caller"),
        ([1.0, 2.0], "Given [1.0, 2.0]: expected one number"),
        ("0.3", "Given '0.3': expected one number"),
        (10**400, "expected one number"),
        (float("nan"), "Given nan: expected one number"),
    ],
)
@pytest.mark.processes
def test_an_answer_that_returns_no_number_is_told_so(name: str, returned: object, hint: str) -> None:
    verdict = check(name, lambda *_: returned)
    assert not verdict.passed
    assert hint in verdict.message


def test_a_number_that_is_no_number() -> None:
    assert "Expected a number between 0 and 1" in check("waiting_share", 10**400).message


@pytest.mark.parametrize("answer", [max, dict, np.sum])
@pytest.mark.processes
def test_a_function_of_a_library_is_judged_too(answer) -> None:
    verdict = check("break_even", answer)
    assert not verdict.passed
    assert verdict.message
