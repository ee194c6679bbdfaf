#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# yoke serve with what nobody here wrote: tritonclient, kserve's client, a model with state of the package index.
. "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
. "$(dirname "${BASH_SOURCE[0]}")/serve.sh"
tests=$YOKE_SOURCE/tests
python=$YOKE_TORCH/../../../../bin/python3
[[ -x $python ]] || python=python3
clients=$YOKE_SOURCE/.deps/clients/bin/python
vad=$(find "$YOKE_SOURCE/.deps/clients" -name silero_vad.jit 2>/dev/null | head -1) || true
[[ -n $vad ]] && "$clients" -c 'import grpc, kserve, tritonclient' 2>/dev/null ||
  { echo "skipped: no clients; ./dev test installs them into .deps/clients, see .deps/clients.log" && exit 77; }
timeout 100 "$python" -c 'import torch' 2>/dev/null || { echo "skipped: no python3 with torch here" && exit 77; }

"$python" "$tests/serve_models.py" "$scratch/models" 2>"$scratch/log" || { cat "$scratch/log" && fail "no models"; }
start_server "$scratch/models/models.toml"
"$clients" "$tests/serve_clients.py" "$http" "$grpc" >"$scratch/clients" || { cat "$scratch/clients" >&2 && fail "a client is not served"; }
tail -3 "$scratch/clients"
stop_server

if [[ -n $grpc ]] && command -v openssl >/dev/null; then
  make_certificate
  start_server stand-in: serve.http=127.0.0.1:0 serve.grpc=127.0.0.1:0 serve.metrics= "${tls[@]}"
  "$clients" - "$grpc" "$scratch/cert.pem" <<'PY' || fail "no answer over gRPC and TLS"
import sys
import numpy as np
import tritonclient.grpc as triton
client = triton.InferenceServerClient(sys.argv[1], ssl=True, root_certificates=sys.argv[2])
x = triton.InferInput("x", [1, 4], "FP32")
x.set_data_from_numpy(np.ones((1, 4), np.float32))
assert (client.infer("stand-in", [x]).as_numpy("y") == 2).all()
PY
  stop_server
fi

# A real model with state: mixed it would give one user's sound to another, so it is served alone, or a copy for each
# sequence.
cat >"$scratch/vad.toml" <<TOML
[serve]
http = "127.0.0.1:0"
grpc = ""
metrics = ""
[[model]]
name = "mixed"
path = "$vad"
input = ["x:FP32[-1,512]", "sr:INT64[1]"]
output = ["p:FP32[-1,1]"]
[[model]]
name = "vad"
path = "$vad"
input = ["x:FP32[-1,512]", "sr:INT64[1]"]
output = ["p:FP32[-1,1]"]
stateful = true
TOML
start_server "$scratch/vad.toml"
grep -qE 'mixed: a request may show in the next one.*stateful = true' "$scratch/server.log" || { cat "$scratch/server.log" && fail "no word of the state"; }
zeros=$(printf '0,%.0s' {1..511})0
hear() { # SEQUENCE [MORE PARAMETERS]
  curl -sS -m 20 "http://$http/v2/models/vad/infer" -d "{\"parameters\":{\"sequence_id\":\"$1\"${2:-}},\"inputs\":[
    {\"name\":\"x\",\"shape\":[1,512],\"datatype\":\"FP32\",\"data\":[$zeros]},
    {\"name\":\"sr\",\"shape\":[1],\"datatype\":\"INT64\",\"data\":[16000]}]}" | sed 's/.*"data":\[\([^]]*\)\].*/\1/'
}
first=$(hear ann ',"sequence_start":true') && second=$(hear ann) && other=$(hear bob ',"sequence_start":true') && again=$(hear bob)
[[ $first == "$other" && $second == "$again" && $first != "$second" && $first =~ ^[0-9.e-]+$ ]] ||
  fail "two sequences gave '$first $second' and '$other $again', wanted the same two"
hear ann ',"sequence_end":true' >/dev/null
[[ $(hear ann) == *"knows no sequence"* ]] || fail "a sequence that was ended went on"
stop_server
