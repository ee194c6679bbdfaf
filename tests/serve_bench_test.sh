#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# `yoke bench serve` in a short form: what it finds of order, of whose rows are whose and of the end under load is judged,
# how fast and how fair is told.
. "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
yoke=$YOKE_BUILD/yoke

"$yoke" bench serve order isolation drain --seconds 1 2>&1 | tee "$scratch/figures" || fail "what must hold while things go wrong did not"
for what in order isolation drain; do grep -q "^| $what .* yes " "$scratch/figures" || fail "no figure of $what"; done
for what in replicas fair null; do
  measure "$yoke" bench serve "$what" --seconds 1
  grep -q "^| $what " "$scratch/figures" || fail "no figure of $what"
done
expect 2 'did you mean order' "$yoke" bench serve ordr
