#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A run that is killed again and again, at any moment, ends as one that was never touched: the same losses and the same
# weights, bit by bit. Every checkpoint that is ever seen is whole.
. "$(dirname "${BASH_SOURCE[0]}")/processes.sh"
own_namespaces
. "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
trap 'kill -KILL "${pids[@]}" 2>/dev/null || true; rm -rf "$scratch"' EXIT

yoke=$YOKE_BUILD/yoke
kills=${YOKE_TEST_KILLS:-50}
RANDOM=7
config=("$YOKE_SOURCE/examples/train/data.toml" data.kind=synthetic model.layers=2 model.dim=32 train.steps=$((30 * kills))
  checkpoint.every=3 checkpoint.keep=3 run.dir="$scratch/runs" train.log_every=1000 --devices cpu:2)
export OMP_NUM_THREADS=1

begin=$EPOCHREALTIME
timeout 300 "$yoke" train "${config[@]}" run.name=short train.steps=1 train.warmup=0 >"$scratch/short"
startup=$(python3 -c "print($EPOCHREALTIME - $begin)")
timeout 300 "$yoke" train "${config[@]}" run.name=whole >"$scratch/whole"
done_kills=0
share=100 # of the time to start, in percent: less where the runs are ahead of 20 steps a kill, however fast the host is now
while ((done_kills < kills)); do
  # Some while it starts; most in the middle of steps and of checkpoints, of which each run gets a few.
  pause=$(python3 -c "print($startup * $share / 100 * (0.5 + $RANDOM / 32767))")
  background killed "$yoke" train "${config[@]}" run.name=killed --resume
  sleep "$pause"
  kill -KILL "${pids[killed]}" 2>/dev/null || true
  wait "${pids[killed]}" 2>/dev/null && code=0 || code=$?
  unset 'pids[killed]'
  [[ $code == 137 || $code == 0 ]] || fail "exit $code: $(cat "$scratch/killed")"
  ((code == 0)) && break
  done_kills=$((done_kills + 1))
  saved=("$scratch"/runs/killed/checkpoints/step-????????)
  step=${saved[-1]##*step-}
  [[ $step =~ ^[0-9]+$ ]] || step=0
  share=$((10#$step > 20 * done_kills ? share * 9 / 10 : share < 400 ? share * 11 / 10 + 1 : share))
  if [[ -d $scratch/runs/killed/checkpoints ]] && ((done_kills % 10 == 0)) && compgen -G "$scratch/runs/killed/checkpoints/step-*" >/dev/null; then
    "$yoke" checkpoint verify "$scratch/runs/killed" >"$scratch/verify" || fail "a checkpoint is damaged: $(cat "$scratch/verify")"
  fi
done
timeout 300 "$yoke" train "${config[@]}" run.name=killed --resume >"$scratch/last" 2>&1 || fail "the last one: $(cat "$scratch/last")"
"$yoke" checkpoint diff "$scratch/runs/whole" "$scratch/runs/killed" || fail "the weights are not the same"
python3 - "$scratch/runs/whole/metrics.jsonl" "$scratch/runs/killed/metrics.jsonl" <<'PYTHON' || fail "the losses are not the same"
import json, sys
whole, killed = ([(s["step"], s["loss"], s["grad_norm"], s["lr"]) for s in map(json.loads, open(path))] for path in sys.argv[1:])
assert [s[0] for s in whole] == list(range(1, len(whole) + 1)), "steps are missing"
for a, b in zip(whole, killed):
    assert a == b, (a, b)
assert len(whole) == len(killed), (len(whole), len(killed))
PYTHON
((done_kills >= kills * 4 / 5)) || fail "it was over after $done_kills of $kills kills"
echo "$done_kills kills, and the same losses and weights"
