#!/bin/sh
# Measures, on all GPUs of this machine, what needs several. Less than 8 minutes.
#
#     benchmarks/run_multi_gpu.sh OUT    # a folder for the results; a short table comes last
set -eu
out=${1:?expected a folder for the results}
cd "$(dirname "$0")/.."
mkdir -p "$out"
export NCCL_NVLS_ENABLE=0  # NVLink multicast
gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
[ "$gpus" -ge 2 ] || { echo "expected several GPUs, found $gpus" >&2; exit 1; }
timeout 240 python3 -m torch.distributed.run --nproc-per-node="$gpus" benchmarks/fsdp_step.py \
  --json "$out/fsdp_step.json" > "$out/fsdp_step.txt"
echo "FusedAdamW under FSDP2, a model of Llama 3.2 1B's shapes"
cat "$out/fsdp_step.txt"
