#!/usr/bin/env python3
"""Checks the PTX of CUDA sources against the rules of kernels/ARITHMETIC.md.

Compiles each source to PTX with the project's flags and fails on
  - .approx or .ftz on any instruction,
  - add, sub, mul, fma, div or sqrt on f32 (or packed f32x2) without .rn: what the assembler may fuse or
    approximate; mad on f32,
  - ex2, lg2, sin, cos, tanh, rsqrt and rcp on f32,
  - atomics and reductions on floating-point types (integer ones too: their order shows in results that
    are returned, so the backend has none), asynchronous and bulk ones among them,
  - f16 and bf16 arithmetic (conversions are exact and allowed), and the tensor core,
and on a header (.cuh) beside the sources that none of them includes: nothing would check it.

Usage: check_ptx.py --nvcc NVCC --include DIR [--arch compute_75 ...] [--jobs N] [--expect-offences] SOURCE...
Exit status: 0 clean (or, with --expect-offences, every rule is broken), 1 not, 2 cannot check.
"""

import argparse
import concurrent.futures
import functools
import os
import pathlib
import re
import subprocess
import sys
import tempfile

# Between them they see both sides of every `#if __CUDA_ARCH__ >= N` of the sources.
ARCHITECTURES = ["compute_75", "compute_90"]

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
    "atomic or reduction": re.compile(r"^(atom|red|redux|multimem|cp\.reduce)\."),
    "16-bit arithmetic": re.compile(
        r"^(add|sub|mul|fma|neg|abs|min|max|ex2|tanh)(\.[a-z0-9_]+)*?\.(f16|bf16)(x2)?\b"),
    "tensor core": re.compile(r"^(mma|wmma|wgmma|tcgen05)\."),
}


def instructions(ptx):
    """Yields (line number, instruction) without predicates, comments, directives and labels."""
    for number, line in enumerate(ptx.splitlines(), 1):
        text = line.split("//")[0].strip()
        for part in text.split(";"):
            part = re.sub(r"^[{}\s]*(@!?%p\d+\s+)?", "", part)
            if part and not part.startswith((".", "$", "(")):
                yield number, part


@functools.lru_cache(maxsize=None)
def broken_rules(opcode):
    """Rules look at the opcode alone, with its modifiers: there are a few hundred of them."""
    return [rule for rule, pattern in RULES.items() if pattern.search(opcode)]


def offences(ptx):
    """How many instructions there are, and (line number, rule, instruction) of those that break a rule."""
    count, found = 0, []
    for number, instruction in instructions(ptx):
        count += 1
        found += [(number, rule, instruction) for rule in broken_rules(instruction.split(None, 1)[0])]
    return count, found


def compile_to_ptx(nvcc, include, arch, source):
    """The PTX text and the headers it was made of, or None after saying why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        path, headers = pathlib.Path(folder) / "out.ptx", pathlib.Path(folder) / "out.d"
        result = subprocess.run([nvcc, "-std=c++20", "-O3", "-ptx", f"-arch={arch}", f"-I{include}",
                                 *FLAGS, "-MD", "-MF", str(headers), "-o", str(path), source],
                                stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)
        if result.returncode == 0 and path.exists() and ".version" in path.read_text():
            return path.read_text(), headers.read_text()
        print(f"check_ptx: no PTX from {source} for {arch}:\n{result.stderr}", file=sys.stderr)
        return None


def headers_left_out(sources, dependencies):
    """Headers with device code beside the sources that no source includes."""
    text = " ".join(dependencies)
    folders = {pathlib.Path(source).resolve().parent for source in sources}
    return sorted(str(header) for folder in folders for header in folder.glob("*.cuh")
                  if not re.search(r"(^|[\s/])" + re.escape(header.name) + r"(\s|$)", text))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nvcc", required=True)
    parser.add_argument("--include", required=True)
    parser.add_argument("--arch", action="append")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--expect-offences", action="store_true")
    parser.add_argument("sources", nargs="+")
    args = parser.parse_args()

    def check(item):
        source, arch = item
        compiled = compile_to_ptx(args.nvcc, args.include, arch, source)
        if compiled is None:
            return None
        count, found = offences(compiled[0])
        return compiled[1], count, [(source, arch, *offence) for offence in found]

    # The largest first, so that none of them is left over at the end.
    items = [(source, arch) for source in
             sorted(args.sources, key=lambda source: -pathlib.Path(source).stat().st_size)
             for arch in args.arch or ARCHITECTURES]
    with concurrent.futures.ThreadPoolExecutor(max(args.jobs or 1, 1)) as pool:
        results = list(pool.map(check, items))
    if None in results:
        return 2
    found = [offence for _, _, some in results for offence in some]
    count = sum(some for _, some, _ in results)

    if args.expect_offences:
        missing = [rule for rule in RULES if rule not in {rule for _, _, _, rule, _ in found}]
        for rule in missing:
            print(f"check_ptx: the planted offender did not trip the rule '{rule}'")
        print(f"check_ptx: {len(RULES) - len(missing)} of {len(RULES)} rules bite")
        return 1 if missing else 0
    for source, arch, number, rule, instruction in found[:50]:
        print(f"{source} ({arch}, PTX line {number}): {rule}: {instruction}")
    unseen = headers_left_out(args.sources, [headers for headers, _, _ in results])
    for header in unseen:
        print(f"{header}: no source includes it, so that nothing checks it")
    print(f"check_ptx: {count} instructions of {len(args.sources)} sources, {len(found)} offences")
    return 1 if found or unseen else 0


if __name__ == "__main__":
    sys.exit(main())
