# make demo: what Paceline does, on your machine, in a minute.   make test: everything CI checks.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
ZOO    := .zoo
ENGINES := .engines
XLA    := .xla

.PHONY: demo test soak engines xla bench planned peers torch-suite zoo lint format clean

demo: $(READY)
	$(BIN)/python examples/demo.py

test: lint
	$(BIN)/python -m pytest -m "not soak" -n 2 --dist loadfile --no-loadscope-reorder

soak: $(READY)
	$(BIN)/python -m pytest -m soak --timeout 1800

engines: $(ENGINES)/.ready
	$(ENGINES)/bin/python -m pytest tests/engines --timeout 1800

xla: $(XLA)/.ready
	PJRT_DEVICE=CPU $(XLA)/bin/python -m pytest tests/contract/test_devices.py -m soak --timeout 1800

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

# See all that .venv has, torch above all, and add what the zoo, or the tests of engines, need beside it.
$(ZOO)/.ready: NEEDS := benchmarks/zoo/requirements.txt
$(ZOO)/.ready: $(READY) benchmarks/zoo/requirements.txt
$(ENGINES)/.ready: NEEDS := tests/engines/requirements.txt
$(ENGINES)/.ready: $(READY) tests/engines/requirements.txt
$(ZOO)/.ready $(ENGINES)/.ready:
	test -x $(@D)/bin/python || $(BIN)/python -m venv $(@D)
	$(BIN)/python -c "import site; print(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')" \
	    > $$($(@D)/bin/python -c "import site; print(site.getsitepackages()[0])")/development.pth
	$(@D)/bin/pip install --quiet --constraint constraints-dev.txt --requirement $(NEEDS)
	touch $@

# Another torch, with a device that is an accelerator to it: 7 GB of wheels.
$(XLA)/.ready: pyproject.toml
	test -x $(XLA)/bin/python || $(PYTHON) -m venv $(XLA)
	$(XLA)/bin/pip install --quiet torch==2.9.0 torch_xla==2.9.0
	$(XLA)/bin/pip install --quiet --editable . pytest pytest-timeout psutil hypothesis
	touch $@

clean:
	rm -rf $(VENV) $(ZOO) $(ENGINES) $(XLA) .peers build dist *.egg-info
