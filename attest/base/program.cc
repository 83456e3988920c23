#include "attest/base/program.h"

#include <cstdio>
#include <iostream>
#include <new>

namespace bitwitness {
namespace {

void print_error(const char* name, const std::string& message) {
  const std::string line = std::string(name) + ": error: " + printable(message) + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);
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
