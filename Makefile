# Two commands to start with, on a machine with Python 3.10 or newer, a C++20 compiler and pip:
#   make run     a Mixture-of-Experts model from Hugging Face, expert-parallel in four processes
#   make test    the test suite
# `make help` lists the others. Variables:
#   PYTHON=...   the Python to use. If it has torch it is used as it is; otherwise .venv is made
#   ARGS=...     arguments for what the target runs: make run ARGS="--layers 2"

PYTHON ?= python3
ABI_TORCH ?= 2.11.0

TORCH := $(shell $(PYTHON) tools/environment.py torch)
ifneq ($(.SHELLSTATUS),0)
$(error no usable Python: $(PYTHON))
endif

ifneq ($(TORCH),)
PY := $(PYTHON)
ENVIRONMENT :=
BUILT := build/built-for-$(TORCH)
else
PY := .venv/bin/python
ENVIRONMENT := .venv/complete
BUILT := build/built-for-venv
endif

# Examples and benchmarks use this checkout, whatever else is installed.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

CXX_FILES := -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh'
SOURCES := setup.py $(shell find csrc $(CXX_FILES))
FORMATTED = $(shell find csrc tests $(CXX_FILES))
CLANG_FORMAT := $(PY) -c "from clang_format import clang_format; clang_format()"

.PHONY: help run test test-gpu sanitize-gpu bench build lint format api compile-cuda check-wheel check-abi clean
.DELETE_ON_ERROR:

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 22

run: require-hf build ## run the Hugging Face example, expert-parallel in four processes
	$(PY) examples/hf_moe_inference.py $(ARGS)

test: require-test build ## run the test suite
	$(PY) -m pytest $(ARGS)

test-gpu: require-test build ## run only the tests that need a CUDA device
	$(PY) tools/mps.py $(PY) -m pytest -m gpu $(ARGS)

sanitize-gpu: require-test build ## play a few rounds on a GPU under compute-sanitizer
	$(PY) -m tests.gpu.sanitize $(ARGS)

bench: require-bench build ## time dispatch and combine against torch.distributed
	$(PY) benchmarks/bench_moe_ep_comm.py $(or $(ARGS),--device cpu)

build: $(BUILT) ## compile the extensions in place, if a source changed

$(BUILT): $(SOURCES) $(ENVIRONMENT)
	@rm -f build/built-for-*
	$(PY) setup.py build_ext --inplace
	@mkdir -p build && touch $@

.venv/complete: pyproject.toml
	@echo "$(PYTHON) has no torch: installing it with all that is needed into .venv, once"
	$(PYTHON) -m venv .venv
	$(PYTHON) tools/environment.py requirements test hf bench docs dev > .venv/requirements.txt
	$(PY) -m pip install --disable-pip-version-check --requirement .venv/requirements.txt
	@touch $@

# Stops with the command to type, where a Python that has torch lacks something else.
require-%: $(ENVIRONMENT)
	@$(PY) tools/environment.py require $*

lint: require-dev require-docs ## check style, types, formatting, source lists, docs/api.md
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(CLANG_FORMAT) --dry-run -Werror $(FORMATTED)
	$(PY) tools/check_sources.py
	$(PY) docs/generate_api.py --check

format: require-dev ## format Python and C++
	$(PY) -m ruff check --fix
	$(PY) -m ruff format
	$(CLANG_FORMAT) -i $(FORMATTED)

api: require-docs ## write docs/api.md anew from the docstrings
	$(PY) docs/generate_api.py

compile-cuda: ## compile every .cu for each supported architecture; needs nvcc, no GPU, no torch
	$(PYTHON) tools/compile_cuda.py

check-wheel: build ## build a wheel and import it in an environment with nothing but torch
	env -u PYTHONPATH bash tools/check_wheel.sh $(PY)

check-abi: build ## run the library built for this torch under the oldest, ABI_TORCH
	bash tools/check_abi.sh $(PY) $(ABI_TORCH)

clean: ## remove what was built (not .venv)
	rm -rf build dist *.egg-info moe_ep/*.so
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
