# Every target sets itself up in .venv; nothing outside this folder is changed but the model
# cache (~/.cache/headrace, or $HEADRACE_CACHE).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEPENDENCIES := $(VENV)/.dependencies
STAMP := $(VENV)/.installed
# A process a core; which tests share one is in tests/conftest.py.
IN_PARALLEL := -n logical --maxprocesses 8 --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-kernels check-kernels bench bench-scheduler bench-control bench-gpu bench-host
.PHONY: bench-drafts bench-store bench-telemetry chaos images
.PHONY: audit check format protos docs lock clean

help: ## Say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make .venv with the locked dependencies

$(DEPENDENCIES): requirements.lock
	@echo "==> setting up $(VENV) (once; a few minutes)"
	@$(PYTHON) -c 'import sys; sys.exit("Headrace needs Python 3.11 or newer, this is %s; try make PYTHON=python3.11" % sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --progress-bar on --disable-pip-version-check -r requirements.lock
	@touch $@

# Apart, so that a change of pyproject.toml does not look at every dependency again.
$(STAMP): $(DEPENDENCIES) pyproject.toml
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: $(STAMP) ## Serve the small real model here, ask it something, stop
	@$(BIN)/headrace demo

test: $(STAMP) ## Run the tests; with ARGS a selection, without the kernels'
	@$(BIN)/python -m pytest -q $(or $(ARGS),$(IN_PARALLEL))
	$(if $(ARGS),,@$(MAKE) --no-print-directory test-kernels check-kernels)

images: $(STAMP) ## Build the images and run them, as root with buildah and runc; ARGS="gpuworker" for torch's
	@HEADRACE_IMAGES="$(ARGS)" $(BIN)/python -m pytest -q -m slow -p no:cacheprovider tests/images

chaos: $(STAMP) ## Kill parts of a cluster under load and check the clients; ARGS="--seed N --minutes M"
	@$(BIN)/python -m tests.chaos $(ARGS)

test-kernels: $(STAMP) ## Run the GPU kernels under Triton's interpreter, no GPU needed
	@TRITON_INTERPRET=1 $(BIN)/python -m pytest -q tests/kernels $(or $(ARGS),$(IN_PARALLEL))

check-kernels: $(STAMP) ## Compile the GPU kernels for every target, no GPU needed
	@TRITON_CACHE_DIR=$(abspath build/triton) $(BIN)/python -m tests.kernels.check_kernels $(ARGS)

bench-gpu: $(STAMP) ## Measure kernels and whole models on the GPU that is here
	@$(BIN)/python -m benchmarks.gpu $(ARGS)

bench-host: $(STAMP) ## What a step costs the worker's host: Python, and attention on the CPU
	@$(BIN)/python -m benchmarks.host_time $(ARGS)

bench: $(STAMP) ## Serve the small real model here and load it in three ways
	@$(BIN)/python -m benchmarks.end_to_end $(ARGS)

bench-scheduler: $(STAMP) ## What a step costs the scheduling core
	@$(BIN)/python -m benchmarks.scheduler $(ARGS)

bench-drafts: $(STAMP) ## What speculation is worth: acceptance and speed-up on two prompts
	@$(BIN)/python -m benchmarks.drafts $(ARGS)

bench-control: $(STAMP) ## What router and scheduler cost, with a worker that answers at once
	@$(BIN)/python -m benchmarks.control $(ARGS)

bench-telemetry: $(STAMP) ## What metrics and traces cost
	@$(BIN)/python -m benchmarks.telemetry $(ARGS)

bench-store: $(STAMP) ## What it costs to keep requests in the store
	@$(BIN)/python -m benchmarks.store $(ARGS)

check: $(STAMP) ## Format, lint, types, layers, protos, sizes
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint protos
	$(BIN)/buf format --diff --exit-code protos
	$(BIN)/buf breaking protos --against tests/data/protos/0.1.0.binpb
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python protos/generate.py --check
	$(BIN)/python .ci/ceilings.py
	$(BIN)/python .ci/dependencies.py
	$(BIN)/hadolint helm/images/*.Containerfile

audit: $(STAMP) ## Look for known vulnerabilities in requirements.lock; needs the internet
	@$(PYTHON) -m venv build/audit
	@build/audit/bin/python -m pip install -q --disable-pip-version-check pip-audit || { echo "make audit: the package index cannot be reached; run this where it can"; exit 2; }
	@build/audit/bin/pip-audit --strict --disable-pip --no-deps -r requirements.lock || { echo "make audit: not clean. ERROR lines say what could not be looked up: then run this where PyPI can be reached"; exit 1; }

format: $(STAMP) ## Format and mend what can be mended
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/buf format -w protos

protos: $(STAMP) ## Generate headrace/v1 from protos/
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python protos/generate.py

docs: $(STAMP) ## Write docs/settings.md and the chart's values from the settings that the services read
	$(BIN)/python docs/generate.py
	$(BIN)/python helm/generate.py

lock: $(STAMP) ## Write requirements.lock from what is installed
	$(BIN)/python -m pip freeze --all --exclude pip --exclude-editable | sed 's/^\(torch==[0-9.]*\)+.*/\1/' > requirements.lock

clean: ## Remove .venv and caches in this folder
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build *.egg-info
