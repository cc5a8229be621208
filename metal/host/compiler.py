"""Metal source -> checked manifest -> a shared library of launch stubs, or PTX."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from . import cuda_tools, manifest, toolchain
from .manifest import KernelInfo
from .toolchain import INCLUDE, CompileError, HostError, call, digest

METAL = toolchain.HERE.parent  # kernels include each other from here
THREADGROUP_LIMIT = 32768
LANGUAGES = {"3.1": "c++17", "3.2": "c++17", "4.0": "c++20"}
FLAGS = """-x c++ -nostdinc -fno-exceptions -fno-rtti -fno-math-errno -fconvergent-functions
-ferror-limit=50 -Werror -Wno-unknown-pragmas -Wno-ignored-attributes -Wno-undefined-internal
-Wno-undefined-inline -Wno-c++20-extensions
-Xclang -fbfloat16-excess-precision=none""".split()
STRICT_FLAGS = "-Wall -Wextra -Wno-unused-parameter".split()
CHECKED_FLAGS = """-O2 -Xclang -ffake-address-space-map -fno-vectorize -fno-slp-vectorize
-D__MSL_CHECKED -ftrivial-auto-var-init=pattern""".split()
PTX_FLAGS = """--target=nvptx64-nvidia-cuda -nogpulib -O3 -Xclang -target-feature -Xclang +ptx83
-mllvm -unroll-threshold=1500""".split()
PLUGIN_ARGUMENT = ["-Xclang", "-plugin-arg-msl", "-Xclang"]

# Builtin parameters that are not fields of the context.
RENAMED = {
    "dispatch_threads_per_threadgroup": "threads_per_threadgroup",
    "dispatch_simdgroups_per_threadgroup": "simdgroups_per_threadgroup",
}
COMPUTED = {
    "threads_per_simdgroup": "32",
    "thread_execution_width": "32",
    "thread_index_in_quadgroup": "c.thread_index_in_simdgroup & 3",
    "quadgroup_index_in_threadgroup": "c.thread_index_in_threadgroup >> 2",
}


class Source:
    """One Metal file with the options that it is compiled under; see Library for them."""

    def __init__(
        self,
        path: str | os.PathLike | None,
        *,
        source: str | None = None,
        defines: Mapping[str, object] | None = None,
        include: Iterable[str] = (),
        metal: str = "3.1",
        rules: str = "strict",
    ):
        if rules not in ("strict", "metal"):
            raise HostError(f'rules={rules!r}: "strict" (Metal\'s and the project\'s) or "metal"')
        if metal not in LANGUAGES:
            raise HostError(f"metal={metal!r}: one of {', '.join(LANGUAGES)}")
        if source is not None:
            path = _stored(source)
        self.path = Path(path).resolve()
        if not self.path.is_file():
            raise HostError(f"no Metal source at {self.path}")
        self.rules = rules
        self.version = metal.replace(".", "") + "0"
        macros = {"__METAL_VERSION__": self.version, **(defines or {})}
        self.flags = [
            *FLAGS,
            f"-std={LANGUAGES[metal]}",
            *(STRICT_FLAGS if rules == "strict" else ()),
            *("-isystem", str(INCLUDE)),
            *(f"-I{folder}" for folder in include),
            f"-I{METAL}",
            *(f"-D{k}" if v is None else f"-D{k}={v}" for k, v in sorted(macros.items())),
        ]
        self.kernels: list[KernelInfo] = []
        self.constants: dict[str, tuple[int, str]] = {}

    # ---- the cache
    def _record(self) -> Path:
        """Where the names of the included files are kept."""
        name = digest(toolchain.identity(), str(self.path), self.rules, *self.flags)
        return toolchain.cache_folder() / f"files-{name}"

    def _key(self) -> str | None:
        """Hash of the source and of every file it includes; None when these are not known yet."""
        try:
            names = json.loads(self._record().read_text())
            texts = [Path(name).read_bytes() for name in names]
        except (OSError, ValueError):
            return None
        return digest(toolchain.identity(), self.rules, *self.flags, *names, *texts)

    def _remember(self, depends: Path) -> None:
        text = depends.read_text().replace("\\\n", " ").split(":", 1)[1].strip()
        words = (word.replace("\\ ", " ") for word in re.split(r"(?<!\\)\s+", text))
        names = {os.path.realpath(word) for word in words if not word.endswith("/wrap.cpp")}
        own = sorted(name for name in names if not name.startswith(str(INCLUDE)))
        record = self._record()
        record.parent.mkdir(parents=True, exist_ok=True)
        fresh = record.with_name(f".{record.name}-{os.getpid()}")
        fresh.write_text(json.dumps(own))
        os.replace(fresh, record)

    def _built(self, kind: str, options: list[str], build: Callable[[Path], None]) -> Path:
        """Builds through the cache; again where a file changed under the compiler's hands."""
        while True:
            key = self._key()
            if key is None:
                self.check()
                continue
            place = toolchain.cached(f"{kind}-{digest(key, *options)}", build)
            if self._key() == key:
                return place
            shutil.rmtree(place, ignore_errors=True)

    def _wrap(self, place: Path, stubs: Iterable[str] = ()) -> str:
        wrap = place / "wrap.cpp"
        lines = [f'#include "{self.path}"\n', *stubs, "#pragma clang attribute pop\n"]
        wrap.write_text("".join(lines))
        return str(wrap)

    # ---- check
    def check(self) -> list[KernelInfo]:
        """Type-checks and lints; returns the kernels. Raises CompileError: file, line, rule."""
        key = self._key()
        folder = toolchain.cache_folder() / f"check-{key}"
        if key is None or not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".check-", dir=folder.parent) as place:
                text = self._front_end(Path(place))
            folder = toolchain.cached(
                f"check-{self._key()}", lambda p: _write(p / "manifest.json", text)
            )
        found = json.loads((folder / "manifest.json").read_text())
        self.kernels = [manifest.parse(k) for k in found["kernels"]]
        self.constants = {c["name"]: (c["id"], c["type"]) for c in found["constants"]}
        for k in self.kernels if self.rules == "strict" else ():
            if k.threadgroup_bytes > THREADGROUP_LIMIT:
                raise CompileError(
                    f"{k.file}:{k.line}: error: {k.name} uses {k.threadgroup_bytes} bytes of "
                    f"threadgroup memory, the limit is {THREADGROUP_LIMIT} [threadgroup-limit]"
                )
        return self.kernels

    def _front_end(self, place: Path) -> str:
        manifest_file, depends = place / "manifest.json", place / "depends"
        command = [
            *(toolchain.clang(), *self.flags, f"-fplugin={toolchain.plugin()}"),
            *("-fsyntax-only", "-MD", "-MF", str(depends)),
            *(*PLUGIN_ARGUMENT, f"manifest={manifest_file}"),
            *(*PLUGIN_ARGUMENT, f"version={self.version}"),
            *([*PLUGIN_ARGUMENT, "strict"] if self.rules == "strict" else ()),
            self._wrap(place),
        ]
        call(command, f"{self.path.name} is not valid here")
        self._remember(depends)
        return manifest_file.read_text()

    def constant_values(self, constants: Mapping[int | str, object] | None) -> dict[int, str]:
        """{id or name: value} -> {id: text for the front end}."""
        result = {}
        for key, value in (constants or {}).items():
            if isinstance(key, str):
                if key not in self.constants:
                    raise HostError(
                        f"{self.path.name} has no function constant {key!r}; "
                        f"it has {sorted(self.constants)}"
                    )
                key = self.constants[key][0]
            result[int(key)] = repr(float(value)) if isinstance(value, float) else str(int(value))
        return result

    # ---- code
    def _compile(self, place: Path, stubs: list[str], options: list[str], output: Path) -> None:
        plugin = toolchain.plugin()
        stubs = ["#include <msl/stubs.h>\n", *stubs]
        command = [toolchain.clang(), *self.flags, "-w", *options, self._wrap(place, stubs)]
        command += [f"-fplugin={plugin}", f"-fpass-plugin={plugin}", "-o", str(output)]
        call(command, f"compiling {self.path.name}")

    def library(self, values: dict[int, str], *, checked: bool, contract: str) -> Path:
        """Shared library with one launch stub a kernel: stub_0, stub_1, ..."""
        kernels = self.check()
        options = [
            *("-shared", "-fPIC", "-gline-tables-only", "-march=native", "-lm"),
            *(CHECKED_FLAGS if checked else ("-O3",)),
            # The first touch of a thread's variable calls the C library, which may change vector
            # registers that clang takes for kept: glibc before 2.39 all of them in TLS descriptors,
            # and xmm16 to xmm31 in __tls_get_addr. Emulated, it is an ordinary call.
            "-femulated-tls",
            f"-ffp-contract={contract}",
            *_constant_flags(values),
        ]

        def build(place: Path) -> None:
            stubs = [_external("char", "__msl_include[]", f'"{INCLUDE}/"')]
            if checked:
                stubs.append(_external("int", "__msl_checked", "1"))
            stubs += [_cpu_stub(i, k) for i, k in enumerate(kernels)]
            self._compile(place, stubs, options, place / "kernels.so")

        return self._built("cpu", [toolchain.processor(), *options], build) / "kernels.so"

    def ptx(self, values: dict[int, str], *, contract: str, arch: str) -> Path:
        """PTX with one entry a kernel.

        An entry's parameters, in order of the buffer index: a pointer, or for `constant T&` the
        value itself; then a uint32 byte offset into dynamic shared memory for each
        [[threadgroup(i)]] argument but the first.
        """
        kernels = self.check()
        library = cuda_tools.libdevice()
        options = [
            *(*PTX_FLAGS, "-S", f"-march={arch}", f"-ffp-contract={contract}"),
            *_constant_flags(values),
        ]
        if library:
            options += ["-Xclang", "-mlink-builtin-bitcode", "-Xclang", library]

        def build(place: Path) -> None:
            output = place / "kernels.ptx"
            self._compile(place, [_gpu_entry(k) for k in kernels], options, output)
            text = output.read_text()
            missing = sorted(set(re.findall(r"\.extern \.func [^;]*?(__nv_\w+)", text)))
            if missing:
                raise HostError(
                    f"{self.path.name} needs CUDA's libdevice ({', '.join(missing)}): "
                    "set CUDA_HOME or pip install nvidia-cuda-nvcc"
                )
            output.write_text(_with_thread_limits(text, kernels))

        return self._built("ptx", options, build) / "kernels.ptx"


