# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# The set-up half of ./dev, which sources this file: distribution packages and LibTorch. Each function looks
# first and returns at once when nothing is missing.
: "${verb?} ${caller?}"
torch_version=2.13.0

missing_packages() {
  local have
  have=$(dpkg-query -W -f='${db:Status-Status} ${Package}\n' "$@" 2>/dev/null | sed -n 's/^installed //p' || true)
  printf '%s\n' "$@" | grep -vxF -f <(printf '%s\n' "$have") || true
}

ensure_packages() { # PACKAGE…
  local missing as_root=() log=.deps/packages.log
  if [[ -n ${YOKE_SKIP_PACKAGES:-} ]] || ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
    if [[ $verb == setup ]] || ! type g++ cmake ninja python3 >/dev/null 2>&1; then
      say "leaving packages alone; by their Debian names Yoke needs: $*"
    fi
    return 0
  fi
  mapfile -t missing < <(missing_packages "$@")
  ((${#missing[@]})) || return 0
  if [[ $(id -u) != 0 ]]; then
    sudo -n true 2>/dev/null || die 1 "packages are missing and need root; run this once:
  sudo apt-get update && sudo apt-get install -y --no-install-recommends ${missing[*]}"
    as_root=(sudo -n)
  fi
  say "installing distribution packages: ${missing[*]}"
  mkdir -p .deps
  "${as_root[@]}" apt-get update -qq >"$log" 2>&1 || say "'apt-get update' failed; trying with the lists there are"
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
    -o DPkg::Lock::Timeout=300 "${missing[@]}" >>"$log" 2>&1 ||
    { tail -n 20 "$log" >&2 && die 1 "could not install them (the whole story is in $log)"; }
}

is_torch() { [[ -f $1/include/ATen/ATen.h && -f $1/lib/libtorch_cpu.so ]]; }

# The folder of the torch that a python has, if it is new enough; torch itself is not imported, that takes seconds.
python_torch() { # PYTHON
  "$1" 2>/dev/null - <<'PYTHON' || true
import importlib.metadata, importlib.util, re, sys
sys.path = [entry for entry in sys.path if entry]
spec = importlib.util.find_spec("torch")
version = [int(number) for number in re.findall(r"\d+", importlib.metadata.version("torch"))[:2]]
print(spec.submodule_search_locations[0] if version >= [2, 11] else "")
PYTHON
}

install_torch() { # INDEX, or nothing for the default one
  local index=$1 options=() start=$SECONDS
  if [[ -n $index && $(cat .deps/torch_index 2>/dev/null) != "$index" ]]; then
    rm -rf .deps/python
  elif is_torch "$(python_torch .deps/python/bin/python)"; then
    return 0
  fi
  [[ -z $index ]] || options+=(--index-url "$index")
  [[ -t 2 ]] || options+=(--quiet)
  say "downloading torch $torch_version and numpy by pip into .deps/python, from ${index:-the default index}"
  [[ -n $index ]] || say "The usual Linux build brings CUDA: about 3 GB to download, 7 GB on disk. The CPU build is" \
    "200 MB, 1 GB on disk: './dev setup --torch-index URL' with the URL that pytorch.org gives for Linux, pip, CPU."
  python3 -m venv .deps/python
  .deps/python/bin/python -m pip install --disable-pip-version-check "${options[@]}" "torch==$torch_version" numpy >&2 ||
    die 1 "pip could not install torch; or set YOKE_TORCH to the folder of a torch 2.11 or newer"
  printf '%s\n' "$index" >.deps/torch_index
  say "torch installed in $((SECONDS - start)) s"
}

# Sets $torch: YOKE_TORCH, else the earlier choice, else python3's own, else a private one.
ensure_torch() { # [INDEX]
  local index=${1:-} choice=.deps/torch_path
  if [[ -n ${YOKE_TORCH:-} ]]; then
    torch=$(cd "$caller" && realpath -m "$YOKE_TORCH")
    is_torch "$torch" || die 2 "YOKE_TORCH=$YOKE_TORCH has no include/ATen/ATen.h and lib/libtorch_cpu.so;" \
      "name the folder of a torch package, or unset it and run ./dev setup"
  elif [[ -z $index && -f $choice ]] && torch=$(<"$choice") && is_torch "$torch"; then
    return 0
  elif [[ -z $index ]] && torch=$(python_torch python3) && is_torch "$torch"; then
    say "using the torch of $(command -v python3): $torch"
  else
    install_torch "$index"
    torch=$(python_torch .deps/python/bin/python)
    is_torch "$torch" || die 1 ".deps/python has no usable torch; remove that folder and run ./dev setup again"
  fi
  mkdir -p .deps
  printf '%s\n' "$torch" >"$choice"
}

# The programs of others that read our files, for the tests: a Python of their own. Without them those tests are less.
ensure_readers() {
  local python=.deps/readers/bin/python
  ! "$python" -c 'import ml_dtypes, safetensors, tensorboard' 2>/dev/null || return 0
  say "installing safetensors and tensorboard by pip into .deps/readers, for the tests (150 MB)"
  if ! { python3 -m venv .deps/readers && "$python" -m pip install --disable-pip-version-check --quiet numpy ml_dtypes safetensors \
    tensorboard setuptools >.deps/readers.log 2>&1; }; then
    say "pip could not install them (the whole story is in .deps/readers.log); the tests go on without them"
  fi
}

# transformers, tokenizers and sentencepiece, for the same, beside the Python that has our torch.
ensure_transformers() {
  local python=$torch/../../../../bin/python3
  [[ ! -d .deps/transformers/transformers || ! -d .deps/transformers/sentencepiece ]] || return 0
  [[ -x $python ]] || python=python3
  say "installing transformers and sentencepiece by pip into .deps/transformers, for the tests (275 MB)"
  if ! "$python" -m pip install --disable-pip-version-check --quiet --target .deps/transformers --upgrade transformers sentencepiece \
    >.deps/transformers.log 2>&1; then
    say "pip could not install them (the whole story is in .deps/transformers.log); the tests go on without them"
  fi
}

# Clients of the Open Inference Protocol that people have, and a real model with state, for the same.
ensure_clients() {
  local python=.deps/clients/bin/python
  ! "$python" -c 'import sys; from importlib.util import find_spec as find
sys.exit(not all(map(find, ("kserve", "silero_vad", "tritonclient", "grpc"))))' 2>/dev/null || return 0
  say "installing tritonclient, kserve and silero-vad by pip into .deps/clients, for the tests (400 MB)"
  if ! { python3 -m venv .deps/clients && "$python" -m pip install --disable-pip-version-check --quiet 'tritonclient[http,grpc]' kserve &&
    "$python" -m pip install --disable-pip-version-check --quiet --no-deps silero-vad; } >.deps/clients.log 2>&1; then
    say "pip could not install them (the whole story is in .deps/clients.log); the tests go on without them"
  fi
}

ensure_all() { # [INDEX]
  local packages
  mapfile -t packages < <(sed 's/ *#.*//; /^$/d' tools/packages.txt)
  ensure_packages "${packages[@]}"
  ensure_torch "${1:-}"
}
