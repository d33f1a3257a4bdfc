# Every target sets up its own environment the first time and is quick the second.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints/cpu.txt
# A marker newer than pyproject.toml means: installed, nothing to do.
DEV := $(VENV)/.dev-installed
PARITY := .venv-parity/.installed
APP := .venv-app/.installed
export OMP_NUM_THREADS ?= 2

.PHONY: help demo test lint types test-slow test-parity test-browser browser-tests bench clean

help:
	@echo "make demo         adapt the bundled CLIP to a shifted stream, on this machine's CPU"
	@echo "make test         lint, types and tests"
	@echo "make test-slow    the tests marked slow as well"
	@echo "make test-parity  comparison with open_clip, in an environment of its own"
	@echo "make test-browser the web app and the report in a headless browser"
	@echo "make bench        the speed programs in benchmarks/"

$(DEV): pyproject.toml $(CONSTRAINTS)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) (once; some minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) torch
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e ".[dev]"
	@touch $@

demo: $(DEV)
	@$(BIN)/cliquetta demo

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV)
	$(BIN)/mypy

test: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow and not browser and not parity"

test-slow: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not browser and not parity"

$(PARITY): pyproject.toml $(CONSTRAINTS)
	@test -x .venv-parity/bin/python || $(PYTHON) -m venv .venv-parity
	@.venv-parity/bin/python -m pip install --quiet -c $(CONSTRAINTS) torch
	@.venv-parity/bin/python -m pip install --quiet -c $(CONSTRAINTS) -e . pytest hypothesis transformers open_clip_torch
	@touch $@

test-parity: $(PARITY)
	.venv-parity/bin/python -m pytest tests/parity -m parity

# Gradio wants an older Pillow than everything else, so the app has an environment of its own.
$(APP): pyproject.toml $(CONSTRAINTS)
	@test -x .venv-app/bin/python || $(PYTHON) -m venv .venv-app
	@echo "setting up .venv-app (once; some minutes)"
	@.venv-app/bin/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) torch
	@.venv-app/bin/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e ".[app]" pytest playwright
	@touch $@

# Chromium comes from Debian where it is missing and we may install it.
CHROMIUM := command -v chromium >/dev/null || command -v google-chrome >/dev/null
test-browser:
	@$(CHROMIUM) || { apt-get update && apt-get install -y --no-install-recommends chromium \
	  fonts-dejavu-core; } >/dev/null 2>&1 || true
	@if $(CHROMIUM); then $(MAKE) --no-print-directory browser-tests; else \
	  echo "test-browser: SKIPPED, no chromium here and none could be installed (apt, root)"; fi

browser-tests: $(APP)
	OMP_NUM_THREADS=1 .venv-app/bin/python -m pytest tests/browser -m browser

bench: $(DEV)
	$(BIN)/python benchmarks/towers.py
	$(BIN)/python benchmarks/scap_speed.py

clean:
	rm -rf $(VENV) .venv-parity .venv-app build runs demo .pytest_cache .mypy_cache .ruff_cache
