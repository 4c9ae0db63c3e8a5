# All tasks of users, contributors and CI. Each target first sets up .venv (needs Python 3.10+ and a C compiler).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# A second environment: torch-npu changes how torch starts, so it must not be in the default environment.
SIM := .venv-sim
# The oldest torch, which on x86-64 is a wheel for CUDA with gigabytes of libraries.
OLDEST := .venv-oldest
# A third environment for GPUs, without torch-npu, so that torch starts as usual.
GPU := .venv-gpu
DOCS := .venv-docs
# The environment in which the OpenCL backend and HAL are installed from separate wheels, as by a third party.
OPENCL := .venv-opencl
RESULTS := docs/support/results
INSTALL := -m pip install --quiet --disable-pip-version-check -c constraints.txt --editable
# Test files run in parallel, in one process per processor but at most eight (each needs about 1 GB). Waiting OpenMP
# threads sleep instead of spinning, because other processes need the processor.
WORKERS ?= auto
PARALLEL = -n $(WORKERS) --maxprocesses 8
TEST = OMP_WAIT_POLICY=passive $(1)/python -m pytest $(PARALLEL) --dist loadfile
SIMULATED := tests/backends/npu tests/backends/cuda tests/benchmarks/npu
# CI runs this share of the nightly tests, selected by the commit.
SHARE ?= 0.1
SEED ?= $(or $(shell git rev-parse HEAD 2>/dev/null),0)

.PHONY: train test test-slow test-simulators nightly nightly-tests nightly-simulators nightly-sample production fuzzers
.PHONY: faults mutation test-opencl test-aarch64 test-oldest-torch gpu npu gpu-environment sanitize lint as-written
.PHONY: check bench support reference docs clean
.DEFAULT_GOAL := test

$(READY): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) ".[train,megatron,test,jax]"
	touch $@

train: $(READY)  ## train a small GPT on real text, on the CPU, in about three minutes
	$(BIN)/hal train --backend cpu_ref --config tiny --run-dir runs/tiny

# Some of these tests wait for other processes, so one worker more than processors keeps these busy.
test test-slow: WORKERS = $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
test: $(READY)  ## the fast suite
	$(call TEST,$(BIN)) -m "not slow"

test-slow: $(READY)  ## the tests that the fast suite leaves out, except those of the simulators
	$(call TEST,$(BIN)) -m "slow and not nightly" $(SIMULATED:%=--ignore %)

test-simulators: $(SIM)/.ready  ## what needs the simulators of npu and cuda, fast and slow tests
	$(call TEST,$(SIM)/bin) -m "not nightly" $(SIMULATED) tests/model/megatron/test_quickstart.py -k "npu or cuda"

nightly:  ## all or PARTS="..." of the tests that take too long for CI; writes docs/verified/nightly.md
	.ci/run nightly $(PARTS)

nightly-tests: $(READY)  ## the tests marked nightly, except those of the simulators
	$(call TEST,$(BIN)) -m nightly $(SIMULATED:%=--ignore %)

nightly-simulators: $(SIM)/.ready  ## what needs the simulators, tests marked nightly
	$(call TEST,$(SIM)/bin) -m nightly $(SIMULATED)

fuzzers: $(READY)  ## 100,000 inputs for every parser of files that others have made
	HAL_FUZZ_EXAMPLES=100000 $(call TEST,$(BIN)) --dist load -m slow tests/faults/test_fuzzers.py

nightly-sample: $(READY)  ## SHARE of the nightly tests, chosen by SEED (the commit)
	$(call TEST,$(BIN)) -m nightly $(SIMULATED:%=--ignore %) --sample $(SHARE) --sample-seed $(SEED)

