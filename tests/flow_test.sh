#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# yoke flow from outside: every example, what is refused and how, the trace's bottleneck, a flow that is served.
. "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
. "$(dirname "${BASH_SOURCE[0]}")/serve.sh"
examples=$YOKE_SOURCE/examples/flow
python=$YOKE_TORCH/../../../../bin/python3
[[ -x $python ]] || python=python3

# Every example is proved, drawn and run; those that learn, learn.
for flow in "$examples"/*.toml; do
  expect 0 'deadlock-free' "$yoke" flow check "$flow"
  expect 0 'simulated, 4 rounds' "$yoke" flow show "$flow" --svg "$scratch/flow.svg" --trace "$scratch/flow.trace"
  "$python" - "$scratch/flow.svg" "$scratch/flow.trace" <<'PY' || fail "the pictures of $flow cannot be read"
import json, sys, xml.dom.minidom
xml.dom.minidom.parse(sys.argv[1])
assert json.load(open(sys.argv[2]))["traceEvents"]
PY
  given=$(awk -F'"' '/^\[\[input\]\]/ {getline; sub(/:.*/, "", $2); print "--input " $2 "=1,2"}' "$flow")
  # shellcheck disable=SC2086 # two words
  expect 0 'bottleneck: ' "$yoke" flow run "$flow" ${given:---rounds 5}
done
expect 0 'critical path.* refine: nearer > refine: judge' "$yoke" flow show "$examples/loop.toml" --svg "$scratch/flow.svg"
grep -q '<title>refine: judge, round 1, turn 2, ' "$scratch/flow.svg" || fail "the picture of a loop shows nothing of its body"
accuracy() { # FLOW NAME [OPTION…]
  "$yoke" flow run "$1" "${@:3}" 2>/dev/null | sed -n "s/^$2 = FP32\[\] //p"
}
above() { # NUMBER NUMBER WHAT: nothing is no number
  [[ -n $1 && -n $2 ]] && awk -v got="$1" -v wanted="$2" 'BEGIN {exit !(got + 0 > wanted + 0)}' || fail "$3: got $1, wanted more than $2"
}
above "$(accuracy "$examples/ensemble.toml" accuracy)" 0.95 "the vote of an ensemble"
above "$(accuracy "$examples/bagging.toml" accuracy)" 0.93 "the vote of bags"
loss() { # FLOW NODE [OPTION…]
  "$yoke" flow run "$1" "${@:3}" 2>/dev/null | sed -n "\$s/.*  $2 \([0-9.e-]*\).*/\1/p"
}
above 0.2 "$(loss "$examples/chain.toml" loss)" "the chain's loss"
above 0.5 "$(loss "$examples/mutual.toml" ann_loss)" "the mutual loss"
above 0.5 "$(loss "$examples/mutual_copies.toml" ann_loss)" "the mutual loss of copies"
above 1.6 "$(loss "$examples/gan.toml" critic_loss)" "the critic's loss"
above "$(loss "$examples/gan.toml" critic_loss)" 1.1 "the critic's loss"
[[ $(loss "$examples/hybrid.toml" loss) == 0.0* ]] || fail "the hybrid did not learn"
expect 0 '^root = FP32\[1,3\] 1.41421 1.73205 3.16228' "$yoke" flow run "$examples/loop.toml" --input 'a=2,3,10'
expect 0 '^fourth_root = FP32\[1,3\] 2 3 1.77828' "$yoke" flow run "$examples/subgraph.toml" --input 'a=16,81,10' flow.devices=cpu:4
above 0.2 "$(loss "$examples/stale.toml" ann_loss)" "the loss of those who hear late"
# Where nobody learns, what was said a round ago is what would be said now: from the second round on.
sed 's/^lr = .*/lr = 0/' "$examples/stale.toml" >"$scratch/still.toml"
sed '/^staleness/d; /^initial/d' "$scratch/still.toml" >"$scratch/now.toml"
now=$(loss "$scratch/now.toml" ann_loss --rounds 1)
first=$(loss "$scratch/still.toml" ann_loss --rounds 1) second=$(loss "$scratch/still.toml" ann_loss --rounds 2)
[[ -n $now && $second == "$now" && $first != "$now" ]] || fail "stale: got $first and $second, wanted $now in the second round alone"
above "$(accuracy "$examples/broadcast.toml" accuracy)" 0.93 "the actor with the learner's weights"
above 0.45 "$(accuracy "$examples/broadcast.toml" accuracy --rounds 20)" "the actor before it has got any"
above "$(accuracy "$examples/broadcast.toml" accuracy --rounds 21)" 0.5 "the actor with those of the first 20 rounds"
# The same on other devices.
one=$(loss "$examples/hybrid.toml" loss)
sed 's/"0,1", "2,3"/"0,0", "1,1"/' "$examples/hybrid.toml" >"$scratch/other.toml"
two=$(loss "$scratch/other.toml" loss)
[[ -n $one && ${one:0:6} == "${two:0:6}" ]] || fail "the hybrid on other devices gives $two, wanted $one"

