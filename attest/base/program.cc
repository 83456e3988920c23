#include "attest/base/program.h"

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <new>

namespace bitwitness {
namespace {

void print_error(const char* name, const std::string& message) {
  const std::string line = std::string(name) + ": error: " + printable(message) + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);
}

char g_sigbus_message[256];

// A mapped file whose pages are gone cannot be read on: say so and end, with nothing half-written.
extern "C" void on_sigbus(int) {
  const ssize_t ignored = ::write(STDERR_FILENO, g_sigbus_message, std::strlen(g_sigbus_message));
  static_cast<void>(ignored);
  ::_exit(to_int(ExitCode::kInfrastructure));
}

// A reader that leaves (SIGPIPE) and a file size limit (SIGXFSZ) are errors of writing, reported
// where the writing is done; they must not end the program in the middle of its work.
void set_up_signals(const char* name) {
  std::snprintf(g_sigbus_message, sizeof g_sigbus_message,
                "%s: error: a file that is in use, such as a model's weights, became shorter or "
                "unreadable (SIGBUS); leave it alone and run again\n",
                name);
  struct sigaction action {};
  action.sa_handler = on_sigbus;
  ::sigaction(SIGBUS, &action, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
}

}  // namespace

std::string printable(const std::string& text) {
  std::string out = text;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto c = static_cast<unsigned char>(out[i]);
    if (c < 0x20 || c == 0x7f) out[i] = ' ';
    // U+0080 to U+009F in UTF-8.
    if (c == 0xc2 && i + 1 < out.size() && static_cast<unsigned char>(out[i + 1]) < 0xa0) {
      out[i] = out[i + 1] = ' ';
    }
  }
  return out;
}

int run_program(const char* name, const std::function<int()>& work) {
  set_up_signals(name);
  int code = to_int(ExitCode::kInfrastructure);
  try {
    code = work();
  } catch (const Error& error) {
    code = to_int(exit_code(error.kind()));
    print_error(name, error.what());
  } catch (const std::bad_alloc&) {
    print_error(name, "out of memory");
  } catch (const std::exception& error) {
    print_error(name, std::string("internal error: ") + error.what());
  } catch (...) {
    print_error(name, "internal error of unknown type");
  }
  std::cout.flush();
  const bool cout_failed = !std::cout;
  if ((std::fflush(stdout) != 0 || std::ferror(stdout) != 0 || cout_failed) &&
      code == to_int(ExitCode::kOk)) {
    print_error(name, "standard output could not be written");
    code = to_int(ExitCode::kInfrastructure);
  }
  return code;
}

}  // namespace bitwitness
