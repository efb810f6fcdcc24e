"""Which format a checkpoint has."""

import pathlib

from jlade.conversion.checkpoint import Checkpoint
from jlade.conversion.gguf import GGUF
from jlade.conversion.huggingface import HuggingFace
from jlade.conversion.own import Own, is_own
from jlade.models.llama import LlamaConfig


def find(path: pathlib.Path) -> Checkpoint:
    """Returns the checkpoint at a path that `location.find` returns: a directory, or a GGUF file."""
    if path.is_file():
        return GGUF(path)
    return Own(path) if is_own(path) else HuggingFace(path)


def read_config(path: pathlib.Path) -> LlamaConfig:
    """Returns the configuration of the checkpoint at a path that `location.find` returns."""
    return find(path).config()
