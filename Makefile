# Everything from an empty checkout: `make run`, `make test`, `make lint`. The virtual environment is made on first use
# and again only when pyproject.toml or constraints.txt change.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Compiled is what is needed, by all cores and not by pip alone: a run imports a quarter of what it installs. Both commands
# write bytecode whatever the shell's environment says: without it each process would compile anew.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile -c constraints.txt
RUN_IMPORTS := flwr_datasets, tepal.client_app.app, tepal.server_app.app, \
	tepal.tools.cli.main, tepal.tools.simulation.one_process

.DEFAULT_GOAL := help
.PHONY: help run test test-long test-campaign test-all test-containers bench docs lint clean

help:
	@echo "make run    set up and run the main job: what each method is for, in three short comparisons; results under runs/"
	@echo "make test   set up and run the tests that protect behaviour: units, and the app over gRPC"
	@echo "make test-long   run the tests that are long by nature: experiments, benchmarks, random mutations, browsers;"
	@echo "                 SHARE=2/3 runs the second of three shares"
	@echo "make test-campaign  run every strategy with lying clients, TEPAL_CAMPAIGN_SECONDS (60) each"
	@echo "make test-all    run all of these tests, and test-containers where there is a Docker engine"
	@echo "make test-containers   build the images and run the tests of them (needs a Docker engine)"
	@echo "make bench  set up and run all benchmarks, each beside what one would use instead; results under runs/bench/"
	@echo "make docs   build the documentation as a site that can be read from disk: site/index.html"
	@echo "make lint   check style (ruff), types (mypy) and which package imports which (import-linter)"
	@echo "make clean  remove the virtual environment, caches and build outputs; runs/ stays"
	@echo "PYTHON=...  the Python to build the environment with (3.11 or newer), default: python3"
	@echo "VENV=...    where that environment is (a path without spaces: Ray cannot run from one), default: .venv"

run: $(VENV)/.ready-run
	$(BIN)/tepal compare . --variants conf/tour.toml

# One thread each, because two tests run side by side. Workers that have run out of unit tests take over some of the
# other worker's, so that no long module keeps one worker busy alone.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
WITH_TWO := -n 2 --dist worksteal

# What failed (exit status 1) runs once more, one test at a time: on a loaded machine a test that waits for a process may
# pass its deadline, and a test may have found what the one before it left. One that fails twice fails the target, and
# tests/conftest.py lists those that failed once and passed when run alone.
AGAIN := --last-failed --last-failed-no-failures none
define TESTED
$(PYTEST) $(1) -m "$(2)" $(3) || { test $$? = 1 && $(PYTEST) $(1) -m "$(2)" $(AGAIN); }
endef
SHARED := $(addprefix --share ,$(SHARE))
UNITS = $(call TESTED,$(1) $(3),$(2),$(WITH_TWO))
INTEGRATION = $(call TESTED,tests/integration $(2),$(1),-n 2 --dist loadfile --no-loadscope-reorder)

test: $(VENV)/.ready-dev
	$(call UNITS,tests/unit tests/campaign,not long)
	$(call INTEGRATION,not long)

# Only modules that have long tests are imported: all of them take most of a minute. SHARE=2/3: the second third.
WITH_LONG := grep -rlE --include='test_*.py' 'mark\.long' tests/unit
test-long: $(VENV)/.ready-dev
	$(call UNITS,$$($(WITH_LONG)),long,$(SHARED))
	$(call INTEGRATION,long,$(SHARED))

# Twenty strategies, two at a time: ten minutes with the default of 60 seconds for each.
test-campaign: $(VENV)/.ready-dev
	$(PYTEST) tests/campaign $(WITH_TWO) -m long

test-all:
	$(MAKE) test
	$(MAKE) test-long
	$(MAKE) test-campaign
	@if docker version >/dev/null 2>&1; then $(MAKE) test-containers; \
		else echo "No Docker engine: the container tests did not run."; fi

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
	$(BIN)/mypy -p tepal
	$(BIN)/lint-imports --no-cache --no-logo

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info *.fab
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
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -c 'import $(RUN_IMPORTS)'
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready-run
	@echo "Installing what the tests and checks need ..."
	$(PIP) -e '.[ray,text,dev]'
	$(BIN)/python -m compileall -q -j 0 -x '/tests?/' $(VENV)/lib || true  # some files are for other versions of Python
	@touch $@
