"""Encodes the documents: WORK/train.bin and WORK/heldout.bin, uint16 token ids end to end.

python tokens.py --work WORK
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer


def encode(documents: list[str], tokenizer: Tokenizer) -> np.ndarray:
    """All documents' ids in one uint16 array."""
    encoded = tokenizer.encode_batch_fast(documents, add_special_tokens=False)
    return np.concatenate([np.asarray(item.ids, dtype=np.uint16) for item in encoded])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.work / "tokenizer" / "tokenizer.json"))
    for name in ("train", "heldout"):
        with open(args.work / f"{name}.jsonl", encoding="utf-8") as handle:
            documents = [json.loads(line) for line in handle]
        random.Random(1).shuffle(documents)
        ids = encode(documents, tokenizer)
        ids.tofile(args.work / f"{name}.bin")
        print(f"{name}: {len(ids):,d} tokens, {sum(map(len, documents)) / len(ids):.2f} a token")


if __name__ == "__main__":
    main()
