// SPDX-License-Identifier: Apache-2.0
#include "yoke/serve/keys.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/rand.h>
#include <strings.h>

#include <array>
#include <span>

#include "yoke/base/error.h"

namespace yoke::serve {
namespace {

std::string to_hex(std::span<const unsigned char> bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const unsigned char byte : bytes) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

}  // namespace

std::string new_key() {
  std::array<unsigned char, 32> bytes = {};
  if (RAND_bytes(bytes.data(), int(bytes.size())) != 1)
    fail(Kind::Internal, "the system gives no random numbers");
  return "yk-" + to_hex(bytes);
}

std::string sha256(std::string_view text) {
  std::array<unsigned char, 32> digest = {};
  EVP_Digest(text.data(), text.size(), digest.data(), nullptr, EVP_sha256(), nullptr);
  return to_hex(digest);
}

bool same_digest(std::string_view one, std::string_view other) {
  return one.size() == other.size() && CRYPTO_memcmp(one.data(), other.data(), one.size()) == 0;
}

std::string_view bearer_key(std::string_view authorization) {
  constexpr std::string_view kScheme = "Bearer ";
  if (authorization.size() < kScheme.size() ||
      ::strncasecmp(authorization.data(), kScheme.data(), kScheme.size()) != 0)
    return {};
  return authorization.substr(kScheme.size());
}

}  // namespace yoke::serve
