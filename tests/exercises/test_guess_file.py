"""The file of a student's guesses: written in one step, shared by kernels, explained when it is broken."""

import json
import threading

import pytest

from labkit.errors.exceptions import LabError
from labkit.exercises.guess_file import FILE, Entry, entries, entry_for_update


def seal(folder, name, value, lesson="02"):
    with entry_for_update(folder, lesson, name) as entry:
        entry.guess = value


def test_guesses_are_read_back_in_order(tmp_path):
    seal(tmp_path, "step_ms", 12.0)
    seal(tmp_path, "waits", "rank 1", lesson="04")
    seal(tmp_path, "step_ms", 13.0)
    assert entries(tmp_path) == [Entry("02", "step_ms", 13.0), Entry("04", "waits", "rank 1")]


def test_no_file_no_guesses(tmp_path):
    assert entries(tmp_path) == []


def test_what_does_not_change_is_not_written(tmp_path):
    with entry_for_update(tmp_path, "02", "step_ms"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_an_error_leaves_the_file_as_it_was(tmp_path):
    seal(tmp_path, "step_ms", 12.0)

    def fail():
        with entry_for_update(tmp_path, "02", "step_ms") as entry:
            entry.guess = 1.0
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert entries(tmp_path) == [Entry("02", "step_ms", 12.0)]
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_kernels_that_write_at_once_lose_no_guess(tmp_path):
    threads = [threading.Thread(target=seal, args=(tmp_path, f"q{i}", float(i))) for i in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(e.guess for e in entries(tmp_path)) == [float(i) for i in range(40)]


@pytest.mark.parametrize(
    "content", ["", "[]", '{"version": 1}', '{"version": 1, "guesses": [{"name": 1}]}', '{"version": 1, "guesses": 3}']
)
def test_a_broken_file_is_one_clear_error(tmp_path, content):
    (tmp_path / FILE).write_text(content)
    with pytest.raises(LabError, match=r"my_guesses\.json: not a file of guesses; repair or delete it"):
        entries(tmp_path)


def test_a_file_of_another_version_is_named(tmp_path):
    (tmp_path / FILE).write_text(json.dumps({"version": 99, "guesses": []}))
    with pytest.raises(LabError, match=r"another version of labkit \(99\)"):
        entries(tmp_path)


def test_a_file_that_a_newer_labkit_wrote_with_more_fields_is_read(tmp_path):
    (tmp_path / FILE).write_text(
        json.dumps({"version": 1, "guesses": [{"lesson": "02", "name": "q", "guess": 1, "mood": "good"}]})
    )
    assert entries(tmp_path) == [Entry("02", "q", 1)]


def test_a_folder_that_is_gone_is_named(tmp_path):
    with pytest.raises(LabError, match=r"my_guesses\.json: cannot be written \(No such file"):
        seal(tmp_path / "gone", "step_ms", 12.0)
