// SPDX-License-Identifier: Apache-2.0
#include "yoke/serve/http_connection.h"

#include <boost/asio/dispatch.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/ssl.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http.hpp>
#include <deque>

#include "yoke/base/error.h"
#include "yoke/serve/http_routes.h"
#include "yoke/serve/keys.h"

namespace yoke::serve {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using asio::ip::tcp;
using Failure = boost::system::error_code;

constexpr size_t kMostPipelined = 256;
constexpr size_t kMostUnsent = 64 << 20;  // bytes of answers, beyond which no request is read
constexpr size_t kReadBytes = 16 << 10;
constexpr size_t kHeaderBytes = 16 << 10;
constexpr size_t kTrusted = 1 << 20;  // bytes of a body that are made room for before they come
constexpr size_t kPadding = 64;       // beyond a body, for a JSON reader that reads ahead
constexpr int kIdleTimes = 10;  // a quiet connection lasts so many times longer than a slow one
constexpr size_t kSlowest = 1 << 10;  // bytes of a body in each second

std::string head_of(const HttpReply& reply, bool keep_alive) {
  std::string head = "HTTP/1.1 ";
  head += std::to_string(reply.status);
  head += ' ';
  const auto reason = http::obsolete_reason(http::int_to_status(unsigned(reply.status)));
  head.append(reason.data(), reason.size());
  head += "\r\nContent-Type: ";
  head += reply.type;
  if (!reply.encoding.empty()) head += "\r\nContent-Encoding: " + reply.encoding;
  if (reply.json_bytes)
    head += "\r\nInference-Header-Content-Length: " + std::to_string(*reply.json_bytes);
  if (reply.retry_after > 0)
    head += "\r\nRetry-After: " + std::to_string(int64_t(reply.retry_after + 0.999));
  head += "\r\nContent-Length: ";
  head += std::to_string(reply.body.size());
  head += keep_alive ? "\r\n\r\n" : "\r\nConnection: close\r\n\r\n";
  return head;
}

std::string chunk_of(std::string_view text) {
  char size[20];
  const int digits = std::snprintf(size, sizeof(size), "%zx\r\n", text.size());
  return std::string(size, size_t(digits)).append(text).append("\r\n");
}

// Of the header: "[::1]:8000" is "::1".
std::string host_of(std::string_view header) {
  if (header.starts_with('[')) return std::string(header.substr(1, header.find(']') - 1));
  std::string host(header.substr(0, header.find(':')));
  for (char& c : host) c = char(std::tolower(c));
  return host;
}

template <typename Stream>
class Connection final : public HttpPeer, public std::enable_shared_from_this<Connection<Stream>> {
 public:
  template <typename... Arguments>
  Connection(HttpShared& shared, HttpLane& lane, tcp::socket socket, Arguments&... arguments)
      : shared_(shared), lane_(lane), stream_(std::move(socket), arguments...) {
    ++shared_.connections;
    lane_.peers.insert(this);
  }
  ~Connection() override {
    lane_.peers.erase(this);
    --shared_.connections;
    shared_.unread -= parser_.has_value();
    hold_bytes(0);
    shared_.unwritten -= int64_t(slots_.size());
    shared_.unsent -= unsent_;
  }

  void start() {
    Failure ignored;
    beast::get_lowest_layer(stream_).set_option(tcp::no_delay(true), ignored);
    touch();
    if constexpr (!std::is_same_v<Stream, tcp::socket>)
      stream_.async_handshake(asio::ssl::stream_base::server,
                              [self = this->shared_from_this()](Failure failure) {
                                if (failure) return self->close();
                                self->greeted_ = true;
                                self->read();
                              });
    else {
      greeted_ = true;
      read();
    }
  }

  std::shared_ptr<HttpPeer> hold() override { return this->weak_from_this().lock(); }

