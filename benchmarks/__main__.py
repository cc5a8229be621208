"""The one driver: `python -m benchmarks ROUTINE …`."""

from __future__ import annotations

import importlib
import sys

ROUTINES = {
    "model": "prefill and decode tok/s of lily and stock, with their ratio, on a whole model",
    "gpu": "an NVIDIA GPU at the 35B shapes: decode, prefill, every kernel, checks, against stock",
    "ablate": "each choice of the kernels against what it replaces, in turn in one process",
    "gpu_gemm": "the GEMMs of prefill alone on an NVIDIA GPU, in several blocks",
    "layers": "time and error of each layer primitive against stock's module and float32",
    "ledger": "dispatches, levels and bytes of a token and of a prefill chunk, counted",
    "quality": "teacher-forced KL, top-1 agreement and perplexity against a float32 run",
    "readme": "write the figures of results/ into README.md and draw its picture",
}


def main() -> None:
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, ROUTINES))
        print("usage: python -m benchmarks ROUTINE [ARGUMENTS]\n")
        for name, what in ROUTINES.items():
            print(f"  {name:{width}}  {what}")
        sys.exit(0 if arguments else 2)
    if arguments[0] not in ROUTINES:
        print(f"No routine {arguments[0]!r}; choose one of {', '.join(ROUTINES)}.", file=sys.stderr)
        sys.exit(2)
    importlib.import_module(f"benchmarks.{arguments[0]}").main(arguments[1:])


if __name__ == "__main__":
    main()