# Mistakes are told with what to do.
flow() { # TEXT…: a flow of these lines
  printf '%s\n' "$@" >"$scratch/my.toml"
}
flow '[[node]]' 'name = "hen"' 'model = "same"' '[[node]]' 'name = "egg"' 'model = "same"' \
  '[[chain]]' 'nodes = ["hen", "egg", "hen"]'
expect 2 'suggestion: ' "$yoke" flow check "$scratch/my.toml"
expect 2 '"circle":\[\{"queue":"[^"]+","operation":"hen","why":"waits for a value of .egg.y -> hen.x. from"\},' \
  "$yoke" flow check "$scratch/my.toml" --json
expect 2 "hen.*waits for a value of 'egg.y -> hen.x'" "$yoke" flow run "$scratch/my.toml"
flow '[[node]]' 'name = "a"' 'model = "samee"'
expect 2 "'samee' is no word.*; did you mean same" "$yoke" flow check "$scratch/my.toml"
flow '[[node]]' 'name = "a"' 'model = "same"' '[[edge]]' 'to = "a"'
expect 2 "edge: wanted from and to, got '' and 'a'" "$yoke" flow check "$scratch/my.toml"
flow '[[node]]' 'name = "a"' 'modell = "same"'
expect 2 'did you mean node.model' "$yoke" flow check "$scratch/my.toml"
expect 2 'cannot read' "$yoke" flow run "$scratch/nowhere.toml"
expect 2 "give each as --input 'a=" "$yoke" flow run "$examples/loop.toml"
expect 2 'is no number' "$yoke" flow run "$examples/loop.toml" --input 'a=x'
expect 2 "takes no inputs" "$yoke" flow run "$examples/chain.toml" --input a=1
expect 2 "rows of different lengths" "$yoke" flow run "$examples/loop.toml" --input "a=1,2;3"
expect 2 "flow.rounds" "$yoke" flow run "$examples/chain.toml" --rounds -1
expect 2 "flow.rounds" "$yoke" flow run "$examples/chain.toml" --rounds 0
expect 2 "wanted NAME=NUMBERS with a name of a" "$yoke" flow run "$examples/loop.toml" --input b=1
expect 2 "given twice" "$yoke" flow run "$examples/loop.toml" --input a=1 --input a=2
expect 1 "no folder to write into" "$yoke" flow run "$examples/chain.toml" --save "$examples/chain.toml"
expect 2 "no node of the flow is trained" "$yoke" flow run "$examples/loop.toml" --input a=1 --save "$scratch/nothing"
expect 0 'cross_entropy' "$yoke" flow words
diff <("$yoke" flow keys) <(sed -n '/^```$/,/^```$/p' "$YOKE_SOURCE/docs/reference/flow.md" | sed '1d;$d') ||
  fail "docs/reference/flow.md is not what yoke flow keys prints"

# A branch gives what the model that it picks gives alone.
for picked in 'small 0.1,0.2;0.3,0.1 0 mlp:2,8,3' 'large 1,2;3,4 1 mlp:2,256,256,3'; do
  read -r node rows ran model <<<"$picked"
  flow '[[input]]' 'port = "x:FP32[b,2]"' "to = [\"$node\"]" '[[node]]' "name = \"$node\"" "model = \"$model\"" \
    '[[output]]' 'port = "scores"' "from = \"$node\""
  alone=$("$yoke" flow run "$scratch/my.toml" --input "x=$rows" 2>/dev/null | grep '^scores = FP32\[2,3\] ') || fail "$node alone"
  expect 0 "^large_ran = FP32\\[\\] $ran" "$yoke" flow run "$examples/branch.toml" --input "x=$rows"
  grep -qxF -- "$alone" "$scratch/output" || fail "the branch gave $(cat "$scratch/output"), wanted '$alone' as $node alone"
