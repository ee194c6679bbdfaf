// SPDX-License-Identifier: Apache-2.0
// The line between the router and a worker beside the shared memory: few, whole messages, and
// descriptors with them. That the other end is gone shows at once.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "yoke/net/socket.h"

namespace yoke::serve {

inline constexpr size_t kMostBytes = 128 << 10;  // of a message

struct Message {
  std::string text = {};
  std::vector<net::Descriptor> files = {};
};

std::pair<net::Descriptor, net::Descriptor> make_line();
// False when the other end is gone. Throws where the text is longer than a message may be.
bool send_message(int line, const std::string& text, const std::vector<int>& files = {});
// Waits until `deadline`. Nothing at the deadline; an empty text when the other end is gone.
std::optional<Message> receive_message(int line, Time deadline);

}  // namespace yoke::serve
