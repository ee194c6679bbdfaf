#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every test that docs/models.md names is there.
. "$(dirname "${BASH_SOURCE[0]}")/expect.sh"

cd "$YOKE_SOURCE"
count=0
while read -r name; do
  count=$((count + 1))
  if [[ $name == project.* ]]; then
    [[ -f tests/${name#project.}_test.sh ]] || fail "docs/models.md names $name, and there is no tests/${name#project.}_test.sh"
    continue
  fi
  found=$(for room in data models train checkpoint parallel; do
    "$YOKE_BUILD/rooms/$room/yoke_${room}_tests" --gtest_list_tests --gtest_filter="$name" | grep -c '^  ' || true
  done | awk "{ sum += \$1 } END { print sum }")
  ((found > 0)) || fail "docs/models.md names $name, and no test is called so"
done < <(sed -n '/^|/p' docs/models.md | grep -oE '`(project\.[a-z_]+|[A-Z][A-Za-z]+(\.[A-Za-z0-9*]+|\*)?)`' | tr -d '\`' | sort -u | grep -E '\.|\*')
((count > 15)) || fail "docs/models.md names $count tests"
