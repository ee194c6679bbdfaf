// SPDX-License-Identifier: Apache-2.0
#include "yoke/serve/channel.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "yoke/base/error.h"

namespace yoke::serve {
namespace {

constexpr uint64_t kPage = 4096;
uint64_t to_page(uint64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }
uint64_t tables_bytes(uint32_t rows) { return to_page(sizeof(SlabHeader)) + to_page(rows * 17ul); }

}  // namespace

void SlabHeader::set_error(std::string_view text) {
  const size_t size = std::min(text.size(), error.size() - 1);
  std::ranges::copy(text.substr(0, size), error.begin());
  error[size] = 0;
}

uint64_t Channel::slab_bytes(uint32_t max_rows, uint64_t data_bytes) {
  return tables_bytes(max_rows) + to_page(data_bytes);
}

Channel::Channel(uint32_t max_rows, uint64_t data_bytes)
    : file_(::memfd_create("yoke-slabs", MFD_CLOEXEC)) {
  bytes_ = kPage + kSlabs * slab_bytes(max_rows, data_bytes);
  if (!file_ || ::ftruncate(file_.get(), off_t(bytes_)) != 0)
    fail(Kind::Io, "cannot make shared memory of ", bytes_, " bytes: ", std::strerror(errno));
  memory_ = ::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, file_.get(), 0);
  if (memory_ == MAP_FAILED) fail(Kind::Io, "cannot map shared memory: ", std::strerror(errno));
  new (memory_) Head{.max_rows = max_rows, .data_bytes = data_bytes};
  ::munmap(memory_, kPage);
  map();
  for (auto& slab : slabs_) new (slab.header) SlabHeader();
}

Channel::Channel(net::Descriptor file) : file_(std::move(file)) {
  struct stat status = {};
  if (::fstat(file_.get(), &status) != 0) fail(Kind::Io, "no shared memory was handed over");
  bytes_ = uint64_t(status.st_size);
  map();
}

void Channel::map() {
  memory_ =
      ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file_.get(), 0);
  if (memory_ == MAP_FAILED)
    fail(Kind::Io, "cannot map ", bytes_, " bytes of shared memory: ", std::strerror(errno));
  max_rows_ = head().max_rows;
  data_bytes_ = head().data_bytes;
  auto* at = static_cast<std::byte*>(memory_) + kPage;
  for (auto& slab : slabs_) {
    slab.header = reinterpret_cast<SlabHeader*>(at);
    auto* tables = at + to_page(sizeof(SlabHeader));
    slab.owners = reinterpret_cast<uint64_t*>(tables);
    slab.owners_back = slab.owners + max_rows();
    slab.failed = reinterpret_cast<uint8_t*>(slab.owners_back + max_rows());
    slab.data = at + tables_bytes(max_rows());
    at += slab_bytes(max_rows(), data_bytes());
  }
}

Channel::~Channel() { ::munmap(memory_, bytes_); }

void Channel::forget(int index) const {
  ::madvise(slab(index).data, to_page(data_bytes()), MADV_REMOVE);
}

}  // namespace yoke::serve
