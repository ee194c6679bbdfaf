// SPDX-License-Identifier: Apache-2.0
// What the nodes that patterns add (merges, joins, cuts, ends of branches and of sub-graphs) take
// and give, from what comes to them: so both sides of a pattern are compared, not only both ends of
// an edge.
#pragma once

#include "yoke/flow/graph.h"

namespace yoke::flow {

// Declares their ports where all that comes to a node is declared; the rest stays open. Throws
// Kind::Config where what comes to one cannot be put together, or an arm does not suit the taker.
void declare_patterns(Graph& graph);

}  // namespace yoke::flow
