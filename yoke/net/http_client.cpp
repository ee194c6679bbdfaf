// SPDX-License-Identifier: Apache-2.0
#include "yoke/net/http_client.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <functional>
#include <optional>
#include <string_view>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/net/tls.h"

namespace yoke::net {
namespace {

struct Target {
  Address address = {};
  std::string authority = {}, path = {};
  bool tls = false;
};

// A blank or a newline would end the request's line, and what follows would be a header.
bool is_one_line(std::string_view text, unsigned char lowest) {
  return std::ranges::all_of(text, [&](unsigned char c) { return c >= lowest && c != 0x7f; });
}

Target parse_url(const std::string& url) {
  const size_t scheme = url.find("://");
  const bool tls = url.starts_with("https://");
  const bool is_http = scheme == url.npos || url.starts_with("http://");
  if (!(tls || is_http) || !is_one_line(url, '!'))
    fail(Kind::Usage, "URL '", url, "': wanted http://HOST:PORT/PATH, or https://");
  std::string rest = scheme == url.npos ? url : url.substr(scheme + 3);
  rest.resize(std::min(rest.find('#'), rest.size()));
  const size_t end = std::min(rest.find_first_of("/?"), rest.size());
  Target target{.authority = rest.substr(0, end), .path = rest.substr(end), .tls = tls};
  if (!target.path.starts_with('/')) target.path.insert(0, "/");
  const size_t host_end = target.authority.rfind(']');
  const bool has_port =
      target.authority.find(':', host_end == rest.npos ? 0 : host_end) != rest.npos;
  target.address =
      parse_address(has_port ? target.authority : target.authority + (tls ? ":443" : ":80"));
  return target;
}

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result)
    if (c >= 'A' && c <= 'Z') c = char(c - 'A' + 'a');
  return result;
}

// What comes from a server, piece by piece.
class Answer {
 public:
  using Read = std::function<size_t(std::span<char> into)>;

  Answer(std::string peer, Read read, size_t max_bytes)
      : peer_(std::move(peer)), read_(std::move(read)), bytes_left_(max_bytes) {}

  std::string line() {
    size_t end = 0;
    while ((end = in_.find('\n')) == in_.npos) {
      if (in_.size() > kMaxLine) refuse("a line of it is too long");
      if (!receive()) refuse("it ended before its body");
    }
    std::string text = take(end + 1);
    text.resize(text.find_last_not_of("\r\n") + 1);
    return text;
  }

  std::string take(size_t size) {
    if (size > in_.size() + bytes_left_) refuse("it is larger than is taken here");
    while (in_.size() < size)
      if (!receive()) refuse(cat("it ended after ", in_.size(), " of ", size, " bytes"));
    std::string text = in_.substr(0, size);
    in_.erase(0, size);
    return text;
  }

  std::string rest() {
    while (receive()) {
    }
    return std::move(in_);
  }

  [[noreturn]] void refuse(const std::string& why) const {
    fail(Kind::Io, "cannot read the answer of ", peer_, ": ", why);
  }

 private:
  static constexpr size_t kMaxLine = 16384;

  // False at the server's end.
  bool receive() {
    std::array<char, 65536> buffer;
    const size_t got = read_(buffer);
    if (got > bytes_left_) refuse("it is larger than is taken here");
    bytes_left_ -= got;
    in_.append(buffer.data(), got);
    return got > 0;
  }

  const std::string peer_;
  const Read read_;
  size_t bytes_left_;
  std::string in_;
};

struct Head {
  int status = 0;
  std::string content_type = {}, encoding = {};
  std::optional<size_t> length = {};
};

Head read_head(Answer& answer) {
  Head head;
  const std::string status = answer.line();
  const int64_t code = status.size() < 12 ? 0 : parse_int(status.substr(9, 3)).value_or(0);
  if (!status.starts_with("HTTP/1.") || code < 100)
    answer.refuse("it does not begin as HTTP does; check that this is the server's port for it");
  head.status = int(code);
  for (std::string line = answer.line(); !line.empty(); line = answer.line()) {
    const size_t colon = std::min(line.find(':'), line.size());
    const std::string name = lower(line.substr(0, colon));
    const size_t first = std::min(line.find_first_not_of(" \t", colon + 1), line.size());
    const std::string value = line.substr(first, line.find_last_not_of(" \t") + 1 - first);
    if (name == "content-type") head.content_type = value;
    if (name == "transfer-encoding") head.encoding = lower(value);
    if (name != "content-length") continue;
    const auto length = parse_int(value);
    if (!length || *length < 0) answer.refuse("its length is '" + value + "'");
    head.length = size_t(*length);
  }
  return head;
}

std::string read_chunks(Answer& answer) {
  std::string body;
  while (true) {
    const std::string line = answer.line();  // the size, and perhaps more after a semicolon
    size_t size = 0;
    const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), size, 16);
    if (error != std::errc() || (*end != '\0' && *end != ';' && *end != ' '))
      answer.refuse("a piece of it has the size '" + line + "'");
    if (size == 0) break;
    body += answer.take(size);
    if (!answer.line().empty()) answer.refuse("a piece of it is longer than its size");
  }
  while (!answer.line().empty()) {
  }
  return body;
}

}  // namespace

HttpResponse http_get(const std::string& url,
                      const std::vector<std::pair<std::string, std::string>>& headers,
                      Time deadline, size_t max_bytes, const std::string& ca_file) {
  const Target target = parse_url(url);
  std::string request = cat("GET ", target.path, " HTTP/1.1\r\nHost: ", target.authority,
                            "\r\nConnection: close\r\n");
  for (const auto& [name, value] : headers) {
    if (!is_one_line(name, '!') || !is_one_line(value, ' '))
      fail(Kind::Usage, "the header '", name, "' has a line's end or the like in it");
    request += cat(name, ": ", value, "\r\n");
  }
  Socket socket = Socket::connect(target.address, deadline);
  std::optional<TlsSocket> tls;
  if (target.tls) tls.emplace(socket, target.address.host, ca_file, deadline);
  request += "\r\n";
  tls ? tls->write_all(request, deadline) : socket.write_all(request, deadline);
  const auto read = [&](std::span<char> into) {
    return tls ? tls->read_some(into, deadline) : socket.read_some(into, deadline);
  };
  Answer answer(socket.peer(), read, max_bytes);
  Head head = read_head(answer);
  while (head.status < 200) head = read_head(answer);  // more will follow, it says
  HttpResponse response{.status = head.status, .content_type = head.content_type};
  if (head.status == 204 || head.status == 304) return response;
  if (head.encoding == "chunked")
    response.body = read_chunks(answer);
  else if (!head.encoding.empty())
    answer.refuse("it is encoded as '" + head.encoding + "'");
  else
    response.body = head.length ? answer.take(*head.length) : answer.rest();
  return response;
}

}  // namespace yoke::net
