#!/usr/bin/env python3
"""Checks the layout and the include directions of the tree.

    scripts/check_includes.py [ROOT]       checks a tree (default: this one); exit 1 on any violation
    scripts/check_includes.py --self-test  plants one violation of each kind and expects it to be found

Directions: kernels -> attest/base; attest -> itself (attest/base -> attest/base alone); proto -> nothing;
prover and verifier -> kernels, attest, proto, never each other; tests -> everything, but what
tests/oracle computes with -> only the standard library. Protobuf and gRPC stop at the service boundary.
kernels/ calls no math library, no approximation and no atomic addition (kernels/ARITHMETIC.md, "Rules").
"""

import pathlib
import re
import sys
import tempfile

TOP_FOLDERS = {"prover", "verifier", "kernels", "proto", "attest", "tests", "scripts"}
TOP_FILES = {"CMakeLists.txt", "CMakePresets.json", "README.md", "CHANGELOG.md", "LICENSE"}
UNTRACKED = re.compile(r"(build.*|out|compile_commands\.json|CMakeUserPresets\.json)")
SUFFIXES = {".h", ".cc", ".cu", ".cuh", ".inc"}

# folder -> the prefixes that it may include; the longest folder that fits a file counts.
ALLOWED = {
    "attest/base": ("attest/base/",),
    "attest": ("attest/",),
    "kernels": ("kernels/", "attest/base/"),
    "proto": ("proto/",),
    "prover": ("prover/", "kernels/", "attest/", "proto/"),
    "verifier": ("verifier/", "kernels/", "attest/", "proto/"),
    "tests": ("tests/", "prover/", "verifier/", "kernels/", "attest/", "proto/"),
}
# Files that may see protobuf and gRPC types: the two ends of the live exchange.
BOUNDARY = re.compile(r"(proto/.*|tests/.*|prover/serve\.cc|prover/service\.(?:cc|h)"
                      r"|verifier/(?:client|grpc_audit_channel)\.cc|verifier/connection\.(?:cc|h))")
PROTO_INCLUDE = re.compile(r"(google/protobuf/.*|grpc(pp)?/.*|.*\.pb\.h)")
PROTO_NAME = re.compile(r"\b(google::protobuf|grpc)::")

INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]*)"|<([^>]*)>|(\S.*))')
FORBIDDEN_CALL = re.compile(
    r"\b((?:__)?(?:exp|exp2|log|log2|sin|cos|tan|tanh|pow|rsqrt)f|__fdividef|__frcp_r[dnuz]|atomicAdd"
    r"|std::(?:exp|exp2|log|log2|sin|cos|tan|tanh|pow|expm1|log1p|erf|cbrt))\s*\(")
FORBIDDEN_PTX = re.compile(r"\.(approx|ftz)\b")
COMMENT_OR_STRING = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.DOTALL)


def without_comments(text, keep_strings):
    """`text` with comments (and strings, unless kept) blanked, line numbers unchanged."""

    def blank(match):
        piece = match.group()
        if piece[0] in "\"'" and keep_strings:
            return piece
        return re.sub(r"[^\n]", " ", piece)

    return COMMENT_OR_STRING.sub(blank, text)


def rule_for(path):
    parts = path.split("/")
    for end in range(len(parts) - 1, 0, -1):
        folder = "/".join(parts[:end])
        if folder in ALLOWED:
            return folder, ALLOWED[folder]
    return None, ()


def check_include(root, path, quoted, angled):
    """The complaint about one include of the file `path`, or None."""
    name = quoted if quoted is not None else angled
    if PROTO_INCLUDE.fullmatch(name) and not BOUNDARY.fullmatch(path):
        return f"includes {name}: protobuf and gRPC stop at prover/serve.cc and verifier/client.cc"
    is_ours = name.split("/")[0] in TOP_FOLDERS and "/" in name
    if angled is not None and is_ours:
        return f"includes <{name}>: our headers are included with quotes"
    if quoted is not None and not is_ours:
        return f'includes "{name}": paths start at the root, and other libraries take angle brackets'
    if path.startswith("tests/oracle/") and not path.endswith("_test.cc"):
        if is_ours and not name.startswith("tests/oracle/"):
            return f"includes {name}: the oracle may use nothing of ours"
        if not is_ours and not re.fullmatch(r"[a-z0-9_]+", name):
            return f"includes {name}: the oracle uses the standard library only"
    if not is_ours:
        return None
    folder, allowed = rule_for(path)
    if not name.startswith(allowed):
        return f"includes {name}: {folder}/ may include only {', '.join(allowed)}"
    if not name.endswith(".pb.h") and not (root / name).is_file():
        return f"includes {name}, which does not exist"
    return None


