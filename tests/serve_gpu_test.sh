#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# yoke serve on a GPU: two replicas on the one device, TorchScript and a compiled package, a device assert in one worker.
. "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
. "$(dirname "${BASH_SOURCE[0]}")/serve.sh"
unset CUDA_DEVICE_MAX_CONNECTIONS CUDA_MODULE_LOADING # what ranks that share a GPU need; a server does not
python=$YOKE_TORCH/../../../../bin/python3
[[ -x $python ]] || python=python3
timeout 100 "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null || { echo "no GPU, or no torch for it" && exit 77; }
TORCHINDUCTOR_CACHE_DIR=$scratch/cache timeout 300 "$python" "$YOKE_SOURCE/tests/serve_gpu.py" write "$scratch/models" >"$scratch/log" 2>&1 ||
  { tail -20 "$scratch/log" >&2 && fail "the models could not be made"; }
begun=${EPOCHREALTIME/./}
start_server "$scratch/models/serve.toml"
cold=$(((${EPOCHREALTIME/./} - begun) / 1000))
cat "$scratch/server.log"
timeout 200 "$python" "$YOKE_SOURCE/tests/serve_gpu.py" ask "$http" "$scratch/models" "$((cold / 1000)).$(printf %03d $((cold % 1000)))" ||
  { cat "$scratch/server.log" >&2 && fail "the server on a GPU"; }
stop_server
# Idle time between batches, and copies beside kernels.
measure "$yoke" bench serve resnet --device cuda:0 --seconds 6
