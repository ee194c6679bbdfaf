// SPDX-License-Identifier: Apache-2.0
#include "yoke/data/image_file.h"

#include <png.h>

#include <csetjmp>
#include <cstdio>  // before jpeglib.h, which uses it
#include <cstring>
#include <string_view>

#include <jerror.h>
#include <jpeglib.h>

#include "yoke/base/error.h"
#include "yoke/base/mapped_file.h"

// Both libraries leave by longjmp where something is wrong. So a step that calls them is a function
// of its own that says whether it went well, and holds nothing that has a destructor.
namespace yoke::data {
namespace {

// Where a library jumps back to, and why.
struct Failure {
  std::jmp_buf jump;
  char reason[JMSG_LENGTH_MAX] = "";
};

[[noreturn]] void refuse(const MappedFile& file, std::string_view why) {
  fail(Kind::Io, "'", file.path().string(), "' is no picture to read: ", why);
}

Image image_of(const MappedFile& file, int64_t height, int64_t width) {
  if (height * width > kMaxPixels)
    refuse(file, cat("it is ", height, " x ", width, ", and ", kMaxPixels, " pixels are the most"));
  return {height, width, std::vector<uint8_t>(size_t(height * width * 3))};
}

struct Png {
  explicit Png(const MappedFile& file) : left(file.data(), file.size()) {
    png = png_create_read_struct(PNG_LIBPNG_VER_STRING, &failure, on_error, on_warning);
    if (png != nullptr) info = png_create_info_struct(png);
    if (info == nullptr) refuse(file, "libpng does not start");
  }
  ~Png() { png_destroy_read_struct(&png, &info, nullptr); }
  Png(const Png&) = delete;

  static void on_error(png_structp png, const char* message) {
    auto& failure = *static_cast<Failure*>(png_get_error_ptr(png));
    std::snprintf(failure.reason, sizeof failure.reason, "%s", message);
    std::longjmp(failure.jump, 1);
  }
  static void on_warning(png_structp, const char*) {}
  static void on_read(png_structp png, png_bytep to, size_t count) {
    auto& left = static_cast<Png*>(png_get_io_ptr(png))->left;
    if (count > left.size()) png_error(png, "it ends too early");
    std::memcpy(to, left.data(), count);
    left.remove_prefix(count);
  }

  bool begin() {
    if (setjmp(failure.jump) != 0) return false;
    png_set_read_fn(png, this, on_read);
    png_read_info(png, info);
    png_set_strip_16(png);
    png_set_strip_alpha(png);
    png_set_palette_to_rgb(png);
    png_set_gray_to_rgb(png);
    png_set_interlace_handling(png);
    png_read_update_info(png, info);
    return true;
  }
  bool read(png_bytepp rows) {
    if (setjmp(failure.jump) != 0) return false;
    png_read_image(png, rows);
    png_read_end(png, nullptr);
    return true;
  }

  std::string_view left;  // of the file
  Failure failure = {};
  png_structp png = nullptr;
  png_infop info = nullptr;
};

Image read_png(const MappedFile& file) {
  Png png(file);
  if (!png.begin()) refuse(file, png.failure.reason);
  Image image = image_of(file, png_get_image_height(png.png, png.info),
                         png_get_image_width(png.png, png.info));
  YOKE_CHECK(png_get_rowbytes(png.png, png.info) == size_t(image.width * 3));
  std::vector<png_bytep> rows;
  for (int64_t y = 0; y < image.height; ++y)
    rows.push_back(&image.pixels[size_t(y * image.width * 3)]);
  if (!png.read(rows.data())) refuse(file, png.failure.reason);
  return image;
}

struct Jpeg {
  Jpeg() {
    info.err = jpeg_std_error(&errors);
    info.client_data = &failure;
    errors.error_exit = on_error;
    errors.emit_message = on_message;
  }
  ~Jpeg() { jpeg_destroy_decompress(&info); }
  Jpeg(const Jpeg&) = delete;

  static void on_error(j_common_ptr info) {
    auto& failure = *static_cast<Failure*>(info->client_data);
    info->err->format_message(info, failure.reason);
    std::longjmp(failure.jump, 1);
  }
  // A picture that is cut off is but a warning to libjpeg, which paints the rest grey.
  static void on_message(j_common_ptr info, int level) {
    const int code = info->err->msg_code;
    if (level < 0 && (code == JWRN_JPEG_EOF || code == JWRN_HIT_MARKER)) on_error(info);
  }

  bool begin(const MappedFile& file) {
    if (setjmp(failure.jump) != 0) return false;
    jpeg_create_decompress(&info);
    jpeg_mem_src(&info, reinterpret_cast<const unsigned char*>(file.data()), file.size());
    jpeg_read_header(&info, TRUE);
    return true;
  }
  bool read(uint8_t* to) {
    if (setjmp(failure.jump) != 0) return false;
    info.out_color_space = JCS_RGB;
    jpeg_start_decompress(&info);
    while (info.output_scanline < info.output_height) {
      JSAMPROW row = to + size_t(info.output_scanline) * info.output_width * 3;
      jpeg_read_scanlines(&info, &row, 1);
    }
    jpeg_finish_decompress(&info);
    return true;
  }

  Failure failure = {};
  jpeg_error_mgr errors = {};
  jpeg_decompress_struct info = {};
};

Image read_jpeg(const MappedFile& file) {
  Jpeg jpeg;
  if (!jpeg.begin(file)) refuse(file, jpeg.failure.reason);
  if (jpeg.info.num_components == 4)
    refuse(file, "it is a CMYK JPEG, a thing of print; convert it to RGB");
  Image image = image_of(file, jpeg.info.image_height, jpeg.info.image_width);
  if (!jpeg.read(image.pixels.data())) refuse(file, jpeg.failure.reason);
  return image;
}

}  // namespace

Image read_image(const std::filesystem::path& path) {
  const MappedFile file(path);
  const std::string_view bytes(file.data(), file.size());
  if (bytes.starts_with("\x89PNG\r\n\x1a\n")) return read_png(file);
  if (bytes.starts_with("\xff\xd8\xff")) return read_jpeg(file);
  refuse(file, bytes.empty() ? "it is empty" : "it begins neither like a PNG nor like a JPEG");
}

}  // namespace yoke::data
