// SPDX-License-Identifier: Apache-2.0
#include "yoke/serve/compression.h"

#include <zlib.h>

#include <algorithm>
#include <memory>

#include "yoke/serve/status.h"

namespace yoke::serve {
namespace {

constexpr int kWindow = 15, kGzip = 16, kEither = 32;  // zlib's windowBits
constexpr size_t kPiece = 1 << 30;                     // zlib counts in 32 bits

// Takes all of `in` through `step`, ::inflate or ::deflate, into `out`, which grows up to `most`
// bytes. Z_STREAM_END, or why it stopped: Z_BUF_ERROR where more of `in` or of `most` is wanted.
int run(z_stream& stream, int (*step)(z_stream*, int), std::string_view in, std::string& out,
        size_t most, size_t& used) {
  size_t written = 0;
  int status = Z_OK;
  while (status == Z_OK || (status == Z_BUF_ERROR && written == out.size() && written < most)) {
    if (written == out.size()) out.resize(std::min(most, std::max<size_t>(1024, 2 * written)));
    stream.next_in = const_cast<Bytef*>(reinterpret_cast<const Bytef*>(in.data() + used));
    stream.next_out = reinterpret_cast<Bytef*>(out.data() + written);
    const auto given = stream.avail_in = uInt(std::min(kPiece, in.size() - used));
    const auto room = stream.avail_out = uInt(std::min(kPiece, out.size() - written));
    status = step(&stream, used + given == in.size() ? Z_FINISH : Z_NO_FLUSH);
    used += given - stream.avail_in;
    written += room - stream.avail_out;
  }
  out.resize(written);
  return status;
}

}  // namespace

std::string inflate(std::string_view packed, size_t most) {
  z_stream stream{};
  if (inflateInit2(&stream, kWindow + kEither) != Z_OK)
    fail(Kind::Internal, "zlib has no memory to inflate a body");
  const std::unique_ptr<z_stream, int (*)(z_stream*)> end(&stream, inflateEnd);
  std::string out(std::min(most + 1, 4 * packed.size()), '\0');
  size_t used = 0;
  // One byte more than allowed tells a body that is just as large from one that is too large.
  const int status = run(stream, ::inflate, packed, out, most + 1, used);
  if (out.size() > most)
    refuse(Status::TooLarge, "the compressed body: wanted at most ", most,
           " bytes when it is inflated, got more");
  if (status != Z_STREAM_END)
    refuse(Status::Invalid, "the compressed body: wanted gzip or deflate, got ",
           status == Z_BUF_ERROR   ? "one that is cut off"
           : stream.msg != nullptr ? stream.msg
                                   : "something else",
           " after ", used, " of ", packed.size(), " bytes");
  if (used != packed.size())
    refuse(Status::Invalid, "the compressed body: wanted its end after ", used, " bytes, got ",
           packed.size() - used, " more");
  return out;
}

std::string deflate(std::string_view plain, bool gzip) {
  z_stream stream{};
  if (deflateInit2(&stream, Z_BEST_SPEED, Z_DEFLATED, kWindow + (gzip ? kGzip : 0), 8,
                   Z_DEFAULT_STRATEGY) != Z_OK)
    fail(Kind::Internal, "zlib has no memory to deflate a body");
  const std::unique_ptr<z_stream, int (*)(z_stream*)> end(&stream, deflateEnd);
  std::string out(deflateBound(&stream, plain.size()), '\0');
  size_t used = 0;
  const int status = run(stream, ::deflate, plain, out, SIZE_MAX, used);
  YOKE_CHECK(status == Z_STREAM_END, "zlib ended with ", status);
  return out;
}

}  // namespace yoke::serve
