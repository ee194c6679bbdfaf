// SPDX-License-Identifier: Apache-2.0
// The program. Results go to stdout, everything else to stderr; the exit codes are part of the
// interface: 0 done, 1 failed, 2 usage or config, 3 a peer or device failed.
#include <malloc.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <string_view>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/cli/bench_comm.h"
#include "yoke/cli/checkpoint.h"
#include "yoke/cli/data.h"
#include "yoke/cli/demo.h"
#include "yoke/cli/doctor.h"
#include "yoke/cli/environment.h"
#include "yoke/cli/flight_watch.h"
#include "yoke/cli/flow.h"
#include "yoke/cli/generate.h"
#include "yoke/cli/schedule.h"
#include "yoke/cli/serve.h"
#include "yoke/cli/top.h"
#include "yoke/cli/trace.h"
#include "yoke/cli/train.h"
#include "yoke/comm/error_text.h"
#include "yoke/comm/run_processes.h"

namespace {

// CLI11 would only say that a verb is required.
void check_verb(const CLI::App& app, int argc, char** argv) {
  if (argc < 2 || argv[1][0] == '-') return;
  std::vector<std::string> verbs;
  for (const auto* verb : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (verb->get_name() == argv[1]) return;
    if (!verb->get_group().empty()) verbs.push_back(verb->get_name());
  }
  const auto close = yoke::nearest(argv[1], verbs);
  yoke::fail(yoke::Kind::Usage, "no verb '", argv[1], "'",
             close.empty() ? "." : "; did you mean " + close[0] + "?",
             " There are: ", yoke::join(verbs, ", "), "; see yoke --help");
}

// Every step takes and frees the same large blocks. Given back to the system in between, they would
// come back page by page, zeroed: half of the time of a step.
void keep_freed_memory() {
  ::mallopt(M_MMAP_MAX, 0);
  ::mallopt(M_TRIM_THRESHOLD, -1);
  ::mallopt(M_TOP_PAD, 64 << 20);
}

int run(int argc, char** argv) {
  yoke::cli::FlightWatch::block_signal();  // before there is a second thread
  keep_freed_memory();
  const auto environment = yoke::cli::read_environment();
  const yoke::comm::ProcessFunctions functions{{"bench", yoke::cli::bench_in_process}};
  if (const auto code = yoke::comm::process_main(environment, functions)) return *code;
  CLI::App app("Yoke makes many processors pull one load.", "yoke");
  app.set_version_flag("--version", "yoke " YOKE_VERSION);
  app.set_help_flag("-h,--help", "Print this help and exit");
  app.require_subcommand(1);
  app.footer("Every verb has its own --help.");
  yoke::cli::add_train(app);
  yoke::cli::add_generate(app);
  yoke::cli::add_eval(app);
  yoke::cli::add_data(app);
  yoke::cli::add_serve(app);
  yoke::cli::add_flow(app);
  yoke::cli::add_checkpoint(app);
  yoke::cli::add_top(app);
  yoke::cli::add_trace(app);
  yoke::cli::add_demo(app);
  yoke::cli::add_bench(app);
  yoke::cli::add_schedule(app);
  yoke::cli::add_doctor(app);
  try {
    check_verb(app, argc, argv);
    app.parse(argc, argv);
    // A result that could not be written is a failure.
    if (!std::cout.flush() || std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
      yoke::fail(yoke::Kind::Io, "cannot write to standard output: ", std::strerror(errno));
    return 0;
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::RuntimeError& done) {
    return done.get_exit_code();
  } catch (const CLI::ParseError& error) {
    const auto verbs = app.get_subcommands();
    std::cerr << "yoke: " << error.what() << "; see yoke "
              << (verbs.empty() ? "" : verbs[0]->get_name() + " ") << "--help\n";
    return 2;
  } catch (const yoke::Error& error) {
    std::cerr << "yoke: " << error.what() << "\n";
    return yoke::exit_code(error.kind());
  } catch (const std::exception& error) {
    std::cerr << "yoke: " << yoke::comm::text_of(error) << "\n";
    return 1;
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int code = run(argc, argv);
  const std::string_view verb = argc > 1 ? argv[1] : "";
  if (verb != "serve" && verb != "flow") return code;
  // A model's thread may have been left behind: nothing is taken apart that it may be using.
  std::cout.flush();
  std::cerr.flush();
  std::fflush(nullptr);
  ::_exit(code);
}
