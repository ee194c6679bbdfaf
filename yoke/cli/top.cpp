// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/top.h"

#include <poll.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <termios.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/cli/environment.h"
#include "yoke/cli/serve_usage.h"
#include "yoke/cli/top_picture.h"
#include "yoke/net/socket.h"
#include "yoke/observe/json_lines.h"

namespace yoke::cli {
namespace {

// The keys and the signals that end or redraw the picture, and the terminal's other screen while it
// lives. Owns: the terminal's settings and the mask of signals, which it puts back.
class Console {
 public:
  enum class Event { Time, Redraw, Quit };

  explicit Console(bool live) : live_(live) {
    sigset_t set;
    sigemptyset(&set);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGWINCH}) sigaddset(&set, signal);
    pthread_sigmask(SIG_BLOCK, &set, &mask_);
    signals_ = net::Descriptor(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
    if (!signals_) fail(Kind::Io, "cannot make a signalfd: ", std::strerror(errno));
    keys_ = live && ::tcgetattr(0, &settings_) == 0;
    if (keys_) {
      termios raw = settings_;
      raw.c_lflag &= ~tcflag_t(ICANON | ECHO);
      raw.c_cc[VSUSP] = _POSIX_VDISABLE;  // stopped, it would leave the other screen behind
      ::tcsetattr(0, TCSANOW, &raw);
    }
    if (live_) write("\x1b[?1049h\x1b[?25l\x1b[?7l");
  }
  ~Console() {
    if (live_) write("\x1b[?7h\x1b[?25h\x1b[?1049l");
    if (keys_) ::tcsetattr(0, TCSADRAIN, &settings_);
    pthread_sigmask(SIG_SETMASK, &mask_, nullptr);
  }
  Console(const Console&) = delete;
  Console& operator=(const Console&) = delete;

  Event wait(Time until) {
    while (true) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - SteadyClock().now());
      pollfd polls[]{{signals_.get(), POLLIN, 0}, {keys_ ? 0 : -1, POLLIN, 0}};
      const int ready = ::poll(polls, 2, int(std::max<int64_t>(left.count(), 0)));
      if (ready < 0 && errno != EINTR) fail(Kind::Io, "poll failed: ", std::strerror(errno));
      if (ready == 0) return Event::Time;
      signalfd_siginfo signal;
      if (::read(signals_.get(), &signal, sizeof signal) == sizeof signal)
        return signal.ssi_signo == SIGWINCH ? Event::Redraw : Event::Quit;
      char key = 0;
      if (ready > 0 && polls[1].revents != 0 && (::read(0, &key, 1) < 1 || key == 'q'))
        return Event::Quit;
    }
  }

  // Over the last picture, without clearing it before: nothing flickers.
  static void redraw(const std::vector<std::string>& lines) {
    write("\x1b[H" + join(lines, "\x1b[K\n") + "\x1b[K\x1b[J");
  }

 private:
  static void write(const std::string& text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  }

  const bool live_;
  bool keys_ = false;  // stdin is a terminal
  net::Descriptor signals_;
  sigset_t mask_{};
  termios settings_{};
};

struct Options {
  std::string url = {}, key = {}, ca = {}, interval = "1s";
  bool once = false, json = false;
};

// Without bounds where it is a file or a pipe.
TopScreen screen_of(bool live, bool colour) {
  TopScreen screen{.colour = colour};
  winsize size{};
  if (::ioctl(1, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return screen;
  screen.columns = size.ws_col;
  if (live && size.ws_row > 0) screen.rows = size.ws_row;
  return screen;
}

void top(const Options& options) {
  const auto interval = parse_duration(options.interval);
  if (!interval || *interval < std::chrono::milliseconds(100) || *interval > std::chrono::hours(1))
    fail(Kind::Usage, "--interval wants a time of 100ms to 1h, got '", options.interval, "'");
  const bool live = !options.once && !options.json && ::isatty(1) == 1;
  const auto environment = read_environment();
  const auto no_color = environment.find("NO_COLOR");
  const bool colour = live && (no_color == environment.end() || no_color->second.empty());

  std::string before = ask_server(options.url, "/v2/yoke/view", options.key, options.ca);
  std::string rates = rates_between(before, before), trouble;
  Console console(live);
  const auto show = [&] {
    TopScreen screen = screen_of(live, colour);
    screen.trouble = trouble;
    if (live) return Console::redraw(draw_top(options.url, rates, screen));
    const std::string text = !options.json     ? join(draw_top(options.url, rates, screen), "\n")
                             : trouble.empty() ? rates
                                               : observe::JsonObject({{"error", trouble}}).text();
    std::printf("%s\n", text.c_str());
    if (std::fflush(stdout) != 0) fail(Kind::Io, "cannot write: ", std::strerror(errno));
  };
  if (live) show();
  for (Time asked = SteadyClock().now();;) {
    const auto event = console.wait(asked + *interval);
    if (event == Console::Event::Quit) return;
    if (event == Console::Event::Time) {
      asked = SteadyClock().now();
      try {
        const std::string now = ask_server(options.url, "/v2/yoke/view", options.key, options.ca);
        rates = rates_between(before, now);
        before = now;
        trouble.clear();
      } catch (const Error& error) {
        if (options.once) throw;
        trouble = error.what();
      }
    } else if (!live) {
      continue;
    }
    show();
    if (options.once) return;
  }
}

}  // namespace

void add_top(CLI::App& app) {
  auto* verb = app.add_subcommand("top", "Show live what a running server does");
  auto options = std::make_shared<Options>();
  verb->add_option("URL", options->url, "Of its HTTP, as http://127.0.0.1:8000")->required();
  verb->add_option("--key", options->key, "An admin's key")->envname("YOKE_KEY");
  verb->add_option("--ca", options->ca, kCaHelp);
  verb->add_option("--interval", options->interval, "Between two looks")->capture_default_str();
  verb->add_flag("--once", options->once, "Print one picture, after one interval");
  verb->add_flag("--json", options->json, "Print one JSON object for each interval");
  verb->footer("q or Ctrl-C ends it.");
  verb->callback([options] { top(*options); });
}

}  // namespace yoke::cli
