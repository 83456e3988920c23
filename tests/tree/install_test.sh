#!/usr/bin/env bash
# Installs a built tree into an empty folder: programs that start, specifications, licence, audit.proto.
#   install_test.sh CMAKE BUILD_FOLDER
set -euo pipefail
cmake=$1
build=$2
prefix=$(mktemp -d)
trap 'rm -rf "$prefix"' EXIT

"$cmake" --install "$build" --prefix "$prefix" >/dev/null

for program in bw-attest bw-prover bw-verifier; do
  "$prefix/bin/$program" --version | head -n 1 | grep -qE "^$program [0-9]+\.[0-9]+\.[0-9]+\$" || {
    echo "$program --version does not begin with '$program X.Y.Z'"
    exit 1
  }
done
for file in doc/bitwitness/{LICENSE,CHANGELOG.md,README.md} \
  doc/bitwitness/{ARITHMETIC,RECORD_FORMAT,LOG_FORMAT,PROTOCOL,THREAT_MODEL}.md \
  bitwitness/proto/audit.proto; do
  [[ -s "$prefix/share/$file" ]] || {
    echo "share/$file is not installed"
    exit 1
  }
done
extra=$(find "$prefix" -type f | grep -vE '/(bin/bw-(attest|prover|verifier)|share/.*)$' || true)
[[ -z "$extra" ]] || {
  echo "installed, but nobody asked for it: $extra"
  exit 1
}
