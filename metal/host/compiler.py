"""Metal source -> checked manifest -> a shared library of launch stubs, or PTX."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from . import cuda_tools, toolchain
from .toolchain import INCLUDE, CompileError, HostError, call, digest

METAL = toolchain.HERE.parent  # kernels include each other from here
THREADGROUP_LIMIT = 32768
WIDTH = {"threads_per_simdgroup", "thread_execution_width"}
RENAMED = {
    "dispatch_threads_per_threadgroup": "threads_per_threadgroup",
    "dispatch_simdgroups_per_threadgroup": "simdgroups_per_threadgroup",
}
QUAD = {
    "thread_index_in_quadgroup": "thread_index_in_simdgroup & 3",
    "quadgroup_index_in_threadgroup": "thread_index_in_threadgroup >> 2",
}
SUPPORT = """
namespace __msl_host {
template <class F, int I> struct nth;
template <class R, class A, class... B> struct nth<R(A, B...), 0> { typedef A type; };
template <class R, class A, class... B, int I> struct nth<R(A, B...), I> : nth<R(B...), I - 1> {};
template <class P> struct target { typedef P type; };
template <class T> struct target<T&> { typedef T type; };
template <class T> struct target<T*> { typedef T type; };
template <class P> struct bind { static inline __attribute__((always_inline)) P from(ulong p) { return (P)p; } };
template <class T> struct bind<T&> {
  static inline __attribute__((always_inline)) T& from(ulong p) { return *(T*)p; }
};
template <class T> inline __attribute__((always_inline)) T position(const uint* p) {
  if constexpr (metal::__vector<T>::size == 0) return (T)p[0];
  else { T r; for (int i = 0; i < metal::__vector<T>::size; i++) r[i] = p[i]; return r; }
}
template <class T> inline __attribute__((always_inline)) T position(uint p) { return (T)p; }
struct context {
  uint thread_position_in_grid[3], thread_position_in_threadgroup[3], threadgroup_position_in_grid[3];
  uint threads_per_threadgroup[3], threads_per_grid[3], threadgroups_per_grid[3];
  uint thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
  uint simdgroups_per_threadgroup;
  void* threadgroup_memory[8];
};
}  // namespace __msl_host
"""
CUDA_CONTEXT = """
extern __local ulong __msl_dynamic[];
static inline __attribute__((always_inline)) void __msl_fill(__msl_host::context& c) {
  uint group[3] = {(uint)__nvvm_read_ptx_sreg_ctaid_x(), (uint)__nvvm_read_ptx_sreg_ctaid_y(), (uint)__nvvm_read_ptx_sreg_ctaid_z()};
  uint groups[3] = {(uint)__nvvm_read_ptx_sreg_nctaid_x(), (uint)__nvvm_read_ptx_sreg_nctaid_y(), (uint)__nvvm_read_ptx_sreg_nctaid_z()};
  uint at[3] = {(uint)__nvvm_read_ptx_sreg_tid_x(), (uint)__nvvm_read_ptx_sreg_tid_y(), (uint)__nvvm_read_ptx_sreg_tid_z()};
  uint shape[3] = {(uint)__nvvm_read_ptx_sreg_ntid_x(), (uint)__nvvm_read_ptx_sreg_ntid_y(), (uint)__nvvm_read_ptx_sreg_ntid_z()};
  for (int i = 0; i < 3; i++) {
    c.thread_position_in_threadgroup[i] = at[i];
    c.threadgroup_position_in_grid[i] = group[i];
    c.threadgroups_per_grid[i] = groups[i];
    c.threads_per_threadgroup[i] = shape[i];
    c.thread_position_in_grid[i] = group[i] * shape[i] + at[i];
    c.threads_per_grid[i] = groups[i] * shape[i];
  }
  c.thread_index_in_threadgroup = at[0] + shape[0] * (at[1] + shape[1] * at[2]);
  c.thread_index_in_simdgroup = c.thread_index_in_threadgroup & 31;
  c.simdgroup_index_in_threadgroup = c.thread_index_in_threadgroup >> 5;
  c.simdgroups_per_threadgroup = (shape[0] * shape[1] * shape[2] + 31) / 32;
}
"""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel; index: of the buffer or threadgroup argument, -1 for a builtin."""

    name: str
    space: str  # "device", "constant", "threadgroup" or "" (builtin)
    builtin: str
    type: str  # of the value or of what is pointed to
    size: int  # bytes of that type
    const: bool
    reference: bool
    index: int
    condition: str  # function constant that decides whether the argument exists


