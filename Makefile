# Everything sets itself up: the first target run makes .venv and installs into it.
SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# the first python of version 3.11 or later; override with make PYTHON=/path/to/python
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; \
	done)
# one process per core with one thread each is faster for many small tensors than the reverse
WORKERS ?= auto
JOBS ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
# what is installed, where and in which versions: the oldest ones have an environment of their own
VENV := .venv
EXTRAS := dev
CONSTRAINTS := constraints.txt
OLDEST_PYTHON ?= $(shell for p in python3.11 python3.12; do $$p -c '' 2>/dev/null && echo $$p && break; done)
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# each process begins with its share of the files in one piece, and takes from others at its end
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: help demo test test-kernels test-gpu test-oldest test-site fuzz lint types browser docs notebook tables hooks ci clean

help: ## show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## solve, train through the layer, check, and draw: out/demo
	$(BIN)/dfw demo --out out/demo

test: $(READY) ## run the tests; select with make test ARGS="-k gradient"
	$(PYTEST) --maxprocesses=8 $(ARGS)

test-kernels: $(READY) ## run the Triton kernels on the CPU, in Triton's interpreter (Linux)
	TRITON_INTERPRET=1 $(PYTEST) --maxprocesses=8 -m interpreter $(ARGS) \
		$$(grep -rlE 'kernel_cases|mark\.interpreter' tests --include='test_*.py')

test-gpu: $(READY) ## run the tests that need a CUDA device
	@$(BIN)/python -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null || { \
		echo 'make test-gpu: PyTorch in $(BIN) finds no CUDA device, and without one nothing is tested' >&2; \
		exit 1; }
	@$(BIN)/python -c 'import triton' || { \
		echo 'make test-gpu: $(BIN) has no Triton, so the kernels would not be tested' >&2; exit 1; }
	$(PYTEST) --maxprocesses=4 -m cuda $(ARGS)

test-oldest: ## run the tests with the oldest versions that pyproject.toml allows
	@$(MAKE) --no-print-directory test VENV=.venv-oldest EXTRAS=cli,examples,test \
		CONSTRAINTS=constraints-oldest.txt PYTHON='$(or $(OLDEST_PYTHON),$(PYTHON))'

browser: $(READY) ## a Chromium for tests that look at pages, if there is none
	@.ci/browser

test-site: docs browser ## look at every page of the site in a browser, wide and narrow, and drag its figure
	DFW_SITE='$(CURDIR)/site' $(PYTEST) --maxprocesses=4 tests/site $(ARGS)

fuzz: $(READY) ## try what is promised on random problems: out/fuzz; more with make fuzz ARGS="--problems 1000000"
	$(BIN)/dfw fuzz --jobs $(JOBS) $(ARGS)

lint: $(READY) ## check style, formatting and what imports what
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/pre-commit validate-config

types: $(READY) ## check types
	$(BIN)/mypy

docs: $(READY) ## build the documentation: site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

notebook: $(READY) ## run the tutorial, docs/tutorial.ipynb, and keep what it prints and draws
	$(BIN)/python docs/hooks/notebook.py --write

tables: $(READY) ## make the tables of docs/ anew from what is recorded in docs/results
	$(BIN)/python -m dfwlayer_bench.recorded --write

hooks: $(READY) ## check style, types and imports before every commit
	$(BIN)/pre-commit install

ci: ## all of the above, every command, every example: .ci/run
	.ci/run

clean: ## remove the environment and everything that was built
	rm -rf .venv .venv-oldest site out dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Installed once, and again when the requirements change. pip is silent, so dots show that it
# works; its output is printed if it fails.
$(READY): pyproject.toml $(CONSTRAINTS)
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "dfwlayer needs Python 3.11 or later; found: $$($(or $(PYTHON),python3) --version 2>&1)" >&2; \
		echo 'Install one, or name it: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@test -x $(BIN)/python || { echo 'Making $(VENV)'; \
		"$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); exit 1; }; }
	@printf 'Installing into $(VENV), once; PyTorch is large, so this can take minutes '
	@(while sleep 3; do printf .; done) & dots=$$!; trap 'kill $$dots 2>/dev/null' EXIT INT TERM; \
		$(BIN)/python -m pip install --disable-pip-version-check -c $(CONSTRAINTS) -e '.[$(EXTRAS)]' \
			>$(VENV)/install.log 2>&1 \
		|| { echo ' failed'; tail -n 40 $(VENV)/install.log >&2; exit 1; }; echo ' done'
	@touch $@
