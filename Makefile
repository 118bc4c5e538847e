# Every target sets up what it needs by itself, in .venv, .venv-docs, .venv-oldest, .venv-package,
# .venv-proto and tests/support/nodejs/node_modules.

SHELL := bash
.DEFAULT_GOAL := help

# The Python that .venv is made with. An environment that happens to be active changes nothing.
PYTHON ?= python3
unexport PYTHONHOME PYTHONPATH VIRTUAL_ENV

# Installed first, so that nixl does not choose for us. Another build: make setup TORCH=...
TORCH ?= torch==2.13.0

PIP := .venv/bin/python -m pip --disable-pip-version-check -qq
CODE := $(wildcard client server tests benchmarks examples scripts)
VENV := .venv/.installed
NODE := tests/support/nodejs/node_modules/.installed

.PHONY: help setup node demo test test-slow test-oldest test-vllm test-sglang test-gpu test-rdma test-deployed gpu-bundle lint format reliability house errors findings schema metrics soak mutate
.PHONY: proto proto-check breaking release-protos bench bench-vllm docs lock package sbom clean

help: ## Show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV) ## Install kvferry and its tools into .venv

$(VENV): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "kvferry needs Python 3.10 or newer; name one with PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "Setting up .venv (the first time takes some minutes)"
	@$(PYTHON) -m venv .venv
	@$(PIP) install '$(TORCH)'
	@$(PIP) install -c requirements.lock -e '.[server,nixl,test,dev,otel-server]'
	@touch $@

# What the slow tests need from npm. Without npm those tests are skipped.
node:
	@if command -v npm >/dev/null; then \
		$(MAKE) --no-print-directory $(NODE); \
	else \
		echo "npm is not installed: the tests that use buf or the JavaScript client will be skipped" >&2; \
	fi

$(NODE): tests/support/nodejs/package.json tests/support/nodejs/package-lock.json tests/support/nodejs/.npmrc
	@command -v npm >/dev/null || { echo "buf comes from npm, which is not installed: install Node.js" >&2; exit 1; }
	@echo "Setting up tests/support/nodejs"
	@npm --prefix tests/support/nodejs ci --loglevel=error >/dev/null
	@touch $@

demo: setup ## Move KV cache between two engines on this machine (SOURCE=, DESTINATION=)
	@.venv/bin/python examples/demo.py $(if $(SOURCE),--source $(SOURCE)) $(if $(DESTINATION),--destination $(DESTINATION))

# Tests wait more than they compute, but with three processes on two cores some wait too long. A process that has run its
# tests takes some of the other's. Sockets need a short path.
WORKERS ?= 2
PARALLEL := -n $(WORKERS) --dist worksteal
# With the same hashes in every run, hypothesis draws the same examples from sets, too.
PYTEST := PYTHONHASHSEED=0 .venv/bin/pytest --basetemp "$$base"

# Named tests run whether they are slow or not.
test: setup ## Run the tests of what a user notices, in about five minutes on two cores (PYTEST_ARGS=, WORKERS=)
	@base=$$(mktemp -d) && trap 'rm -rf "$$base"' EXIT && \
		$(PYTEST) $(or $(PYTEST_ARGS),-m 'not slow' $(PARALLEL))

# Tests that cut a cable come alone: a cut that the load of others prolongs outlasts UCX's patience, which then ends its
# process.
ALONE := tests/faults/test_network.py

# These wait for what ends by its time, and compute little: one more process runs them beside the others.
WAITING := tests/faults/test_processes.py tests/faults/test_sources_and_readers.py \
	tests/server/node/test_stopped_peers.py tests/e2e/test_stopped_engines.py

test-slow: setup node ## Run the rest: faults, processes, deployment, browsers, all examples of properties (WORKERS=)
	@base=$$(mktemp -d) && trap 'rm -rf "$$base"' EXIT && export KVFERRY_EXAMPLES=full && $(PYTEST)/a $(ALONE) && { \
		$(PYTEST)/w $(WAITING) >"$$base/log" 2>&1 & waiting=$$!; others=0; \
		$(PYTEST)/o -m 'slow or property' $(PARALLEL) $(addprefix --ignore ,$(ALONE) $(WAITING)) || others=$$?; \
		wait $$waiting || others=$$?; cat "$$base/log"; exit $$others; }

