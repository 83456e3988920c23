#!/usr/bin/env bash
# Installs what is missing, builds everything and runs all tests; then once more under sanitizers.
#
#   scripts/test.sh           release tests, then AddressSanitizer + UndefinedBehaviorSanitizer and
#                             ThreadSanitizer over the parts that they are for
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
  read -r -a targets <<<"$2"
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

mkdir -p build/tokenizers
scripts/fetch-tokenizers.sh build/tokenizers || echo "tests of the real tokenizers will be skipped"
export BITWITNESS_TOKENIZERS=$PWD/build/tokenizers

runner=()
run_preset release all . '^$'
if ((!quick)); then
  # Programs that were not built are known to ctest by a name with the suffix _NOT_BUILT. The reference
  # backend is slow under sanitizers, and plain loops on one thread.
  #
  # What reads other people's bytes, and what does pointer arithmetic:
  export ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1
  export UBSAN_OPTIONS=print_stacktrace=1
  run_preset asan \
    "attest_test audit_test cpu_backend_test engine_test generate_test model_files_test serve_test tokenizer_test" \
    . '_NOT_BUILT|^tree\.|^check_ptx|Invariance.*_ref|ThirdTileLevel|LongWordsTakeNearLinearTime'
  # What runs on several threads. ThreadSanitizer wants an address space without randomisation.
  if setarch -R true 2>/dev/null; then runner=(setarch -R); fi
  run_preset tsan "attest_test cpu_backend_test engine_test" \
    '^(ThreadPool|Engine)\.|Invariance|Thread|OneWriter' '_NOT_BUILT|Invariance.*_ref'
fi

section "results"
status=0
scripts/summarize_tests.py "${results[@]}" || status=1
exit $((status | broken))
