"""The provenance of results: machine, versions and command."""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import sys
from typing import Any

import jax

import jlade
from jlade.devices import sheet


def provenance() -> dict[str, Any]:
    """Returns machine, versions, command and date of a result."""
    return {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "processor": sheet.processor(),
        "cores": os.cpu_count(),
        "device": sheet.default_device().device_kind,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "jlade": jlade.__version__,
    }


def write(path: str, result: dict[str, Any]) -> None:
    """Writes a result with its provenance as JSON."""
    text = json.dumps(provenance() | result, indent=1)
    pathlib.Path(path).write_text(text + "\n", encoding="utf-8")
