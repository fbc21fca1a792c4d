"""The file of a student's guesses: written in one step, explained when it is broken."""

import json

import pytest

from labkit.errors.exceptions import LabError
from labkit.teaching.guesses import FILE, SavedGuess, entries, entry_for_update


def seal(folder, name, value, lesson="02"):
    with entry_for_update(folder, lesson, name) as entry:
        entry.guess = value


def test_guesses_are_read_back_in_order(tmp_path):
    seal(tmp_path, "step_ms", 12.0)
    seal(tmp_path, "waits", "rank 1", lesson="04")
    seal(tmp_path, "step_ms", 13.0)
    assert entries(tmp_path) == [SavedGuess("02", "step_ms", 13.0), SavedGuess("04", "waits", "rank 1")]


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
    assert entries(tmp_path) == [SavedGuess("02", "step_ms", 12.0)]
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"version": 1}', '{"version": 1, "guesses": [{"name": 1}]}', '{"version": 1, "guesses": 3}'],
)
def test_a_broken_file_is_one_clear_error(tmp_path, content):
    (tmp_path / FILE).write_text(content)
    with pytest.raises(LabError, match=r"my_guesses\.json: not a file of guesses; repair or delete it"):
        entries(tmp_path)


def test_a_byte_order_mark_is_no_part_of_the_guesses(tmp_path):
    """Editors on Windows add one when they save a file."""
    content = json.dumps({"version": 1, "guesses": [{"lesson": "02", "name": "step_ms", "guess": 3.0}]})
    (tmp_path / FILE).write_bytes(b"\xef\xbb\xbf" + content.encode())
    assert [(e.name, e.guess) for e in entries(tmp_path)] == [("step_ms", 3.0)]


def test_a_file_of_another_version_is_named(tmp_path):
    (tmp_path / FILE).write_text(json.dumps({"version": 99, "guesses": []}))
    with pytest.raises(LabError, match=r"another version of labkit \(99\)"):
        entries(tmp_path)


def test_a_file_that_a_newer_labkit_wrote_with_more_fields_is_read(tmp_path):
    (tmp_path / FILE).write_text(
        json.dumps({"version": 1, "guesses": [{"lesson": "02", "name": "q", "guess": 1, "mood": "good"}]})
    )
    assert entries(tmp_path) == [SavedGuess("02", "q", 1)]


def test_a_folder_that_is_gone_is_named(tmp_path):
    with pytest.raises(LabError, match=r"my_guesses\.json: cannot be written \(No such file"):
        seal(tmp_path / "gone", "step_ms", 12.0)


def test_a_file_in_another_encoding_is_one_clear_error(tmp_path):
    (tmp_path / FILE).write_bytes('{"version": 1, "guesses": []}'.encode("utf-16"))
    with pytest.raises(LabError, match="not a file of guesses; repair or delete it"):
        entries(tmp_path)


def test_a_link_to_the_file_and_its_permissions_are_kept(tmp_path):
    folder, real = tmp_path / "lessons", tmp_path / "real.json"
    folder.mkdir()
    seal(tmp_path, "step_ms", 1.0)
    (tmp_path / FILE).rename(real)
    real.chmod(0o640)
    (folder / FILE).symlink_to(real)
    seal(folder, "step_ms", 2.0)
    assert (folder / FILE).is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    assert entries(folder) == [SavedGuess("02", "step_ms", 2.0)]


def test_a_file_that_is_read_only_is_not_replaced(tmp_path):
    seal(tmp_path, "step_ms", 1.0)
    (tmp_path / FILE).chmod(0o444)
    with pytest.raises(LabError, match=r"my_guesses\.json: cannot be written \(it is read-only\)"):
        seal(tmp_path, "step_ms", 2.0)
    assert entries(tmp_path) == [SavedGuess("02", "step_ms", 1.0)]
