"""The programs for AArch64, run by qemu's user-mode emulation, give the bits of the native ones.

    aarch64_test.py --cross BUILD_FOLDER --native BUILD_FOLDER CASE

Exit 0 when the case holds, 1 when not, 77 (skipped, with the reason) when the emulator or the cross build
is not there.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

DATA = pathlib.Path(__file__).resolve().parents[1] / "data"
MODELS = DATA / "models"
PROGRAMS = {"bw-attest": "attest", "bw-prover": "prover", "bw-verifier": "verifier"}

# Test programs by case: path in the build, GoogleTest filter. They run what the native build runs, but for
# tests that start programs (the emulator starts none for its guest) and those that take minutes here.
TEST_PROGRAMS = {
    "contract": ("tests/kernels/contract_test", "*"),
    "cpu_backend": ("tests/kernels/cpu/cpu_backend_test",
                    "-*MatmulAtEveryBoundary*:*MatmulOnAnyThreadsAndAlignment*"),
    "cpu_backend_products": ("tests/kernels/cpu/cpu_backend_test",
                             "*MatmulAtEveryBoundary*:*MatmulOnAnyThreadsAndAlignment*"),
    "engine": ("tests/kernels/engine_test", "*EqualsTheReferenceBackend/*_neon:*PrefillEquals*/tiny_qwen3_neon:"
               "*PrefillEquals*/zoo_*_neon:*AloneEquals*/zoo_*_neon:Engine.*"),
    "attest": ("tests/attest/attest_test", "-ProgramTest.*:StockTlog.*:*ThirdTileLevel"),
    "gpu_records": ("tests/verifier/gpu_records_test", "*"),
}


def skip(reason):
    print(f"skipped: {reason}")
    sys.exit(77)


class Side:
    """The programs of one build, started directly or through an emulator."""

    def __init__(self, build, emulator=None):
        self.build = pathlib.Path(build)
        self.emulator = [emulator] if emulator else []

    def path(self, program):
        return self.build / PROGRAMS[program] / program

    def run(self, program, *arguments):
        """(exit code, stdout) of one program."""
        done = subprocess.run([*self.emulator, str(self.path(program)), *map(str, arguments)],
                              stdout=subprocess.PIPE, text=True, check=False)
        return done.returncode, done.stdout

    def json(self, program, *arguments, code=0):
        """The parsed output of one program that must end with `code`."""
        got, text = self.run(program, *arguments, "--format", "json")
        assert got == code, f"{program} {arguments}: exit code {got}, not {code}\n{text}"
        return json.loads(text)


def model_of(record):
    """<gpu>-<model>.bwrec -> the model's directory."""
    name = record.stem.partition("-")[2]
    return MODELS / name if (MODELS / name).is_dir() else MODELS / "zoo" / name


def expect_equal(what, got, want):
    assert got == want, f"{what}: AArch64 {got!r}, native {want!r}"
    print(f"equal: {what}: {got}")


def selftests(arm, _native, _work):
    for program in PROGRAMS:
        report = arm.json(program, "selftest")
        assert report["failed"] == 0, report
        if program != "bw-attest":
            assert "neon" in json.dumps(report), "the selftest left NEON out"
        print(f"{program}: {report}")


RUNS = {
    "greedy": ["--prompt", "KING RICHARD III:", "--max-tokens", 6],
    "sampled": ["--prompt", "What light through yonder", "--max-tokens", 8, "--temperature", 0.8,
                "--top-k", 30, "--seed", "00ff"],
    "across an attention block": ["--token-ids", ",".join(str(i * 37 % 2048) for i in range(70)),
                                  "--max-tokens", 3],
}


def equal_claims(arm, native, work):
    for name, request in RUNS.items():
        for model in ("tiny-qwen3", "tiny-llama"):
            flags = ["--model", MODELS / model, *request]
            here = native.json("bw-prover", "run", *flags, "--out", work / "native.bwrec")
            there = arm.json("bw-prover", "run", *flags, "--device", "neon", "--out", work / "arm.bwrec")
            for key in ("token_ids", "text", "trace_root", "manifest_digest", "claim_digest"):
                expect_equal(f"{model}, {name}, {key}", there[key], here[key])
    shown = arm.json("bw-attest", "show", work / "arm.bwrec")
    assert "neon" in json.dumps(shown), "the record does not say that NEON made it"


def records_cross_over(arm, native, work):
    """What one architecture wrote, the other verifies: record, log entry and receipt."""
    for writer, reader, device in ((arm, native, "cpu"), (native, arm, "neon")):
        folder = pathlib.Path(tempfile.mkdtemp(dir=work))
        key, log, record = folder / "key.pem", folder / "log", folder / "run.bwrec"
        assert writer.run("bw-attest", "keygen", "--name", "log.example/t", "--out", key)[0] == 0
        assert writer.run("bw-attest", "init", log, "--key", key)[0] == 0
        writer.json("bw-prover", "run", "--model", MODELS / "tiny-qwen3", *RUNS["sampled"],
                    "--out", record, "--log", log, "--key", key)
        report = reader.json("bw-verifier", "audit", record, "--model", MODELS / "tiny-qwen3",
                             "--device", device, "--log-key", f"{key}.vkey")
        assert report["verdict"] == "match", report
        print(f"match on {device}, log {report['log']}")


