// SPDX-License-Identifier: Apache-2.0
// CRC-32C (Castagnoli), as iSCSI, ext4 and TFRecord files use it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace yoke {

// Of `before`'s bytes followed by these.
uint32_t crc32c(const void* data, size_t bytes, uint32_t before = 0);

}  // namespace yoke
