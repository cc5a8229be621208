"""python -m metal.host check|run|ptx|coverage: see README.md."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from . import coverage, cuda_tools
from .compiler import Source
from .faults import KernelFault
from .library import Library
from .toolchain import HostError


def _value(text: str):
    if text in ("true", "false"):
        return text == "true"
    return (
        float(text) if any(c in text for c in ".e") and not text.startswith("0x") else int(text, 0)
    )


def _pair(text: str) -> tuple[str | int, object]:
    name, _, value = text.partition("=")
    if not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE or ID=VALUE")
    return (int(name) if name.isdigit() else name), _value(value)


def _define(text: str) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    return name, value if equals else None


def _size(text: str) -> tuple[int, ...]:
    return tuple(int(t) for t in text.replace("x", ",").split(","))


def _source(args, path: str) -> Source:
    return Source(
        path, defines=dict(args.define), include=args.include, metal=args.metal, rules=args.rules
    )


def check(args) -> int:
    """Type-checks and lints every file; prints its kernels."""
    failed = 0
    for path in args.files:
        try:
            kernels = _source(args, path).check()
        except HostError as error:
            print(error, file=sys.stderr)
            failed += 1
            continue
        print(f"{path}: {len(kernels)} kernel(s)")
        for k in kernels if args.verbose else ():
            places = ", ".join(f"{p.index}:{p.name}" for p in k.buffers)
            print(f"  {k.name} ({places}), {k.threadgroup_bytes} bytes of threadgroup memory")
    return 1 if failed else 0


def ptx(args) -> int:
    """Writes PTX and a JSON description of its entries; prints what ptxas says of them."""
    for path in args.files:
        source = _source(args, path)
        kernels = source.check()
        text = source.ptx(
            source.constant_values(dict(args.constant)), contract=args.contract, arch=args.arch
        ).read_text()
        out = Path(args.output or Path(path).with_suffix(".ptx").name)
        out.write_text(text)
        entries = {
            cuda_tools.entry_name(k.name): {
                "kernel": k.name,
                "parameters": [
                    {
                        "index": p.index,
                        "name": p.name,
                        "bytes": p.size if p.by_value else 8,
                        "by_value": p.by_value,
                    }
                    for p in k.buffers
                ],
                "threadgroup_arguments": [p.index for p in k.threadgroup],
                "threadgroup_bytes": k.threadgroup_bytes,
            }
            for k in kernels
        }
        out.with_suffix(".json").write_text(json.dumps(entries, indent=1) + "\n")
        print(f"{out}: {len(kernels)} kernel(s) for {args.arch}")
        if cuda_tools.ptxas() is None:
            print(cuda_tools.NO_PTXAS)
            continue
        cubin, usage = cuda_tools.assemble(text, args.assemble or args.arch)
        if args.cubin:
            out.with_suffix(".cubin").write_bytes(cubin)
        for name, u in usage.items():
            print(
                f"  {name}: {u.registers} registers, {u.stack} bytes of stack, "
                f"{u.spill_stores}+{u.spill_loads} bytes "
                f"of spills, {u.shared} bytes of shared memory"
            )
    return 0


def run(args) -> int:
    """Runs one kernel on files or generated arrays; prints outputs, faults, traffic, branches."""
    if len(args.files) != 1:
        raise HostError("run takes one file")
    library = Library(
        args.files[0],
        dict(args.constant),
        args.host,
        defines=dict(args.define),
        include=args.include,
        metal=args.metal,
        rules=args.rules,
        contract=args.contract,
    )
    name = args.kernel or (next(iter(library.kernels)) if len(library.kernels) == 1 else None)
    if name is None:
        raise HostError(f"--kernel: one of {', '.join(library.kernels)}")
    kernel = library[name]
    buffers = {}
    for text in args.buffer:
        index, _, value = text.partition("=")
        buffers[int(index)] = _array(value)
    for p in kernel.info.buffers:
        if p.index not in buffers and not p.condition:
            raise HostError(f"--buffer {p.index}=... is missing ({p.space} {p.type} {p.name})")
    result = kernel(
        buffers,
        args.grid,
        args.threadgroup,
        args.threadgroup_memory or None,
        seed=args.seed,
        traffic=args.traffic,
    )
    print(
        f"{name}: {result.seconds * 1e3:.2f} ms, {result.barriers} barriers, "
        f"{result.simd_operations} simd operations"
    )
    for p in kernel.info.buffers:
        if p.index in result.traffic and (args.traffic or not p.const):
            print(f"  argument {p.index} ({p.name}): {result.traffic[p.index]}")
        if not p.const and p.index in buffers:
            print(f"  argument {p.index} ({p.name}) = {buffers[p.index]}")
            if args.save:
                np.save(f"{args.save}{p.index}.npy", buffers[p.index])
    for branch in library.branches.report() if library.branches and args.branches else ():
        if branch.missing:
            print(f"  {branch}")
    return 0


def _array(text: str):
    """A .npy file, TYPE[SHAPE] (zeros), TYPE[SHAPE]:random, TYPE[SHAPE]:count, or a number."""
    if text.endswith(".npy"):
        return np.ascontiguousarray(np.load(text))
    if "[" not in text:
        return _value(text)
    kind, _, rest = text.partition("[")
    shape, _, fill = rest.partition("]")
    bfloat = kind in ("bfloat", "bfloat16")
    dtype = np.dtype(
        "float32"
        if bfloat
        else {"half": "float16", "float": "float32", "uint": "uint32"}.get(kind, kind)
    )
    size = _size(shape)
    if fill == ":random":
        generator = np.random.default_rng(0)
        array = (
            generator.normal(size=size) if dtype.kind == "f" else generator.integers(0, 2**31, size)
        )
    elif fill == ":count":
        array = np.arange(int(np.prod(size))).reshape(size)
    elif not fill:
        array = np.zeros(size)
    else:
        raise HostError(f"{text!r}: fill with :random or :count")
    array = array.astype(dtype)
    return (array.view(np.uint32) >> 16).astype(np.uint16) if bfloat else array


def report(args) -> int:
    """Prints branches that no recorded run took; fails when there are any."""
    branches = coverage.load(args.folder)
    only = [str(Path(p).resolve()) for p in args.under]
    missing = [
        b for b in branches if b.missing and (not only or any(b.file.startswith(p) for p in only))
    ]
    for branch in missing:
        print(branch)
    print(f"{len(branches)} branches, {len(missing)} with an outcome that never happened")
    return 1 if missing and not args.no_fail else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m metal.host", description="Metal kernels without a Mac."
    )
    commands = parser.add_subparsers(required=True)

    def command(name: str, function):
        p = commands.add_parser(name, help=function.__doc__)
        p.set_defaults(function=function)
        p.add_argument("files", nargs="+", metavar="FILE")
        p.add_argument(
            "-D", "--define", action="append", type=_define, default=[], metavar="NAME[=VALUE]"
        )
        p.add_argument("-I", "--include", action="append", default=[], metavar="FOLDER")
        p.add_argument(
            "--metal", default="3.1", choices=["3.1", "3.2", "4.0"], help="language version"
        )
        p.add_argument(
            "--rules",
            default="strict",
            choices=["strict", "metal"],
            help="also the project's rules, or Metal's",
        )
        return p

    p = command("check", check)
    p.add_argument("-v", "--verbose", action="store_true", help="list the kernels")
    for name, function in (("run", run), ("ptx", ptx)):
        p = command(name, function)
        p.add_argument(
            "-c", "--constant", action="append", type=_pair, default=[], metavar="ID=VALUE"
        )
        p.add_argument(
            "--contract", default="fast", choices=["fast", "off"], help="may a*b+c round once"
        )
        if name == "ptx":
            p.add_argument("-o", "--output", help="file to write (default: FILE's name with .ptx)")
            p.add_argument("--arch", default="sm_80", help="of the PTX")
            p.add_argument("--assemble", metavar="ARCH", help="of the cubin (default: as --arch)")
            p.add_argument("--cubin", action="store_true", help="write the cubin too")
            continue
        p.add_argument("--host", default="checked", choices=["cpu", "checked", "cuda"])
        p.add_argument("-k", "--kernel", help="name of the kernel")
        p.add_argument(
            "-b",
            "--buffer",
            action="append",
            default=[],
            metavar="INDEX=VALUE",
            help="a number, x.npy, or TYPE[SHAPE] with :random or :count after it",
        )
        p.add_argument("--grid", type=_size, default=(1,), help="threadgroups, as 4 or 4,2,1")
        p.add_argument("--threadgroup", type=_size, default=(32,), help="threads of each")
        p.add_argument(
            "--threadgroup-memory",
            type=_size,
            default=(),
            help="bytes of the threadgroup arguments",
        )
        p.add_argument("--seed", type=int, help="shuffles the threads' order")
        p.add_argument("--traffic", action="store_true", help="count 128-byte lines")
        p.add_argument("--branches", action="store_true", help="list branches never taken")
        p.add_argument("--save", metavar="PREFIX", help="write outputs to PREFIX<index>.npy")
    p = commands.add_parser("coverage", help=report.__doc__)
    p.set_defaults(function=report)
    p.add_argument("folder", help="what LILY_METAL_COVERAGE named")
    p.add_argument(
        "--under", action="append", default=[], metavar="PATH", help="only these source files"
    )
    p.add_argument("--no-fail", action="store_true")
    args = parser.parse_args(argv)
    try:
        return args.function(args)
    except KernelFault as fault:
        print(fault, file=sys.stderr)
        return 1
    except HostError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
