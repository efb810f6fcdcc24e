"""The `jlade` command: its words, and what becomes of errors."""

import os
import sys
from collections.abc import Sequence

from jlade.cli import interrupts


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status.

    Raises:
      SystemExit: after the help, and after an error, which is one line on stderr.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stdout is None:
        sys.exit("jlade: error: standard output is closed")
    try:
        with interrupts.delayed():  # an exception amid the imports of JAX can crash Python
            from jlade.cli import terminal

            with terminal.Status("starting"):
                from jlade.cli import commands  # imports JAX, which takes a second
        command, options = commands.parse(words)
        try:
            with commands.warnings_in_one_line():
                command.run(options)
            sys.stdout.flush()  # here and not at exit, so that a closed pipe raises BrokenPipeError below
        except Exception as error:
            if options.debug or isinstance(error, BrokenPipeError):
                raise
            commands.report(error, options)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards the rest of the buffer
        return 1
    return 0
