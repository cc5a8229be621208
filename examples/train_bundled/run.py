"""Makes the bundled model from nothing: corpus, tokenizer, training, conversion.

    python run.py --work WORK [--bundle FOLDER] [--from STAGE] [--to STAGE] [train.py's options]

Options that this script does not know go to train.py (--seconds 250, --device cpu, ...).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
STAGES = ["corpus", "tokenizer", "tokens", "model", "train", "convert"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for everything made")
    parser.add_argument("--bundle", type=Path, help="the converted model (default WORK/bundle)")
    parser.add_argument("--from", dest="first", choices=STAGES, default=STAGES[0])
    parser.add_argument("--to", dest="last", choices=STAGES, default=STAGES[-1])
    args, training = parser.parse_known_args()
    args.work.mkdir(parents=True, exist_ok=True)
    weights = args.work / "weights"
    options = {
        "train": ["--out", str(weights), *training],
        "convert": [
            "--weights",
            str(weights),
            "--bundle",
            str(args.bundle or args.work / "bundle"),
        ],
    }
    for stage in STAGES[STAGES.index(args.first) : STAGES.index(args.last) + 1]:
        print(f"== {stage}", flush=True)
        command = [sys.executable, str(HERE / f"{stage}.py"), "--work", str(args.work)]
        if subprocess.run(command + options.get(stage, [])).returncode:
            raise SystemExit(f"The stage {stage} failed: see above; go on with --from {stage}.")


if __name__ == "__main__":
    main()