done

# What was trained is kept, and begun with.
"$yoke" flow run "$examples/chain.toml" --save "$scratch/kept" >/dev/null 2>&1
sed "s|^lr = 0.5|lr = 0.5\nweights = \"$scratch/kept/NODE.safetensors\"|" "$examples/chain.toml" |
  awk '/^name = /{node = $3; gsub(/"/, "", node)} {sub(/NODE/, node); print}' >"$scratch/again.toml"
above 0.1 "$("$yoke" flow run "$scratch/again.toml" --rounds 1 2>/dev/null | sed -n 's/.*loss //p')" "the loss of weights that were kept"

"$yoke" flow run "$examples/mutual_copies.toml" --rounds 1 --save "$scratch/copied" >/dev/null 2>&1
[[ $(ls "$scratch/copied") == $'ann.safetensors\nbob.safetensors' ]] || fail "weights of copies are kept: $(ls "$scratch/copied")"

# A signal ends it after a round, and what was learnt is kept.
"$yoke" flow run "$examples/chain.toml" --rounds 100000000 --save "$scratch/stopped" >"$scratch/log" 2>"$scratch/why" &
run=$!
for _ in {1..600}; do grep -q . "$scratch/log" "$scratch/why" 2>/dev/null && break || sleep 0.1; done
sleep 1
kill -INT "$run"
code=0
wait "$run" || code=$?
[[ $code == 130 ]] || fail "flow run after SIGINT: exit code $code, wanted 130: $(cat "$scratch/why")"
grep -q 'ended by signal 2 after round [1-9].*; the weights are saved' "$scratch/why" || fail "flow run after SIGINT said: $(cat "$scratch/why")"
[[ -s $scratch/stopped/front.safetensors ]] || fail "flow run after SIGINT saved nothing: $(ls "$scratch/stopped")"

# The same in the middle of a run, with its trace; and before the first round, while the models are opened.
"$yoke" flow run "$examples/chain.toml" --rounds 100000000 --save "$scratch/ended" --trace "$scratch/ended" >"$scratch/log" 2>"$scratch/why" flow.log_every=1 &
run=$!
for _ in {1..600}; do grep -q 'round 3 ' "$scratch/log" && break || sleep 0.1; done
kill -TERM "$run"
hears_signals() { # until SIGTERM, 15, is caught
  local caught
  for _ in {1..6000}; do
    # Before exec it is still this shell, which catches signals of its own.
    if [[ $(readlink "/proc/$run/exe") == */yoke ]]; then
      caught=$(awk '/^SigCgt/ {print $2}' "/proc/$run/status" 2>/dev/null) || true
      ((0x${caught:-0} & 0x4000)) && return
    fi
    sleep 0.01
  done
  fail "flow run heard no signals in a minute: $(cat "$scratch/why")"
}
ends_with() { # CODE PATTERN: $run, which said so in $scratch/why
  local code=0
  wait "$run" || code=$?
  [[ $code == "$1" ]] || fail "flow run after a signal: exit code $code, wanted $1: $(cat "$scratch/why")"
  grep -qE -- "$2" "$scratch/why" || fail "flow run after a signal said $(cat "$scratch/why"), wanted $2"
}
ends_with 143 'ended by signal 15 after round [1-9].*; the weights are saved'
[[ -s $scratch/ended/back.safetensors && -s $scratch/ended/trace.json ]] || fail "flow run after SIGTERM wrote $(ls "$scratch/ended")"
expect 0 'bottleneck: ' "$yoke" trace "$scratch/ended"
flow '[flow]' 'rounds = 5' '[[node]]' 'name = "data"' 'model = "spirals:points=20000000"' '[[node]]' 'name = "net"' \
  'model = "mlp:2,3"' 'role = "train"' '[[node]]' 'name = "loss"' 'model = "cross_entropy"' '[[chain]]' \
  'nodes = ["data", "net", "loss"]' '[[edge]]' 'from = "data.label"' 'to = "loss.label"' '[[output]]' 'port = "y"' 'from = "net"'
