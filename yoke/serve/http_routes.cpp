// SPDX-License-Identifier: Apache-2.0
#include "yoke/serve/http_routes.h"

#include <algorithm>
#include <charconv>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/serve/compression.h"

namespace yoke::serve {
namespace {

std::string decode(std::string_view text) {
  std::string result;
  for (size_t i = 0; i < text.size(); ++i) {
    unsigned value = 0;
    const auto* end = text.data() + i + 3;
    if (text[i] == '%' && i + 2 < text.size() &&
        std::from_chars(text.data() + i + 1, end, value, 16).ptr == end) {
      result += char(value);
      i += 2;
    } else {
      result += text[i];
    }
  }
  return result;
}

// "/v2/models/a%20b?x" as {"v2", "models", "a b"}.
std::vector<std::string> parts_of(std::string_view target) {
  if (const size_t scheme = target.find("://"); !target.starts_with('/') && scheme != target.npos) {
    const size_t slash = target.find('/', scheme + 3);
    target = slash == target.npos ? "/" : target.substr(slash);
  }
  target = target.substr(0, target.find('?'));
  std::vector<std::string> parts;
  parts.reserve(6);
  if (target.starts_with('/')) target.remove_prefix(1);
  for (;;) {
    const size_t end = target.find('/');
    parts.push_back(decode(target.substr(0, end)));
    if (end == target.npos) return parts;
    target.remove_prefix(end + 1);
  }
}

// What the client likes best of what we have; empty for the body as it is.
std::string choose_encoding(std::string_view accepted) {
  std::string best;
  double most = 0;
  for (const auto& word : split(accepted, ',')) {
    const auto fields = split(word, ';');
    std::string name;
    for (const char c : fields[0])
      if (c != ' ') name += char(std::tolower(c));
    double weight = 1;
    for (size_t i = 1; i < fields.size(); ++i)
      if (const size_t q = fields[i].find("q="); q != std::string::npos)
        std::from_chars(fields[i].data() + q + 2, fields[i].data() + fields[i].size(), weight);
    if ((name == "gzip" || name == "deflate") && weight > most) {
      best = name;
      most = weight;
    }
  }
  return best;
}

HttpReply text_reply(std::string body) { return {.body = std::move(body)}; }

std::string health_body(bool live, bool ready) {
  return cat("{\"live\":", live ? "true" : "false", ",\"ready\":", ready ? "true" : "false", "}");
}

bool is_work(std::string_view action) {
  return action == "infer" || action == "generate" || action == "generate_stream";
}

class Router {
 public:
  Router(Service& service, RestReader& reader, const HttpCall& call, size_t max_body)
      : service_(service), reader_(reader), call_(call), max_body_(max_body) {}

  HttpRoute run() {
    const auto parts = parts_of(call_.target);
    const auto is = [&](size_t i, std::string_view word) {
      return i < parts.size() && parts[i] == word;
    };
    const size_t count = parts.size();
    if (!is(0, "v2")) return not_found();
    if (count == 1 || (count == 2 && parts[1].empty()))
      return get([&] { return text_reply(service_.server_metadata()); });
    if (is(1, "health") && count == 3 && is(2, "live"))
      return get([&] { return text_reply(health_body(true, service_.ready())); });
    if (is(1, "health") && count == 3 && is(2, "ready"))
      return get([&] { return health(service_.ready()); });
    if (is(1, "repository") && count == 3 && is(2, "index")) return post([&] { return index(); });
    if (is(1, "repository") && count == 5 && is(2, "models") && (is(4, "load") || is(4, "unload")))
      return change(parts[3], is(4, "load"));
    if (is(1, "yoke") && count == 3) return own(parts[2]);
    if (!is(1, "models") || count < 3) return not_found();
    if (count == 3 && is(2, "stats"))
      return get([&] { return text_reply(service_.statistics("", "", caller())); });
    name_ = parts[2];
    size_t next = 3;
    if (is(3, "versions")) {
      if (count < 5 || parts[4].find_first_not_of("0123456789") != std::string::npos)
        return not_found();
      version_ = parts[4];
      next = 5;
    }
    if (next == count) return get([&] { return metadata(); });
    if (next + 1 == count) return of_model(parts[next]);
    return not_found();
  }

 private:
  static HttpRoute not_found() {
    return {.reply = HttpReply{.status = 404, .body = write_error("Not Found")}};
  }
  HttpRoute not_allowed(const char* wanted) const {
    return {.reply = HttpReply{.status = 405,
                               .body = write_error(cat("Method Not Allowed: got ", call_.method,
                                                       ", wanted ", wanted))}};
  }
  HttpRoute get(const std::function<HttpReply()>& make) const {
    if (call_.method != "GET" && call_.method != "HEAD") return not_allowed("GET");
    return {.reply = make()};
  }
  HttpRoute post(const std::function<HttpReply()>& make) const {
    if (call_.method != "POST") return not_allowed("POST");
    return {.reply = make()};
  }
  static HttpReply health(bool yes) {
    return {.status = yes ? 200 : 503, .body = health_body(yes, yes)};
  }
  Caller caller(bool must_be_tenant = false) const {
    return service_.identify(call_.key, call_.tenant, must_be_tenant, call_.by_page);
  }

  HttpReply metadata() const {
    caller();
    return text_reply(service_.model_metadata(name_, version_));
  }

  HttpReply index() {
    caller();
    return text_reply(service_.repository_index(reader_.read_index(*body())));
  }

