// SPDX-License-Identifier: Apache-2.0
#include "yoke/base/error.h"
#include "yoke/data/image_file.h"

namespace yoke::data {

Image read_image(const std::filesystem::path&) {
  fail(Kind::Usage,
       "this yoke was built without libpng and libjpeg: install libpng-dev and libjpeg-dev and "
       "build again");
}

}  // namespace yoke::data
