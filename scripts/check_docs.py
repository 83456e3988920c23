#!/usr/bin/env python3
"""Checks that what the Markdown files name exists: repository paths and tests.

    scripts/check_docs.py [ROOT]

A path is `folder/...` in backticks or the target of a relative link; `{a,b}` and `*` are expanded, and
paths relative to the document count too. A test is `Suite.Case` in backticks, as GoogleTest or ctest
name it (`Prefix/Suite.Case` for a parameterised one, `Suite.*` for all of a suite).
Exit 1 when something named is not there.
"""

import glob
import pathlib
import re
import sys

FOLDERS = ("attest", "kernels", "proto", "prover", "scripts", "tests", "verifier", ".ci")
FENCE = re.compile(r"^```.*?^```[^\n]*$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
PATH = re.compile(r"(?:%s)/[\w./{},*+-]*" % "|".join(re.escape(folder) for folder in FOLDERS))
TEST = re.compile(r"(?:[A-Z]\w*/)?([A-Z]\w*)\.(\*|[A-Z]\w*)(?:/\w+)?")
TEST_MACRO = re.compile(r"\b(?:TYPED_)?TEST(?:_F|_P)?\(\s*(\w+)\s*,\s*(\w+)\s*\)")
CTEST_NAME = re.compile(r"(?:\badd_test\(\s*NAME|\bbw_add_tree_test\()\s*([\w.]+)")


def expand(pattern):
    """All spellings of a pattern with {a,b} groups."""
    group = re.search(r"\{([^{}]*)\}", pattern)
    if not group:
        return [pattern]
    out = []
    for choice in group.group(1).split(","):
        out += expand(pattern[:group.start()] + choice + pattern[group.end():])
    return out


def exists(root, document, pattern):
    return all(
        any(glob.glob(str(base / one)) for base in (root, document.parent)) for one in expand(pattern))


def known_tests(root):
    tests = set()
    for file in (root / "tests").rglob("*.cc"):
        for suite, case in TEST_MACRO.findall(file.read_text(encoding="utf-8", errors="replace")):
            tests |= {f"{suite}.{case}", f"{suite}.*"}
    for file in (root / "tests").rglob("CMakeLists.txt"):
        tests |= set(CTEST_NAME.findall(file.read_text(encoding="utf-8", errors="replace")))
    return tests


def check_document(root, document, tests):
    text = FENCE.sub(lambda match: re.sub(r"[^\n]", " ", match.group()),
                     document.read_text(encoding="utf-8"))
    missing = []
    for number, line in enumerate(text.split("\n"), 1):
        for target in LINK.findall(line):
            if "://" not in target and not exists(root, document, target):
                missing.append((number, f"link to {target}"))
        for code in CODE.findall(line):
            word = code.strip().rstrip("/")
            if PATH.fullmatch(word) and not exists(root, document, word):
                missing.append((number, f"path {word}"))
            test = TEST.fullmatch(word)
            if test and f"{test.group(1)}.{test.group(2)}" not in tests:
                missing.append((number, f"test {word}"))
            if re.fullmatch(r"tree\.\w+", word) and word not in tests:
                missing.append((number, f"test {word}"))
    return [f"{document.relative_to(root)}:{number}: {what} does not exist" for number, what in missing]


def main(arguments):
    if len(arguments) > 1 or (arguments and arguments[0].startswith("-")):
        print(__doc__, file=sys.stderr)
        return 2
    root = pathlib.Path(arguments[0]) if arguments else pathlib.Path(__file__).resolve().parent.parent
    tests = known_tests(root)
    documents = sorted(root.glob("*.md"))
    for folder in FOLDERS:
        documents += sorted(file for file in (root / folder).rglob("*.md")
                            if "tests/data/" not in file.as_posix())
    complaints = [line for document in documents for line in check_document(root, document, tests)]
    for line in complaints:
        print(line)
    print(f"{len(documents)} documents, {len(complaints)} complaints")
    return 1 if complaints or not documents else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
