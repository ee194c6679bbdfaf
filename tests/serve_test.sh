#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# yoke serve from outside: a table of good and bad requests with Triton's answers, keys, TLS, signals, workers that are
# killed, models that come and go, a run that was just trained.
. "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
. "$(dirname "${BASH_SOURCE[0]}")/serve.sh"
tests=$YOKE_SOURCE/tests
python=$YOKE_TORCH/../../../../bin/python3
[[ -x $python ]] || python=python3
one='{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[1,2,3,4]}]}'

# A mistake is told with what to do.
expect 2 'nothing to serve' "$yoke" serve
expect 2 'there is no .*nobody.pt' "$yoke" serve "$scratch/nobody.pt" serve.http=127.0.0.1:0 serve.grpc= serve.metrics=
expect 2 'is reached from other hosts' "$yoke" serve stand-in: serve.http=0.0.0.0:0
truncate -s 15T "$scratch/huge.pt" 2>/dev/null &&
  expect 2 'have 15.* of weights, and it has .* left: take fewer replicas' "$yoke" serve "$scratch/huge.pt"
expect 2 'no such key; did you mean serve.http' "$yoke" serve stand-in: serve.htp=1
expect 0 'serve.drain_s' "$yoke" serve --keys
diff <("$yoke" serve --keys) <(sed -n '/^```$/,/^```$/p' "$YOKE_SOURCE/docs/reference/serve.md" | sed '1d;$d') ||
  fail "docs/reference/serve.md is not what yoke serve --keys prints"