"$yoke" flow run "$scratch/my.toml" --save "$scratch/early" >"$scratch/log" 2>"$scratch/why" &
run=$!
hears_signals
kill -TERM "$run"
ends_with 143 'ended by signal 15 before the first round; the weights are saved'
[[ -s $scratch/early/net.safetensors ]] || fail "flow run after an early SIGTERM saved nothing: $(ls "$scratch/early")"

# The one round of a flow with inputs is finished; SIGUSR2 shows who is in what.
flow '[[input]]' 'port = "x:FP32[1,2]"' '[[node]]' 'name = "nap"' 'model = "sleep:ms=3000"' '[[chain]]' 'nodes = ["x", "nap"]' \
  '[[output]]' 'port = "y"' 'from = "nap"'
"$yoke" flow run "$scratch/my.toml" --input x=1,2 --trace "$scratch/napped" >"$scratch/log" 2>"$scratch/why" &
run=$!
hears_signals
for _ in {1..600}; do
  kill -USR2 "$run"
  sleep 0.1
  grep -qE ' nap #0 .*in flight' "$scratch/why" && break
done
kill -INT "$run"
ends_with 130 'ended by signal 2 after round 1$'
grep -q '^y = FP32\[1,2\] 1 2' "$scratch/log" || fail "flow run with inputs after SIGINT gave $(cat "$scratch/log")"
[[ -s $scratch/napped/trace.json ]] || fail "flow run with inputs after SIGINT wrote no trace"

# A node that does not come back is named.
sed -i 's/ms=3000/ms=600000/; 1i [flow]\ntimeout_s = 0.5' "$scratch/my.toml"
expect 3 "has been in 'nap' of round 0" "$yoke" flow run "$scratch/my.toml" --input x=1,2

# What is slow is named: a loader, a node, an edge.
slow() { # PATTERN LOADER_MS NODE_MS
  flow '[flow]' 'devices = "cpu:2"' 'rounds = 30' '[[node]]' 'name = "load"' 'model = "noise:batch=4,dim=4"' 'device = 0' \
    '[[node]]' 'name = "read"' "model = \"sleep:ms=$2\"" 'device = 0' '[[node]]' 'name = "work"' "model = \"sleep:ms=$3\"" \
    'device = 1' '[[chain]]' 'nodes = ["load", "read", "work"]'
  "$yoke" flow run "$scratch/my.toml" --trace "$scratch/traced" >/dev/null 2>&1
  expect 0 "bottleneck: $1" "$yoke" trace "$scratch/traced"
}
slow "node 'work' on cpu#1" 1 6
slow "node 'read' on cpu#0" 6 1
flow '[flow]' 'devices = "cpu:2"' 'rounds = 30' '[[node]]' 'name = "load"' 'model = "noise:batch=20000,dim=64"' 'device = 0' \
  '[[node]]' 'name = "work"' 'model = "same"' 'device = 1' '[[chain]]' 'nodes = ["load", "work"]'
"$yoke" flow run "$scratch/my.toml" --trace "$scratch/traced" >/dev/null 2>&1
expect 0 "bottleneck: loader 'load' on cpu#0" "$yoke" trace "$scratch/traced"
expect 0 '"bottleneck":"loader' "$yoke" trace "$scratch/traced" --json
# The loader has made its points before the first round and the node does nothing: what is left is the way of 15 MiB.
flow '[flow]' 'devices = "cpu:2"' 'rounds = 30' '[[node]]' 'name = "load"' 'model = "spirals_held_out:points=2000000"' 'device = 0' \
  '[[node]]' 'name = "work"' 'model = "same"' 'device = 1' '[[chain]]' 'nodes = ["load", "work"]' 'transport = "host"'
"$yoke" flow run "$scratch/my.toml" --trace "$scratch/traced" >/dev/null 2>&1
expect 0 "bottleneck: edge 'load.x -> work.x': .* moved, 15.3 MiB each" "$yoke" trace "$scratch/traced"

