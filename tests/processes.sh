# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by the tests that start processes: namespaces of their own, free ports, worlds of plain processes.

# As root the script runs again among processes, mounts and, if asked, a network of its own: what it leaves behind
# can then be seen, disturbs no other test, and goes away with it.
own_namespaces() { # [--net]
  if [[ -z ${YOKE_OWN_NAMESPACES:-} && $(id -u) == 0 ]] && unshare --mount --pid --fork --mount-proc "$@" true 2>/dev/null; then
    YOKE_OWN_NAMESPACES=1 exec unshare --mount --pid --fork --mount-proc --kill-child "$@" bash "$0"
  fi
}

# In mounts of our own: these names are known, and no name server is asked for others.
known_hosts() { # ADDRESS NAME…
  printf '%s %s\n' 127.0.0.1 localhost "$@" >"$scratch/hosts"
  echo 'hosts: files' >"$scratch/nsswitch.conf"
  mount --bind "$scratch/hosts" /etc/hosts
  mount --bind "$scratch/nsswitch.conf" /etc/nsswitch.conf
}

# Below the ports that outgoing connections get: a process that knocks at one of those can meet itself. None twice.
free_port() {
  python3 - "$scratch" <<'PYTHON'
import os, random, socket, sys
while True:
    port = random.randrange(20000, 30000)
    try:
        with socket.socket() as probe:
            probe.bind(("", port))
        os.mkdir(f"{sys.argv[1]}/port.{port}")
        break
    except OSError:
        pass
print(port)
PYTHON
}

# One of several plain processes on this host, in the background. It says what it has to say into NAME.RANK.
start() { # NAME RANK SIZE COMMAND…
  YOKE_RANK=$2 YOKE_WORLD_SIZE=$3 YOKE_LOCAL_RANK=$2 YOKE_LOCAL_SIZE=$3 YOKE_NODE_RANK=0 YOKE_NUM_NODES=1 \
    background "$1.$2" "${@:4}"
}

declare -A pids=()
background() { # NAME COMMAND…
  : >"$scratch/$1" # here, before await looks at it: it may hold the words of an earlier one
  "${@:2}" >"$scratch/$1" 2>&1 </dev/null &
  pids[$1]=$!
}

# Waits for a command in the background, which must exit with the code (a pattern).
finish() { # NAME CODE SECONDS
  local code=0 until=$((SECONDS + $3))
  while kill -0 "${pids[$1]}" 2>/dev/null; do
    ((SECONDS <= until)) || fail "$1 is still there after $3 s: $(cat "$scratch/$1")"
    sleep 0.05
  done
  wait "${pids[$1]}" || code=$?
  unset "pids[$1]"
  [[ $code =~ ^$2$ ]] || fail "$1 gave exit $code, not $2: $(cat "$scratch/$1")"
}

# Waits until a command in the background has said something.
await() { # NAME PATTERN SECONDS
  local until=$((SECONDS + $3))
  until grep -qE -- "$2" "$scratch/$1"; do
    ((SECONDS <= until)) || fail "$1 does not say '$2' within $3 s: $(cat "$scratch/$1")"
    kill -0 "${pids[$1]}" 2>/dev/null || grep -qE -- "$2" "$scratch/$1" || fail "$1 ended and did not say '$2': $(cat "$scratch/$1")"
    sleep 0.05
  done
}

says() { # NAME PATTERN
  grep -qE -- "$2" "$scratch/$1" || fail "$1 does not say '$2': $(cat "$scratch/$1")"
}

section() { echo "$SECONDS s: $1"; }
