"""A command on a terminal of its own."""

import os
import re
import select
import subprocess
import sys
import termios
import time

from tests.processes import XLA_FLAGS


class Terminal:
    """A command with its own terminal, which turns a typed Ctrl-C into a signal."""

    def __init__(self, *arguments, code="from jlade.cli import main; sys.exit(main())"):
        # The first terminal that a session opens becomes its controlling terminal, which sends signals.
        code = f"import os, sys; os.open(os.ttyname(0), os.O_RDWR); {code}"
        self.master, slave = os.openpty()
        termios.tcsetwinsize(slave, (24, 100))
        environment = {
            name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=environment | {"TERM": "xterm-256color", "XLA_FLAGS": XLA_FLAGS},
        )
        os.close(slave)
        self.written = ""

    def type(self, keys):
        os.write(self.master, keys.encode())

    def wait_for(self, pattern, seconds=300):
        """Returns the output since the previous call, up to the end of the pattern."""
        end = time.monotonic() + seconds
        while not (match := re.search(pattern, self.written)):
            readable, *_ = select.select([self.master], [], [], max(0, end - time.monotonic()))
            assert readable, f"{pattern} did not come within {seconds} s after {self.written!r}"
            try:
                self.written += os.read(self.master, 65536).decode(errors="replace")
            except OSError as error:  # on Linux, the command has ended
                raise AssertionError(f"{pattern} did not come before the end of {self.written!r}") from error
        seen, self.written = self.written[: match.end()], self.written[match.end() :]
        return seen

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.master)
