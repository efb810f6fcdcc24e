"""`lookahead="auto"`: what `jlade.tune` found on this device for this model, else an estimate."""

import functools
import pathlib

import jax

from jlade import roofline, tuned_files
from jlade.config import LookaheadConfig
from jlade.models.base import Decoder, Params
from jlade.tuned_files import Key


def choose(params: Params, decoder: Decoder, batch_size: int) -> LookaheadConfig:
    """Returns the setting for B texts at once, which may be `config.PLAIN`.

    A process looks once into a file and stays with what it finds, until it tunes itself, so that a model's calls share
    a program.

    Args:
      params: arrays, or their shapes alone.
      decoder: the model they belong to.
      batch_size: B.
    """
    key = tuned_files.key(params, decoder, batch_size)
    device, _ = tuned_files.device_of(params)
    return _choose(key, key.path, device)


def forget() -> None:
    """Makes the next call look into the files again."""
    _choose.cache_clear()


@functools.cache
def _choose(key: Key, path: pathlib.Path, device: jax.Device) -> LookaheadConfig:
    """`path` is the key's, which depends on the environment too."""
    return tuned_files.load(key) or roofline.estimate(device.platform, device.device_kind, key.batch_size)
