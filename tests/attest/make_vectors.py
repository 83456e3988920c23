#!/usr/bin/env python3
"""Golden vectors of attest/RECORD_FORMAT.md and AUDIT_FORMAT.md, by a second, independent implementation.

Usage: make_vectors.py DIR   writes leaf_vectors.txt, trace_vectors.txt and audit_vectors.txt there.
The C++ tests compare against the committed files; this program regenerates them from the text of the
specification alone, with Python's hashlib.
"""

import base64
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


# ---- AUDIT_FORMAT.md


def draws(seed, stream):
    counter = 0
    while True:
        digest = sha256(b"bitwitness/draw/v1\n" + seed + struct.pack("<BQ", stream, counter))
        yield int.from_bytes(digest[:8], "little")
        counter += 1


def below(words, n):
    limit = 2**64 - 2**64 % n
    return next(word for word in words if word < limit) % n


def without_replacement(seed, stream, n, k):
    words = draws(seed, stream)
    a = list(range(n))
    for i in range(k):
        j = i + below(words, n - i)
        a[i], a[j] = a[j], a[i]
    return sorted(a[:k])


def sample(level, layers, cells, ends, L, T, N, seed):
    """layers: "all", a list, or the number to draw. Returns cells as (layer, position), and ends."""
    if layers == "all":
        chosen = list(range(L))
    elif isinstance(layers, list):
        chosen = layers
    else:
        chosen = without_replacement(seed, 1, L, min(layers, L))
    population = len(chosen) * T
    numbers = range(population)
    if level == "cell" and cells < population:
        numbers = without_replacement(seed, 2, population, cells)
    total = min(ends, T + N)
    embeddings = max(total // 2, total - min(total, N))
    return (
        [(chosen[j // T], j % T) for j in numbers],
        without_replacement(seed, 3, T, embeddings),
        [T - N + j for j in without_replacement(seed, 4, N, total - embeddings)],
    )


def path(m, leaves):
    """RFC 6962 2.1.1"""
    if len(leaves) == 1:
        return []
    k = 1
    while 2 * k < len(leaves):
        k *= 2
    if m < k:
        return path(m, leaves[:k]) + [tree(leaves[k:])]
    return path(m - k, leaves[k:]) + [tree(leaves[:k])]


def subproof(m, leaves, complete):
    """RFC 6962 2.1.2"""
    if m == len(leaves):
        return [] if complete else [tree(leaves)]
    k = 1
    while 2 * k < len(leaves):
        k *= 2
    if m <= k:
        return subproof(m, leaves[:k], complete) + [tree(leaves[k:])]
    return subproof(m - k, leaves[k:], False) + [tree(leaves[:k])]


def layer_part(l, positions, T, hidden, kv_width):
    """Payloads are cycle(size, kind + 3 * layer + 7 * position), with a zero exponent byte."""
    def payload(kind, layer, t, size):
        return bytes(0 if i % 4 == 3 else (i + kind + 3 * layer + 7 * t) % 251 for i in range(size))

    def hashes(kind, layer, size):
        return [
            sha256(b"\x00" + leaf(kind, 3, layer, t, payload(kind, layer, t, size))) for t in range(T)
        ]

    m = positions[-1] + 1
    out = b"".join(payload(0x11, l, t, 8 * kv_width) for t in range(m))
    out += b"".join(subproof(m, hashes(0x11, l, 8 * kv_width), True)) if m < T else b""
    for t in positions:
        for layer in (l, l + 1):
            out += payload(0x10, layer, t, 4 * hidden)
            out += b"".join(path(t, hashes(0x10, layer, 4 * hidden)))
    return out


def audit_vectors():
    out = [
        "# (made by tests/attest/make_vectors.py; attest/AUDIT_FORMAT.md)",
        "# seed: secret (32 bytes), checkpoint body (hexadecimal), trace root, secret hash, seed",
    ]
    for i in range(3):
        secret = cycle(32 + i)[i:]
        body = f"log.example/{i}\n{i * 1000 + 1}\n".encode() + base64.b64encode(sha256(b"head %d" % i)) + b"\n"
        root = sha256(bytes([i]))
        out.append(
            f"seed {secret.hex()} {body.hex()} {root.hex()} "
            f"{sha256(b'bitwitness/audit-secret/v1' + bytes([10]) + secret).hex()} "
            f"{sha256(secret + body + root).hex()}"
        )
    out.append("# draw: seed, stream, n, k, the numbers drawn")
    for seed, stream, n, k in [(b"a", 1, 1, 1), (b"b", 2, 10, 3), (b"c", 3, 10, 10), (b"d", 2, 32768, 20),
                               (b"e", 200, 3, 2), (b"f", 2, 1000003, 5)]:
        numbers = without_replacement(sha256(seed), stream, n, k)
        out.append(f"draw {sha256(seed).hex()} {stream} {n} {k} {','.join(map(str, numbers))}")
    out.append("# sample: level, layers, cells, ends, L, T, N, seed, cells, embeddings, heads (- for none)")
    for level, layers, cells, ends, L, T, N in [
        ("cell", "all", 7, 5, 4, 9, 3), ("cell", [0, 2], 5, 0, 4, 9, 3), ("cell", 2, 6, 40, 4, 9, 3),
        ("layer", 1, 0, 2, 3, 4, 4), ("layer", [2], 0, 1, 3, 2, 1), ("cell", "all", 1000, 1, 2, 3, 1),
        ("cell", "all", 20, 16, 32, 575, 64),
    ]:
        seed = sha256(f"{level}{layers}{cells}".encode())
        drawn, embeddings, heads = sample(level, layers, cells, ends, L, T, N, seed)
        flag = layers if layers == "all" else (
            ",".join(map(str, layers)) if isinstance(layers, list) else f"random:{layers}")
        lists = [
            ",".join(f"{l}:{t}" for l, t in drawn),
            ",".join(map(str, embeddings)) or "-",
            ",".join(map(str, heads)) or "-",
        ]
        out.append(f"sample {level} {flag} {cells} {ends} {L} {T} {N} {seed.hex()} {' '.join(lists)}")
    out.append("# part: layer, positions, T, hidden, kv_width, bytes, their SHA-256")
    for l, positions, T, hidden, kv_width in [
        (0, [0], 1, 3, 2), (1, [0], 7, 300, 2), (0, [2, 5], 7, 4, 129), (1, [6], 7, 4, 4),
        (0, [0, 1, 2, 3, 4], 5, 8, 8), (3, [4, 30], 33, 5, 1),
    ]:
        part = layer_part(l, positions, T, hidden, kv_width)
        out.append(
            f"part {l} {','.join(map(str, positions))} {T} {hidden} {kv_width} {len(part)} "
            f"{sha256(part).hex()}"
        )
    return "\n".join(out) + "\n"


def main():
    vectors = [
        ("leaf_vectors", leaf_vectors()),
        ("trace_vectors", trace_vectors()),
        ("audit_vectors", audit_vectors()),
    ]
    for name, text in vectors:
        with open(f"{sys.argv[1]}/{name}.txt", "w", encoding="ascii") as file:
            file.write(text)


if __name__ == "__main__":
    main()
