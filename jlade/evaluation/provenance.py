"""The provenance of results: machine, versions and command."""

import datetime
import importlib.metadata
import os
import platform
import shlex
import sys
from typing import Any

import jax

import jlade
from jlade import mesh
from jlade.costs import devices


def provenance() -> dict[str, Any]:
    """Returns machine, versions, command and date of a result."""
    program, *arguments = sys.argv
    is_jlade = os.path.basename(program) in ("jlade", "__main__.py")
    command = ["jlade", *arguments] if is_jlade else ["python", *sys.orig_argv[1:]]  # which has the -m of a module
    return {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(command),
        "processor": devices.processor(),
        "cores": os.cpu_count(),
        "device": mesh.default_device().device_kind,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "jlade": jlade.__version__,
    }
