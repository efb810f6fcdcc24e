"""The tokenizer of transformers for a directory of a checkpoint, with its chat template."""

import os
import pathlib
from typing import Any

from jlade.conversion.json_files import is_file_name, read_json, shown
from jlade.errors import errors_of

# Files of a processor, in whose "chat_template" models of images have theirs, in the order of transformers.
OF_PROCESSORS = ("processor_config.json", "chat_template.json")


def transformers() -> Any:
    """Returns the package, which makes the tokenizers.

    Raises:
      ValueError: when it is missing, or Jinja, which it needs for chat templates.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that torch is missing; nothing here needs it
    try:
        import jinja2  # noqa: F401
        import transformers
    except ImportError as error:
        raise ValueError('the chat templates need transformers: pip install "jlade[chat]"') from error
    return transformers


def load(directory: pathlib.Path) -> Any:
    """Returns the tokenizer of a directory; see `Checkpoint.chat_tokenizer`."""
    package = transformers()
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        _check_names(directory / name)
    with errors_of(f"{directory} has no tokenizer that transformers can read"):
        tokenizer = package.AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _of_processor(directory)
    return tokenizer


def has_template(directory: pathlib.Path) -> bool:
    """Whether a chat template is in its own file, in the tokenizer's settings or in a processor's."""
    settings = directory / "tokenizer_config.json"
    return (
        (directory / "chat_template.jinja").exists()
        or (settings.exists() and read_json(settings).get("chat_template") is not None)
        or _of_processor(directory) is not None
    )


def _of_processor(directory: pathlib.Path) -> str | None:
    """Returns the chat template in the settings of a processor, which counts where the tokenizer has none."""
    for file in (directory / name for name in OF_PROCESSORS):
        template = read_json(file).get("chat_template") if file.exists() else None
        if not isinstance(template, str | None):
            raise ValueError(f"{file}: chat_template must be a string, got {shown(template)}")
        if template is not None:
            return template
    return None


def _check_names(file: pathlib.Path) -> None:
    """Raises a ValueError if settings name a file outside their directory: versions of transformers would read it."""
    for key, value in (read_json(file) if file.exists() else {}).items():
        if key.endswith(("_file", "_files")) and key != "special_tokens_map_file":  # which nothing reads
            names = [name for name in (value if isinstance(value, list) else [value]) if isinstance(name, str)]
            if outside := [name for name in names if not is_file_name(name) and (file.parent / name).exists()]:
                raise ValueError(f"{file}: {key} names {outside[0]!r}; accepted are files in the same directory")
        if key == "init_inputs" and value:
            raise ValueError(f"{file}: init_inputs must be empty, got {shown(value)}")
