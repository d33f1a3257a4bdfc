# Every target sets up what it needs the first time, from the locks in constraints/, and is quick the
# second. demo, test and docs add to one environment, .venv; the others have their own.
PYTHON ?= python3
BIN := .venv/bin
LOCKS := pyproject.toml constraints/torch.txt constraints/torch-cpu.txt constraints/cuda.txt
UV_VERSION := 0.13.7
export OMP_NUM_THREADS ?= 2

.PHONY: help demo test tests lint types docs lock test-slow slow-kills slow-others test-gpu gpu-tests test-avx2 test-cpus cpu-avx2 cpu-default \
  test-parity test-lowest test-wheel test-browser browser-tests bench clean

help:
	@echo "make demo         adapt the bundled CLIP to a shifted stream, on this machine's CPU"
	@echo "make test         lint, types, tests and the examples of docstrings"
	@echo "make docs         build the documentation into build/site"
	@echo "make test-slow    the tests marked slow, and only those"
	@echo "make test-avx2    the numeric tests as CPUs without AVX-512 compute them (part of CI)"
	@echo "make test-cpus    the numeric tests as CPUs without AVX-512 and without AVX compute them"
	@echo "make test-gpu     what needs CUDA, on a machine with a GPU; says what it skips"
	@echo "make test-parity  comparison with open_clip and torchvision"
	@echo "make test-lowest  the tests with the lowest versions that pyproject.toml allows"
	@echo "make test-wheel   the demo of the packed wheel, in an environment of its own"
	@echo "make test-browser the web app and the report in a headless browser"
	@echo "make bench        the speed programs in benchmarks/"
	@echo "make lock         renew the locked versions in constraints/"

# $(call setup,ENVIRONMENT,LOCK): torch by itself, its CPU build where an index or a directory of
# pip's offers the locked one, else PyPI's (with CUDA on Linux), because only that needs more packages;
# then everything else, and this package as an editable install. A marker newer than the locks
# means: installed, nothing to do.
# $(call timed,STAGE,COMMAND) says how long a stage took, also if it failed.
timed = @begun=$$(date +%s); $(2); code=$$?; \
  echo "$(1): $$(( $$(date +%s) - begun )) s"; exit $$code
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2
FAST := -m "not slow and not browser and not parity"
NUMERIC := tests/methods tests/model tests/reference

PIP = $(1)/bin/python -m pip install --quiet --disable-pip-version-check
LOCKED = $(PIP) --require-hashes --no-deps -r constraints
NEEDS_CUDA := from importlib.metadata import requires; \
  exit("nvidia" not in str(requires("torch")) or __import__("sys").platform != "linux")
define packages
	@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	@echo "setting up $(1) for $(2) (once; some minutes)"; date +%s > $@.begun
	@$(LOCKED)/torch-cpu.txt 2>/dev/null || $(LOCKED)/torch.txt
	@if $(1)/bin/python -c '$(NEEDS_CUDA)'; then $(LOCKED)/cuda.txt; fi
	@$(LOCKED)/$(2).txt
endef
define setup
	$(call packages,$(1),$(2))
	@$(PIP) --no-deps --no-build-isolation -e .
	@echo "set-up for $(2): $$(( $$(date +%s) - $$(cat $@.begun) )) s"; rm $@.begun; touch $@
endef

.venv/.demo .venv/.test .venv/.docs: .venv/.%: $(LOCKS) constraints/%.txt
	$(call setup,.venv,$*)

# Gradio wants an older Pillow than everything else, so the app has an environment of its own.
.venv-%/.installed: $(LOCKS) constraints/%.txt
	$(call setup,.venv-$*,$*)

# The wheel alone, without this folder: what it forgets to pack, or to depend on, fails here.
.venv-wheel/.installed: $(LOCKS) constraints/demo.txt
	$(call packages,.venv-wheel,demo)
	@rm $@.begun; touch $@

test-wheel: .venv-wheel/.installed
	$(call timed,wheel,.ci/wheel .venv-wheel/bin/python)

demo: .venv/.demo
	$(call timed,demo,$(BIN)/cliquetta demo)

lint: .venv/.test
	$(call timed,lint,$(BIN)/ruff check . && $(BIN)/ruff format --check .)

types: .venv/.test
	$(call timed,types,$(BIN)/mypy)

