#!/usr/bin/env bash
# Guess: a text that a model's JSON schema accepts, formats included, is one that the model validates.
# Seen: for pydantic's NaiveDatetime there is no such text. Its schema has the format "date-time", which by RFC 3339
# needs an offset, and the class refuses every offset. A generator that holds the format can never please the class.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet pydantic==2.14.4 jsonschema==4.26.0 rfc3339-validator==0.1.4
"$folder/venv/bin/python" - <<'PYTHON'
import json

import jsonschema
import pydantic

adapter = pydantic.TypeAdapter(pydantic.NaiveDatetime)
schema = adapter.json_schema()
judge = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
seen = {}
for text in ("2026-11-02T10:00:00", "2026-11-02T10:00:00Z", "2026-11-02T10:00:00+01:00"):
    try:
        adapter.validate_json(json.dumps(text))
        accepted = True
    except pydantic.ValidationError:
        accepted = False
    seen[text] = judge.is_valid(text), accepted
    print(f"pydantic {pydantic.VERSION}: {text}: by the schema {seen[text][0]}, by the class {seen[text][1]}")
assert schema == {"type": "string", "format": "date-time"}, schema
assert list(seen.values()) == [(False, True), (True, False), (True, False)], seen
PYTHON
