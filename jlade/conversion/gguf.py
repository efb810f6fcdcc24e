"""GGUF files, one or several for a model: metadata and tensors are read as they are needed, and nothing is written."""

import functools
import os
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from tokenizers import Tokenizer

from jlade.conversion import adapter as adapters
from jlade.conversion import chat_tokenizer, generation_settings, gguf_config, gguf_tokenizer
from jlade.conversion.checkpoint import Checkpoint, LoadOptions
from jlade.conversion.gguf_architectures import Metadata
from jlade.conversion.gguf_header import existing, parts_of, read_header
from jlade.conversion.gguf_tensors import model_tensors
from jlade.conversion.json_files import Values, read_json, write_json
from jlade.conversion.tokenizer_files import add_tokens
from jlade.conversion.weight_files import Tensor, stamp_of
from jlade.errors import errors_of
from jlade.models.llama import LlamaConfig, LlamaParams


class GGUFModel(NamedTuple):
    """What a file says before its weights, all checked: the metadata, and the tensors by Hugging Face's names."""

    metadata: Values
    config: LlamaConfig
    tensors: dict[str, Tensor]


class GGUF(Checkpoint):
    """A GGUF file, or one of several of a model, whose tensors are dequantized one at a time."""

    format: ClassVar[str] = "gguf"

    def config(self, strict: bool = False) -> LlamaConfig:
        metadata, config, _ = read(self.path)
        gguf_config.check_keys(metadata, strict)
        generation_settings.check(self.generation, strict)
        return config

    def weights(
        self, strict: bool = False, adapter: str | os.PathLike[str] | None = None
    ) -> tuple[LlamaConfig, Mapping[str, Tensor]]:
        config, tensors = self.config(strict), read(self.path).tensors
        return (config, tensors) if adapter is None else adapters.merge(config, tensors, adapter, strict)

    @property
    def generation(self) -> Values:
        metadata, config, _ = read(self.path)
        return Values(self.path, gguf_config.generation_config(metadata, config))

    @property
    def model_type(self) -> str:
        return read(self.path).config.family

    def tokenizer(self, strict: bool = False) -> Tokenizer | None:
        gguf_tokenizer.check_split(read(self.path).metadata, strict)
        if (tokenizer := self.stored_tokenizer) is not None:
            add_tokens(tokenizer, self.tokenizer_config, {}, {})
        return tokenizer

    def chat_tokenizer(self) -> Any:
        package = chat_tokenizer.transformers()
        with errors_of(f"{self.path} has no tokenizer that transformers can read"):
            return package.PreTrainedTokenizerFast(tokenizer_object=self.stored_tokenizer, **self.tokenizer_config)

    @property
    def has_chat_template(self) -> bool:
        return self.tokenizer_config["chat_template"] is not None

    @property
    def stored_tokenizer(self) -> Tokenizer | None:
        """The tokenizer without the tokens that `tokenizer_config` names."""
        metadata, config, _ = read(self.path)
        return gguf_tokenizer.read_tokenizer(metadata, config.vocab_size)

    @property
    def tokenizer_config(self) -> dict[str, Any]:
        """The chat templates and the names of special tokens, by the keys of tokenizer_config.json."""
        return gguf_tokenizer.tokenizer_config(read(self.path).metadata)

    def copy_metadata(self, target: pathlib.Path) -> None:
        metadata = read(self.path).metadata
        more = {"bos_token_id": metadata.get(gguf_tokenizer.BOS)} | gguf_config.unknown_keys(metadata)
        for name, content in (("config.json", more), ("generation_config.json", self.generation.values)):
            write_json(target / name, read_json(target / name) | dict(content))
        if (tokenizer := self.stored_tokenizer) is not None:
            tokenizer.save(os.fspath(target / "tokenizer.json"))
            # transformers takes tokenizer.json as it is for this class.
            content = {"tokenizer_class": "PreTrainedTokenizerFast"} | self.tokenizer_config
            write_json(target / "tokenizer_config.json", content)


def load_gguf(path: str | os.PathLike[str], *arguments: Any, **options: Any) -> LlamaParams:
    """Returns the parameters of a GGUF file, as `Checkpoint.load` does.

    Args:
      path: the file, or any of those of a model.
      arguments, options: see `jlade.conversion.LoadOptions`.

    Raises:
      ValueError: as `Checkpoint.load` does; the package gguf is not installed.
    """
    return GGUF(pathlib.Path(path)).load(LoadOptions(*arguments, **options))


def read(file: pathlib.Path) -> GGUFModel:
    """Returns the header of a file. The last one is kept: reading a vocabulary takes a part of a second.

    Raises:
      ValueError: names what is missing, broken or not supported, of all metadata but the tokenizer's, and of names,
        shapes and types of all tensors.
    """
    return _read(existing(file), tuple(map(stamp_of, parts_of(file))))


@functools.lru_cache(maxsize=1)
def _read(file: pathlib.Path, stamps: tuple[tuple[int, ...], ...]) -> GGUFModel:
    """Reads a header; `stamps` change with the files."""
    header = read_header(file)
    own = {name: tensor for name, tensor in header.tensors.items() if name not in header.factors}
    metadata = Metadata(header.metadata, {name: tensor.shape for name, tensor in own.items()}, header.factors)
    config = gguf_config.read_config(metadata)
    return GGUFModel(header.metadata, config, model_tensors(own, config, metadata))
