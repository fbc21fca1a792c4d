"""Whether a machine has other users, by its tables of accounts."""

from __future__ import annotations

from pathlib import Path

import pytest

from labkit.worker import network_namespace as module
from labkit.worker.network_namespace import other_users

SYSTEM = """\
root:x:0:0:root:/root:/bin/bash
sync:x:4:65534:sync:/bin:/bin/sync
postgres:x:101:103:PostgreSQL:/var/lib/postgresql:/bin/bash
build:x:1500:1500::/nonexistent:/usr/sbin/nologin
nobody:x:65534:65534:nobody:/nonexistent:/bin/sh
"""
ANN = "ann:x:1000:1000:Ann,,,:/nonexistent:/bin/bash\n"
BEN = "ben:x:1001:1001::/nonexistent:/usr/bin/zsh\n"
FILES = "passwd:         files systemd\ngroup: ldap\n"


@pytest.mark.parametrize(
    ("me", "accounts", "sources", "others"),
    [
        (1000, SYSTEM + ANN, FILES, False),  # a laptop
        (0, SYSTEM, FILES, False),  # a container
        (0, SYSTEM, None, False),  # a container of Alpine Linux
        (0, SYSTEM + ANN, FILES, True),
        (1000, SYSTEM + ANN + BEN, FILES, True),
        (1000, SYSTEM + ANN, "passwd: files [NOTFOUND=continue] ldap\n", True),
        (1000, SYSTEM + ANN, "passwd: files [NOTFOUND=return]\n", False),
        (70000, SYSTEM, FILES, True),  # this user's account is elsewhere
        (0, None, FILES, True),
    ],
)
def test_who_may_log_in(
    me: int, accounts: str | None, sources: str | None, others: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("ACCOUNTS", accounts), ("SOURCES", sources)):
        file = tmp_path / name
        monkeypatch.setattr(module, name, file)
        if text is not None:
            file.write_text(text)
    assert other_users(me) is others
