# `make demo` and `make test` need nothing but Python 3.11 or newer; both install into .venv. `make accelerators` tests
# the programs of TPUs and GPUs with their compilers, 2 GB.
PYTHON ?= python3
VENV ?= .venv
PROMPT ?= def read_config(path):
BIN := $(VENV)/bin

.PHONY: demo install test accelerators lint clean

demo: $(VENV)/.demo
	$(BIN)/jlade "$(PROMPT)" --also 15,5,15

install: $(VENV)/.test

test: install
	$(BIN)/python -m pytest $(ARGS)

accelerators: $(VENV)/.test $(VENV)/.tpu-compiler $(VENV)/.gpu-compiler
	$(BIN)/python -m pytest tests/accelerators $(ARGS)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	mkdir -p build/examples  # of README.md and docs/, at their lines
	for page in README.md docs/*.md; do \
		awk '/^```/ { code = $$0 == "```python"; $$0 = "" } { print code ? $$0 : "" }' $$page \
			> build/examples/$$(basename $$page .md).py || exit 1; \
	done
	$(BIN)/mypy build/examples

bench: $(VENV)/.evaluation $(VENV)/.chat
	$(BIN)/jlade bench all --model smollm2 --max-new-tokens 32 --output build/bench $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip

$(VENV)/.demo: $(BIN)/python pyproject.toml
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/.%: $(BIN)/python pyproject.toml
	$(BIN)/pip install --quiet --editable ".[$*]"
	touch $@
