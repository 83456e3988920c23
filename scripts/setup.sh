#!/usr/bin/env bash
# Installs what building (and with `test` also testing) Bitwitness needs, through apt, on Debian 12 or
# Ubuntu 24.04. Quick and without network when everything is there; safe to run twice; root or sudo.
#
#   scripts/setup.sh [build|test]
#
# BITWITNESS_NO_INSTALL=1 skips it: for machines whose packages somebody else looks after.
set -euo pipefail

# The live exchange needs the gRPC and Protocol Buffers packages; the rest is needed always.
build_packages=(
  g++ cmake ninja-build pkg-config ccache
  libssl-dev libcli11-dev nlohmann-json3-dev libpcre2-dev libutf8proc-dev
  libgtest-dev libgmock-dev
  libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc
)
# Needed by every test run.
test_packages=(python3)
# Tests that need one of these are skipped by name without it.
optional_test_packages=(golang-go golang-golang-x-mod-dev clang-format-14)

say() { printf 'setup: %s\n' "$*" >&2; }
die() {
  say "$*"
  exit 3
}

missing_of() {  # prints those of its arguments that are not installed
  local package
  for package in "$@"; do
    [[ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)" == installed ]] ||
      printf '%s\n' "$package"
  done
}

scope=${1:-build}
case "$scope" in
  build | test) ;;
  *)
    echo "usage: scripts/setup.sh [build|test]" >&2
    exit 2
    ;;
esac
if [[ "${BITWITNESS_NO_INSTALL:-0}" == 1 ]]; then
  say "BITWITNESS_NO_INSTALL=1: nothing is installed"
  exit 0
fi

needed=("${build_packages[@]}")
optional=()
if [[ "$scope" == test ]]; then
  needed+=("${test_packages[@]}")
  optional=("${optional_test_packages[@]}")
  # npm comes with Node.js packages of several origins: only the command counts.
  command -v npm >/dev/null || optional+=(npm)
fi

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  die "only apt is known here. Install the equivalents of: ${needed[*]}" \
    "and run again with BITWITNESS_NO_INSTALL=1"
fi

mapfile -t missing < <(missing_of "${needed[@]}")
missing_optional=()
if ((${#optional[@]})); then mapfile -t missing_optional < <(missing_of "${optional[@]}"); fi
if ((${#missing[@]} + ${#missing_optional[@]} == 0)); then exit 0; fi

as_root=()
if ((EUID != 0)); then
  if command -v sudo >/dev/null; then
    as_root=(sudo)
  elif ((${#missing[@]})); then
    die "these packages are missing and neither root nor sudo is at hand: ${missing[*]}." \
      "Ask an administrator for: apt-get install --no-install-recommends ${missing[*]}"
  else
    say "not installed (tests that need them are skipped): ${missing_optional[*]}"
    exit 0
  fi
fi

apt() {
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 "$@" >&2
}

say "installing: ${missing[*]} ${missing_optional[*]}"
updated=1
apt -qq update || updated=0
if ((${#missing[@]})); then
  ((updated)) || say "apt-get update failed; trying with the package lists that are there"
  apt -qq -y --no-install-recommends install "${missing[@]}" ||
    die "apt-get could not install: ${missing[*]}. Look at its messages above"
fi
for package in "${missing_optional[@]}"; do
  apt -qq -y --no-install-recommends install "$package" ||
    say "$package could not be installed; tests that need it are skipped"
done
