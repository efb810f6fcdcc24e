"""The `jlade` command: complete a prompt and compare with plain decoding; generate, chat, convert, inspect, tune."""

import os
import sys
from collections.abc import Sequence

from jlade.cli import chat, compare, convert, generate, inspection, program_cache, tune

COMMANDS = {"generate": generate, "chat": chat, "convert": convert, "inspect": inspection, "tune": tune}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command named by the first argument, by default `compare`, and returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    is_named = len(arguments) > 0 and arguments[0] in COMMANDS
    command = COMMANDS[arguments[0]] if is_named else compare
    parser = command.parser()
    options = parser.parse_args(arguments[1:] if is_named else arguments)
    program_cache.enable()
    try:
        command.run(options)
        sys.stdout.flush()  # here and not at exit, so that a closed pipe raises BrokenPipeError below
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards the rest of the buffer
        return 1
    except OSError as error:
        parser.error(str(error))
    return 0
