"""NVIDIA's compute-sanitizer over our kernels: the bundled model, briefly, under each tool.

python -m tests.gpu.sanitize [TOOL ...]   memcheck, racecheck, initcheck; a line a tool and part
python -m tests.gpu.sanitize steps        a part of what runs under them, by itself: steps, chunk

compute-sanitizer comes with CUDA, or with the package nvidia-cuda-sanitizer-api; --sanitizer names
it where it is not found. Only kernels of the package's PTX are checked, by their exact names, since
what MLX's own kernels do is not ours; under initcheck all are, since only then their writes count.
Before memcheck a read past a buffer is planted, to show that the tool sees our kernels. Before the
chunk, a product of zeros by MLX alone shows whether the tool can follow MLX's matrix products. With
CUDA 13.0 racecheck ends them in an illegal memory access, and initcheck takes their results for
uninitialised; attention in the chunk is then made of sums.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("memcheck", "racecheck", "initcheck")
PARTS = ("steps", "chunk")
FOUND = 9  # the exit status when a tool finds something
PLANTED = "argmax_final"  # reads a value a thread
CAPACITY = 1024  # rows of keys and values at which a step is cut into splits another way


def entries() -> list[str]:
    """The names of our kernels as the GPU knows them."""
    from lily_mlx import ptx_archive

    pipelines = ptx_archive.read(ptx_archive.PACKAGED).pipelines
    return sorted({entry for _, entry in pipelines.values()})


def attention_of_sums(q, keys, values, *, cache, scale, mask):
    """mlx-lm's scaled_dot_product_attention of a whole prompt, causal, without matrix products."""
    import mlx.core as mx

    keys, values = (mx.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (keys, values))
    scores = (q[:, :, :, None].astype(mx.float32) * keys[:, :, None]).sum(-1) * scale
    rows = mx.arange(scores.shape[-1])
    scores = mx.where(rows[:, None] >= rows, scores, -mx.inf)
    weights = mx.softmax(scores, axis=-1)
    return (weights[..., None] * values[:, :, None]).sum(-2).astype(q.dtype)


def workload(part: str) -> None:
    """steps: a prompt token by token, and caches that grow past a switch; chunk: a prompt at once,
    then steps; chunk-of-sums: the same without MLX's matrix products; product: one of those."""
    import mlx.core as mx

    import lily_mlx
    from benchmarks import gpu
    from lily_mlx import decode

    if part == "product":
        x = mx.zeros((64, 64), mx.bfloat16)
        mx.eval((x @ x) + 1)
        return
    if part == "chunk-of-sums":
        lily_mlx.layers.attention.scaled_dot_product_attention = attention_of_sums
    model, _ = lily_mlx.load(str(lily_mlx.BUNDLED_MODEL))
    vocabulary = model.language_model.args.vocab_size
    prompt = [(37 * i + 5) % vocabulary for i in range(40)]

    def steps(caches: list, token: mx.array, count: int) -> list[int]:
        out = []
        for _ in range(count):
            token, logits = decode.step(model.language_model, token, caches)
            mx.eval(token, logits)
            out.append(token.item())
        return out

    choice = model.language_model.decode_plan().choice
    if not choice:
        sys.exit(f"the decode step does not run here: {choice.reason}")
    caches = model.make_cache()
    if part == "steps":
        for i in prompt:
            last = steps(caches, mx.array([[i]]), 1)
        print("token by token:", last + steps(caches, mx.array([last]), 8))
        # The step that outgrows its keys and values cuts them another way.
        grown = gpu.caches_at(model, CAPACITY - 4, CAPACITY)
        print("grown caches:  ", steps(grown, mx.array([[7]]), 8))
        return
    logits = model(mx.array([prompt]), cache=caches)
    mx.eval(logits, [c.state for c in caches])
    first = mx.argmax(logits[:, -1:], axis=-1)
    print("as a chunk:    ", [first.item(), *steps(caches, first, 8)])


def plant() -> None:
    """One of our kernels on a buffer that is too short."""
    import numpy as np

    from lily_mlx import kernels, ptx_archive
    from metal.host import cuda

    manifest = json.loads((kernels.folder() / "manifest.json").read_text())
    arguments = next(k["arguments"] for k in manifest if k["kernel"] == PLANTED)
    archive = ptx_archive.read(ptx_archive.PACKAGED)
    name = next(text for text, entry in archive.pipelines.values() if entry == PLANTED)
    given = [bytes(a["size"]) if a["space"] == "constant" and "size" in a else np.zeros(4, np.uint8)
             for a in sorted(arguments, key=lambda a: a["index"])]  # fmt: skip
    program = cuda.Program(archive.texts[name].encode())
    program.launch(PLANTED, given, (1, 1, 1), (512, 1, 1))


