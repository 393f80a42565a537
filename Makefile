# Everything sets itself up: a virtual environment in .venv, made once and remade only when pyproject.toml changes.
# On a machine that has an environment already: make test VENV=/path/to/it
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.condensegrpo-installed

.PHONY: quickstart compare test lint typecheck install seeds clean

quickstart: install
	$(BIN)/condensegrpo train configs/quickstart.yaml

# Trains the policy of the reading task, then holds it against each condenser under equal budgets (docs/memory.md).
compare: install
	test -d runs/memory/checkpoints || $(BIN)/condensegrpo train configs/memory.yaml
	$(BIN)/condensegrpo eval runs/memory --out runs/memory/compare --budgets 50,74 \
		--compare "full, last_k keep_last=16, truncate, random_drop, observation_mask, attention"

test: install lint typecheck
	$(BIN)/python -m pytest

install: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The package-dir mapping of pyproject.toml is invisible to mypy: it reads a folder of symbolic links laid out as installed.
typecheck: install
	rm -rf .typecheck && mkdir -p .typecheck/condensegrpo
	cd .typecheck/condensegrpo && ln -s ../../condensegrpo/* ../../condensers ../../rewards ../../cli ../../configs .
	cd .typecheck && $(abspath $(BIN))/python -m mypy --config-file ../pyproject.toml

seeds: install
	$(BIN)/python benchmarks/seeds.py

clean:
	rm -rf .venv .typecheck build *.egg-info
