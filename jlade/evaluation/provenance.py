"""The provenance of results: machine, versions and command."""

import datetime
import importlib.metadata
import os
import platform
import sys
from typing import Any

import jax

import jlade
from jlade import mesh
from jlade.choosing import sheet


def provenance() -> dict[str, Any]:
    """Returns machine, versions, command and date of a result."""
    program, *arguments = sys.argv
    command = ["jlade"] if os.path.basename(program) in ("jlade", "__main__.py") else ["python", program]
    return {
        "date": datetime.date.today().isoformat(),
        "command": " ".join([*command, *arguments]),
        "processor": sheet.processor(),
        "cores": os.cpu_count(),
        "device": mesh.default_device().device_kind,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "jlade": jlade.__version__,
    }