# What numpy computes, protobuf encodes, grpcio calls and pydantic reads, on the oldest that pyproject.toml allows: numpy
# 1.26 adds and multiplies by other rules than numpy 2, and the add-ons for protobuf 4 are other ones. UCX is the same:
# one of its transports will do.
OLDEST_VENV := .venv-oldest/.installed
OLDEST_TESTS := $(addprefix tests/planner/test_,oracle.py large_caches.py footprint.py floor.py statements.py descriptors.py) \
	$(addprefix tests/geometry/test_,blocks.py geometry_files.py) tests/memory/test_permute.py tests/transport/test_defence.py \
	tests/transport/test_large_reads.py tests/wire/test_geometry_over_the_wire.py \
	tests/wire/test_status.py tests/api/test_copies.py tests/e2e/test_reads.py \
	$(addprefix tests/server/servicers/test_,notifications.py read_blocks.py registering_ranks.py watch_streams.py)

# numpy 1.26 has wheels for Python 3.10 to 3.12.
OLDEST_PYTHON ?= $(PYTHON)

$(OLDEST_VENV): pyproject.toml tests/oldest.txt
	@$(OLDEST_PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' \
		|| { echo "numpy 1.26 needs Python 3.10 to 3.12; name one with OLDEST_PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "Setting up .venv-oldest (about a minute)"
	@$(OLDEST_PYTHON) -m venv .venv-oldest
	@.venv-oldest/bin/python -m pip --disable-pip-version-check -qq install -c tests/oldest.txt '$(TORCH)'
	@.venv-oldest/bin/python -m pip --disable-pip-version-check -qq install -c tests/oldest.txt -e '.[server,nixl,test]'
	@touch $@

test-oldest: $(OLDEST_VENV) ## Run what depends on them on the oldest numpy, protobuf, grpcio and pydantic
	@base=$$(mktemp -d) && trap 'rm -rf "$$base"' EXIT && \
		.venv-oldest/bin/python -m pytest --basetemp "$$base" \
		$(or $(PYTEST_ARGS),-n $(WORKERS) --dist loadfile --no-loadscope-reorder -k 'not ucx-tcp' $(OLDEST_TESTS))

# Beside vLLM, whose pins are its own: in another environment, and part of neither `make test` nor `make test-slow`.
NEWEST_VLLM := 0.32.0
VLLM ?= $(NEWEST_VLLM)
vllm_folder = .venv-vllm$(if $(filter-out $(NEWEST_VLLM),$(1)),-$(1))
VLLM_FOLDER := $(call vllm_folder,$(VLLM))
VLLM_VENV := $(VLLM_FOLDER)/.installed

$(VLLM_VENV): pyproject.toml scripts/setup_vllm.sh
	@echo "Setting up $(VLLM_FOLDER) (vLLM $(VLLM) for CPU: some minutes, 4 GB)"
	@PYTHON=$(PYTHON) scripts/setup_vllm.sh $(VLLM) $(VLLM_FOLDER)
	@touch $@

VLLM_BENCHMARK := 'tests/benchmarks/test_smoke.py::test_a_topic_runs_and_its_reads_are_right[vllm_worker]'

# Warnings are those of vLLM and its dependencies. Two versions are paired where OTHER names the second one.
test-vllm: $(VLLM_VENV) ## Run the tests that need a real vLLM (VLLM=version, OTHER=a second version, PYTEST_ARGS=)
	@$(if $(OTHER),$(MAKE) --no-print-directory VLLM=$(OTHER) $(call vllm_folder,$(OTHER))/.installed)
	@$(if $(OTHER),KVFERRY_OTHER_VLLM=$(call vllm_folder,$(OTHER))) $(VLLM_FOLDER)/bin/python -m pytest -W ignore tests/integrations/vllm $(VLLM_BENCHMARK) $(PYTEST_ARGS)

# Its environment has vLLM, too. A run starts a dozen instances, so it takes a quarter of an hour.
SGLANG := 0.5.23
SGLANG_VENV := .venv-sglang/.installed

$(SGLANG_VENV): pyproject.toml scripts/setup_sglang.sh scripts/setup_vllm.sh
	@echo "Setting up .venv-sglang (SGLang $(SGLANG) and vLLM $(NEWEST_VLLM) for CPU: some minutes, 5 GB)"
	@PYTHON=$(PYTHON) scripts/setup_sglang.sh $(SGLANG) $(NEWEST_VLLM) .venv-sglang
	@touch $@

# Warnings are those of SGLang and its dependencies.
test-sglang: $(SGLANG_VENV) ## Run the tests that need a real SGLang (PYTEST_ARGS=)
	@.venv-sglang/bin/python -m pytest -W ignore tests/integrations/sglang $(PYTEST_ARGS)

# Without a GPU it says so and runs nothing; DEVICE=cpu runs the same tests on the host's memory. Moving to a GPU needs a
# torch that was built for CUDA: make setup TORCH=...
test-gpu: setup ## Run the tests of GPUs and measure, see CONTRIBUTING.md (DEVICE=cpu, PYTEST_ARGS=)
	@.venv/bin/python -m tests.gpu $(if $(DEVICE),--device $(DEVICE)) $(PYTEST_ARGS)

# Without qemu or Debian's packages it says so and runs nothing. KVM is not needed.
test-rdma: setup ## Run the tests of RDMA in emulated machines with soft-RoCE (PYTEST_ARGS=)
	@.venv/bin/python -m tests.rdma $(PYTEST_ARGS)

# As root, on Debian, with buildah, debootstrap and systemd-container; without them it runs nothing, and says so. Under `CI`
# that is a failure. A test waits for a build, or for a system that boots.
test-deployed: package ## Build the image, boot the systemd unit, and read through both (PYTEST_ARGS=)
	@KVFERRY_DEPLOYED=1 .venv/bin/python -m pytest -o timeout=900 tests/deployed $(PYTEST_ARGS)

GPU_PYTHON ?= 3.12
GPU_CUDA ?= cu12,cu13
GPU_BUNDLE ?= build/kvferry-gpu.tar.gz

gpu-bundle: setup ## Pack test-gpu for a machine that reaches nothing (GPU_PYTHON=, GPU_CUDA=, GPU_PACKAGES=, GPU_BUNDLE=)
	@.venv/bin/python scripts/gpu_bundle.py --python $(GPU_PYTHON) --cuda $(GPU_CUDA) --output $(GPU_BUNDLE) \
		$(if $(GPU_PACKAGES),--packages $(GPU_PACKAGES))

reliability: setup ## Write the tables of faults into tests/faults/RESULTS.md
	@.venv/bin/python -m tests.faults.table

house: ## Draw docs/house.svg, the folders and their imports
	@$(PYTHON) scripts/draw_house.py

errors: setup ## Write docs/errors.md from the protos and the exceptions
	@.venv/bin/python -m scripts.errors_page

findings: setup ## Write what `kvferry doctor` finds into docs/doctor.md
	@.venv/bin/python -m scripts.doctor_page

schema: setup ## Write docs/geometry.schema.json from the fields of geometry files
	@.venv/bin/python -m scripts.geometry_schema

metrics: setup ## Write the tables of metrics into docs
	@.venv/bin/python -m scripts.metric_tables

soak: setup ## Leaks after 10,000 requests; then random load and faults, every byte verified (MINUTES=60, SEED=)
	@KVFERRY_LEAK_REQUESTS=10000 .venv/bin/pytest tests/faults/test_leaks.py
	@.venv/bin/python -m tests.soak --minutes $(or $(MINUTES),60) $(if $(SEED),--seed $(SEED))

mutate: setup ## Change one decision at a time; a test has to notice (SAMPLE=10, SEED=, ONLY=part of a path)
	@.venv/bin/python -m tests.mutation --sample $(or $(SAMPLE),10) $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only $(ONLY))

