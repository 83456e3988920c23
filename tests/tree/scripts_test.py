"""Tests of the scripts that judge a test run and the documents: each must be able to fail."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"
SASS = pathlib.Path(__file__).resolve().parents[1] / "data" / "sass"


def run(script, *arguments):
    """(exit code, lines of stdout) of one script."""
    done = subprocess.run([sys.executable, "-B", SCRIPTS / script, *arguments],
                          stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stdout.splitlines()


class SummarizeTests(unittest.TestCase):
    def summarize(self, cases):
        with tempfile.NamedTemporaryFile("w", suffix=".xml") as file:
            file.write(f"<testsuite>{cases}</testsuite>")
            file.flush()
            return run("summarize_tests.py", f"release={file.name}")

    def test_counts_and_names(self):
        code, lines = self.summarize(
            '<testcase name="A.a" status="run"/><testcase name="A.b" status="run"/>'
            '<testcase name="G.gpu" status="notrun">'
            '<skipped message="SKIP_REGULAR_EXPRESSION_MATCHED"/></testcase>'
            '<testcase name="G.off" status="disabled"><skipped message="Disabled"/></testcase>')
        self.assertEqual(code, 0)
        self.assertEqual(lines, ["skipped  release: G.gpu", "skipped  release: G.off",
                                 "2 passed, 0 failed, 2 skipped"])

    def test_failure(self):
        code, lines = self.summarize('<testcase name="A.a" status="run"/>'
                                     '<testcase name="A.b" status="fail"><failure/></testcase>')
        self.assertEqual(code, 1)
        self.assertEqual(lines, ["failed  release: A.b", "1 passed, 1 failed, 0 skipped"])

    def test_that_did_not_start_has_failed(self):
        code, lines = self.summarize(
            '<testcase name="A.a" status="run"/><testcase name="gone" status="notrun">'
            '<skipped message="Unable to find executable"/></testcase>')
        self.assertEqual((code, lines[-1]), (1, "1 passed, 1 failed, 0 skipped"))

    def test_nothing_passed_is_a_failure(self):
        self.assertEqual(self.summarize("")[0], 1)
        self.assertEqual(self.summarize('<testcase name="G.off" status="disabled"/>')[0], 1)

    def test_missing_or_torn_results_are_a_failure(self):
        self.assertEqual(run("summarize_tests.py", "release=/nonexistent.xml")[0], 1)
        self.assertEqual(self.summarize("<testcase")[0], 1)


class CheckDocs(unittest.TestCase):
    def check(self, text):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "tests").mkdir()
            (root / "kernels").mkdir()
            (root / "kernels/a.cc").touch()
            (root / "kernels/a.h").touch()
            (root / "tests/a_test.cc").write_text("TEST_F(Suite, Case) {}\n", encoding="utf-8")
            (root / "README.md").write_text(text, encoding="utf-8")
            return run("check_docs.py", folder)

    def test_good(self):
        code, lines = self.check("`kernels/a.{cc,h}` `kernels/*.cc` [a](kernels/a.h#x) `Suite.Case` "
                                 "`Prefix/Suite.Case/0` `Suite.*` `kernels/` [w](https://example.org/x)\n"
                                 "```\n`kernels/fenced.cc`\n```\n")
        self.assertEqual((code, lines), (0, ["1 documents, 0 complaints"]))

    def test_each_missing_thing_is_found(self):
        for text in ("`kernels/b.cc`", "`kernels/a.{cc,cu}`", "[b](kernels/b.h)", "`Suite.Other`",
                     "`Other.*`", "`tree.nothing`"):
            with self.subTest(text):
                self.assertEqual(self.check(text)[0], 1)


class CheckSass(unittest.TestCase):
    """Machine code, as text: no toolkit is needed."""

    CLEAN = ["ieee_sm75.sass", "ieee_sm90.sass", "ieee_sm120.sass"]

    def check(self, text, *arguments):
        with tempfile.NamedTemporaryFile("w", suffix=".sass") as file:
            file.write(text)
            file.flush()
            return run("check_sass.py", "--most", "1000", *arguments, file.name)

    def test_ieee_division_and_root_are_clean(self):
        for name in self.CLEAN:
            code, lines = run("check_sass.py", str(SASS / name))
            self.assertEqual((code, len(lines)), (0, 1), lines)
            self.assertIn(" 11 functions, 0 offences", lines[0])

    def test_every_offender_is_found(self):
        text = (SASS / "offenders_sm90.sass").read_text()
        names = [line.split()[-1] for line in text.splitlines() if line.startswith("Function")]
        code, lines = self.check(text)
        self.assertEqual(code, 1)
        self.assertEqual(len(names), 14)
        for name in names:
            self.assertTrue(any(f" {name}+0x" in line for line in lines), name)
        for name, rule in (("o_rcp_ftz", "approximate reciprocal or root"), ("o_ftz", "flushes subnormals"),
                           ("o_rsqrt", "approximate reciprocal or root"), ("o_modes", "does not round to nearest even"),
                           ("o_expf", "elementary function of the hardware"), ("o_int_atomic", "atomic or reduction"),
                           ("k_half_real", "16-bit arithmetic")):
            self.assertTrue(any(f" {name}+0x" in line and rule in line for line in lines), name)

    def test_a_damaged_expansion_is_no_expansion(self):
        for old, new in (("FCHK", "ISETP.NE.AND"), ("FFMA.RM", "FFMA.RP"), ("FFMA.RZ", "FFMA"), ("FMUL.FTZ", "FADD.FTZ"),
                         ("0xf3000000", "0xf2000000"), ("I2F.U32.RP", "I2F.U32"), ("0xffffffe", "0xfffffff"),
                         ("-QNAN", "R3"), ("HFMA2.MMA R7, -RZ, RZ", "HFMA2.MMA R7, R4, RZ")):
            text = (SASS / "ieee_sm90.sass").read_text()
            self.assertIn(old, text)
            self.assertEqual(self.check(text.replace(old, new))[0], 1, old)

    def test_tensor_core(self):
        for opcode in ("HMMA.1688.F32", "IMMA.16816.S8.S8", "HGMMA.64x64x16.F32", "UTCHMMA"):
            code, lines = self.check(f"Function : f\n/*0000*/ {opcode} R4, R8, R6, R4;\n")
            self.assertEqual(code, 1)
            self.assertIn("tensor core", lines[0])

    def test_barriers_are_no_atomics(self):
        text = "Function : f\n/*0000*/ SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [UR4], R2;\n/*0010*/ @P0 ATOMS.ARRIVE.64 RZ, [R2];\n"
        self.assertEqual(self.check(text)[0], 0)

    def test_what_is_not_understood_is_not_clean(self):
        self.assertEqual(self.check("nothing\n")[0], 2)
        self.assertEqual(self.check("Function : f\n/*0000*/ ???\n")[0], 2)
        self.assertEqual(self.check("Function : f\n/*0000*/ FADD.FTZ R0, R0, R1;\n", "--expect-offences")[0], 1)


class Peers(unittest.TestCase):
    """Without PyTorch or a GPU there is nothing to compare with, and that is no failure."""

    PEERS = pathlib.Path(__file__).resolve().parents[1] / "bench" / "peers.py"

    def peers(self, torch, *arguments):
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "torch.py").write_text(torch)
            done = subprocess.run([sys.executable, "-B", self.PEERS, *arguments], env={"PYTHONPATH": folder},
                                  stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
            return done.returncode, done.stdout

    def test_skipped_without_torch(self):
        self.assertEqual(self.peers("raise ImportError()", "bw-prover"),
                         (0, "peers: skipped: PyTorch is not installed\n"))

    def test_skipped_without_gpu(self):
        self.assertEqual(self.peers("class cuda:\n    is_available = staticmethod(lambda: False)\n", "bw-prover"),
                         (0, "peers: skipped: PyTorch sees no CUDA device\n"))

    def test_usage(self):
        self.assertEqual(self.peers("")[0], 2)
        self.assertEqual(self.peers("", "bw-prover", "--repeat", "0")[0], 2)


if __name__ == "__main__":
    unittest.main()
