# JupyterLab on a student's copies of the lessons, not as root. docs/containers.md says how to build and run it.
ARG BASE=python:3.11.15-slim-bookworm
FROM ${BASE}

# Versions follow Debian's release, which BASE names. tini ends as process 1 what a killed kernel leaves behind.
ARG DEBIAN_PACKAGES="tini"
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ${DEBIAN_PACKAGES} \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --home-dir /srv/student --uid 1000 --shell /bin/bash student

ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore

# pip reads PIP_EXTRA_INDEX_URL: an index with CPU builds of torch. Without it, torch comes with CUDA.
ARG PIP_EXTRA_INDEX_URL
ARG EXTRAS="course,tf"
WORKDIR /srv/labkit
# The dependencies get a layer of their own, several times larger than labkit's: a new version of labkit does not change it.
COPY pyproject.toml constraints.txt ./
RUN mkdir labkit notebooks && touch README.md LICENSE \
    && printf '"""Only the dependencies."""\n__version__ = "0"\n' > labkit/__init__.py \
    && python -m pip install -c constraints.txt ".[${EXTRAS}]"
COPY README.md LICENSE ./
COPY labkit labkit
COPY notebooks notebooks
RUN python -m pip install --no-deps .

USER 1000
WORKDIR /srv/student
EXPOSE 8888
ENTRYPOINT ["tini", "--"]
# All addresses of the container; which of them can be reached from outside, `docker run -p` decides.
CMD ["python", "-m", "labkit", "lab", "--ip=0.0.0.0"]