def command(sanitizer: str, tool: str, words: list[str], names: list[str]) -> list[str]:
    """The command line of one tool over this file with `words`."""
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "100",
               "--show-backtrace", "no"]  # fmt: skip
    if tool == "initcheck":
        # All kernels: writes that it does not follow do not count. MLX copies whole buffers of
        # which it has filled a part.
        options += ["--check-api-memory-access", "no"]
    else:
        options += [word for name in names for word in ("--kernel-name", f"kne={name}")]
    if tool == "memcheck":
        # MLX asks the driver for what it may lack; a failed call of ours raises anyway.
        options += ["--report-api-errors", "no"]
    return [sanitizer, *options, sys.executable, "-m", "tests.gpu.sanitize", *words]


def summary(output: str) -> str:
    """The tool's own last word, or its first errors' lines."""
    found = re.findall(r"={9} ((?:ERROR|RACECHECK) SUMMARY: .*)", output)
    return found[-1] if found else "no summary"


def run(sanitizer: str, tool: str, words: list[str], names: list[str], seconds: float,
        folder: Path | None) -> tuple[int | None, str]:  # fmt: skip
    """(exit status or None when it took too long, what it printed)."""
    try:
        done = subprocess.run(command(sanitizer, tool, words, names), cwd=ROOT, timeout=seconds,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
        status, raw = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        status, raw = None, late.stdout or b""
    output = raw.decode(errors="replace")
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{tool}-{words[0]}.txt").write_text(output)
    return status, output


def check(sanitizer: str, tool: str, names: list[str], seconds: float, folder: Path | None) -> bool:
    """Run one tool over each part and print its lines; whether all are clean."""
    if tool == "memcheck":
        status, output = run(sanitizer, tool, ["plant"], names, seconds, folder)
        if status != FOUND:
            print(f"FAILED memcheck   did not see a planted fault: status {status}, "
                  f"{summary(output)}\n{output[-2000:]}", flush=True)  # fmt: skip
            return False
    clean = True
    for part in PARTS:
        if part == "chunk" and run(sanitizer, tool, ["product"], names, seconds, folder)[0] != 0:
            print(f"       {tool:10} MLX's own product of zeros fails under this tool: attention "
                  "of sums", flush=True)  # fmt: skip
            part = "chunk-of-sums"
        begin = time.monotonic()
        status, output = run(sanitizer, tool, [part], names, seconds, folder)
        took = f"{time.monotonic() - begin:.0f} s"
        if status == 0:
            print(f"ok     {tool:10} {part:13} {summary(output)}, {took}", flush=True)
            continue
        clean = False
        why = f"not done in {seconds:.0f} s" if status is None else f"status {status}"
        print(f"FAILED {tool:10} {part:13} {summary(output)}, {why}, {took}\n{output[:4000]}",
              flush=True)  # fmt: skip
    return clean


def main(argv: list[str]) -> None:
    from metal.host import cuda_tools

    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.sanitize",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", nargs="*", metavar="TOOL", help=f"of {', '.join(TOOLS)} (all)")
    parser.add_argument("--sanitizer", help="the compute-sanitizer to use")
    parser.add_argument("--kernels", default="", help="check only those that this matches (regex)")
    parser.add_argument("--seconds", type=float, default=180, help="a tool's limit (%(default)s)")
    parser.add_argument("--output", type=Path, help="a folder for all that the tools print")
    arguments = parser.parse_args(argv)
    if len(arguments.what) == 1 and arguments.what[0] in (*PARTS, "chunk-of-sums", "product"):
        return workload(arguments.what[0])
    if arguments.what == ["plant"]:
        return plant()
    unknown = [tool for tool in arguments.what if tool not in TOOLS]
    if unknown:
        parser.error(f"there is no tool {unknown[0]!r}; choose of {', '.join(TOOLS)}")
    sanitizer = arguments.sanitizer or shutil.which("compute-sanitizer")
    sanitizer = sanitizer or cuda_tools._find("bin/compute-sanitizer")
    if sanitizer is None:
        sys.exit("compute-sanitizer is not found; it comes with CUDA or with pip install "
                 "nvidia-cuda-sanitizer-api, or name it with --sanitizer.")  # fmt: skip
    names = [name for name in entries() if re.search(arguments.kernels, name)]
    print(f"{len(names)} kernels under {sanitizer}", flush=True)
    clean = [
        check(sanitizer, tool, names, arguments.seconds, arguments.output)
        for tool in arguments.what or TOOLS
    ]
    sys.exit(0 if all(clean) else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