# Types are checked beside the tests: mypy keeps one core busy, and the tests two at most.
test: lint
	$(call timed,types and tests,$(MAKE) --no-print-directory --jobs 2 types tests)

tests: .venv/.test
	$(call timed,tests,$(PYTEST) --dist worksteal $(FAST))

# One worker per file: a file's tests share their Ray cluster. The kill tests fork, which other tests'
# threads do not survive: they have a process of their own.
test-slow: .venv/.test
	$(call timed,slow tests,$(MAKE) --no-print-directory --jobs 2 slow-kills slow-others)

slow-kills: .venv/.test
	$(call timed,kills at file operations,$(PYTEST) -n 0 -m slow tests/test_kills.py)

slow-others: .venv/.test
	$(call timed,other slow tests,$(PYTEST) --dist loadscope --ignore tests/test_kills.py \
	  -m "slow and not browser and not parity")

# tests/test_project.py holds that the list names every file whose tests ask for CUDA. The tests that a
# GPU does not change run along: kernels by hand, nvJPEG played by Pillow. -rs says what was skipped.
GPU_TESTS := tests/model/test_cuda.py tests/model/test_fused.py tests/methods/building/test_base_cuda.py \
  tests/data/test_nvjpeg.py tests/data/test_loader.py
HAS_GPU := import torch; exit(not torch.cuda.is_available())

test-gpu: .venv/.test
	@if $(BIN)/python -c '$(HAS_GPU)'; then $(MAKE) --no-print-directory gpu-tests; else \
	  echo "test-gpu: SKIPPED, torch finds no GPU here: nothing below was run"; echo "$(GPU_TESTS)"; fi

gpu-tests:
	@$(BIN)/python -c 'import torch; print(torch.__version__, torch.cuda.get_device_name())'
	$(call timed,GPU tests,OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 -rs $(GPU_TESTS))

# What CI runs: with AVX2 alone, which is what most machines have.
test-avx2: export ONEDNN_MAX_CPU_ISA := AVX2
test-avx2: export ATEN_CPU_CAPABILITY := avx2
test-avx2: .venv/.test
	$(call timed,numeric tests with AVX2,$(PYTEST) --dist worksteal $(FAST) $(NUMERIC))

# Both at the same time, one core each.
test-cpus: .venv/.test
	$(call timed,numeric tests on other CPUs,$(MAKE) --no-print-directory --jobs 2 cpu-avx2 cpu-default)

cpu-avx2: export ONEDNN_MAX_CPU_ISA := AVX2
cpu-avx2 cpu-default: export ATEN_CPU_CAPABILITY = $(@:cpu-%=%)
cpu-avx2 cpu-default:
	$(call timed,numeric tests as $@,$(PYTEST) -n 0 $(FAST) $(NUMERIC))

docs: .venv/.docs
	$(call timed,docs,NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet)

test-parity: .venv-parity/.installed
	.venv-parity/bin/python -m pytest tests/parity -m parity

test-lowest: .venv-lowest/.installed
	OMP_NUM_THREADS=1 .venv-lowest/bin/python -m pytest -n 2 $(FAST)

lock:
	@test -x .venv-lock/bin/uv || { $(PYTHON) -m venv .venv-lock && \
	  .venv-lock/bin/python -m pip install --quiet uv==$(UV_VERSION); }
	UV=.venv-lock/bin/uv constraints/lock.sh

# Chromium comes from Debian where it is missing and we may install it.
CHROMIUM := command -v chromium >/dev/null || command -v google-chrome >/dev/null
test-browser:
	@$(CHROMIUM) || { apt-get update && apt-get install -y --no-install-recommends chromium \
	  fonts-dejavu-core; } >/dev/null 2>&1 || true
	@if $(CHROMIUM); then $(MAKE) --no-print-directory browser-tests; else \
	  echo "test-browser: SKIPPED, no chromium here and none could be installed (apt, root)"; fi

browser-tests: .venv-app/.installed
	$(call timed,browser,OMP_NUM_THREADS=1 .venv-app/bin/python -m pytest tests/browser -m browser)

bench: .venv/.test
	$(BIN)/python -m benchmarks.towers
	$(BIN)/python -m benchmarks.scap_speed

clean:
	rm -rf .venv .venv-* build runs demo .pytest_cache .mypy_cache .ruff_cache
