// Test helper: a call must throw Error of one kind whose message holds all of the given parts.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>

#include "attest/base/error.h"

namespace bitwitness::test {

inline void expect_error(ErrorKind kind, std::initializer_list<std::string_view> parts,
                         const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(exit_code(error.kind()), exit_code(kind)) << message;
    for (const std::string_view part : parts) {
      EXPECT_NE(message.find(part), std::string::npos) << "no \"" << part << "\" in: " << message;
    }
    return;
  }
  std::string wanted;
  for (const std::string_view part : parts) wanted += std::string(part) + " ";
  ADD_FAILURE() << "no error, expected one naming: " << wanted;
}

}  // namespace bitwitness::test
