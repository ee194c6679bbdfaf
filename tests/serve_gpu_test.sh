#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# yoke serve on a GPU: two replicas on the one device, TorchScript and a compiled package, a device assert in one worker, a
# package for another GPU.
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
# A package for another GPU: said before anything of it is loaded.
repack "$scratch/models/compiled.pt2" "$scratch/models/other.pt2" AOTI_COMPUTE_CAPABILITY=10
expect 2 'cannot be loaded: it was compiled for 10, and is to run on [0-9]+; compile it there' timeout -s KILL 200 \
  "$yoke" serve "$scratch/models/other.pt2" --devices cuda:0 --input 'x:FP32[-1,3,32,32]' serve.http=127.0.0.1:0 serve.grpc= serve.metrics=
# Idle time between batches, and copies beside kernels.
measure "$yoke" bench serve resnet --device cuda:0 --seconds 6
