# Every target sets up what it needs in .venv, once: `make test` works in a fresh clone.
PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
RUN := $(VENV)/.installed-run
STAMP := $(VENV)/.installed
FLOWER := $(VENV)/.installed-flower
SITE := $(VENV)/.installed-site

.DEFAULT_GOAL := help
.PHONY: help setup run test test-all test-data test-deploy drill check site package format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv with fedge (editable) and the development tools

run: $(RUN) ## run the default experiment (options: make run ARGS='--out runs/mine')
	$(BIN)/fedge run $(ARGS)

test: $(STAMP) ## run the tests, one process per core (options: make test ARGS='-k partition'; with a debugger: ARGS='-n 0 --pdb')
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 $(ARGS)

test-all: $(STAMP) ## run the tests with every algorithm in every common test (about twice as long; not part of CI)
	FEDGE_ALL_CASES=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --all-cases $(ARGS)

test-data: $(STAMP) ## check the loaders on the real files (where: make test-data FEDGE_DATA=FOLDER)
	$(if $(FEDGE_DATA),FEDGE_DATA='$(FEDGE_DATA)') $(BIN)/python -m pytest tests/real_data.py $(ARGS)

test-deploy: $(FLOWER) ## run the tests of deployments, with real servers and TLS on this machine
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/deploy $(ARGS)

drill: $(FLOWER) ## kill, poison and restart the parts of a fleet of six, one after another (12 minutes on two busy cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.deploy.drill $(ARGS)

check: $(STAMP) ## check formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

site: $(SITE) ## build the documentation as a site in build/site, warnings as errors
	OMP_NUM_THREADS=1 $(BIN)/python tools/site.py

package: $(STAMP) ## build wheel and sdist in dist, install each in an empty environment and run it there
	$(BIN)/python tools/package.py

format: $(STAMP) ## format the code and repair what the linter can
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

clean: ## remove .venv, caches and built packages (runs and data stay)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp comes last, so an interrupted set-up goes on at the next make. A .venv without a working pip (interrupted
# while it was made, or its Python is gone) is made anew. `make run` needs the first of these alone.
$(RUN): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "fedge needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo missing)." \
	    "Name another: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' has no venv module; install it (Debian and Ubuntu: apt install python3-venv)." >&2; exit 1; }
	@echo "Installing fedge into $(VENV); the first time takes a minute or more, most of it for PyTorch."
	@$(BIN)/python -m pip show -q pip >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[cli,report]'
	@touch $@

$(STAMP): $(RUN)
	@echo "Installing the development tools into $(VENV); the first time takes a few minutes."
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(SITE): $(STAMP)
	@echo "Installing mkdocs into $(VENV)."
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,site]'
	@touch $@

# Flower brings many packages along: only the tests of deployments need them.
$(FLOWER): $(STAMP)
	@echo "Installing Flower and Ray into $(VENV)."
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,flower]'
	@touch $@
