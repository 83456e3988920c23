#!/usr/bin/env bash
# Installs what building (and with `test` also testing) Bitwitness needs, through apt, on Debian 12 or
# Ubuntu 24.04. Quick and without network when everything is there; safe to run twice; root or sudo.
#
#   scripts/setup.sh [build|test]
#
# BITWITNESS_NO_INSTALL=1 skips it: for machines whose packages somebody else looks after. With
# -DBITWITNESS_GRPC=OFF in BITWITNESS_CMAKE_ARGS, the packages of the live exchange are left out.
set -euo pipefail

build_packages=(
  g++ cmake ninja-build pkg-config
  libssl-dev libcli11-dev nlohmann-json3-dev libpcre2-dev libutf8proc-dev
  libgtest-dev libgmock-dev
)
# The live exchange.
grpc_packages=(libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc)
# Needed by every test run.
test_packages=(python3)
# Without ccache the second build takes as long as the first; tests that need one of the others are
# skipped by name without it.
optional_build_packages=(ccache)
optional_test_packages=(golang-go golang-golang-x-mod-dev clang-format-14)
# The AArch64 tests, on x86-64: a cross compiler, an emulator and the libraries of the other architecture.
aarch64_packages=(
  g++-aarch64-linux-gnu qemu-user
  libssl-dev:arm64 libpcre2-dev:arm64 libutf8proc-dev:arm64 libgtest-dev:arm64 libgmock-dev:arm64
)

say() { printf 'setup: %s\n' "$*" >&2; }
die() {
  say "$*"
  exit 3
}

missing_of() {  # prints those of its arguments (PACKAGE or PACKAGE:ARCHITECTURE) that are not installed
  local package architecture states
  for package in "$@"; do
    architecture=$native
    if [[ "$package" == *:* ]]; then architecture=${package##*:}; fi
    # One line for every architecture that the package is known for.
    states=$(dpkg-query -W -f='${Architecture} ${db:Status-Status}\n' "$package" 2>/dev/null || true)
    [[ $'\n'"$states"$'\n' == *$'\n'@("$architecture"|all)" installed"$'\n'* ]] ||
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
optional=("${optional_build_packages[@]}")
case " ${BITWITNESS_CMAKE_ARGS:-} " in
  *' -DBITWITNESS_GRPC=OFF '*) ;;
  *) needed+=("${grpc_packages[@]}") ;;
esac
if [[ "$scope" == test ]]; then
  needed+=("${test_packages[@]}")
  optional+=("${optional_test_packages[@]}")
  # npm comes with Node.js packages of several origins: only the command counts.
  command -v npm >/dev/null || optional+=(npm)
fi

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  die "only apt is known here. Install the equivalents of: ${needed[*]}" \
    "and run again with BITWITNESS_NO_INSTALL=1"
fi

native=$(dpkg --print-architecture)
mapfile -t missing < <(missing_of "${needed[@]}")
mapfile -t missing_optional < <(missing_of "${optional[@]}")
missing_aarch64=()
add_arm64=0
if [[ "$scope" == test && "$native" == amd64 ]]; then
  mapfile -t missing_aarch64 < <(missing_of "${aarch64_packages[@]}")
fi
if ((${#missing_aarch64[@]})) && ! dpkg --print-foreign-architectures | grep -qx arm64; then
  # Debian's mirrors have all architectures. Ubuntu's keep arm64 elsewhere: adding it there would break
  # every later `apt-get update` until the administrator says where.
  # shellcheck source=/dev/null
  if [[ "$(. /etc/os-release && echo "${ID:-}")" == debian ]]; then
    add_arm64=1
  else
    say "the AArch64 tests will be skipped: apt on this system does not know where arm64 packages are." \
      "With that architecture set up, run this again"
    missing_aarch64=()
  fi
fi
if ((${#missing[@]} + ${#missing_optional[@]} + ${#missing_aarch64[@]} == 0)); then exit 0; fi

as_root=()
if ((EUID != 0)); then
  # `sudo -v` asks for the password at most once, and fails for those who may not use sudo.
  if command -v sudo >/dev/null && { sudo -n true 2>/dev/null || sudo -v; }; then
    as_root=(sudo)
  elif ((${#missing[@]})); then
    die "these packages are missing, and this user is not root and cannot use sudo: ${missing[*]}." \
      "Ask an administrator for: apt-get install --no-install-recommends ${missing[*]}"
  else
    say "not installed, for want of root or sudo; it works without:" \
      "${missing_optional[*]} ${missing_aarch64[*]}"
    exit 0
  fi
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
apt() {  # its hundreds of lines are shown only when it fails
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get -qq -y -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 "$@" >"$log" 2>&1 </dev/null || {
    cat "$log" >&2
    return 1
  }
}
install() { apt --no-install-recommends install "$@"; }

all=("${missing[@]}" "${missing_optional[@]}" "${missing_aarch64[@]}")
say "installing (some minutes): ${all[*]}"
update() { apt update || say "apt-get update failed; trying with the package lists that are there"; }
if ((add_arm64)); then
  "${as_root[@]}" dpkg --add-architecture arm64
  if ! apt update; then
    say "once more, without the architecture arm64; the AArch64 tests will be skipped"
    "${as_root[@]}" dpkg --remove-architecture arm64
    add_arm64=0
    missing_aarch64=()
    update
  fi
else
  update
fi
if ((${#missing[@]})); then
  install "${missing[@]}" || die "apt-get could not install: ${missing[*]}. Look at its messages above"
fi
if ((${#missing_optional[@]})) && ! install "${missing_optional[@]}"; then
  for package in "${missing_optional[@]}"; do
    install "$package" || say "$package could not be installed; it works without"
  done
fi
if ((${#missing_aarch64[@]})) && ! install "${missing_aarch64[@]}"; then
  say "the AArch64 tests will be skipped; these could not be installed: ${missing_aarch64[*]}"
  if ((add_arm64)); then "${as_root[@]}" dpkg --remove-architecture arm64 || true; fi
fi
