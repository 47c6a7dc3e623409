# Two commands: `make sweep` measures this machine, `make test` tests the code. Nothing else to install or start.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: sweep test lint validate hollow budgets install clean

sweep: $(INSTALLED)
	$(BIN)/fsdp-bench sweep sweeps/quick.toml

test: $(INSTALLED)
	$(PYTEST)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# What takes too long for every change: compiled trials, scans of the whole ladder, many more random examples.
MORE := EXAMPLES=60 CELLS=200 LAYERS=12 SCANS=100 MOMENTS=96 DAMAGES=10000 MUTATIONS=10000
validate: $(INSTALLED)
	env $(addprefix FSDP_BENCH_TEST_,$(MORE)) $(PYTEST) -m "slow or not slow"

# PyTorch's CUDA build on a card without silicon (tests/hollow_card/card.py): its allocator against the predictions, and
# the tests that need a GPU but neither NCCL nor time. Downloads 3 GB; needs gcc.
HOLLOW := .venv-hollow/bin/python
hollow: .venv-hollow/installed
	HOLLOW_HOST=pace $(HOLLOW) tests/hollow_card/card.py $(HOLLOW) -m pytest -s tests/hollow_card
	HOLLOW_HOST=idle $(HOLLOW) tests/hollow_card/card.py $(HOLLOW) -m pytest tests/gpu

.venv-hollow/installed: pyproject.toml
	$(PYTHON) -m venv .venv-hollow
	$(HOLLOW) -m pip install --quiet "torch===2.13.0" "nvidia-cuda-crt==13.0.*"
	$(HOLLOW) -m pip install --quiet --editable '.[train,dev]'
	touch $@

# How long the commands take, measured, beside what they may; a report, never a test.
budgets: $(INSTALLED)
	$(BIN)/python tests/budgets.py

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fsdp-bench needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,notebooks,dev]'
	touch $@

clean:
	rm -rf .venv .venv-hollow
