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
from fractions import Fraction
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import psutil
import pytest
import torch

import labkit as lab
from labkit.classroom.bounded import Ended
from labkit.classroom.collect import SELECTED, Job, _collect, _examiner
from labkit.classroom.confinement import Confinement
from labkit.classroom.grade import main
from labkit.classroom.grading import Graded, Settings, grade, hidden_for, judges_in
from labkit.classroom.judge import Judging, _verdict
from labkit.classroom.results import Results
from labkit.classroom.statements import parsed
from labkit.classroom.submissions import Submission, exercises_of, submissions
from labkit.errors.exceptions import LabError
from labkit.exercises import find
from labkit.notebook.lessons import lessons_named

ROOT = Path(__file__).resolve().parents[2]
LESSON = "02_data_parallel"
RATE = "scaled_learning_rate"
AVERAGE = "average_gradients"
MEAN = "model.parameters()", "p.grad = torch.zeros_like(p) if p.grad is None else p.grad", "dist.all_reduce(p.grad)"


def code_cells(path: Path) -> list[str]:
    return [cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]


def notebook(path: Path, *cells: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells]), path)
    return path


def rate(body: str, name: str = RATE) -> str:
    indented = body.replace("\n", "\n    ")
    return f"def {name}(base, base_batch, per_rank, ranks):\n    {indented}\n\nlab.check('{RATE}', {name})"


RATE_BODY = "return base * per_rank * ranks / base_batch"
RIGHT_RATE = rate(RATE_BODY)
IMPORTS = "import torch\nimport torch.distributed as dist\nimport labkit as lab"


@pytest.fixture(scope="module")
def right_average() -> str:
    """The reference solution."""
    return next(c for c in code_cells(ROOT / "notebooks" / "solutions" / f"{LESSON}.ipynb") if f"def {AVERAGE}" in c)


@pytest.fixture
def graded(tmp_path: Path) -> Any:
    """A function that grades files and returns the students in the written results."""

    def run(*arguments: object) -> dict[str, Any]:
        written = tmp_path / "results.json"
        assert main([*map(str, arguments), "--json", str(written)]) == 0
        students: dict[str, Any] = json.loads(written.read_text())["students"]
        return students

    return run


# ------------------------------------------------------------------------------------- what is submitted


def test_students_are_named_by_their_notebooks_or_by_the_folders_of_notebooks_named_after_a_lesson(tmp_path: Path) -> None:
    notebook(tmp_path / "anna" / f"{LESSON}.ipynb")
    notebook(tmp_path / "hand_in" / "ben.ipynb", "lab.check('bubble', bubble)")
    notebook(tmp_path / "hand_in" / ".ipynb_checkpoints" / "ben.ipynb")
    found = submissions([tmp_path], [])
    assert [(one.student, one.exercises) for one in found] == [
        ("anna", exercises_of(ROOT / "notebooks" / f"{LESSON}.ipynb")), ("ben", ("bubble",)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "student"),
    [
        (f"Kim/{LESSON}-Copy1.ipynb", "Kim"),
        (f"Kim/{LESSON} (1).ipynb", "Kim"),
        (f"Kim/{LESSON} my own.ipynb", f"{LESSON} my own"),
        (f"Kim Lee_12_assignsubmission_file/course/{LESSON}.ipynb", "Kim Lee"),
        ("Kim Lee_12_assignsubmission_file/homework.ipynb", "Kim Lee"),
        (f"kimlee_late_12_345_{LESSON}-2.ipynb", "kimlee"),
        (f"kimlee_12_345_{LESSON}.ipynb", "kimlee"),
        ("week_3_4_reductions.ipynb", "week_3_4_reductions"),
    ],
)
def test_names_of_students_in_what_jupyter_moodle_and_canvas_write(path: str, student: str, tmp_path: Path) -> None:
    (found,) = submissions([notebook(tmp_path / path)], ["bubble"])
    assert found.student == student


def test_a_zip_file_is_not_passed_over(tmp_path: Path) -> None:
    notebook(tmp_path / "anna.ipynb")
    (tmp_path / "ben").mkdir()
    (tmp_path / "ben" / "homework.zip").touch()
    for given in (tmp_path, tmp_path / "ben" / "homework.zip"):
        with pytest.raises(LabError, match=r"homework.zip: unpack zip files into folders first"):
            submissions([given], [])


