PYTHON ?= python3
CONSTRAINTS ?= constraints.txt

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c $(CONSTRAINTS)

.DEFAULT_GOAL := help
.PHONY: help install demo test lint format

help:
	@echo "make demo     generate with SmolLM2 over compressed caches, metered, gated and repaired"
	@echo "make test     run the tests, then the conformance suite on every implementation that a CPU has"
	@echo "make lint     ruff and mypy"
	@echo "make format   rewrite the code in ruff's format"
	@echo "Each makes $(VENV) with $(PYTHON) (3.11 or 3.12) and installs what it needs first."

demo: install
	$(BIN)/witcert demo

test: install
	$(BIN)/python -m pytest -n 2 --dist worksteal
	$(BIN)/python -m pytest conformance -n 2 --impl ref --impl torch-cpu --impl numba-cpu
	$(BIN)/python -m pytest conformance -n 2 --impl triton-interpret --profile quick

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

install: $(INSTALLED)

# torch goes first, alone: pip then keeps it whatever the others ask for
$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) -e '.[cpu,demo,gpu,dev]'
	touch $@
