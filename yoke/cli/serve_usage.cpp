// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/serve_usage.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "yoke/base/error.h"
#include "yoke/net/http_client.h"

namespace yoke::cli {
namespace {

constexpr auto kPatience = std::chrono::seconds(2);

// What an answer that is no success says, in one line.
std::string reason_of(const net::HttpResponse& answer) {
  const auto body = nlohmann::json::parse(answer.body, nullptr, false);
  if (body.is_object() && body.contains("error") && body["error"].is_string()) return body["error"];
  return answer.body.substr(0, std::min<size_t>(answer.body.find('\n'), 200));
}

}  // namespace

std::string ask_server(const std::string& url, const std::string& path, const std::string& key,
                       const std::string& ca) {
  const std::string whole = url.substr(0, url.find_last_not_of('/') + 1) + path;
  std::vector<std::pair<std::string, std::string>> headers;
  if (!key.empty()) headers.emplace_back("Authorization", "Bearer " + key);
  try {
    const auto answer =
        net::http_get(whole, headers, SteadyClock().now() + kPatience, 64 << 20, ca);
    if (answer.status == 200) return answer.body;
    const bool needs_key = answer.status == 401 || answer.status == 403;
    fail(Kind::Io, whole, " answered ", answer.status, ": ", reason_of(answer),
         needs_key              ? "; give one by --key or YOKE_KEY"
         : answer.status == 404 ? "; is this the HTTP address of a yoke serve?"
                                : "");
  } catch (const Error& error) {
    if (error.kind() != Kind::Timeout) throw;
    fail(Kind::Io, error.what());  // a server that is not there, and no peer of ours
  }
}

void print_usage(const std::string& url, const std::string& key, const std::string& ca, bool json) {
  const std::string text = ask_server(url, "/v2/yoke/usage", key, ca);
  if (json) {
    std::printf("%s\n", text.c_str());
    return;
  }
  struct Row {
    std::string tenant, model;
    uint64_t requests, rows;
    double device_s;
  };
  std::vector<Row> rows;
  try {
    const auto usage = nlohmann::json::parse(text);
    for (const auto& one : usage.at("tenants")) {
      if (one.at("models").empty()) rows.push_back({one.at("tenant"), "-", 0, 0, 0});
      for (const auto& use : one.at("models"))
        rows.push_back({one.at("tenant"), use.at("model"), use.at("requests"), use.at("rows"),
                        use.at("device_seconds")});
    }
  } catch (const nlohmann::json::exception& error) {
    fail(Kind::Io, "what ", url, " answered is no usage of a yoke serve: ", error.what());
  }
  size_t tenant = 6, model = 5;  // how wide their columns are
  for (const auto& row : rows) {
    tenant = std::max(tenant, row.tenant.size());
    model = std::max(model, row.model.size());
  }
  std::printf("%-*s  %-*s %12s %12s %15s\n", int(tenant), "tenant", int(model), "model", "requests",
              "rows", "device seconds");
  for (const auto& row : rows)
    std::printf("%-*s  %-*s %12lu %12lu %15.3f\n", int(tenant), row.tenant.c_str(), int(model),
                row.model.c_str(), row.requests, row.rows, row.device_s);
}

}  // namespace yoke::cli
