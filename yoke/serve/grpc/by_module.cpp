// SPDX-License-Identifier: Apache-2.0
// The program's side of gRPC: a module beside it that is opened when it is needed, and whose
// libraries see themselves first. SentencePiece carries an older protobuf under the same names;
// in one name space with gRPC's the two take each other's functions, and the program dies before
// main().
#include <dlfcn.h>

#include <filesystem>

#include "yoke/base/error.h"
#include "yoke/serve/grpc/api.h"

namespace yoke::serve {
namespace {

struct Opened {
  const GrpcApi* api = nullptr;
  std::string reason = {};
};

const Opened& opened() {
  static const Opened kOpened = [] {
    const auto path =
        std::filesystem::read_symlink("/proc/self/exe").parent_path() / "libyoke_grpc.so";
    void* module = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
    if (!module) return Opened{.reason = ::dlerror()};
    const auto api = reinterpret_cast<decltype(&yoke_grpc_api)>(::dlsym(module, "yoke_grpc_api"));
    return api ? Opened{.api = api()} : Opened{.reason = ::dlerror()};
  }();
  return kOpened;
}

const GrpcApi& api() {
  if (!opened().api)
    fail(Kind::Config, "gRPC cannot be had: ", opened().reason,
         "; serve.grpc=\"\" switches it off");
  return *opened().api;
}

}  // namespace

bool has_grpc() { return opened().api != nullptr; }

struct GrpcFront::Impl {
  GrpcFront* front;
  ~Impl() { api().close(front); }
};

GrpcFront::GrpcFront(Service& service, const GrpcOptions& options)
    : impl_(new Impl{api().open(service, options)}) {}
GrpcFront::~GrpcFront() = default;
std::string GrpcFront::address() const { return api().address(*impl_->front); }
void GrpcFront::shut_down(Time deadline) { api().shut_down(*impl_->front, deadline); }

bool has_grpc_load() { return has_grpc(); }
std::string grpc_question(const Question& question) { return api().question(question); }
bool grpc_values(std::string_view answer, std::span<float> values) {
  return api().values(answer, values);
}
std::vector<LoadReport> run_grpc_load(const LoadOptions& options,
                                      const std::vector<LoadUser>& users) {
  return api().run_load(options, users);
}
uint64_t run_grpc_stream(const net::Address& to, uint64_t count, uint64_t most, Duration patience,
                         const std::function<void(uint64_t number, Question& question)>& make,
                         const OnStreamAnswer& on_answer) {
  return api().run_stream(to, count, most, patience, make, on_answer);
}

}  // namespace yoke::serve
