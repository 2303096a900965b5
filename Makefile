# make            builds torch_gpumode and installs it, editable
# make demo       trains a small GPT on 4 CPU ranks, kills two, and goes on
# make test       everything that CI runs
# make contract   all that people compose on torch.distributed, also what takes too long for CI
# make storm      1,000 ranks killed and frozen while ops are retried, 10 minutes
# make wheel      a CUDA wheel for sm_90a in dist/, on any machine with nvcc: PYTHON=, TORCH=
# make lint       ruff, mypy, clang-format, clang-tidy        make format     applies the formatters
# make clean      removes what was built
#
# Each of them sets up what it needs. The environment is the active one (python3) if it has a torch
# that we support, and else a new one in .venv, with TORCH. TORCH=torch==2.12.0 asks for .venv.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := install
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/torch_gpumode

supported := import importlib.metadata as m, sys; \
  torch = tuple(map(int, m.version("torch").split(".")[:2])); \
  (2, 11) <= torch <= (2, 14) and sys.version_info >= (3, 11) and print(sys.executable)
ifeq ($(origin TORCH),undefined)
  ACTIVE := $(shell python3 -c '$(supported)' 2> /dev/null)
endif
TORCH ?= torch==2.14.1

ifneq ($(ACTIVE),)
  PY := $(ACTIVE)
  torch_there := $(shell $(PY) -c 'import importlib.metadata as m; \
    print(m.distribution("torch").locate_file("torch/version.py"))')
else
  PY := $(VENV)/bin/python
  torch_there := $(VENV)/installed-$(subst /,_,$(subst =,-,$(TORCH)))
endif
jobs := $(or $(MAX_JOBS),$(shell nproc))
pip = $(1) -m pip install --disable-pip-version-check -qq

