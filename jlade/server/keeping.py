"""Remembered texts in a directory, from one run of a server to the next."""

import logging
import os
import pathlib
import threading

from jlade.engine.engine import Engine

SECONDS = 60.0  # between two files
FILE = "remembered.safetensors"
log = logging.getLogger(__name__)


class Keeper:
    """Reads the texts of a directory, and writes those of an engine there from time to time and at the end.

    Args:
      engine: that remembers.
      directory: of one server; made with the first file.
      seconds: between two files. A server that is killed loses the texts of this time.

    Raises:
      ValueError: the file in the directory is broken or of another model; it stays as it is.
    """

    def __init__(self, engine: Engine, directory: str | os.PathLike[str], seconds: float = SECONDS):
        self._engine, self._file, self._seconds = engine, pathlib.Path(directory) / FILE, seconds
        if self._file.exists():
            engine.load_remembered(self._file)
        self._num_saved = engine.remembered.num_changes
        self._closed, self._lock = threading.Event(), threading.Lock()
        threading.Thread(target=self._work, name="jlade keeper", daemon=True).start()

    def close(self) -> None:
        """Writes the file a last time."""
        self._closed.set()
        self._save()

    def _work(self) -> None:
        while not self._closed.wait(self._seconds):
            self._save()

    def _save(self) -> None:
        with self._lock:
            if (number := self._engine.remembered.num_changes) == self._num_saved:
                return
            try:
                self._engine.save_remembered(self._file)
                self._num_saved = number
            except OSError as error:  # such as of a full disk; the next file may succeed
                log.warning("remembered texts were not saved: %s", error)
