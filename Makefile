# Everything a developer does. `make demo` and `make test` need Python 3.11 or newer, a C++ compiler and make; the rest
# (cmake, ninja, the kernel compiler, CUDA's headers) comes from pip into .venv. No CUDA toolkit, no GPU.
#
# Where the tools are installed already, an empty VENV uses PYTHON as it is:
#     make test-gpu VENV= PYTHON=python3

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
BUILD ?= build
JOBS ?= $(shell nproc)
BENCH_ARGS ?=
PROVE_ARGS ?=

ifeq ($(VENV),)
  RUN := $(PYTHON)
  SETUP :=
else
  RUN := $(VENV)/bin/python
  SETUP := $(VENV)/.ready
  export PATH := $(if $(filter /%,$(VENV)),$(VENV),$(CURDIR)/$(VENV))/bin:$(PATH)
endif
HEADERS := $(BUILD)/xla_headers
DATA := jax_grouped_gemm/_data
# The package is used from the source tree.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
export PIP_DISABLE_PIP_VERSION_CHECK := 1
say = printf '\033[1m== %s\033[0m\n'

.PHONY: help setup build demo test mutants model-costs test-gpu prove sanitize bench lint format wheel clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(SETUP) $(HEADERS)/.ready ## create .venv with every tool, fetch XLA's FFI headers

ifneq ($(VENV),)
$(SETUP): pyproject.toml .ci/requirements.py
	@$(say) "setup: $(VENV) (downloads a few hundred MB the first time)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) -m venv failed: install your distribution's python3-venv" >&2; exit 1; }
	@$(RUN) .ci/requirements.py dev > $(VENV)/requirements.txt
	@$(RUN) -m pip install --quiet --upgrade pip
	@$(RUN) -m pip install --quiet -r $(VENV)/requirements.txt
	@$(RUN) -m pip install --quiet "$$($(RUN) .ci/requirements.py torch)" 2>/dev/null \
	    || echo "no torch of a fitting build on this package index: its tests are skipped (install one into $(VENV) to run them)"
	@$(RUN) -m pip install --quiet --no-deps $$($(RUN) .ci/requirements.py others) 2>/dev/null \
	    || echo "no kernels of others that fit on this package index: the functional model is not tested with them"
	@$(RUN) -c 'import os, sysconfig; open(sysconfig.get_path("purelib") + "/jax_grouped_gemm.pth", "w").write(os.getcwd())'
	@touch $@
endif

