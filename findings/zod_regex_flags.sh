#!/usr/bin/env bash
# Guess: zod's JSON schema of a string with a case-insensitive regular expression accepts what zod accepts, or zod throws
# as it does for what JSON Schema cannot express.
# Seen: the flag is dropped in silence. The schema's pattern is `^abc$`, so a model that is held to it can never write
# "ABC", which zod accepts. The same for the flag s.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm init --yes > /dev/null
npm install --silent --no-fund --no-audit zod@4.6.7
cat > check.mjs <<'JAVASCRIPT'
import assert from "node:assert";
import { createRequire } from "node:module";
import { z } from "zod";
const version = createRequire(import.meta.url)("zod/package.json").version;
for (const [regex, text] of [[/^abc$/i, "ABC"], [/^a.c$/s, "a\nc"]]) {
  const type = z.string().regex(regex);
  const { pattern } = z.toJSONSchema(type);
  const seen = [type.safeParse(text).success, new RegExp(pattern, "u").test(text)];
  console.log(`zod ${version}: ${regex} -> pattern ${pattern}; ${JSON.stringify(text)}: zod ${seen[0]}, schema ${seen[1]}`);
  assert.deepStrictEqual(seen, [true, false]);
}
JAVASCRIPT
node check.mjs
