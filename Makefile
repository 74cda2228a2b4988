# The verbs of this repository. `make` alone lists them. Each sets up what it needs in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
# One thread a test process: the tests are small, and several processes share the machine.
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test test-slow test-isa torture torture-short check format bench docs docs-serve clean

help: ## list the verbs
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "Setting up $(VENV), once: PyTorch and what the tests need, some hundred megabytes to a few gigabytes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt -e ".[dev]"
	@touch $@
	@echo "$(VENV) is ready."

demo: $(VENV)/.ready ## train, predict, export and verify a small model, offline, in under a minute
	OMP_NUM_THREADS=2 $(BIN)/flodl-hf demo

test: $(VENV)/.ready ## run the tests
	JOBS=$(JOBS) $(BIN)/python -m tests.quick

test-slow: $(VENV)/.ready ## run the full-size and long tests, file by file; begun again, it goes on with files that have not passed
	JOBS=$(JOBS) $(BIN)/python -m tests.slow

test-isa: $(VENV)/.ready ## run the tests of arithmetic with the kernels of other processors, on one and two threads
	JOBS=$(JOBS) $(BIN)/python -m tests.isa

torture: $(VENV)/.ready ## damage files, settings, texts, runs and a server, all of it (hours); `make torture-short` takes some minutes
	mkdir -p build
	$(BIN)/python -m tests.torture all --workers $(JOBS) --json build/torture.json

torture-short: $(VENV)/.ready
	$(BIN)/python -m tests.torture all --cases 150 --workers $(JOBS)

check: $(VENV)/.ready ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.ready ## format and fix what can be fixed by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.ready ## measure: graph overhead, loading, prediction (minutes)
	OMP_NUM_THREADS=2 $(BIN)/python -m benchmarks

docs: $(VENV)/.ready ## write the generated pages of docs/reference, and the site into build/site
	$(BIN)/python -m docs.generate
	$(BIN)/python -m sphinx -b html -q -W --keep-going docs build/site
	@echo "build/site/index.html"

docs-serve: docs ## the site on http://127.0.0.1:8000
	$(BIN)/python -m http.server 8000 --bind 127.0.0.1 --directory build/site

clean: ## remove the environment and caches
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis *.egg-info
