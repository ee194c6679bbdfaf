#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Two hosts on one machine: network namespaces with names and addresses of their own, joined by a cable that can be
# cut. Processes meet over it, MPI runs over it, and when it is cut both sides say so.
. "$(dirname "${BASH_SOURCE[0]}")/processes.sh"
own_namespaces --net
[[ -n ${YOKE_OWN_NAMESPACES:-} ]] || { echo "skipped: needs root and the right to make namespaces" && exit 77; }
type -P ip >/dev/null || { echo "skipped: there is no ip (package iproute2)" && exit 77; }
. "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
trap 'kill -KILL "${pids[@]}" 2>/dev/null || true; rm -rf "$scratch"' EXIT
world=$YOKE_BUILD/examples/example_02_world
# shellcheck disable=SC2086 # the names of variables; a launcher may have started this script too
unset ${!SLURM_@} ${!OMPI_@} ${!PMI@}
export OMP_NUM_THREADS=1

mkdir -p /run/netns
mount -t tmpfs tmpfs /run/netns # the names of network namespaces are files
ip netns add yoke-host1 2>"$scratch/output" || { echo "skipped: $(cat "$scratch/output")" && exit 77; }
ip netns add yoke-host2
ip link add cable netns yoke-host1 type veth peer name cable netns yoke-host2
for i in 1 2; do
  ip -n yoke-host$i address add 10.77.0.$i/24 dev cable
  ip -n yoke-host$i link set cable up
  ip -n yoke-host$i link set lo up
done
known_hosts 10.77.0.1 yoke-host1 10.77.0.2 yoke-host2

# Runs a command on a host. With processes of its own the host is another machine: memory cannot be shared.
cat >"$scratch/on" <<'SCRIPT'
#!/bin/bash
# HOST COMMAND…, the words to be read by a shell as ssh does it
exec ip netns exec "$1" unshare --uts ${OWN_PROCESSES---pid --fork --kill-child --mount-proc} bash -c "hostname $1; exec ${*:2}"
SCRIPT
chmod +x "$scratch/on"

start_on_both() { # NAME COMMAND…
  local rank
  YOKE_PORT=$(free_port) # of this script's network, where nobody listens, nor on the hosts'
  export YOKE_PORT YOKE_WORLD_SIZE=2 YOKE_ADDRESS=10.77.0.1
  for rank in 0 1; do YOKE_RANK=$rank background "$1.$rank" "$scratch/on" yoke-host$((rank + 1)) "${@:2}"; done
}

section "two addresses, one machine"
OWN_PROCESSES='' start_on_both near "$world"
for rank in 0 1; do finish near.$rank 0 30; done
says near.0 'node 0 of 2, meets at 10.77.0.1:'
says near.0 '^2 ranks over shm, sum 1, '

section "two machines need MPI, and are told so"
start_on_both far "$world"
for rank in 0 1; do
  finish far.$rank 2 30
  says far.$rank 'CPU ranks on several hosts \(yoke-host1, yoke-host2\) need the mpi backend'
done

section "a cable that is cut"
OWN_PROCESSES='' start_on_both cut "$world" 1 3000
await cut.0 'processes [0-9]' 30
ip -n yoke-host1 link set cable down
for rank in 0 1; do
  finish cut.$rank 3 20
  says cut.$rank "rank $((1 - rank)) \(host yoke-host$((2 - rank)), process [0-9]+\).*(died|gone)"
done
ip -n yoke-host1 link set cable up

mpi_tests=$YOKE_BUILD/rooms/comm/mpi/yoke_comm_mpi_tests
if [[ -x $mpi_tests ]] && mpirun --version 2>/dev/null | grep -q 'Open MPI'; then
  section "MPI between two machines"
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_plm=rsh OMPI_MCA_plm_rsh_agent=$scratch/on
  export OMPI_MCA_oob_tcp_if_include=10.77.0.0/24 OMPI_MCA_btl=tcp,self OMPI_MCA_btl_tcp_if_include=10.77.0.0/24
  unset YOKE_ADDRESS YOKE_PORT YOKE_WORLD_SIZE
  background mpi "$scratch/on" yoke-host1 mpirun --host yoke-host1,yoke-host2 -n 2 \
    "$mpi_tests" "'--gtest_filter=Mpi.*:Launched/*'" --gtest_color=no
  finish mpi 0 120
  [[ $(grep -c '^\[  PASSED  \] [1-9]' "$scratch/mpi") == 2 ]] || fail "not two that passed: $(cat "$scratch/mpi")"
  grep -m 1 PASSED "$scratch/mpi"
else
  echo "not here: Open MPI"
fi
section "done"
