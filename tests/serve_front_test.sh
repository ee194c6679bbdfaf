#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The front of yoke serve from outside: who may read and change what, the access log, versions that come and go, the end
# under load, and what the command line takes.
. "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
. "$(dirname "${BASH_SOURCE[0]}")/serve.sh"
tests=$YOKE_SOURCE/tests
python=$YOKE_TORCH/../../../../bin/python3
[[ -x $python ]] || python=python3
free=(serve.http=127.0.0.1:0 serve.grpc= serve.metrics=)
one='{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[1,2,3,4]}]}'
# Until the command succeeds, which it must within two minutes.
await() { # COMMAND…
  local i
  for ((i = 0; i < 1200; ++i)); do ! "$@" || return 0; sleep 0.1; done
  tail -n 5 "$scratch"/*.log >&2
  fail "not so in two minutes: $*"
}
gives() { [[ $(ask "${@:2}") == "$1"* ]]; } # STATUS PATH [curl's arguments…]
new_key() { "$yoke" serve key new "$@" 2>/dev/null | sed -n 's/^key  *//p'; }
digest_of() { printf %s "$1" | sha256sum | cut -d' ' -f1; }

# Flags are of models that are named, not of a config's.
printf '[[model]]\npath = "stand-in:"\n' >"$scratch/flags.toml"
for flag in '--devices cpu' '--replicas 0' '--batch 4' '--input x:FP32[-1,4]' '--output y:FP32[-1,4]'; do
  # shellcheck disable=SC2086
  expect 2 'does not go with a config: write .* into its \[\[model\]\]' "$yoke" serve "$scratch/flags.toml" $flag --dry-run
done
for flag in --input --output; do
  expect 2 "$flag is of one model; write a config for several" "$yoke" serve stand-in: stand-in: $flag 'y:FP32[-1,4]' --dry-run
done
expect 2 'model.replicas: got -1, wanted at least 0' "$yoke" serve stand-in: --replicas -1 --dry-run
expect 2 'model.batch: got -5, wanted at least 0' "$yoke" serve stand-in: --batch -5 --dry-run

expect 2 "model 'nowhere': there is no '$scratch/nowhere.pt'" "$yoke" serve "$scratch/nowhere.pt" --dry-run
mkdir "$scratch/here"
(cd "$scratch/here" && expect 0 '^name = "here"' "$yoke" serve . --dry-run)

# Without the module beside the program there is no gRPC: that is said, and who told an address is refused.
cp "$yoke" "$scratch/alone"
expect 2 'gRPC cannot be had: .*libyoke_grpc.so|this build has no gRPC' timeout 60 "$scratch/alone" serve stand-in: serve.http=127.0.0.1:0 serve.grpc=127.0.0.1:0 serve.metrics=
with=$yoke yoke=$scratch/alone
start_server stand-in: serve.http=127.0.0.1:0 serve.metrics=
grep -q 'gRPC is left out' "$scratch/server.log" && [[ -z $grpc ]] || { cat "$scratch/server.log" && fail "gRPC on '$grpc', without its module"; }
stop_server
yoke=$with

# A key is shown when its digest is where it belongs.
expect 2 'an admin is no tenant' "$yoke" serve key new admin "$scratch/flags.toml"
code=0 && "$yoke" serve key new ann "$scratch/none/config.toml" >"$scratch/output" 2>&1 || code=$?
[[ $code != 0 ]] && grep -q "cannot write .*none/config.toml" "$scratch/output" && ! grep -q '^key ' "$scratch/output" ||
  { cat "$scratch/output" && fail "a key whose digest was not written: exit $code"; }
chmod 600 "$scratch/flags.toml"
expect 0 'flags.toml has its digest' "$yoke" serve key new ann "$scratch/flags.toml"
[[ $(stat -c %a "$scratch/flags.toml") == 600 ]] || fail "a config with a new key may be read by others"
expect 1 'cannot write .*none/ports' timeout 60 "$yoke" serve stand-in: "${free[@]}" --port-file "$scratch/none/ports"

# Metrics beyond this host: of an admin, or of everybody where that was said.
expect 2 "'0.0.0.0:0' is reached from other hosts" "$yoke" serve stand-in: serve.metrics=0.0.0.0:0
cat >"$scratch/tenants.toml" <<TOML
[serve]
http = "127.0.0.1:0"
grpc = ""
metrics = "0.0.0.0:0"
access_log = "$scratch/access.log"
max_body_mb = 1
[[model]]
name = "m"
path = "stand-in:ms=1"
devices = "cpu:2"
[[model]]
name = "slow"
path = "stand-in:ms=5000"
devices = "cpu"
TOML
ann=$(new_key ann "$scratch/tenants.toml")
sed -i '/^name = "ann"/a max_queue = 1' "$scratch/tenants.toml"
bob=$(new_key bob "$scratch/tenants.toml")
first=$(new_key admin) && second=$(new_key admin)
sed -i "s/^access_log/admin_key_sha256 = [\"$(digest_of "$first")\", \"$(digest_of "$second")\"]\naccess_log/" "$scratch/tenants.toml"
start_server "$scratch/tenants.toml"
awk '/^Max open files/ {exit !($4 == $5)}' "/proc/$server/limits" || fail "the bound on files was not raised"
read_metrics() { # [curl's arguments…]
  curl -sS -m 20 -w '\n%{http_code}' "http://$metrics/metrics" "$@"
}
[[ $(read_metrics) == *"wanted the header"*401 ]] || fail "metrics without a key: $(read_metrics | tail -1)"
[[ $(read_metrics -H 'Authorization: Bearer yk-wrong') == *"not known"*401 ]] || fail "metrics with a wrong key"
[[ $(read_metrics -H "Authorization: Bearer $ann") == *admin*403 ]] || fail "metrics with a tenant's key"
[[ $(read_metrics -H "Authorization: Bearer $first") == *nv_inference_count*200 ]] || fail "metrics with an admin's key"

# The table of who is where.
grep -qE '^model +replica device +platform +bits +batch' "$scratch/server.log" || { cat "$scratch/server.log" && fail "no table"; }
grep -qE '^m +1 cpu#1 +yoke_stand_in +fp32 +8 ' "$scratch/server.log" || { cat "$scratch/server.log" && fail "no second replica in the table"; }

# The access log: one line for each request that wants something computed, whatever became of it.
log_has() { # PATTERN, within a line that comes within two minutes
  await grep -qE -- "$1" "$scratch/access.log"
}
lines=0
line() { # STATUS TENANT MODEL ID: of the request before, and that it is the next line
  lines=$((lines + 1))
  await eval '(($(wc -l <"$scratch/access.log") >= lines))'
  local got
  got=$(sed -n "${lines}p" "$scratch/access.log")
  [[ $got =~ \"id\":\"$4\",\"traceparent\":\"00-8-$lines-01\",\"tenant\":\"$2\",\"model\":\"$3\",.*\"status\":\"$1\" ]] ||
    fail "line $lines of the access log is '$got', wanted $1 of tenant '$2', model '$3', id '$4', traceparent 00-8-$lines-01"
}
post() { # STATUS MODEL BODY [curl's arguments…]
  expect_answer "$1" '' "/v2/models/$2/infer" -d "$3" -H "traceparent: 00-8-$((lines + 1))-01" "${@:4}"
}
mine=(-H "yoke-key: $bob")
post 200 m "{\"id\":\"r1\",${one:1}" "${mine[@]}" && line ok bob m r1
post 400 m "{\"id\":\"r2\",\"inputs\":[{\"name\":\"x\",\"shape\":[1,5],\"datatype\":\"FP32\",\"data\":[1,2,3,4,5]}]}" "${mine[@]}" && line invalid bob m r2
post 400 m '{"id":"r3","inputs":[{"name":"x","shape":"wide"}]}' "${mine[@]}" && line invalid bob m r3
post 400 m 'no JSON' "${mine[@]}" && line invalid bob m ''
post 404 nobody "{\"id\":\"r5\",${one:1}" "${mine[@]}" && line not_found bob nobody r5
post 401 m "$one" -H 'yoke-key: yk-wrong' && line unauthenticated '' m ''
post 401 m "$one" && line unauthenticated '' m ''
post 413 m "$one" "${mine[@]}" -H 'Content-Length: 999999999' -H 'Expect:' && line too_large bob m ''
post 405 m '' -X GET "${mine[@]}" && line invalid bob m ''
post 501 m "$one" "${mine[@]}" -H 'Content-Encoding: br' && line unsupported bob m ''
curl -sS -m 20 "http://$http/v2/models/m/generate" "${mine[@]}" -H "traceparent: 00-8-$((lines + 1))-01" -d '{"text_input":"a"}' >/dev/null && line unsupported bob m ''
raw() { # BYTES: what comes back
  exec 3<>"/dev/tcp/${http%:*}/${http##*:}" && printf %b "$1" >&3 && timeout 20 cat <&3 || true
}
head="POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\nyoke-key: $bob\r\n"
trace() { printf 'traceparent: 00-8-%s-01\\r\\n' "$((lines + 1))"; }
[[ $(raw "${head}Long: $(printf 'a%.0s' {1..20000})\r\n\r\n") == *' 431 '* ]] || fail "a long head was not 431"
lines=$((lines + 1)) # whether the key was read before depends on how it came
log_has '"model":"m".*"status":"invalid".*header limit'
[[ $(raw "$head$(trace)Transfer-Encoding: pigeon\r\n\r\n") == *' 400 '* ]] || fail "an unknown coding was not 400"
line invalid bob m ''
exec 3<>"/dev/tcp/${http%:*}/${http##*:}" && printf %b "$head$(trace)Content-Length: 100\r\n\r\nhalf" >&3 && exec 3>&-
line '(cancelled|invalid)' bob m ''
(raw '\x16\x03\x01\r\n\r\n') >/dev/null # no HTTP at all
lines=$((lines + 1))
log_has '"model":"".*"status":"invalid"'
await eval '(($(wc -l <"$scratch/access.log") == lines))'

# One too many of a tenant's: when to come again is said.
ask /v2/models/slow/infer -d "$one" -H "yoke-key: $ann" >"$scratch/slow" &
slow=$!
computes() { [[ $(ask /v2/yoke/view -H "yoke-key: $first") =~ \"model\":\"slow\"[^}]*\"computing\":1 ]]; }
await computes
curl -sS -m 20 -D "$scratch/head" "http://$http/v2/models/m/infer" -d "$one" -H "yoke-key: $ann" >"$scratch/body"
grep -q '^HTTP/1.1 429 ' "$scratch/head" && grep -qE '^Retry-After: [1-9]' "$scratch/head" && grep -q "of at most 1" "$scratch/body" ||
  { cat "$scratch/head" "$scratch/body" && fail "beyond max_queue it was not 429 with Retry-After"; }
wait "$slow"
grep -q '^200' "$scratch/slow" || { cat "$scratch/slow" && fail "the request before the one too many was not answered"; }
expect 0 'slow +1 ' "$yoke" top "http://$http" --once --interval 100ms --key "$first"
"$python" "$tests/serve_top.py" "$yoke" top "http://$http" --interval 100ms --key "$first" || fail "yoke top on a terminal"

# An admin's key that is taken out of the config stops working.
cp "$scratch/tenants.toml" "$scratch/before.toml"
sed -i "s/\"$(digest_of "$first")\", //" "$scratch/tenants.toml"
expect_answer 200 model_stats /v2/models/stats -H "yoke-key: $first"
expect_answer 200 '' /v2/yoke/reload -d '' -H "yoke-key: $second"
expect_answer 401 'not known' /v2/models/stats -H "yoke-key: $first"
[[ $(read_metrics -H "Authorization: Bearer $first") == *"not known"*401 ]] || fail "metrics with an admin's key of before"
expect_answer 200 model_stats /v2/models/stats -H "yoke-key: $second"
sed "s/, \"$(digest_of "$second")\"//" "$scratch/before.toml" >"$scratch/tenants.toml"
kill -HUP "$server"
await gives 401 /v2/models/stats -H "yoke-key: $second"
expect_answer 200 model_stats /v2/models/stats -H "yoke-key: $first"
stop_server

# Behind a proxy that says who asks; and without any key where that was said.
cat >"$scratch/trust.toml" <<'TOML'
[serve]
http = "127.0.0.1:0"
grpc = ""
metrics = ""
trust_tenant_header = true
[[model]]
name = "m"
path = "stand-in:"
[[tenant]]
name = "ann"
[[tenant]]
name = "bob"
TOML
start_server "$scratch/trust.toml"
expect_answer 200 data /v2/models/m/infer -d "$one" -H 'yoke-tenant: bob'
expect_answer 401 "no tenant 'eve'" /v2/models/m/infer -d "$one" -H 'yoke-tenant: eve'
expect_answer 401 'whose request this is was not said' /v2/models/m/infer -d "$one"
expect_answer 403 "needs an admin's key, and there is none" /v2/yoke/view -H 'yoke-tenant: bob'
expect 0 'bob .* m .* 1 ' "$yoke" serve usage "http://$http" # nobody is named, and this host alone can ask
stop_server
start_server stand-in: serve.http=0.0.0.0:0 serve.grpc= serve.metrics=0.0.0.0:0 --insecure serve.workers=threads
expect_answer 200 '"data":\[2' /v2/models/stand-in/infer -d "$one"
[[ $(read_metrics) == *nv_inference_count*200 ]] || fail "metrics with --insecure"
expect_answer 403 "there is none: put a digest of 'yoke serve key new admin' into serve.admin_key_sha256" /v2/repository/models/stand-in/unload -d ''
[[ -z $(pgrep -P "$server" -f serve-worker) ]] || fail "serve.workers=threads has started processes"
stop_server

# The end under load: not ready, then no more, and all that was accepted is answered.
cat >"$scratch/end.toml" <<TOML
[serve]
http = "127.0.0.1:0"
grpc = ""
metrics = ""
grace_s = 8
access_log = "$scratch/end.log"
[[model]]
name = "m"
path = "stand-in:ms=1000"
devices = "cpu:2"
batch = 1
TOML
start_server "$scratch/end.toml"
"$python" "$tests/serve_asker.py" "$http" m "$scratch/never" >"$scratch/asked" 2>&1 &
asker=$!
await grep -q '"status":"ok"' "$scratch/end.log"
kill -TERM "$server"
await gives 503 /v2/health/ready
expect_answer 200 data /v2/models/m/infer -d "$one" # in the grace
code=0 && wait "$server" || code=$?
[[ $code == 0 ]] || { cat "$scratch/server.log" && fail "the server ended with $code under load"; }
wait "$asker" || { cat "$scratch/asked" && fail "the clients failed"; }
"$python" - "$scratch/asked" "$scratch/end.log" <<'PY' || { cat "$scratch/asked" && fail "requests were lost at the end"; }
import collections, json, sys
asked = json.load(open(sys.argv[1]))
logged = collections.Counter(json.loads(line)["status"] for line in open(sys.argv[2]))
statuses = asked["statuses"]
assert set(statuses) == {"200", "503"} and statuses["200"] > 4, asked
assert all("about to end; ask another" in text for text in asked["refusals"]), asked
assert logged == {"ok": statuses["200"] + 1, "unavailable": statuses["503"]}, (logged, asked)  # and that of the grace
PY
# A second signal.
sed -i 's/^grace_s = 8/grace_s = 500/' "$scratch/end.toml"
start_server "$scratch/end.toml"
kill -TERM "$server"
await gives 503 /v2/health/ready
expect_answer 200 '\{"live":true,"ready":false\}' /v2/health/live
stop_server 143

# Over gRPC: what is under way and what waits is answered.
start_server stand-in:ms=2500 --devices cpu:2 --batch 1 serve.http=127.0.0.1:0 serve.grpc=127.0.0.1:0 serve.metrics=
if [[ -n $grpc ]] && curl --version | grep -q HTTP2; then
  # A ModelInferRequest of x, FP32[1,4]: 1, 2, 3, 4.
  printf '\0\0\0\0\x2b\x0a\x08stand-in\x2a\x0d\x0a\x01x\x12\x04FP32\x1a\x02\x01\x04\x3a\x10\0\0\x80\x3f\0\0\0\x40\0\0\x40\x40\0\0\x80\x40' >"$scratch/call"
  calls=()
  for i in {1..6}; do
    curl -sS -m 100 --http2-prior-knowledge -H 'content-type: application/grpc' -H 'te: trailers' --data-binary "@$scratch/call" \
      -D "$scratch/trailer.$i" "http://$grpc/inference.GRPCInferenceService/ModelInfer" >"$scratch/answer.$i" &
    calls+=($!)
  done
  all_wait() { [[ $(ask /v2/yoke/view) == *'"waiting":6'* ]]; }
  await all_wait
  stop_server
  for i in {1..6}; do
    wait "${calls[i - 1]}" || fail "curl could not ask over gRPC"
    grep -q '^grpc-status: 0' "$scratch/trailer.$i" || { cat "$scratch/trailer.$i" && fail "a gRPC call under way was lost at the end"; }
    [[ $(od -An -tx1 "$scratch/answer.$i" | tr -d ' \n') == *0000004000008040* ]] || fail "gRPC gave $(od -c "$scratch/answer.$i"), wanted 2, 4, ..."
  done
else
  stop_server
fi

# And while a client does not read its answers.
start_server stand-in: "${free[@]}" serve.threads=1 serve.drain_s=500
exec 4<>"/dev/tcp/${http%:*}/${http##*:}"
(while printf 'GET /v2 HTTP/1.1\r\nHost: a\r\n\r\n' >&4; do :; done) 2>/dev/null &
flood=$!
sent=0
stuck() { # nothing more goes out
  local before=$sent
  sleep 0.5
  sent=$(sed -n 's/^wchar: //p' "/proc/$flood/io")
  ((sent > 0 && sent == before))
}
await stuck
kill -TERM "$server"
await grep -q 'a second signal ends at once' "$scratch/server.log"
sleep 1 # it now waits for the client alone
kill -0 "$server" || fail "the server did not wait for a client that reads nothing"
stop_server 143
kill "$flood" 2>/dev/null || true
exec 4>&-

# What is too large for its devices is refused at run time too: a file, and the parts of a flow.
mkdir -p "$scratch/repository/wide"
printf '[flow]\nname = "wide"\n[[node]]\nname = "a"\nmodel = "part.pt"\n' >"$scratch/repository/wide/flow.toml"
start_server stand-in:ms=1 "${free[@]}" "serve.models=[\"$scratch/repository\"]"
if truncate -s 15T "$scratch/repository/huge.pt" 2>/dev/null && truncate -s 15T "$scratch/repository/wide/part.pt"; then
  for large in huge wide; do
    expect_answer 400 'have 15.* of weights, and it has .* left: take fewer replicas' "/v2/repository/models/$large/load" -d ''
    expect_answer 404 'no model' "/v2/models/$large"
  done
  expect 2 'have 15.* of weights' "$yoke" serve "$scratch/repository/wide"
  rm "$scratch/repository/huge.pt"
fi
rm -r "$scratch/repository/wide"
expect_answer 200 data /v2/models/stand-in/infer -d "$one"
stop_server

# Two versions that the config has: both come back.
cat >"$scratch/two.toml" <<'TOML'
[serve]
http = "127.0.0.1:0"
grpc = ""
metrics = ""
[[model]]
name = "m"
path = "stand-in:ms=1"
[[model]]
name = "m"
version = "2"
path = "stand-in:ms=2"
TOML
start_server "$scratch/two.toml"
grep -qE '^m/2 +1 ' "$scratch/server.log" || { cat "$scratch/server.log" && fail "the table does not tell versions apart"; }
expect_answer 200 '' /v2/repository/models/m/unload -d ''
expect_answer 200 '"version":"1","state":"UNAVAILABLE".*"version":"2","state":"UNAVAILABLE"' /v2/repository/index -d ''
expect_answer 200 '' /v2/repository/models/m/load -d ''
expect_answer 200 '"versions":\["1","2"\]' /v2/models/m
for line in 'unloaded  model=m' 'loaded  model=m version=1' 'loaded  model=m version=2'; do
  grep -q "a model was $line" "$scratch/server.log" || { cat "$scratch/server.log" && fail "no line '$line' in the log"; }
done
stop_server

# What inspect writes is a config.
mkdir "$scratch/inspected"
cd "$scratch/inspected"
expect 0 '^written +model.toml; then: yoke serve model.toml' "$yoke" serve inspect stand-in:
start_server model.toml "${free[@]}"
expect_answer 200 '"data":\[2' /v2/models/stand-in/infer -d "$one"
stop_server
rm model.toml

# Models of Python.
timeout 100 "$python" -c 'import torch' 2>/dev/null || { echo "left out: models of Python and versions in folders; no python3 with torch here" && exit 0; }
cat >"$scratch/times.py" <<'PYTHON'
import pathlib
import sys
import torch


class Times(torch.nn.Module):
    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.factor * x


for word in sys.argv[1:]:
    factor, path = word.split("=")
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.jit.script(Times(float(factor))).save(str(path))
PYTHON
versions=$scratch/repository/net
"$python" "$scratch/times.py" "3=net.pt" "1=$versions/1/model.pt" "2=$versions/2/model.pt" "10=$scratch/aside/10/model.pt"
expect 0 '^platform +pytorch_torchscript$' "$yoke" serve inspect net.pt
grep -q '^# Complete the types' model.toml || fail "nothing is said of inputs that are to be completed"
sed -i 's/3,224,224/4/' model.toml
start_server model.toml "${free[@]}"
expect_answer 200 '"data":\[3(.0)?,6' /v2/models/net/infer -d "$one"
stop_server
start_server net.pt --input 'x:FP32[-1,4]' --output 'scores:FP32[-1,4]' --batch 4 "${free[@]}"
expect_answer 200 '"inputs":\[\{"name":"x","datatype":"FP32","shape":\[-1,4\]\}\],"outputs":\[\{"name":"scores"' /v2/models/net
expect_answer 200 '"name":"scores",.*"data":\[3(.0)?,6' /v2/models/net/infer -d "$one"
expect_answer 200 '"max_batch_size":4' /v2/models/net/config
stop_server

# Versions in a folder: side by side, added and taken away while requests go on.
printf '[[model]]\ninput = ["x:FP32[-1,4]"]\noutput = ["y:FP32[-1,4]"]\n' >"$versions/model.toml"
mkdir "$versions/3" "$versions/03" # one that is not there yet, and one that is none
start_server stand-in:ms=1 "${free[@]}" "serve.models=[\"$scratch/repository\"]"
expect_answer 200 '"name":"net","version":"1","state":"UNAVAILABLE".*"name":"net","version":"2"' /v2/repository/index -d ''
expect_answer 200 '' /v2/repository/models/net/load -d ''
expect_answer 200 '"versions":\["1","2"\]' /v2/models/net
expect_answer 200 '"model_version":"1".*"data":\[1(.0)?,2' /v2/models/net/versions/1/infer -d "$one"
expect_answer 200 '"model_version":"2".*"data":\[2(.0)?,4' /v2/models/net/versions/2/infer -d "$one"
"$python" "$tests/serve_asker.py" "$http" net "$scratch/enough" >"$scratch/asked" 2>&1 &
asker=$!
await test -e "$scratch/enough.begun"
mv "$scratch/aside/10" "$versions/10" # newer than 9, whatever the letters say
rm -r "$versions/1"
expect_answer 200 '' /v2/repository/models/net/load -m 120 -d ''
expect_answer 200 '"versions":\["10","2"\]|"versions":\["2","10"\]' /v2/models/net
expect_answer 404 'no model .*version 1' /v2/models/net/versions/1/infer -d "$one"
expect_answer 200 '"data":\[2(.0)?,4' /v2/models/net/versions/2/infer -d "$one"
for ((i = 0; i < 20; ++i)); do expect_answer 200 '"data":\[10(.0)?,20' /v2/models/net/infer -d "$one"; done
touch "$scratch/enough"
wait "$asker" || { cat "$scratch/asked" && fail "the clients failed"; }
"$python" - "$scratch/asked" <<'PY' || { cat "$scratch/asked" && fail "a request was lost while versions changed"; }
import json, sys
asked = json.load(open(sys.argv[1]))
assert list(asked["statuses"]) == ["200"] and set(asked["factors"]) == {"2.0", "10.0"}, asked
assert asked["first"] == 2 and asked["last"] == 10, asked
PY
expect_answer 200 '' /v2/repository/models/net/unload -d ''
expect_answer 404 'no model' /v2/models/net
stop_server
