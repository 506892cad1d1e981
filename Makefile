PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TESTS ?=
EXTRAS ?= test
TOOLS := $(VENV)/.installed-$(EXTRAS)

.PHONY: debug test slow lint docs lock format clean

# Installs when there is no environment yet, or pyproject.toml is newer.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

# EXTRAS=test,tpu adds libtpu, for the tests that compile for TPUs.
$(TOOLS): $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	@touch $@

debug: $(VENV)/.installed
	$(BIN)/python -m deltares_jax.train --config=configs/debug.py

test: $(TOOLS)
	$(BIN)/pytest -m 'not slow' --durations=10 $(TESTS)

slow: $(TOOLS)
	TEST_XLA_FLAGS= $(BIN)/pytest -m slow --durations=25

lint: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The pages to build/site; a broken link, anchor or marker is an error.
docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

# Versions for containers and TPU VMs. libtpu needs glibc 2.31.
lock: $(TOOLS)
	for target in tpu cuda cpu; do \
	  UV_CUSTOM_COMPILE_COMMAND='make lock' $(BIN)/python -m uv pip compile pyproject.toml --quiet --upgrade --no-annotate \
	    --no-emit-index-url --python-version=3.11 --python-platform=x86_64-manylinux_2_31 \
	    --extra=gcs --extra=s3 $$([ $$target = cpu ] || echo --extra=$$target) \
	    --output-file=launch/requirements-$$target.txt; \
	done

format: $(TOOLS)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache build *.egg-info
