#!/usr/bin/env python3
"""The figures of `bw-prover bench` beside those of PyTorch on the same GPU, in one run.

    tests/bench/peers.py BW_PROVER [--bench FILE] [--json FILE] [--repeat N] [--no-model]

BW_PROVER is the program; --bench takes what its `bench --format json` has just printed instead of running it. Peers, at the shapes of Llama-3-8B:
  - cuBLAS bf16 and cuBLAS fp32 (TF32 off): torch.matmul on weights of that type;
  - LayerCast: bf16 weights, each upcast to fp32 just before its fp32 product.
Products: the four of one layer, weights rotating through more memory than the cache holds. Whole model (unless
--no-model): a plain PyTorch Llama loop of 32 layers with a static cache, LayerCast and bf16, decode steps in a
CUDA graph; it ends with the logits, without sampler and commitment, which Bitwitness's times include.

Without PyTorch or a GPU it says "skipped" and why, and exits with 0. 2: wrong usage, 3: bw-prover failed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4096, 14336, 32, 32, 8, 128, 128256
KV = KV_HEADS * HEAD_DIM
PRODUCTS = {"qkv": (HIDDEN + 2 * KV, HIDDEN), "o": (HIDDEN, HIDDEN),
            "gate_up": (2 * INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}
ROWS = [1, 8, 16, 32, 64, 256, 2048]
STEPS = [("decode", 1, 128), ("decode", 32, 128), ("prefill", 2048, 2048)]
ROTATION_BYTES = 512 << 20


def skip(reason):
    print(f"peers: skipped: {reason}")
    sys.exit(0)


def median_us(torch, work, repeat, calls=1):
    """Median microseconds of one of `calls` calls that work() makes, by the GPU's clock."""
    work()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeat):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def captured(torch, work):
    """A function that replays work() as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def time_products(torch, repeat):
    """{name of the peer: {M: {product: us}}}"""
    out = {peer: {M: {} for M in ROWS} for peer in ("cublas_bf16", "cublas_fp32", "layercast")}
    for name, (N, K) in PRODUCTS.items():
        for peer, x_type, w_type in (("cublas_bf16", torch.bfloat16, torch.bfloat16),
                                     ("cublas_fp32", torch.float32, torch.float32),
                                     ("layercast", torch.float32, torch.bfloat16)):
            size = 4 if w_type == torch.float32 else 2
            copies = max(2, -(-ROTATION_BYTES // (N * K * size)))
            weights = [torch.randn(N, K, device="cuda", dtype=w_type) * 2**-6 for _ in range(copies)]
            for M in ROWS:
                x = torch.randn(M, K, device="cuda", dtype=x_type)

                def work():
                    for W in weights:
                        torch.matmul(x, (W.float() if peer == "layercast" else W).t())

                replay = captured(torch, work)
                out[peer][M][name] = median_us(torch, replay, repeat, copies)
            del weights
            torch.cuda.empty_cache()
    return out


class Llama:
    """Decoder layers and head in plain PyTorch. `cast` makes a stored weight usable."""

    def __init__(self, torch, dtype, cast):
        self.torch, self.dtype, self.cast = torch, dtype, cast

        def weight(rows, columns):
            return (torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 2**-6)

        self.embedding, self.head = weight(VOCAB, HIDDEN), weight(VOCAB, HIDDEN)
        self.layers = [{name: weight(N, K) for name, (N, K) in PRODUCTS.items()} for _ in range(LAYERS)]
        self.norm = torch.ones(HIDDEN, device="cuda", dtype=dtype)

    def product(self, x, W):
        return self.torch.matmul(x, self.cast(W).t())

    def rms_norm(self, x):
        return self.torch.nn.functional.rms_norm(x, (HIDDEN,), self.norm, 1e-5)

    def rope(self, x, cosines, sines):
        first, second = x.chunk(2, dim=-1)
        return self.torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)

    def step(self, tokens, position, cache, mask):
        """tokens[B, T] at `position`[T]; cache: keys and values [B, KV_HEADS, positions, HEAD_DIM] of each layer."""
        torch = self.torch
        functional = torch.nn.functional
        B, T = tokens.shape
        frequencies = 500000.0 ** (-torch.arange(0, HEAD_DIM, 2, device="cuda", dtype=torch.float32) / HEAD_DIM)
        angles = position.float()[:, None] * frequencies
        cosines, sines = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        x = functional.embedding(tokens, self.embedding).to(self.dtype)
        for layer, (keys, values) in zip(self.layers, cache):
            qkv = self.product(self.rms_norm(x), layer["qkv"])
            q, k, v = (part.view(B, T, -1, HEAD_DIM).transpose(1, 2) for part in qkv.split((HIDDEN, KV, KV), -1))
            q, k = self.rope(q, cosines, sines), self.rope(k, cosines, sines)
            keys.index_copy_(2, position, k)
            values.index_copy_(2, position, v)
            attended = functional.scaled_dot_product_attention(
                q, keys.repeat_interleave(HEADS // KV_HEADS, 1), values.repeat_interleave(HEADS // KV_HEADS, 1),
                attn_mask=mask, is_causal=mask is None)
            x = x + self.product(attended.transpose(1, 2).reshape(B, T, HIDDEN), layer["o"])
            gate, up = self.product(self.rms_norm(x), layer["gate_up"]).chunk(2, -1)
            x = x + self.product(functional.silu(gate) * up, layer["down"])
        return self.product(self.rms_norm(x[:, -1]), self.head)


def time_steps(torch, dtype, cast, repeat):
    """{(what, rows, context): us}"""
    model = Llama(torch, dtype, cast)
    out = {}
    for what, rows, context in STEPS:
        B, T = (rows, 1) if what == "decode" else (1, rows)
        positions = context + 1 if what == "decode" else context
        cache = [tuple(torch.randn(B, KV_HEADS, positions, HEAD_DIM, device="cuda", dtype=dtype) for _ in range(2))
                 for _ in range(LAYERS)]
        tokens = torch.randint(0, VOCAB, (B, T), device="cuda")
        position = torch.arange(positions - T, positions, device="cuda")
        # A decode step sees the whole cache; a prefill is causal.
        mask = torch.ones(T, positions, device="cuda", dtype=torch.bool) if what == "decode" else None

        def work():
            model.step(tokens, position, cache, mask)

        with torch.inference_mode():
            replay = captured(torch, work) if what == "decode" else work
            out[what, rows, context] = median_us(torch, replay, repeat if what == "decode" else max(3, repeat // 4))
        del cache, replay
        torch.cuda.empty_cache()
    return out


def run_bitwitness(program):
    command = [program, "bench", "--device", "cuda", "--shape", "llama3-8b", "--only", "products,steps",
               "--format", "json"]
    try:
        result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except OSError as error:
        print(f"peers: {program}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    if result.returncode != 0:
        print(f"peers: {' '.join(command)} ended with {result.returncode}:\n{result.stderr}", file=sys.stderr)
        sys.exit(3)
    return json.loads(result.stdout)


def cell(value, unit=1.0):
    return "–" if value is None else f"{value / unit:.1f}" if value / unit >= 10 else f"{value / unit:.2f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bw_prover")
    parser.add_argument("--bench", metavar="FILE")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--no-model", action="store_true", help="products alone")
    args = parser.parse_args()
    if args.repeat < 1:
        parser.error("--repeat must be at least 1")
    try:
        import torch
    except ImportError:
        skip("PyTorch is not installed")
    if not torch.cuda.is_available():
        skip("PyTorch sees no CUDA device")
    if not os.access(args.bw_prover, os.X_OK):
        parser.error(f"{args.bw_prover} is no program")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")

    if args.bench:
        with open(args.bench, encoding="utf-8") as file:
            ours = json.load(file)
    else:
        ours = run_bitwitness(args.bw_prover)
    figures = {(row["what"], row["rows"], row["context"]): row for row in ours["rows"]}
    peers = time_products(torch, args.repeat)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, CUDA {torch.version.cuda}; "
          f"copy {ours['ceilings']['bytes_per_second'] / 1e12:.2f} TB/s, multiply-adds "
          f"{ours['ceilings']['operations_per_second'] / 1e12:.1f} Tflop/s")
    print("\none layer's four products, us\n\n| M | Bitwitness | cuBLAS bf16 | cuBLAS fp32 | LayerCast |\n"
          "|---|---|---|---|---|")
    products = []
    for M in ROWS:
        rows = [figures.get((name, M, 0)) for name in PRODUCTS]
        row = {"rows": M, "bitwitness_us": None if None in rows else sum(r["us"] for r in rows)}
        for peer, times in peers.items():
            row[f"{peer}_us"] = sum(times[M].values())
        products.append(row)
        print("| " + " | ".join([str(M), *(cell(row[f"{name}_us"]) for name in ("bitwitness", *peers))]) + " |")

    steps = []
    if not args.no_model:
        layercast = time_steps(torch, torch.float32, lambda W: W.float(), args.repeat)
        torch.cuda.empty_cache()
        plain = time_steps(torch, torch.bfloat16, lambda W: W, args.repeat)
        print("\nwhole model, ms\n\n| step | Bitwitness, committed | PyTorch loop, bf16 | LayerCast |\n|---|---|---|---|")
        for step in STEPS:
            row = {"what": step[0], "rows": step[1], "context": step[2],
                   "bitwitness_us": figures[step]["us"] if step in figures else None,
                   "pytorch_bf16_us": plain[step], "layercast_us": layercast[step]}
            steps.append(row)
            name = f"{step[0]} {step[1]}" + (f" at context {step[2]}" if step[0] == "decode" else " tokens")
            print("| " + " | ".join([name, *(cell(row[key], 1e3) for key in
                                              ("bitwitness_us", "pytorch_bf16_us", "layercast_us"))]) + " |")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
                       "bitwitness": ours, "products": products, "steps": steps}, file, indent=2)
            file.write("\n")


if __name__ == "__main__":
    main()
