#include "attest/base/program.h"

#include <cstdio>
#include <iostream>
#include <new>

namespace bitwitness {
namespace {

// One line, whatever the message holds: file names may have control characters.
void print_error(const char* name, const std::string& message) {
  std::string line = std::string(name) + ": error: ";
  for (const char c : message) {
    line.push_back(static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? ' ' : c);
  }
  line.push_back('\n');
  std::fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace

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