# Tenants with keys.
cat >"$scratch/tenants.toml" <<TOML
[serve]
http = "127.0.0.1:0"
grpc = ""
metrics = "127.0.0.1:0"
access_log = "$scratch/access.log"
[[model]]
name = "m"
path = "stand-in:ms=2"
devices = "cpu:2"
TOML
key=$("$yoke" serve key new ann "$scratch/tenants.toml" 2>/dev/null | sed -n 's/^key  *//p')
admin=$("$yoke" serve key new admin 2>/dev/null | sed -n 's/^key  *//p')
[[ $key == yk-* && ${#key} == 67 ]] || fail "yoke serve key new gave '$key'"
! grep -q "$key" "$scratch/tenants.toml" || fail "the key itself was stored"
digest=$(printf %s "$admin" | sha256sum | cut -d' ' -f1)
sed -i "s/^access_log/admin_key_sha256 = [\"$digest\"]\naccess_log/" "$scratch/tenants.toml"
start_server "$scratch/tenants.toml"
expect_answer 200 '"ready":true' /v2/health/ready
expect_answer 401 'wanted the header' /v2/models/m/infer -d "$one"
expect_answer 401 'not known' /v2/models/m/infer -d "$one" -H 'yoke-key: yk-wrong'
expect_answer 401 'wanted the header' /v2/models/m/infer -d "$one" -H 'yoke-tenant: ann'
expect_answer 200 '"data":\[2(.0)?,4' /v2/models/m/infer -d "$one" -H "yoke-key: $key" -H 'traceparent: 00-1-2-01'
expect_answer 200 '"data":\[2(.0)?,4' /v2/models/m/infer -d "$one" -H "Authorization: Bearer $key"
expect_answer 400 'wanted FP32\[-1,4\], got FP32\[1,5\]' /v2/models/m/infer -H "yoke-key: $key" \
  -d '{"inputs":[{"name":"x","shape":[1,5],"datatype":"FP32","data":[1,2,3,4,5]}]}'
expect_answer 404 "no model 'n'" /v2/models/n/infer -d "$one" -H "yoke-key: $key"
expect_answer 504 'timeout of' /v2/models/m/infer -H "yoke-key: $key" -d "${one%\}},\"parameters\":{\"timeout\":1}}"
expect_answer 403 'admin' /v2/repository/models/m/unload -H "yoke-key: $key" -d ''
expect_answer 403 'admin' /v2/models/stats -H "yoke-key: $key"
expect_answer 200 'model_stats' /v2/models/stats -H "yoke-key: $admin"
expect_answer 413 'of 999999999 bytes is larger than' /v2/models/m/infer -H "yoke-key: $key" -H 'Content-Length: 999999999' -H 'Expect:' -d "$one"
expect 0 'ann .* m .* 3 ' "$yoke" serve usage "http://$http" --key "$admin"
expect 0 '"tenant":"ann"' "$yoke" serve usage "http://$http" --key "$key" --json
[[ $(curl -sS -m 10 "http://$metrics/metrics") == *'wanted the header'* ]] || fail "metrics of all tenants without a key"
curl -sS -m 10 "http://$metrics/metrics" -H "Authorization: Bearer $admin" >"$scratch/metrics"
for series in 'nv_inference_request_success{model="m",version="1"} 2' 'nv_inference_exec_count' 'nv_inference_queue_duration_us' \
  'nv_inference_request_failure{model="m",reason="REJECTED",version="1"} 1' 'yoke_tenant_device_seconds_total{tenant="ann"}' \
  'yoke_replica_ready{' 'yoke_tenant_latency_ms_bucket'; do
  grep -qF "$series" "$scratch/metrics" || { cat "$scratch/metrics" && fail "no $series in the metrics"; }
done
# A second tenant, without a restart.
second=$("$yoke" serve key new bob "$scratch/tenants.toml" 2>/dev/null | sed -n 's/^key  *//p')
expect_answer 401 'not known' /v2/models/m/infer -d "$one" -H "yoke-key: $second"
kill -HUP "$server"
for ((i = 0; i < 300; ++i)); do [[ $(ask /v2/models/m/infer -d "$one" -H "yoke-key: $second") != 200* ]] || break; sleep 0.1; done
expect_answer 200 'data' /v2/models/m/infer -d "$one" -H "yoke-key: $second"
stop_server
grep -q '"traceparent":"00-1-2-01","tenant":"ann","model":"m"' "$scratch/access.log" || { cat "$scratch/access.log" && fail "no line of the access log"; }
grep -q '"status":"deadline"' "$scratch/access.log" || fail "no deadline in the access log"

# Workers that are killed are back, and nothing stays behind after kill -9 of all.
start_server stand-in:ms=1 --devices cpu:2 serve.http=127.0.0.1:0 serve.grpc=127.0.0.1:0 serve.metrics=
workers=$(pgrep -P "$server" -f serve-worker | tr '\n' ' ')
read -r first rest <<<"$workers"
[[ -n $rest ]] || fail "two replicas are two processes, got '$workers'"
kill -9 "$first"
for ((i = 0; i < 100; ++i)); do expect_answer 200 data /v2/models/stand-in/infer -d "$one"; done
expect_answer 200 '"restarts":1' /v2/yoke/view
no_files() { [[ $(find /dev/shm -newer "$scratch/tenants.toml" -name 'yoke*' | wc -l) == 0 ]] || fail "files in /dev/shm $1"; }
no_files "while it serves"
workers=$(pgrep -P "$server" -f serve-worker)
kill -9 "$server"
wait "$server" 2>/dev/null || true
is_gone() { ! grep -qs '^State:.[^Z]' "/proc/$1/status"; }
for one_worker in $workers; do
  for ((i = 0; i < 100; ++i)); do ! is_gone "$one_worker" || break; sleep 0.1; done
  is_gone "$one_worker" || fail "worker $one_worker outlived its router"
done
no_files "after a kill -9"

# TLS.
if command -v openssl >/dev/null; then
  make_certificate
  start_server stand-in: serve.http=127.0.0.1:0 serve.grpc=127.0.0.1:0 serve.metrics= "${tls[@]}"
  curl -sS -m 10 --cacert "$scratch/cert.pem" "https://$http/v2/models/stand-in/infer" -d "$one" | grep -q data || fail "no answer over TLS"
  ! curl -sS -m 5 "http://$http/v2/health/live" >/dev/null 2>&1 || fail "plain HTTP was answered where TLS is"
  expect 0 ' stand-in +1 ' "$yoke" serve usage "https://$http" --ca "$scratch/cert.pem"
  expect 0 'stand-in ' "$yoke" top "https://$http" --ca "$scratch/cert.pem" --once --interval 100ms
  expect 1 'the certificate of .* is refused: self.signed certificate; wanted one' "$yoke" top "https://$http" --once
  expect 2 "cannot use '.*/none.pem': .*; wanted a PEM file" "$yoke" top "https://$http" --once --ca "$scratch/none.pem"
  if [[ -n $grpc ]] && curl --version | grep -q HTTP2; then
    call() { # [curl's arguments…]: the bytes that ServerLive gives, live = true
      printf '\0\0\0\0\0' | curl -sS -m 20 --http2 "$@" -H 'content-type: application/grpc' -H 'te: trailers' --data-binary @- | od -An -tx1 | tr -d ' \n'
    }
    got=$(call --cacert "$scratch/cert.pem" "https://$grpc/inference.GRPCInferenceService/ServerLive")
    [[ $got == 00000000020801 ]] || fail "gRPC over TLS gave '$got', wanted 00000000020801"
    ! got=$(call "https://$grpc/inference.GRPCInferenceService/ServerLive" 2>/dev/null) || [[ -z $got ]] || fail "a client that does not know the certificate went on"
    ! got=$(call --http2-prior-knowledge "http://$grpc/inference.GRPCInferenceService/ServerLive" 2>/dev/null) || [[ -z $got ]] || fail "gRPC without TLS was answered"
  fi
  stop_server
  # Who shakes no hand holds nobody up, and is let go.
  start_server stand-in: serve.http=127.0.0.1:0 serve.grpc= serve.metrics= "${tls[@]}" serve.threads=1 serve.idle_s=3
  exec 3<>"/dev/tcp/${http%:*}/${http##*:}" 4<>"/dev/tcp/${http%:*}/${http##*:}"
  printf '\x16\x03\x01\x02' >&4 # the begin of a greeting
  curl -sS -m 10 --cacert "$scratch/cert.pem" "https://$http/v2/models/stand-in/infer" -d "$one" | grep -q data || fail "no answer beside clients that say nothing"
  for file in 3 4; do timeout 60 cat <&"$file" >/dev/null || fail "a client without a TLS greeting was kept beyond serve.idle_s"; done
  exec 3>&- 4>&-
  stop_server
  make_certificate IP:127.0.0.9
  start_server stand-in: serve.http=127.0.0.1:0 serve.grpc= serve.metrics= "${tls[@]}"
  expect 1 'is refused: IP address mismatch' "$yoke" serve usage "https://$http" --ca "$scratch/cert.pem"
  stop_server
fi

# A run that was just trained: the tokens of yoke generate.
(cd "$scratch" && "$yoke" train "$YOKE_SOURCE/examples/train/first.toml" "data.path=$YOKE_SOURCE/yoke/base" train.steps=20 run.dir=runs --json >/dev/null 2>&1) ||
  fail "the small run did not train"
start_server "$scratch/runs/first" serve.http=127.0.0.1:0 serve.grpc= serve.metrics=
wanted=$("$yoke" generate "$scratch/runs/first" --prompt "int " --tokens 24 --temperature 0 --json)
got=$(curl -sS -m 30 "http://$http/v2/models/first/generate" -d '{"text_input":"int ","max_tokens":24,"temperature":0}')
same() { # what both say, decoded
  "$python" -c 'import json, sys; a, b = json.loads(sys.argv[1])["text"], json.loads(sys.argv[2])["text_output"]; sys.exit(a != b)' "$1" "$2"
}
same "$wanted" "$got" || fail "generate gave '$got', wanted '$wanted'"
# Who reads late gets several pieces as one, and so does a test on a busy machine: not each time, though.
for _ in {1..20}; do
  pieces=$(curl -sSN -m 30 "http://$http/v2/models/first/generate_stream" -d '{"text_input":"int ","max_tokens":24,"temperature":0}' | sed -n 's/^data: //p')
  (($(wc -l <<<"$pieces") <= 3)) || break
done
joined=$("$python" -c 'import json, sys; print(json.dumps({"text_output": "".join(json.loads(line)["text_output"] for line in sys.argv[1].splitlines())}))' "$pieces")
same "$wanted" "$joined" || fail "generate_stream gave '$joined', wanted '$wanted'"
(($(wc -l <<<"$pieces") > 3)) || fail "the text came in $(wc -l <<<"$pieces") pieces, 20 times"
stop_server

# With little shared memory, which is not used.
if unshare -m true 2>/dev/null; then
  cat >"$scratch/small_shm" <<'SH'
#!/usr/bin/env bash
mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$@"
SH
  chmod +x "$scratch/small_shm"
  real=$yoke
  yoke=$scratch/in_small_shm
  printf '#!/usr/bin/env bash\nexec unshare -m "%s" "%s" "$@"\n' "$scratch/small_shm" "$real" >"$yoke" && chmod +x "$yoke"
  start_server stand-in: --devices cpu:2 serve.http=127.0.0.1:0 serve.grpc= serve.metrics= serve.slab_mb=512
  expect_answer 200 '"data":\[2' /v2/models/stand-in/infer -d "$one"
  stop_server
  yoke=$real
else
  echo "left out: little shared memory; nothing may be mounted here"
fi

# Models of Python.
timeout 100 "$python" -c 'import torch' 2>/dev/null || { echo "left out: models of Python, the table of cases, models that come and go; no python3 with torch here" && exit 0; }
"$python" "$tests/serve_models.py" "$scratch/models" 2>"$scratch/log" || { cat "$scratch/log" && fail "no models"; }
start_server "$scratch/models/models.toml"
"$python" "$tests/serve_cases.py" "$http" >"$scratch/cases" || { cat "$scratch/cases" >&2 && fail "answers differ from Triton's"; }
tail -1 "$scratch/cases"
stop_server

# Models that come and go while others ask.
mkdir -p "$scratch/repository/later/1" "$scratch/repository/later/2"
cp "$scratch/models/double.pt" "$scratch/repository/later/1/model.pt"
cp "$scratch/models/double.pt" "$scratch/repository/later/2/model.pt"
cp "$scratch/models/double.pt" "$scratch/repository/plain.pt"
start_server stand-in:ms=1 serve.http=127.0.0.1:0 serve.grpc= serve.metrics= "serve.models=[\"$scratch/repository\"]"
expect_answer 404 'no model' /v2/repository/models/nobody/load -d ''
expect_answer 400 'no name' /v2/repository/models/..%2Fmodels/load -d ''
expect_answer 501 'no parameters' /v2/repository/models/plain/load -d '{"parameters":{"config":"{}"}}'
expect_answer 200 '' /v2/repository/models/later/load -d ''
expect_answer 200 '"versions":\["1","2"\]' /v2/models/later
expect_answer 200 '' /v2/repository/models/plain/load -d ''
for ((i = 0; i < 30; ++i)); do expect_answer 200 data /v2/models/stand-in/infer -d "$one"; done &
asking=$!
expect_answer 200 '' /v2/repository/models/stand-in/load -d ''
wait "$asking" || fail "a request failed while its model was replaced"
expect_answer 200 '' /v2/repository/models/later/unload -d ''
expect_answer 404 'no model' /v2/models/later
expect_answer 200 '"name":"plain"' /v2/repository/index -d '{"ready":true}'
stop_server