  void look(Time now) override {
    const bool busy = parser_ || writing_ || !greeted_;
    const Duration quiet = shared_.full
                               ? std::min<Duration>(shared_.options.idle, std::chrono::seconds(1))
                               : shared_.options.idle * kIdleTimes;
    const bool waits = !slots_.empty() && !writing_;  // for us, not for the client
    if (shared_.closing && slots_.empty() && !parser_) close();
    if (!waits && now - touched_ > (busy ? shared_.options.idle : quiet)) abandon();
    // A request is not sent byte by byte.
    const auto longest = shared_.options.idle + std::chrono::seconds(have_ / kSlowest);
    if (parser_ && !last_ && !waits && now - parsing_since_ > longest) abandon();
    // Nor is an answer read so; and where others' have no room left, faster than that.
    const bool crowded = shared_.unsent > shared_.options.max_held_bytes;
    if (writing_ &&
        now - sending_since_ > time_to_take(sending_bytes_, shared_.options.idle, crowded))
      abandon();
  }

  void abandon() override {
    if (parser_ && parser_->is_header_done() && !last_ && !closed_)
      log_refused(shared_.service, call_of(parser_->get()),
                  {Status::Cancelled, "the client left before its request was whole"});
    for (auto& slot : slots_) {
      if (slot.ticket && !slot.done) shared_.service.cancel(slot.ticket);
      slot.place = nullptr;
    }
    close();
  }

 private:
  // Where the answer to a request goes, in the order in which they came.
  struct Slot {
    std::vector<std::string> out = {};
    bool done = false, keep_alive = true, streaming = false, head_only = false;
    Pool::TicketPtr ticket = {};
    AnswerForm form = {};
    std::shared_ptr<const void> place = {};  // of an answer that waits for those before it
  };

  void touch() { touched_ = SteadyClock().now(); }

  void close() {
    closed_ = true;
    Failure ignored;
    auto& socket = beast::get_lowest_layer(stream_);
    socket.shutdown(tcp::socket::shutdown_both, ignored);
    socket.close(ignored);
  }

  bool is_full() const {
    return slots_.size() >= kMostPipelined || unsent_ > kMostUnsent ||
           (unsent_ > 0 && shared_.unsent > shared_.options.max_held_bytes);
  }

  void read() {
    if (closed_ || reading_ || last_ || is_full()) return;
    reading_ = true;
    stream_.async_read_some(in_.prepare(kReadBytes),
                            [self = this->shared_from_this()](Failure failure, size_t bytes) {
                              self->reading_ = false;
                              if (failure) return self->at_end(failure);
                              self->in_.commit(bytes);
                              self->touch();
                              self->parse();
                            });
  }

  // The client says no more: it has left, and whatever it asked for is not needed.
  void at_end(Failure failure) {
    if (parser_ && parser_->is_header_done() && !closed_ && failure == asio::error::eof &&
        slots_.empty())
      return refuse({Status::Invalid, "the body ended before its length"});
    abandon();
  }

  void refuse(const Outcome& outcome, int status = 0) {
    last_ = true;
    log_refused(shared_.service, call_of(parser_->get()), outcome);
    const uint64_t number = add_slot();
    slot(number)->keep_alive = false;
    auto reply = reply_to(outcome);
    if (status != 0) reply.status = status;
    finish(number, std::move(reply));
  }

  // What bodies that are not whole hold, over all connections. False where it is too much for
  // others to go on; one alone may have more.
  bool hold_bytes(size_t bytes) {
    const size_t all = shared_.body_bytes += bytes - held_;
    held_ = bytes;
    return all <= std::max(bytes, shared_.options.max_held_bytes);
  }
  void refuse_for_room() {
    refuse({Status::Unavailable, "too many requests are being read; ask again", 1});
    body_ = nullptr;
    std::string().swap(parser_->get().body());
    hold_bytes(0);
  }

  void parse() {
    while (in_.size() > 0 && !last_ && !closed_ && !is_full()) {
      if (!parser_) {
        parser_.emplace();
        ++shared_.unread;
        parsing_since_ = SteadyClock().now();
        have_ = 0;
        parser_->header_limit(kHeaderBytes);
        parser_->body_limit(shared_.options.max_body_bytes);
      }
      const bool had_header = parser_->is_header_done();
      Failure failure;
      in_.consume(parser_->put(in_.data(), failure));
      if (failure && failure != http::error::need_more) {
        if (failure == http::error::body_limit) {
          const std::string length(parser_->get()[http::field::content_length]);
          return refuse(
              {Status::TooLarge,
               cat("the body", length.empty() ? "" : " of " + length + " bytes", " is larger than ",
                   shared_.options.max_body_bytes, " bytes; serve.max_body_mb makes it more")});
        }
        return refuse({Status::Invalid, failure.message()},
                      failure == http::error::header_limit ? 431 : 400);
      }
      if (!had_header && parser_->is_header_done() && take_header()) return;
      if (parser_->is_done()) {
        auto& body = parser_->get().body();
        handle(body.empty() ? nullptr : std::make_shared<const std::string>(std::move(body)));
      } else {
        have_ = parser_->get().body().size();
        if (have_ > 0 && !hold_bytes(have_)) return refuse_for_room();
        if (failure == http::error::need_more) {
          if (in_.size() > kHeaderBytes)
            return refuse({Status::Invalid, "a line of the request has no end"});
          break;
        }
      }
    }
    read();
  }