# Only the headers of the oldest jaxlib that we support: the wheel is unpacked for them and dropped.
$(HEADERS)/.ready: pyproject.toml .ci/requirements.py | $(SETUP)
	@$(say) "setup: XLA FFI headers of $$($(RUN) .ci/requirements.py headers)"
	@rm -rf $(HEADERS) && mkdir -p $(HEADERS)
	@$(RUN) -m pip download --progress-bar off --quiet --no-deps --only-binary=:all: --python-version 3.11 \
	    --platform manylinux2014_x86_64 --dest $(HEADERS)/wheel "$$($(RUN) .ci/requirements.py headers)"
	@$(RUN) -m zipfile --extract $(HEADERS)/wheel/*.whl $(HEADERS)/wheel/unpacked
	@mv $(HEADERS)/wheel/unpacked/jaxlib/include $(HEADERS)/include
	@rm -rf $(HEADERS)/wheel
	@touch $@

$(BUILD)/build.ninja: $(HEADERS)/.ready
	@$(say) "build: configure"
	@cmake -S . -B $(BUILD) -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_MESSAGE=LAZY -DPython3_EXECUTABLE="$$($(RUN) -c 'import sys; print(sys.executable)')" \
	    -DJGG_XLA_FFI_INCLUDE="$(CURDIR)/$(HEADERS)/include" -DJGG_BUILD_TESTS=ON

# Ninja and the kernel build know what is stale; a second run takes a moment.
build: setup $(BUILD)/build.ninja ## compile every kernel and the FFI library into jax_grouped_gemm/_data
	@$(say) "build: kernels and library"
	@cmake --build $(BUILD) --parallel $(JOBS)
	@cmake --install $(BUILD) --prefix .

demo: build ## run the mixture-of-experts example on this machine's GPU or CPU
	@$(say) "demo: examples/moe_layer.py"
	@$(RUN) examples/moe_layer.py

# The kernels run on a model of the GPU: docs/functional_model.md. One process per core; BLAS must not add threads.
FUNCTIONAL := PYTHONPATH="$(CURDIR)/tests:$$PYTHONPATH" OPENBLAS_NUM_THREADS=1 $(RUN)
KERNELS ?= sm90_forward_128x256x64_cluster2x1_bk_dense_bfloat16_plain sm100_forward_128x256x64_cluster2x1_pair_bk_dense_bfloat16_plain

test: build lint ## everything that needs no GPU: lint, C++ tests, the kernels on a model of the GPU, Python tests
	@$(say) "test: C++"
	@ctest --test-dir $(BUILD) --output-on-failure --parallel $(JOBS)
	@$(say) "test: the kernels, on the functional model"
	@OPENBLAS_NUM_THREADS=1 $(RUN) -m pytest -m "not gpu" tests/functional -n $(JOBS) --durations=5
	@$(say) "test: Python"
	@$(RUN) -m pytest -m "not gpu" --ignore tests/functional -n $(JOBS) --dist loadfile --durations=5

mutants: build ## how many edits of KERNELS' code the functional model notices (minutes each; MUTANT_ARGS="--sample 100")
	@$(FUNCTIONAL) tests/functional/mutate.py $(KERNELS) --jobs $(JOBS) $(MUTANT_ARGS)

model-costs: build ## statements, copies and waits of kernels, per tile and role
	@$(FUNCTIONAL) tests/functional/tile_costs.py

test-gpu: ## the tests that need a GPU, on what `make build` left (or was carried over)
	@test -e $(DATA)/manifest.json || { echo "$(DATA) is empty: run make build here, or copy the folder from where you did" >&2; exit 1; }
	@$(RUN) -c 'import jax; jax.devices("cuda")' 2>/dev/null || { echo "no NVIDIA GPU that JAX can use: every test would be skipped" >&2; exit 1; }
	@$(RUN) -m pytest -m gpu

# Static proofs; a part of them is in `make test`.
prove: build ## prove the Blackwell kernels free of races and deadlocks at a few sizes: see docs/static_proof.md (PROVE_ARGS="words of a question")
	@$(say) "prove"
	@PYTHONPATH="$(PYTHONPATH):tests" BUILD="$(BUILD)" $(RUN) -m static_proof $(PROVE_ARGS)

# Settings with which planted faults were found. memcheck sees an access one byte past a buffer only with the allocator
# "cuda_async" ("platform" hides even one 2 MiB past it); racecheck's default report left out a race that "all" shows.
# No tool checks the copy engine: memcheck passes its stores past D (test_writes_nothing_outside_d is for that), and
# initcheck takes D for unwritten when it is copied to the host, hence its option.
SANITIZERS ?= memcheck racecheck synccheck initcheck
sanitize: ## compute-sanitizer over a sweep of small problems on this machine's GPU
	@for tool in $(SANITIZERS); do \
	    $(say) "sanitize: $$tool"; \
	    options="--report-api-errors no"; \
	    case $$tool in racecheck) options="--racecheck-report all" ;; initcheck) options="--check-api-memory-access no" ;; esac; \
	    XLA_PYTHON_CLIENT_PREALLOCATE=false XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async \
	        compute-sanitizer --tool $$tool --error-exitcode 1 $$options $(RUN) tests/gpu_programs/small_problems.py; \
	done

bench: ## the benchmark of listed rows and sweeps on this machine's GPU (BENCH_ARGS="--rows ... --arms ... --reps ...")
	@test -e $(DATA)/manifest.json || { echo "$(DATA) is empty: run make build here, or copy the folder from where you did" >&2; exit 1; }
	@$(RUN) -m benchmarks.run $(BENCH_ARGS)

lint: setup ## ruff, mypy, clang-format
	@$(say) "lint"
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy
	@find ffi model -name '*.cc' -o -name '*.h' | xargs clang-format --dry-run -Werror

format: setup ## rewrite the sources in the style that lint wants
	@$(RUN) -m ruff check --fix --quiet . || true
	@$(RUN) -m ruff format .
	@find ffi model -name '*.cc' -o -name '*.h' | xargs clang-format -i

wheel: build ## dist/*.whl, on the kernels that are built already
	@$(say) "wheel"
	@$(RUN) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist . \
	    -C cmake.define.JGG_AOT_DIR="$(CURDIR)/$(BUILD)/aot" -C cmake.define.JGG_XLA_FFI_INCLUDE="$(CURDIR)/$(HEADERS)/include"
	@ls -l dist

clean: ## remove what was built (the .venv stays)
	@rm -rf $(BUILD) dist $(DATA)
