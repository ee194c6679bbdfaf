// SPDX-License-Identifier: Apache-2.0
#include "yoke/serve/control.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>

#include "yoke/base/error.h"

namespace yoke::serve {
namespace {

constexpr size_t kMostFiles = 4;

}  // namespace

std::pair<net::Descriptor, net::Descriptor> make_line() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
    fail(Kind::Io, "cannot make a socket: ", std::strerror(errno));
  return {net::Descriptor(ends[0]), net::Descriptor(ends[1])};
}

bool send_message(int line, const std::string& text, const std::vector<int>& files) {
  YOKE_CHECK(files.size() <= kMostFiles);
  if (text.size() > kMostBytes)
    fail(Kind::Usage, "a message of ", text.size(), " bytes, '", text.substr(0, 32),
         "…', wanted at most ", kMostBytes);
  std::string bytes = text;
  iovec part{bytes.data(), bytes.size()};
  alignas(cmsghdr) char room[CMSG_SPACE(sizeof(int) * kMostFiles)] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!files.empty()) {
    message.msg_control = room;
    message.msg_controllen = CMSG_SPACE(sizeof(int) * files.size());
    cmsghdr* head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int) * files.size());
    std::memcpy(CMSG_DATA(head), files.data(), sizeof(int) * files.size());
  }
  return ::sendmsg(line, &message, MSG_NOSIGNAL) >= 0;
}

std::optional<Message> receive_message(int line, Time deadline) {
  pollfd poll{line, POLLIN, 0};
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - SteadyClock().now());
  const int ready = ::poll(&poll, 1, int(std::clamp<int64_t>(left.count(), 0, 1 << 30)));
  if (ready <= 0) return std::nullopt;
  std::string bytes(kMostBytes, '\0');
  iovec part{bytes.data(), bytes.size()};
  alignas(cmsghdr) char room[CMSG_SPACE(sizeof(int) * kMostFiles)] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = room;
  message.msg_controllen = sizeof(room);
  const ssize_t got = ::recvmsg(line, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return std::nullopt;
  Message result{.text = bytes.substr(0, size_t(std::max<ssize_t>(got, 0)))};
  for (auto* head = CMSG_FIRSTHDR(&message); got > 0 && head; head = CMSG_NXTHDR(&message, head)) {
    if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) continue;
    for (size_t at = 0; CMSG_LEN(at + sizeof(int)) <= head->cmsg_len; at += sizeof(int)) {
      int file = -1;
      std::memcpy(&file, CMSG_DATA(head) + at, sizeof(int));
      result.files.emplace_back(file);
    }
  }
  return result;
}

}  // namespace yoke::serve
