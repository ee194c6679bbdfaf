// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/nccl/api.h"

#include <gtest/gtest.h>

#include "yoke/base/error.h"
#include "yoke/comm/nccl/backend.h"

namespace yoke::comm {
namespace {

NcclResult version_2_9(int* version) {
  *version = 20908;
  return NcclResult::Success;
}

// A library with the functions that `has` knows.
topo::OpenLibrary library(std::function<void*(const std::string&)> has) {
  return [has = std::move(has)](const char*) {
    return topo::Library{.symbol = [has](const char* name) { return has(name); }};
  };
}

std::string refusal(const std::string& file, const topo::OpenLibrary& open) {
  try {
    open_nccl(file, open);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), Kind::Device);
    return error.what();
  }
  return "accepted";
}

}  // namespace

TEST(NcclApi, AMissingLibraryIsNamedWithItsCure) {
  const std::string text = refusal("/no/libnccl.so.2", topo::open_library);
  EXPECT_NE(text.find("/no/libnccl.so.2"), std::string::npos) << text;
  EXPECT_NE(text.find("pip install nvidia-nccl-cu13"), std::string::npos) << text;
}

TEST(NcclApi, ALibraryThatIsNotNcclIsRefused) {
  const std::string text = refusal("libm.so.6", library([](const auto&) { return nullptr; }));
  EXPECT_NE(text.find("libm.so.6 is not NCCL"), std::string::npos) << text;
}

TEST(NcclApi, AnOldLibraryIsToldByItsVersionAndWhatItLacks) {
  const auto old = library([](const std::string& name) -> void* {
    if (name == "ncclCommInitRankConfig") return nullptr;
    return reinterpret_cast<void*>(&version_2_9);
  });
  const std::string text = refusal("", old);
  EXPECT_NE(text.find("NCCL 2.9.8 in libnccl.so.2 has no ncclCommInitRankConfig"),
            std::string::npos)
      << text;
}

TEST(NcclBackend, RefusesToConnectWithoutAGpu) {
  const auto world = std::make_shared<World>(1, WorldOptions{});
  EXPECT_EQ(nccl_backend().name, "nccl");
  EXPECT_THROW(nccl_backend().connect(world, {}), Error);
}

}  // namespace yoke::comm
