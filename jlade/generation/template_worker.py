"""The program of the process in which chat templates are rendered. It imports nothing of jlade.

A template is code of a checkpoint. Jinja's sandbox, as transformers sets it up, keeps it from everything but its
arguments, yet not from endless loops, nor from `10**10**10` or `"a" * 10**10`, which no signal or thread of the same
process can stop. A process can be ended.
"""

import faulthandler
import json
import os
import signal
import sys
from typing import Any

import jinja2
import jinja2.sandbox

MEMORY = 2**29  # bytes more than the process has when it is ready
LONGEST, GROWTH = 2**18, 8  # characters of a text: so many, and so many times those of template and conversation


def main(seconds: float) -> None:
    """Answers each line of standard input by a line. Both are JSON objects.

    A question has the keyword arguments of `render_jinja_template`, an answer `text` or `error`. The first line is
    empty and says that the process is ready. A question that takes more than `seconds` ends the process.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    # Templates may change the conversation, which is a copy.
    immutable: Any = jinja2.sandbox.ImmutableSandboxedEnvironment
    immutable.is_safe_attribute = jinja2.sandbox.SandboxedEnvironment.is_safe_attribute
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process if it must
    if sys.platform == "linux":
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))
    with open(os.devnull, "wb") as null:
        _write(b"")
        for line in sys.stdin.buffer:
            faulthandler.dump_traceback_later(seconds, exit=True, file=null)  # in a thread without Python's lock
            _write(_answer(render_jinja_template, line))
            faulthandler.cancel_dump_traceback_later()


def _answer(render: Any, line: bytes) -> bytes:
    try:
        (text,), _ = render(**json.loads(line))
        longest = LONGEST + GROWTH * len(line)
        if len(text) <= longest:
            return json.dumps({"text": text}).encode()
        error = f"its text has {len(text)} characters; accepted are {longest} for this conversation"
    except MemoryError:
        error = f"it takes more than {MEMORY >> 20} MiB of memory"
    except jinja2.TemplateError as exception:  # also from raise_exception in the template
        error = str(exception)
    except Exception as exception:  # a template can raise any
        error = f"{type(exception).__name__}: {exception}"
    return json.dumps({"error": error[:1000]}).encode()


def _write(answer: bytes) -> None:
    sys.stdout.buffer.write(answer + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]))