@dataclass(frozen=True)
class KernelInfo:
    """A kernel as the front end sees it."""

    name: str
    function: str
    file: str
    line: int
    threadgroup_bytes: int
    max_threads: int
    constants: tuple[int, ...]  # ids of the function constants that it may read
    parameters: tuple[Parameter, ...] = field(default=())

    @property
    def buffers(self) -> list[Parameter]:
        return [p for p in self.parameters if p.space in ("device", "constant")]

    @property
    def threadgroup(self) -> list[Parameter]:
        return [p for p in self.parameters if p.space == "threadgroup"]


def _kernel(entry: dict) -> KernelInfo:
    taken = {
        "buffer": {p["index"] for p in entry["parameters"] if "index" in p and p["space"] != "threadgroup"},
        "threadgroup": {p["index"] for p in entry["parameters"] if "index" in p and p["space"] == "threadgroup"},
    }
    parameters = []
    for p in entry["parameters"]:
        index = p.get("index", -1)
        if index < 0 and p["space"]:  # Metal numbers the others in order
            used = taken["threadgroup" if p["space"] == "threadgroup" else "buffer"]
            index = next(i for i in range(64) if i not in used)
            used.add(index)
        parameters.append(
            Parameter(p["name"] or f"argument {len(parameters)}", p["space"], p["builtin"], p["type"], p["size"],
                      p["const"] or p["space"] == "constant", p["reference"], index, p.get("condition", ""))
        )
    return KernelInfo(
        entry["name"] or entry["function"], entry["function"], entry["file"], entry["line"],
        entry["threadgroup_bytes"], entry.get("max_threads", 1024), tuple(entry["constants"]), tuple(parameters),
    )


