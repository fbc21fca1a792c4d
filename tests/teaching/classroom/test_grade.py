"""`python -m labkit grade`: right, wrong, broken, endless and dishonest submissions, graded by the real command."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import psutil
import pytest
import torch
from submitted import AVERAGE, LESSON, RATE, RATE_BODY, RIGHT_RATE, notebook, rate

import labkit as lab
from labkit.teaching.classroom import grade_submission
from labkit.teaching.classroom.confined_process import ProcessEnd
from labkit.teaching.classroom.grade import UNCONFINED, main
from labkit.teaching.classroom.grade_submission import Graded, GradeSettings, grade, hidden_for, judges_in
from labkit.teaching.classroom.judge_process import Judging, _verdict
from labkit.teaching.classroom.results import ClassResults
from labkit.teaching.classroom.statements import parsed
from labkit.teaching.classroom.submission_process import SELECTED, Job, _collect, _examiner
from labkit.teaching.classroom.submissions import Submission
from labkit.teaching.exercises import find

ROOT = Path(__file__).resolve().parents[3]
MEAN = "model.parameters()", "p.grad = torch.zeros_like(p) if p.grad is None else p.grad", "dist.all_reduce(p.grad)"


def code_cells(path: Path) -> list[str]:
    return [cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]


IMPORTS = "import torch\nimport torch.distributed as dist\nimport labkit as lab"


@pytest.fixture(scope="module")
def right_average() -> str:
    """The reference solution."""
    return next(c for c in code_cells(ROOT / "notebooks" / "solutions" / f"{LESSON}.ipynb") if f"def {AVERAGE}" in c)


def graded(folder: Path, *arguments: object) -> dict[str, Any]:
    """Grade files, and return the students in the written results."""
    written = folder / "results.json"
    assert main([*map(str, arguments), "--json", str(written)]) == 0
    students: dict[str, Any] = json.loads(written.read_text())["students"]
    return students


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere: no such file or folder"),
        (["."], "there is no notebook in ."),
        ([".", "--points", "bubble"], "expected an exercise and a number"),
        (["a.ipynb", "--modules", "nowhere"], "--modules nowhere: there is no such module"),
        (["a.ipynb", "--csv", "nowhere/points.csv"], "--csv nowhere/points.csv: No such file or directory"),
        (["a.ipynb", "--json", "."], "--json .: Is a directory"),
        (["a.ipynb", "--feedback", "a.ipynb"], "--feedback a.ipynb: File exists"),
        *(
            (["a.ipynb", option, given], f"{option} {shown}: expected a number above 0")
            for option, given, shown in (
                ("--limit-s", "0", "0.0"),
                ("--limit-s", "nan", "nan"),
                ("--memory-mb", "inf", "inf"),
                ("--jobs", "-1", "-1"),
            )
        ),
        *(
            (["a.ipynb", "--lessons", "02", "--points", f"{RATE}={given}"], f"={given}: expected a number from 0 on")
            for given in ("-1", "nan", "inf")
        ),
        (["a.ipynb", "--points", "bubbel=2"], "--points bubbel: no submission should answer it"),
        (["a.ipynb", "--lessons", "02", "--points", "bubbel=2"], "--points bubbel: no submission should answer it"),
        ([".", "--lessons", "99"], "'99' is not the beginning of one lesson's name"),
    ],
)
def test_a_wrong_command_is_told_in_one_line(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if "a.ipynb" in arguments:
        notebook(tmp_path / "a.ipynb")
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_a_folder_is_hidden_but_not_one_that_python_needs(tmp_path: Path) -> None:
    outside = tmp_path / "class" / "a.ipynb"
    here = ROOT / "a.ipynb"  # the folder of labkit
    hidden = hidden_for([outside, here])
    assert str(outside.parent) in hidden
    assert str(here) in hidden
    assert str(ROOT) not in hidden
    assert str(ROOT / "notebooks" / "solutions") in hidden
    assert judges_in() == (str(ROOT / "labkit" / "teaching" / "exercises"), str(ROOT / "notebooks" / "judges"))


def test_a_message_of_a_submission_cannot_change_the_table_or_break_a_file() -> None:
    given = Graded(RATE, False, "wrong", "a\n| anna | \x1b[31m\ud800", ("b\nc\x00",))
    assert (given.message, given.details) == ("a | anna |  [31m?", ("b\nc ",))


FORGED = [
    "5", "[]", '{"scaled_learning_rate": 5}', '{"scaled_learning_rate": {"missing": "x", "failures": 5}}', "[" * 100_000,
    '{"": 5}', '{"scaled_learning_rate": {"packed": ' + "[" * 500 + "]" * 500 + "}}", '{"scaled_learning_rate": {"packed": 1}}',
    '{"scaled_learning_rate": {"missing": 7, "failures": []}}',
]  # fmt: skip


@pytest.mark.parametrize("sent", FORGED)
def test_whatever_the_process_of_a_submission_sends_it_gets_no_points(
    sent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("labkit.teaching.classroom.grade_submission.run_confined", lambda *_, **__: ProcessEnd(sent, "", ""))
    (one,) = grade(Submission("anna", tmp_path, ("",), (RATE,)), GradeSettings())
    assert not one.passed


def test_a_line_of_a_judge_that_was_ended_in_the_middle_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = [json.dumps({RATE: {"value": 1}}), '{"name": "scaled_lea']
    monkeypatch.setattr(grade_submission, "run_confined", lambda *_, **__: ProcessEnd(sent.pop(0), "", "it was ended"))
    (one,) = grade(Submission("anna", tmp_path, ("",), (RATE,)), GradeSettings())
    assert one.message == "Not judged to the end: it was ended."


def test_what_one_answer_prints_is_not_shown_with_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"name": AVERAGE, "passed": True, "message": "", "details": [], "written": True, "score": None, "seconds": 1}
    found = json.dumps({AVERAGE: {"value": 1}, RATE: {"value": 1}})
    sent = [ProcessEnd(found, "", ""), ProcessEnd(json.dumps(first) + "\n", "its print", "it was ended")]
    monkeypatch.setattr("labkit.teaching.classroom.grade_submission.run_confined", lambda *_, **__: sent.pop(0))
    _, second = grade(Submission("anna", tmp_path, ("",), (AVERAGE, RATE)), GradeSettings())
    assert second.details == ()


# ------------------------------------------------------------------------- what goes wrong while a class is graded


def right(submission: Submission, _: GradeSettings) -> list[Graded]:
    return [Graded(name, True, "passed", "Right.") for name in submission.exercises]


@pytest.fixture
def three(tmp_path: Path) -> list[str]:
    """The arguments that grade three students."""
    for student in ("anna", "ben", "cem"):
        notebook(tmp_path / "class" / f"{student}.ipynb", RIGHT_RATE)
    files = ["--json", str(tmp_path / "all.json"), "--csv", str(tmp_path / "points.csv")]
    return [str(tmp_path / "class"), "--unconfined", "--jobs", "1", *files]  # nothing is run


def test_a_file_that_cannot_be_written_costs_neither_the_table_nor_the_others(
    three: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: ClassResults) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("labkit.teaching.classroom.grade.grade", right)
    monkeypatch.setattr(ClassResults, "as_csv", full)
    assert main([*three, "--figure", str(tmp_path / "class.unknown"), "--feedback", str(tmp_path / "told")]) == 1
    said = capsys.readouterr()
    assert "| cem     | ✓ " in said.out
    assert "points.csv was not written: OSError: [Errno 28] No space left on device" in said.err
    assert "class.unknown was not written: ValueError" in said.err
    assert len(json.loads((tmp_path / "all.json").read_text())["students"]) == 3
    assert len([*(tmp_path / "told").iterdir()]) == 3


def test_a_submission_that_cannot_be_graded_does_not_cost_the_others(
    three: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def graded(submission: Submission, settings: GradeSettings) -> list[Graded]:
        if submission.student == "ben":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return right(submission, settings)

    monkeypatch.setattr("labkit.teaching.classroom.grade.grade", graded)
    assert main(three) == 1
    assert "ben was not graded: OSError(28, 'No space left on device')" in capsys.readouterr().err
    assert json.loads((tmp_path / "all.json").read_text())["students"].keys() == {"anna", "cem"}


@pytest.fixture
def hangs_up() -> Iterator[None]:
    """SIGHUP as a terminal's commands have it: whoever started the tests with `nohup` has it ignored here."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangs_up")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_is_graded_before_a_signal_counts(
    number: int, three: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = threading.Event()

    def graded(submission: Submission, settings: GradeSettings) -> list[Graded]:
        if submission.student == "ben":
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # impatience
            assert ended.wait(60)
        return right(submission, settings)

    monkeypatch.setattr("labkit.teaching.classroom.grade.grade", graded)
    monkeypatch.setattr("labkit.teaching.classroom.grade.end_all", lambda _: ended.set())
    before = signal.getsignal(number)
    assert main(three) == 1
    assert signal.getsignal(number) is before
    said = capsys.readouterr()
    assert "stopped: 1 of 3 submissions are graded" in said.err
    assert "| anna    | ✓ " in said.out
    assert json.loads((tmp_path / "all.json").read_text())["students"].keys() == {"anna"}


