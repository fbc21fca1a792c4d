"""Where this notebook runs: a hosted service, a hub, a container or a plain machine; and the known limits of each."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from labkit.notebook.findings import Finding


@dataclass(frozen=True, slots=True)
class PlaceFound:
    """A place where notebooks run."""

    name: str  # "" for a plain machine
    variables: tuple[str, ...] = ()  # that exist only there
    files: tuple[str, ...] = ()  # that exist only there
    limits: str = ""
    shared_memory: str = "it cannot be enlarged here: use DataLoader(..., num_workers=0)"  # what enlarges its /dev/shm
    hosted: bool = False  # whether its kernel comes with packages that an installation should not replace
    has_kernel: bool = False  # whether this process is a kernel, so that some front end is at hand


PLAIN: Final = PlaceFound("", shared_memory="sudo mount -o remount,size=2G /dev/shm")
# The first that fits. Kaggle's image is made from Colab's, Binder is a JupyterHub, and all but Colab run in containers.
_PLACES: Final = (
    # https://github.com/Kaggle/kagglehub/blob/main/src/kagglehub/env.py, https://www.kaggle.com/docs/notebooks
    PlaceFound(
        "Kaggle", ("KAGGLE_KERNEL_RUN_TYPE",), hosted=True,
        limits="a session lasts 12 hours at most; with internet switched off, pip installs only from files of a dataset",
    ),
    # https://github.com/Kaggle/kagglehub/pull/230, https://research.google.com/colaboratory/faq.html
    PlaceFound(
        "Google Colab", ("COLAB_RELEASE_TAG",), hosted=True,
        limits="a runtime without charge lasts 12 hours at most, ends earlier when it is idle, and its files end with it",
    ),
    # https://github.com/jupyterhub/binderhub/blob/main/binderhub/binderspawner_mixin.py,
    # https://mybinder.readthedocs.io/en/latest/about/user-guidelines.html
    PlaceFound(
        "Binder", ("BINDER_LAUNCH_HOST", "BINDER_REPO_URL"), hosted=True,
        limits="mybinder.org gives 1 to 2 GB of memory, and ends a session after 10 minutes without activity, or after 6 hours",
    ),
    # https://docs.github.com/en/codespaces/developing-in-a-codespace/default-environment-variables-for-your-codespace,
    # https://docs.github.com/en/codespaces/setting-your-user-preferences/setting-your-timeout-period-for-github-codespaces
    PlaceFound(
        "GitHub Codespaces", ("CODESPACES",),
        limits="a codespace stops after 30 minutes without activity, unless its settings say otherwise",
        shared_memory='add  "runArgs": ["--shm-size=1g"]  to .devcontainer/devcontainer.json, and rebuild the container',
    ),
    # https://jupyterhub.readthedocs.io/en/stable/reference/api/spawner.html
    PlaceFound(
        "JupyterHub", ("JUPYTERHUB_USER", "JUPYTERHUB_API_URL"), hosted=True,
        limits="its administrators limit memory, cores and idle time",
        shared_memory="ask its administrators for a volume  emptyDir: {medium: Memory}  at /dev/shm",
    ),
    # https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
    PlaceFound(
        "a Kubernetes pod", ("KUBERNETES_SERVICE_HOST",), limits="the pod's resources limit memory and cores",
        shared_memory="mount a volume  emptyDir: {medium: Memory}  at /dev/shm",
    ),
    # https://docs.podman.io/en/latest/markdown/podman-run.1.html
    PlaceFound(
        "a Podman container", files=("run/.containerenv",), limits="options of podman run limit memory and cores",
        shared_memory="start the container with  podman run --shm-size=1g",
    ),
    # Docker documents no mark; it has created this file since 2013: https://github.com/moby/moby/blob/master/daemon/initlayer
    PlaceFound(
        "a Docker container", files=(".dockerenv",), limits="options of docker run limit memory and cores",
        shared_memory="start the container with  docker run --shm-size=1g",
    ),
)  # fmt: skip


def find_place(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> PlaceFound:
    """Return where this process runs. Tests pass an environment and a root of their own."""
    found = next(
        (p for p in _PLACES if any(map(environment.get, p.variables)) or any((root / file).exists() for file in p.files)), PLAIN
    )
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return replace(found, has_kernel=hasattr(shell, "kernel"))


def place(place: PlaceFound) -> list[Finding]:
    """Report the place, unless it is a plain machine."""
    return [Finding(f"{place.name}: {place.limits}")] if place.name else []
