#!/usr/bin/env bash
# Checks that C++, CUDA and proto files are formatted as .clang-format says; `--fix` formats them.
# Versions of clang-format differ in details, so only version 14 counts: exit 77 (skipped) without it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

formatter=
for candidate in clang-format-14 clang-format; do
  if command -v "$candidate" >/dev/null && "$candidate" --version | grep -q 'version 14\.'; then
    formatter=$candidate
    break
  fi
done
if [[ -z "$formatter" ]]; then
  echo "check_format: clang-format 14 is not installed; skipped"
  exit 77
fi

mapfile -d '' files < <(find attest kernels proto prover tests verifier -type f \
  \( -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh' -o -name '*.proto' \) -print0 | sort -z)
case "${1:-}" in
  '') "$formatter" --dry-run -Werror "${files[@]}" ;;
  --fix) "$formatter" -i "${files[@]}" ;;
  *)
    echo "usage: scripts/check_format.sh [--fix]" >&2
    exit 2
    ;;
esac
echo "check_format: ${#files[@]} files"
