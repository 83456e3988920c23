#!/usr/bin/env bash
# Installs what is missing, builds everything and runs all tests; then once more under sanitizers.
#
#   scripts/test.sh           release tests, then the AArch64 programs under an emulator, then
#                             AddressSanitizer + UndefinedBehaviorSanitizer and ThreadSanitizer over the
#                             parts that they are for
#   scripts/test.sh --quick   release tests alone
#
# Skipped and failed tests are listed by name; the last line is `N passed, N failed, N skipped`. Any
# failure ends with a non-zero exit code. BITWITNESS_NO_INSTALL=1 installs nothing;
# BITWITNESS_CMAKE_ARGS are passed to cmake.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

quick=0
case "${1:-}" in
  '') ;;
  --quick) quick=1 ;;
  *)
    echo "usage: scripts/test.sh [--quick]" >&2
    exit 2
    ;;
esac

scripts/setup.sh test
read -r -a cmake_args <<<"${BITWITNESS_CMAKE_ARGS:-}"
if command -v ccache >/dev/null; then cmake_args+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache); fi
jobs=$(nproc)
results=()
broken=0

section() { printf '\n== %s (%d min %02d s so far)\n' "$1" $((SECONDS / 60)) $((SECONDS % 60)); }

# run_preset PRESET "TARGETS" INCLUDE EXCLUDE: builds the targets of one preset and runs the tests whose
# names fit; the results join `results`.
run_preset() {
  local preset=$1 include=$3 exclude=$4 targets
  read -r -d "" -a targets <<<"$2" || true  # over several lines
  local junit=$PWD/build/$preset/results.xml
  section "$preset: build"
  rm -f "$junit"
  results+=("$preset=$junit")  # a file that stays absent counts as a failure
  if ! cmake --preset "$preset" "${cmake_args[@]}" >build/configure.log 2>&1; then
    cat build/configure.log
    return 0
  fi
  grep 'Bitwitness:' build/configure.log || true
  "${runner[@]}" cmake --build --preset "$preset" --target "${targets[@]}" || return 0
  section "$preset: tests"
  "${runner[@]}" ctest --preset "$preset" -j "$jobs" --output-junit "$junit" \
    -R "$include" -E "$exclude" || broken=1
}

# The first thing that the AArch64 tests need and this machine lacks; nothing if all is there.
missing_for_aarch64() {
  local tool library
  for tool in aarch64-linux-gnu-g++ qemu-aarch64; do
    command -v "$tool" >/dev/null || {
      echo "$tool is not installed"
      return
    }
  done
  for library in libcrypto.a libpcre2-8.a libutf8proc.a libgtest.a libgmock.a; do
    [[ "$(aarch64-linux-gnu-g++ -print-file-name="$library")" == /* ]] || {
      echo "$library for AArch64 is not installed"
      return
    }
  done
}

# Cross-builds the programs and some tests, and compares them with those of the release build, whose tests
# `aarch64.*` do that.
run_aarch64() {
  local junit=$PWD/build/aarch64-results.xml launcher=() missing
  section "aarch64: build"
  rm -f "$junit"
  results+=("aarch64=$junit")
  missing=$(missing_for_aarch64)
  if [[ -n "$missing" ]]; then
    echo "no cross build: $missing"
    export BITWITNESS_NO_AARCH64=$missing
  else
    if command -v ccache >/dev/null; then launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache); fi
    # The linker warns about what static programs may not call; nobody needs to read that.
    if ! { cmake --preset aarch64 "${launcher[@]}" &&
      cmake --build --preset aarch64; } >build/aarch64.log 2>&1; then
      cat build/aarch64.log
      return 0
    fi
  fi
  section "aarch64: tests"
  ctest --preset release -j "$jobs" --output-junit "$junit" -R '^aarch64\.' || broken=1
}

mkdir -p build/tokenizers
scripts/fetch-tokenizers.sh build/tokenizers || echo "tests of the real tokenizers will be skipped"
export BITWITNESS_TOKENIZERS=$PWD/build/tokenizers

runner=()
run_preset release all . '^aarch64\.'
if ((!quick)); then
  if [[ "$(uname -m)" != aarch64 ]]; then run_aarch64; fi  # there, the release tests are these
  # Programs that were not built are known to ctest by a name with the suffix _NOT_BUILT. The reference
  # backend is slow under sanitizers, and plain loops on one thread.
  #
  # What reads other people's bytes, and what does pointer arithmetic:
  export ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1
  export UBSAN_OPTIONS=print_stacktrace=1
  run_preset asan \
    "attest_test audit_test cell_test client_test cpu_backend_test engine_test generate_test live_audit_test
     model_files_test open_test recheck_test redteam_test serve_audit_test serve_test tokenizer_test" \
    . '_NOT_BUILT|^tree\.|^aarch64\.|^check_(ptx|sass)|Invariance.*_ref|ThirdTileLevel|LongWordsTakeNearLinearTime'
  # What runs on several threads. ThreadSanitizer wants an address space without randomisation.
  if setarch -R true 2>/dev/null; then runner=(setarch -R); fi
  run_preset tsan "attest_test cpu_backend_test engine_test" \
    '^(ThreadPool|Engine)\.|Invariance|Thread|OneWriter' '_NOT_BUILT|Invariance.*_ref'
fi

section "red team"
grep -hoE '(red team|two processes|detection) +\|.*' build/release/results.xml || echo "its tests did not run"

section "results"
status=0
scripts/summarize_tests.py "${results[@]}" || status=1
exit $((status | broken))
