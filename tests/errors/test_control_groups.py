"""Which folders hold the limits of this process's control groups."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_control_groups import fake_control_groups

from labkit.errors.exit_reasons import control_group_folders


@pytest.mark.parametrize(
    ("path", "mounted_from", "folders"),
    [
        ("/", "/", ["."]),
        ("/pods/two", "/", ["pods/two", "pods", "."]),
        ("/docker/a/inner", "/docker/a", ["inner", "."]),  # a container without a namespace of its own
        ("/docker/a", "/docker/b", ["."]),
    ],
)
@pytest.mark.parametrize(("version", "mounted"), [("v1", "cpu,cpuacct"), ("v2", ".")])
def test_the_folders_of_a_process_begin_with_the_innermost(
    version: str, mounted: str, path: str, mounted_from: str, folders: list[str], tmp_path: Path
) -> None:
    below = fake_control_groups(tmp_path, version, path, mounted_from) / mounted
    found = [folder for folder in control_group_folders("cpu", tmp_path) if "unified" not in folder.parts]
    assert found == [below / folder for folder in folders]


def test_a_system_without_control_groups_has_no_folders(tmp_path: Path) -> None:
    assert not list(control_group_folders("cpu", tmp_path))
    fake_control_groups(tmp_path, "none")
    assert not list(control_group_folders("cpu", tmp_path))
