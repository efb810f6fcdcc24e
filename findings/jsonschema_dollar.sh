#!/usr/bin/env bash
# Guess: two validators agree on a string and the pattern `^[a-z]+$`.
# Seen: JSON Schema's patterns are ECMA-262's, where `$` is the very end. Python's jsonschema searches with Python's `re`,
# whose `$` matches before a last newline as well, and whose `\d` has all of Unicode's digits: it accepts "abc\n" and
# Arabic digits, which ajv refuses. Whoever tests a generator of JSON by jsonschema alone does not see such texts.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet jsonschema==4.26.0
npm init --yes > /dev/null
npm install --silent --no-fund --no-audit ajv@8.17.1
cat > cases.json <<'JSON'
[["^[a-z]+$", "abc\n"], ["^\\d+$", "\u0663\u0664"], ["^.$", "\u2028"], ["^\\s$", "\ufeff"]]
JSON
venv/bin/python -c '
import importlib.metadata, json, jsonschema
cases = json.load(open("cases.json"))
seen = [jsonschema.Draft202012Validator({"pattern": pattern}).is_valid(text) for pattern, text in cases]
print("jsonschema", importlib.metadata.version("jsonschema"), seen)
assert seen == [True, True, True, False]'
node -e '
const Ajv = require("ajv");
const seen = require("./cases.json").map(([pattern, text]) => new Ajv({ strict: false }).validate({ pattern }, text));
console.log("ajv", require("ajv/package.json").version, seen);
require("assert").deepStrictEqual(seen, [false, false, false, true]);'