def test_the_exercises_of_lessons_in_their_order() -> None:
    (lesson,) = lessons_named(["02"])
    assert exercises_of(lesson) == (AVERAGE, "average_in_buckets", "draw_indices", RATE)
    with pytest.raises(LabError, match="'99' is not the beginning of one lesson's name; expected 00_start_here, "):
        lessons_named(["99"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere: no such file or folder"),
        (["."], "there is no notebook in ."),
        ([".", "--points", "bubble"], "expected an exercise and a number"),
        (["a.ipynb", "--modules", "nowhere"], "--modules nowhere: there is no such module"),
        (["a.ipynb", "--lessons", "02", "--points", f"{RATE}=1.5", "--classroom50", "result.json"], "whole numbers of points"),
        (["a.ipynb", "--csv", "nowhere/points.csv"], "--csv nowhere/points.csv: No such file or directory"),
        (["a.ipynb", "--json", "."], "--json .: Is a directory"),
        (["a.ipynb", "--feedback", "a.ipynb"], "--feedback a.ipynb: File exists"),
        (["a.ipynb", "--limit-s", "0"], "--limit-s 0.0: expected a number above 0"),
        (["a.ipynb", "--limit-s", "nan"], "--limit-s nan: expected a number above 0"),
        (["a.ipynb", "--limit-s", "-1"], "--limit-s -1.0: expected a number above 0"),
        (["a.ipynb", "--memory-mb", "0"], "--memory-mb 0.0: expected a number above 0"),
        (["a.ipynb", "--memory-mb", "inf"], "--memory-mb inf: expected a number above 0"),
        (["a.ipynb", "--jobs", "0"], "--jobs 0: expected a number above 0"),
        (["a.ipynb", "--jobs", "-1"], "--jobs -1: expected a number above 0"),
        (["a.ipynb", "--lessons", "02", "--points", f"{RATE}=-1"], "=-1: expected a number from 0 on"),
        (["a.ipynb", "--lessons", "02", "--points", f"{RATE}=nan"], "=nan: expected a number from 0 on"),
        (["a.ipynb", "--lessons", "02", "--points", f"{RATE}=inf"], "=inf: expected a number from 0 on"),
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
    judges = ROOT / "notebooks" / "judges"
    assert judges_in() == (str(ROOT / "labkit" / "exercises"), str(judges))
    assert {str(path) for path in judges.parent.iterdir()} - {*hidden} == {str(judges)}, "ranks may need the judges"


def test_two_students_of_one_name_are_told_apart(tmp_path: Path) -> None:
    same = [notebook(tmp_path / folder / "anna.ipynb", "lab.check('bubble', 1)") for folder in ("one", "two")]
    assert [one.student for one in submissions(same, [])] == ["one/anna", "two/anna"]
    deeper = [notebook(tmp_path / year / "one" / "anna.ipynb", "lab.check('bubble', 1)") for year in ("old", "new")]
    assert [one.student for one in submissions(deeper, [])] == [*map(str, deeper)]
    notebook(same[1], "lab.check('introduce', 1)")
    assert [one.student for one in submissions(same, [])] == ["anna", "anna"], "two lessons of one student"


def test_a_notebook_of_an_old_format_with_a_mark_at_its_start(tmp_path: Path) -> None:
    old = {"worksheets": [{"cells": [{"cell_type": "code", "input": ["lab.check('bubble',\n", "1)"]}]}]}
    (tmp_path / "a.ipynb").write_text(json.dumps(old), encoding="utf-8-sig")
    (one,) = submissions([tmp_path], [])
    assert (one.exercises, one.error) == (("bubble",), "")


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
    monkeypatch.setattr("labkit.classroom.grading.run_bounded", lambda *_: Ended(sent, "", ""))
    (one,) = grade(Submission("anna", tmp_path, ("",), (RATE,)), Settings())
    assert not one.passed


def test_a_line_of_a_judge_that_was_ended_in_the_middle_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = [json.dumps({RATE: {"value": 1}}), '{"name": "scaled_lea']
    monkeypatch.setattr("labkit.classroom.grading.run_bounded", lambda *_: Ended(sent.pop(0), "", "it was ended"))
    (one,) = grade(Submission("anna", tmp_path, ("",), (RATE,)), Settings())
    assert one.message == "Not judged to the end: it was ended."


def test_what_one_answer_prints_is_not_shown_with_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"name": AVERAGE, "passed": True, "message": "", "details": [], "written": True, "score": None, "seconds": 1}
    found = json.dumps({AVERAGE: {"value": 1}, RATE: {"value": 1}})
    sent = [Ended(found, "", ""), Ended(json.dumps(first) + "\n", "its print", "it was ended")]
    monkeypatch.setattr("labkit.classroom.grading.run_bounded", lambda *_: sent.pop(0))
    _, second = grade(Submission("anna", tmp_path, ("",), (AVERAGE, RATE)), Settings())
    assert second.details == ()


def put_a_file_of_a_terabyte(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


IRREGULAR = {
    "the_solutions": lambda path: path.symlink_to(ROOT / "notebooks" / "solutions" / f"{LESSON}.ipynb"),
    "another_student": lambda path: path.symlink_to("honest.ipynb"),
    "a_library": lambda path: path.symlink_to(torch.version.__file__),
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path.name),
    "nothing": lambda path: path.symlink_to("nowhere"),
    "pipe": os.mkfifo,
    "folder": lambda path: path.mkdir(),
    "huge": put_a_file_of_a_terabyte,
}


@pytest.mark.parametrize("required", [[RATE], []])
def test_of_a_folder_only_regular_files_are_read(required: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook(tmp_path / "class" / "honest.ipynb", RIGHT_RATE)
    for name, put in IRREGULAR.items():
        put(tmp_path / "class" / f"{name}.ipynb")
    notebook(tmp_path / "elsewhere" / "foreign.ipynb", RIGHT_RATE)
    (tmp_path / "class" / "linked").symlink_to(tmp_path / "elsewhere")
    given = {one.student: one for one in submissions([tmp_path / "class"], required)}
    assert given.keys() == {"honest", *IRREGULAR}
    assert {student for student, one in given.items() if not one.error} == {"honest"}
    assert {one.exercises for one in given.values()} == {(RATE,)}, "each has a verdict, which says why"
    assert given["a_library"].error == "a_library.ipynb is no notebook: it is a link, and links in a folder are not followed"
    assert given["pipe"].error == "pipe.ipynb is no notebook: it is no regular file of at most 64 MiB"

    seen: list[Settings] = []
    monkeypatch.setattr("labkit.classroom.grade.grade", lambda _, settings: seen.append(settings) or [])
    assert main([str(tmp_path / "class")]) == 0
    hidden = {str(tmp_path / "class"), *(str(path) for path in (ROOT / "notebooks").iterdir() if path.name != "judges")}
    assert {settings.hidden for settings in seen} == {tuple(sorted(hidden))}, "libraries stay visible"


def test_what_the_teacher_names_may_be_a_link_but_no_pipe(tmp_path: Path) -> None:
    notebook(tmp_path / "class" / "anna.ipynb", RIGHT_RATE)
    (tmp_path / "ben.ipynb").symlink_to(tmp_path / "class" / "anna.ipynb")
    (tmp_path / "this_year").symlink_to(tmp_path / "class")
    os.mkfifo(tmp_path / "pipe.ipynb")
    given = submissions([tmp_path / "ben.ipynb", tmp_path / "this_year", tmp_path / "pipe.ipynb"], [])
    assert {one.student: bool(one.error) for one in given} == {"ben": False, "anna": False, "pipe": True}


@pytest.mark.parametrize("put", [lambda path: path.symlink_to("/dev/zero"), os.mkfifo, lambda path: notebook(path, RIGHT_RATE)])
def test_a_file_that_is_replaced_while_it_is_read(put: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, lstat = notebook(tmp_path / "a.ipynb", RIGHT_RATE), Path.lstat

    def look(one: Path) -> os.stat_result:
        found = lstat(one)
        if one == path and not (tmp_path / "before").exists():
            one.rename(tmp_path / "before")
            put(one)
        return found

    monkeypatch.setattr(Path, "lstat", look)
    (one,) = submissions([tmp_path], [RATE])
    assert one.error


def test_a_class_without_any_notebook_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe.ipynb")
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "; pipe.ipynb is no notebook: it is no regular file" in capsys.readouterr().err


# ------------------------------------------------------------------------- what goes wrong while a class is graded


def right(submission: Submission, _: Settings) -> list[Graded]:
    return [Graded(name, True, "passed", "Right.") for name in submission.exercises]


@pytest.fixture
def three(tmp_path: Path) -> list[str]:
    """The arguments that grade three students."""
    for student in ("anna", "ben", "cem"):
        notebook(tmp_path / "class" / f"{student}.ipynb", RIGHT_RATE)
    return [str(tmp_path / "class"), "--jobs", "1", "--json", str(tmp_path / "all.json"), "--csv", str(tmp_path / "points.csv")]


def test_a_file_that_cannot_be_written_costs_neither_the_table_nor_the_others(
    three: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: Results) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("labkit.classroom.grade.grade", right)
    monkeypatch.setattr(Results, "as_csv", full)
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
    def graded(submission: Submission, settings: Settings) -> list[Graded]:
        if submission.student == "ben":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return right(submission, settings)

    monkeypatch.setattr("labkit.classroom.grade.grade", graded)
    assert main(three) == 1
    assert "ben was not graded: OSError(28, 'No space left on device')" in capsys.readouterr().err
    assert json.loads((tmp_path / "all.json").read_text())["students"].keys() == {"anna", "cem"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_is_graded_before_a_signal_counts(
    number: int, three: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = threading.Event()

    def graded(submission: Submission, settings: Settings) -> list[Graded]:
        if submission.student == "ben":
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # impatience
            assert ended.wait(60)
        return right(submission, settings)

    monkeypatch.setattr("labkit.classroom.grade.grade", graded)
    monkeypatch.setattr("labkit.classroom.grade.end_all", lambda _: ended.set())
    before = signal.getsignal(number)
    assert main(three) == 1
    assert signal.getsignal(number) is before
    said = capsys.readouterr()
    assert "stopped: 1 of 3 submissions are graded" in said.err
    assert "| anna    | ✓ " in said.out
    assert json.loads((tmp_path / "all.json").read_text())["students"].keys() == {"anna"}


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_folder_and_no_process(number: int, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    notebook(
        tmp_path / "class" / "anna.ipynb", "import time\nlate = time.sleep(1000)", RIGHT_RATE.replace("return", "late; return")
    )
    command = [sys.executable, "-m", "labkit", "grade", str(tmp_path / "class")]
    with subprocess.Popen(command, env=os.environ | {"TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(ROOT)}) as process:
        while not (started := psutil.Process(process.pid).children(recursive=True)):
            assert process.poll() is None
            time.sleep(0.1)
        assert [*(tmp_path / "tmp").glob("labkit-grade-*/work")]
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
    found = _examiner()([0.5], types.ModuleType("__main__"))
    verdict = _verdict(find("waiting_share"), Judging({"waiting_share": found}, 1, 60, Confinement((), (), "/nowhere")))
    assert verdict.message == "Given list: expected a number or a text."


@pytest.mark.parametrize("execute", [False, True])
def test_an_answer_that_is_not_found_names_the_option_that_finds_it(execute: bool) -> None:
    cells = ("exec('bubble = 1')", "lab.check('bubble', bubble)")
    job = Job(cells, ("bubble",), execute, Confinement((), (), ""))
    found = _collect(job, parsed(cells), types.ModuleType("__main__"), lambda *_: {"value": 1})["bubble"]
    assert found == {"value": 1} if execute else found["missing"].endswith(f"is not defined. {SELECTED}")


@pytest.mark.processes
def test_what_is_no_notebook_has_no_answers(tmp_path: Path, graded: Any) -> None:
    (tmp_path / "empty.ipynb").write_text("")
    (tmp_path / "list.ipynb").write_text("[]")
    results = graded(tmp_path / "empty.ipynb", tmp_path / "list.ipynb", "--lessons", "02")
    for student in ("empty", "list"):
        assert {one["state"] for one in results[student]["exercises"].values()} == {"no answer"}
        assert f"{student}.ipynb is no notebook" in results[student]["exercises"][RATE]["message"]


# -------------------------------------------------------------------------------------- how it is judged


@pytest.mark.processes
def test_a_notebook_of_a_lesson_is_graded_exercise_by_exercise(tmp_path: Path, graded: Any, right_average: str) -> None:
    summed = right_average.replace("/= dist.get_world_size()", "/= 1")
    notebook(
        tmp_path / "anna" / f"{LESSON}.ipynb", IMPORTS, "1 / 0", "factor = 1", "def broken(:", summed,
        rate("return factor * base * per_rank * ranks / base_batch", "mine"),
        "def draw_indices(examples, rank, ranks, epoch):\n    ...",
    )  # fmt: skip
    anna = graded(tmp_path, "--points", f"{RATE}=3")["anna"]
    assert {name: one["state"] for name, one in anna["exercises"].items()} == {
        AVERAGE: "wrong", "average_in_buckets": "no answer", "draw_indices": "not written yet", RATE: "passed",
    }  # fmt: skip
    assert anna["points"] == 3
    assert "summed, not averaged" in anna["exercises"][AVERAGE]["message"]


@pytest.mark.processes
def test_the_reference_solution_is_right_with_other_inputs_and_executed_as_a_whole(tmp_path: Path, graded: Any) -> None:
    cells = code_cells(ROOT / "notebooks" / "solutions" / f"{LESSON}.ipynb")
    notebook(tmp_path / "anna" / f"{LESSON}.ipynb", *cells, "%%ranks group\nx = 1")
    anna = graded(tmp_path, "--execute", "--seed", 12)["anna"]
    assert {name: one["passed"] for name, one in anna["exercises"].items()} == dict.fromkeys(anna["exercises"], True)


@pytest.mark.processes
def test_a_misspelt_exercise_does_not_cost_the_others(tmp_path: Path, graded: Any) -> None:
    misspelt = RIGHT_RATE.replace(f"lab.check('{RATE}'", "lab.check('scaled_rate'")
    notebook(tmp_path / "anna.ipynb", IMPORTS, misspelt, RIGHT_RATE)
    exercises = graded(tmp_path)["anna"]["exercises"]
    assert {name: one["state"] for name, one in exercises.items()} == {"scaled_rate": "wrong", RATE: "passed"}
    assert exercises["scaled_rate"]["message"].startswith("There is no exercise of this name.")


@pytest.mark.processes
def test_libraries_may_start_their_programs_and_the_submission_may_not(tmp_path: Path, graded: Any) -> None:
    library = "import platform\nimport matplotlib.pyplot as plt\nplt.close('all')\nNAME = platform.processor()"
    own = "import subprocess\nNAME = subprocess.run(['true'])"
    for student, lines in {"anna": library, "ben": own}.items():
        used = "NAME, plt" if student == "anna" else "NAME"
        notebook(tmp_path / f"{student}.ipynb", IMPORTS, lines, rate(f"{used}\n{RATE_BODY}"))
    results = graded(tmp_path)
    assert results["anna"]["points"] == 1, results["anna"]
    assert "starts another program (true)" in results["ben"]["exercises"][RATE]["message"]


@pytest.mark.processes
def test_an_error_names_the_statement_that_has_failed_before(tmp_path: Path, graded: Any) -> None:
    notebook(tmp_path / "anna.ipynb", IMPORTS, "import no_such_library", rate("no_such_library\n" + RATE_BODY))
    verdict = graded(tmp_path)["anna"]["exercises"][RATE]
    assert "NameError" in verdict["message"]
    assert "before, in the notebook's cell 2, line 1: ModuleNotFoundError" in verdict["details"][-2]
    assert verdict["details"][-1] == SELECTED


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
    imports = rate("from labkit.exercises import data_parallel\nreturn base * per_rank * ranks / base_batch")
    dynamic = "name = 'labkit.' + 'exercises.data_parallel'\noracle = __import__(name)\n"
    notebook(tmp_path / "class" / "anna.ipynb", IMPORTS, right_average, RIGHT_RATE)
    notebook(tmp_path / "class" / "ben.ipynb", IMPORTS, imports)
    notebook(tmp_path / "class" / "cem.ipynb", IMPORTS, dynamic, RIGHT_RATE.replace("return", "oracle; return"))
    written = tmp_path / "results.json"
    command = [*SYSTEMS[system], sys.executable, "-m", "labkit", "grade", str(tmp_path / "class"), "--json", str(written)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert ("allows no namespaces" in ended.stdout) == (system == "no namespaces")
    students = json.loads(written.read_text())["students"]
    assert {student: one["points"] for student, one in students.items()} == {"anna": 2, "ben": 0, "cem": 0}
    assert "Refused: the notebook opens " in students["cem"]["exercises"][RATE]["message"]


OWN = """
from labkit.exercises.comparisons import wrong_if
from labkit.exercises.exercise import exercise

@exercise("my_lesson", "That is half.")
def half(answer):
    'half(x) returns half of x.'
    wrong_if(answer(3.0) != 1.5, "that is not half")
"""


@pytest.mark.processes
def test_an_exercise_of_a_courses_own_module_which_answers_cannot_read(
    tmp_path: Path, graded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "course").mkdir()
    (tmp_path / "course" / "own_exercises.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path / "course")
    check = "\n\nlab.check('half', half)"
    notebook(tmp_path / "anna.ipynb", IMPORTS, "def half(x):\n    return x / 2" + check)
    reads = f"def half(x):\n    open({str(tmp_path / 'course' / 'own_exercises.py')!r})\n    return x / 2"
    notebook(tmp_path / "ben.ipynb", IMPORTS, reads + check)
    results = graded(tmp_path / "anna.ipynb", tmp_path / "ben.ipynb", "--modules", "own_exercises")
    assert {student: one["points"] for student, one in results.items()} == {"anna": 1, "ben": 0}
    assert results["ben"]["exercises"]["half"]["message"].startswith("Refused: it opens own_exercises.py")


CHEATS = {
    # its code: what the verdict says
    "from pathlib import Path\nsource = Path(lab.__file__).parent / 'exercises' / 'comparisons.py'\nexec(source.read_text())": (
        "opens comparisons.py"
    ),
    f"open('{ROOT}/notebooks/solutions/{LESSON}.ipynb')": f"opens {LESSON}.ipynb",
    f"exec(open('{ROOT}/notebooks/judges/data_parallel.py').read())": "opens data_parallel.py",
    "import sys\nreturn getattr(sys, '_get' + 'frame')(1)": "looks at",
    "import socket\nsocket.create_connection(('192.0.2.1', 80), timeout=1)": "looks up the address of 192.0.2.1",
    "import subprocess\nsubprocess.run(['true'])": "starts another program",
    "class P:\n    def __reduce__(self):\n        return eval, ('1',)\nreturn P()": "expected numbers",
    "import labkit.exercises.data_parallel": "looks at the code that judges it",
}


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("attempt", CHEATS)
def test_a_dishonest_answer_fails_and_says_why(attempt: str, tmp_path: Path, graded: Any) -> None:
    result = "\nreturn base * per_rank * ranks / base_batch"
    swallowed = (
        attempt if "return" in attempt else "try:\n    " + attempt.replace("\n", "\n    ") + "\nexcept BaseException:\n    pass"
    )
    notebook(tmp_path / "cheat.ipynb", IMPORTS, rate(swallowed + result))
    verdict = graded(tmp_path / "cheat.ipynb")["cheat"]["exercises"][RATE]
    assert not verdict["passed"]
    assert CHEATS[attempt] in verdict["message"]


@pytest.mark.processes
@pytest.mark.slow
def test_what_is_written_into_open_files_is_no_verdict_on_another_exercise(tmp_path: Path, graded: Any) -> None:
    text = "b'opens the safe\\n' * 100"
    writes = f"import os\n    for fd in range(3, 200):\n        try: os.write(fd, {text})\n        except OSError: pass"
    first = f"def {AVERAGE}(model):\n    {writes}\n\nlab.check('{AVERAGE}', {AVERAGE})"
    notebook(tmp_path / "writes.ipynb", IMPORTS, first, RIGHT_RATE)
    exercises = graded(tmp_path / "writes.ipynb")["writes"]["exercises"]
    assert not exercises[AVERAGE]["passed"]
    assert exercises[RATE]["passed"], exercises


@pytest.mark.processes
@pytest.mark.slow
def test_a_file_cannot_fill_the_disk(tmp_path: Path, graded: Any) -> None:
    endless = "import tempfile\nwith tempfile.TemporaryFile() as file:\n    file.truncate(2**30 + 1)\nreturn 0.1"
    notebook(tmp_path / "fills.ipynb", IMPORTS, rate(endless))
    verdict = graded(tmp_path / "fills.ipynb")["fills"]["exercises"][RATE]
    assert "File too large" in verdict["message"]


@pytest.mark.processes
@pytest.mark.slow
def test_a_submission_cannot_read_another_one_nor_change_how_it_is_judged(tmp_path: Path, graded: Any) -> None:
    other = notebook(tmp_path / "class" / "anna.ipynb", IMPORTS, RIGHT_RATE)
    notebook(
        tmp_path / "class" / "reads.ipynb",
        IMPORTS,
        f"text = open({str(other)!r}).read()",
        RIGHT_RATE.replace("return", "text; return"),
    )
    notebook(tmp_path / "class" / "rebinds.ipynb", IMPORTS, "lab.check = lambda *_: True\nprint('passed')", rate("return 0"))
    results = graded(tmp_path / "class")
    assert {student: one["points"] for student, one in results.items()} == {"anna": 1, "reads": 0, "rebinds": 0}
    assert results["reads"]["exercises"][RATE]["message"] == (
        "Refused: the notebook opens anna.ipynb, which is not for submissions. No exercise counts, since this was before the "
        "answers were judged."
    )


@pytest.mark.processes
@pytest.mark.slow
def test_one_exercise_that_breaks_its_judge_does_not_cost_the_others(tmp_path: Path, graded: Any, right_average: str) -> None:
    hoard = "hoard = []\nwhile True:\n    hoard.append(bytearray(100_000_000))"
    swallows = "while True:\n        try:\n            while True: print('x' * 100)\n        except BaseException: pass"
    endless = f"def {AVERAGE}(model):\n    {swallows}"
    notebook(tmp_path / "memory.ipynb", IMPORTS, rate(hoard), right_average)
    notebook(tmp_path / "endless.ipynb", IMPORTS, endless + f"\n\nlab.check('{AVERAGE}', {AVERAGE})", RIGHT_RATE)
    notebook(tmp_path / "crash.ipynb", IMPORTS, "import os\nstop = os._exit(3)", RIGHT_RATE.replace("return", "stop; return"))
    results = graded(
        tmp_path / "memory.ipynb", tmp_path / "endless.ipynb", tmp_path / "crash.ipynb", "--limit-s", 10, "--memory-mb", 2500
    )
    assert {student: one["points"] for student, one in results.items()} == {"memory": 1, "endless": 1, "crash": 0}
    assert "MB of memory" in results["memory"]["exercises"][RATE]["message"]
    assert "Not finished after 10 s" in results["endless"]["exercises"][AVERAGE]["message"]
    assert "ended with exit code 3" in results["crash"]["exercises"][RATE]["message"]


@pytest.mark.processes
def test_an_answer_that_needs_a_group_of_the_notebook_may_open_it(tmp_path: Path, graded: Any) -> None:
    group = "group = lab.Group(2, runtime='bare')\nranks = len(group.run(lambda: 1).results)\ngroup.close()"
    body = "return base * per_rank * ranks * (two / 2) / base_batch"
    notebook(tmp_path / "ben.ipynb", IMPORTS, group, "two = ranks", rate(body))
    assert graded(tmp_path)["ben"]["points"] == 1


@pytest.mark.processes
def test_an_answer_gets_nothing_of_the_teachers_environment(tmp_path: Path, graded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHERS_TOKEN", "secret")
    assert os.environ["TEACHERS_TOKEN"] == "secret"
    body = "import os\nreturn base * per_rank * ranks / base_batch if 'TEACHERS_TOKEN' not in os.environ else 0"
    notebook(tmp_path / "anna.ipynb", IMPORTS, rate(body))
    assert graded(tmp_path / "anna.ipynb")["anna"]["points"] == 1


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("lesson", sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb")))
def test_every_reference_solution_gets_all_points_with_other_inputs(lesson: str, tmp_path: Path, graded: Any) -> None:
    notebook(tmp_path / "anna" / f"{lesson}.ipynb", *code_cells(ROOT / "notebooks" / "solutions" / f"{lesson}.ipynb"))
    anna = graded(tmp_path, "--seed", 2)["anna"]
    assert {name: one["message"] for name, one in anna["exercises"].items() if not one["passed"]} == {}
