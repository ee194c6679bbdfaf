// SPDX-License-Identifier: Apache-2.0
// What a request over HTTP means: paths, headers and bodies of the Open Inference Protocol with
// Triton's extensions, and of Yoke's own. No sockets.
//
//   /v2, /v2/health/{live,ready}                                  for everybody
//   /v2/models/M[/versions/V][/{ready,config,stats,infer,generate,generate_stream}]
//   /v2/models/stats, /v2/repository/index, /v2/repository/models/M/{load,unload}
//   /v2/yoke/{view,usage,reload}                                  for `yoke top` and accounts
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "yoke/serve/rest_body.h"
#include "yoke/serve/service.h"

namespace yoke::serve {

struct HttpCall {
  std::string method = {}, target = {};
  std::string_view key = {}, tenant = {}, traceparent = {};
  std::string_view content_encoding = {}, accept_encoding = {};
  std::optional<std::string_view> json_bytes = {};  // Inference-Header-Content-Length
  bool by_page = false;  // a browser's for a page: it has an Origin, or a Host that may be anyone's
  std::shared_ptr<const std::string> body = {};
};

struct HttpReply {
  int status = 200;
  std::string type = "application/json", body = {}, encoding = {};
  std::optional<size_t> json_bytes = {};
  double retry_after = 0;
};

// How an answer is to be written.
struct AnswerForm {
  std::vector<WantedOutput> outputs = {};
  bool binary = false;
  std::string encoding = {};  // gzip or deflate
  enum class Kind { Tensors, Text, TextPieces } kind = Kind::Tensors;
};

// One of three.
struct HttpRoute {
  std::optional<HttpReply> reply = {};   // at once
  std::function<HttpReply()> slow = {};  // on a thread that may wait
  std::optional<Request> request = {};   // to the service
  Caller caller = {};
  AnswerForm form = {};
};

// A line in the access log for what was refused: the model by its path, the tenant by its key,
// where these are known.
void log_refused(Service& service, const HttpCall& call, const Outcome& outcome,
                 const std::string& id = "");
// Does not throw: what is refused is a reply.
HttpRoute route(Service& service, RestReader& reader, const HttpCall& call, size_t max_body_bytes);
HttpReply reply_to(const Answer& answer, const AnswerForm& form);
HttpReply reply_to(const Outcome& outcome);

}  // namespace yoke::serve
