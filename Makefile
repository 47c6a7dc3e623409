# Two commands: `make sweep` measures this machine, `make test` tests the code. Nothing else to install or start.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
unexport PYTHONDONTWRITEBYTECODE  # tests start hundreds of processes
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: sweep test test-rehearsal lint validate recordings budgets docs wheel install clean

sweep: $(INSTALLED)
	$(BIN)/fsdp-bench sweep sweeps/quick.toml

# CPU seconds by folder are printed, and held to tests/budgets.toml.
test: $(INSTALLED)
	$(PYTEST) --budget=test

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# What takes too long for every change: variations that are marked slow, compiled trials, many more drawn examples.
validate: $(INSTALLED) .venv-rehearsal/installed
	$(PYTEST) --hypothesis-profile=validate -m "slow or not slow"
	$(ON_STAND_IN) --hypothesis-profile=validate -m "slow or not slow"

# What needs torch's CUDA build, but no GPU: rehearsals, on a stand-in for NVIDIA's libraries. Downloads 3 GB; needs a C
# compiler. Fewer setups are drawn than by `python -m tools.validate --against rehearsal`.
REHEARSAL := .venv-rehearsal/bin/python
ON_STAND_IN := $(REHEARSAL) -m pytest -n 2 --dist worksteal tests/on_stand_in
test-rehearsal: .venv-rehearsal/installed
	$(ON_STAND_IN) --budget=test-rehearsal

.venv-rehearsal/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-rehearsal
	$(REHEARSAL) -m pip install --quiet --constraint constraints.txt "torch===2.13.0"
	$(REHEARSAL) -m pip install --quiet --constraint constraints.txt --editable '.[train,hf,qlora,torchao,liger,dev]'
	touch $@

# What the models of the catalogue run, recorded for all sizes and compiled; what is there is kept. Four hours, two cores.
recordings: .venv-rehearsal/installed
	$(REHEARSAL) -m tools.recordings

# How long the commands take, measured, beside what they may; a report, never a test.
budgets: $(INSTALLED)
	$(BIN)/python -m tools.budgets

# The site of README.md and docs/, with its search, in site/. A broken link is an error.
docs: .venv/installed-docs
	$(BIN)/sphinx-build -q -W --keep-going -c docs . site

.venv/installed-docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

# Built in dist/, then installed into an empty environment, where its commands run without the source tree.
wheel: $(INSTALLED)
	rm -rf build dist
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(BIN)/python -m tools.wheel dist/*.whl

install: $(INSTALLED)

$(INSTALLED): pyproject.toml setup.py constraints.txt $(wildcard fsdp_bench/replay/*.p* fsdp_bench/replay/caching_allocator/*.p*)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fsdp-bench needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,notebooks,dev]'
	touch $@

clean:
	rm -rf .venv .venv-rehearsal
