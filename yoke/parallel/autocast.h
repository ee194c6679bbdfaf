// SPDX-License-Identifier: Apache-2.0
// The calling thread's autocast while this lives, without the cache: it would keep casts of
// parameters that have changed.
#pragma once

#include <ATen/autocast_mode.h>

namespace yoke::parallel {

class Autocast {
 public:
  Autocast(at::DeviceType device, bool enabled, at::ScalarType dtype)
      : device_(device),
        was_enabled_(at::autocast::is_autocast_enabled(device)),
        was_cached_(at::autocast::is_autocast_cache_enabled()),
        was_dtype_(at::autocast::get_autocast_dtype(device)) {
    at::autocast::set_autocast_enabled(device, enabled);
    at::autocast::set_autocast_dtype(device, dtype);
    at::autocast::set_autocast_cache_enabled(false);
  }
  ~Autocast() {
    at::autocast::set_autocast_enabled(device_, was_enabled_);
    at::autocast::set_autocast_dtype(device_, was_dtype_);
    at::autocast::set_autocast_cache_enabled(was_cached_);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  const at::DeviceType device_;
  const bool was_enabled_, was_cached_;
  const at::ScalarType was_dtype_;
};

}  // namespace yoke::parallel
