#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# ./dev: its help, its errors, and its set-up, with stand-ins for the package managers so that nothing is installed.
# shellcheck source=tests/expect.sh
. "$(dirname "${BASH_SOURCE[0]}")/expect.sh"

dev=$YOKE_SOURCE/dev
verbs='setup build run test check bench fuzz format tidy install package'
expect 0 '^usage: ./dev VERB' "$dev"
for verb in $verbs; do
  expect 0 "^  $verb +[A-Z]" "$dev" --help
  expect 0 "^usage: ./dev $verb" "$dev" "$verb" --help
done
expect 2 "no verb 'fly'; there are: $verbs" "$dev" fly
expect 2 '^usage: ./dev install PREFIX' "$dev" install
expect 2 '^usage: ./dev check' "$dev" check --fast
expect 2 '^usage: ./dev fuzz' "$dev" fuzz long

# From here on: a checkout of its own, and commands whose answers the test chooses.
checkout=$scratch/checkout
mkdir -p "$checkout" "$scratch/bin"
cp -r "$dev" "$YOKE_SOURCE/tools" "$checkout"
dev=$checkout/dev
export PATH=$scratch/bin:$PATH
stub() { # NAME, body on stdin
  { echo '#!/bin/bash' && cat; } >"$scratch/bin/$1"
  chmod +x "$scratch/bin/$1"
}
# Every package is installed but those that the file `missing` names.
stub dpkg-query <<STUB
for package in "\${@:3}"; do grep -qx "\$package" $scratch/missing || echo "installed \$package"; done
STUB
stub apt-get <<STUB
echo "\$*" >>$scratch/apt
STUB
stub sudo <<<'exit 1'
stub id <<<'echo 1000'
: >"$scratch/missing"
: >"$scratch/apt"

# Nothing is missing: at once, and no package manager is asked. The best of five, as the host may be busy.
expect 0 "ready; LibTorch is " "$dev" setup
best=9999
for _ in 1 2 3 4 5; do
  start=$(date +%s%N)
  "$dev" setup 2>/dev/null
  took=$((($(date +%s%N) - start) / 1000000))
  best=$((took < best ? took : best))
done
((best < 300)) || fail "./dev setup with nothing to do took $best ms"
[[ ! -s $scratch/apt ]] || fail "apt-get was called with nothing missing"

# A package is missing: the one command where there is no way to root, an installation where there is.
printf 'mold\nccache\n' >"$scratch/missing"
install='install .*--no-install-recommends .*ccache mold$'
expect 1 '^  sudo apt-get update && sudo apt-get install -y --no-install-recommends ccache mold$' "$dev" setup
[[ ! -s $scratch/apt ]] || fail "apt-get was called without root"
stub sudo <<<'shift; exec "$@"'
expect 0 'installing distribution packages: ccache mold' "$dev" setup
grep -qE "$install" "$scratch/apt" || fail "apt-get was not called by sudo: $(cat "$scratch/apt")"
stub sudo <<<'exit 1'
stub id <<<'echo 0'
: >"$scratch/apt"
expect 0 'ready' "$dev" setup
grep -qE "$install" "$scratch/apt" || fail "apt-get was not called as root: $(cat "$scratch/apt")"
stub id <<<'echo 1000'
expect 0 'leaving packages alone' env YOKE_SKIP_PACKAGES=1 "$dev" setup
: >"$scratch/missing"

# The fuzzer: built and run by clang where that is there, and told where it is not.
mkdir -p "$checkout/yoke/serve"
if ! command -v clang++ >/dev/null; then expect 1 'fuzz wants clang\+\+.*install the packages clang' "$dev" fuzz 1; fi
stub fuzzer <<STUB
echo "fuzzer \$*"
exit \$(cat $scratch/fuzz_code)
STUB
stub clang++ <<<"cp $scratch/bin/fuzzer \"\${*: -1}\""
echo 0 >"$scratch/fuzz_code"
expect 0 '^fuzzer -max_total_time=3 .*tests/corpus/rest' "$dev" fuzz 3
echo 77 >"$scratch/fuzz_code"
expect 77 '^fuzzer -max_total_time=60 ' "$dev" fuzz
rm "$scratch/bin/clang++"

# The last line of the first run is a command that works as it stands.
stub first_yoke <<<'true'
"$checkout/tools/first_run" "$scratch/bin/first_yoke" >"$scratch/first"
stub cmake <<<'true'
stub ninja <<<'true'
mkdir -p "$checkout/build"
printf '#!/bin/bash\necho "yoke $*"\n' >"$checkout/build/yoke"
chmod +x "$checkout/build/yoke"
(cd "$checkout" && expect 0 '^yoke serve runs/first$' bash -c "$(tail -1 "$scratch/first")")
rm "$scratch/bin/cmake" "$scratch/bin/ninja"

# LibTorch: a bad YOKE_TORCH, the remembered choice, and a fresh one by pip from the index that was asked for.
expect 2 'YOKE_TORCH=/nowhere has no include/ATen/ATen.h' env YOKE_TORCH=/nowhere "$dev" setup
real_torch=$YOKE_TORCH
unset YOKE_TORCH
expect 0 "LibTorch is $real_torch" "$dev" setup
echo /gone >"$checkout/.deps/torch_path"
mkdir -p "$scratch/wheel/include/ATen" "$scratch/wheel/lib"
touch "$scratch/wheel/include/ATen/ATen.h" "$scratch/wheel/lib/libtorch_cpu.so"
# A python without torch, whose private copies get one by `pip install`.
stub python3 <<STUB
[[ \$1 == -m ]] || exit 1
mkdir -p "\$3/bin"
cat >"\$3/bin/python" <<'INNER'
#!/bin/bash
if [[ \$1 == -m ]]; then
  echo "\$*" >>$scratch/pip
  touch $scratch/installed
elif [[ -e $scratch/installed ]]; then
  echo $scratch/wheel
fi
INNER
chmod +x "\$3/bin/python"
STUB
expect 0 'CUDA: about 3 GB.*CPU build is 200 MB' "$dev" setup
grep -q 'torch==2.13.0 numpy' "$scratch/pip" || fail "pip was asked for: $(cat "$scratch/pip")"
expect 0 "LibTorch is $scratch/wheel" "$dev" setup
expect 0 'from https://index.invalid/cpu' "$dev" setup --torch-index https://index.invalid/cpu
grep -q -- '--index-url https://index.invalid/cpu' "$scratch/pip" || fail "pip did not get the index"
: >"$scratch/pip"
expect 0 "LibTorch is $scratch/wheel" "$dev" setup --torch-index https://index.invalid/cpu
[[ ! -s $scratch/pip ]] || fail "pip was called again for the same index"
