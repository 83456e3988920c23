#!/usr/bin/env bash
# Shows what Bitwitness does, end to end, on a small real model: text, record, log entry, a verdict from
# re-execution on another backend, the same over the network, and then what tampering does to verdicts.
#
#   scripts/demo.sh              installs what is missing, builds the programs, runs
#   scripts/demo.sh --bin DIR    runs with programs that are built already
#
# Exit 0 only if every step ended with the exit code that it must end with. Leaves nothing behind but
# the build folder; safe to run twice. BITWITNESS_NO_INSTALL=1 installs nothing;
# BITWITNESS_CMAKE_ARGS are passed to cmake, e.g. -DBITWITNESS_GRPC=OFF.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
model=$root/tests/data/models/tiny-llama
max_tokens=48

bin=
case "${1:-}" in
  '') ;;
  --bin)
    bin=$(cd "${2:?--bin needs a folder}" && pwd)
    ;;
  *)
    echo "usage: scripts/demo.sh [--bin DIR]" >&2
    exit 2
    ;;
esac

if [[ -z "$bin" ]]; then
  "$root/scripts/setup.sh" build
  read -r -a cmake_args <<<"${BITWITNESS_CMAKE_ARGS:-}"
  if command -v ccache >/dev/null; then cmake_args+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache); fi
  echo "Building the three programs (some minutes the first time)..."
  cd "$root"
  build_log=$(mktemp)
  if ! { cmake --preset release "${cmake_args[@]}" &&
    cmake --build --preset release --target bw-prover bw-verifier bw-attest; } >"$build_log" 2>&1; then
    cat "$build_log"
    rm -f "$build_log"
    echo "demo: the build failed; its messages are above" >&2
    exit 3
  fi
  grep -h 'Bitwitness:' "$build_log" || true
  rm -f "$build_log"
  bin=$root/build/release
fi
program() {  # programs lie in their folder's build folder, or, installed, side by side
  local path
  for path in "$bin/$1" "$bin/prover/$1" "$bin/verifier/$1" "$bin/attest/$1"; do
    if [[ -x "$path" ]]; then
      printf '%s\n' "$path"
      return
    fi
  done
  echo "demo: $1 is not in $bin; build it first" >&2
  exit 3
}
prover=$(program bw-prover)
verifier=$(program bw-verifier)
attest=$(program bw-attest)

work=$(mktemp -d)
server=
finish() {
  if [[ -n "$server" ]]; then
    kill "$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true
  fi
  rm -rf "$work"
}
trap finish EXIT
cd "$work"

