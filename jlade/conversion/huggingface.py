"""Hugging Face directories, read and written without torch."""

import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import jax
from tokenizers import Tokenizer

from jlade.conversion import adapter as adapters
from jlade.conversion import adapter_config, chat_tokenizer, generation_settings, hf_config, hf_experts, hf_quantization
from jlade.conversion.checkpoint import Checkpoint, LoadOptions
from jlade.conversion.hf_tensors import file_tensors, implied_value, model_tensors
from jlade.conversion.json_files import Values, read_json, write_json
from jlade.conversion.tensors import named_arrays
from jlade.conversion.tokenizer_files import load_tokenizer
from jlade.conversion.weight_files import SINGLE_FILE, Tensor, stored_tensors, write_tensors
from jlade.files import written_whole
from jlade.models import quantization
from jlade.models.llama import LlamaConfig, LlamaParams

TIED = "tie_word_embeddings"
DTYPES = ("float32", "bfloat16", "float16")
FILES = ("*.json", "*.jinja", "additional_chat_templates/*.jinja", "*.txt", "*.model")  # of tokenizers: the last two


class HuggingFace(Checkpoint):
    """A directory with config.json, the files of a tokenizer, and weights in safetensors files."""

    format: ClassVar[str] = "huggingface"

    def config(self, strict: bool = False) -> LlamaConfig:
        return hf_config.read_config(self.path, strict)

    def weights(
        self, strict: bool = False, adapter: str | os.PathLike[str] | None = None
    ) -> tuple[LlamaConfig, Mapping[str, Tensor]]:
        """An output matrix that is not the embedding is read to find that out."""
        config = self.config(strict)
        settings = hf_quantization.settings_of(hf_quantization.read(self.path))
        stored = hf_quantization.assembled(stored_tensors(self.path, strict), settings)
        config, tensors = model_tensors(stored, config, self.path, strict)
        if adapter is None:
            adapter_config.say_ignored(self.path, strict)
            return config, tensors
        return adapters.merge(config, tensors, adapter, strict)

    def tokenizer(self, strict: bool = False) -> Tokenizer | None:
        return load_tokenizer(self.path, strict)

    def chat_tokenizer(self) -> Any:
        return chat_tokenizer.load(self.path)

    @property
    def has_chat_template(self) -> bool:
        return chat_tokenizer.has_template(self.path)

    @property
    def generation(self) -> Values:
        return generation_settings.read(self.path)

    @property
    def model_type(self) -> str:
        return str(read_json(self.path / "config.json")["model_type"])

    def auto_dtype(self, dtype: jax.typing.DTypeLike | None) -> jax.typing.DTypeLike | None:
        if not (isinstance(dtype, str) and dtype == "auto"):
            return dtype
        file = self.path / "config.json"
        raw = read_json(file)
        key = next((key for key in ("dtype", "torch_dtype") if raw.get(key) is not None), None)
        if key is not None and raw[key] not in DTYPES:
            raise ValueError(
                f"{file}: {key} is {raw[key]!r}; supported are {', '.join(DTYPES)}: name one in the place of "
                "dtype='auto'"
            )
        return dtype if key is None else str(raw[key])

    def copy_metadata(self, target: pathlib.Path) -> None:
        """In config.json, dtype and tying are those of the new weights, which are not quantized as the original."""
        original, written = (read_json(directory / "config.json") for directory in (self.path, target))
        if "text_config" in original:  # the copy has the text part alone
            original = written
        dtype_keys = [key for key in ("dtype", "torch_dtype") if key in original] or ["torch_dtype"]
        changed = dict.fromkeys(dtype_keys, written["torch_dtype"]) | {TIED: written[TIED]}
        kept = {key: original[key] for key in original if key not in hf_quantization.KEYS}
        write_json(target / "config.json", kept | changed)
        (target / "generation_config.json").unlink()  # the original may have none
        for pattern in FILES:
            for file in self.path.glob(pattern):
                # An index lists weight files, an adapter would be merged once more, and no weight is quantized.
                unfit = "config.json", adapter_config.NAME, hf_quantization.OWN_FILE
                if file.name not in unfit and not file.name.endswith(".index.json"):
                    copy = target / file.relative_to(self.path)
                    copy.parent.mkdir(exist_ok=True)
                    shutil.copyfile(file, copy)


def load_hf(path: str | os.PathLike[str], *arguments: Any, **options: Any) -> LlamaParams:
    """Returns the parameters of a checkpoint in Hugging Face format, as `Checkpoint.load` does.

    Args:
      path: a directory with config.json and either model.safetensors, or model.safetensors.index.json and the files it
        names. The end tokens come from generation_config.json if it names any.
      arguments, options: see `jlade.conversion.LoadOptions`.
    """
    directory = pathlib.Path(path)
    if not directory.is_dir():
        raise ValueError(f"path must be a directory with a Hugging Face checkpoint, got {os.fspath(path)!r}")
    return HuggingFace(directory).load(LoadOptions(*arguments, **options))


def save_hf(params: LlamaParams, path: str | os.PathLike[str], progress: Callable[[int], None] | None = None) -> None:
    """Writes a checkpoint that transformers and `load_hf` read. The directory appears whole or not at all.

    Args:
      params: the parameters, in floating point; the files keep their dtype.
      path: a new directory.
      progress: called with the bytes of each tensor when its file is written.

    Raises:
      ValueError: if `path` exists, or transformers has no such model, or the parameters are in few bits.
    """
    if kinds := quantization.kinds(params):
        raise ValueError(
            f"params must be in floating point, got matrices in {' and '.join(kinds)}: save them with "
            "`jlade.conversion.save`, or load the original checkpoint without bits"
        )
    with written_whole(path) as directory:
        directory.mkdir()
        hf_config.write_configs(params.config, params.norm.dtype.name, directory)
        write_tensors(_file_arrays(params), directory, SINGLE_FILE, progress, {"format": "pt"})


def _file_arrays(params: LlamaParams) -> Iterator[tuple[str, jax.Array]]:
    """Yields the tensors of files with their names."""
    arrays = named_arrays(params)
    for name, file in file_tensors(params.config).items():
        array, implied = file.join(arrays), implied_value(name, params.config)
        if implied is None or (array != implied).any():
            yield name, array
    yield from hf_experts.write(params.config, arrays)
