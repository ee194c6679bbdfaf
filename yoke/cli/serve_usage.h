// SPDX-License-Identifier: Apache-2.0
// What a running `yoke serve` tells about itself when it is asked over HTTP.
#pragma once

#include <string>

namespace yoke::cli {

inline constexpr const char* kCaHelp =
    "PEM file of who signed the certificate of https; else the system's";

// The JSON that the server at `url` gives of `path`, "/v2/yoke/view"; an empty key is not sent.
// Where it is https, who signed its certificate is in the PEM file `ca`, or the system knows it.
// Throws Kind::Io with what to do where there is no answer, or another one.
std::string ask_server(const std::string& url, const std::string& path, const std::string& key,
                       const std::string& ca);

// Of `yoke serve usage`: who used how much, as a table or as the server's JSON.
void print_usage(const std::string& url, const std::string& key, const std::string& ca, bool json);

}  // namespace yoke::cli
