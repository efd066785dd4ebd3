# make demo: what Paceline does, on your machine, in a minute.   make test: everything CI checks.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test soak bench peers torch-suite lint format clean

demo: $(READY)
	$(BIN)/python examples/demo.py

test: lint
	$(BIN)/python -m pytest -m "not soak"

soak: $(READY)
	$(BIN)/python -m pytest -m soak --timeout 1800

bench: $(READY)
	$(BIN)/python -m benchmarks

peers: $(READY)
	$(BIN)/python -m benchmarks.peers

torch-suite: $(READY)
	$(BIN)/python -m benchmarks.torch_suite

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): pyproject.toml constraints-dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints-dev.txt torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints-dev.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .peers build dist *.egg-info