# What running a flow costs is measured, and its results are checked while it is; a short form.
strict=
grep -q '^CMAKE_BUILD_TYPE:[A-Z]*=Rel' "$YOKE_BUILD/CMakeCache.txt" && strict=1
for what in overhead handover; do # a tenth of what is allowed on an idle machine: the others are told, not judged
  "$yoke" flow bench "$what" --seconds 1 --json >"$scratch/bench" 2>"$scratch/why" ||
    { [[ -z $strict ]] && grep -q 'missed their targets' "$scratch/why"; } || fail "flow bench $what: $(cat "$scratch/bench" "$scratch/why")"
  grep -qE "\"bench\":\"$what\".*\"got\":[0-9.e-]+,\"unit\":\"us\"" "$scratch/bench" || fail "flow bench $what: $(cat "$scratch/bench")"
done
for what in ensemble real chain peers; do # peers: where there is a Python with torch
  measure "$yoke" flow bench "$what" --seconds 1
done
expect 2 "did you mean overhead" "$yoke" flow bench overhed

# A flow of one's own, on its devices and on one; with inputs; that learns; that has one place.
flow '[flow]' 'devices = "cpu:2"' '[[input]]' 'port = "x:FP32[b,2]"' '[[node]]' 'name = "one"' 'model = "sleep:ms=5"' 'device = 0' \
  '[[node]]' 'name = "other"' 'model = "sleep:ms=5"' 'device = 1' '[[chain]]' 'nodes = ["x", "one", "other"]' '[[output]]' \
  'port = "y"' 'from = "other"'
"$yoke" flow bench "$scratch/my.toml" flow.name=naps --input x=1,2 --seconds 1 --json >"$scratch/bench" 2>"$scratch/why" ||
  fail "flow bench of a file: $(cat "$scratch/why")"
"$python" - "$scratch/bench" <<'PY' || fail "flow bench of a file gave $(cat "$scratch/bench")"
import json, sys
line = json.load(open(sys.argv[1]))
assert line["what"] == "naps" and line["unit"] == "rounds/s" and line["hand_overs"] == 1 and line["operations"] == 4
# Naps of 5 ms last as long or longer: 200 rounds/s on two devices, 100 on one.
assert line["one_device_per_s"] <= 100 and line["one_device_per_s"] < line["got"] <= 200
assert line["of_one_device"] > 1.3 and "node '" in line["bottleneck"]
PY
expect 0 'of_one_device .* bottleneck: ' "$yoke" flow bench "$examples/chain.toml" --seconds 1
sed -i '/^device = /d' "$scratch/my.toml"
expect 0 'the flow has one place' "$yoke" flow bench "$scratch/my.toml" flow.devices=cpu:1 --input x=1,2 --seconds 1
expect 2 "give each as --input 'a=" "$yoke" flow bench "$examples/loop.toml"
expect 2 'cannot read' "$yoke" flow bench "$scratch/nowhere.toml"
expect 2 "it is for a flow's file" "$yoke" flow bench overhead --input x=1

# TorchScript files in a flow, trained and used; a compiled package stops gradients by its name.
"$python" "$YOKE_SOURCE/tests/flow_models.py" "$scratch" >"$scratch/models.log" 2>&1 || { cat "$scratch/models.log" && fail "the models"; }
flow '[flow]' 'devices = "cpu:2"' 'rounds = 300' '[[node]]' 'name = "data"' 'model = "spirals"' '[[node]]' 'name = "net"' \
  'model = "net.pt"' 'role = "train"' 'lr = 0.5' '[[node]]' 'name = "loss"' 'model = "cross_entropy"' 'device = 1' \
  '[[chain]]' 'nodes = ["data", "net", "loss"]' '[[edge]]' 'from = "data.label"' 'to = "loss.label"'
above 0.8 "$(loss "$scratch/my.toml" loss)" "the loss of a TorchScript file in a flow"
flow '[[node]]' 'name = "data"' 'model = "spirals"' '[[node]]' 'name = "front"' 'model = "mlp:2,2"' 'role = "train"' \
  '[[node]]' 'name = "fixed"' 'model = "net.pt2"' 'input = ["x:FP32[-1,2]"]' '[[node]]' 'name = "loss"' \
  'model = "cross_entropy"' '[[chain]]' 'nodes = ["data", "front", "fixed", "loss"]' '[[edge]]' 'from = "data.label"' \
  'to = "loss.label"'
expect 2 "node 'fixed' is in the path of gradients from 'front' .*net.pt2.* compiled" "$yoke" flow check "$scratch/my.toml"

