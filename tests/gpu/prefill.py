"""python -m tests.gpu.prefill [--ptx FILE]: the layer primitives on an NVIDIA GPU.

The bundled model's logits of prompts of several lengths, and each of its layers alone, against the
CPU reference in the same process (and stock's, for scale). Fit for compute-sanitizer. Ends with 1
where a difference is too large, or where a primitive was not served by its kernel.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

import lily_mlx
from lily_mlx import _ext, ptx
from lily_mlx.loading import load

TOLERANCE = 0.03


def on(device: mx.Device, run: Any, *arguments: Any, **options: Any) -> mx.array:
    """What a call gives on a device, as float32 on the CPU."""
    mx.set_default_device(device)
    with mx.stream(mx.default_stream(device)):
        y = run(*arguments, **options).astype(mx.float32)
        mx.eval(y)
    return mx.array(memoryview(y))


def logits(model: Any, ids: list[int], batch: int = 1, cut: int = 0) -> mx.array:
    caches = model.make_cache()
    parts = [ids[:cut], ids[cut:]] if cut else [ids]
    return mx.concatenate([model(mx.array([p] * batch), cache=caches) for p in parts], 1)


def layer(model: Any, index: int, field: str, x: mx.array) -> mx.array:
    return model.layers[index][field](x.astype(mx.bfloat16))


def difference(a: mx.array, b: mx.array) -> float:
    """Norm of a row's difference over its norm, not exceeded by nine rows in ten: of the others two
    experts may be so close that rounding decides between them."""
    with mx.stream(mx.cpu):
        a, b = (y.reshape(-1, y.shape[-1]) for y in (a, b))
        rows = mx.sort(mx.linalg.norm(a - b, axis=-1) / mx.linalg.norm(b, axis=-1))
        worst = rows[int(0.9 * (rows.size - 1))].item()
        return worst if mx.isfinite(a).all().item() else float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.gpu.prefill", description=__doc__)
    parser.add_argument("--ptx", type=Path, metavar="FILE", help="PTX beside the package's")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 5, 12, 40, 100, 700])
    arguments = parser.parse_args()
    if mx.default_device().type != mx.DeviceType.gpu:
        sys.exit("no GPU here: this needs mlx[cuda13] and a card.")
    if arguments.ptx:
        print(ptx.register(_ext.cuda_add_kernel, arguments.ptx), "kernels in", arguments.ptx)
    gpu, cpu = mx.Device(mx.gpu), mx.Device(mx.cpu)
    ours, _ = load(str(lily_mlx.BUNDLED_MODEL))
    stock, _ = load(str(lily_mlx.BUNDLED_MODEL), engine="stock")
    mx.set_default_device(cpu)
    reference, _ = load(str(lily_mlx.BUNDLED_MODEL))
    mx.set_default_device(gpu)
    for name, part in (("layers.0", ours.layers[0]), ("layers.3", ours.layers[3])):
        for field in ("linear_attn", "self_attn", "mlp"):
            if field in part:
                for at, kind, choice in part[field].report(mx.bfloat16):
                    print(f"{name}.{field}.{at} {kind}: {choice.kernel or choice.reason}")
    _ext.reset_run_counts()
    failed = []

    def check(what: str, got: mx.array, want: mx.array, limit: float = TOLERANCE) -> None:
        d = difference(got, want)
        if not d <= limit:
            failed.append(what)
        print(f"{'ok' if d <= limit else 'FAILED':6} {what:32} {d:.2e}", flush=True)

    vocabulary = ours.language_model.args.vocab_size
    hidden = ours.language_model.args.hidden_size
    for length in arguments.lengths:
        ids = [(7919 * i + 13) % vocabulary for i in range(length)]
        x = mx.random.normal((1, length, hidden), key=mx.random.key(length), stream=mx.cpu)
        mx.eval(x)

        for index, field in ((0, "linear_attn"), (0, "mlp"), (3, "self_attn")):
            if length > 1 or field == "mlp":
                check(f"{field}, {length} rows", on(gpu, layer, ours, index, field, x),
                      on(cpu, layer, reference, index, field, x))  # fmt: skip
        if length == 1:
            continue
        want = on(cpu, logits, reference, ids)
        got = on(gpu, logits, ours, ids)
        check(f"logits, {length} tokens", got, want, 0.05)
        again = on(gpu, logits, ours, ids)
        check("  again: the same bits", again, got, 0.0)
        if length <= 100:
            check("  (stock)", on(gpu, logits, stock, ids), want, 1.0)
        check("  in two chunks", on(gpu, logits, ours, ids, cut=length // 2), want, 0.05)
        check("  twice in a batch", on(gpu, logits, ours, ids, batch=2)[1:], want, 0.05)
    for kind, kernel, reason, count in _ext.run_counts():
        print(f"{kind:20} {kernel:12} {count:5} {reason}")
        if reason:
            failed.append(f"{kind}: {reason}")
    print("failed:" if failed else "all passed", *failed)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
