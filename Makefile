# make demo: what Paceline does, on your machine, in a minute.   make test: everything CI checks.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
ZOO    := .zoo

.PHONY: demo test soak bench planned peers torch-suite zoo lint format clean

demo: $(READY)
	$(BIN)/python examples/demo.py

test: lint
	$(BIN)/python -m pytest -m "not soak" -n 2 --dist loadfile

soak: $(READY)
	$(BIN)/python -m pytest -m soak --timeout 1800

bench: $(READY)
	$(BIN)/python -m benchmarks

planned: $(READY)
	$(BIN)/python -m benchmarks.planned

peers: $(READY)
	$(BIN)/python -m benchmarks.peers

torch-suite: $(READY)
	$(BIN)/python -m benchmarks.torch_suite

zoo: $(ZOO)/.ready
	$(ZOO)/bin/python -m benchmarks.zoo

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

# Sees all that .venv has, torch above all, and adds what the zoo needs beside it.
$(ZOO)/.ready: $(READY) benchmarks/zoo/requirements.txt
	test -x $(ZOO)/bin/python || $(BIN)/python -m venv $(ZOO)
	$(BIN)/python -c "import site; print(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')" \
	    > $$($(ZOO)/bin/python -c "import site; print(site.getsitepackages()[0])")/development.pth
	$(ZOO)/bin/pip install --quiet --constraint constraints-dev.txt --requirement benchmarks/zoo/requirements.txt
	touch $@

clean:
	rm -rf $(VENV) $(ZOO) .peers build dist *.egg-info
