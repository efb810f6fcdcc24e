#!/usr/bin/env bash
# Guess: gguf.GGUFReader maps the file, so that opening it takes little memory and no time whatever the vocabulary.
# Seen: the tensors are mapped, but each element of each array in the header becomes a NumPy view of its own: a header of
# 7 MB with as many tokens as Gemma has, their scores and types, takes 700 MB and ten seconds before any of it is used.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet gguf==0.19.0 numpy==2.4.6
"$folder/venv/bin/python" - "$folder/vocabulary.gguf" <<'PYTHON'
import importlib.metadata
import os
import resource
import sys
import time

import gguf

path, size = sys.argv[1], 262_144
writer = gguf.GGUFWriter(path, "llama")
writer.add_token_list([f"token {index}" for index in range(size)])
writer.add_token_scores([0.0] * size)
writer.add_token_types([1] * size)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
if os.fork():  # the child has the reader's memory alone above its start
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


before, begin = resident(), time.perf_counter()
reader = gguf.GGUFReader(path)
seconds, taken, file_size = time.perf_counter() - begin, resident() - before, os.path.getsize(path)
parts = sum(len(field.parts) for field in reader.fields.values())
print(f"gguf {importlib.metadata.version('gguf')}: a file of {file_size / 1e6:.0f} MB takes {taken / 1e6:.0f} MB", end=" ")
print(f"and {seconds:.1f} s to open, in {parts} views")
assert taken > 40 * file_size and parts > 4 * size, (taken, file_size, parts)
PYTHON