def _stored(source: str) -> Path:
    folder = toolchain.cached(
        "source-" + digest(source), lambda p: _write(p / "source.metal", source)
    )
    return folder / "source.metal"


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def _constant_flags(values: dict[int, str]) -> list[str]:
    return [f for i, v in sorted(values.items()) for f in (*PLUGIN_ARGUMENT, f"constant={i}:{v}")]


def _external(kind: str, name: str, value: str) -> str:
    """A constant that the pass in frontend/trace.cpp looks for."""
    return f'extern "C" {{ extern const {kind} {name}; const {kind} {name} = {value}; }}\n'


def _builtin(kind: str, name: str) -> str:
    if name in COMPUTED:
        return f"({kind})({COMPUTED[name]})"
    return f"__msl_host::position<{kind}>(c.{RENAMED.get(name, name)})"


def _cpu_stub(number: int, kernel: KernelInfo) -> str:
    arguments = []
    for i, p in enumerate(kernel.parameters):
        kind = f"__msl_host::nth<F, {i}>::type"
        if p.space:
            memory = "c.threadgroup_memory" if p.space == "threadgroup" else "b"
            arguments.append(f"__msl_host::bind<{kind}>::from((ulong){memory}[{p.index}])")
        else:
            arguments.append(_builtin(kind, p.builtin))
    return (
        f'extern "C" __attribute__((flatten)) void stub_{number}(\n'
        "    const __msl_host::context& c, void* const* b) {\n"
        f"  typedef decltype({kernel.function}) F;\n"
        f"  {kernel.function}({', '.join(arguments)});\n}}\n"
    )


