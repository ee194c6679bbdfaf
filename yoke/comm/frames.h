// SPDX-License-Identifier: Apache-2.0
// What the processes of a world and their hub say to each other: frames of a length, a type and
// values (wire.h). Nothing here waits.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "yoke/comm/wire.h"
#include "yoke/comm/world.h"
#include "yoke/net/socket.h"

namespace yoke::comm {

enum class FrameType : uint8_t {
  Hello,    // a process comes: who it is
  Welcome,  // all have come: who they are
  Refused,  // why there will be no world with this process
  Status,   // the last operation of a rank
  Failed,   // the first failure
  Left,     // a rank has returned
  Bye,      // all ranks of the process have; its end is no death
  Died,     // a process ended without Bye
  Set,      // the store
  Get,
  Add,
  Has,
  Reply,
};

// A process as it introduces itself.
struct Hello {
  int process = 0, num_processes = 1, num_ranks = 1;
  Place place = {};
  std::string job = {};  // the same for all processes of a job
};

// One end of a connection, with what is not yet sent or not yet whole.
class FrameSocket {
 public:
  explicit FrameSocket(net::Socket socket) : socket_(std::move(socket)) {}
  int fd() const { return socket_.fd(); }
  const std::string& peer() const { return socket_.peer(); }
  bool has_unsent() const { return !out_.empty(); }

  void put(FrameType type, const Writer& values = {});
  void send();                        // as much as goes
  bool receive();                     // as much as is there; false: the peer is gone
  std::optional<std::string> next();  // the next whole frame: its type, then its values
  void finish_writing() { socket_.finish_writing(); }

 private:
  net::Socket socket_;
  std::string in_, out_;
};

FrameType take_type(Reader& reader);
void put(Writer& writer, const Hello& hello);
Hello get_hello(Reader& reader);
void put(Writer& writer, const World::Failure& failure);
World::Failure get_failure(Reader& reader);

}  // namespace yoke::comm
