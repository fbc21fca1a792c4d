# labkit: `make lab` opens the lessons, `make test` checks everything, `make help` lists the rest.
# Needs Python 3.11 to 3.13, make and a package index; works with the make of macOS (3.81).

VENV := .venv
BIN := $(VENV)/bin
EXTRAS := course,tf,tensorboard,test
# If this file is newer than the files it was installed from, there is nothing to install.
INSTALLED := $(VENV)/installed

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup lab test test-slow quick test-versions lint format bench chaos gpu notebooks lesson diagrams pictures faults site wheel colab-links lock clean distclean

help:  ## this list
	@sed -n 's/^\([a-z0-9.-]*\):.*## /make \1|/p' Makefile | awk -F'|' '{printf "%-16s %s\n", $$1, $$2}'

setup: $(INSTALLED)  ## make the environment in .venv; a second time, nothing is installed

# If its Python was removed, .venv/bin/python is a dangling link: make sees no file and makes the environment again.
$(BIN)/python:
	@python=$$(sh tools/find-python) && echo "Python: $$python" && "$$python" -m venv --clear $(VENV)

$(INSTALLED): $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing into $(VENV). The first time this takes minutes: torch and TensorFlow are large."
	@$(BIN)/python -m pip install -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

lab: setup  ## open JupyterLab on lesson 00 (ARGS="--port=9000" reaches JupyterLab)
	@$(BIN)/python -m labkit lab $(ARGS)

# Files of tests and notebooks that run at a time, each in one process; 0: one after another, in pytest's own.
# With two on two cores, the cores are idle for a quarter of the time: tests wait for ranks, and ranks for one another.
JOBS := 3

PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --nbval-lax

test: lint  ## lint, types, all tests that are not marked slow, all notebooks, three files at a time (JOBS=0: one)
	$(PYTEST) -m "not slow" tests notebooks

test-slow: setup  ## the tests marked slow: in a browser, under load, with random faults, without parts of torch, ...
	$(PYTEST) -m slow tests

quick: setup  ## for daily work, under two minutes: lint, types, the tests that start no processes, lesson 00
	@$(MAKE) --no-print-directory -j2 quick-plots quick-tests quick-lesson

# Its parts, for two cores: the figures take half of the time of all tests, so they are a part of their own.
.PHONY: quick-plots quick-tests quick-lesson
quick-plots:
	$(BIN)/python -m pytest -m "not processes and not slow and not tf" tests/plots

quick-tests:
	$(BIN)/python -m pytest -m "not processes and not slow and not tf" tests --ignore=tests/plots

quick-lesson: lint
	$(BIN)/python -m pytest --nbval-lax notebooks/00_start_here.ipynb

test-versions: setup  ## a short suite on the other Pythons, and with Colab's and Kaggle's packages (ONLY="colab 3.13": these)
	@$(BIN)/python tools/versions.py $(ONLY)

lint: setup  ## ruff and mypy
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

format: setup  ## format the code with ruff and fix what it safely can
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

bench: setup  ## print the benchmarks, each beside its lower bound (ARGS="--help" lists options)
	$(BIN)/python -m bench.speed $(ARGS)

chaos: setup  ## 300 random faults at random moments, and what they left behind (ARGS="--help" lists options)
	$(BIN)/python -m bench.chaos $(ARGS)

gpu:  ## on a machine with GPUs: tests, lessons and a benchmark on them, into docs/gpu.md; installs nothing
	@for python in "$(PYTHON)" $(BIN)/python python3; do \
		"$$python" -c 'import sys, torch; sys.exit(not (sys.argv[1:] or torch.cuda.is_available()))' \
			$(findstring --rehearse,$(ARGS)) 2>/dev/null && exec "$$python" tools/gpu.py $(ARGS); \
	done; echo "labkit: no torch here sees a GPU: make gpu PYTHON=/path/to/python3 names another Python," \
		"and lab.doctor() says there what is missing" >&2; exit 1

notebooks: setup  ## execute the notebooks again from top to bottom (ONLY="02 10": these)
	$(BIN)/python tools/notebooks.py $(ONLY)
	$(BIN)/python -m tools.lesson_predictions

lesson: setup  ## make a new lesson from the template (NAME=19_my_topic)
	@$(BIN)/python -m tools.new_lesson $(NAME)

diagrams: setup  ## draw the diagrams of the lessons again, into notebooks/images
	$(BIN)/python -m tools.diagrams.draw

pictures: setup  ## draw the pictures of README and docs again, from real runs (ONLY="pipeline": that one)
	$(BIN)/python -m tools.pictures $(ONLY)

faults: setup  ## run the programs with faults, and write docs/faults.md
	$(BIN)/python -m tools.faults

site: setup  ## build the lessons and docs as static pages, in build/site
	$(BIN)/python -m tools.site

wheel: $(BIN)/python  ## build the wheel into dist: the package with its lessons; installs nothing
	rm -rf dist
	@$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

colab-links: setup  ## write the links of README and lessons to Colab, for the address in pyproject.toml
	$(BIN)/python -m tools.colab_links

lock: setup  ## write constraints.txt again from the contents of .venv
	@{ grep '^#' constraints.txt; $(BIN)/python -m pip freeze --all --exclude pip --exclude-editable | sed 's/+.*//'; } > constraints.new
	@mv constraints.new constraints.txt

clean:  ## remove what tests, tools and notebooks leave behind
	rm -rf .pytest_cache .mypy_cache .ruff_cache build dist
	find . -path ./$(VENV) -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d -print | xargs rm -rf

distclean: clean  ## also remove the environment
	rm -rf $(VENV)
