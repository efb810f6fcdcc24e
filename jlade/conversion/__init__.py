"""Checkpoints in Hugging Face format and in jlade's own, and GGUF files; installed as `jlade.conversion`."""

from jlade.conversion.checkpoint import load, save
from jlade.conversion.gguf import load_gguf
from jlade.conversion.huggingface import load_hf, save_hf

__all__ = ["load", "load_gguf", "load_hf", "save", "save_hf"]
