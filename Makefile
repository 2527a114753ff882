# Two commands on a fresh machine with Python 3.11 and make:  make demo  |  make test
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP_INSTALL := $(BIN)/pip install --quiet --no-compile --constraint constraints.txt
OUT    ?= out/compare
WORKERS ?= 2
SEED    ?= 0

.DEFAULT_GOAL := help
.PHONY: help install demo quick test test-e2e test-wheel test-deploy test-lowest test-interpreters fuzz tables docs figures docs-serve results bench check format clean

help:  ## Show this list
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

install: $(VENV)/.installed  ## Create the virtual environment and install everything into it

# What the demo needs. torch is installed first and alone, so that no other package brings another build of it.
$(VENV)/.base: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(f"Python 3.11 or newer is needed, this is {v}; set PYTHON=") if v < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) --editable .
	@touch $@

# The rest. declearn, which one test compares compositions with, asks for an older pandas, so it comes without
# its dependencies. At the end, what processes import is byte-compiled, on all cores (some packages contain files
# for other versions of Python).
$(VENV)/.installed: $(VENV)/.base
	$(PIP_INSTALL) --editable '.[dev]'
	$(PIP_INSTALL) --no-deps declearn fire gmpy2 msgpack termcolor
	$(BIN)/python -m compileall -q -j 0 -x '/(tests|transformers/models|mlflow)/' $(VENV)/lib >/dev/null || true
	@touch $@

demo: $(VENV)/.base  ## Compare the paper's seven methods on digits; results in out/compare
	$(BIN)/fadamgc compare --out $(OUT) --overwrite

quick: install  ## Run the tests that take less than a second or two, for the inner loop
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow"

test: install  ## Run all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-e2e: install  ## Run the tests with a real SuperLink and SuperNodes, on loopback
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) tests/e2e

test-wheel: install  ## Build the wheel, and use it in an environment with its requirements and nothing else
	$(BIN)/python tests/wheel.py

test-deploy: install  ## Take the steps of docs/deploy.md on hosts in network namespaces (Linux, some minutes)
	$(BIN)/python tests/deploy/walk.py

test-lowest: install  ## Run the quick tests with the lowest versions that are accepted (half an hour, not in CI)
	$(BIN)/python tests/lowest.py --extra data --extra optuna --extra ray --extra text --extra track --extra wandb

test-interpreters: install  ## Try what needs no torch on Python 3.11 to 3.13; versions that are missing are skipped
	$(BIN)/python tests/interpreters.py

fuzz: install  ## Try bad input of every kind; SEED=1 BUDGET='specs=20000 arguments=5000' for other and more cases
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --seed $(SEED) --processes $(WORKERS) $(BUDGET)

tables: install  ## Write the generated tables of README.md and docs/*.md
	$(BIN)/python docs/tables.py
	$(BIN)/python -m fadamgc.paper.comparison results docs/results.md

MKDOCS := NO_MKDOCS_2_WARNING=1 OMP_NUM_THREADS=1 $(BIN)/mkdocs
docs: tables  ## Write the tables and build the site into site/, strictly
	$(MKDOCS) build --strict --quiet

figures: install  ## Run the examples and draw docs/figures (two minutes; starts Ray and a federation)
	OMP_NUM_THREADS=1 $(BIN)/python docs/gallery.py

docs-serve: install  ## Show the site on http://127.0.0.1:8000 and follow changes of the pages
	$(MKDOCS) serve --dev-addr 127.0.0.1:8000

results: install  ## Write docs/results.md from the records under results/
	$(BIN)/python -m fadamgc.paper.comparison results docs/results.md

bench: install  ## Measure the speed next to a bare loop, pfl and Flower (over an hour; nothing else should run)
	$(BIN)/python benchmarks/bench.py

check: install  ## Lint and type-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install  ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove the environment and the caches of the tools (not results)
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build src/*.egg-info
