#!/usr/bin/env bash
# Runs all measurements for a TPU, the most important ones first:
#
#     benchmarks/tpu.sh                             all parts, about half an hour
#     benchmarks/tpu.sh correctness estimate        some parts, less than ten minutes each
#
# The parts, the settings and the results are those of gpu.sh, without the comparison with transformers.
set -euo pipefail

[[ $# -gt 0 ]] || set -- correctness attention estimate decode int8 overhead meshes
exec "$(dirname "${BASH_SOURCE[0]}")/gpu.sh" "$@"
