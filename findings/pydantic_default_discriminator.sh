#!/usr/bin/env bash
# Guess: a property with a default that the JSON schema does not require may be left out.
# Seen: not where it is the discriminator of a union. pydantic's schema requires no tag, since the tag has a default, and
# marks it by OpenAPI's "discriminator", which JSON Schema does not know. The union refuses an object without it.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet pydantic==2.14.4 jsonschema==4.26.0
"$folder/venv/bin/python" - <<'PYTHON'
from typing import Annotated, Literal, Union

import jsonschema
import pydantic


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"
    age: int


Pet = Annotated[Union[Cat, Dog], pydantic.Field(discriminator="kind")]
adapter = pydantic.TypeAdapter(Pet)
value = {"lives": 9}
by_schema = jsonschema.Draft202012Validator(adapter.json_schema()).is_valid(value)
try:
    adapter.validate_python(value)
    error = None
except pydantic.ValidationError as found:
    error = found.errors()[0]["type"]
alone = Cat.model_validate(value).kind
print(f"pydantic {pydantic.VERSION}: {value} by the schema: {by_schema}; by the union: {error}; by Cat alone: {alone}")
assert (by_schema, error, alone) == (True, "union_tag_not_found", "cat")
PYTHON
