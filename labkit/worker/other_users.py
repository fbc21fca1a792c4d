"""Whether other people can log in to this machine, and so reach ports on its loopback interface."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

ACCOUNTS: Final = Path("/etc/passwd")
SOURCES: Final = Path("/etc/nsswitch.conf")  # where accounts come from
LOCAL_SOURCES: Final = {"files", "compat", "altfiles", "systemd"}  # others, such as LDAP, have accounts of a whole site
FIRST_PERSON: Final = 1000  # smaller user ids belong to the system
NOBODY: Final = 65534
NO_LOGIN: Final = ("nologin", "false")


def other_users(me: int) -> bool:
    """Whether people other than this user and root may have accounts here; True if that is unknown.

    Source: passwd(5) and nsswitch.conf(5), the Linux man-pages.
    """
    try:
        accounts = [line.split(":") for line in ACCOUNTS.read_text().splitlines() if line.count(":") == 6]
    except OSError:
        return True
    people = {int(uid) for _, _, uid, _, _, _, shell in accounts if os.path.basename(shell) not in NO_LOGIN}
    known = any(int(account[2]) == me for account in accounts)
    return not known or _has_directory() or any(uid >= FIRST_PERSON and uid not in (me, NOBODY) for uid in people)


def _has_directory() -> bool:
    """Whether accounts come from a directory, too, whose members cannot be listed."""
    try:
        lines = SOURCES.read_text().splitlines()
    except OSError:
        return False  # the C library then reads files only
    sources = " ".join(line.partition(":")[2] for line in lines if line.strip().startswith("passwd:")).split()
    return not {source for source in sources if not source.startswith("[")} <= LOCAL_SOURCES
