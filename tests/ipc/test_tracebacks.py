"""How an error in a rank is shown: its headline, also if a framework's message begins with something else."""

from __future__ import annotations

import argparse

import pytest

from labkit.ipc.tracebacks import headline, in_students_code, students_traceback
from labkit.recording.record import here, is_students

AUTOGRAPH = """in user code:

    File "/kernel/123.py", line 6, in f  *
        x = x @ y

    ValueError: Dimensions must be equal"""

TRACED_KERAS = """in user code:

    File "/kernel/123.py", line 6, in f  *
        return model(x)
    File "/lib/site-packages/keras/src/utils/traceback_utils.py", line 122, in error_handler  **
        raise e.with_traceback(filtered_tb) from None

    ValueError: Exception encountered when calling Sequential.call().
    {}
    Input 0 of layer 'dense' is incompatible with the layer

    Arguments received by Sequential.call():
      • inputs=tf.Tensor(shape=(4, 5, 5), dtype=float32)
      • kwargs=<class 'inspect._empty'>
"""

TRIED_OUT = """
    Could not automatically infer the output shape of 'my'. Error encountered:
"""

IN_THE_GRAPH = """Graph execution error:

Detected at node MatMul defined at (most recent call last):
  File "<string>", line 1, in <module>

  File "/kernel/123.py", line 4, in f

Matrix size-incompatible: In[0]: [2,3], In[1]: [2,3]
\t [[{{node MatMul}}]] [Op:__inference_f_31]"""

KERAS = """Exception encountered when calling Sequential.call().

\x1b[1mInvalid input shape. Expected shape (None, 1000)\x1b[0m

Arguments received by Sequential.call():
  • training=False"""

IN_A_WORKER = """Caught RuntimeError in DataLoader worker process 3.
Original Traceback (most recent call last):
  File "worker.py", line 374, in _worker_loop
    data = fetcher.fetch(index)
           ^^^^^^^^^^^^^^^^^^^^
RuntimeError: unable to allocate: No space left
with a second line
"""


@pytest.fixture(autouse=True)
def _cell_7(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that represents the student's cell 7."""
    monkeypatch.setattr(here, "files", {"/kernel/123.py": "cell 7"})
    is_students.cache_clear()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("wrong"), "ValueError: wrong"),
        (RuntimeError("sizes differ:\n  2 and 3"), "RuntimeError: sizes differ:"),
        (SystemExit(3), "the function called exit(3)"),
        (SystemExit(), "the function called exit()"),
        (SyntaxError("invalid syntax", ("f.py", 1, 5, "x = ", 1, 6)), "SyntaxError: invalid syntax"),
        (ValueError(AUTOGRAPH), "ValueError: Dimensions must be equal"),
        (ValueError(IN_THE_GRAPH), "ValueError: Matrix size-incompatible: In[0]: [2,3], In[1]: [2,3]"),
        (ValueError(KERAS), "ValueError: Invalid input shape. Expected shape (None, 1000)"),
        (ValueError(TRACED_KERAS.format("")), "ValueError: Input 0 of layer 'dense' is incompatible with the layer"),
        (ValueError(TRACED_KERAS.format(TRIED_OUT)), "ValueError: Input 0 of layer 'dense' is incompatible with the layer"),
        (RuntimeError(IN_A_WORKER), "RuntimeError: unable to allocate: No space left in DataLoader worker process 3"),
        (RuntimeError("Caught E in DataLoader worker process 3."), "RuntimeError: Caught E in DataLoader worker process 3."),
        (ValueError("Exception encountered when calling nothing"), "ValueError: Exception encountered when calling nothing"),
    ],
)
def test_the_headline_names_the_error(error: BaseException, expected: str) -> None:
    assert headline(error) == expected


def test_a_command_line_that_argparse_refuses_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser(prog="")
    parser.add_argument("epochs", type=int)
    with pytest.raises(SystemExit) as refused:
        parser.parse_args([])
    assert "parse_args(['--epochs', '3'])" in headline(refused.value)
    assert "epochs" in capsys.readouterr().err


def raised(message: str, filename: str = "/kernel/123.py") -> BaseException:
    """The error that a function of that file raises."""
    space = {"message": message}
    with pytest.raises(ValueError, match="rror") as caught:
        exec(compile("def f():\n    raise ValueError(message)\n\nf()", filename, "exec"), space)
    return caught.value


def test_messages_name_the_cell_and_no_library() -> None:
    text = students_traceback(raised(IN_THE_GRAPH))
    assert 'File "cell 7", line 4, in <module>' in text
    assert '  File "cell 7", line 4, in f\n' in text
    assert "<string>" not in text


def test_code_generated_by_autograph_is_not_the_students() -> None:
    generated = "/tmp_of_tensorflow/__autograph_generated_file1.py"
    error = raised(AUTOGRAPH, generated)
    assert not is_students(generated)
    assert not in_students_code(error.with_traceback(error.__traceback__.tb_next.tb_next))  # type: ignore[union-attr]
    assert "__autograph" not in students_traceback(error)
