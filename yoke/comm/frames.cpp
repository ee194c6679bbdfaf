// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/frames.h"

#include <array>

namespace yoke::comm {
namespace {

constexpr uint32_t kLongest = 64 << 20;  // more than this is not one of ours

}  // namespace

void FrameSocket::put(FrameType type, const Writer& values) {
  const auto length = uint32_t(1 + values.bytes().size());
  out_.append(reinterpret_cast<const char*>(&length), sizeof length);
  out_ += char(type);
  out_ += values.bytes();
}

void FrameSocket::send() {
  while (!out_.empty()) {
    const auto sent = socket_.try_write(out_);
    if (!sent) return;
    out_.erase(0, *sent);
  }
}

bool FrameSocket::receive() {
  std::array<char, 16384> buffer;
  try {
    while (const auto got = socket_.try_read(buffer)) {
      if (*got == 0) return false;
      in_.append(buffer.data(), *got);
    }
  } catch (const Error&) {  // reset by the peer: gone as well
    return false;
  }
  return true;
}

std::optional<std::string> FrameSocket::next() {
  uint32_t length = 0;
  if (in_.size() < sizeof length) return std::nullopt;
  std::memcpy(&length, in_.data(), sizeof length);
  if (length == 0 || length > kLongest)
    fail(Kind::Comm, peer(), " does not speak our language; does something else use this port?");
  if (in_.size() < sizeof length + length) return std::nullopt;
  std::string frame = in_.substr(sizeof length, length);
  in_.erase(0, sizeof length + length);
  return frame;
}

FrameType take_type(Reader& reader) { return FrameType(reader.get<uint8_t>()); }

void put(Writer& writer, const Hello& hello) {
  writer.put(hello.process).put(hello.num_processes).put(hello.num_ranks);
  writer.put(hello.place.host).put(hello.place.process).put(hello.place.machine).put(hello.job);
}

Hello get_hello(Reader& reader) {
  Hello hello;
  hello.process = reader.get<int>();
  hello.num_processes = reader.get<int>();
  hello.num_ranks = reader.get<int>();
  hello.place.host = reader.get<std::string>();
  hello.place.process = reader.get<int64_t>();
  hello.place.machine = reader.get<std::string>();
  hello.job = reader.get<std::string>();
  return hello;
}

void put(Writer& writer, const World::Failure& failure) {
  writer.put(failure.rank).put(failure.kind).put(failure.what).put(uint32_t(failure.others.size()));
  for (const auto& other : failure.others) writer.put(other);
}

World::Failure get_failure(Reader& reader) {
  World::Failure failure{};
  failure.rank = reader.get<int>();
  failure.kind = reader.get<Kind>();
  failure.what = reader.get<std::string>();
  for (auto left = reader.get<uint32_t>(); left > 0; --left)
    failure.others.push_back(reader.get<std::string>());
  return failure;
}

}  // namespace yoke::comm
