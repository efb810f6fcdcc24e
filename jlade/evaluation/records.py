"""Records of data files, each with its place for messages, and their values with checks."""

import dataclasses
import gzip
import json
import os
import pathlib
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")


@dataclasses.dataclass(frozen=True)
class DataRecord:
    """A line, item or row of a file.

    Each method checks one value and returns it.

    Raises:
      ValueError: names the place, the field, its value and what is accepted.
    """

    place: str  # the file, and the number of the line, item or row, from 1
    values: Mapping[str, Any]

    def text(self, field: str) -> str:
        """Returns a text that is not blank."""
        return self._checked(field, _is_text, "Unicode text that is not blank")

    def texts(self, field: str) -> tuple[str, ...]:
        """Returns one or more texts, none of them blank."""
        return tuple(self._checked(field, _each(_is_text), "a list of one or more texts that are not blank"))

    def token_ids(self, field: str) -> tuple[int, ...]:
        """Returns one or more token ids."""
        return tuple(self._checked(field, _each(_is_token_id), "a list of one or more token ids"))

    def identifier(self, field: str) -> str:
        """Returns an integer or a text, as text."""
        accepted = "an integer or text that is not blank"
        return str(self._checked(field, lambda value: type(value) is int or _is_text(value), accepted))

    def _checked(self, field: str, is_right: Callable[[Any], bool], accepted: str) -> Any:
        value = self.values.get(field)
        return value if is_right(value) else self.fail(field, accepted)

    def fail(self, field: str, accepted: str) -> NoReturn:
        """Raises a ValueError about a field."""
        shown = repr(self.values.get(field))
        raise ValueError(f"{self.place}: {field} must be {accepted}, got {shown[:80]}{'...' * (len(shown) > 80)}")


def _is_text(value: Any) -> bool:
    if not isinstance(value, str) or not value.strip():
        return False
    try:
        value.encode()  # JSON can escape half a surrogate pair, which no tokenizer takes
    except UnicodeEncodeError:
        return False
    return True


def _is_token_id(value: Any) -> bool:
    return type(value) is int and value >= 0


def _each(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Returns a check of lists with one or more values, each of which must be right."""
    return lambda value: isinstance(value, list) and bool(value) and all(map(is_right, value))


def read(path: str | os.PathLike[str]) -> list[DataRecord]:
    """Returns the records of a file: JSON lines or a JSON array, both maybe compressed by gzip, or Parquet.

    Raises:
      ValueError: names the file and the line, item or row that is not readable or is no object; or the file that has
        another suffix or no records; or says how to install pyarrow.
    """
    file = pathlib.Path(path)
    if not file.name.endswith(SUFFIXES):
        raise ValueError(f"path must end in one of {', '.join(SUFFIXES)}, got {os.fspath(path)!r}")
    try:
        records = _read_parquet(file) if file.suffix == ".parquet" else _read_json(file)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from error
    if not records:
        raise ValueError(f"{file} is empty: it must hold one or more questions")
    for record in records:
        if not isinstance(record.values, dict):
            raise ValueError(f"{record.place}: must be a JSON object, got {type(record.values).__name__}")
    return records


def _read_json(file: pathlib.Path) -> list[DataRecord]:
    lines = _read_lines(file)
    if "".join(lines).lstrip().startswith("["):
        items = _parse("".join(lines), str(file))
        return [DataRecord(f"{file}, item {i}", item) for i, item in enumerate(items, start=1)]
    places = [(f"{file}, line {i}", line) for i, line in enumerate(lines, start=1) if line.strip()]
    return [DataRecord(place, _parse(line, place)) for place, line in places]


def _read_lines(file: pathlib.Path) -> list[str]:
    lines: list[str] = []
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
        try:
            for line in stream:
                lines.append(line.decode())
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}, line {len(lines) + 1}: not UTF-8: {error}") from error
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{file}, line {len(lines) + 1}: not readable as gzip: {error}") from error
    return lines


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not readable as JSON: {error}") from error


def _read_parquet(file: pathlib.Path) -> list[DataRecord]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError('Parquet files need pyarrow: pip install "jlade[evaluation]"') from error
    with file.open("rb") as stream:
        try:
            rows = pyarrow.parquet.read_table(stream).to_pylist()
        except pyarrow.ArrowException as error:
            raise ValueError(f"{file} is not readable as Parquet: {error}") from error
    return [DataRecord(f"{file}, row {i}", row) for i, row in enumerate(rows, start=1)]
