# PYTHON makes the virtual environment, PY runs everything in it. PY=python3 uses an interpreter as it is, with no
# virtual environment and nothing installed: for an image that has all the packages.
PYTHON = python3
VENV = .venv
PY = $(VENV)/bin/python
# Processes that share the tests.
WORKERS = 2
# Which build is tested and measured on a GPU: build or build-cuda.
BUILD = build

READY = $(if $(filter $(VENV)/bin/python,$(PY)),$(VENV)/ready)
PIP = $(PYTHON) -m pip --python $(PY) install --disable-pip-version-check
export SHOW_PACKAGES = import sys; print(*(path for path in sys.path if path.endswith("-packages")), sep="\n")

.PHONY: help venv build build-cuda demo lint test test-package test-interpreter test-gpu test-versions fuzz bench plots tune compile-check clean
.DEFAULT_GOAL := help

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(READY)  ## a virtual environment with the pinned requirements

# Only pip and the standard library are taken for granted: Debian's Python has no ensurepip, so PYTHON's own pip
# installs into the environment. Where PYTHON has PyTorch, a .pth file shows the environment its packages. (What
# --system-site-packages shows is the base installation, so it misses them if PYTHON is in an environment itself.)
$(VENV)/ready: $(wildcard requirements/*.txt)
	$(PYTHON) -m venv --without-pip $(VENV)
	if $(PYTHON) -c "import torch" 2> /dev/null; then $(PYTHON) -c "$$SHOW_PACKAGES" \
		> "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer.pth"; fi
	$(PY) -c "import torch" 2> /dev/null || $(PIP) -r requirements/torch.txt
	$(PY) -c "import triton" 2> /dev/null || $(PIP) -r requirements/triton.txt
	$(PIP) -r requirements/runtime.txt -r requirements/test.txt
	command -v nvcc > /dev/null || $(PIP) -r requirements/cuda.txt
	touch $@

build: $(READY)  ## the variants of the package without native code, in build/
	$(PY) tools/build.py

build-cuda: $(READY)  ## the same, and the variant with native CUDA ops for this platform, in build-cuda/
	$(PY) tools/build_cuda.py

demo: build  ## trains a small Qwen3-MoE beside eager, runs it expert-parallel, then fine-tunes one with LoRA
	$(PY) examples/quickstart.py
	$(PY) examples/lora.py

lint: $(READY)  ## what ruff finds, and what it would format otherwise
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

# One thread per process: what the tests multiply is small, and threads that wait for each other cost more.
PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist worksteal

test: test-package test-interpreter  ## everything a machine without a GPU can test

test-package: build
	$(PYTEST) tests --ignore tests/interpreter

test-interpreter: build
	TRITON_INTERPRET=1 $(PYTEST) tests/interpreter

# As a user of the Hub loads a build: by its repository.
test-gpu fuzz bench tune: export LOCAL_KERNELS = $(shell sed -n 's/^repo-id = "\(.*\)"/\1/p' build.toml)=$(CURDIR)/$(BUILD)

test-gpu: $(BUILD)  ## the same tests on this machine's GPU, and those that need one
	$(PYTEST) tests --ignore tests/interpreter

test-versions:  ## make test on each pair of PyTorch and Triton that is supported, in environments of their own
	$(PYTHON) tools/test_versions.py --workers $(WORKERS)

MINUTES = 5
SEED = 0

fuzz: $(BUILD)  ## random cases on this machine's GPU or CPU: make fuzz MINUTES=30 SEED=7
	$(PY) tools/fuzz.py --minutes $(MINUTES) --seed $(SEED)

bench: $(BUILD)  ## speed, memory and how cost grows on this machine, beside every peer that can be had
	$(PY) benchmarks/run.py

# Whose results are drawn, as in their names.
GPU = h200

plots: $(READY)  ## the figures of the recorded results
	$(PY) benchmarks/plot.py --gpu $(GPU)

tune: $(BUILD)  ## the tiles that are fastest on this machine's GPU, as its file in the package's configs
	$(PY) benchmarks/tune.py

compile-check: build  ## every kernel for every target, with registers, shared memory and spills
	$(PY) tools/compile_check.py

clean:  ## removes the builds and the virtual environment
	rm -rf build build-cuda $(VENV)
