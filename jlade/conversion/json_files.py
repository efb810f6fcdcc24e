"""JSON files, and their values with checks."""

import dataclasses
import json
import pathlib
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

LARGEST_SIZE = 2**31 - 1  # positions, tokens and places in arrays are 32-bit numbers
MAX_BYTES = 2**25  # of a file, several times those of any; its values may take 20 times as much
SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)  # numbers of the computation


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """Returns the JSON object in a file."""
    check_size(file, MAX_BYTES)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{file} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not readable as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(content).__name__}")
    return content


def check_size(file: pathlib.Path, most: int | None = None) -> None:
    """Raises a ValueError for a pipe or a device, which may have no end, and for more than `most` bytes."""
    if file.exists() and not (file.is_file() or file.is_dir()):
        raise ValueError(f"{file} is neither a file nor a link to one")
    if most is not None and file.is_file() and file.stat().st_size > most:
        raise ValueError(f"{file} has {file.stat().st_size} bytes; accepted are {most}")


def write_json(file: pathlib.Path, content: Mapping[str, Any]) -> None:
    """Writes an indented JSON object."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class Values:
    """Values from a JSON file. Each method checks one; null counts as missing.

    Raises:
      ValueError: names the file, the key and the value.
    """

    file: pathlib.Path
    values: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a value of any type."""
        value = self.values.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None) -> int:
        """Returns a positive integer of up to 31 bits."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{self.file}: {key} must be a positive integer, got {shown(value)}")
        if value > LARGEST_SIZE:
            raise ValueError(f"{self.file}: {key} must be up to {LARGEST_SIZE}, got {shown(value)}")
        return value

    def count(self, key: str) -> int:
        """Returns an integer of up to 31 bits that may be 0, for which null stands too."""
        return self.size(key) if self.get(key, 0) != 0 else 0

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a positive number that float32 holds."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"{self.file}: {key} must be a positive number, got {shown(value)}")
        if not SMALLEST <= value <= LARGEST:
            raise ValueError(
                f"{self.file}: {key} must be a number of float32, {SMALLEST:.2g} to {LARGEST:.2g}, got {shown(value)}"
            )
        return float(value)

    def boolean(self, key: str, default: bool = False) -> bool:
        """Returns true or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.file}: {key} must be true or false, got {shown(value)}")
        return value

    def elements(self, key: str, listed: Any, number: int, wanted: str) -> "Values":
        """Returns the elements of a list of some number by their places, such as "key[0]"; `wanted` is for messages."""
        if not isinstance(listed, list) or len(listed) != number:
            raise ValueError(f"{self.file}: {key} must list {wanted}, got {shown(listed)}")
        return Values(self.file, {f"{key}[{i}]": element for i, element in enumerate(listed)})

    def check_layers(self, key: str, kinds: Any, accepted: Collection[str], num_layers: int) -> None:
        """Raises unless `kinds` lists one of the accepted names for each layer."""
        if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in accepted for kind in kinds):
            raise ValueError(
                f"{self.file}: {key} must name {' or '.join(accepted)} for each of {num_layers} layers, got {kinds!r}"
            )


def refuse_or_warn(strict: bool, source: Any, refused: str, warning: str) -> None:
    """Raises a ValueError that strict=True refuses something, or gives a warning that says what is read or ignored."""
    if strict:
        raise ValueError(f"{source}: strict=True refuses {refused}")
    # All warnings come from this level, so Python shows the warning of a file once, whoever reads it again.
    warnings.warn(warning, stacklevel=3)


def shown(value: Any) -> str:
    """Returns the beginning of a value's representation."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def is_file_name(name: Any) -> bool:
    """Whether a value from a file names a file in the same directory: it has no parts that lead elsewhere."""
    return isinstance(name, str) and name not in ("", "..") and pathlib.PurePath(name).name == name and "\0" not in name
