"""Makes the GGUF files of `tests.conversion.gguf_rows` with llama.cpp's converter: a program, not a test.

`python -m tests.conversion.gguf_golden LLAMA_CPP` writes the archive, given the directory of llama.cpp's source, such
as `vendor/llama.cpp` of the source package llama-cpp-python. With `--directory` it leaves files and checkpoints there.
"""

import argparse
import json
import pathlib
import sys
import tempfile
import zipfile

from tests.conversion.gguf_rows import ARCHIVE, JOINED, MODELS, save_checkpoint

METHODS = ("set_vocab", "_set_vocab_gpt2", "_set_vocab_sentencepiece")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=pathlib.Path)
    parser.add_argument("--directory", type=pathlib.Path)
    parser.add_argument("--only", nargs="*", default=list(MODELS), help="names of rows")
    arguments = parser.parse_args()
    sys.path[:0] = [str(arguments.source), str(arguments.source / "gguf-py")]
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.directory or pathlib.Path(temporary)
        for name in arguments.only:
            save_checkpoint(name, directory / name)
            convert(directory / name, MODELS[name][2], directory / f"{name}.gguf", **JOINED.get(name, {}))
        if set(arguments.only) == set(MODELS):
            with zipfile.ZipFile(ARCHIVE, "w", zipfile.ZIP_LZMA) as archive:
                for name in MODELS:
                    entry = zipfile.ZipInfo(f"{name}.gguf")  # with a fixed date
                    archive.writestr(entry, (directory / entry.filename).read_bytes(), zipfile.ZIP_LZMA)


def convert(checkpoint, keys, file, **options):
    """Writes a GGUF file in float32 without a vocabulary; `keys` are of config.json, None to leave one out."""
    import gguf
    import torch
    from conversion.base import ModelBase, ModelType, TextModel, get_model_architecture

    import conversion

    path = checkpoint / "config.json"
    written = json.loads(path.read_text())
    path.write_text(json.dumps(changed(written, keys)))
    (checkpoint / "tokenizer.json").write_text(json.dumps(vocabulary(written["vocab_size"])))
    read = ModelBase.load_hparams
    ModelBase.load_hparams = staticmethod(lambda *given, **named: changed(read(*given, **named), keys))
    TextModel.no_mtp = True
    try:
        architecture = get_model_architecture(ModelBase.load_hparams(checkpoint, False), ModelType.TEXT)
        model = conversion.get_model_class(architecture)
        forget_vocabularies(TextModel)
        with torch.inference_mode():
            model(checkpoint, gguf.LlamaFileType.ALL_F32, file, eager=True, **options).write()
    finally:
        ModelBase.load_hparams = staticmethod(read)
        path.write_text(json.dumps(written))


def changed(keys, changes):
    """Returns keys with some added, replaced, or left out where the change is None."""
    return {key: value for key, value in (keys | changes).items() if changes.get(key, ...) is not None}


def vocabulary(size):
    """Returns the part of a tokenizer.json by which the converter counts tokens."""
    return {"model": {"vocab": {str(i): i for i in range(size)}}, "added_tokens": []}


def forget_vocabularies(cls):
    """Has the classes of models write no vocabulary."""

    def write(self):
        self.gguf_writer.add_tokenizer_model("none")
        self.gguf_writer.add_vocab_size(self.hparams["vocab_size"])

    for method in METHODS:
        if method in vars(cls):
            setattr(cls, method, write)
    for subclass in cls.__subclasses__():
        forget_vocabularies(subclass)


if __name__ == "__main__":
    main()
