"""The first thing that a process of a submission or of a judge runs: `python -m labkit.classroom.confined MODULE FD`.

It enters namespaces of its own, limits the size of files, and then imports the module. A user who is not root may enter
namespaces only while the process has a single thread, and numpy and torch start others when they are imported.
"""

from __future__ import annotations

import importlib
import resource
import sys
from typing import Final

from labkit.classroom.confinement import new_namespaces

MOST_IN_FILE: Final = 1 << 30  # bytes that one file can have; writing more raises OSError

if __name__ == "__main__":
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    most = MOST_IN_FILE if hard == resource.RLIM_INFINITY else min(MOST_IN_FILE, hard)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    refused = new_namespaces()
    importlib.import_module(sys.argv[1]).main(int(sys.argv[2]), covered=not refused)
