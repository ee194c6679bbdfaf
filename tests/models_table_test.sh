#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every test that docs/models.md names is there.
. "$(dirname "${BASH_SOURCE[0]}")/expect.sh"

cd "$YOKE_SOURCE"
for room in data models train checkpoint parallel; do
  "$YOKE_BUILD/rooms/$room/yoke_${room}_tests" --gtest_list_tests | awk '/^[^ ]/ { suite = $1 } /^  / { print suite $1 }'
done >"$scratch/tests"
count=0
while read -r name; do
  count=$((count + 1))
  if [[ $name == project.* ]]; then
    [[ -f tests/${name#project.}_test.sh ]] || fail "docs/models.md names $name, and there is no tests/${name#project.}_test.sh"
  else
    pattern=${name//./\\.}
    grep -qE "^${pattern//\*/.*}\$" "$scratch/tests" || fail "docs/models.md names $name, and no test is called so"
  fi
done < <(sed -n '/^|/p' docs/models.md | grep -oE '`(project\.[a-z_]+|[A-Z][A-Za-z]+(\.[A-Za-z0-9*]+|\*))`' | tr -d '\`' | sort -u)
((count > 15)) || fail "docs/models.md names $count tests"
