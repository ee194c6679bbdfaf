// SPDX-License-Identifier: Apache-2.0
// The program. Results go to stdout, everything else to stderr; the exit codes are part of the
// interface: 0 done, 1 failed, 2 usage or config, 3 a peer or device failed.
#include <CLI/CLI.hpp>
#include <iostream>

#include "yoke/base/error.h"
#include "yoke/cli/bench_comm.h"
#include "yoke/cli/demo.h"
#include "yoke/cli/doctor.h"
#include "yoke/cli/flight_watch.h"

namespace {

int exit_code(yoke::Kind kind) {
  switch (kind) {
    case yoke::Kind::Usage:
    case yoke::Kind::Config:
      return 2;
    case yoke::Kind::Comm:
    case yoke::Kind::Device:
    case yoke::Kind::Timeout:
      return 3;
    default:
      return 1;
  }
}

}  // namespace

int main(int argc, char** argv) {
  yoke::cli::FlightWatch::block_signal();  // before there is a second thread
  CLI::App app("Yoke makes many processors pull one load.", "yoke");
  app.set_version_flag("--version", "yoke " YOKE_VERSION);
  app.set_help_flag("-h,--help", "Print this help and exit");
  app.require_subcommand(1);
  app.footer("Every verb has its own --help.");
  yoke::cli::add_demo(app);
  yoke::cli::add_bench(app);
  yoke::cli::add_doctor(app);
  try {
    app.parse(argc, argv);
    return 0;
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::RuntimeError& done) {
    return done.get_exit_code();
  } catch (const CLI::ParseError& error) {
    std::cerr << "yoke: " << error.what() << "; see yoke --help\n";
    return 2;
  } catch (const yoke::Error& error) {
    std::cerr << "yoke: " << error.what() << "\n";
    return exit_code(error.kind());
  } catch (const std::exception& error) {
    std::cerr << "yoke: " << error.what() << "\n";
    return 1;
  }
}
