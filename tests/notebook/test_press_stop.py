"""Stop is pressed where a program executes a notebook, and nowhere else."""

import threading

import pytest

from labkit.notebook import press_stop as module
from labkit.notebook.press_stop import press_stop

LIMIT_S = 60


@pytest.fixture
def presses(monkeypatch):
    """An event that is set instead of interrupting the main thread, and no notebook that is open."""
    pressed = threading.Event()
    monkeypatch.setattr(module._thread, "interrupt_main", pressed.set)
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    return pressed


def test_a_program_that_executes_the_notebook_is_interrupted(presses):
    press_stop(0)
    assert presses.wait(LIMIT_S)


@pytest.mark.usefixtures("presses")
def test_a_person_presses_stop_without_help(monkeypatch):
    monkeypatch.setenv("JPY_SESSION_NAME", "some/folder/00_start_here.ipynb")
    monkeypatch.setattr(module.threading, "Timer", lambda *_: pytest.fail("a timer was started"))
    press_stop(0)


@pytest.mark.parametrize(("value", "error"), [("1", TypeError), (True, TypeError), (-1, ValueError), (float("inf"), ValueError)])
def test_invalid_times(value, error):
    with pytest.raises(error, match=r"press_stop\(.*\): expected a number of seconds"):
        press_stop(value)