# What has been done for this environment. Stamps, because pip takes seconds to find out that
# nothing is to be done.
stamps := build/stamps/$(shell echo $(abspath $(dir $(PY))) | cksum | cut -d " " -f 1)
sources := $(shell find csrc -name "*.cpp" -o -name "*.cu" -o -name "*.h" -o -name "*.cuh")
cxx_files := $(sources) $(wildcard tests/cpp/*.cpp tests/cpp/*.h)

.PHONY: install demo test lint format wheel clean environment
.PHONY: test-cpp test-cuda test-model test-python test-python-and-wheel test-wheel contract storm

install: $(stamps)/built

environment:
	@echo "environment: $(PY)$(if $(ACTIVE), (the active one),)"

ifeq ($(ACTIVE),)
$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "torch_gpumode needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	@$(PYTHON) -m venv $(VENV)

$(torch_there): $(VENV)/pyvenv.cfg
	@echo "installing $(TORCH) in $(VENV)"
	@$(call pip,$(PY)) --upgrade pip
	@$(call pip,$(PY)) "$(TORCH)"
	@rm -f $(VENV)/installed-* && touch $@
endif

$(stamps)/built: setup.py pyproject.toml $(sources) $(torch_there) | environment
	@echo "building (minutes, the first time)"
	@mkdir -p $(@D) && touch $@.begun  # what is edited meanwhile is newer
	@$(call pip,$(PY)) "setuptools>=77" ninja
	@PATH="$(abspath $(dir $(PY))):$$PATH" $(call pip,$(PY)) --no-build-isolation -e .
	@mv $@.begun $@

# The extras of pyproject.toml: stamps/demo, stamps/test, stamps/lint.
$(stamps)/%: $(stamps)/built pyproject.toml
	@$(call pip,$(PY)) "torch_gpumode[$*]"
	@touch $@

demo: $(stamps)/demo
	$(PY) -m torch.distributed.run --nproc-per-node=4 -m torch_gpumode.run \
	  examples/train_through_failure.py --kills 2

test: lint test-cpp test-cuda test-model test-python-and-wheel

lint: $(stamps)/lint
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	@echo "clang-format and clang-tidy"
	@$(dir $(PY))clang-format --dry-run -Werror $(cxx_files)
	@ls csrc/core/*.cpp csrc/core/os/*.cpp csrc/host/*.cpp | \
	  xargs -P $(jobs) -I{} $(dir $(PY))clang-tidy --quiet {} -- -std=c++20 -Icsrc

format: $(stamps)/lint
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix-only .
	@$(dir $(PY))clang-format -i $(cxx_files)

test-cpp:
	@$(MAKE) -s -C tests/cpp -j$(jobs) all
	$(MAKE) -s -C tests/cpp check

# Whatever torch the environment has: .cu files include none of it. As C++17, for Ampere and without
# warnings; builds compile them as what torch is, for the GPUs that there are.
test-cuda:
	@if command -v nvcc > /dev/null; then \
	  find csrc -name "*.cu" | sort | xargs -P $(jobs) -I{} sh -c 'echo "nvcc {}"; \
	    nvcc -std=c++17 -Icsrc -gencode=arch=compute_80,code=sm_80 -Werror all-warnings \
	      -c {} -o /dev/null'; \
	else echo "SKIPPED the compilation of the .cu files: there is no nvcc"; fi

# The commit protocol, by Spin.
test-model: $(torch_there)
	@if command -v spin > /dev/null; then $(PY) tests/model/check.py; \
	else echo "SKIPPED the model of the commit protocol: there is no spin"; fi

test-python: $(stamps)/test $(stamps)/demo
	$(PY) -m pytest

# Every world size of torch's own tests, every schedule, inductor: half an hour on 2 cores.
contract: $(stamps)/test
	$(PY) -m pytest -m "long or not long" tests/contract tests/composition \
	  tests/test_torch_distributed.py

storm: $(stamps)/test
	$(PY) tests/fault/test_storm.py --kills 1000

# The wheel's environment is outside the checkout, so that a new checkout finds it.
wheel_venv := $(CACHE)/wheel-$(shell echo $(PYTHON) $(TORCH) | cksum | cut -d " " -f 1)

$(wheel_venv)/installed:
	@echo "installing $(TORCH) in $(wheel_venv)"
	@rm -rf $(wheel_venv) && mkdir -p $(CACHE) && $(PYTHON) -m venv $(wheel_venv)
	@$(call pip,$(wheel_venv)/bin/python) --upgrade pip
	@$(call pip,$(wheel_venv)/bin/python) "setuptools>=77" ninja numpy "$(TORCH)"
	@touch $@

wheel: $(wheel_venv)/installed
	@rm -rf build/lib.* dist/torch_gpumode-*
	@echo "building the wheel"
	@TORCH_CUDA_ARCH_LIST=9.0a TORCH_GPUMODE_CUDA=1 PATH="$(wheel_venv)/bin:$$PATH" \
	  $(wheel_venv)/bin/python -m pip wheel --disable-pip-version-check -qq \
	  --no-build-isolation --no-deps -w dist .
	@ls dist/torch_gpumode-*.whl

# The wheel that GPU results come from, tried on this CPU: an older torch, and another Python where
# there is one. In a tree of its own, since other tests are using this one.
wheel_files := csrc torch_gpumode triton_kernels tests setup.py pyproject.toml README.md LICENSE Makefile
WHEEL_TORCH ?= torch==2.11.0
WHEEL_PYTHON ?= $(shell for python in python3.12 ~/.pyenv/versions/3.12*/bin/python $(PYTHON); do \
  $$python -c "" 2> /dev/null && echo $$python && break; done)

test-wheel:
	@if command -v nvcc > /dev/null; then \
	  echo "wheel for $(WHEEL_PYTHON), $(WHEEL_TORCH)"; \
	  mkdir -p build/wheel-tree; \
	  cp -au $(wheel_files) build/wheel-tree; \
	  $(MAKE) -s -C build/wheel-tree wheel-smoke PYTHON=$(WHEEL_PYTHON) TORCH=$(WHEEL_TORCH); \
	else echo "SKIPPED the CUDA wheel: there is no nvcc"; fi

# Python's tests wait for each other half of the time, which is when the wheel is built.
test-python-and-wheel: $(stamps)/test $(stamps)/demo
	@nice -n 19 $(MAKE) -s test-wheel > build/test-wheel.log 2>&1 & wheel=$$!; \
	trap 'kill $$wheel 2> /dev/null || true' EXIT; \
	$(MAKE) -s test-python; \
	wait $$wheel || { cat build/test-wheel.log; exit 1; }; \
	cat build/test-wheel.log

.PHONY: wheel-smoke
wheel-smoke: wheel
	@rm -rf build/wheel-smoke && mkdir -p build/wheel-smoke
	@$(wheel_venv)/bin/python -m pip install --disable-pip-version-check -qq --no-deps \
	  --target build/wheel-smoke dist/torch_gpumode-*.whl
	cd build/wheel-smoke && PYTHONPATH=. $(wheel_venv)/bin/python ../../tests/wheel_smoke.py

clean:
	rm -rf build dist *.egg-info torch_gpumode/_C.*
