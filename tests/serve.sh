# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced after expect.sh: a server that ends with the test.
yoke=$YOKE_BUILD/yoke
servers=()
trap 'for one in "${servers[@]}"; do kill -9 "$one" 2>/dev/null || true; done; rm -rf "$scratch"' EXIT

# Starts `yoke serve ARGUMENTS…` and waits until it is ready; sets $server (its pid), $http, $grpc, $metrics.
start_server() { # ARGUMENT…
  local ports=$scratch/ports.$RANDOM i
  "$yoke" serve "$@" --port-file "$ports" 2>"$scratch/server.log" &
  server=$!
  servers+=("$server")
  for ((i = 0; i < 600; ++i)); do
    [[ ! -s $ports ]] || break
    kill -0 "$server" 2>/dev/null || { cat "$scratch/server.log" >&2 && fail "the server ended: yoke serve $*"; }
    sleep 0.1
  done
  [[ -s $ports ]] || { cat "$scratch/server.log" >&2 && fail "the server was not ready in 60 s: yoke serve $*"; }
  local which
  for which in http grpc metrics; do printf -v "$which" %s "$(sed "s/.*\"$which\":\"\([^\"]*\)\".*/\1/" "$ports")"; done
}

stop_server() { # wanted exit code
  local code=0
  kill -TERM "$server"
  wait "$server" || code=$?
  [[ $code == "${1:-0}" ]] || { cat "$scratch/server.log" >&2 && fail "the server ended with $code, wanted ${1:-0}"; }
}

# Of this host, for itself: cert.pem and key.pem in $scratch; sets $tls, the arguments of a server that has it.
make_certificate() { # [subjectAltName]
  openssl req -x509 -newkey rsa:2048 -nodes -keyout "$scratch/key.pem" -out "$scratch/cert.pem" -days 2 -subj /CN=localhost \
    -addext "subjectAltName=${1:-IP:127.0.0.1}" 2>/dev/null
  tls=("serve.tls_cert=$scratch/cert.pem" "serve.tls_key=$scratch/key.pem")
}

# The status and then the body of a request.
ask() { # PATH [curl's arguments…]
  curl -sS -m 20 -w '\n%{http_code}' "http://$http$1" "${@:2}" | awk '{lines[NR] = $0} END {print lines[NR]; for (i = 1; i < NR; ++i) print lines[i]}'
}
expect_answer() { # STATUS PATTERN PATH [curl's arguments…]
  local got
  got=$(ask "${@:3}")
  [[ $got == "$1"* && $got =~ $2 ]] || fail "$3 gave '$got', wanted status $1 and '$2'"
}

# Copies a compiled package, of which one thing that it tells of its machine becomes another.
repack() { # PACKAGE COPY KEY=VALUE
  "$python" - "$1" "$2" "${3%%=*}" "${3#*=}" <<'PYTHON'
import json, sys, zipfile

source, target, key, value = sys.argv[1:]
with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
    for item in old.infolist():
        data = old.read(item)
        if item.filename.endswith("wrapper_metadata.json"):
            data = json.dumps(json.loads(data) | {key: value}).encode()
        new.writestr(item, data)
PYTHON
}