def check_file(root, path):
    """Violations of one source file as (line, text)."""
    found = []
    try:
        text = (root / path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return [(1, "is not UTF-8")]
    for number, line in enumerate(without_comments(text, keep_strings=True).split("\n"), 1):
        include = INCLUDE.match(line)
        if include and include.group(3):
            found.append((number, f"includes {include.group(3)}: computed includes are not allowed"))
        elif include:
            complaint = check_include(root, path, include.group(1), include.group(2))
            if complaint:
                found.append((number, complaint))
        elif path.startswith("kernels/") and FORBIDDEN_PTX.search(line):
            found.append((number, "uses .approx or .ftz"))
    for number, line in enumerate(without_comments(text, keep_strings=False).split("\n"), 1):
        if PROTO_NAME.search(line) and not BOUNDARY.fullmatch(path):
            found.append((number, "uses protobuf or gRPC types outside the service boundary"))
        call = path.startswith("kernels/") and FORBIDDEN_CALL.search(line)
        if call:
            found.append((number, f"calls {call.group(1)}: not defined bit by bit"))
    return found


def check_tree(root):
    """All violations as printable lines, and how many files were looked at."""
    found = []
    for entry in sorted(root.iterdir()):
        name = entry.name
        if name.startswith(".") or UNTRACKED.fullmatch(name):
            continue
        if entry.is_dir() and name not in TOP_FOLDERS:
            found.append(f"{name}/: a top-level folder outside the layout")
        if not entry.is_dir() and name not in TOP_FILES:
            found.append(f"{name}: a top-level file outside the layout")
    count = 0
    for folder in sorted(TOP_FOLDERS):
        for file in sorted((root / folder).rglob("*")):
            if file.suffix not in SUFFIXES or not file.is_file():
                continue
            count += 1
            path = file.relative_to(root).as_posix()
            found += [f"{path}:{line}: {text}" for line, text in check_file(root, path)]
    return found, count


PLANTED = {  # file -> (content, a piece of the expected complaint)
    "kernels/a.cc": ('#include "attest/record.h"\n', "kernels/ may include only"),
    "kernels/b.cc": ("float f(float x) { return expf(x); }\n", "calls expf"),
    "kernels/c.cc": ("double f(double x) { return std::tanh(x); }\n", "calls std::tanh"),
    "kernels/d.cu": ('asm("ex2.approx.ftz.f32 %0, %1;");\n', ".approx or .ftz"),
    "kernels/e.cu": ("__device__ void f(float* p) { atomicAdd (p, 1.0f); }\n", "calls atomicAdd"),
    "attest/a.cc": ('#include "kernels/contract.h"\n', "attest/ may include only"),
    "attest/base/a.h": ('#include "attest/record.h"\n', "attest/base/ may include only"),
    "proto/a.cc": ('#include "attest/record.h"\n', "proto/ may include only"),
    "prover/a.cc": ('#include "verifier/audit.h"\n', "prover/ may include only"),
    "prover/b.cc": ("#include <attest/record.h>\n", "with quotes"),
    "prover/c.cc": ("#  include <google/protobuf/message.h>\n", "stop at prover/serve.cc"),
    "prover/d.cc": ("using grpc::Status;\n", "outside the service boundary"),
    "prover/e.cc": ("#include HEADER\n", "computed includes"),
    "verifier/a.cc": ('#include "prover/generate.h"\n', "verifier/ may include only"),
    "verifier/b.cc": ('#include "../attest/record.h"\n', "paths start at the root"),
    "verifier/c.cc": ('#include "proto/audit.pb.h"\n', "stop at prover/serve.cc"),
    "verifier/d.cc": ('#include "attest/missing.h"\n', "does not exist"),
    "tests/oracle/a.cc": ('#include "kernels/contract.h"\n', "nothing of ours"),
    "tests/oracle/b.h": ("#include <immintrin.h>\n", "standard library only"),
    "docs/a.md": ("", "a top-level folder outside the layout"),
    "Makefile": ("", "a top-level file outside the layout"),
}
CLEAN = {
    "attest/record.h": '#include <vector>\n#include "attest/base/error.h"\n',
    "attest/base/error.h": "#include <string>\n",
    "kernels/contract.h": '// never expf(x) or .approx\n#include "attest/base/error.h"\n',
    "prover/generate.h": '#include "kernels/contract.h"\n#include "attest/record.h"\n',
    "prover/serve.cc": '#include <grpcpp/grpcpp.h>\n#include "proto/audit.pb.h"\nusing grpc::Status;\n',
    "verifier/audit.h": '#include <openssl/evp.h>\n// #include "prover/generate.h"\n',
    "tests/oracle/oracle.h": "#include <cstdint>\n",
    "tests/oracle/oracle_test.cc": '#include <gtest/gtest.h>\n#include "kernels/contract.h"\n',
    "build/x/docs/a.cc": '#include "nothing.h"\n',
    "README.md": "",
}


def write_files(root, files):
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content, encoding="utf-8")


def self_test():
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        write_files(root, CLEAN)
        found, _ = check_tree(root)
        if found:
            print("self-test: a clean tree is refused:", *found, sep="\n  ")
            return 1
        write_files(root, {path: content for path, (content, _) in PLANTED.items()})
        found, _ = check_tree(root)
    missed = []
    for path, (_, piece) in PLANTED.items():
        place = path if "/" in path and not path.startswith("docs/") else path.split("/")[0]
        if not any(line.startswith(place) and piece in line for line in found):
            missed.append(f"{path}: expected '{piece}'")
    if missed or len(found) != len(PLANTED):
        print("self-test: missed:", *missed, "found:", *found, sep="\n  ")
        return 1
    print(f"self-test: {len(PLANTED)} planted violations found, nothing else")
    return 0


def main(arguments):
    if arguments == ["--self-test"]:
        return self_test()
    if len(arguments) > 1 or (arguments and arguments[0].startswith("-")):
        print(__doc__, file=sys.stderr)
        return 2
    root = pathlib.Path(arguments[0]) if arguments else pathlib.Path(__file__).resolve().parent.parent
    found, count = check_tree(root)
    for line in found:
        print(line)
    if count == 0:
        print(f"{root}: no source files found")
        return 1
    print(f"{count} files, {len(found)} violations")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