if [[ -t 1 ]]; then bold=$'\e[1m' plain=$'\e[0m'; else bold='' plain=''; fi
step=0
heading() {
  step=$((step + 1))
  printf '\n%s%d. %s%s\n' "$bold" "$step" "$1" "$plain"
  shift
  if (($#)); then printf '%s\n' "$@"; fi
}
wrong() {
  printf '\ndemo: FAILED: %s\n' "$*" >&2
  exit 1
}
# expect CODE COMMAND...: shows the command as a user would type it, runs it, demands its exit code. Its
# output stays in $work/stdout and $work/stderr.
expect() {
  local wanted=$1 got=0 shown
  shift
  shown="$(basename "$1") ${*:2}"
  printf '\n  $ %s\n' "${shown//$root\//}"
  "$@" 2>stderr | tee stdout | sed -u 's/^/    /' || got=${PIPESTATUS[0]}
  sed 's/^/    /' stderr
  [[ "$got" == "$wanted" ]] || wrong "exit code $got instead of $wanted from: $shown"
  if ((wanted)); then printf '    (exit code %s, as it must be)\n' "$got"; fi
}
says() {
  grep -qE -- "$1" stdout || wrong "the answer does not say '$1'"
}
# flip_byte FILE OFFSET: changes one bit of one byte.
flip_byte() {
  local value
  value=$(od -An -tu1 -j "$2" -N 1 "$1" | tr -d ' ')
  printf '%b' "\\x$(printf %02x $((value ^ 1)))" | dd of="$1" bs=1 seek="$2" conv=notrunc status=none
}

if ! "$prover" selftest >selftest.txt; then
  cat selftest.txt >&2
  wrong "the selftest failed on this machine"
fi
mapfile -t devices < <(sed -n 's/.*synthetic model on \([a-z0-9]*\).*/\1/p' selftest.txt)
((${#devices[@]})) || wrong "the selftest names no backend"
prover_device=${devices[-1]}
verifier_device=ref
printf 'Backends on this machine: %s.\n' "${devices[*]}"
printf 'The prover runs on "%s", the verifier re-executes on "%s", the portable reference.\n' \
  "$prover_device" "$verifier_device"

heading "A log" \
  "The operator's log is a directory of static files with signed tree heads." \
  "Who audits needs only its public verifier key."
expect 0 "$attest" keygen --name demo.example/log --out log.pem
expect 0 "$attest" init log --key log.pem

heading "A model produces text, a record and a log entry" \
  "The record commits to every activation of the run; its digest goes into the log." \
  "run.bwrec.tlog-proof is the receipt: proof that the log holds this record."
printf 'First Citizen:\nBefore we proceed' >prompt.txt
printf '\n  The prompt:\n'
sed 's/^/    /' prompt.txt
printf '\n'
expect 0 "$prover" run --model "$model" --prompt-file prompt.txt --max-tokens "$max_tokens" \
  --device "$prover_device" --evidence rows --out run.bwrec --log log --key log.pem
[[ -s stdout && -s run.bwrec && -s run.bwrec.tlog-proof ]] || wrong "text, record or receipt is missing"
printf '\n  The log, as anyone may read it:\n'
sed 's/^/    /' log/checkpoint

heading "The verdict: match" \
  "The verifier computes everything again from the token ids, with its own copy of the model and with" \
  "other code, and demands equal bits: no tolerance."
expect 0 "$verifier" audit run.bwrec --model "$model" --log-key log.pem.vkey --device "$verifier_device"
says '^match'

if "$prover" --help | grep -qE '^ +serve '; then
  heading "The same over the network" \
    "A prover serves. The auditor asks for sampled text and gives the random seed itself, so that the" \
    "choice of tokens leaves the prover no freedom; then it fetches the record by its id and judges it."
  printf '\n  $ bw-prover serve --model %s --listen 127.0.0.1:0 ... &\n' "${model#"$root"/}"
  expect 0 "$attest" keygen --name demo.example/operator --out operator.pem
  expect 0 "$attest" keygen --name demo.example/auditor --out auditor.pem
  "$prover" serve --model "$model" --listen 127.0.0.1:0 --device "$prover_device" --log log \
    --key log.pem --operator-key operator.pem --allow auditor.pem.vkey >serve.out 2>serve.err &
  server=$!
  address=
  for _ in $(seq 300); do
    address=$(grep -hoE -m 1 '127\.0\.0\.1:[1-9][0-9]*' serve.out serve.err || true)
    [[ -z "$address" ]] || break
    kill -0 "$server" 2>/dev/null || { cat serve.err; wrong "bw-prover serve ended"; }
    sleep 0.1
  done
  [[ -n "$address" ]] || wrong "bw-prover serve does not listen"
  expect 0 "$verifier" request --prover "$address" --prompt-file prompt.txt --max-tokens 24 \
    --temperature 0.8 --nonce random --out live.bwrec
  record=$(sed -n 's/^record id *//p' stderr)
  [[ -n "$record" ]] || wrong "the prover named no record"
  expect 0 "$verifier" audit --prover "$address" --record "$record" --model "$model" \
    --log-key log.pem.vkey --device "$verifier_device"
  says '^match'

  heading "A sample instead of everything" \
    "For a model too large to run again: the auditor publishes the hash of a secret, the log takes it in," \
    "both together draw the cells (layer, position) that the prover must open, and only those are computed" \
    "again. The prover kept nothing but the record: it opens by running once more."
  expect 0 "$verifier" audit --prover "$address" --record "$record" --model "$model" \
    --level cell --cells 12 --key auditor.pem --log-key log.pem.vkey --device "$verifier_device"
  says '^match'
  expect 0 "$verifier" audit --prover "$address" --record "$record" --model "$model" \
    --level layer --layers random:1 --key auditor.pem --log-key log.pem.vkey --device "$verifier_device"
  says '^match'
  kill "$server"
  wait "$server" || true
  server=
else
  printf '\n(The live exchange is not in this build: BITWITNESS_GRPC=OFF.)\n'
fi

heading "Tampering with the record: malformed" \
  "One bit of the record file is flipped after the fact."
cp run.bwrec tampered.bwrec
cp run.bwrec.tlog-proof tampered.bwrec.tlog-proof
flip_byte tampered.bwrec $(($(stat -c %s tampered.bwrec) / 2))
expect 5 "$verifier" audit tampered.bwrec --model "$model" --log-key log.pem.vkey \
  --device "$verifier_device"
says '^malformed'

heading "Tampering with the model: mismatch" \
  "The operator runs a model with one bit of one weight flipped. The text may well be the same, the" \
  "record is well-formed and its log entry real, but re-execution with the true model gives other bits," \
  "and the report names the tensor and the first layer, position and element that differ."
cp -r "$model" tampered-model
flip_byte tampered-model/model.safetensors $(($(stat -c %s "$model/model.safetensors") / 2))
expect 0 "$prover" run --model tampered-model --prompt-file prompt.txt --max-tokens "$max_tokens" \
  --device "$prover_device" --evidence rows --out cheat.bwrec --log log --key log.pem
expect 1 "$verifier" audit cheat.bwrec --model "$model" --log-key log.pem.vkey \
  --device "$verifier_device"
says '^mismatch'
says 'first difference: layer [0-9]+, position [0-9]+.*element [0-9]+'

printf '\n%sAll verdicts came as they must.%s\n' "$bold" "$plain"
