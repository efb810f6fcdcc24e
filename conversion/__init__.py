"""Reading checkpoints of other systems into jlade parameters (installed as `jlade.conversion`)."""

from jlade.conversion.huggingface import load_hf

__all__ = ["load_hf"]
