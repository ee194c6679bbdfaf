#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The world under every launcher that is installed: who meets whom, what a user reads when they cannot meet, how they
# stop when asked to, and that the death of one is told by the others. One that is not here is named and left out.
. "$(dirname "${BASH_SOURCE[0]}")/processes.sh"
own_namespaces
. "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
. "$(dirname "${BASH_SOURCE[0]}")/slurm.sh"
trap 'kill -KILL "${pids[@]}" 2>/dev/null || true; slurm_down; rm -rf "$scratch"' EXIT

world=$YOKE_BUILD/examples/example_02_world
[[ -x $world ]] || { echo "skipped: there is no $world" && exit 77; }
# shellcheck disable=SC2086 # the names of variables; a launcher may have started this script too
unset ${!SLURM_@} ${!OMPI_@} ${!PMI@} ${!TORCHELASTIC_@} RANK WORLD_SIZE LOCAL_RANK YOKE_PORT YOKE_ADDRESS
# Open MPI by itself refuses root, and more processes than cores.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
export OMP_NUM_THREADS=1
any='[1-9][0-9]*'

# What rank 0 has printed.
is_world() { # NAME LAUNCHER RANKS PROCESSES
  says "$1" "^$2: rank 0 of $4,"
  says "$1" "^$3 ranks over shm, sum $(($3 * ($3 - 1) / 2)), processes"
  local distinct
  distinct=$(members "$1" | sort -u | wc -l)
  [[ $distinct == "$4" ]] || fail "$1: $distinct different processes, not $4: $(cat "$scratch/$1")"
}

members() { sed -n 's/.*, processes //p' "$scratch/$1" | tr ' ' '\n'; } # process ids in the order of ranks

# A launcher has started ranks that go on for 20 s; kill rank 1, and the others must name it and be gone soon, though
# the launcher may send them SIGTERM.
dies_with() { # NAME
  local pid victim
  await "$1" 'processes [0-9]' 30
  victim=$(members "$1" | sed -n 2p)
  kill -KILL "$victim"
  finish "$1" "$any" 15
  says "$1" "rank 1 \(host [^,]+, process $victim\).*died"
  ! grep 'asked to stop' "$scratch/$1" || fail "$1: the launcher's signal was taken for a request to stop"
  for pid in $(members "$1"); do
    # One that only waits to be reaped, by whoever is process 1 here, has no program any more.
    ! readlink "/proc/$pid/exe" || fail "$1: process $pid is still there: $(cat "$scratch/$1")"
  done
}

if [[ -n ${YOKE_OWN_NAMESPACES:-} ]]; then
  mount -t tmpfs -o size=16m tmpfs /dev/shm # what containers have is 64 MB, and often less is free
  known_hosts 127.0.0.1 "$(hostname)" 127.0.0.1 yoke-node1
  section "a small /dev/shm"
  expect 0 '"backend":"shm".*"bytes":67108864.*"verified":true' \
    timeout 60 "$YOKE_BUILD/yoke" bench comm --backend shm --sizes 64M --seconds 0.1 --json
  slurm=$(type -P srun >/dev/null && type -P slurmctld slurmd munged >/dev/null && echo yes || echo "not installed")
else
  echo "not here: namespaces of our own, and so the small /dev/shm and the search for what is left behind"
  slurm="needs namespaces of our own"
fi

section "worlds that cannot meet, and wait in the background"
for rank in 0 1; do
  YOKE_PORT=${missing_port:=$(free_port)} start missing $rank 3 "$world"
  YOKE_PORT=${unknown_port:=$(free_port)} YOKE_ADDRESS=no-such-host.invalid start unknown $rank 2 "$world"
done
if [[ $slurm == yes ]]; then
  slurm_up
  background srun_unknown srun -w yoke-node2 -n2 "$world" # a node whose name nobody knows
fi

section "processes started by hand"
YOKE_PORT=$(free_port)
export YOKE_PORT
for rank in 0 1 2; do start plain $rank 3 "$world"; done
for rank in 0 1 2; do finish plain.$rank 0 30; done
is_world plain.0 'YOKE_\* variables' 3 3
for rank in 0 1; do start threads $rank 2 "$world" 2; done
for rank in 0 1; do finish threads.$rank 0 30; done
is_world threads.0 'YOKE_\* variables' 4 2

section "an Indexed Job's environment"
for index in 0 1; do
  JOB_COMPLETION_INDEX=$index HOSTNAME=train-$index YOKE_NUM_NODES=2 YOKE_ADDRESS=127.0.0.1 background pod.$index "$world"
done
for index in 0 1; do finish pod.$index 0 30; done
is_world pod.0 'Kubernetes Job' 2 2

section "asked to stop through one of three"
for rank in 0 1 2; do start stop $rank 3 "$world" 1 2000; done
await stop.0 'processes [0-9]' 30
kill -TERM "${pids[stop.2]}"
for rank in 0 1 2; do finish stop.$rank 0 10; done
says stop.0 '^asked to stop by signal 15$'

