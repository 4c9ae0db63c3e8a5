# Everything a newcomer, a contributor or CI runs. Each target sets up .venv first (Python 3.10+ and a C compiler needed).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# A second environment: torch-npu changes how torch starts, so it must not be where people work by default.
SIM := .venv-sim
# And one for a GPU, without torch-npu, so that torch there is as its users have it.
GPU := .venv-gpu
DOCS := .venv-docs
# Where the OpenCL backend is installed from its own wheel, beside a HAL wheel, as a stranger would.
OPENCL := .venv-opencl
RESULTS := docs/support/results
INSTALL := -m pip install --quiet --disable-pip-version-check -c constraints.txt --editable

.PHONY: train test test-slow test-simulators test-opencl test-aarch64 gpu sanitize lint check bench support docs clean
.DEFAULT_GOAL := test

$(READY): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) ".[train,megatron,test]"
	touch $@

train: $(READY)  ## train a small GPT on real text, on the CPU, in about three minutes
	$(BIN)/hal train --backend cpu_ref --config tiny --run-dir runs/tiny

test: $(READY)  ## the fast suite
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(READY)  ## what the fast suite leaves out, and the simulators
	$(BIN)/python -m pytest -m slow --ignore tests/backends/npu --ignore tests/backends/cuda
	$(MAKE) test-simulators

test-simulators: $(SIM)/.ready  ## the npu and cuda backends on their simulators, fast and slow tests
	$(SIM)/bin/python -m pytest tests/backends/npu tests/backends/cuda
	$(SIM)/bin/python -m pytest tests/model/megatron/test_quickstart.py -k npu

$(SIM)/.ready: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(SIM)
	$(SIM)/bin/python $(INSTALL) ".[train,megatron,test,npu,cuda]"
	touch $@

test-opencl: $(READY)  ## examples/hal-opencl from its wheel beside a HAL wheel; needs an OpenCL driver (pocl-opencl-icd)
	rm -rf $(OPENCL) build/opencl
	mkdir -p build/opencl/source
	# A copy without what was built: a wheel made in place would pack what earlier builds left there.
	tar --exclude='./.git' --exclude='./.venv*' --exclude=./build --exclude=./runs --exclude='*.egg-info' \
		--exclude=__pycache__ --exclude='.*_cache' -cf - . | tar -xf - -C build/opencl/source
	cd build/opencl && $(abspath $(BIN))/python -m pip wheel --quiet --disable-pip-version-check --no-deps \
		--no-build-isolation ./source ./source/examples/hal-opencl
	$(PYTHON) -m venv $(OPENCL)
	$(OPENCL)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		"$$(echo build/opencl/torch_hal-*.whl)[train,test]" build/opencl/hal_opencl-*.whl
	cd build/opencl && $(abspath $(OPENCL))/bin/pytest $(CURDIR)/examples/hal-opencl
	$(OPENCL)/bin/python -m pip uninstall --quiet --yes hal-opencl
	cd build/opencl && $(abspath $(OPENCL))/bin/python $(CURDIR)/examples/hal-opencl/tests/after_uninstalling.py

test-aarch64:  ## cpu_ref's kit and kernel tests on emulated aarch64; needs the packages that .ci/aarch64 names
	PYTHON=$(PYTHON) .ci/aarch64

# Where $(PYTHON) has all of it already, as on a GPU machine without a network, nothing is installed.
HAS_GPU := import cupy, hypothesis, sys, torch; sys.exit(not torch.cuda.is_available())

gpu:  ## all or PARTS="..." of what needs an NVIDIA GPU (and a CUDA build of torch); writes docs/verified/
	@if $(PYTHON) -c "$(HAS_GPU)" 2>/dev/null; then set -x; $(PYTHON) -m hal.bench.gpu $(PARTS); \
	else set -x; $(MAKE) --no-print-directory $(GPU)/.ready && $(GPU)/bin/python -m hal.bench.gpu $(PARTS); fi

$(GPU)/.ready: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(GPU)
	$(GPU)/bin/python $(INSTALL) ".[train,cuda]" hypothesis
	touch $@

sanitize: $(READY)  ## cpu_ref's kernels under AddressSanitizer and UBSan
	HAL_CPU_REF_SANITIZE=address,undefined ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	LD_PRELOAD="$$($${CC:-gcc} -print-file-name=libasan.so):$$($${CC:-gcc} -print-file-name=libstdc++.so)" \
	$(BIN)/python -m pytest -m "not slow" tests/backends/cpu_ref --deselect tests/backends/cpu_ref/test_build.py

lint: $(READY)  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint test  ## what a change must pass

bench: $(READY)  ## ratios against named peers; needs an otherwise idle machine
	$(BIN)/hal bench all

support: $(READY) $(SIM)/.ready  ## the kit on every backend; writes docs/support/ (a test notices when it is stale)
	$(BIN)/hal parity --backend cpu_ref --json $(RESULTS)/cpu_ref.json
	$(SIM)/bin/hal parity --backend npu --simulate --json $(RESULTS)/npu-simulator.json
	$(SIM)/bin/hal parity --backend cuda --simulate --json $(RESULTS)/cuda-simulator.json
	$(SIM)/bin/python $(INSTALL) examples/hal-opencl
	$(SIM)/bin/hal parity --backend opencl --json $(RESULTS)/opencl.json
	mkdir -p build
	$(BIN)/hal parity --merge $(RESULTS)/*.json --html build/support.html --markdown docs/support/README.md

docs: $(DOCS)/.ready  ## the documentation as a site in build/site, every link checked
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

$(DOCS)/.ready: mkdocs.yml constraints.txt setup.cfg
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		mkdocs-material "mkdocstrings[python]" ruff
	touch $@

clean:
	rm -rf $(VENV) $(SIM) $(GPU) $(DOCS) $(OPENCL) build dist *.egg-info runs