lint: setup $(NODE) proto-check breaking ## Check style, types, the protos and the generated code
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy --strict $(CODE)
	tests/support/nodejs/node_modules/.bin/buf lint

format: setup ## Format the code and apply safe fixes
	.venv/bin/ruff check --fix-only
	.venv/bin/ruff format

proto: ## Generate client/kvferry/v1 from protos/
	@scripts/generate_protos.sh

proto-check: ## Check that client/kvferry/v1 is what protos/ generates
	@scripts/generate_protos.sh --check

breaking: $(NODE) ## Check that the protos do not break callers of the last release
	@scripts/breaking.sh

# At a release, when the version in pyproject.toml is its own.
release-protos: $(NODE) ## Keep the protos as those of this version's release
	@scripts/breaking.sh --release

# matplotlib draws the curves.
bench: setup ## Run the benchmarks, and write docs/performance.md from them (TOPICS=)
	@.venv/bin/python -c 'import matplotlib, mooncake' 2>/dev/null || $(PIP) install -e '.[bench]'
	@.venv/bin/python -m benchmarks $(TOPICS)
	@.venv/bin/python -m benchmarks.report

bench-vllm: $(VLLM_VENV) ## Compare with vLLM's own connector, and with computing, in a real vLLM
	@$(VLLM_FOLDER)/bin/python -m benchmarks.vllm_pd
	@$(VLLM_FOLDER)/bin/python -m benchmarks.vllm_concurrent
	@$(VLLM_FOLDER)/bin/python -m benchmarks.vllm_waiting
	@$(VLLM_FOLDER)/bin/python -m benchmarks.vllm_prefix

