"""Tests of the scripts that judge a test run and the documents: each must be able to fail."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"


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


if __name__ == "__main__":
    unittest.main()
