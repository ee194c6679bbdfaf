// SPDX-License-Identifier: Apache-2.0
#include "yoke/net/resolve.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <resolv.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <utility>

#include "yoke/base/error.h"

namespace yoke::net {
namespace {

// Makes this thread's name lookups give up by the deadline, in whole seconds and at least one: the
// resolver has no deadline of its own and would try for half a minute.
class LookupTime {
 public:
  explicit LookupTime(Time deadline) {
    if ((_res.options & RES_INIT) == 0) ::res_init();
    retry_ = std::exchange(_res.retry, 1);
    retrans_ = _res.retrans;
    const auto left = std::chrono::floor<std::chrono::seconds>(deadline - SteadyClock().now());
    const int64_t each = left.count() / std::max(1, _res.nscount);  // servers are asked in turn
    _res.retrans = int(std::clamp<int64_t>(each, 1, std::max(1, retrans_)));
  }
  ~LookupTime() {
    _res.retry = retry_;
    _res.retrans = retrans_;
  }
  LookupTime(const LookupTime&) = delete;
  LookupTime& operator=(const LookupTime&) = delete;

 private:
  int retry_, retrans_;
};

}  // namespace

std::vector<Endpoint> resolve(const Address& address, Purpose purpose, Time deadline) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | (purpose == Purpose::Listen ? AI_PASSIVE : 0);
  const LookupTime limited(deadline);
  addrinfo* first = nullptr;
  const int code = ::getaddrinfo(address.host.empty() ? nullptr : address.host.c_str(),
                                 std::to_string(address.port).c_str(), &hints, &first);
  if (code == EAI_AGAIN)
    fail(Kind::Timeout, "no name server answered for host '", address.host,
         "' in time; check the name server, or give the host's number");
  if (code != 0)
    fail(Kind::Io, "cannot find host '", address.host, "': ", ::gai_strerror(code),
         "; check the name, or give the host's number");
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> list(first, ::freeaddrinfo);
  std::vector<Endpoint> endpoints;
  for (const addrinfo* at = list.get(); at != nullptr; at = at->ai_next) {
    Endpoint endpoint{.size = at->ai_addrlen};
    std::memcpy(&endpoint.storage, at->ai_addr, at->ai_addrlen);
    endpoints.push_back(endpoint);
  }
  return endpoints;
}

std::vector<std::string> own_hosts() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return {"127.0.0.1"};
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(list, &::freeifaddrs);
  std::vector<std::string> hosts;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || (entry->ifa_flags & IFF_UP) == 0) continue;
    if ((entry->ifa_flags & IFF_LOOPBACK) != 0 || entry->ifa_addr->sa_family != AF_INET) continue;
    std::array<char, INET_ADDRSTRLEN> text{};
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(entry->ifa_addr);
    if (::inet_ntop(AF_INET, &v4->sin_addr, text.data(), text.size()) != nullptr)
      hosts.emplace_back(text.data());
  }
  hosts.emplace_back("127.0.0.1");
  return hosts;
}

std::string to_text(const Endpoint& endpoint) {
  std::array<char, NI_MAXHOST> host{};
  if (::getnameinfo(endpoint.get(), endpoint.size, host.data(), host.size(), nullptr, 0,
                    NI_NUMERICHOST) != 0)
    return "unknown";
  return to_text(Address{host.data(), port_of(endpoint)});
}

uint16_t port_of(const Endpoint& endpoint) {
  return ntohs(endpoint.storage.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6*>(&endpoint.storage)->sin6_port
                   : reinterpret_cast<const sockaddr_in*>(&endpoint.storage)->sin_port);
}

}  // namespace yoke::net
