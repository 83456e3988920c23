#!/usr/bin/env python3
"""Counts the results of ctest runs.

    scripts/summarize_tests.py NAME=JUNIT_FILE...

Each file is what `ctest --output-junit` wrote; NAME (e.g. the preset) stands before its tests. Skipped
and failed tests are listed by name; the last line is `N passed, N failed, N skipped`. Exit 1 when a test
failed or could not be started, when a file is missing or unreadable, or when no test passed.
"""

import re
import sys
import xml.etree.ElementTree as ElementTree

# How ctest words a skip that the test itself asked for; any other one means that it did not start.
SKIPPED_ON_PURPOSE = re.compile(r"SKIP_|Disabled", re.IGNORECASE)


def outcome(case):
    """'passed', 'skipped' or 'failed' for one <testcase>."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    status = case.get("status", "")
    if status == "disabled":
        return "skipped"
    skipped = case.find("skipped")
    if skipped is not None or status == "notrun":
        message = skipped.get("message", "") if skipped is not None else ""
        return "skipped" if SKIPPED_ON_PURPOSE.search(message) else "failed"
    return "passed" if status == "run" else "failed"


def read_results(argument):
    """[(test name, outcome)] of one NAME=FILE."""
    name, _, path = argument.partition("=")
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError) as error:
        return [(f"{name}: results of the run: {error}", "failed")]
    cases = list(root.iter("testcase"))
    if not cases:
        return [(f"{name}: the run had no tests", "failed")]
    return [(f"{name}: {case.get('name', '?')}", outcome(case)) for case in cases]


def main(arguments):
    if not arguments or any("=" not in argument for argument in arguments):
        print(__doc__, file=sys.stderr)
        return 2
    results = [result for argument in arguments for result in read_results(argument)]
    counts = {}
    for kind in ("passed", "skipped", "failed"):
        names = [name for name, got in results if got == kind]
        counts[kind] = len(names)
        if kind != "passed":
            for name in names:
                print(f"{kind}  {name}")
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return 1 if counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
