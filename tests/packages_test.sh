#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Files of models that Python writes are opened for what they are: TorchScript, a compiled package, an export that is not
# compiled, weights alone; and run by a replica in batches of any size. A package that is served leaves nothing behind.
. "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
. "$(dirname "${BASH_SOURCE[0]}")/serve.sh"

python=$YOKE_TORCH/../../../../bin/python3
[[ -x $python ]] || python=python3
timeout 100 "$python" -c 'import torch' 2>/dev/null || { echo "no python3 with torch here" && exit 77; }
export YOKE_TEST_PACKAGES=$scratch/packages
mkdir "$YOKE_TEST_PACKAGES"
cat >"$scratch/write.py" <<'PYTHON'
import sys
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 16), torch.nn.Linear(16, 3)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


class Sine(torch.nn.Module):
    def forward(self, x):
        return x.sin()


folder = sys.argv[1]
torch.manual_seed(1)
model, x = Model().eval(), torch.arange(24.0).view(4, 6).sin()
torch.jit.script(model).save(f"{folder}/script.pt")
torch.save(model.state_dict(), f"{folder}/weights.pt")
exported = torch.export.export(model, (x,), dynamic_shapes={"x": {0: torch.export.Dim("batch", min=1, max=64)}})
torch.export.save(exported, f"{folder}/exported.pt2")
torch._inductor.aoti_compile_and_package(exported, package_path=f"{folder}/compiled.pt2")
exported = torch.export.export(Sine(), (x,), dynamic_shapes={"x": {0: torch.export.Dim("batch", min=1, max=64)}})
torch._inductor.aoti_compile_and_package(exported, package_path=f"{folder}/sine.pt2")
print("\n".join(f"{value:.9g}" for value in model(x).detach().flatten().tolist()), file=open(f"{folder}/expected", "w"))
PYTHON
TORCHINDUCTOR_CACHE_DIR=$scratch/cache timeout 300 "$python" "$scratch/write.py" "$YOKE_TEST_PACKAGES" 2>"$scratch/log" ||
  { tail -5 "$scratch/log" && echo "this Python cannot compile a package" && exit 77; }
export AOTI_RUNTIME_CHECK_INPUTS=1 TMPDIR=$scratch/unpacked
mkdir "$TMPDIR"
for room in models runner; do
  timeout 100 "$YOKE_BUILD/rooms/$room/yoke_${room}_tests" --gtest_filter='Packages.*' >"$scratch/test" 2>&1 || { cat "$scratch/test" && exit 1; }
  grep -q '^\[  PASSED  \] 1 test' "$scratch/test" || { cat "$scratch/test" && exit 1; }
done
[[ -z $(ls "$TMPDIR") ]] || { echo "left behind: $(ls "$TMPDIR")" && exit 1; }
unset AOTI_RUNTIME_CHECK_INPUTS # yoke serve sets it itself

