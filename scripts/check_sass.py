#!/usr/bin/env python3
"""Checks machine code of NVIDIA GPUs (SASS) against the rules of kernels/ARITHMETIC.md.

Disassembles programs and objects with cuobjdump and fails on
  - MUFU.EX2, LG2, SIN, COS, TANH, SQRT: elementary functions of the hardware,
  - MUFU.RCP and RSQ but where the compiler rounds a division or square root correctly with them, or
    divides integers,
  - .FTZ, and rounding other than to nearest even, but there,
  - atomics and reductions,
  - f16 and bf16 arithmetic, but constants and conversions written as such, and the tensor core.

What the compiler makes of IEEE division and square root (toolkits 12 and 13, sm_75 to sm_120) is recognised by
its parts: the refinement beside its guard (FCHK, or a comparison of the biased exponent), and the out-of-line
slow path by the exact number of each of its instructions.

Usage: check_sass.py [--cuobjdump PATH] [--nvcc NVCC --arch sm_90 --include DIR] [--expect-offences] FILE...
FILE: a program, object or cubin; a .cu source, which nvcc compiles first; a .sass text of cuobjdump -sass.
Exit status: 0 clean (or, with --expect-offences, every rule is broken), 1 not, 2 cannot check, 77 there is no
cuobjdump.
"""

import argparse
import collections
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ELEMENTARY = "elementary function of the hardware"
APPROXIMATE = "approximate reciprocal or root"
FLUSHES = "flushes subnormals"
ROUNDING = "does not round to nearest even"
ATOMIC = "atomic or reduction"
HALF = "16-bit arithmetic"
TENSOR = "tensor core"
RULES = (ELEMENTARY, APPROXIMATE, FLUSHES, ROUNDING, ATOMIC, HALF, TENSOR)

NVCC_FLAGS = ["-std=c++20", "-O3", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"]

ADDRESS = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/")
FUNCTION = re.compile(r"^\s*Function\s*:\s*(\S+)")
LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P[T0-9]+)\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Z0-9_]+)*)\s*([^;]*);")
ATOMICS = re.compile(r"^(C?REDUX|RED|ATOM|SURED|SUATOM|UBLKRED|UTMARED)(?!.*\.ARRIVE)")
ROUNDS_OTHERWISE = re.compile(r"[._]R[MPZ](?![A-Z0-9])")
ROOT_GUARD = re.compile(r"(-0xd000000|0xf3000000)\b")
INTEGER_CORRECTION = re.compile(r"\b0x1?ffffffe\b")  # added to a reciprocal's bits: 2^32 or 2^64 times less a bit
COPY = re.compile(r"MOV|UMOV|IMAD\.MOV\.U32|IMAD\.U32")
NEAR = 400  # instructions between the parts of an expansion, which others are scheduled among

Instruction = collections.namedtuple("Instruction", "address opcode operands text")


def register(operand):
    """An operand without sign, absolute value and reuse."""
    return operand.strip().replace(".reuse", "").strip("-|!~")


def functions(sass):
    """Yields (name, instructions) for each function of a listing."""
    name, found = None, []
    for line in sass.splitlines():
        start = FUNCTION.match(line)
        if start:
            if name is not None:
                yield name, found
            name, found = start.group(1), []
            continue
        match = LINE.match(line)
        if match and name is not None:
            address, _, opcode, operands = match.groups()
            found.append(Instruction(int(address, 16), opcode, [o.strip() for o in operands.split(",")],
                                     f"{opcode} {operands.strip()}"))
        elif ADDRESS.match(line):
            raise ValueError(f"not understood: {line.strip()}")
    if name is not None:
        yield name, found


def is_slow_path(region):
    """Whether instructions up to a return are the compiler's slow path of a division or square root."""
    count = collections.Counter(i.opcode for i in region if i.opcode.startswith(("F", "MUFU")))
    questionable = {opcode: n for opcode, n in count.items()
                    if opcode.startswith("MUFU") or ROUNDS_OTHERWISE.search(opcode)
                    or (".FTZ" in opcode and not opcode.startswith("FSETP"))}
    nan = sum(1 for i in region if i.text.startswith("MUFU.RSQ") and i.operands[-1] == "-QNAN")
    scaled = sum(1 for i in region if "2.3283064365386962891e-10" in i.text)
    division = {"MUFU.RCP": 1, "MUFU.RSQ": 1, "FADD.FTZ": 2, "FFMA.RZ": 1, "FFMA.RP": 1, "FFMA.RM": 1}
    root = {"MUFU.RSQ": 1, "FADD.FTZ": 2, "FMUL.FTZ": 3}
    return (questionable == division and nan == 1) or (questionable == root and nan == 0 and scaled == 1)


