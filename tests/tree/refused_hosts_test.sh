#!/usr/bin/env bash
# Configures the tree for a host whose bits cannot be right and expects a refusal that says why.
#   refused_hosts_test.sh CMAKE SOURCE_FOLDER 32_bit|big_endian
# 77 (skipped) when no compiler here can compile for such a host.
set -euo pipefail
cmake=$1
source=$2
kind=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

case "$kind" in
  32_bit)
    compilers=("g++ -m32" "clang++ --target=i686-linux-gnu" "clang++-14 --target=i686-linux-gnu"
      "clang++ --target=armv7-linux-gnueabihf" "clang++-14 --target=armv7-linux-gnueabihf")
    reason='a 32-bit host is not supported'
    ;;
  big_endian)
    compilers=("aarch64-linux-gnu-g++ -mbig-endian" "clang++ --target=aarch64_be-linux-gnu"
      "clang++-14 --target=aarch64_be-linux-gnu" "g++ -mbig-endian")
    reason='a big-endian host is not supported'
    ;;
esac
echo 'int main() { return 0; }' >"$work/empty.cc"
for candidate in "${compilers[@]}"; do
  read -r compiler flag <<<"$candidate"
  "$compiler" "$flag" -c "$work/empty.cc" -o "$work/empty.o" 2>/dev/null || continue
  code=0
  # Static libraries as trials: nothing has to link for that host.
  "$cmake" -S "$source" -B "$work/build" -G Ninja -DCMAKE_SYSTEM_NAME=Linux \
    -DCMAKE_CXX_COMPILER="$compiler" -DCMAKE_CXX_FLAGS="$flag" \
    -DCMAKE_TRY_COMPILE_TARGET_TYPE=STATIC_LIBRARY -DBITWITNESS_CUDA=OFF >"$work/log" 2>&1 || code=$?
  # CMake breaks lines as it likes.
  said=$(tr -s ' \n' ' ' <"$work/log")
  if ((code == 0)) ||
    ! grep -qE "CMake Error at [^ ]*BitwitnessPlatform.cmake:[^.]*$reason" <<<"$said"; then
    cat "$work/log"
    echo "configuring with '$candidate' ended with $code and did not say '$reason'"
    exit 1
  fi
  echo "refused with '$candidate': $reason"
  exit 0
done
echo "skipped: no compiler for a host that is ${kind//_/ } is installed"
exit 77
