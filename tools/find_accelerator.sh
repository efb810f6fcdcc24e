#!/bin/sh
# Prints the extra of jlade that installs JAX for this machine's accelerator: cuda12, cuda13, tpu, or cpu without one.
# DEV is the folder of device files.
version=$(nvidia-smi 2> /dev/null | sed -n 's/.*CUDA[^:]*Version: *\([0-9]*\)\..*/\1/p' | head -n 1)
if [ -n "$version" ]; then
    if [ "$version" -ge 13 ]; then echo cuda13; else echo cuda12; fi
elif ls "${DEV:-/dev}"/accel[0-9]* "${DEV:-/dev}"/vfio/[0-9]* 2> /dev/null | grep -q .; then
    echo tpu
else
    echo cpu
fi
