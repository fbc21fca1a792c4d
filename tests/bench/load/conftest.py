"""What the loads need to be measured alone."""

from __future__ import annotations

import pytest

from labkit.group.open_groups import notebook


@pytest.fixture
def nothing_imports() -> None:
    """No descendant of this process is still importing, and growing, by itself."""
    for key, starter in list(notebook.starters.items()):
        if starter.importing:
            notebook.starters.pop(key).close()
