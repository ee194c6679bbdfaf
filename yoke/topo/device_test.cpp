// SPDX-License-Identifier: Apache-2.0
#include "yoke/topo/device.h"

#include <gtest/gtest.h>

#include "yoke/base/error.h"
#include "yoke/topo/host.h"

using namespace yoke;
using namespace yoke::topo;

namespace {

Host host_with(size_t gpus) {
  return {.gpus = std::vector<Gpu>(gpus), .no_gpus = gpus ? "" : "no NVIDIA driver"};
}

std::vector<Device> cuda(std::initializer_list<int> indices) {
  std::vector<Device> devices;
  for (const int index : indices) devices.push_back({DeviceKind::Cuda, index});
  return devices;
}

std::string refusal(std::string_view text, const Host* host = nullptr) {
  try {
    parse_devices(text, host);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), Kind::Usage);
    return error.what();
  }
  return "accepted";
}

}  // namespace

TEST(Device, CpuCountIsThatManyRanksOnTheSameCores) {
  EXPECT_EQ(parse_devices("cpu:4"), std::vector<Device>(4));
  EXPECT_EQ(parse_devices("cpu"), std::vector<Device>(1));
}

TEST(Device, CudaTextNamesRangesListsAndRepeats) {
  EXPECT_EQ(parse_devices("cuda:0-3"), cuda({0, 1, 2, 3}));
  EXPECT_EQ(parse_devices("cuda:0x4"), cuda({0, 0, 0, 0}));
  EXPECT_EQ(parse_devices("cuda:0,2"), cuda({0, 2}));
  EXPECT_EQ(parse_devices("cuda:1"), cuda({1}));
  EXPECT_EQ(parse_devices("cuda:3,0-1,2x2"), cuda({3, 0, 1, 2, 2}));
}

TEST(Device, AutoTakesEveryGpuOfTheHostOrOneCpuRank) {
  const Host two = host_with(2), none = host_with(0);
  EXPECT_EQ(parse_devices("auto", &two), cuda({0, 1}));
  EXPECT_EQ(parse_devices("cuda", &two), cuda({0, 1}));
  EXPECT_EQ(parse_devices("auto", &none), std::vector<Device>(1));
}

TEST(Device, TextSurvivesTheRoundTrip) {
  for (const char* text : {"cpu:1", "cpu:4", "cuda:1", "cuda:0-3", "cuda:0x4", "cuda:0,2",
                           "cuda:0x2,1x2", "cuda:0,1x2", "cuda:3,0-1", "cuda:0-1,1-2"})
    EXPECT_EQ(to_text(parse_devices(text)),
              std::string_view(text) == "cuda:0-1,1-2" ? "cuda:0,1x2,2" : text);
  EXPECT_EQ(to_text(std::vector<Device>{}), "none");
  EXPECT_EQ(to_text(Device{DeviceKind::Cuda, 5}), "cuda:5");
  EXPECT_EQ(to_text(Device{}), "cpu");
}

TEST(Device, ErrorsQuoteTheTextAndSayWhatToWrite) {
  constexpr auto kForms = "write cpu:4, cuda:0-3, cuda:0,2, cuda:0x4 or auto";
  EXPECT_EQ(refusal("cpu:0"), cat("devices 'cpu:0': got 0 ranks, wanted at least 1; ", kForms));
  EXPECT_EQ(refusal("cuda:0x0"),
            cat("devices 'cuda:0x0': got 0 ranks, wanted at least 1; ", kForms));
  EXPECT_EQ(refusal("cudaa:1"),
            cat("devices 'cudaa:1': unknown device 'cudaa' (did you mean cuda?); ", kForms));
  EXPECT_EQ(refusal("gpu:1"),
            cat("devices 'gpu:1': unknown device 'gpu' (did you mean cuda?); ", kForms));
  EXPECT_EQ(refusal("toaster"), cat("devices 'toaster': unknown device 'toaster'; ", kForms));
  EXPECT_EQ(refusal("cuda:3-0"), "devices 'cuda:3-0': the range runs backwards; write 0-3");
}

TEST(Device, MalformedNumbersAreRefused) {
  for (const char* text : {"",
                           "cpu:",
                           "cpu:-1",
                           "cpu:x",
                           "cpu:2.5",
                           "cpu:+2",
                           "cpu: 2",
                           "cuda:",
                           "cuda:,1",
                           "cuda:1,",
                           "cuda:-1",
                           "cuda:1-",
                           "cuda:0x",
                           "cuda:x4",
                           "cuda:0-3x2",
                           "cuda:0--1",
                           "auto:2",
                           "cpu:99999999999999999999",
                           "cuda:99999999999999999999",
                           "cuda:0-999999999"})
    EXPECT_NE(refusal(text), "accepted") << text;
}

TEST(Device, HugeCountsAreTakenForTypingErrors) {
  EXPECT_EQ(parse_devices("cpu:1024").size(), 1024u);
  EXPECT_EQ(refusal("cpu:1025"),
            "devices 'cpu:1025': got 1025 ranks, wanted at most 1024 on one host; name fewer");
  EXPECT_EQ(refusal("cuda:0x1000,1x1000"),
            "devices 'cuda:0x1000,1x1000': got 2000 ranks, wanted at most 1024 on one host; name "
            "fewer");
}

TEST(Device, GpuThatTheHostDoesNotHaveIsRefusedInNumbers) {
  const Host two = host_with(2), none = host_with(0);
  EXPECT_EQ(refusal("cuda:0-3", &two),
            "devices 'cuda:0-3': got GPU 3, but this host has 2: wanted 0 to 1");
  EXPECT_EQ(refusal("cuda:0", &none),
            "devices 'cuda:0': this host has no usable GPU (no NVIDIA driver); use cpu:N, or see "
            "'yoke doctor'");
  EXPECT_NE(refusal("cuda", &none).find("no usable GPU"), std::string::npos);
  EXPECT_NE(refusal("auto").find("write them out"), std::string::npos);
}
