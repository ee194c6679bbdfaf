#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Files of models that Python writes are opened for what they are: TorchScript, a compiled package, an export that is not
# compiled, weights alone; and run by a replica in batches of any size.
. "$(dirname "${BASH_SOURCE[0]}")/expect.sh"

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


folder = sys.argv[1]
torch.manual_seed(1)
model, x = Model().eval(), torch.arange(24.0).view(4, 6).sin()
torch.jit.script(model).save(f"{folder}/script.pt")
torch.save(model.state_dict(), f"{folder}/weights.pt")
exported = torch.export.export(model, (x,), dynamic_shapes={"x": {0: torch.export.Dim("batch", min=1, max=64)}})
torch.export.save(exported, f"{folder}/exported.pt2")
torch._inductor.aoti_compile_and_package(exported, package_path=f"{folder}/compiled.pt2")
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
