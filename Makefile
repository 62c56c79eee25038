# Everything from an empty checkout: `make run`, `make test`, `make lint`. The virtual environment is made on first use
# and again only when pyproject.toml or constraints.txt change.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
PACKAGES := models exchange strategies client_app server_app

.DEFAULT_GOAL := help
.PHONY: help run test test-containers bench docs lint clean

help:
	@echo "make run    set up and run the main job: five strategies by simulation, compared; results under runs/"
	@echo "make test   set up and run the unit and integration tests"
	@echo "make test-containers   build the images and run the tests of them (needs a Docker engine)"
	@echo "make bench  set up and run all benchmarks, each beside what one would use instead; results under runs/bench/"
	@echo "make docs   build the documentation as a site that can be read from disk: site/index.html"
	@echo "make lint   check style (ruff) and types (mypy)"
	@echo "make clean  remove the virtual environment, caches and build outputs; runs/ stays"
	@echo "PYTHON=...  the Python to build the environment with (3.11 or newer), default: python3"
	@echo "VENV=...    where that environment is (a path without spaces: Ray cannot run from one), default: .venv"

run: $(VENV)/.ready-run
	$(BIN)/tepal compare .

# One thread each, because two tests run side by side. Integration tests mostly wait: for processes to start, and for
# Flower to look again. They are at the mercy of a machine that does something else, so that what failed is run once
# more, with the machine to itself; what fails twice has failed, and what failed once is there to be read above it.
AGAIN := --last-failed --last-failed-no-failures none
test: $(VENV)/.ready-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit -n 2 --dist loadscope
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/integration -n 2 --dist loadfile --no-loadscope-reorder || \
		OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/integration $(AGAIN)

# One after the other: each has the machine's ports and cores to itself.
test-containers: $(VENV)/.ready-dev
	$(BIN)/python -m pytest tests/containers || $(BIN)/python -m pytest tests/containers $(AGAIN)

bench: $(VENV)/.ready-dev
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python benchmarks/bench.py

# The announcement that the theme makes on its own account is no word about these pages.
docs: $(VENV)/.ready-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "The documentation is in site/index.html"

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	@mkdir -p .typing/tepal
	@for package in $(PACKAGES); do ln -sfn ../../$$package .typing/tepal/$$package; done
	@ln -sfn ../../tepal/__init__.py .typing/tepal/__init__.py
	MYPYPATH=.typing $(BIN)/mypy $(PACKAGES:%=-p tepal.%)

clean:
	rm -rf $(VENV) site .typing .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info *.fab
	find . -name __pycache__ -type d -not -path './runs/*' -prune -exec rm -rf {} +

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Tepal needs Python 3.11 or newer; '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)." >&2; \
		echo "Name another one: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.ready-run: pyproject.toml constraints.txt $(VENV)/.python
	@echo "Installing Tepal for simulation into $(VENV) (some minutes the first time) ..."
	$(PIP) -e '.[simulation]'
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready-run
	@echo "Installing what the tests and checks need ..."
	$(PIP) -e '.[simulation,text,dev]'
	@touch $@