  HttpRoute change(const std::string& name, bool load) const {
    if (call_.method != "POST") return not_allowed("POST");
    const auto who = caller();
    const std::string parameters = *body();
    return {.slow = [&service = service_, name, load, parameters, who] {
      try {
        if (load)
          service.load(name, parameters, who);
        else
          service.unload(name, who);
        return HttpReply{};
      } catch (const Refused& why) {
        return reply_to(why.outcome);
      } catch (const std::exception& error) {
        return reply_to(Outcome{Status::Internal, error.what()});
      }
    }};
  }

  HttpRoute own(const std::string& what) const {
    if (what == "view") return get([&] { return text_reply(service_.view(caller())); });
    if (what == "usage") return get([&] { return text_reply(service_.usage(caller())); });
    if (what != "reload") return not_found();
    return post([&] {
      service_.reload(caller());
      return text_reply("{}");
    });
  }

  HttpRoute of_model(const std::string& action) {
    if (action == "ready")
      return get([&] {
        const bool yes = service_.model_ready(name_, version_);
        return HttpReply{.status = yes ? 200 : 503,
                         .body = cat("{\"name\":", observe::json_quote(name_),
                                     ",\"ready\":", yes ? "true" : "false", "}")};
      });
    if (action == "config")
      return get([&] { return caller(), text_reply(service_.model_config(name_, version_)); });
    if (action == "stats")
      return get([&] { return text_reply(service_.statistics(name_, version_, caller())); });
    const bool pieces = action == "generate_stream";
    if (!is_work(action)) return not_found();
    if (call_.method != "POST") {
      log_refused(service_, call_, {Status::Invalid, cat("got ", call_.method, ", wanted POST")});
      return not_allowed("POST");
    }
    HttpRoute result{.caller = caller(/*must_be_tenant=*/true)};
    Request request;
    if (action == "infer") {
      request = infer();
      result.form.encoding = choose_encoding(call_.accept_encoding);
    } else {
      if (!service_.facts(name_, version_)->has_words)
        refuse(Status::Unsupported, "model '", name_,
               "' does not go on with texts; it takes infer requests");
      request = reader_.read_generate(*body());
      if (version_.empty()) version_ = service_.pool().find(name_)->version;  // pieces name it too
      result.form.kind = pieces ? AnswerForm::Kind::TextPieces : AnswerForm::Kind::Text;
    }
    request.model = name_;
    request.version = version_;
    request.traceparent = call_.traceparent;
    result.form.outputs = request.outputs;
    result.form.binary = request.binary_output;
    result.request = std::move(request);
    return result;
  }

  Request infer() {
    const auto bytes = body();
    if (!call_.json_bytes) return reader_.read_infer(bytes, std::nullopt);
    const auto length = parse_int(*call_.json_bytes);
    if (!length || *length < 0 || size_t(*length) > bytes->size())
      refuse(Status::Invalid, "Inference-Header-Content-Length: got '", *call_.json_bytes,
             "', wanted 0 to the body's ", bytes->size(), " bytes");
    if (*length == 0) return reader_.read_raw(bytes, *service_.facts(name_, version_));
    return reader_.read_infer(bytes, *length);
  }

  std::shared_ptr<const std::string> body() const {
    if (!call_.body) return std::make_shared<const std::string>();
    std::string encoding;
    for (const char c : call_.content_encoding) encoding += char(std::tolower(c));
    if (encoding.empty() || encoding == "identity") return call_.body;
    if (encoding != "gzip" && encoding != "deflate")
      refuse(Status::Unsupported, "Content-Encoding: got '", call_.content_encoding,
             "', wanted gzip, deflate or none");
    return std::make_shared<const std::string>(inflate(*call_.body, max_body_));
  }

  Service& service_;
  RestReader& reader_;
  const HttpCall& call_;
  const size_t max_body_;
  std::string name_ = {}, version_ = {};
};

}  // namespace

HttpReply reply_to(const Outcome& outcome) {
  return {.status = http_status(outcome.status),
          .body = write_error(outcome.text),
          .retry_after = outcome.retry_after};
}

HttpReply reply_to(const Answer& answer, const AnswerForm& form) {
  try {
    if (!answer.outcome.ok()) return reply_to(answer.outcome);
    if (form.kind != AnswerForm::Kind::Tensors)
      return {.body = write_generated(answer, answer.text)};
    auto written = write_answer(answer, form.outputs, form.binary);
    HttpReply reply{.type = written.json_bytes ? "application/octet-stream" : "application/json",
                    .body = std::move(written.body),
                    .json_bytes = written.json_bytes};
    if (!form.encoding.empty()) {
      reply.body = deflate(reply.body, form.encoding == "gzip");
      reply.encoding = form.encoding;
    }
    return reply;
  } catch (const Refused& why) {
    return reply_to(why.outcome);
  } catch (const std::exception& error) {
    return reply_to(Outcome{Status::Internal, error.what()});
  }
}

void log_refused(Service& service, const HttpCall& call, const Outcome& outcome,
                 const std::string& id) {
  const auto parts = parts_of(call.target);
  RefusedRequest request{.id = id, .traceparent = std::string(call.traceparent)};
  if (parts.size() > 3 && parts[0] == "v2" && parts[1] == "models") request.model = parts[2];
  try {
    request.tenant = service.identify(call.key, call.tenant).name;
  } catch (const Refused&) {  // it is nobody's
  }
  service.log_refused(outcome, request, "http");
}

HttpRoute route(Service& service, RestReader& reader, const HttpCall& call, size_t max_body) {
  reader.forget_id();
  const auto refused = [&](const Outcome& outcome) {
    log_refused(service, call, outcome, reader.id());
    return HttpRoute{.reply = reply_to(outcome)};
  };
  try {
    return Router(service, reader, call, max_body).run();
  } catch (const Refused& why) {
    return refused(why.outcome);
  } catch (const std::exception& error) {
    return refused({Status::Internal, error.what()});
  }
}

}  // namespace yoke::serve
