"""Makes the Hugging Face checkpoint from the trained weights and converts it with mlx_lm.convert.

python convert.py --work WORK --weights OUT --bundle FOLDER

Writes WORK/checkpoint (bf16, Qwen3.5-MoE's published layout) and FOLDER (4-bit, group size 64,
router gates 8-bit). Needs no torch.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path

import mlx_lm

LIMIT = 8_000_000  # bytes, the whole folder
CONVERTED = ["config.json", "generation_config.json", "model.safetensors"]
COPIED = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]


def assemble(weights: Path, tokenizer: Path, checkpoint: Path) -> None:
    """Puts the trained shards, the configuration and the tokenizer into one checkpoint folder."""
    for source in [*weights.glob("*.safetensors"), *tokenizer.iterdir()]:
        shutil.copy(source, checkpoint)


def convert(checkpoint: Path, bundle: Path) -> int:
    """Replaces the bundle's files by the converted checkpoint's; returns their size in bytes.

    Raises ValueError when the folder would be larger than LIMIT.
    """
    with tempfile.TemporaryDirectory(dir=checkpoint.parent) as temporary:
        target = Path(temporary) / "mlx"
        mlx_lm.convert(str(checkpoint), str(target), quantize=True, q_bits=4, q_group_size=64)
        sources = [target / name for name in CONVERTED] + [checkpoint / name for name in COPIED]
        size = sum(source.stat().st_size for source in sources)
        if size > LIMIT:
            raise ValueError(f"The bundle takes {size} bytes, more than {LIMIT}: shrink the model.")
        bundle.mkdir(parents=True, exist_ok=True)
        for source in sources:
            shutil.copy(source, bundle / f"{source.name}.tmp")
            os.replace(bundle / f"{source.name}.tmp", bundle / source.name)
    return size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True, help="train.py's --out")
    parser.add_argument("--bundle", type=Path, required=True)
    args = parser.parse_args()
    checkpoint = args.work / "checkpoint"
    if not (checkpoint / "config.json").exists():
        raise SystemExit(f"{checkpoint / 'config.json'} is missing: run model.py first.")
    assemble(args.weights, args.work / "tokenizer", checkpoint)
    size = convert(checkpoint, args.bundle)
    print(f"{args.bundle}: {size:,d} bytes")


if __name__ == "__main__":
    main()
