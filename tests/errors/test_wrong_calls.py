"""Wrong calls of public functions: one line for the student, and none of labkit's frames."""

from __future__ import annotations

import json
import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ipykernel", reason="needs ipykernel")
pytest.importorskip("matplotlib", reason="needs matplotlib")
from kernels import Kernel

import labkit as lab
from labkit.costs.predict import pipeline_bubble
from labkit.errors.wrong_calls import WrongTypeError, one_number, public_api


def started(folder: Path) -> Iterator[Kernel]:
    kernel = Kernel(folder, LABKIT_START="fork")
    cell = kernel(f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parents[1] / "helpers")!r})
        import labkit as lab
        group = lab.Group(2, runtime="bare")
        def work():
            with lab.span("forward"): pass
        run = group.run(work)
    """)
    assert cell.error is None, cell.error
    yield kernel
    kernel.close()


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    yield from started(tmp_path_factory.mktemp("kernel"))


@pytest.fixture
def kernel_of_its_own(tmp_path: Path) -> Iterator[Kernel]:
    """A group of the runtime torch leaves its fork server to the kernel, and a test leaves no process."""
    yield from started(tmp_path)


def seen(kernel: Kernel, call: str) -> str:
    """What a notebook shows of a call that is refused."""
    error = kernel(call).error
    assert error is not None, f"{call} was not refused"
    return re.sub(r"\x1b\[[0-9;]*m", "", error[2])


@pytest.mark.processes
def test_each_public_function_explains_a_wrong_call_in_one_line(kernel_of_its_own: Kernel) -> None:
    """A new public function is tested here without an entry."""
    tried: set[str] = set()
    refused = 0
    for part in range(4):  # a cell each, because each cell has a time limit
        cell = kernel_of_its_own(f"""
            import wrong_calls_program
            report = wrong_calls_program.complaints(group, run, get_ipython(), slice({part}, None, 4))
            print("report", report)
        """)
        assert cell.error is None, cell.error
        report = json.loads(cell.stdout.rpartition("report ")[2])
        assert report["wrong"] == []
        tried |= set(report["tried"])
        refused += report["refused"]
    assert {"timeline", "predict.all_reduce", "Group.run", "Ranks.watch", "Trace.filter", "Link"} <= tried
    assert refused > 1000


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        ("lab.timeline(group)", "TypeError", "expected a run, as group.run and .*, or a trace; .*group.last_run"),
        ("lab.timeline([run, run])", "TypeError", r"pass several runs as timeline\(a, b\)"),
        ("lab.timeline(run, steps=3)", "TypeError", "unexpected argument 'steps'.* Did you mean 'step'"),
        ("lab.timeline(run, ax=3)", "TypeError", r"timeline\(ax=3\): expected matplotlib Axes or None, given an int"),
        ("lab.breakdown(None)", "TypeError", r"breakdown\(None\): expected a run"),
        ("lab.steps(3)", "TypeError", "expected something to loop over"),
        ("lab.span(3)", "TypeError", "expected a name"),
        ("lab.record(5)", "TypeError", "expected a name for each value"),
        ("lab.devices('x')", "TypeError", "expected a whole number"),
        ("lab.load_trace(run)", "TypeError", "expected a string or a path, given a Run"),
        ("lab.schedule('gpipe', stages=2, microbatches=2)", "TypeError", "unexpected argument 'microbatches'.* 'micro_batches'"),
        ("lab.schedule('gpipe', stages=2, micro_batches=10**9)", "ValueError", "expected at most 100,000 passes"),
        ("lab.predict.barrier(2, 3)", "TypeError", "link=3: expected a Link"),
        ("lab.Link(1)", "TypeError", r"too many positional arguments; expected Link\(\*, gbit_per_s, latency_us"),
        ("lab.Group('4')", "TypeError", "expected a number of ranks"),
        ("lab.Group(2, timeout=3)", "TypeError", "Did you mean 'timeout_s'"),
        ("group.run(work())", "TypeError", r"Pass f, not f\(\)"),
        ("run.trace.filter(rank=7)", "ValueError", "expected the number of a rank, 0 to 1"),
        ("run.trace.filter(rank='x')", "TypeError", "expected the number of a rank"),
        ("lab.profile(3)", "TypeError", r"profile\(3\): expected a group"),
        ("lab.check(work)", "TypeError", "expected an exercise's name first"),
        ("lab.Timeline(run)", "AttributeError", "did you mean 'timeline'"),
    ],
)  # fmt: skip
@pytest.mark.processes
def test_a_wrong_call_is_reported_in_the_students_own_frame(kernel: Kernel, call: str, kind: str, message: str) -> None:
    text = seen(kernel, call)
    assert re.search(message, text.splitlines()[-1]), text
    assert text.splitlines()[-1].startswith(f"{kind}: ")
    assert call.partition("(")[0] in text
    assert "labkit/" not in text


@pytest.mark.processes
def test_stop_while_labkit_works_shows_only_the_students_line(kernel: Kernel) -> None:
    kernel("""
        import signal
        from labkit.errors.wrong_calls import public_api
        prepare, call = public_api(signal.raise_signal), public_api(lambda f: f())
        def mine():
            prepare(signal.SIGINT)
    """)
    text = seen(kernel, "prepare(signal.SIGINT)")
    assert text.splitlines()[-1].startswith("KeyboardInterrupt")
    assert "labkit/" not in text
    assert "in mine()" in seen(kernel, "call(mine)")


@pytest.mark.processes
def test_a_defect_of_labkit_keeps_its_frames(kernel: Kernel) -> None:
    kernel("""
        from labkit.tracing import ideal_pipeline
        ideal_pipeline._order = lambda *_: 1 / 0
    """)
    text = seen(kernel, "lab.schedule('gpipe', stages=2, micro_batches=2)")
    assert "ZeroDivisionError" in text
    assert "labkit/tracing/ideal_pipeline.py" in text


def test_the_error_stays_a_built_in_one_when_pickled() -> None:
    with pytest.raises(TypeError, match="expected a name") as caught:
        lab.span(3)  # type: ignore[arg-type]
    assert type(caught.value).__name__ == "TypeError"
    back = pickle.loads(pickle.dumps(caught.value))
    assert type(back) is TypeError
    assert back.args == caught.value.args


def test_a_working_argument_is_never_refused_for_its_annotation() -> None:
    @public_api
    def double(x: int) -> Any:
        return x + x

    assert double("ab") == "abab"  # type: ignore[arg-type]
    with pytest.raises(WrongTypeError, match=r"double\(x=None\): expected a whole number, given a NoneType"):
        double(None)  # type: ignore[arg-type]


def test_an_error_of_the_caller_is_unchanged() -> None:
    @public_api
    def call(f: Any) -> Any:
        return f()

    def wrong() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        call(wrong)
    assert type(caught.value) is ValueError
    assert caught.traceback[-1].name == "wrong"


def test_importing_it_is_cheap() -> None:
    assert "difflib" not in sys.modules["labkit.errors.wrong_calls"].__dict__
    assert pipeline_bubble(2, 3) == pytest.approx(1 / 4)


@pytest.mark.parametrize("name", ["runtime", "devices", "threads", "timeout_s", "link"])
@pytest.mark.processes
def test_a_groups_options_cannot_be_set_later(name: str) -> None:
    """A time limit that is set later would have no effect."""
    group = lab.Group(2, runtime="bare", timeout_s=3)
    before = getattr(group, name)
    says = rf"^group.{name} = 9: the options of a group cannot be changed; create another one: lab.Group\(2, {name}=...\)"
    with pytest.raises(AttributeError, match=says):
        setattr(group, name, 9)
    assert getattr(group, name) == before
    assert (group.runtime, group.timeout_s) == ("bare", 3)


def test_a_message_with_a_long_list_is_cut_in_its_middle():
    with pytest.raises(TypeError) as caught:
        lab.guess(step_ms=list(range(10**5)))
    message = str(caught.value)
    assert len(message) < 1000
    assert message.startswith("guess(step_ms=[0, 1, 2")
    assert message.endswith("expected one number from 0, a text or ...")


def test_a_tensor_of_tensorflow_is_one_number():
    class EagerTensor:
        """As TensorFlow's: no `item`, but `numpy`."""

        def numpy(self):
            return np.float32(2.5)

    assert one_number(EagerTensor()) == 2.5
    assert one_number(np.array([[2.5]])) == 2.5
    assert one_number(np.array([2.5, 1.0])) is None
