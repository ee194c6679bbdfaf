// SPDX-License-Identifier: Apache-2.0
#include "yoke/net/tls.h"

#include <arpa/inet.h>
#include <openssl/err.h>
#include <openssl/ssl.h>

#include <array>

#include "yoke/base/error.h"

namespace yoke::net {
namespace {

std::string last_error() {
  const char* text = ::ERR_reason_error_string(::ERR_get_error());
  return text ? text : "no reason was given";
}

using Context = std::unique_ptr<SSL_CTX, decltype(&::SSL_CTX_free)>;

Context make_context(const std::string& ca_file) {
  ::ERR_clear_error();
  Context context(::SSL_CTX_new(::TLS_client_method()), &::SSL_CTX_free);
  if (!context) fail(Kind::Io, "cannot speak TLS: ", last_error());
  ::SSL_CTX_set_min_proto_version(context.get(), TLS1_2_VERSION);
  ::SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER, nullptr);
  if (ca_file.empty())
    ::SSL_CTX_set_default_verify_paths(context.get());
  else if (::SSL_CTX_load_verify_locations(context.get(), ca_file.c_str(), nullptr) != 1)
    fail(Kind::Usage, "cannot use '", ca_file, "': ", last_error(),
         "; wanted a PEM file of certificates");
  return context;
}

}  // namespace

// OpenSSL reads and writes memory, and the socket has the deadlines.
struct TlsSocket::Impl {
  Impl(Socket& over, const std::string& ca_file)
      : socket(over), context(make_context(ca_file)), ssl(::SSL_new(context.get()), &::SSL_free) {
    if (!ssl) fail(Kind::Io, "cannot speak TLS: ", last_error());
    in = ::BIO_new(::BIO_s_mem()), out = ::BIO_new(::BIO_s_mem());
    ::SSL_set_bio(ssl.get(), in, out);  // which owns them from here on
  }

  // Until it is done, or the peer ends it: 0.
  template <typename Do>
  size_t step(const Do& what, Time deadline) {
    std::array<char, 16384> buffer;
    while (true) {
      ::ERR_clear_error();
      const int done = what();
      const int error = ::SSL_get_error(ssl.get(), done);
      for (int size = 0; (size = ::BIO_read(out, buffer.data(), int(buffer.size()))) > 0;)
        socket.write_all({buffer.data(), size_t(size)}, deadline);
      if (done > 0) return size_t(done);
      if (error == SSL_ERROR_ZERO_RETURN) return 0;
      if (error != SSL_ERROR_WANT_READ) refuse();
      const size_t got = socket.read_some(buffer, deadline);
      if (got == 0) fail(Kind::Io, "TLS with ", socket.peer(), " was cut off");
      ::BIO_write(in, buffer.data(), int(got));
    }
  }

  [[noreturn]] void refuse() const {
    if (const long verdict = ::SSL_get_verify_result(ssl.get()); verdict != X509_V_OK)
      fail(Kind::Io, "the certificate of ", socket.peer(),
           " is refused: ", ::X509_verify_cert_error_string(verdict),
           "; wanted one that names the host, of a signer whom the system or the --ca FILE knows");
    fail(Kind::Io, "cannot speak TLS with ", socket.peer(), ": ", last_error());
  }

  Socket& socket;
  const Context context;
  const std::unique_ptr<SSL, decltype(&::SSL_free)> ssl;
  BIO *in = nullptr, *out = nullptr;
};

TlsSocket::TlsSocket(Socket& socket, const std::string& host, const std::string& ca_file,
                     Time deadline)
    : impl_(std::make_unique<Impl>(socket, ca_file)) {
  SSL* ssl = impl_->ssl.get();
  std::array<unsigned char, sizeof(in6_addr)> number;
  const bool is_number = ::inet_pton(AF_INET, host.c_str(), number.data()) == 1 ||
                         ::inet_pton(AF_INET6, host.c_str(), number.data()) == 1;
  if (!is_number) ::SSL_set_tlsext_host_name(ssl, host.c_str());
  const bool set = is_number
                       ? ::X509_VERIFY_PARAM_set1_ip_asc(::SSL_get0_param(ssl), host.c_str()) == 1
                       : ::SSL_set1_host(ssl, host.c_str()) == 1;
  if (!set) fail(Kind::Usage, "no certificate can name the host '", host, "'");
  if (impl_->step([&] { return ::SSL_connect(ssl); }, deadline) == 0) impl_->refuse();
}

TlsSocket::~TlsSocket() = default;

size_t TlsSocket::read_some(std::span<char> into, Time deadline) {
  return impl_->step([&] { return ::SSL_read(impl_->ssl.get(), into.data(), int(into.size())); },
                     deadline);
}

void TlsSocket::write_all(std::string_view data, Time deadline) {
  if (impl_->step([&] { return ::SSL_write(impl_->ssl.get(), data.data(), int(data.size())); },
                  deadline) == 0)
    impl_->refuse();
}

}  // namespace yoke::net
