# Commands of this repository. `make` lists them. Each command creates .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
CONTAINER ?= docker
# One thread per test process: the tests are small, and several processes share the machine.
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test test-slow test-family test-isa torture torture-short check format bench docs docs-serve release image clean

help: ## list the commands
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "Setting up $(VENV) once: PyTorch and the test packages, several hundred megabytes to a few gigabytes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt -e ".[dev]"
	@touch $@
	@echo "$(VENV) is ready."

demo: $(VENV)/.ready ## train, predict, export and verify a small model, offline, in under a minute
	OMP_NUM_THREADS=2 $(BIN)/flodl-hf demo

test: $(VENV)/.ready ## run the tests
	JOBS=$(JOBS) $(BIN)/python -m tests.quick

test-slow: $(VENV)/.ready ## run the full-size and long tests, file by file; a second run skips files that have passed
	JOBS=$(JOBS) $(BIN)/python -m tests.slow

test-family: $(VENV)/.ready ## run every test of one family, slow ones too: make test-family FAMILY=roberta
	$(BIN)/python -m pytest -q -n $(JOBS) -m "not gpu" --family "$(FAMILY)" tests/flodl_hf

test-isa: $(VENV)/.ready ## run the tests of arithmetic with the kernels of other processors, on one and two threads
	JOBS=$(JOBS) $(BIN)/python -m tests.isa

torture: $(VENV)/.ready ## tests with damaged files, settings, texts, runs and a server (hours); `make torture-short` takes minutes
	mkdir -p build
	$(BIN)/python -m tests.torture all --workers $(JOBS) --json build/torture.json

torture-short: $(VENV)/.ready
	$(BIN)/python -m tests.torture all --cases 150 --workers $(JOBS)

check: $(VENV)/.ready ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.ready ## format, and apply automatic fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.ready ## measure graph overhead, loading, prediction (minutes)
	OMP_NUM_THREADS=2 $(BIN)/python -m benchmarks

docs: $(VENV)/.ready ## write the generated pages of docs/reference, and the site of this version into build/site
	$(BIN)/python -m docs.generate
	$(BIN)/python -m docs.site

docs-serve: docs ## the site on http://127.0.0.1:8000
	$(BIN)/python -m http.server 8000 --bind 127.0.0.1 --directory build/site

release: $(VENV)/.ready ## build sdist and wheel into dist, check the metadata, test the wheel on Python 3.11, 3.12 and 3.13
	$(BIN)/python .ci/release.py

image: $(VENV)/.ready ## build the container image flodl-hf from a new wheel; CONTAINER=podman for another tool
	rm -rf dist
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .
	$(CONTAINER) build -f deploy/Dockerfile -t flodl-hf .

clean: ## remove the environment and caches
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis *.egg-info