# Served: unpacked in a folder of each worker, all of which go with the server, however that ends.
x=$("$python" -c 'import math; print(",".join(repr(math.sin(i)) for i in range(24)))')
four="{\"inputs\":[{\"name\":\"x\",\"shape\":[4,6],\"datatype\":\"FP32\",\"data\":[$x]}]}"
wide='{"inputs":[{"name":"x","shape":[1,5],"datatype":"FP32","data":[1,2,3,4,5]}]}'
serve=("$YOKE_TEST_PACKAGES/compiled.pt2" --devices cpu:2 serve.http=127.0.0.1:0 serve.grpc= serve.metrics= serve.poison=true)
await() { # COMMAND…: until it succeeds, which it must within two minutes
  local i
  for ((i = 0; i < 1200; ++i)); do ! "$@" || return 0; sleep 0.1; done
  find "$TMPDIR" >&2
  fail "not so in two minutes: $*"
}
is_empty() { [[ -z $(ls -A "$TMPDIR") ]]; }
copies() { # COUNT, in as many folders of workers
  (($(find "$TMPDIR" -name '*.so' | wc -l) == $1 && $(find "$TMPDIR" -mindepth 2 -name 'yoke-serve-*' | wc -l) == ${2:-$1}))
}
is_right() {
  curl -sS -m 60 "http://$http/v2/models/compiled/infer" -d "$four" | "$python" -c '
import json, sys
got, wanted = json.load(sys.stdin)["outputs"][0]["data"], [float(line) for line in open(sys.argv[1])]
sys.exit(len(got) != len(wanted) or any(abs(a - b) > 1e-4 for a, b in zip(got, wanted)))' "$YOKE_TEST_PACKAGES/expected" ||
    fail "the served package gives other values than Python's model"
}
sleep 0 &
dead=$!
wait "$dead"
mkdir "$TMPDIR/yoke-serve-$dead-left" # by a server that was killed with all that it had started
start_server "${serve[@]}" --input 'x:FP32[-1,6]'
for ((i = 0; i < 8; ++i)); do is_right; done # in memory that was poisoned since the one before
expect_answer 400 'wanted FP32\[-1,6\], got FP32\[1,5\]' /v2/models/compiled/infer -d "$wide"
copies 2 || fail "two workers have not unpacked a copy each: $(find "$TMPDIR")"
[[ ! -e $TMPDIR/yoke-serve-$dead-left ]] || fail "the folder of a dead server was left"
kill -9 "$(pgrep -P "$server" -f serve-worker | head -1)"
is_back() { [[ $(ask /v2/yoke/view) =~ \"restarts\":1 && ! $(ask /v2/yoke/view) =~ starting|dead ]]; }
await is_back
is_right
await copies 2
expect_answer 200 '' /v2/repository/models/compiled/load -m 120 -d ''
is_right
await copies 2
kill -9 "$server"
wait "$server" 2>/dev/null || true
await is_empty
start_server "${serve[@]}" --input 'x:FP32[-1,6]' serve.grace_s=600
kill -TERM "$server"
not_ready() { [[ $(ask /v2/health/ready) == 503* ]]; }
await not_ready
stop_server 143
is_empty || fail "left behind after a second signal: $(find "$TMPDIR")"
# What inspect writes is a config when it is completed.
mkdir "$scratch/inspected"
cd "$scratch/inspected"
expect 0 '^written +model.toml; complete its input; then: yoke serve model.toml' "$yoke" serve inspect "${serve[0]}"
expect 2 "declare them, as input = \[.*\] in a config, or --input 'x:FP32" timeout -s KILL 200 "$yoke" serve model.toml "${serve[@]:3}"
sed -i 's/^# input = .*/input = ["x:FP32[-1,6]"]/; s/"auto"/"cpu"/' model.toml
start_server model.toml "${serve[@]:3}"
is_right
stop_server
# The same in threads, where the package is in the server itself.
start_server "${serve[@]}" --input 'x:FP32[-1,6]' serve.workers=threads
is_right
copies 2 0 || fail "two threads have not unpacked a copy each in the folder of the server: $(find "$TMPDIR")"
stop_server
is_empty || fail "left behind at the end: $(find "$TMPDIR")"
# What takes the bytes as they come, whatever they are, finds out alone by the check that it was told to make.
serve[0]=$YOKE_TEST_PACKAGES/sine.pt2
for workers in processes threads; do
  expect 2 'throws at what was declared' timeout -s KILL 200 "$yoke" serve "${serve[@]}" --input 'x:INT32[-1,6]' "serve.workers=$workers"
done
is_empty || fail "left behind by a server that did not start: $(find "$TMPDIR")"
# For another machine: said before anything of it is loaded.
for made in AOTI_DEVICE_KEY=cuda AOTI_MACHINE=riscv64 AOTI_CPU_ISA=AVX99; do
  serve[0]=$scratch/other.pt2
  repack "$YOKE_TEST_PACKAGES/sine.pt2" "${serve[0]}" "$made"
  expect 2 "cannot be loaded: it was compiled for ${made#*=}, and .*; compile it t?here" timeout -s KILL 200 "$yoke" serve "${serve[@]}" --input 'x:FP32[-1,6]'
done
is_empty || fail "left behind by packages for other machines: $(find "$TMPDIR")"