section "bad input"
expect 2 '^two launchers disagree: mpirun \(Open MPI\) says rank 0 of 2 .*, but srun says rank 1 of 3 ' \
  env OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 SLURM_PROCID=1 SLURM_STEP_ID=0 SLURM_NTASKS=3 "$world"
[[ $(wc -l <"$scratch/output") == 1 ]] || fail "not one line: $(cat "$scratch/output")"
python3 -c 'import socket, sys, time; s = socket.create_server(("127.0.0.1", int(sys.argv[1]))); print("listens", flush=True); time.sleep(600)' \
  "$YOKE_PORT" >"$scratch/holder" &
pids[holder]=$!
await holder listens 10
start taken 0 2 "$world"
start taken 1 2 "$world" # waits, as its process 0 may be late
finish taken.0 3 10
says taken.0 "cannot listen on 127.0.0.1:$YOKE_PORT: the port is in use.*set YOKE_PORT"
unset YOKE_PORT

torchrun=$YOKE_TORCH/../../../../bin/torchrun
if [[ -x $torchrun ]]; then
  section torchrun
  background torchrun "$torchrun" --no-python --nproc-per-node 3 "$world"
  finish torchrun 0 60
  is_world torchrun torchrun 3 3
  background torchrun "$torchrun" --no-python --nproc-per-node 2 "$world" 2
  finish torchrun 0 60
  is_world torchrun torchrun 4 2
  background torchrun "$torchrun" --no-python --nproc-per-node 3 "$world" 1 2000
  dies_with torchrun
else
  echo "not here: torchrun"
fi

if mpirun --version 2>/dev/null | grep -q 'Open MPI'; then
  section "mpirun (Open MPI)"
  background mpirun mpirun -n 3 "$world"
  finish mpirun 0 30
  is_world mpirun 'mpirun \(Open MPI\)' 3 3
  background mpirun mpirun -n 2 "$world" 2
  finish mpirun 0 30
  is_world mpirun 'mpirun \(Open MPI\)' 4 2
  background mpirun mpirun -n 3 "$world" 1 2000
  dies_with mpirun
else
  echo "not here: Open MPI's mpirun"
fi

if type -P mpiexec.hydra >/dev/null; then
  section "mpiexec (Hydra)" # when one process dies it kills the others at once, and they say nothing
  expect 2 'mpiexec \(PMI\).*set YOKE_PORT' mpiexec.hydra -n 2 "$world"
  YOKE_PORT=$(free_port) background hydra mpiexec.hydra -n 3 "$world"
  finish hydra 0 30
  is_world hydra 'mpiexec \(PMI\)' 3 3
else
  echo "not here: MPICH's mpiexec.hydra"
fi

if [[ $slurm == yes ]]; then
  section srun
  background srun srun -N2 -n4 "$world" # meets at the first node's name
  finish srun 0 30
  is_world srun srun 4 4
  says srun 'node 0 of 2, meets at yoke-node1:'
  YOKE_ADDRESS=127.0.0.1 background srun srun -N2 -n2 "$world" 2
  finish srun 0 30
  is_world srun srun 4 2
  background srun srun -N2 -n4 "$world" 1 2000
  dies_with srun
  background srun srun -N2 -n4 -J stop "$world" 1 2000
  await srun 'processes [0-9]' 30
  scancel --signal=TERM --name=stop
  finish srun 0 10
  says srun '^asked to stop by signal 15$'
else
  echo "not here: srun ($slurm)"
fi

section "worlds that could not meet"
for rank in 0 1; do
  finish missing.$rank 3 45
  says missing.$rank 'waited 30 s for 3 processes .*missing: process 2; here: process 0 \(host .*, process 1 \('
  finish unknown.$rank 3 45
done
says unknown.0 'missing: process 1; here: process 0 \('
says unknown.1 "(cannot find|no name server answered for) host 'no-such-host.invalid'.*YOKE_ADDRESS"
finish taken.1 3 45
says taken.1 '127.0.0.1:[0-9]+ does not answer'
kill "${pids[holder]}"
finish holder 143 10
if [[ $slurm == yes ]]; then
  finish srun_unknown 3 45
  says srun_unknown "cannot find host 'yoke-node2'.*YOKE_ADDRESS"
fi

if [[ -n ${YOKE_OWN_NAMESPACES:-} ]]; then
  section "what is left behind"
  slurm_down
  left=$(readlink /proc/[0-9]*/exe | grep -F "$YOKE_BUILD" || true)
  [[ -z $left ]] || fail "processes are left: $left"
  [[ -z $(ls -A /dev/shm) ]] || fail "left in /dev/shm: $(ls -A /dev/shm)"
  ! grep -l 'memfd:yoke' /proc/[0-9]*/maps || fail "shared memory is still mapped"
fi
section "done"