def h200_records(arm, native, _work):
    records = sorted((DATA / "records").glob("h200-*.bwrec"))
    assert records, "no committed records"
    for record in records:
        flags = ["audit", record, "--model", model_of(record)]
        there = arm.json("bw-verifier", *flags, "--device", "neon")
        here = native.json("bw-verifier", *flags)
        expect_equal(f"{record.name}: verdict", there["verdict"], here["verdict"])
        assert there["verdict"] == "match" and there["backend"] == "neon", there
        expect_equal(f"{record.name}: coverage", there["coverage"], here["coverage"])


def flipped(source, target, at, mask):
    content = bytearray(source.read_bytes())
    content[at] ^= mask
    target.write_bytes(content)


def tampered_model(arm, native, work):
    """One weight differs: the same verdict at the same place."""
    good = MODELS / "tiny-qwen3"
    bad = work / "model"
    shutil.copytree(good, bad, copy_function=shutil.copyfile)
    bad.chmod(0o755)
    weights = good / "model.safetensors"
    flipped(weights, bad / "model.safetensors", weights.stat().st_size // 2, 0x40)
    record = work / "run.bwrec"
    native.json("bw-prover", "run", "--model", good, *RUNS["greedy"], "--evidence", "rows",
                "--out", record)
    flags = ["audit", record, "--model", bad]
    here = native.json("bw-verifier", *flags, code=1)
    there = arm.json("bw-verifier", *flags, "--device", "neon", code=1)
    assert here["verdict"] == "mismatch" and here["first_difference"], here
    for key in ("verdict", "first_difference", "findings", "computed_trace_root"):
        expect_equal(key, there[key], here[key])


def damaged_record(arm, native, work):
    record = DATA / "records" / "h200-tiny-qwen3.bwrec"
    size = record.stat().st_size
    for at in (9, size // 3, size // 2, size - 1):
        flipped(record, work / "bad.bwrec", at, 0x20)
        flags = ["audit", work / "bad.bwrec", "--model", model_of(record)]
        here = native.json("bw-verifier", *flags, code=5)
        there = arm.json("bw-verifier", *flags, code=5)
        for key in ("verdict", "findings"):
            expect_equal(f"byte {at} flipped: {key}", there[key], here[key])


def h200_proofs(arm, native, work):
    """Lies of a GPU's prover that an x86-64 verifier found, confirmed on a third architecture."""
    proofs = sorted((DATA / "records").glob("h200-*.bwproof"))
    assert proofs, "no committed proofs"
    for proof in proofs:
        flags = ["recheck", proof, "--model", MODELS / "tiny-qwen3"]
        here = native.json("bw-verifier", *flags, code=1)
        for device in ("neon", "ref"):
            there = arm.json("bw-verifier", *flags, "--device", device, code=1)
            assert there["verdict"] == "mismatch" and there["backend"] == device, there
            for key in ("verdict", "first_difference", "findings"):
                expect_equal(f"{proof.name} on {device}: {key}", there[key], here[key])
    flipped(proofs[0], work / "bad.bwproof", proofs[0].stat().st_size // 2, 0x20)
    flags = ["recheck", work / "bad.bwproof", "--model", MODELS / "tiny-qwen3"]
    expect_equal("a flipped bit", arm.json("bw-verifier", *flags, code=5)["verdict"],
                 native.json("bw-verifier", *flags, code=5)["verdict"])


def run_test_program(arm, case):
    path, tests = TEST_PROGRAMS[case]
    program = arm.build / path
    if not program.is_file():
        skip(f"{program} is not built; cmake --build --preset aarch64 does it")
    environment = dict(os.environ, BITWITNESS_THIN_TESTS="1")
    done = subprocess.run([*arm.emulator, str(program), f"--gtest_filter={tests}"], env=environment,
                          stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, f"{path}: exit code {done.returncode}"
    assert "[       OK ]" in done.stdout, f"{path}: no test of this name passed"


CASES = {function.__name__: function for function in
         (selftests, equal_claims, records_cross_over, h200_records, h200_proofs, tampered_model,
          damaged_record)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--cross", required=True)
    parser.add_argument("--native", required=True)
    parser.add_argument("case", choices=[*CASES, *TEST_PROGRAMS])
    arguments = parser.parse_args()

    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if os.environ.get("BITWITNESS_NO_AARCH64"):
        skip(os.environ["BITWITNESS_NO_AARCH64"])
    if emulator is None:
        skip("qemu-aarch64 is not installed")
    arm, native = Side(arguments.cross, emulator), Side(arguments.native)
    for program in PROGRAMS:
        if not arm.path(program).is_file():
            skip(f"{arm.path(program)} is not built; cmake --preset aarch64 and "
                 "cmake --build --preset aarch64 do it")
    try:
        if arguments.case in TEST_PROGRAMS:
            run_test_program(arm, arguments.case)
        else:
            with tempfile.TemporaryDirectory() as work:
                CASES[arguments.case](arm, native, pathlib.Path(work))
    except AssertionError as error:
        print(f"FAILED: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