  // True where the body is now read straight into its place.
  bool take_header() {
    const auto& head = parser_->get();
    const auto length = parser_->content_length();
    const bool all_there = parser_->is_done() || (length && in_.size() >= *length);
    // Large bodies of strangers are not read.
    if (!all_there && length.value_or(SIZE_MAX) > kReadBytes) try {
        const auto call = call_of(head);
        shared_.service.identify(call.key, call.tenant, /*must_be_tenant=*/false);
      } catch (const Refused& why) {
        refuse(why.outcome);
        return true;
      }
    if (beast::iequals(head[http::field::expect], "100-continue") && !all_there) {
      const uint64_t number = add_slot();
      put(*slot(number), "HTTP/1.1 100 Continue\r\n\r\n");
      slot(number)->done = true;
      write();
    }
    const auto coding = head.find(http::field::transfer_encoding);
    if (coding != head.end() && !beast::iequals(coding->value(), "chunked")) {
      refuse({Status::Invalid, "Transfer-Encoding: wanted chunked or none"});
      return true;
    }
    if (!length || *length == 0) return false;
    length_ = size_t(*length);
    body_ = std::make_shared<std::string>();
    body_->reserve(std::min(length_, kTrusted) + kPadding);
    have_ = std::min(in_.size(), length_);
    body_->append(static_cast<const char*>(in_.data().data()), have_);
    in_.consume(have_);
    if (have_ == length_) {
      handle(std::move(body_));
      parse();
      return true;
    }
    read_body();
    return true;
  }

  // Memory grows with what has come, not with what was promised.
  void read_body() {
    if (have_ == body_->size()) {
      const size_t size = std::min(length_, std::max(2 * have_, kTrusted));
      if (!hold_bytes(size)) return refuse_for_room();
      body_->reserve(size + kPadding);
      body_->resize(size);
    }
    reading_ = true;
    stream_.async_read_some(asio::buffer(body_->data() + have_, body_->size() - have_),
                            [self = this->shared_from_this()](Failure failure, size_t bytes) {
                              self->reading_ = false;
                              if (failure) return self->at_end(failure);
                              self->touch();
                              self->have_ += bytes;
                              if (self->have_ < self->length_) return self->read_body();
                              self->handle(std::move(self->body_));
                              self->parse();
                            });
  }

  using Head = http::request<http::string_body>;

  // As far as it has come; it refers to the head.
  static HttpCall call_of(const Head& head) {
    const auto view = [&](std::string_view field) -> std::optional<std::string_view> {
      const auto found = head.find({field.data(), field.size()});
      if (found == head.end()) return std::nullopt;
      return std::string_view(found->value().data(), found->value().size());
    };
    HttpCall call{.method = std::string(head.method_string()),
                  .target = std::string(head.target())};
    call.key = view(kKeyHeader).value_or("");
    if (call.key.empty()) call.key = bearer_key(view("Authorization").value_or(""));
    call.tenant = view(kTenantHeader).value_or("");
    call.traceparent = view("traceparent").value_or("");
    call.content_encoding = view("Content-Encoding").value_or("");
    call.accept_encoding = view("Accept-Encoding").value_or("");
    call.json_bytes = view("Inference-Header-Content-Length");
    call.by_page = view("Origin") || !is_loopback(host_of(view("Host").value_or("")));
    return call;
  }

