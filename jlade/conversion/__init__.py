"""Checkpoints in Hugging Face format and in jlade's own, and GGUF files; installed as `jlade.conversion`.

What is not supported, missing or broken raises a ValueError that names the file, the key or the tensor, and what is
accepted. What is ignored gives a warning that names it, or with `strict` the error.
"""

from jlade.conversion.checkpoint import LoadOptions
from jlade.conversion.gguf import load_gguf
from jlade.conversion.huggingface import load_hf, save_hf
from jlade.conversion.own import load, save

__all__ = ["LoadOptions", "load", "load_gguf", "load_hf", "save", "save_hf"]
