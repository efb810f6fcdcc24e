"""The program of the process in which `jlade.evaluation.quality` runs generated code. It imports nothing of jlade."""

import json
import os
import resource
import sys
import types

LIMITS = {
    resource.RLIMIT_AS: 2**31,  # bytes of address space
    resource.RLIMIT_FSIZE: 2**24,  # bytes of a file
    resource.RLIMIT_NOFILE: 64,
    resource.RLIMIT_NPROC: 0,  # neither processes nor threads; has no effect for root, hence the audit hook
    resource.RLIMIT_CORE: 0,
}
REFUSED = {
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.system",
    "os.exec",
    "subprocess.Popen",
    "os.kill",
    "os.killpg",
}


def main() -> None:
    """Writes "+", runs the parts of a program, then copies a line from the parent back to it.

    The first line of standard input is a JSON object: `parts`, sources that run one after another in one module, and
    `cpu_seconds`. The second is the line to copy. It is read when the last part has returned, so a program that ends
    earlier, however it does, leaves it unread.
    """
    source, result = os.fdopen(os.dup(0), "rb", buffering=0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):  # generated code reads nothing, and its output goes nowhere
        os.dup2(null, descriptor)
    message = json.loads(source.readline())
    for kind, limit in (LIMITS | {resource.RLIMIT_CPU: message["cpu_seconds"]}).items():
        _, hard = resource.getrlimit(kind)
        lowest = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (lowest, lowest))
    sys.addaudithook(_refuse)
    os.write(result, b"+")  # ready
    sys.modules["candidate"] = module = types.ModuleType("candidate")  # dataclasses look for their module
    for part in message["parts"]:
        exec(compile(part, "<candidate>", "exec"), vars(module))
    os.write(result, source.readline())


def _refuse(event: str, _: object) -> None:
    if event in REFUSED:
        raise PermissionError(f"{event} is not allowed")


if __name__ == "__main__":
    main()
