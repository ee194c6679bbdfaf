// SPDX-License-Identifier: Apache-2.0
#include "yoke/runner/recording.h"

namespace yoke::runner {

struct Recording::Impl {};

std::unique_ptr<Recording> Recording::make(const Work&, const Values&) { return nullptr; }
Recording::~Recording() = default;
const Values& Recording::replay() { return outputs_; }

}  // namespace yoke::runner
