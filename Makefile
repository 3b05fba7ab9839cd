# Each target works from a fresh clone: it makes the virtual environment where there is none.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=

.PHONY: demo test lint bench clean

.venv/.ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

demo: .venv/.ready
	$(BIN)/flashdwc demo $(ARGS)

test: .venv/.ready
	$(BIN)/python -m pytest $(ARGS)

lint: .venv/.ready
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy

bench: .venv/.ready
	$(BIN)/flashdwc bench $(or $(ARGS),mobile --quick)

clean:
	rm -rf .venv dist site flashdwc-demo flashdwc-bench
