"""The first thing that a process of a submission or of a judge runs: `python -m labkit.classroom.confined MODULE FD`.

It enters namespaces of its own, and then imports the module. A user who is not root may enter them only while the
process has a single thread, and numpy and torch start others when they are imported.
"""

from __future__ import annotations

import importlib
import sys

from labkit.classroom.confinement import new_namespaces

if __name__ == "__main__":
    refused = new_namespaces()
    importlib.import_module(sys.argv[1]).main(int(sys.argv[2]), covered=not refused)