  void handle(std::shared_ptr<const std::string> body) {
    const auto& head = parser_->get();
    HttpCall call = call_of(head);
    call.body = std::move(body);
    auto routed = route(shared_.service, lane_.reader, call, shared_.options.max_body_bytes);
    const uint64_t number = add_slot();
    auto& slot = *this->slot(number);
    slot.keep_alive = head.keep_alive() && !shared_.closing && !shared_.service.draining();
    slot.head_only = head.method() == http::verb::head;
    last_ = !slot.keep_alive;
    parser_.reset();
    --shared_.unread;
    if (held_ > 0) hold_bytes(0);
    if (last_) swallow();  // to hear of it when the client goes
    if (routed.reply) return finish(number, std::move(*routed.reply));
    if (routed.slow) return run_slow(number, std::move(routed.slow));
    slot.form = std::move(routed.form);
    submit(number, std::move(*routed.request), routed.caller);
  }

  void submit(uint64_t number, Request request, const Caller& caller) {
    request.may_be_held = slots_.size() > 1;
    auto self = this->shared_from_this();
    auto on_answer = [self, number](Answer answer) mutable {
      // At once where the thread that watches the pool is the connection's own.
      asio::dispatch(self->lane_.context, [self, number, answer = std::move(answer)]() mutable {
        self->answered(number, std::move(answer));
      });
    };
    OnText on_text;
    if (slot(number)->form.kind == AnswerForm::Kind::TextPieces)
      on_text = [self, number, model = request.model,
                 version = request.version](std::string_view text) {
        Answer head;
        head.model = model;
        head.version = version;
        asio::dispatch(self->lane_.context, [self, number, piece = write_generated(head, text)] {
          self->stream(number, piece);
        });
      };
    auto ticket = shared_.service.submit(std::move(request), caller, "http", std::move(on_answer),
                                         std::move(on_text), Pool::When::Later);
    if (auto* mine = slot(number)) mine->ticket = std::move(ticket);
    if (!std::exchange(lane_.dispatches, true))
      asio::post(lane_.context, [&lane = lane_, &pool = shared_.service.pool()] {
        lane.dispatches = false;
        pool.dispatch();
      });
  }

  void run_slow(uint64_t number, std::function<HttpReply()> slow) {
    auto self = this->shared_from_this();
    std::function<void()> work = [self, number, slow = std::move(slow)] {
      asio::post(self->lane_.context, [self, number, reply = slow()]() mutable {
        self->finish(number, std::move(reply));
      });
    };
    try {
      shared_.errands.add(std::move(work));
    } catch (const Refused& why) {
      finish(number, reply_to(why.outcome));
    }
  }

  void answered(uint64_t number, Answer answer) {
    auto* mine = slot(number);
    if (!mine || closed_) return;
    mine->place = std::move(answer.place);
    const bool in_pieces = mine->form.kind == AnswerForm::Kind::TextPieces && answer.outcome.ok();
    if (in_pieces && !mine->streaming) stream(number, write_generated(answer, answer.text));
    if (!mine->streaming) return finish(number, reply_to(answer, mine->form));
    if (!answer.outcome.ok()) stream(number, write_error(answer.outcome.text));
    put(*mine, "0\r\n\r\n");
    mine->done = true;
    write();
  }

  // A piece of a text, as an event of its own.
  void stream(uint64_t number, const std::string& json) {
    auto* mine = slot(number);
    if (!mine || mine->done) return;
    if (!mine->streaming)
      put(*mine, cat("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n",
                     "Cache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n",
                     mine->keep_alive ? "" : "Connection: close\r\n", "\r\n"));
    mine->streaming = true;
    put(*mine, chunk_of(cat("data: ", json, "\n\n")));
    write();
  }

  void finish(uint64_t number, HttpReply reply) {
    auto* mine = slot(number);
    if (!mine) return;
    put(*mine, head_of(reply, mine->keep_alive));
    if (!mine->head_only) put(*mine, std::move(reply.body));
    mine->done = true;
    mine->ticket = nullptr;
    write();
  }

  void put(Slot& slot, std::string text) {
    unsent_ += text.size();
    shared_.unsent += text.size();
    slot.out.push_back(std::move(text));
  }
  uint64_t add_slot() {
    slots_.emplace_back();
    ++shared_.unwritten;
    return first_ + slots_.size() - 1;
  }
  Slot* slot(uint64_t number) {
    return number < first_ || number - first_ >= slots_.size() ? nullptr
                                                               : &slots_[size_t(number - first_)];
  }

