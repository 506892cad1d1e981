PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TESTS ?=

.PHONY: debug test slow lint format clean

# Installs when there is no environment yet, or pyproject.toml is newer.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@

debug: $(VENV)/.installed
	$(BIN)/python -m deltares_jax.train --config=configs/debug.py

test: $(VENV)/.test
	$(BIN)/pytest -m 'not slow' $(TESTS)

slow: $(VENV)/.test
	TEST_XLA_FLAGS= $(BIN)/pytest -m slow

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache build *.egg-info
