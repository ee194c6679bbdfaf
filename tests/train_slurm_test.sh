#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# `yoke train` under a real srun: the losses of threads, and a run that is stopped through Slurm and goes on.
. "$(dirname "${BASH_SOURCE[0]}")/processes.sh"
own_namespaces
. "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
. "$(dirname "${BASH_SOURCE[0]}")/slurm.sh"
trap 'kill -KILL "${pids[@]}" 2>/dev/null || true; slurm_down; rm -rf "$scratch"' EXIT

[[ -n ${YOKE_OWN_NAMESPACES:-} ]] || { echo "skipped: srun needs namespaces of our own" && exit 77; }
type -P srun >/dev/null && type -P slurmctld slurmd munged >/dev/null || { echo "skipped: srun is not installed" && exit 77; }
yoke=$YOKE_BUILD/yoke
runs=$scratch/runs
cd "$YOKE_SOURCE"
# shellcheck disable=SC2086 # the names of variables; a launcher may have started this script too
unset ${!SLURM_@} ${!OMPI_@} ${!PMI@} ${!TORCHELASTIC_@} RANK WORLD_SIZE LOCAL_RANK YOKE_PORT YOKE_ADDRESS
export OMP_NUM_THREADS=1
# The rate does not depend on the number of steps: a run that was stopped can be compared with a shorter one.
train=("$yoke" train examples/train/data.toml run.dir="$runs" train.lr_schedule=constant train.log_every=1)

same_losses() { # NAME NAME STEPS
  python3 - "$runs/$1/metrics.jsonl" "$runs/$2/metrics.jsonl" "$3" <<'PYTHON' || fail "$1 and $2: other losses"
import json, sys
one, two = ([json.loads(line) for line in open(path)] for path in sys.argv[1:3])
steps = list(range(1, int(sys.argv[3]) + 1))
for path, lines in zip(sys.argv[1:], (one, two)):
    assert [line["step"] for line in lines] == steps, f"{path}: steps {[line['step'] for line in lines]}"
worst = max(abs(a["loss"] - b["loss"]) for a, b in zip(one, two))
print(f"{len(steps)} steps to a loss of {one[-1]['loss']:.4f}, at most {worst:.1e} apart")
assert worst < 1e-6
PYTHON
}

saved_step() { # of the newest checkpoint of run NAME
  local path
  path=$(printf '%s\n' "$runs/$1"/checkpoints/step-* | tail -n 1)
  echo $((10#${path##*-}))
}

# Starts a run that would go on for hours, and lets Slurm stop it.
stop_with() { # SCANCEL'S-OPTION CODE ARGUMENT…
  background stop srun -n2 -J stop "${train[@]}" --devices cpu:1 run.name=stop train.steps=100000 "${@:3}"
  await stop '^step +[0-9]+/' 30
  scancel "$1" --name=stop
  finish stop "$2" 20
  says stop '^stopped; the model is in .*; the same command with --resume goes on$'
  expect 0 ': good$' "$yoke" checkpoint verify "$runs/stop"
}

section "a private Slurm"
known_hosts 127.0.0.1 "$(hostname)" 127.0.0.1 yoke-node1 127.0.0.1 yoke-node2 # a job may get either
slurm_up

section "two tasks, and two threads"
background tasks srun -n2 "${train[@]}" --devices cpu:1 run.name=tasks train.steps=10
finish tasks 0 60
says tasks '^plan: pp 1 x dp 2 x tp 1,'
expect 0 '^step 10/10 ' timeout 60 "${train[@]}" --devices cpu:2 run.name=threads train.steps=10
same_losses tasks threads 10

section "stopped by SIGUSR1"
stop_with --signal=USR1 85
first=$(saved_step stop)

section "goes on, and is cancelled" # SIGTERM, and SIGKILL 30 s later
stop_with --quiet 143 --resume
says stop "^goes on after step $first\$"
second=$(saved_step stop)
((second > first)) || fail "stopped after step $first and again after $second"

section "goes on to the end, on two nodes"
steps=$((second + 5))
background stop srun -N2 -n2 "${train[@]}" --devices cpu:1 run.name=stop train.steps=$steps --resume
finish stop 0 60
says stop "^goes on after step $second\$"
says stop "^step $steps/$steps "
expect 0 "^step $steps/$steps " timeout 60 "${train[@]}" --devices cpu:2 run.name=whole train.steps=$steps
same_losses stop whole $steps
section "done"