# A run of `yoke train` is a model like any other.
"$yoke" train "$YOKE_SOURCE/examples/train/first.toml" train.steps=2 data.path="$YOKE_SOURCE/docs" run.dir="$scratch" run.name=words >/dev/null 2>&1 || fail "yoke train"
flow '[[input]]' 'port = "x:INT64[b,t]"' '[[node]]' 'name = "words"' 'model = "words"' '[[node]]' 'name = "next"' \
  'model = "argmax"' '[[chain]]' 'nodes = ["x", "words", "next"]' '[[output]]' 'port = "y"' 'from = "next"'
expect 0 '^y = INT64\[1,4\] ' "$yoke" flow run "$scratch/my.toml" --input 'x=10,20,30,40'

# Of a dictionary an output is what bears its name.
both() { # NAME NAME
  flow '[[input]]' 'port = "x:FP32[1,2]"' 'to = ["both.x"]' '[[node]]' 'name = "both"' "model = \"$scratch/both.pt\"" 'input = ["x"]' "output = [\"$1\", \"$2\"]" \
    '[[output]]' "port = \"$1\"" "from = \"both.$1\"" '[[output]]' "port = \"$2\"" "from = \"both.$2\""
}
both low high
expect 0 '^low = FP32\[1,2\] -99 -98' "$yoke" flow run "$scratch/my.toml" --input x=1,2
expect 0 '^high = FP32\[1,2\] 101 102' "$yoke" flow run "$scratch/my.toml" --input x=1,2
flow '[[input]]' 'port = "x:FP32[1,2]"' 'to = ["nested.x"]' '[[node]]' 'name = "nested"' "model = \"$scratch/nested.pt\"" 'input = ["x"]' \
  'output = ["first", "second", "third"]' '[[output]]' 'port = "third"' 'from = "nested.third"'
expect 0 '^third = FP32\[1,2\] 3 4' "$yoke" flow run "$scratch/my.toml" --input x=1,2
both low middle
expect 2 "the model gives high, low, and no 'middle'" "$yoke" flow run "$scratch/my.toml" --input x=1,2

