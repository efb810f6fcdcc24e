#!/usr/bin/env bash
# Runs all measurements for an NVIDIA GPU, the most important ones first:
#
#     benchmarks/gpu.sh                             all parts, about forty minutes
#     benchmarks/gpu.sh correctness decode          some parts, less than ten minutes each
#
#   correctness   equality of texts with and without lookahead, in each precision        (exactness.py)
#   estimate      estimated and measured times of a step, by block size                  (estimate.py)
#   decode        bandwidth, plain and lookahead decoding, batches, blocks, peak memory  (accelerator.py)
#   transformers  comparison with transformers, eager and compiled                       (versus_transformers_gpu.py)
#   int8          comparison of weights in int8 and in four bits with bfloat16           (quantization.py)
#   attention     comparison of the attention kernel with plain attention                (attention.py)
#   experts       comparison of the kernel for experts with plain JAX                    (expert_kernel.py)
#   overhead      share of a step outside the model, at a 1 B shape                      (overhead.py)
#   meshes        texts, steps and times on meshes of all GPUs, if there are several     (meshes.py)
#
# It needs JAX for the device (the extra cuda12, cuda13 or tpu), flax, safetensors and tokenizers in PYTHON. It installs
# nothing: it runs a copy of this checkout, and prints what is missing first. If a part fails or takes too long, the
# others still run, and the status is 1.
#
#     OUT=DIR        directory of the results (default: benchmarks/results, of which the tables of docs/ are made)
#     PYTHON=python3
#     SHAPE=7b       the large model; SHAPE=demo tries all parts on a CPU
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
shape=${SHAPE:-7b}
small=1b
[[ $shape == demo ]] && small=demo
out=${OUT:-$root/benchmarks/results}
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 1
parts=("$@")
[[ $# -gt 0 ]] || parts=(correctness attention experts estimate decode transformers int8 overhead meshes)

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
mkdir "$copy/tests"
cp -r "$root/jlade" "$root/benchmarks" "$copy" && cp -r "$root/tests/golden" "$copy/tests" || exit 1
cd "$copy" || exit 1

# Later parts and calls reuse compiled programs.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-${TMPDIR:-/tmp}/jlade-gpu-compiled}
export PYTHONUNBUFFERED=1

device=$("$python" benchmarks/device_check.py) || { echo "$device"; exit 1; }
name=${device##*$'\n'}
echo "${device%$'\n'*}"

status=0
run() { # run MINUTES SCRIPT ARGUMENT...
  local minutes=$1
  shift
  echo "== python $*"
  if ! timeout --kill-after=10 "$((60 * minutes))" "$python" "$@"; then
    echo "== failed, or took more than $minutes minutes: $1"
    status=1
  fi
}

for part in "${parts[@]}"; do
  case $part in
    correctness)
      arguments=()
      [[ $shape == demo ]] && arguments=(--prompts 2 --max-new-tokens 32)
      run 9 benchmarks/exactness.py "${arguments[@]}" --minutes 8 --json "$out/exactness_$name.json"
      ;;
    estimate)
      run 6 benchmarks/estimate.py --devices attached --shapes "$shape" --capacity 1024 \
        --json "$out/estimate_${shape}_$name.json"
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
    experts)
      arguments=()
      [[ $shape == demo ]] && arguments=(--tiny)
      run 5 benchmarks/expert_kernel.py "${arguments[@]}" --json "$out/experts_$name.json"
      ;;
    overhead)
      run 6 benchmarks/overhead.py --shape "$small" --dtype bfloat16 --new-tokens 128 --minutes 5 \
        --json "$out/overhead_${small}_$name.json"
      ;;
    meshes) run 9 benchmarks/meshes.py --json "$out/meshes_$name.json" ;;
    *)
      echo "no such part: $part; accepted are correctness, attention, experts, estimate, decode, transformers, int8, overhead" \
        "and meshes"
      exit 2
      ;;
  esac
done
"$python" -m benchmarks.tables.devices "$out" "$shape" "$small" "$name"
if [[ $shape == 7b && $out == "$root/benchmarks/results" ]]; then
  (cd "$root" && "$python" -m benchmarks.tables) || status=1
fi
exit "$status"
