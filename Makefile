# check: what a change should pass before anything else, in some minutes; test: all tests, as README's command.
# Each target runs with the tools of the active environment.
PYTHON ?= python

.PHONY: check lint test test-gpu mutants bench bench-compare bench-kernels

check: lint
	$(PYTHON) -m pytest -n auto -m "not thorough"

lint:
	ruff check .
	ruff format --check .
	$(PYTHON) -m mypy
	lint-imports

test:
	$(PYTHON) -m pytest -n auto

# Needs a CUDA GPU, as bench-kernels does. Each process takes some GB of its memory.
test-gpu:
	$(PYTHON) -m pytest -m gpu -n auto --maxprocesses 8

# Do the tests see single faults put into the core? One core, about 20 minutes; needs the package coverage.
SEED ?= 0
mutants:
	$(PYTHON) -m tests.mutants --seed $(SEED) --count 70

bench:
	$(PYTHON) -m tests.bench --all

# This tree beside another revision, in pairs: make bench-compare REV=HEAD~1
bench-compare:
	$(PYTHON) -m tests.bench compare $(REV)

# Kernels: checked against float64, then timed beside the public ones that are installed.
bench-kernels:
	$(PYTHON) -m validate.bench_kernels