def slow_path(instructions):
    """Indices of instructions in slow paths."""
    at = {i.address: index for index, i in enumerate(instructions)}
    targets = set()
    for i in instructions:
        if i.opcode.startswith("CALL.REL") and re.fullmatch(r"0x[0-9a-f]+", i.operands[-1]):
            targets.add(at.get(int(i.operands[-1], 16)))
    starts = sorted(targets - {None})
    inside = set()
    for begin, end in zip(starts, starts[1:] + [len(instructions)]):
        if is_slow_path(instructions[begin:end]):
            inside.update(range(begin, end))
    return inside


def around(instructions, index, before=NEAR, after=NEAR):
    return enumerate(instructions[max(0, index - before):index + after + 1], max(0, index - before))


def last_writer(instructions, index, name):
    """The instruction before `index` that last wrote a register, in the order of the listing."""
    for i in reversed(instructions[max(0, index - NEAR):index]):
        if i.operands and register(i.operands[0]) == name:
            return i
    return None


def is_value_of(instructions, index, operand, name):
    """Whether the instruction at `index` reads in `operand` the register `name` or a copy of it."""
    if register(operand) == name:
        return True
    writer = last_writer(instructions, index, register(operand))
    return (writer is not None and COPY.fullmatch(writer.opcode) is not None
            and register(writer.operands[-1]) == name)


def is_refinement(instructions, index, source, result):
    """Whether the instruction is 1 - source * result, which every division has and no approximation."""
    i = instructions[index]
    if i.opcode != "FFMA" or i.operands[-1] != "1" or sum(o.startswith("-") for o in i.operands[1:3]) != 1:
        return False
    a, b = i.operands[1:3]
    return any(register(x) == result and is_value_of(instructions, index, y, source) for x, y in ((a, b), (b, a)))


def reciprocal_of(instructions, index):
    """Indices of what belongs to the division that the MUFU.RCP at `index` begins; None if there is none."""
    result, source = (register(o) for o in instructions[index].operands[:2])
    writer = last_writer(instructions, index, source)
    if writer and writer.opcode.startswith("I2F") and writer.opcode.endswith(".RP"):
        # Integers: the reciprocal's bits, a little less, back to an integer. Of 64 bits it is a quotient's
        # first part; either way what follows are integers.
        for _, i in around(instructions, index, before=0):
            if INTEGER_CORRECTION.search(i.text) and result in map(register, i.operands[1:]):
                return []
        return None
    guarded = any(i.opcode == "FCHK" and is_value_of(instructions, at, i.operands[-1], source)
                  for at, i in around(instructions, index))
    refined = any(is_refinement(instructions, at, source, result)
                  for at, _ in around(instructions, index, before=0))
    return [] if guarded and refined else None


def root_of(instructions, index):
    """Likewise for a MUFU.RSQ and a square root."""
    result, source = (register(o) for o in instructions[index].operands[:2])
    guarded = any(ROOT_GUARD.search(i.text) and source in map(register, i.operands[1:])
                  for _, i in around(instructions, index))
    product = half = None
    for at, i in around(instructions, index, before=0):
        if i.opcode != "FMUL.FTZ":
            continue
        if {register(o) for o in i.operands[1:3]} == {source, result}:
            product = product or at
        elif register(i.operands[1]) == result and i.operands[2] == "0.5":
            half = half or at
    return [product, half] if guarded and product and half else None


def integer_division(instructions, index):
    """Whether the I2F or F2I at `index` is a part of an integer division."""
    i = instructions[index]
    if i.opcode.startswith("I2F"):
        return any(j.opcode == "MUFU.RCP" and register(j.operands[1]) == register(i.operands[0])
                   for _, j in around(instructions, index, before=0))
    writer = last_writer(instructions, index, register(i.operands[1]))
    return writer is not None and INTEGER_CORRECTION.search(writer.text) is not None


def moves_a_half(i):
    """A constant or a conversion to binary32, which are exact."""
    zeros = [register(o).split(".")[0] for o in i.operands]
    if i.opcode in ("HFMA2", "HFMA2.MMA"):
        return len(i.operands) == 5 and zeros[1:3] == ["RZ", "RZ"]
    return i.opcode == "HADD2.F32" and len(i.operands) == 3 and "RZ" in zeros[1:]