  void write() {
    if (writing_ || closed_) return;
    sending_.clear();
    size_t done = 0;
    for (auto& slot : slots_) {
      for (auto& part : slot.out) sending_.push_back(std::move(part));
      slot.out.clear();
      if (!slot.done) break;
      slot.place = nullptr;
      ++done;
    }
    if (sending_.empty()) {
      drop(done);
      return;
    }
    std::vector<asio::const_buffer> buffers;
    for (const auto& part : sending_) buffers.emplace_back(part.data(), part.size());
    writing_ = true;
    sending_since_ = SteadyClock().now();
    sending_bytes_ = asio::buffer_size(buffers);
    if (parser_) parsing_since_ = sending_since_;  // the rest may have waited for this
    asio::async_write(
        stream_, buffers,
        [this](const Failure& failure, size_t bytes) {
          touch();  // who reads slowly does read
          return asio::transfer_all()(failure, bytes);
        },
        [self = this->shared_from_this(), done](Failure failure, size_t) {
          self->writing_ = false;
          if (failure) return self->abandon();
          self->unsent_ -= self->sending_bytes_;
          self->shared_.unsent -= self->sending_bytes_;
          self->drop(done);
          self->write();
        });
  }

  // What was written is forgotten, and there is room for more requests.
  void drop(size_t done) {
    bool ends = false;
    for (size_t i = 0; i < done; ++i) {
      ends |= !slots_.front().keep_alive;
      slots_.pop_front();
    }
    first_ += done;
    shared_.unwritten -= int64_t(done);
    if (ends) return end_gently();
    if (done > 0 && !reading_ && !body_) parse();
  }

  // The client reads all that was written, though it may still be sending.
  void end_gently() {
    Failure ignored;
    beast::get_lowest_layer(stream_).shutdown(tcp::socket::shutdown_send, ignored);
    last_ = true;
    if (!reading_) swallow();
  }
  void swallow() {
    in_.consume(in_.size());
    if (closed_ || reading_) return;
    if (swallowed_ > (1 << 20)) return abandon();
    reading_ = true;
    stream_.async_read_some(in_.prepare(kReadBytes),
                            [self = this->shared_from_this()](Failure failure, size_t bytes) {
                              self->reading_ = false;
                              self->swallowed_ += bytes;
                              if (failure) return self->abandon();
                              self->swallow();
                            });
  }

  HttpShared& shared_;
  HttpLane& lane_;
  Stream stream_;
  beast::flat_buffer in_;
  std::optional<http::request_parser<http::string_body>> parser_;
  std::shared_ptr<std::string> body_;
  size_t length_ = 0;  // of the whole body
  size_t have_ = 0;    // bytes of it that have come
  size_t held_ = 0;    // in shared_.body_bytes
  std::deque<Slot> slots_;
  uint64_t first_ = 0;  // the number of the first slot
  std::vector<std::string> sending_;
  size_t unsent_ = 0;  // bytes of answers
  size_t sending_bytes_ = 0;
  bool reading_ = false, writing_ = false, closed_ = false;
  bool last_ = false;  // no request after those that came is read
  size_t swallowed_ = 0;
  bool greeted_ = false;  // TLS has shaken hands
  Time touched_ = {}, parsing_since_ = {}, sending_since_ = {};
};

// Whoever holds it last, it is deleted by its lane's thread.
template <typename Stream>
std::shared_ptr<Connection<Stream>> make_connection(HttpShared& shared, HttpLane& lane,
                                                    tcp::socket socket, auto&... arguments) {
  return {new Connection<Stream>(shared, lane, std::move(socket), arguments...),
          [&lane](Connection<Stream>* connection) {
            asio::dispatch(lane.context, [connection] { delete connection; });
          }};
}

}  // namespace

void start_connection(HttpShared& shared, HttpLane& lane, tcp::socket socket,
                      asio::ssl::context* tls) {
  if (tls)
    make_connection<asio::ssl::stream<tcp::socket>>(shared, lane, std::move(socket), *tls)->start();
  else
    make_connection<tcp::socket>(shared, lane, std::move(socket))->start();
}

}  // namespace yoke::serve
