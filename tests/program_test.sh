#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The program as a user meets it: results on stdout, one clear line and the right exit code for bad input.
. "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
yoke=$YOKE_BUILD/yoke

# Bad input: exit 2, one line on stderr that has the words, nothing on stdout.
refused() { # WORDS COMMAND…
  local words=$1 code=0
  timeout 60 "${@:2}" >"$scratch/out" 2>"$scratch/err" </dev/null || code=$?
  [[ $code == 2 ]] || fail "'${*:2}' gave exit $code, not 2: $(cat "$scratch/err")"
  [[ $(wc -l <"$scratch/err") == 1 ]] || fail "'${*:2}' did not answer in one line: $(cat "$scratch/err")"
  grep -qF -- "$words" "$scratch/err" || fail "'${*:2}' does not say '$words': $(cat "$scratch/err")"
  [[ ! -s $scratch/out ]] || fail "'${*:2}' printed a result: $(cat "$scratch/out")"
}

refused "--help" "$yoke"
refused "did you mean demo? There are: train, generate, eval, data, serve, flow, checkpoint, top, trace, demo, bench, schedule, doctor" "$yoke" dmo
refused "see yoke demo --help" "$yoke" demo --stepz 5
refused "--timeout wants" "$yoke" demo --timeout nan
refused "--seconds wants" "$yoke" bench comm --seconds nan
refused "cpu:4" "$yoke" demo --devices gpu:4
refused "at least" "$yoke" demo --devices cpu:0
refused "cuda" "$yoke" demo --devices cuda:7
refused "= 6" "$yoke" demo --devices cpu:4 --mesh "dp=3 x tp=2"
refused "steps" "$yoke" demo --steps 0
refused "cannot write" "$yoke" demo --trace "$scratch/no/such/folder/trace.json"
refused "--ranks wants 1 to 64, got 0" "$yoke" bench comm --ranks 0
refused "did you mean all_reduce" "$yoke" bench comm --op all_reduc
refused "'1Q' is not a size" "$yoke" bench comm --sizes 64,1Q
refused "gloo, openmpi" "$yoke" bench comm --peers mpich
refused "own, plain" "$yoke" bench comm --memory shared
refused "local" "$yoke" bench comm --backend carrier-pigeon

refused "did you mean zbv" "$yoke" schedule zbw
refused "a multiple of 4, got 6" "$yoke" schedule interleaved -p 4 -m 6
refused "2 x 4 - 1 = 7" "$yoke" schedule zb-h2 -p 4 -m 6
refused "four numbers" "$yoke" schedule 1f1b --times 1,2
refused "cannot read" "$yoke" schedule "$scratch/none.csv"
refused "--chunks is for interleaved" "$yoke" schedule zbv --chunks 3

# Pipelines and cut layers are measured; a schedule that sleeps takes at least as long as it is told to.
"$yoke" bench pipeline --stand-in 2 --ranks 2 --micro-batches 2 --schedules 1f1b --json >"$scratch/stand_in" 2>/dev/null
grep -Eq '"simulated_ms":18,"measured_ms":(1[89]|[2-9][0-9])' "$scratch/stand_in"
"$yoke" bench pipeline --schedules zbv --rounds 1 --steps 1 --timelines 2>/dev/null | grep -Eq '^measured: [0-9.]+ ms'
"$yoke" bench tensor --rounds 1 --steps 1 --json 2>/dev/null | grep -q '"what":"sequence","ms_per_step":[0-9]'
refused "did you mean zbv" "$yoke" bench pipeline --schedules zbw

