"""The files of a checkpoint besides its weights: configuration, generation defaults, tokenizer and chat templates."""

import pathlib
import shutil

from jlade.conversion import adapter_config, hf_quantization
from jlade.conversion.json_files import read_json, write_json

TIED = "tie_word_embeddings"
FILES = ("*.json", "*.jinja", "additional_chat_templates/*.jinja", "*.txt", "*.model")  # of tokenizers: the last two


def copy_metadata(source: pathlib.Path, target: pathlib.Path) -> None:
    """Gives the metadata of a checkpoint to one that `save` or `save_hf` has written with its parameters, in any dtype.

    In config.json, dtype and tying are those of the new weights, which are not quantized as those of the original are.
    """
    original, written = (read_json(directory / "config.json") for directory in (source, target))
    if "text_config" in original:  # the copy has the text part alone
        original = written
    dtype_keys = [key for key in ("dtype", "torch_dtype") if key in original] or ["torch_dtype"]
    changed = dict.fromkeys(dtype_keys, written["torch_dtype"]) | {TIED: written[TIED]}
    kept = {key: original[key] for key in original if key not in hf_quantization.KEYS}
    write_json(target / "config.json", kept | changed)
    (target / "generation_config.json").unlink()  # the original may have none
    for pattern in FILES:
        for file in source.glob(pattern):
            # An index lists weight files, and an adapter would be merged once more.
            if file.name not in ("config.json", adapter_config.NAME) and not file.name.endswith(".index.json"):
                copy = target / file.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)