def offences(instructions):
    """(instruction, rule) of those that break a rule."""
    inside = slow_path(instructions)
    allowed, found = set(inside), []
    for index, i in enumerate(instructions):
        if index in inside or not i.opcode.startswith("MUFU"):
            continue
        parts = None
        if i.opcode == "MUFU.RCP":
            parts = reciprocal_of(instructions, index)
        elif i.opcode == "MUFU.RSQ":
            parts = root_of(instructions, index)
        if parts is None:
            known = i.opcode.startswith(("MUFU.RCP", "MUFU.RSQ", "MUFU.SQRT"))
            found.append((i, APPROXIMATE if known else ELEMENTARY))
        else:
            allowed.update(parts)
    for index, i in enumerate(instructions):
        base = i.opcode.split(".")[0]
        if ATOMICS.match(i.opcode):
            found.append((i, ATOMIC))
        if base.endswith("MMA"):
            found.append((i, TENSOR))
        elif re.match(r"H[A-Z]+2\b", base) and not moves_a_half(i):
            found.append((i, HALF))
        if index in allowed:
            continue
        integers = base in ("I2F", "F2I") and integer_division(instructions, index)
        if ".FTZ" in i.opcode and not integers:
            found.append((i, FLUSHES))
        if base[0] in "FDI" and ROUNDS_OTHERWISE.search(i.opcode) and not integers:
            found.append((i, ROUNDING))
    return found


def run(command):
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)


def disassemble(cuobjdump, args, path):
    """The listing, or None after saying why there is none."""
    if path.endswith(".sass"):
        return pathlib.Path(path).read_text()
    with tempfile.TemporaryDirectory() as folder:
        if path.endswith(".cu"):
            cubin = str(pathlib.Path(folder) / "out.cubin")
            result = run([args.nvcc or "nvcc", *NVCC_FLAGS, f"-arch={args.arch}", f"-I{args.include}", "-cubin", "-o",
                          cubin, path])
            if result.returncode != 0:
                print(f"check_sass: {path} does not compile:\n{result.stderr}", file=sys.stderr)
                return None
            path = cubin
        result = run([cuobjdump, "-sass", path])
        if result.returncode != 0 or "Function" not in result.stdout:
            print(f"check_sass: no machine code in {path}:\n{result.stderr}", file=sys.stderr)
            return None
        return result.stdout


def find_cuobjdump(args):
    beside = pathlib.Path(args.nvcc).resolve().parent / "cuobjdump" if args.nvcc else None
    if args.cuobjdump:
        return args.cuobjdump
    if beside and beside.exists():
        return str(beside)
    return shutil.which("cuobjdump") or shutil.which("/usr/local/cuda/bin/cuobjdump")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuobjdump")
    parser.add_argument("--nvcc")
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--include", default=".")
    parser.add_argument("--expect-offences", action="store_true")
    parser.add_argument("--most", type=int, default=50, help="offences to print")
    parser.add_argument("files", nargs="+")
    args = parser.parse_args()
    cuobjdump = find_cuobjdump(args)
    if cuobjdump is None and not all(path.endswith(".sass") for path in args.files):
        print("check_sass: there is no cuobjdump (CUDA toolkit): skipped")
        return 77

    found, count, names = [], 0, 0
    for path in args.files:
        sass = disassemble(cuobjdump, args, path)
        if sass is None:
            return 2
        before = count
        try:
            for name, instructions in functions(sass):
                names += 1
                count += len(instructions)
                found += [(path, name, *offence) for offence in offences(instructions)]
        except ValueError as error:
            print(f"check_sass: {path}: {error}", file=sys.stderr)
            return 2
        if count == before:
            print(f"check_sass: no instruction understood in {path}", file=sys.stderr)
            return 2

    if args.expect_offences:
        missing = [rule for rule in RULES if rule not in {rule for _, _, _, rule in found}]
        for rule in missing:
            print(f"check_sass: the planted offender did not trip the rule '{rule}'")
        print(f"check_sass: {len(RULES) - len(missing)} of {len(RULES)} rules bite")
        return 1 if missing else 0
    for path, name, instruction, rule in found[:args.most]:
        print(f"{path}: {name}+{instruction.address:#x}: {rule}: {instruction.text}")
    print(f"check_sass: {count} instructions of {names} functions, {len(found)} offences")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
