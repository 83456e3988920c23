#!/usr/bin/env python3
"""Checks the PTX of CUDA sources against the rules of kernels/ARITHMETIC.md.

Compiles each source to PTX with the project's flags and fails on
  - .approx or .ftz on any instruction,
  - add, sub, mul, fma, div or sqrt on f32 (or packed f32x2) without .rn: what the assembler may fuse or
    approximate; mad on f32,
  - ex2, lg2, sin, cos, tanh, rsqrt and rcp on f32,
  - atomics and reductions on floating-point types (integer ones too: their order shows in results that
    are returned, so the backend has none),
  - f16 and bf16 arithmetic (conversions are exact and allowed).

Usage: check_ptx.py --nvcc NVCC --include DIR [--arch compute_75 ...] [--expect-offences] SOURCE...
Exit status: 0 clean (or, with --expect-offences, every rule is broken), 1 not, 2 cannot check.
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile

# The flags of target bw_flags on which the arithmetic depends (scripts/cmake/BitwitnessFlags.cmake).
FLAGS = ["--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"]

FLOAT32 = r"\.f32(x2)?\b"
RULES = {
    "approximate instruction": re.compile(r"\.approx\b"),
    "flushes subnormals": re.compile(r"\.ftz\b"),
    "not rounded to nearest even explicitly": re.compile(
        r"^(add|sub|mul|fma|div|sqrt)(?!(\.[a-z0-9_:]+)*?\.rn\b)(\.[a-z0-9_:]+)*?" + FLOAT32),
    "multiply-add that may be fused or not": re.compile(r"^mad(\.[a-z0-9_]+)*?" + FLOAT32),
    "elementary function of the hardware": re.compile(
        r"^(ex2|lg2|sin|cos|tanh|rsqrt|rcp)(\.[a-z0-9_]+)*?" + FLOAT32),
    "atomic or reduction": re.compile(r"^(atom|red|redux|multimem)\."),
    "16-bit arithmetic": re.compile(
        r"^(add|sub|mul|fma|neg|abs|min|max|ex2|tanh)(\.[a-z0-9_]+)*?\.(f16|bf16)(x2)?\b"),
}


def instructions(ptx):
    """Yields (line number, instruction) without predicates, comments, directives and labels."""
    for number, line in enumerate(ptx.splitlines(), 1):
        text = line.split("//")[0].strip()
        for part in text.split(";"):
            part = re.sub(r"^[{}\s]*(@!?%p\d+\s+)?", "", part)
            if part and not part.startswith((".", "$", "(")):
                yield number, part


def offences(ptx):
    for number, instruction in instructions(ptx):
        for rule, pattern in RULES.items():
            if pattern.search(instruction):
                yield number, rule, instruction


def compile_to_ptx(nvcc, include, arch, source):
    """The PTX text, or None after saying why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "out.ptx"
        result = subprocess.run([nvcc, "-std=c++20", "-O3", "-ptx", f"-arch={arch}", f"-I{include}",
                                 *FLAGS, "-o", str(path), source],
                                stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
        if result.returncode == 0 and path.exists() and ".version" in path.read_text():
            return path.read_text()
        print(f"check_ptx: no PTX from {source} for {arch}:\n{result.stderr}", file=sys.stderr)
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nvcc", required=True)
    parser.add_argument("--include", required=True)
    parser.add_argument("--arch", action="append")
    parser.add_argument("--expect-offences", action="store_true")
    parser.add_argument("sources", nargs="+")
    args = parser.parse_args()

    found, count = [], 0
    for source in args.sources:
        for arch in args.arch or ["compute_75", "compute_90", "compute_120"]:
            ptx = compile_to_ptx(args.nvcc, args.include, arch, source)
            if ptx is None:
                return 2
            count += sum(1 for _ in instructions(ptx))
            found += [(source, arch, *offence) for offence in offences(ptx)]

    if args.expect_offences:
        missing = [rule for rule in RULES if rule not in {rule for _, _, _, rule, _ in found}]
        for rule in missing:
            print(f"check_ptx: the planted offender did not trip the rule '{rule}'")
        print(f"check_ptx: {len(RULES) - len(missing)} of {len(RULES)} rules bite")
        return 1 if missing else 0
    for source, arch, number, rule, instruction in found[:50]:
        print(f"{source} ({arch}, PTX line {number}): {rule}: {instruction}")
    print(f"check_ptx: {count} instructions of {len(args.sources)} sources, {len(found)} offences")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
