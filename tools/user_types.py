"""Checks types as a user of the installed package sees them: those of all examples, and those of the public names.

    python tools/user_types.py

The Python examples of README.md and docs/, at their lines, and those of examples/ are copied to build/user_types, away
from the sources of the package and the settings of this repository. mypy and pyright check them strictly. Then pyright
names the public functions and classes that have a part without a known type.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIRECTORY = ROOT / "build" / "user_types"
UNTYPED = ("optax", "ray", "transformers", "tunix")  # packages without types, or not installed: all of them is `Any`
ANYTHING = "from typing import Any\ndef __getattr__(name: str) -> Any: ...\n"  # a stub
# Of `jax.Device`: jaxlib is compiled and has no stubs.
STUBS = {
    "jaxlib._jax": f"{ANYTHING}class Device:\n    def __getattr__(self, name: str) -> Any: ...\n",
    "jaxlib.xla_client": f"{ANYTHING}from jaxlib._jax import Device as Device\n",
}
# Functions of JAX, Flax and safetensors whose types are partly unknown, so that those of their results are.
UNKNOWN = ("jax.jit", "jax.tree.map", "flax.struct", "nnx.split", "safetensors")
WITH_UNKNOWN = "# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false"
WITH_UNKNOWN += ", reportUnknownArgumentType=false, reportUnknownLambdaType=false"
SETTINGS = {
    "typeCheckingMode": "strict",
    "stubPath": "stubs",
    "exclude": ["stubs"],
    "reportDuplicateImport": "none",  # in documentation each section has its imports
    "reportMissingModuleSource": "none",  # of `UNTYPED`
    "reportUnusedExpression": "none",  # in documentation they show what there is
}
OF_JAX = {"jlade.make_mesh"}  # takes `jax.Device`


def main() -> None:
    for name, output in check(examples(), DIRECTORY).items():
        print(f"{name}: {output.stdout}{output.stderr}", end="")
        if output.returncode:
            sys.exit(1)
    if names := unknown():
        sys.exit(
            f"without a known type, as `pyright --verifytypes jlade --ignoreexternal` explains: {', '.join(names)}"
        )


def examples() -> dict[str, str]:
    """Returns the examples by the names of their files."""
    found = {f"{path.parent.name}/{path.name}": path.read_text(encoding="utf-8") for path in ROOT.glob("examples/*.py")}
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md")):
        code = "\n".join(code_of(page.read_text(encoding="utf-8")))
        found[str(page.relative_to(ROOT).with_suffix(".py"))] = f"{code}\n"
    return found


def code_of(page: str) -> Iterator[str]:
    """Yields the lines of a page in Markdown, empty ones in the place of those that are no Python."""
    is_code = False
    for line in page.splitlines():
        if line.startswith("```"):
            is_code = line == "```python"
            yield ""
        else:
            yield line if is_code else ""


def check(files: Mapping[str, str], directory: Path) -> dict[str, subprocess.CompletedProcess[str]]:
    """Writes files to a new directory and returns the output of each checker on them."""
    shutil.rmtree(directory, ignore_errors=True)
    untyped = {module: ANYTHING for text in files.values() for module in _untyped_imports(text)}
    for module, stub in (STUBS | untyped).items():
        path = directory / "stubs" / Path(*module.split("."))
        for parent in (path, *path.parents[: module.count(".")]):
            _write(parent / "__init__.pyi", stub if parent == path else ANYTHING)
    for name, text in files.items():
        is_unknown = any(each in text for each in UNKNOWN)
        _write(directory / name, f"{text}{WITH_UNKNOWN}\n" if is_unknown else text)
    _write(directory / "pyrightconfig.json", json.dumps(SETTINGS))
    # Without the settings of this repository; the cache is not in a directory that is removed.
    cache = f"--cache-dir={ROOT / '.mypy_cache' / 'users'}"
    strictly = ("--strict", "--untyped-calls-exclude=jax")  # `PartitionSpec` and `reshard` have no types
    return {
        "mypy": _run("mypy", *strictly, "--config-file=", "--explicit-package-bases", cache, *files, cwd=directory),
        "pyright": _run("pyright", cwd=directory),
    }


def unknown() -> list[str]:
    """Returns the names in `jlade`, and others in the reference, that have a part without a known type.

    In an installed package pyright infers no types.
    """
    output = _run("pyright", "--verifytypes", "jlade", "--ignoreexternal", "--outputjson", cwd=DIRECTORY)
    symbols = json.loads(output.stdout)["typeCompleteness"]["symbols"]
    are_known = {x["name"]: x["isTypeKnown"] and not x["isTypeAmbiguous"] for x in symbols if x["isExported"]}
    public = {name for name in are_known if name.count(".") == 1}
    public |= set(re.findall(r":: (jlade\.\S+)", (ROOT / "docs" / "api.rst").read_text(encoding="utf-8")))
    return sorted(name for name in public - OF_JAX if not are_known.get(name))


def _run(module: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs a checker of this environment, whose packages it reads."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = os.environ | {"MYPYPATH": "stubs", "PATH": path}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _untyped_imports(code: str) -> Iterator[str]:
    """Yields the modules of `UNTYPED` that code imports."""
    for node in ast.walk(ast.parse(code)):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        yield from (name for name in names if name.partition(".")[0] in UNTYPED)


if __name__ == "__main__":
    main()
