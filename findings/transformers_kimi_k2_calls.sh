#!/usr/bin/env bash
# Guess: transformers renders a conversation with an earlier call of a tool by Kimi K2's own chat template.
# Seen: the template collects the results of calls with `append`, and transformers 5.24.0 renders every template in
# Jinja's immutable sandbox, which refuses this method of a list. Without calls, and in Jinja's sandbox that lets a
# template change its arguments, the same template works.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 jinja2==3.1.6
"$folder/venv/bin/pip" download --quiet --no-deps --no-binary :all: --dest "$folder" llama-cpp-python==0.3.36
tar xzf "$folder"/llama_cpp_python-*.tar.gz -C "$folder" --wildcards '*/models/templates/Kimi-K2-*.jinja'
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import pathlib
import sys

import jinja2.sandbox
from transformers.utils.chat_template_utils import render_jinja_template

function = {"name": "weather", "arguments": {"city": "Oslo"}}
call = {"id": "functions.weather:0", "type": "function", "function": function}
question = [{"role": "user", "content": "How is Oslo?"}]
turns = [
    *question,
    {"role": "assistant", "content": "", "tool_calls": [call]},
    {"role": "tool", "tool_call_id": call["id"], "content": "rain"},
]
templates = sorted(pathlib.Path(sys.argv[1]).glob("*/vendor/llama.cpp/models/templates/Kimi-K2-*.jinja"))
assert len(templates) == 2, templates
for path in templates:
    template = path.read_text()
    rendered = render_jinja_template([question], chat_template=template, add_generation_prompt=True)
    assert "How is Oslo?" in rendered[0][0], "it works without calls"
    try:
        render_jinja_template([turns], chat_template=template, add_generation_prompt=True)
        raise SystemExit(f"{path.name}: rendered")
    except jinja2.exceptions.SecurityError as error:
        print(f"{path.name}: {error}")
        assert "append" in str(error)
    mutable = jinja2.sandbox.SandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    assert "rain" in mutable.from_string(template).render(messages=turns, add_generation_prompt=True)
PYTHON