@pytest.mark.usefixtures("hangs_up")
def test_with_nohup_grading_goes_on(
    three: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def graded(submission: Submission, settings: GradeSettings) -> list[Graded]:
        os.kill(os.getpid(), signal.SIGHUP)
        return right(submission, settings)

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setattr("labkit.teaching.classroom.grade.grade", graded)
    assert main(three) == 0
    assert "| cem     | ✓ " in capsys.readouterr().out


@pytest.mark.processes
@pytest.mark.usefixtures("hangs_up")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_folder_and_no_process(number: int, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    notebook(
        tmp_path / "class" / "anna.ipynb", "import time\nlate = time.sleep(1000)", RIGHT_RATE.replace("return", "late; return")
    )
    command = [sys.executable, "-m", "labkit", "grade", str(tmp_path / "class"), "--limit-s", "1000"]
    with subprocess.Popen(command, env=os.environ | {"TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(ROOT)}) as process:
        while not [*(tmp_path / "tmp").glob("labkit-grade-*")]:
            assert process.poll() is None
            time.sleep(0.1)
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        assert process.wait(100) == 1
    assert not [one for one in started if one.is_running()]
    assert [*(tmp_path / "tmp").iterdir()] == []


# ------------------------------------------------------------------------------------- answers that are numbers


@pytest.mark.parametrize("number", [Fraction(1, 2), np.float32(0.5), np.array([0.5]), torch.tensor(0.5), 0.5])
def test_a_number_reaches_its_judge_as_in_the_notebook(number: Any) -> None:
    assert lab.check("waiting_share", number)
    assert _examiner()(number, types.ModuleType("__main__")) == {"value": 0.5}


def test_what_is_no_number_is_said_by_its_own_name() -> None:
    found = _examiner()({0.5}, types.ModuleType("__main__"))
    verdict = _verdict(find("waiting_share"), Judging({"waiting_share": found}, 1, 60))
    assert verdict.message == "Given set: expected a number, a text or a list of them."


def test_a_list_of_texts_reaches_its_judge_as_in_the_notebook() -> None:
    names = ("skipped collective", "summed gradients", "unequal batches", "unused layer")
    found = _examiner()(names, types.ModuleType("__main__"))
    assert found == {"value": [*names]}
    graded_verdict = _verdict(find("name_the_faults"), Judging({"name_the_faults": found}, 1, 60))
    assert graded_verdict.message == lab.check("name_the_faults", names).message


@pytest.mark.parametrize("execute", [False, True])
def test_an_answer_that_is_not_found_names_the_option_that_finds_it(execute: bool) -> None:
    cells = ("exec('bubble = 1')", "lab.check('bubble', bubble)")
    job = Job(cells, ("bubble",), execute)
    found = _collect(job, parsed(cells), types.ModuleType("__main__"), lambda *_: {"value": 1})["bubble"]
    assert found == {"value": 1} if execute else found["missing"].endswith(f"is not defined. {SELECTED}")


def test_what_is_no_notebook_has_no_answers(tmp_path: Path) -> None:
    (tmp_path / "empty.ipynb").write_text("")
    (tmp_path / "list.ipynb").write_text("[]")
    results = graded(tmp_path, tmp_path / "empty.ipynb", tmp_path / "list.ipynb", "--lessons", "02", "--unconfined")
    for student in ("empty", "list"):
        assert {one["state"] for one in results[student]["exercises"].values()} == {"no answer"}
        assert f"{student}.ipynb is no notebook" in results[student]["exercises"][RATE]["message"]


# -------------------------------------------------------------------------------------- how it is judged


@pytest.mark.processes
def test_a_notebook_of_a_lesson_is_graded_exercise_by_exercise(tmp_path: Path, right_average: str) -> None:
    summed = right_average.replace("/= dist.get_world_size()", "/= 1")
    notebook(
        tmp_path / "anna" / f"{LESSON}.ipynb", IMPORTS, "1 / 0", "factor = 1", "def broken(:", summed,
        rate("return factor * base * per_rank * ranks / base_batch", "mine"),
        "def draw_indices(examples, rank, ranks, epoch):\n    ...",
    )  # fmt: skip
    anna = graded(tmp_path, tmp_path / "anna", "--points", f"{RATE}=3")["anna"]
    assert {name: one["state"] for name, one in anna["exercises"].items()} == {
        AVERAGE: "wrong", "average_in_buckets": "no answer", "draw_indices": "not written yet", RATE: "passed",
    }  # fmt: skip
    assert anna["points"] == 3
    assert "summed, not averaged" in anna["exercises"][AVERAGE]["message"]


@pytest.mark.processes
def test_the_reference_solution_is_right_with_other_inputs_and_executed_as_a_whole(tmp_path: Path) -> None:
    cells = code_cells(ROOT / "notebooks" / "solutions" / f"{LESSON}.ipynb")
    notebook(tmp_path / "anna" / f"{LESSON}.ipynb", *cells, "%%ranks group\nx = 1")
    anna = graded(tmp_path, tmp_path / "anna", "--execute", "--seed", 12)["anna"]
    assert {name: one["passed"] for name, one in anna["exercises"].items()} == dict.fromkeys(anna["exercises"], True)


# What each student submits after the imports, the points, and a part of the verdicts.
Class = dict[str, tuple[tuple[str, ...], float, str]]
HONEST: Class = {
    "a misspelt exercise": (
        (RIGHT_RATE.replace(f"'{RATE}'", "'scaled_rate'"), RIGHT_RATE), 1, "There is no exercise of this name.",
    ),
    "failed before": (
        ("import no_such_library", rate(f"no_such_library\n{RATE_BODY}")), 0,
        "before, in the notebook's cell 2, line 1: ModuleNotFoundError",
    ),
    "not run": ((rate(f"undefined\n{RATE_BODY}"),), 0, SELECTED),
    "a group of its own": (
        (
            "group = lab.Group(2, runtime='bare')\nranks = len(group.run(lambda: 1).results)\ngroup.close()", "two = ranks",
            rate("return base * per_rank * ranks * (two / 2) / base_batch"),
        ), 1, "",
    ),
}  # fmt: skip
WRITES = f"""
import os
def {AVERAGE}(model):
    for fd in range(3, 200):
        try: os.write(fd, b'opens the safe\\n' * 100)
        except OSError: pass

lab.check('{AVERAGE}', {AVERAGE})
"""
PLANTS = """
import os, site
for place in [os.getcwd(), os.environ['TMPDIR'], site.getusersitepackages()]:
    os.makedirs(place, exist_ok=True)
    for name in ('json', 'torch', 'sitecustomize'):
        open(f'{place}/{name}.py', 'w').write("raise SystemExit('planted')")
planted = True
"""
DISHONEST: Class = {
    "reads the judges": ((rate(f"exec(open('{ROOT}/notebooks/judges/data_parallel.py').read())"),), 0, "FileNotFoundError"),
    "reads the solutions": ((rate(f"open('{ROOT}/notebooks/solutions/{LESSON}.ipynb')"),), 0, "FileNotFoundError"),
    "reads another": (("text = open('OTHER').read()", rate(f"text\n{RATE_BODY}")), 0, "line 1: FileNotFoundError"),
    "imports a judge": ((rate("import labkit.teaching.exercises.data_parallel"),), 0, "looks at the code that judges it"),
    "imports it by a hidden name": (
        (rate("__import__('.'.join(['labkit', 'teaching', 'exercises', 'data_parallel']))"),),
        0,
        "ModuleNotFoundError",
    ),
    "looks": ((rate(f"import sys\nsys._getframe(1)\n{RATE_BODY}"),), 0, "looks at the code that judges it"),
    "connects": ((rate("import socket\nsocket.create_connection(('192.0.2.1', 80), timeout=1)"),), 0, "Network is unreachable"),
    "ends its parent": ((rate("import os\nos.kill(os.getppid(), 9)\nwhile True: pass"),), 0, ""),
    "sends code": (
        (rate("class P:\n    def __reduce__(self):\n        return eval, ('1',)\nreturn P()"),),
        0,
        "expected numbers",
    ),
    "rebinds": (("lab.check = lambda *_: True\nprint('passed')", rate("return 0")), 0, ""),
    "exits": (("import os\nstop = os._exit(3)", rate(f"stop\n{RATE_BODY}")), 0, "ended with exit code 3"),
    "writes into open files": ((WRITES, RIGHT_RATE), 1, ""),
    "plants modules": ((PLANTS, rate(f"planted\n{RATE_BODY}")), 1, ""),
}


def judged_as_expected(expected: Class, student: str, folder: Path) -> None:
    given, points, words = expected[student]
    other = notebook(folder / "class" / "other.ipynb", IMPORTS, RIGHT_RATE)
    cells = [cell.replace("OTHER", str(other)) for cell in given]
    found = graded(folder, notebook(folder / "class" / f"{student}.ipynb", IMPORTS, *cells))[student]
    text = "\n".join("\n".join([one["message"], *one["details"]]) for one in found["exercises"].values())
    assert found["points"] == points, text
    assert words in text


@pytest.mark.processes
@pytest.mark.parametrize("student", HONEST)
def test_an_honest_submission(student: str, tmp_path: Path) -> None:
    judged_as_expected(HONEST, student, tmp_path)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("student", DISHONEST)
def test_a_dishonest_submission(student: str, tmp_path: Path) -> None:
    judged_as_expected(DISHONEST, student, tmp_path)


# What a system allows: how the command is started there.
SYSTEMS = {
    "a user who is not root": ["unshare", "--user", "--map-user=1000", "--map-group=1000"],
    "no namespaces": [
        "unshare", "--user", "--map-root-user", "sh", "-c",
        'for kind in user net mnt; do echo 0 > /proc/sys/user/max_${kind}_namespaces; done; exec "$@"', "sh",
    ],
}  # fmt: skip


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_system_without_root_or_namespaces(system: str, tmp_path: Path, right_average: str) -> None:
    try:
        subprocess.run([*SYSTEMS[system], "true"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this system has no user namespaces: {error}")
    dynamic = "name = 'labkit.teaching.' + 'exercises.data_parallel'\noracle = __import__(name)\n"
    notebook(tmp_path / "class" / "anna.ipynb", IMPORTS, right_average, RIGHT_RATE)
    notebook(tmp_path / "class" / "ben.ipynb", IMPORTS, dynamic, RIGHT_RATE.replace("return", "oracle; return"))
    written = tmp_path / "results.json"

    def ran(*options: str) -> subprocess.CompletedProcess[str]:
        command = [*SYSTEMS[system], sys.executable, "-m", "labkit", "grade", str(tmp_path / "class"), "--json", str(written)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run([*command, *options], capture_output=True, text=True, check=False, timeout=250, env=environment)

    ended = ran()
    if system == "no namespaces":
        assert ended.returncode == 2
        assert "does not let submissions have namespaces of their own (OSError: [Errno 28] No space left" in ended.stderr
        ended = ran("--unconfined")
        assert ended.stderr.startswith(UNCONFINED)
    assert ended.returncode == 0, ended.stderr
    students = json.loads(written.read_text())["students"]
    unconfined = system == "no namespaces"  # nothing hides the judges from ben
    assert {student: one["points"] for student, one in students.items()} == {"anna": 2, "ben": float(unconfined)}


OWN = """
from labkit.teaching.exercises.comparisons import wrong_if
from labkit.teaching.exercises.exercise import exercise

@exercise("my_lesson", "That is half.")
def half(answer):
    'half(x) returns half of x.'
    wrong_if(answer(3.0) != 1.5, "that is not half")
"""


@pytest.mark.processes
def test_an_exercise_of_a_courses_own_module_which_answers_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "course").mkdir()
    (tmp_path / "course" / "own_exercises.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path / "course")
    check = "\n\nlab.check('half', half)"
    notebook(tmp_path / "anna.ipynb", IMPORTS, "def half(x):\n    return x / 2" + check)
    reads = f"def half(x):\n    open({str(tmp_path / 'course' / 'own_exercises.py')!r})\n    return x / 2"
    notebook(tmp_path / "ben.ipynb", IMPORTS, reads + check)
    results = graded(tmp_path, tmp_path / "anna.ipynb", tmp_path / "ben.ipynb", "--modules", "own_exercises")
    assert {student: one["points"] for student, one in results.items()} == {"anna": 1, "ben": 0}
    assert "FileNotFoundError" in results["ben"]["exercises"]["half"]["message"]


@pytest.mark.processes
@pytest.mark.slow
def test_one_exercise_that_breaks_its_judge_does_not_cost_the_others(tmp_path: Path, right_average: str) -> None:
    hoard = "hoard = []\nwhile True:\n    hoard.append(bytearray(100_000_000))"
    swallows = "while True:\n        try:\n            while True: print('x' * 100)\n        except BaseException: pass"
    endless = f"def {AVERAGE}(model):\n    {swallows}"
    notebook(tmp_path / "memory.ipynb", IMPORTS, rate(hoard), right_average)
    notebook(tmp_path / "endless.ipynb", IMPORTS, endless + f"\n\nlab.check('{AVERAGE}', {AVERAGE})", RIGHT_RATE)
    results = graded(tmp_path, tmp_path / "memory.ipynb", tmp_path / "endless.ipynb", "--limit-s", 10, "--memory-mb", 2500)
    assert {student: one["points"] for student, one in results.items()} == {"memory": 1, "endless": 1}
    assert "MB of memory" in results["memory"]["exercises"][RATE]["message"]
    assert "Not finished after 10 s" in results["endless"]["exercises"][AVERAGE]["message"]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("lesson", sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb")))
def test_every_reference_solution_gets_all_points_with_other_inputs(lesson: str, tmp_path: Path) -> None:
    notebook(tmp_path / "anna" / f"{lesson}.ipynb", *code_cells(ROOT / "notebooks" / "solutions" / f"{lesson}.ipynb"))
    anna = graded(tmp_path, tmp_path / "anna", "--seed", 2)["anna"]
    assert {name: one["message"] for name, one in anna["exercises"].items() if not one["passed"]} == {}