# A flow that is served answers like one model, tells what its nodes did, and survives a request that it cannot take.
mkdir "$scratch/pair"
cp "$scratch/net.pt" "$scratch/net.pt2" "$scratch/pair"
cat >"$scratch/pair/flow.toml" <<'TOML'
[flow]
devices = "cpu:2"
[[input]]
port = "x:FP32[b,2]"
[[node]]
name = "script"
model = "net.pt"
device = 0
[[node]]
name = "package"
model = "net.pt2"
input = ["x:FP32[b,2]"]
device = 1
[[ensemble]]
name = "mean"
input = "x"
nodes = ["script", "package"]
[[output]]
port = "y:FP32[b,3]"
from = "mean"
TOML
(cd "$scratch" && "$yoke" serve inspect "$scratch/pair") >"$scratch/inspected" 2>&1 || { cat "$scratch/inspected" && fail "inspect"; }
grep -q 'yoke_flow' "$scratch/inspected" || fail "inspect does not tell that it is a flow: $(cat "$scratch/inspected")"
expect 2 "a flow, which names its own devices .cpu:2., got devices = cpu:4" "$yoke" serve "$scratch/pair" --devices cpu:4
start_server "$scratch/pair/flow.toml" serve.http=127.0.0.1:0 serve.grpc= serve.metrics=
wanted=$("$python" -c "
import torch
print(','.join(f'{v:.3f}' for v in torch.jit.load('$scratch/net.pt')(torch.tensor([[1.,2.],[3.,4.]])).flatten().tolist()))")
got=$(ask /v2/models/pair/infer -d '{"inputs":[{"name":"x","shape":[2,2],"datatype":"FP32","data":[1,2,3,4]}]}' |
  "$python" -c 'import json,sys; sys.stdin.readline(); print(",".join(f"{v:.3f}" for v in json.load(sys.stdin)["outputs"][0]["data"]))')
[[ $got == "$wanted" ]] || fail "the served flow gave $got, wanted $wanted"
expect_answer 400 'wanted FP32\[-1,2\]' /v2/models/pair/infer -d '{"inputs":[{"name":"x","shape":[1,3],"datatype":"FP32","data":[1,2,3]}]}'
expect_answer 200 '"yoke_nodes":\[\{"replica":0,"nodes":\[.*"name":"script".*"compute_ns":[1-9]' /v2/models/pair/stats
stop_server

# A node that throws: the request is answered, and the next one is served.
mkdir "$scratch/picky"
cp "$scratch/picky.pt" "$scratch/picky"
cat >"$scratch/picky/flow.toml" <<'TOML'
[flow]
devices = "cpu:2"
[[input]]
port = "x:FP32[b,2]"
[[node]]
name = "first"
model = "same"
device = 0
[[node]]
name = "picky"
model = "picky.pt"
device = 1
[[chain]]
nodes = ["x", "first", "picky"]
[[output]]
port = "y:FP32[b,2]"
from = "picky"
TOML
expect 1 "node 'picky' failed in round 0: .*too large" "$yoke" flow run "$scratch/picky" --input x=1,10000000
expect 0 '^\{"y":\{"shape":\[1?,?2\],"data":\[2.0,4.0\]\}\}$' "$yoke" flow run "$scratch/picky" --input x=1,2 --json
expect 0 '"period_s":.*"peak_bytes":.*"weights_bytes":' "$yoke" flow show "$scratch/picky" --json
start_server "$scratch/picky" serve.http=127.0.0.1:0 serve.grpc= serve.metrics=
for _ in 1 2 3; do
  expect_answer 500 "node 'picky' failed in round .*too large" /v2/models/picky/infer \
    -d '{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,10000000]}]}'
  expect_answer 200 '"data":\[2(.0)?,4' /v2/models/picky/infer -d '{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,2]}]}'
done
stop_server

# Copies over which the rows of a batch are cut: also of one row.
mkdir "$scratch/copies"
cat >"$scratch/copies/flow.toml" <<'TOML'
[flow]
devices = "cpu:2"
[[input]]
port = "x:FP32[b,2]"
to = ["net"]
[[node]]
name = "net"
model = "scale:by=3"
replicas = [0, 1]
[[output]]
port = "y:FP32[b,2]"
from = "net"
TOML
start_server "$scratch/copies" serve.http=127.0.0.1:0 serve.grpc= serve.metrics=
expect_answer 200 '"data":\[3(.0)?,6' /v2/models/copies/infer -d '{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,2]}]}'
expect_answer 200 '"data":\[3(.0)?,6(.0)?,9(.0)?,12(.0)?,15' /v2/models/copies/infer \
  -d '{"inputs":[{"name":"x","shape":[3,2],"datatype":"FP32","data":[1,2,3,4,5,6]}]}'
expect_answer 200 '"max_batch_size":32' /v2/models/copies/config
stop_server

# A node that never comes back: its replica is replaced, and the next request is served.
sed 's/picky/hangs/g; s/^devices = "cpu:2"/&\ntimeout_s = 0.3/' "$scratch/picky/flow.toml" >"$scratch/hangs.toml"
mkdir "$scratch/hangs"
mv "$scratch/hangs.toml" "$scratch/hangs/flow.toml"
cp "$scratch/hangs.pt" "$scratch/hangs"
start_server "$scratch/hangs" serve.http=127.0.0.1:0 serve.grpc= serve.metrics=
expect_answer 500 '"error":' /v2/models/hangs/infer -d '{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,10000000]}]}'
for _ in {1..100}; do
  [[ $(ask /v2/models/hangs/infer -d '{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,2]}]}') == 200* ]] && break
  sleep 0.1
done
expect_answer 200 '"data":\[1(.0)?,2' /v2/models/hangs/infer -d '{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,2]}]}'
stop_server

# What a round leaves for the next would be another client's.
mkdir "$scratch/remembers"
cat >"$scratch/remembers/flow.toml" <<'TOML'
[[input]]
port = "x:FP32[1,2]"
to = ["first.x"]
[[node]]
name = "first"
model = "same"
[[node]]
name = "last"
model = "same"
[[edge]]
from = "first"
to = "last.x"
staleness = 1
initial_shape = [1, 2]
[[output]]
port = "y:FP32[1,2]"
from = "last"
TOML
expect 2 "keeps values from round to round" "$yoke" serve "$scratch/remembers" serve.http=127.0.0.1:0 serve.grpc= serve.metrics=
echo "passed"
