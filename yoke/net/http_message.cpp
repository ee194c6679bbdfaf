// SPDX-License-Identifier: Apache-2.0
#include "yoke/net/http_message.h"

#include <algorithm>

#include "yoke/base/error.h"
#include "yoke/base/text.h"

namespace yoke::net {
namespace {

const char* reason(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 403:
      return "Forbidden";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 431:
      return "Request Header Fields Too Large";
    case 500:
      return "Internal Server Error";
    case 503:
      return "Service Unavailable";
    case 505:
      return "HTTP Version Not Supported";
  }
  return "Status";
}

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result)
    if (c >= 'A' && c <= 'Z') c = char(c - 'A' + 'a');
  return result;
}

std::string_view trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t");
  if (first == text.npos) return "";
  return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

// The next line without its end; servers may accept a bare newline (RFC 9112, 2.2).
std::string_view take_line(std::string_view& text) {
  const size_t end = std::min(text.find('\n'), text.size());
  std::string_view line = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  if (line.ends_with('\r')) line.remove_suffix(1);
  return line;
}

bool is_token(std::string_view text) {
  return !text.empty() && std::ranges::all_of(text, [](unsigned char c) {
    return c > ' ' && c < 0x7f &&
           std::string_view("\"(),/:;<=>?@[\\]{}").find(char(c)) == std::string_view::npos;
  });
}

bool is_target(std::string_view text) {
  return text.starts_with('/') &&
         std::ranges::all_of(text, [](unsigned char c) { return c > ' ' && c != 0x7f; });
}

// "GET /path?query HTTP/1.1"; gives the status that refuses it, or 0.
int read_request_line(std::string_view line, ParsedRequest& parsed) {
  const auto words = split(line, ' ');
  if (words.size() != 3 || !is_token(words[0]) || !words[2].starts_with("HTTP/")) return 400;
  if (words[2] != "HTTP/1.1" && words[2] != "HTTP/1.0") return 505;
  parsed.request.method = words[0];
  if (words[0] != "GET" && words[0] != "HEAD") return 405;
  if (!is_target(words[1])) return 400;
  const size_t mark = std::min(words[1].find('?'), words[1].size());
  parsed.request.path = words[1].substr(0, mark);
  parsed.request.query = words[1].substr(std::min(mark + 1, words[1].size()));
  parsed.keep_alive = words[2] == "HTTP/1.1";
  return 0;
}

int read_fields(std::string_view text, bool needs_host, ParsedRequest& parsed) {
  int hosts = 0;
  while (!text.empty()) {
    const std::string_view line = take_line(text);
    if (line.empty()) break;
    const size_t colon = line.find(':');
    if (colon == line.npos || !is_token(line.substr(0, colon))) return 400;
    const std::string name = lower(line.substr(0, colon));
    const std::string value = lower(trimmed(line.substr(colon + 1)));
    if (name == "host") ++hosts;
    if (name == "authorization") parsed.request.authorization = trimmed(line.substr(colon + 1));
    // A body would be taken for the next request; nothing here has a use for one.
    if (name == "transfer-encoding" || (name == "content-length" && value != "0")) return 400;
    if (name == "connection") {
      if (value.find("close") != value.npos) parsed.keep_alive = false;
      if (value.find("keep-alive") != value.npos) parsed.keep_alive = true;
    }
  }
  return hosts > 1 || (hosts == 0 && needs_host) ? 400 : 0;
}

}  // namespace

std::optional<size_t> head_size(std::string_view received) {
  for (size_t at = received.find('\n'); at != received.npos; at = received.find('\n', at + 1)) {
    const std::string_view rest = received.substr(at + 1);
    if (rest.starts_with('\n')) return at + 2;
    if (rest.starts_with("\r\n")) return at + 3;
  }
  return std::nullopt;
}

ParsedRequest parse_request(std::string_view head) {
  ParsedRequest parsed;
  std::string_view line = take_line(head);
  if (line.empty()) line = take_line(head);  // left over by a careless client (RFC 9112, 2.2)
  parsed.error = read_request_line(line, parsed);
  if (parsed.error == 0) parsed.error = read_fields(head, line.ends_with("/1.1"), parsed);
  if (parsed.error != 0) parsed.keep_alive = false;
  return parsed;
}

std::string serialize(const HttpResponse& response, bool keep_alive, bool head_only) {
  std::string text =
      cat("HTTP/1.1 ", response.status, " ", reason(response.status),
          "\r\nContent-Type: ", response.content_type, "\r\nContent-Length: ", response.body.size(),
          response.status == 405 ? "\r\nAllow: GET, HEAD" : "",
          "\r\nConnection: ", keep_alive ? "keep-alive" : "close", "\r\n\r\n");
  if (!head_only) text += response.body;
  return text;
}

HttpResponse error_response(int status) {
  return {.status = status, .body = cat(status, " ", reason(status), "\n")};
}

}  // namespace yoke::net
