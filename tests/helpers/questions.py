"""What `test_findings.py` asks other processes, which import it by name."""

from __future__ import annotations

import os
import signal
import time
from typing import Any


def noisy() -> dict[str, Any]:
    print("noise")
    return {"gpus": 3}


def not_importable() -> dict[str, Any]:
    import nothing_of_this_name  # type: ignore[import-not-found]

    return {"name": nothing_of_this_name.__name__}


def crash() -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def leave() -> dict[str, Any]:
    raise SystemExit(7)


def sleep() -> dict[str, Any]:
    time.sleep(100)
    return {}


def write() -> dict[str, Any]:
    """Replies when another process reads."""
    with open(os.environ["MEETING"], "w") as pipe:
        pipe.write("met")
    return {}


def read() -> dict[str, Any]:
    """Replies when another process writes."""
    with open(os.environ["MEETING"]) as pipe:
        return {"read": pipe.read()}
