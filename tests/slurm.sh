# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by the tests that need a real Slurm: a private one on loopback in $scratch/slurm, with two nodes that are
# one machine, its own munge and free ports. Needs root, and no systemd.

slurm_up() {
  local at=$scratch/slurm until=$((SECONDS + 20))
  mkdir -p "$at"/{state,yoke-node1,yoke-node2}
  chmod 755 "$scratch" "$at" # munge's clients look for its socket here
  head -c 128 /dev/urandom >"$at/munge.key"
  chmod 400 "$at/munge.key"
  munged --force --key-file="$at/munge.key" --socket="$at/munge.sock" --pid-file="$at/munged.pid" \
    --log-file="$at/munged.log" --seed-file="$at/munge.seed"
  cat >"$at/slurm.conf" <<CONF
ClusterName=yoke
SlurmctldHost=localhost
SlurmctldPort=$(free_port)
SlurmUser=root
AuthInfo=socket=$at/munge.sock
CredType=cred/munge
SlurmdParameters=config_overrides
StateSaveLocation=$at/state
SlurmdSpoolDir=$at/%n
TmpFS=$at/%n
SlurmctldPidFile=$at/slurmctld.pid
SlurmdPidFile=$at/%n.pid
SlurmctldLogFile=$at/slurmctld.log
SlurmdLogFile=$at/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName=yoke-node1 NodeHostname=localhost NodeAddr=127.0.0.1 Port=$(free_port) CPUs=8 State=UNKNOWN
NodeName=yoke-node2 NodeHostname=localhost NodeAddr=127.0.0.1 Port=$(free_port) CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
CONF
  export SLURM_CONF=$at/slurm.conf
  slurmctld
  slurmd -N yoke-node1
  slurmd -N yoke-node2
  until [[ $(sinfo -h -N -o %T 2>/dev/null | sort | uniq -c | tr -d ' ') == 2idle ]]; do
    ((SECONDS <= until)) || fail "the private Slurm does not come up: $(tail -n 5 "$at"/*.log)"
    sleep 0.1
  done
}

slurm_down() {
  local file pid
  for file in "$scratch"/slurm/{yoke-node1,yoke-node2,slurmctld,munged}.pid; do
    pid=$(cat "$file" 2>/dev/null) && kill "$pid" 2>/dev/null || continue
    while kill -0 "$pid" 2>/dev/null; do sleep 0.05; done
  done
}
