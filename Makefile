# check: what a change should pass before anything else, in about two minutes; test: all tests, also many cases
# alike (thorough) and those of 0.2 s or more (slow), which pytest leaves out by itself.
# Each target runs with the tools of the active environment.
PYTHON ?= python
# Each process of a run finds the byte code of what another has imported before.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: check lint style types imports usual-tests test test-gpu mutants bench bench-compare bench-kernels bench-generation

# Types take as long as a quarter of the tests on one core, and are looked at beside them. What a target found is
# printed when it is done, tests as they run (the + lets them), and whichever fails, so does check.
TOGETHER = $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)
check: style
	@$(MAKE) --no-print-directory --jobs=3 $(TOGETHER) types imports usual-tests

lint: style types imports

style:
	ruff check .
	ruff format --check .

types:
	$(PYTHON) -m mypy

imports:
	lint-imports

# By worksteal most tests of a file stay in one process, and what they share is made once.
usual-tests:
	+$(PYTHON) -m pytest -n auto --dist worksteal

test:
	$(PYTHON) -m pytest -n auto -m "thorough or not thorough"

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
	$(PYTHON) -m simcore.validate.benchmarks.kernels

# Continuous batching on a CUDA card, beside Hugging Face transformers if that is installed: make bench-generation OUT=rows.csv
bench-generation:
	$(PYTHON) -m simcore.validate.benchmarks.generation $(if $(OUT),--out $(OUT))