# A schedule: numbers that are known, a picture, a file that is read back, and one that is wrong.
"$yoke" schedule 1f1b -p 4 -m 8 --json >"$scratch/1f1b.json"
python3 - "$scratch/1f1b.json" <<'PYTHON'
import json, sys
s = json.load(open(sys.argv[1]))
assert s["makespan"] == 33 and abs(s["bubble"] - 9 / 33) < 1e-12 and s["peak"] == [4, 3, 2, 1], s
assert s["deadlock_free"] and s["num_actions"] == 64 == sum(map(len, s["actions"])), s
PYTHON
"$yoke" schedule zbv -p 2 -m 4 --svg "$scratch/zbv.svg" --trace "$scratch/zbv.json" --check >"$scratch/out"
grep -q 'bubble .* (0.0 % where steps may overlap)' "$scratch/out" || fail "zbv has a hole: $(cat "$scratch/out")"
python3 -c 'import json, sys, xml.dom.minidom as x; x.parse(sys.argv[1]); json.load(open(sys.argv[2]))' \
  "$scratch/zbv.svg" "$scratch/zbv.json"
"$yoke" schedule zbv -p 2 -m 4 --csv >"$scratch/zbv.csv"
"$yoke" schedule "$scratch/zbv.csv" --csv | cmp - "$scratch/zbv.csv"
sed -i '2s/0F1/0F2/' "$scratch/zbv.csv"
code=0
"$yoke" schedule "$scratch/zbv.csv" 2>"$scratch/err" || code=$?
[[ $code == 2 ]] && grep -q -- '-->0F2' "$scratch/err" || fail "a wrong schedule passed: $(cat "$scratch/err")"

# A port in use.
python3 - >"$scratch/port" <<'PYTHON' &
import socket, time
server = socket.socket()
server.bind(("127.0.0.1", 0))
server.listen()
print(server.getsockname()[1], flush=True)
time.sleep(600)
PYTHON
holder=$!
trap 'kill $holder ${job:-} 2>/dev/null || true; rm -rf "$scratch"' EXIT
until [[ -s $scratch/port ]]; do read -rt 0.05 <> <(:) || true; done
refused "in use" "$yoke" demo --metrics "127.0.0.1:$(cat "$scratch/port")"

# The demo: ten aligned, falling losses; the same loss on one rank; the same in JSON; a trace that parses.
timeout 60 "$yoke" demo --trace "$scratch/trace.json" >"$scratch/out" 2>"$scratch/err" || fail "the demo failed: $(cat "$scratch/err")"
[[ $(grep -c '^step *[0-9]*   loss [0-9.]*   grad norm' "$scratch/out") == 10 ]] || fail "not ten loss lines: $(cat "$scratch/out")"
awk '/^step/ { if (last != "" && $4 >= last) bad = 1; last = $4 } END { exit bad }' "$scratch/out" || fail "the loss does not fall"
[[ $(grep '^step' "$scratch/out" | awk '{print length}' | sort -u | wc -l) == 1 ]] || fail "the lines are not aligned"
grep -q '^same loss on 1 rank: max difference' "$scratch/out" || fail "no comparison with one rank"
python3 - "$scratch/trace.json" <<'PYTHON' || fail "the trace has no all_reduce of both ranks"
import json, sys
events = json.load(open(sys.argv[1]))
events = events["traceEvents"] if isinstance(events, dict) else events
assert len({event["pid"] for event in events if event.get("name") == "all_reduce"}) == 2
PYTHON
code=0
timeout 60 "$yoke" demo --steps 10 >/dev/full 2>"$scratch/err" || code=$?
[[ $code == 1 ]] && grep -q 'cannot write to standard output' "$scratch/err" || fail "a full disk gave exit $code: $(cat "$scratch/err")"
timeout 60 "$yoke" demo --devices cpu:3 --steps 20 --json >"$scratch/out"
python3 - "$scratch/out" <<'PYTHON' || fail "the JSON lines are wrong: $(cat "$scratch/out")"
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
assert len(lines) == 11 and all({"step", "loss", "grad_norm"} <= line.keys() for line in lines[:10])
assert lines[-1]["ranks"] == 3 and lines[-1]["max_difference"] < 1e-6
PYTHON

# Metrics while it trains, and the flight recorder on SIGUSR2.
timeout 100 "$yoke" demo --steps 200000 --metrics 127.0.0.1:0 >"$scratch/out" 2>"$scratch/err" &
job=$!
url=
until [[ -n $url ]]; do
  kill -0 $job || fail "the demo ended early: $(cat "$scratch/err")"
  url=$(sed -n 's|^metrics at \(.*/metrics\)$|\1|p' "$scratch/err") # all of the line