def _gpu_entry(kernel: KernelInfo) -> str:
    name = cuda_tools.entry_name(kernel.name)
    kinds = {p: f"__msl_host::nth<F_{name}, {i}>::type" for i, p in enumerate(kernel.parameters)}
    signature, values = [], {}
    for p in kernel.buffers:
        kind, argument = kinds[p], f"b{p.index}"
        if p.by_value:
            target = f"metal::remove_addrspace_t<__msl_host::target<{kind}>::type>"
            signature.append(f"metal::remove_cv_t<{target}> {argument}")
            argument = "&" + argument
        else:
            signature.append(f"device char* {argument}")
        values[p] = f"__msl_host::bind<{kind}>::from((ulong){argument})"
    for n, p in enumerate(kernel.threadgroup):
        if n:
            signature.append(f"uint t{p.index}")
        address = "(threadgroup char*)__msl_host::dynamic" + (f" + t{p.index}" if n else "")
        values[p] = f"__msl_host::bind<{kinds[p]}>::from((ulong)({address}))"
    arguments = [values.get(p) or _builtin(kinds[p], p.builtin) for p in kernel.parameters]
    return (
        f"typedef decltype({kernel.function}) F_{name};\n"
        f'extern "C" __attribute__((nvptx_kernel, flatten)) void {name}(\n'
        f"    {', '.join(signature)}) {{\n"
        "  const __msl_host::context c = __msl_host::here();\n  (void)c;\n"
        f"  {kernel.function}({', '.join(arguments)});\n}}\n"
    )


def _with_thread_limits(ptx: str, kernels: Iterable[KernelInfo]) -> str:
    """[[max_total_threads_per_threadgroup(n)]] as PTX's .maxntid."""
    for k in kernels:
        if k.max_threads != 1024:
            entry = rf"(\.entry {cuda_tools.entry_name(k.name)}\([^)]*\))"
            ptx = re.sub(entry, rf"\1\n.maxntid {k.max_threads}, 1, 1", ptx, count=1)
    return ptx
