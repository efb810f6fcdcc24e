#!/usr/bin/env bash
# Everything that is to be measured on an NVIDIA GPU, in the order of importance:
#
#     benchmarks/gpu.sh                             all parts, about half an hour
#     benchmarks/gpu.sh correctness decode          some parts; no part takes ten minutes
#
#   correctness   texts with lookahead against plain decoding's, in each precision      (exactness.py)
#   decode        bandwidth, plain and lookahead decoding, batches, blocks, peak memory  (accelerator.py)
#   transformers  the same texts by transformers, eager and compiled                     (versus_transformers_gpu.py)
#   int8          int8 weights beside bfloat16                                           (quantization.py)
#   attention     the attention kernel beside plain attention                            (attention.py)
#   overhead      what a step takes beside the model, at a 1 B shape                     (step_overhead.py)
#
# It needs no network and installs nothing: it runs a copy of this checkout with the packages that PYTHON has, and begins
# by saying which are missing. A part that fails or runs out of time loses none of the others; the status is then 1.
#
#     OUT=DIR        where results go (default: benchmarks/results)
#     PYTHON=python3
#     SHAPE=7b       the large model; SHAPE=demo tries all of it on a CPU
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
shape=${SHAPE:-7b}
small=1b
[[ $shape == demo ]] && small=demo
out=${OUT:-$root/benchmarks/results}
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 1
parts=("$@")
[[ $# -gt 0 ]] || parts=(correctness decode transformers int8 attention overhead)

# Without installation, jlade.conversion has to lie inside of jlade.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
mkdir "$copy/tests"
cp -r "$root/jlade" "$root/benchmarks" "$copy" && cp -r "$root/tests/golden" "$copy/tests" || exit 1
cp -r "$root/conversion" "$copy/jlade/conversion" || exit 1
cd "$copy" || exit 1

# Programs that one part has compiled, others and later calls need not compile again.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-${TMPDIR:-/tmp}/jlade-gpu-compiled}
export PYTHONUNBUFFERED=1

device=$("$python" benchmarks/gpu_report.py check) || { echo "$device"; exit 1; }
name=${device##*$'\n'}
echo "${device%$'\n'*}"

status=0
run() { # run MINUTES SCRIPT ARGUMENT...
  local minutes=$1
  shift
  echo "== python $*"
  if ! timeout --kill-after=10 "$((60 * minutes))" "$python" "$@"; then
    echo "== failed, or longer than $minutes minutes: $1"
    status=1
  fi
}

for part in "${parts[@]}"; do
  case $part in
    correctness)
      arguments=()
      [[ $shape == demo ]] && arguments=(--prompts 2 --max-new-tokens 32)
      run 4 benchmarks/exactness.py "${arguments[@]}" --minutes 3 --json "$out/exactness_$name.json"
      ;;
    decode)
      run 9 benchmarks/accelerator.py --shape "$shape" --minutes 8 --json "$out/accelerator_${shape}_$name.json"
      ;;
    transformers)
      run 9 benchmarks/versus_transformers_gpu.py --shape "$shape" --minutes 7 \
        --json "$out/versus_transformers_${shape}_$name.json"
      ;;
    int8)
      arguments=(--shape "$shape")
      [[ $shape == demo ]] && arguments=()
      run 5 benchmarks/quantization.py "${arguments[@]}" --speed-only --json "$out/quantization_${shape}_$name.json"
      ;;
    attention) run 5 benchmarks/attention.py --json "$out/attention_$name.json" ;;
    overhead)
      run 6 benchmarks/step_overhead.py --shape "$small" --dtype bfloat16 --new-tokens 128 --minutes 5 \
        --json "$out/step_overhead_${small}_$name.json"
      ;;
    *)
      echo "no such part: $part; accepted are correctness, decode, transformers, int8, attention and overhead"
      exit 2
      ;;
  esac
done
"$python" benchmarks/gpu_report.py table "$out" "$shape" "$small" "$name"
exit "$status"
