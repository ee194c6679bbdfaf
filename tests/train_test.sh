#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# `yoke train` and `yoke checkpoint` as users type them: configs, strategies, signals, launchers, and the programs of
# others that read what is written.
. "$(dirname "${BASH_SOURCE[0]}")/processes.sh"
own_namespaces
. "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
trap 'kill -KILL "${pids[@]}" 2>/dev/null || true; rm -rf "$scratch"' EXIT

yoke=$YOKE_BUILD/yoke
runs=$scratch/runs
cd "$YOKE_SOURCE"
# shellcheck disable=SC2086 # the names of variables; a launcher may have started this script too
unset ${!SLURM_@} ${!OMPI_@} ${!PMI@} ${!TORCHELASTIC_@} RANK WORLD_SIZE LOCAL_RANK YOKE_PORT YOKE_ADDRESS
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
export OMP_NUM_THREADS=1

section "what a user reads"
expect 0 '^dim = 64 ' "$yoke" train examples/train/data.toml --dry-run --devices cpu:4 run.dir="$runs"
expect 0 '^plan: pp 1 x dp 4 x tp 1, ZeRO 0; a step has 16 samples: 4 x 1 passes of 4$' \
  "$yoke" train examples/train/data.toml --dry-run --devices cpu:4 run.dir="$runs"
[[ ! -e $runs ]] || fail "--dry-run has made a folder"
expect 0 '^  stage 1  \[ 4:cpu 5:cpu \] \[ 6:cpu 7:cpu \]' "$yoke" train examples/train/mix.toml --dry-run --devices cpu:8
expect 0 '^train.lr  *= 0.001 ' "$yoke" train --keys
"$yoke" train --keys | diff - <(sed -n '/^```$/,/^```$/p' docs/reference/config.md | sed '1d;$d') ||
  fail "docs/reference/config.md is not what yoke train --keys prints"
expect 2 'train.stepps.*train.steps' "$yoke" train examples/train/data.toml train.stepps=3
expect 2 'x 3 = 3 ranks, and run.devices gives 4|there are 4' "$yoke" train examples/train/data.toml plan=1x1x3 --devices cpu:4
expect 2 'train.batch = 16 samples cannot be cut over dp = 3' "$yoke" train examples/train/data.toml --devices cpu:3
expect 2 "data.path: there is no 'nowhere'" "$yoke" train examples/train/data.toml data.path=nowhere
expect 2 "cannot read 'no.toml'" "$yoke" train no.toml

section "the same losses under every strategy"
for name in data zero3 tensor pipeline layer; do
  timeout 60 "$yoke" train examples/train/$name.toml --devices cpu:4 run.dir="$runs" >"$scratch/$name" || fail "$(cat "$scratch/$name")"
done
timeout 60 "$yoke" train examples/train/mix.toml --devices cpu:8 run.dir="$runs" >"$scratch/mix" || fail "$(cat "$scratch/mix")"
python3 - "$runs" <<'PYTHON' || fail "the losses are not the same"
import json, sys
curves = {name: [json.loads(line) for line in open(f"{sys.argv[1]}/{name}/metrics.jsonl")]
          for name in ("data", "zero3", "tensor", "pipeline", "layer", "mix")}
for name, steps in curves.items():
    assert len(steps) == 20 and set(steps[0]) == {"step", "loss", "grad_norm", "lr", "tokens_per_s", "ms", "memory_mb"}, steps[0]
    worst = max(abs(a["loss"] - b["loss"]) for a, b in zip(steps, curves["data"]))
    print(f"{name}: from {steps[0]['loss']:.4f} to {steps[-1]['loss']:.4f}, at most {worst:.1e} from data")
    assert worst < 2e-5, name
assert curves["data"][-1]["loss"] < curves["data"][0]["loss"] - 1
PYTHON

section "a run that is there"
expect 2 "step-00000020' is there: --resume goes on from it" "$yoke" train examples/train/data.toml run.dir="$runs"
expect 0 '^goes on after step 20$' "$yoke" train examples/train/data.toml run.dir="$runs" train.steps=22 plan=pipeline --devices cpu:2 --resume