production: $(READY) $(SIM)/.ready  ## the kit at the sizes of models: cpu_ref, the simulators (reduced), opencl with a driver
	$(BIN)/hal parity --backend cpu_ref --scale production --require-all --seed $$(printf %d 0x$$(git rev-parse --short=7 HEAD))
	$(SIM)/bin/hal parity --backend npu --simulate --scale production --require-all
	$(SIM)/bin/hal parity --backend cuda --simulate --scale production --require-all
	# The example backend needs a driver, which a machine may lack.
	if ls /etc/OpenCL/vendors/*.icd >/dev/null 2>&1; then \
		$(SIM)/bin/python $(INSTALL) examples/hal-opencl && $(SIM)/bin/hal parity --backend opencl --scale production; \
	else echo "no OpenCL driver: the production tier of hal-opencl was not run"; fi

faults: $(READY)  ## EVENTS faults on training jobs, chosen by the commit; writes docs/verified/faults.md
	$(BIN)/python tests/faults/schedule.py --page --events $(or $(EVENTS),200) --seed $$(printf %d 0x$$(git rev-parse --short=7 HEAD))

mutation: $(READY)  ## random mistakes in core files, nine tenths of which their tests must notice
	$(BIN)/python tests/mutation.py --samples 60 --require 0.9 --seed $$(printf %d 0x$$(git rev-parse --short=7 HEAD))

$(SIM)/.ready: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(SIM)
	$(SIM)/bin/python $(INSTALL) ".[train,megatron,test,npu,cuda]"
	touch $@

test-opencl: $(READY)  ## examples/hal-opencl from its wheel beside a HAL wheel; needs an OpenCL driver (pocl-opencl-icd)
	rm -rf $(OPENCL) build/opencl
	mkdir -p build/opencl/source
	# A copy without build outputs, because a wheel built in place would include files from earlier builds.
	tar --exclude='./.git' --exclude='./.venv*' --exclude=./build --exclude=./runs --exclude='*.egg-info' \
		--exclude=__pycache__ --exclude='.*_cache' -cf - . | tar -xf - -C build/opencl/source
	cd build/opencl && $(abspath $(BIN))/python -m pip wheel --quiet --disable-pip-version-check --no-deps \
		--no-build-isolation ./source ./source/examples/hal-opencl
	$(PYTHON) -m venv $(OPENCL)
	$(OPENCL)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		"$$(echo build/opencl/torch_hal-*.whl)[train,test]" build/opencl/hal_opencl-*.whl
	cd build/opencl && OMP_WAIT_POLICY=passive $(abspath $(OPENCL))/bin/pytest $(PARALLEL) $(CURDIR)/examples/hal-opencl
	$(OPENCL)/bin/python -m pip uninstall --quiet --yes hal-opencl
	cd build/opencl && $(abspath $(OPENCL))/bin/python $(CURDIR)/examples/hal-opencl/tests/after_uninstalling.py

$(OLDEST)/.ready: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OLDEST)
	mkdir -p build
	sed '/^torch==/d; /^sympy==/d' constraints.txt > build/constraints-oldest.txt
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -c build/constraints-oldest.txt \
		torch==2.6.0 --editable ".[train,convert,transformers,serve,test]"
	touch $@

# The last three: pipelines and ZeRO need a newer torch, and torch 2.6 itself imports its compiler for the trainer.
test-oldest-torch: $(OLDEST)/.ready  ## the kit and the fast suite with torch 2.6
	$(OLDEST)/bin/hal parity --backend cpu_ref --require-all
	$(call TEST,$(OLDEST)/bin) -m "not slow" $(SIMULATED:%=--ignore %) -k "not pp2 and not zero3 and not training.trainer"

test-aarch64:  ## cpu_ref's kit and kernel tests on emulated aarch64; needs the packages that .ci/aarch64 names
	PYTHON=$(PYTHON) .ci/aarch64

# The environment of `make gpu-environment` if it exists, otherwise $(PYTHON). Nothing is installed here, except for a
# rehearsal on the simulator (SIMULATE=1), which runs in the default environment and writes build/gpu/.
gpu: $(if $(SIMULATE),$(READY))  ## all or PARTS="..." of what needs an NVIDIA GPU; writes docs/verified/
	$(if $(SIMULATE),$(BIN)/python -m hal.bench.gpu.run --simulate $(PARTS),$(gpu_run))

define gpu_run
@python="$(PYTHON)"; if [ -x $(GPU)/bin/python ]; then python=$(GPU)/bin/python; fi; set -x; \
	"$$python" benchmarks/gpu/preflight.py $(PARTS) && "$$python" -m hal.bench.gpu.run $(PARTS)
endef

# On a machine with CANN and Ascend devices; nothing is installed, and no network is needed.
npu:  ## all or PARTS="..." of what needs Ascend devices; writes docs/verified/
	$(PYTHON) -m hal.bench.npu.npu_run $(PARTS)

gpu-environment: $(GPU)/.ready  ## the packages of `make gpu`, in .venv-gpu; needs a network

$(GPU)/.ready: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(GPU)
	$(GPU)/bin/python $(INSTALL) ".[train,cuda]" hypothesis
	touch $@

sanitize: $(READY)  ## cpu_ref's kernels under AddressSanitizer and UBSan
	HAL_CPU_REF_SANITIZE=address,undefined ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	LD_PRELOAD="$$($${CC:-gcc} -print-file-name=libasan.so):$$($${CC:-gcc} -print-file-name=libstdc++.so)" \
	$(call TEST,$(BIN)) -m "not slow" tests/backends/cpu_ref --deselect tests/backends/cpu_ref/test_build.py

lint: $(READY)  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

as-written: $(READY)  ## real files of other trainers, from checkouts in SOURCES=DIR, through the options; writes docs/verified/
	$(BIN)/python tests/as_written.py $(SOURCES) >docs/verified/as-written.md.new; \
	  code=$$?; mv docs/verified/as-written.md.new docs/verified/as-written.md; exit $$code

check: lint test  ## the checks that every change must pass

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

reference: $(READY)  ## writes docs/reference/ from signatures and docstrings (a test notices when it is stale)
	PYTHONPATH=. $(BIN)/python docs/reference/write.py

docs: $(DOCS)/.ready  ## the documentation as a site in build/site, every link checked
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

$(DOCS)/.ready: mkdocs.yml constraints.txt setup.cfg
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		mkdocs-material ruff
	touch $@

clean:
	rm -rf $(VENV) $(SIM) $(GPU) $(DOCS) $(OPENCL) build dist *.egg-info runs
