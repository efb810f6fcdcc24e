"""Results with their provenance, as JSON."""

import json
import pathlib
from typing import Any

from jlade.evaluation.provenance import provenance


def write(path: str, result: dict[str, Any]) -> None:
    """Writes a result with its provenance as JSON."""
    text = json.dumps(provenance() | result, indent=1)
    pathlib.Path(path).write_text(text + "\n", encoding="utf-8")
