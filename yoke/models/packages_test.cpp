// SPDX-License-Identifier: Apache-2.0
#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

#include "yoke/base/error.h"
#include "yoke/models/loadable.h"

namespace yoke::models {

TEST(Packages, AreOpenedForWhatTheyAre) {
  const char* given = std::getenv("YOKE_TEST_PACKAGES");
  if (given == nullptr) GTEST_SKIP() << "tests/packages_test.sh runs it";
  const std::filesystem::path folder = given;
  std::vector<float> numbers;
  std::ifstream file(folder / "expected");
  for (float number; file >> number;) numbers.push_back(number);
  ASSERT_EQ(numbers.size(), 12u);
  const at::Tensor expected = at::tensor(numbers).view({4, 3});
  const at::Tensor x = at::arange(24, at::kFloat).view({4, 6}).sin();
  const LoadOptions told{.inputs = {parse_port("x:FP32[-1,6]")}};
  for (const char* name : {"script.pt", "compiled.pt2"}) {
    const auto model = open_loadable(folder / name, told);
    EXPECT_TRUE(at::allclose(model->run({x})[0], expected, 1e-5, 1e-6)) << name;
    EXPECT_TRUE(
        at::allclose(model->run({x.narrow(0, 1, 2)})[0], expected.narrow(0, 1, 2), 1e-5, 1e-6));
    EXPECT_THROW(model->run({x.narrow(1, 0, 4).contiguous()}), Error) << name;
    EXPECT_THROW(model->run({x.to(at::kDouble)}), Error) << name;
  }
  const auto refusal = [&](const char* name, const LoadOptions& options) {
    try {
      open_loadable(folder / name, options);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("it was taken");
  };
  const auto has = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), text.npos) << text;
  };
  has(refusal("compiled.pt2", {}),
      "checks no input itself: declare them, as input = [\"x:FP32[-1,3,224,224]\"] in a config, or "
      "--input 'x:FP32[-1,3,224,224]'");
  has(refusal("exported.pt2", told),
      "is an export that is not compiled; in Python: torch._inductor.aoti_compile_and_package("
      "torch.export.load('" +
          (folder / "exported.pt2").string() + "')");
  has(refusal("weights.pt", told), "has weights alone, without a program");
}

}  // namespace yoke::models