# mkdocs reads the code without importing it: neither torch nor NIXL is needed.
DOCS_VENV := .venv-docs/.installed

$(DOCS_VENV): pyproject.toml
	@echo "Setting up .venv-docs"
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -m pip --disable-pip-version-check -qq install -e '.[docs]'
	@touch $@

docs: $(DOCS_VENV) ## Build the documentation as a site in build/site
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet

# What is released, in dist: the sdist, the wheel that is built from it, and the parts that a clean environment then has.
PACKAGE_VENV := .venv-package/.installed
RELEASE := build/release

$(PACKAGE_VENV): pyproject.toml requirements.lock
	@echo "Setting up .venv-package"
	@$(PYTHON) -m venv .venv-package
	@.venv-package/bin/python -m pip --disable-pip-version-check -qq install -c requirements.lock uv
	@.venv-package/bin/uv pip install -q --python .venv-package -c requirements.lock -e '.[package,server,test]'
	@touch $@

package: setup $(PACKAGE_VENV) ## Build the wheel and the sdist into dist, install them into clean environments and check them
	@rm -rf dist
	@.venv-package/bin/python -m build --no-isolation >/dev/null
	@.venv-package/bin/twine check --strict dist/*
	@$(MAKE) --no-print-directory sbom
	@.venv-package/bin/python -m pytest tests/package $(PYTEST_ARGS)

# What is in the lock stays as it is, as far as pyproject.toml allows. UPGRADE=1 takes the newest. torch and what it brings
# are not in it: TORCH says which.
lock: ## Write requirements.lock, the versions for CI and the container (UPGRADE=1)
	@$(PYTHON) -m venv build/lock && build/lock/bin/python -m pip --disable-pip-version-check -qq install 'uv>=0.13,<0.14'
	@build/lock/bin/uv pip compile -q --universal --python-version 3.10 $(if $(UPGRADE),--upgrade) \
		--extra server --extra otel-server --extra nixl --extra test --extra dev --extra package \
		--no-header --no-annotate --no-emit-index-url --no-emit-find-links --no-emit-package torch \
		--custom-compile-command 'make lock' --output-file requirements.lock pyproject.toml >/dev/null
	@sed -i -E '/^(nvidia-|cuda-|triton)/d' requirements.lock

sbom: $(PACKAGE_VENV) ## List what the wheel in dist brings along, in dist/sbom.cdx.json (CycloneDX)
	@rm -rf $(RELEASE)
	@.venv-package/bin/uv venv -q --python .venv-package/bin/python $(RELEASE)
	@.venv-package/bin/uv pip install -q --python $(RELEASE) -c requirements.lock "$$(echo dist/kvferry-*.whl)[server]"
	@.venv-package/bin/cyclonedx-py environment --output-reproducible --pyproject pyproject.toml \
		--output-file dist/sbom.cdx.json $(RELEASE)/bin/python

clean: ## Remove everything that make has set up or left
	rm -rf .venv .venv-docs .venv-oldest .venv-package .venv-proto .venv-vllm* tests/support/nodejs/node_modules build dist
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find client server tests -name __pycache__ -type d -prune -exec rm -rf {} +
