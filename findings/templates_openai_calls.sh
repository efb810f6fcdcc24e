#!/usr/bin/env bash
# Guess: an earlier call in the form of OpenAI's interface (arguments as a text of JSON, content null) goes into the chat
# templates of models as it is, and so does one whose content is the empty string.
# Seen: of the 70 templates in the sources of llama-cpp-python 0.3.36, rendered by transformers 5.24.0, 14 show OpenAI's
# own form right. 35 refuse it, 17 write the arguments as a string with escaped quotes, and 4 leave the call out without
# a word. An object and the empty string suit 56. No form suits all: DeepSeek R1's template for LLaMA takes OpenAI's form
# alone and leaves out a call beside an empty content, while those of gpt-oss, QwQ and LFM2.5 8B take the other alone.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 jinja2==3.1.6
"$folder/venv/bin/pip" download --quiet --no-deps --no-binary :all: --dest "$folder" llama-cpp-python==0.3.36
tar xzf "$folder"/llama_cpp_python-*.tar.gz -C "$folder" --wildcards '*/models/templates/*.jinja'
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import collections
import json
import pathlib
import sys

from transformers.utils.chat_template_utils import render_jinja_template

ARGUMENTS = {"city": "Oslo"}
STYLES = {
    "text, null": (json.dumps(ARGUMENTS), None),
    "text, empty": (json.dumps(ARGUMENTS), ""),
    "object, null": (ARGUMENTS, None),
    "object, empty": (ARGUMENTS, ""),
}
KINDS = ("shown", "escaped", "refused", "lost")
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "-", "parameters": PARAMETERS}}]


def outcome(template, arguments, content):
    call = {"id": "000000000", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    turns = [
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "name": "weather", "content": "rain"},
    ]
    try:
        (text,), _ = render_jinja_template(
            [turns], tools=TOOLS, chat_template=template, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
        )
    except Exception:
        return "refused"
    if "Oslo" not in text:
        return "lost"
    return "escaped" if '{\\"city' in text else "shown"


templates = sorted(pathlib.Path(sys.argv[1]).glob("*/vendor/llama.cpp/models/templates/*.jinja"))
outcomes = {path.stem: {name: outcome(path.read_text(), *style) for name, style in STYLES.items()} for path in templates}
for name in STYLES:
    print(f"{name}: {dict(collections.Counter(each[name] for each in outcomes.values()))}")
alone = {stem: [name for name in STYLES if each[name] == "shown"] for stem, each in outcomes.items()}
print({stem: styles for stem, styles in alone.items() if len(styles) == 1})
counted = {name: [list(each[name] for each in outcomes.values()).count(kind) for kind in KINDS] for name in STYLES}
assert len(templates) == 70
assert counted == {
    "text, null": [14, 17, 35, 4],
    "text, empty": [17, 19, 27, 7],
    "object, null": [49, 0, 17, 4],
    "object, empty": [56, 0, 7, 7],
}
assert alone["deepseek-ai-DeepSeek-R1-Distill-Llama-8B"] == ["text, null"]
for stem in ("openai-gpt-oss-120b", "Qwen-QwQ-32B", "LFM2.5-8B-A1B"):
    assert alone[stem] == ["object, empty"]
PYTHON
