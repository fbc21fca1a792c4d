"""What the student reads when something goes wrong: the wording of reports, in a notebook, in a log and after
pickling."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import labkit as lab
from labkit.errors.exceptions import DeadlockError, LabError, RankError, RankFailure, install_command, missing

TRACEBACK = """Traceback (most recent call last):
  File "cell 5", line 3, in train
    return batch @ weights
ValueError: shapes (32,10) and (20,5) not aligned
"""
CRASH = RankFailure(2, "rank 2", "ValueError: shapes (32,10) and (20,5) not aligned", TRACEBACK, at_ns=7)


def test_the_first_cause_comes_first_and_the_others_take_a_line_each() -> None:
    error = RankError(
        [CRASH, RankFailure(0, "rank 0", "killed by SIGABRT (C or C++ code gave up)")],
        ["rank 1 was waiting in all_reduce (cell 5, line 4) for 0.1 s", "rank 3 had returned"],
    )
    assert error.report().splitlines() == [
        "─" * 70,
        "rank 2 failed: ValueError: shapes (32,10) and (20,5) not aligned",
        "",
        "Traceback (most recent call last):",
        '  File "cell 5", line 3, in train',
        "    return batch @ weights",
        "ValueError: shapes (32,10) and (20,5) not aligned",
        "",
        "Meanwhile:",
        "    rank 0: killed by SIGABRT (C or C++ code gave up)",
        "    rank 1 was waiting in all_reduce (cell 5, line 4) for 0.1 s",
        "    rank 3 had returned",
        "",
        "All ranks were stopped; the next run starts fresh ones.",
        "─" * 70,
    ]
    assert error.rank == 2


def test_the_same_failure_on_several_ranks_is_reported_once() -> None:
    headline = CRASH.headline
    same = [RankFailure(0, "master", headline, TRACEBACK), RankFailure(1, "shard 1", headline, TRACEBACK)]
    report = RankError([CRASH, *same]).report()
    assert report.count(headline) == 2, "once as the headline, once as the traceback's last line"
    assert "\n    (the same on master, shard 1)\n" in report
    assert "Meanwhile" not in report


def test_a_rank_that_died_without_a_report() -> None:
    report = RankError([RankFailure(0, "rank 0", "killed by SIGKILL (the machine ran out of memory)")]).report()
    assert report.splitlines()[1:-1] == [
        "rank 0 failed: killed by SIGKILL (the machine ran out of memory)",
        "",
        "All ranks were stopped; the next run starts fresh ones.",
    ]


def test_a_notebook_shows_the_report_and_nothing_else() -> None:
    error = RankError([CRASH])
    assert error._render_traceback_() == [f"RankError: {error.report()}"]
    stuck = DeadlockError("rank 0 waits in recv for rank 1", "", ["rank 0 was waiting in recv"])
    assert stuck._render_traceback_()[0].startswith("DeadlockError: ───")
    assert LabError("Group(0): at least one rank")._render_traceback_() == ["LabError: Group(0): at least one rank"]


@pytest.mark.processes
def test_ipython_shows_it_without_the_frames_of_labkit(tmp_path: Path) -> None:
    code = "from labkit.errors.exceptions import *; raise RankError([RankFailure(1, 'rank 1', 'KeyError: 3', 'cell 5, line 3')])"
    shell = subprocess.run(
        [sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor", "-c", code],
        env=os.environ | {"IPYTHONDIR": str(tmp_path)},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert shell.stdout.splitlines() == [
        "RankError: " + "─" * 70,
        "rank 1 failed: KeyError: 3",
        "",
        "cell 5, line 3",
        "",
        "All ranks were stopped; the next run starts fresh ones.",
        "─" * 70,
    ]


def test_a_log_has_the_report_below_the_name_of_the_error() -> None:
    error = RankError([CRASH])
    assert str(error) == "\n" + error.report()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_survives_pickling(protocol: int) -> None:
    error = RankError([CRASH], ["rank 1 had returned"])
    copy = pickle.loads(pickle.dumps(error, protocol))
    assert type(copy) is RankError
    assert (copy.failures, copy.others, str(copy)) == (error.failures, error.others, str(error))
    plain = pickle.loads(pickle.dumps(LabError("no group"), protocol))
    assert (type(plain), str(plain)) == (LabError, "no group")


ENDS = [RankError([CRASH]), *(kind("why", "", []) for kind in (DeadlockError, lab.MismatchError, lab.RunTimeoutError))]


@pytest.mark.parametrize("error", ENDS, ids=lambda error: type(error).__name__)
def test_one_public_name_catches_every_error_that_ends_a_run(error: LabError) -> None:
    assert getattr(lab, type(error).__name__) is type(error)
    assert isinstance(error, lab.RunError)
    assert issubclass(lab.RunError, lab.LabError)


def test_stop_ends_loops_that_catch_errors() -> None:
    assert issubclass(lab.Stopped, KeyboardInterrupt)
    assert not issubclass(lab.Stopped, Exception)


@pytest.mark.parametrize(
    ("wrong", "right"), [("Deadlock", "DeadlockError"), ("TimeoutError", "RunTimeoutError"), ("RunErrors", "RunError")]
)
def test_the_hint_at_a_wrong_name_names_the_error_that_is_meant(wrong: str, right: str) -> None:
    with pytest.raises(AttributeError, match=f"labkit has no '{wrong}'; did you mean '{right}'"):
        getattr(lab, wrong)


def test_a_missing_package_names_the_extra_and_the_command() -> None:
    error = missing("TensorFlow", "tf")
    assert isinstance(error, LabError)
    assert install_command("tf") == 'pip install "labkit[tf]"'
    assert str(error) == (
        "TensorFlow is not installed; the extra 'tf' brings it:  pip install \"labkit[tf]\"  "
        '(in a notebook cell: %pip install "labkit[tf]")'
    )