section "checkpoints, and who else reads them"
expect 0 '^step  *22 ' "$yoke" checkpoint ls "$runs/data"
expect 0 ': good$' "$yoke" checkpoint verify "$runs/mix"
expect 0 '^model/1.attention.qkv.weight .*F32 .*\[192, 64\]' "$yoke" checkpoint show "$runs/mix"
expect 0 'tensors of step 20' "$yoke" checkpoint export "$runs/mix" "$scratch/model.safetensors" --dtype BF16
expect 0 'tensors in' "$yoke" checkpoint import "$scratch/model.safetensors" "$runs/tuned/checkpoints"
expect 0 '^step 1/1 ' "$yoke" train examples/train/data.toml run.dir="$runs" run.name=tuned train.steps=1 train.warmup=0 --resume
expect 1 'up to .* apart' "$yoke" checkpoint diff "$runs/mix" "$runs/tensor"
expect 0 'the same, bit by bit' "$yoke" checkpoint diff "$runs/mix" "$runs/mix"
cp -r "$runs/mix" "$scratch/damaged"
file=$(echo "$scratch"/damaged/checkpoints/*/rank-00003.safetensors)
printf x | dd of="$file" bs=1 seek=$(($(stat -c %s "$file") - 5)) conv=notrunc status=none
expect 1 'rank-00003.safetensors has other bytes' "$yoke" checkpoint verify "$scratch/damaged"
expect 2 'is no checkpoint, and no folder' "$yoke" checkpoint ls "$scratch"
reader=$YOKE_SOURCE/.deps/readers/bin/python
if "$reader" -c 'import ml_dtypes, safetensors, tensorboard' 2>/dev/null; then
  "$reader" - "$runs" "$scratch/model.safetensors" <<'PYTHON' || fail "other programs read something else"
import glob, json, sys
import ml_dtypes  # numpy learns bfloat16
from safetensors import safe_open
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
runs, exported = sys.argv[1:]
files = sorted(glob.glob(f"{runs}/*/checkpoints/*/*.safetensors"))
count = 0
for path in files:
    with safe_open(path, framework="numpy") as file:
        for name in file.keys():
            file.get_tensor(name)
            count += 1
with safe_open(exported, framework="numpy") as file:
    shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}
assert shapes["1.up.weight"] == [256, 64], shapes
steps = [json.loads(line) for line in open(f"{runs}/mix/metrics.jsonl")]
events = EventAccumulator(f"{runs}/mix")
events.Reload()
seen = events.Scalars("train/loss")
assert [e.step for e in seen] == [s["step"] for s in steps]
assert all(abs(e.value - s["loss"]) < 1e-6 for e, s in zip(seen, steps))
print(f"safetensors read {count} tensors of {len(files)} files, TensorBoard {len(seen)} steps")
PYTHON
else
  echo "not here: the Python packages safetensors and tensorboard"
fi

section "a timeline"
expect 0 '^step 6/6 ' "$yoke" train examples/train/pipeline.toml run.dir="$runs" run.name=traced train.steps=6 run.trace_steps=4,5 --devices cpu:2
expect 0 '^1 .* ms .* % ' "$yoke" trace "$runs/traced"
expect 0 '"rank":0,.*"bubble":0\.' "$yoke" trace "$runs/traced" --json
expect 2 'run.trace_steps=5,8' "$yoke" trace "$runs/data"

section "signals"
long=(examples/train/data.toml data.kind=synthetic model.layers=2 model.dim=32 train.steps=100000 train.log_every=1 run.dir="$runs" --devices cpu:2)
for signal in TERM:143 INT:130 USR1:85; do
  # A background job of a script ignores SIGINT, unless it is told to start anew.
  background "stop" env --default-signal=INT "$yoke" train "${long[@]}" run.name="stop-$signal"
  await stop '^step +5/' 30
  kill -"${signal%:*}" "${pids[stop]}"
  finish stop "${signal#*:}" 20
  says stop '^stopped; the model is in '
  expect 0 ': good$' "$yoke" checkpoint verify "$runs/stop-$signal"
done

# A second one does not wait for the end of a step.
background twice "$yoke" train examples/train/data.toml data.kind=synthetic model.dim=256 model.seq=256 train.batch=80 \
  train.steps=100 run.dir="$runs" run.name=twice --devices cpu:1
await twice '^step +1/' 100
kill -TERM "${pids[twice]}"
sleep 1.2
kill -TERM "${pids[twice]}"
finish twice 143 3
! grep -q '^stopped' "$scratch/twice" || fail "it has saved"

section "started again by a parent"
background again "$yoke" train examples/train/data.toml data.kind=synthetic run.dir="$runs" run.name=again train.steps=600 \
  checkpoint.every=20 run.max_restarts=3 --devices cpu:2
await again '^step +50/' 30
kill -KILL "$(pgrep -P "${pids[again]}")"
finish again 0 60
says again 'was killed by signal 9 .*restart 1 of 3'
# From the newest checkpoint, or the one before where the newest was being written.
awk '/^step / && !from { last = $2 + 0 } /^goes on after step/ { from = $5 }
  END { exit !(from % 20 == 0 && from >= 40 && from > last - 40 && from <= last + 10) }' "$scratch/again" || fail "it goes on from elsewhere: $(cat "$scratch/again")"
says again '^step 600/600 '

# A signal to the whole group, which the run then gets from two sides, is one signal; and two runs cannot have one folder.
background group setsid env --default-signal=INT "$yoke" train "${long[@]}" run.name=group run.max_restarts=3 checkpoint.every=5
await group '^step +5/' 30
expect 2 'another process is saving to .*group' "$yoke" train "${long[@]}" run.name=group --resume
kill -INT -- "-${pids[group]}"
finish group 130 20
says group '^stopped; the model is in '

section "processes started by hand, one of which dies"
YOKE_PORT=$(free_port)
export YOKE_PORT
for rank in 0 1; do
  start dies $rank 2 "$yoke" train "${long[@]:0:${#long[@]}-1}" cpu:1 run.name=dies
done
await dies.0 '^step +5/' 30
kill -KILL "${pids[dies.1]}"
finish dies.0 3 15
says dies.0 'rank 1 .*died'
! grep -q 'stopped; ' "$scratch/dies.0" || fail "a death was taken for a request to stop"
YOKE_ADDRESS=no-such-host.invalid start lost 1 2 "$yoke" train "${long[@]:0:${#long[@]}-1}" cpu:1 run.name=lost run.timeout_s=7
await lost.1 'still on the way to process 0 .*no-such-host.invalid' 15
finish lost.1 3 15
unset YOKE_PORT

small=(examples/train/data.toml run.dir="$runs" --devices cpu:1)
same_as_data() { # NAME
  python3 - "$runs/data/metrics.jsonl" "$runs/$1/metrics.jsonl" <<'PYTHON' || fail "$1: other losses"
import json, sys
one, two = ([json.loads(l)["loss"] for l in open(path)][:20] for path in sys.argv[1:])
assert len(two) == 20 and max(abs(a - b) for a, b in zip(one, two)) < 2e-5
PYTHON
}
torchrun=$YOKE_TORCH/../../../../bin/torchrun
if [[ -x $torchrun ]]; then
  section torchrun
  timeout 100 "$torchrun" --no-python --nproc-per-node 2 "$yoke" train "${small[@]}" run.name=torchrun >"$scratch/out" 2>&1 || fail "$(cat "$scratch/out")"
  same_as_data torchrun
else
  echo "not here: torchrun"
fi
if type -P mpirun >/dev/null; then
  section mpirun
  timeout 100 mpirun -n 2 env YOKE_ADDRESS=127.0.0.1 YOKE_PORT="$(free_port)" "$yoke" train "${small[@]}" run.name=mpirun plan=pipeline >"$scratch/out" 2>&1 || fail "$(cat "$scratch/out")"
  same_as_data mpirun
else
  echo "not here: mpirun"
fi
echo "all is well"
