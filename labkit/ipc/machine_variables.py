"""Which of the notebook's environment variables ranks on other machines get.

They get those that have changed since `import labkit`, as the others describe the notebook's process and its machine;
of the changed ones, those that name something of a machine are not applied.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

AT_IMPORT: Final[Mapping[str, str]] = dict(os.environ)  # `import labkit` imports this file

NAMES: Final = frozenset(
    {
        "PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "CUDA_VISIBLE_DEVICES", "HOME", "USER", "LOGNAME", "SHELL", "HOSTNAME", "PWD",
        "OLDPWD", "TMPDIR", "PYTHONHOME", "VIRTUAL_ENV",
    }
)  # fmt: skip
PREFIXES: Final = ("CONDA_", "SLURM_", "SSH_", "XDG_")


def belongs_to_machine(name: str) -> bool:
    """Whether a variable describes a machine or a login there, so that its value is wrong on others."""
    return name in NAMES or name.startswith(PREFIXES)
