# check: everything that a change must pass. Each target runs with the tools of the active environment.
PYTHON ?= python

.PHONY: check lint test bench

check: lint test

lint:
	ruff check .
	ruff format --check .
	$(PYTHON) -m mypy
	lint-imports

test:
	$(PYTHON) -m pytest -n auto

bench:
	$(PYTHON) -m tests.bench