class Source:
    """One Metal file with the options that it is compiled under."""

    def __init__(self, path, *, source=None, defines=None, include=(), metal="3.1", rules="strict"):
        if rules not in ("strict", "metal"):
            raise HostError(f'rules={rules!r}: "strict" (Metal\'s and the project\'s) or "metal"')
        if metal not in ("3.1", "3.2", "4.0"):
            raise HostError(f'metal={metal!r}: "3.1", "3.2" or "4.0"')
        if source is not None:
            folder = toolchain.cached("source-" + digest(source), lambda p: (p / "source.metal").write_text(source) and None)
            path = folder / "source.metal"
        self.path = Path(path).resolve()
        if not self.path.is_file():
            raise HostError(f"no Metal source at {self.path}")
        self.rules = rules
        version = "".join(metal.split("."))
        self.flags = [
            "-x", "c++", "-std=c++20" if metal == "4.0" else "-std=c++17", f"-D__METAL_VERSION__={version}0",
            "-nostdinc", "-isystem", str(INCLUDE), *(f"-I{p}" for p in include), f"-I{METAL}",
            *(f"-D{k}" if v is None else f"-D{k}={v}" for k, v in sorted((defines or {}).items())),
            "-fno-exceptions", "-fno-rtti", "-fno-math-errno", "-fconvergent-functions", "-Wno-unknown-pragmas", "-Wno-ignored-attributes",
            "-Wno-undefined-internal", "-Wno-undefined-inline", "-Wno-c++20-extensions", "-ferror-limit=50", "-Werror",
        ]
        if rules == "strict":
            self.flags += ["-Wall", "-Wextra", "-Wno-unused-parameter"]
        self._dependencies: str | None = None
        self.kernels: list[KernelInfo] = []
        self.constants: dict[str, tuple[int, str]] = {}

    # ---- what a build depends on
    def _record(self) -> Path:
        return toolchain.cache_folder() / ("files-" + digest(toolchain.identity(), str(self.path), self.rules, *self.flags))

    def key(self) -> str | None:
        """Hash of the source and of every file it includes; None when these are not known yet."""
        if self._dependencies is None:
            try:
                names = json.loads(self._record().read_text())
                texts = [Path(name).read_bytes() for name in names]
            except (OSError, ValueError):
                return None
            self._dependencies = digest(toolchain.identity(), self.rules, *self.flags, *names, *texts)
        return self._dependencies

    def _remember(self, depfile: Path) -> None:
        words = re.split(r"(?<!\\)\s+", depfile.read_text().replace("\\\n", " ").split(":", 1)[1].strip())
        names = sorted({str(Path(w.replace("\\ ", " ")).resolve()) for w in words} - {"wrap.cpp"})
        names = [n for n in names if not n.startswith(str(INCLUDE)) and not n.endswith("/wrap.cpp")]
        record = self._record()
        record.parent.mkdir(parents=True, exist_ok=True)
        fresh = record.with_name(f".{record.name}-{os.getpid()}")
        fresh.write_text(json.dumps(names))
        os.replace(fresh, record)
        self._dependencies = None

    def _wrap(self, place: Path, extra: str = "") -> str:
        wrap = place / "wrap.cpp"
        wrap.write_text(f'#include "{self.path}"\n{extra}#pragma clang attribute pop\n')
        return str(wrap)

    # ---- check
    def check(self) -> list[KernelInfo]:
        """Type-checks and lints; returns the kernels. Raises CompileError naming file, line, rule."""
        frontend = ["-Xclang", "-plugin-arg-msl", "-Xclang"]

        def build(place: Path) -> None:
            command = [
                toolchain.clang(), *self.flags, f"-fplugin={toolchain.plugin()}", "-fsyntax-only", "-MD",
                "-MF", str(place / "depends"), *frontend, f"manifest={place / 'manifest.json'}",
                *([*frontend, "strict"] if self.rules == "strict" else []), self._wrap(place),
            ]
            call(command, f"{self.path.name} is not valid here")
            self._remember(place / "depends")

        key = self.key()
        if key is None:
            with_unknown = toolchain.cache_folder() / f".check-{os.getpid()}-{id(self)}"
            with_unknown.mkdir(parents=True)
            try:
                build(with_unknown)
                text = (with_unknown / "manifest.json").read_text()
            finally:
                for p in with_unknown.iterdir():
                    p.unlink()
                with_unknown.rmdir()
            toolchain.cached(f"check-{self.key()}", lambda p: (p / "manifest.json").write_text(text) and None)
        folder = toolchain.cached(f"check-{self.key()}", build)
        manifest = json.loads((folder / "manifest.json").read_text())
        self.kernels = [_kernel(k) for k in manifest["kernels"]]
        self.constants = {c["name"]: (c["id"], c["type"]) for c in manifest["constants"]}
        if self.rules == "strict":
            for k in self.kernels:
                if k.threadgroup_bytes > THREADGROUP_LIMIT:
                    raise CompileError(
                        f"{k.file}:{k.line}: error: {k.name} uses {k.threadgroup_bytes} bytes of threadgroup memory, "
                        f"the limit is {THREADGROUP_LIMIT} [threadgroup-limit]"
                    )
        return self.kernels

    def constant_values(self, constants) -> dict[int, str]:
        """{id or name: value} -> {id: text for the front end}."""
        result = {}
        for key, value in (constants or {}).items():
            if isinstance(key, str):
                if key not in self.constants:
                    raise HostError(f"{self.path.name} has no function constant {key!r}; it has {sorted(self.constants)}")
                key = self.constants[key][0]
            result[int(key)] = repr(float(value)) if isinstance(value, float) else str(int(value))
        return result

    @staticmethod
    def _constant_flags(values: dict[int, str]) -> list[str]:
        return [f for i, v in sorted(values.items())
                for f in ("-Xclang", "-plugin-arg-msl", "-Xclang", f"constant={i}:{v}")]

    # ---- code
    def library(self, values: dict[int, str], *, checked: bool, contract: str) -> Path:
        """Shared library with one launch stub a kernel (stub_0, stub_1, ...)."""
        self.check()
        mode = ["-ffp-contract=" + contract, "-fPIC", "-shared", "-gline-tables-only", "-march=native",
                *self._constant_flags(values)]
        if checked:
            mode += ["-O2", "-Xclang", "-ffake-address-space-map", "-fno-vectorize", "-fno-slp-vectorize"]
        else:
            mode += ["-O3"]
        if os.uname().machine == "x86_64":
            mode += ["-mtls-dialect=gnu2"]

        def build(place: Path) -> None:
            lines = [SUPPORT, f'extern "C" {{ extern const char __msl_include[]; const char __msl_include[] = "{INCLUDE}/"; }}\n']
            if checked:
                lines.append('extern "C" { extern const int __msl_checked; const int __msl_checked = 1; }\n')
            for i, k in enumerate(self.kernels):
                lines.append(
                    f'extern "C" __attribute__((flatten)) void stub_{i}(const __msl_host::context* c, void* const* b) {{\n'
                    f"  typedef decltype({k.function}) F;\n  {k.function}({', '.join(self._arguments(k))});\n}}\n"
                )
            plugin = toolchain.plugin()
            call(
                [toolchain.clang(), *self.flags, "-w", f"-fplugin={plugin}", f"-fpass-plugin={plugin}", *mode,
                 self._wrap(place, "".join(lines)), "-o", str(place / "kernels.so"), "-lm"],
                f"compiling {self.path.name} for the CPU",
            )

        return toolchain.cached("cpu-" + digest(self.key(), toolchain.processor(), *mode), build) / "kernels.so"

    def ptx(self, values: dict[int, str], *, contract: str, arch: str) -> Path:
        """PTX with one entry a kernel. An entry's parameters, in order of the buffer index: a pointer,
        or for `constant T&` the value itself; then a uint32 byte offset into dynamic shared memory for
        each [[threadgroup(i)]] argument but the first.
        """
        self.check()
        target = ["--target=nvptx64-nvidia-cuda", f"-march={arch}", "-nogpulib", "-O3", "-ffp-contract=" + contract,
                  "-Xclang", "-target-feature", "-Xclang", "+ptx83", "-mllvm", "-unroll-threshold=1500",
                  *self._constant_flags(values)]
        device_library = cuda_tools.libdevice()

        def build(place: Path) -> None:
            lines = [SUPPORT, CUDA_CONTEXT, *(self._entry(k) for k in self.kernels)]
            plugin = toolchain.plugin()
            extra = ["-Xclang", "-mlink-builtin-bitcode", "-Xclang", device_library] if device_library else []
            call(
                [toolchain.clang(), *self.flags, "-w", f"-fplugin={plugin}", f"-fpass-plugin={plugin}", *target, *extra, "-S",
                 self._wrap(place, "".join(lines)), "-o", str(place / "kernels.ptx")],
                f"compiling {self.path.name} to PTX",
            )
            text = (place / "kernels.ptx").read_text()
            missing = sorted(set(re.findall(r"\.extern \.func .*?(__nv_\w+)", text, re.S)))
            if missing:
                raise HostError(
                    f"{self.path.name} needs CUDA's libdevice ({', '.join(missing)}): set CUDA_HOME or "
                    "pip install nvidia-cuda-nvcc"
                )
            for k in self.kernels:  # Metal's limit on threads is PTX's
                if k.max_threads != 1024:
                    name = cuda_tools.entry_name(k.name)
                    text = re.sub(rf"(\.entry {name}\(.*?\))", rf"\1\n.maxntid {k.max_threads}, 1, 1", text, count=1, flags=re.S)
            (place / "kernels.ptx").write_text(text)

        return toolchain.cached("ptx-" + digest(self.key(), str(device_library), *target), build) / "kernels.ptx"

    @staticmethod
    def _entry(kernel: KernelInfo) -> str:
        signature, values = [], {}
        name = cuda_tools.entry_name(kernel.name)
        kinds = {id(p): f"__msl_host::nth<F_{name}, {i}>::type" for i, p in enumerate(kernel.parameters)}
        for p in sorted(kernel.buffers, key=lambda p: p.index):
            kind = kinds[id(p)]
            if p.reference and p.space == "constant":
                value = f"metal::remove_cv_t<metal::remove_addrspace_t<typename __msl_host::target<{kind}>::type>>"
                signature.append(f"{value} b{p.index}")
                values[id(p)] = f"__msl_host::bind<{kind}>::from((ulong)&b{p.index})"
            else:
                signature.append(f"device char* b{p.index}")
                values[id(p)] = f"__msl_host::bind<{kind}>::from((ulong)b{p.index})"
        for n, p in enumerate(sorted(kernel.threadgroup, key=lambda p: p.index)):
            if n:
                signature.append(f"uint t{p.index}")
            offset = f" + t{p.index}" if n else ""
            values[id(p)] = f"__msl_host::bind<{kinds[id(p)]}>::from((ulong)((threadgroup char*)__msl_dynamic{offset}))"
        arguments = [values.get(id(p)) or Source._builtin(kinds[id(p)], p.builtin) for p in kernel.parameters]
        return (
            f"typedef decltype({kernel.function}) F_{name};\n"
            f'extern "C" __attribute__((nvptx_kernel, flatten)) void {name}({", ".join(signature)}) {{\n'
            "  __msl_host::context here; __msl_fill(here);\n  const __msl_host::context* c = &here;\n"
            f"  {kernel.function}({', '.join(arguments)});\n}}\n"
        )

    @staticmethod
    def _arguments(kernel: KernelInfo) -> list[str]:
        result = []
        for i, p in enumerate(kernel.parameters):
            kind = f"__msl_host::nth<F, {i}>::type"
            if p.space == "threadgroup":
                result.append(f"__msl_host::bind<{kind}>::from((ulong)c->threadgroup_memory[{p.index}])")
            elif p.space:
                result.append(f"__msl_host::bind<{kind}>::from((ulong)b[{p.index}])")
            else:
                result.append(Source._builtin(kind, p.builtin))
        return result

    @staticmethod
    def _builtin(kind: str, name: str) -> str:
        if name in WIDTH:
            return f"({kind})32"
        if name in QUAD:
            return f"({kind})(c->{QUAD[name]})"
        return f"__msl_host::position<{kind}>(c->{RENAMED.get(name, name)})"