done
python3 -c 'import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode())' "$url" >"$scratch/metrics"
grep -q '^yoke_steps_total [0-9]' "$scratch/metrics" || fail "no metrics at $url"
worker=$(awk '{print $1}' "/proc/$job/task/$job/children") # the program, below timeout
kill -USR2 "$worker"
until grep -q 'all_reduce' "$scratch/err"; do kill -0 $job || fail "no flight recorder on SIGUSR2: $(cat "$scratch/err")"; done
kill -TERM "$worker"
wait $job || true

# The benchmark: one JSON object a line, every result verified, peers in the same run.
timeout 120 "$yoke" bench comm --op all_reduce,all_gather,reduce_scatter,broadcast,reduce,all_to_all --sizes 64,100k --ranks 3 \
  --seconds 0.02 --json >"$scratch/out" 2>"$scratch/err" || fail "the benchmark failed: $(cat "$scratch/err")"
peers=
! command -v mpicc >/dev/null || peers=openmpi
! "$(dirname "$YOKE_TORCH")/../../../bin/python3" -c 'import torch.distributed' 2>/dev/null || peers=${peers:+$peers,}gloo
[[ -z $peers ]] || timeout 200 "$yoke" bench comm --sizes 4k --seconds 0.05 --json --peers "$peers" >"$scratch/peers" 2>"$scratch/err" ||
  fail "the peers $peers were not measured: $(cat "$scratch/err")"
# The other backends, in processes of their own.
for backend in shm mpi; do
  [[ $backend == shm || -x $YOKE_BUILD/yoke-mpi ]] || continue
  for memory in own plain; do
    timeout 120 "$yoke" bench comm --backend $backend --memory $memory --sizes 64,300k --ranks 3 --seconds 0.02 --json \
      >"$scratch/$backend" 2>"$scratch/err" || fail "the benchmark of $backend failed: $(cat "$scratch/err")"
    [[ $(grep -c "\"backend\":\"$backend\".*\"verified\":true" "$scratch/$backend") == 2 ]] ||
      fail "the benchmark of $backend gave: $(cat "$scratch/$backend")"
  done
done
python3 - "$scratch/out" "$scratch/peers" "$peers" <<'PYTHON' || fail "the benchmark's lines are wrong: $(cat "$scratch/out" "$scratch/peers")"
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
assert len(lines) == 6 * 2 * 2, len(lines)
keys = {"backend", "op", "ranks", "bytes", "median_us", "bus_gbps", "verified"}
assert all(keys <= line.keys() and line["verified"] is True and line["median_us"] > 0 for line in lines)
by_op = {line["op"]: line for line in lines if line["backend"] == "local"}
assert abs(by_op["all_reduce"]["bus_gbps"] / by_op["all_reduce"]["alg_gbps"] - 4 / 3) < 1e-6
if sys.argv[3]:
    seen = {json.loads(line)["backend"] for line in open(sys.argv[2])}
    assert seen == {"local", "memcpy", *sys.argv[3].split(",")}, seen
PYTHON

timeout 60 "$yoke" doctor --json >"$scratch/out"
python3 -c 'import json, sys; [json.loads(line) for line in open(sys.argv[1])]' "$scratch/out" || fail "doctor --json is not JSON lines"
"$yoke" --version | grep -q '^yoke [0-9]' || fail "no version"

# SentencePiece and libc10 have a variable of one name and two sizes: loaded after libc10, SentencePiece would write over
# what lies behind libc10's.
for binary in "$yoke" "$YOKE_BUILD"/rooms/*/yoke_*_tests; do
  readelf -d "$binary" | awk '/NEEDED/ && /sentencepiece/ {piece = NR} /NEEDED/ && /libc10\.so/ {c10 = NR} END {exit piece && piece > c10}' ||
    fail "$binary loads libc10 before libsentencepiece; name the room data before the others in its DEPS"
done
