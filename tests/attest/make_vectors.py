#!/usr/bin/env python3
"""Golden vectors of attest/RECORD_FORMAT.md, by a second, independent implementation.

Usage: make_vectors.py DIR   writes leaf_vectors.txt and trace_vectors.txt there.
The C++ tests compare against the committed files; this program regenerates them from the text of the
specification alone, with Python's hashlib.
"""

import hashlib
import struct
import sys


def sha256(data):
    return hashlib.sha256(data).digest()


def tree(leaves):
    """RFC 6962 shape over digests that stand as leaves."""
    if not leaves:
        return sha256(b"")
    if len(leaves) == 1:
        return leaves[0]
    k = 1
    while 2 * k < len(leaves):
        k *= 2
    return sha256(b"\x01" + tree(leaves[:k]) + tree(leaves[k:]))


def wrapped(entries):
    return tree([sha256(b"\x00" + entry) for entry in entries])


def leaf(kind, dtype, layer, position, payload):
    chunks = [payload[i : i + 1024] for i in range(0, len(payload), 1024)] or [b""]
    return tree(
        [
            sha256(
                struct.pack("<BBBBIQIIII", kind, 1, dtype, 0, layer, position, i, len(chunks), len(c), 0)
                + c
            )
            for i, c in enumerate(chunks)
        ]
    )


def cycle(size):
    return bytes(i % 251 for i in range(size))


def string(text):
    raw = text.encode()
    return struct.pack("<I", len(raw)) + raw


def leaf_vectors():
    out = [
        "# type dtype layer position payload_bytes leaf_digest; payload byte i is i mod 251",
        "# (made by tests/attest/make_vectors.py; attest/RECORD_FORMAT.md, Leaves)",
    ]
    places = [(0x10, 3, 3, 70000), (0x11, 1, 0, 0), (0x12, 3, 0, 2**40 + 5), (0x13, 0, 0, 0)]
    sizes = [0, 1, 3, 4, 5, 22, 23, 24, 31, 32, 33, 55, 56, 57, 63, 64, 65, 1022, 1023, 1024, 1025]
    sizes += [2047, 2048, 2049, 3072, 4095, 4096, 4097, 5000, 7168, 16384, 57345]
    for kind, dtype, layer, position in places:
        for size in sizes:
            digest = leaf(kind, dtype, layer, position, cycle(size))
            out.append(f"{kind} {dtype} {layer} {position} {size} {digest.hex()}")
    return "\n".join(out) + "\n"


def trace_root(layers, prompt, emitted, hidden, kv_width, vocab):
    """Every payload of the vector is cycle(size) with the leaf's type, layer and position added."""
    positions = prompt + emitted - 1

    def payload(kind, layer, position, size):
        return bytes((i + kind + 3 * layer + 7 * position) % 251 for i in range(size))

    def column(kind, layer, first, last, size):
        return wrapped(
            [leaf(kind, 3, layer, t, payload(kind, layer, t, size)) for t in range(first, last)]
        )

    header = string("bitwitness/trace") + struct.pack(
        "<HIQQIIIBB", 1, layers, positions, emitted, hidden, kv_width, vocab, 3, 3
    )
    roots = [column(0x10, l, 0, positions, 4 * hidden) for l in range(layers + 1)]
    roots += [column(0x11, l, 0, positions, 8 * kv_width) for l in range(layers)]
    roots.append(column(0x12, 0, positions - emitted, positions, 4 * vocab))
    ids = b"".join(struct.pack("<I", i) for i in range(positions + 1))
    roots.append(wrapped([leaf(0x13, 0, 0, 0, ids)]))
    return wrapped([header] + roots)


def trace_vectors():
    out = [
        "# layers prompt emitted hidden kv_width vocab trace_root; byte i of a payload is",
        "# (i + type + 3*layer + 7*position) mod 251, token ids count from 0, all types fp32",
        "# (made by tests/attest/make_vectors.py; attest/RECORD_FORMAT.md, Trace)",
    ]
    for shape in [(1, 1, 1, 1, 1, 2), (2, 3, 4, 64, 16, 300), (3, 9, 8, 300, 129, 1000)]:
        out.append(" ".join(map(str, shape)) + " " + trace_root(*shape).hex())
    return "\n".join(out) + "\n"


def main():
    for name, text in [("leaf_vectors", leaf_vectors()), ("trace_vectors", trace_vectors())]:
        with open(f"{sys.argv[1]}/{name}.txt", "w", encoding="ascii") as file:
            file.write(text)


if __name__ == "__main__":
    main()
