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
BIN := .venv/bin
READY := .venv/.ready

.PHONY: help demo test fuzz lint types docs ci clean

help: ## show the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## solve, train through the layer, check, and draw: out/demo
	$(BIN)/dfw demo --out out/demo

test: $(READY) ## run the tests; select with make test ARGS="-k gradient"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses=8 $(ARGS)

fuzz: $(READY) ## try what is promised on random problems: out/fuzz; more with make fuzz ARGS="--problems 1000000"
	$(BIN)/dfw fuzz --jobs $(JOBS) $(ARGS)

lint: $(READY) ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY) ## check types
	$(BIN)/mypy

docs: $(READY) ## build the documentation: site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

ci: ## all of the above, every command, every example: .ci/run
	.ci/run

clean: ## remove the environment and everything that was built
	rm -rf .venv site out dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Installed once, and again when the requirements change. pip is silent, so dots show that it
# works; its output is printed if it fails.
$(READY): pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "dfwlayer needs Python 3.11 or later; found: $$($(or $(PYTHON),python3) --version 2>&1)" >&2; \
		echo 'Install one, or name it: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@test -x $(BIN)/python || { echo 'Making .venv'; \
		"$(PYTHON)" -m venv .venv || { rm -rf .venv; exit 1; }; }
	@printf 'Installing into .venv, once; PyTorch is large, so this can take minutes '
	@(while sleep 3; do printf .; done) & dots=$$!; trap 'kill $$dots 2>/dev/null' EXIT INT TERM; \
		$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]' \
			>.venv/install.log 2>&1 \
		|| { echo ' failed'; tail -n 40 .venv/install.log >&2; exit 1; }; echo ' done'
	@touch $@
