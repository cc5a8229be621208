"""The dispatches of a decode step, one by one, on random inputs, against numpy.

Each is launched with the constants, grid and threads that its Program gives it, so what is checked
is what the backend launches. Arrays are made from seeds by argument name and type; what a kernel
must write starts as NaN. References are those of tests/kernels/reference.py.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from kernels import reference as ref

from lily_mlx import _ext, kernels

A = ref.BF16
F64 = np.float64
TYPES = {"__bf16": np.uint16, "float": np.float32, "int": np.int32, "unsigned int": np.uint32}


def _dtype(type_: str) -> Any:
    """numpy's type of an argument's elements, vectors' components."""
    return TYPES[type_.split(" __attribute__")[0]]


class Executor(Protocol):
    def __call__(self, d: dict[str, Any], arrays: dict[int, np.ndarray], key: str) -> None:
        """Launch dispatch `d` of the pipeline `key`; outputs are written in place."""


@dataclass
class Outcome:
    """One dispatch: the largest error over what is allowed, and whether a second run was equal."""

    label: str
    kernel: str
    excess: float
    repeatable: bool
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.excess <= 1 and self.repeatable

    def __str__(self) -> str:
        word = "ok" if self.passed else "FAILED"
        again = "" if self.repeatable else ", TWO RUNS DIFFER"
        return (
            f"{word:6} {self.label:18} {self.kernel:26} error {self.excess:.2f} of what is allowed"
            f"{again} {self.detail}".rstrip()
        )


class Matrix:
    """A quantized matrix [experts, rows, columns]; its values are computed when they are used."""

    def __init__(self, words, scales, biases, rows: int, columns: int, bits: int, group: int):
        self.bits, self.group, self.columns = bits, group, columns
        self.words = words.view(np.uint32).reshape(-1, rows, columns * bits // 32)
        self.scales = scales.reshape(-1, rows, columns // group)
        self.biases = biases.reshape(-1, rows, columns // group)

    @property
    def rows(self) -> int:
        return self.words.shape[1]

    def values(self, expert: int, rows: slice) -> np.ndarray:
        per = 32 // self.bits
        shifts = np.arange(per, dtype=np.uint32) * self.bits
        codes = (self.words[expert, rows, :, None] >> shifts) & np.uint32(2**self.bits - 1)
        codes = codes.reshape(len(codes), self.columns)
        return ref.dequantize(
            codes, self.scales[expert, rows], self.biases[expert, rows], A, self.group
        )

    def product(self, x: np.ndarray, expert: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """(w x, |w| |x|) of one expert's rows."""
        parts = []
        for at in range(0, self.rows, 4096):
            w = self.values(expert, slice(at, at + 4096)).astype(F64)
            parts.append((w @ x.astype(F64), np.abs(w) @ np.abs(x).astype(F64)))
        return tuple(np.concatenate(p) for p in zip(*parts, strict=True))


class Dispatch:
    """One dispatch of a Program with its arrays by argument name."""

    def __init__(self, program: Any, index: int, manifest: dict[str, Any], position: int,
                 kept: dict[str, np.ndarray], tables: dict[str, bytes]):  # fmt: skip
        self.d = program.describe(index)
        self.c = self.d["constants"]
        self.key = program.pipelines[self.d["pipeline"]]["key"]
        self.position, self.kept, self.tables = position, kept, tables
        self.types = {a["name"]: a["type"] for a in manifest["arguments"]}
        self.writes: set[str] = set()
        self.by_slot: dict[str, np.ndarray] = {}
        self.arrays: dict[str, np.ndarray] = {}
        self.values: dict[str, Any] = {}
        for a in self.d["arguments"]:
            if "slot" not in a:
                self.values[a["name"]] = a["value"]
                continue
            if a["access"] != "read":
                self.writes.add(a["name"])
        # Where input and output share a slot, the input's values count.
        for a in sorted(self.d["arguments"], key=lambda a: a.get("access") != "read"):
            if "slot" in a:
                self._array(a)
        self.before = {name: array.copy() for name, array in self.arrays.items()
                       if array.nbytes < 1 << 25}  # fmt: skip

    def _array(self, a: dict[str, Any]) -> None:
        name, slot = a["name"], a["slot"]
        dtype = _dtype(self.types[name])
        if slot in self.by_slot:
            self.arrays[name] = self.by_slot[slot].view(dtype)
            return
        if name.startswith("partial_") and name not in self.writes:
            array = self.kept[slot]  # as the dispatch before left them
        elif name in self.writes and name not in ("k_cache", "v_cache"):
            array = np.full(a["bytes"], 0xFF, np.uint8).view(dtype)
        else:
            array = self._random(name, slot, a["bytes"], dtype)
        self.by_slot[slot] = self.arrays[name] = array
        if name in self.writes:
            self.kept[slot] = array

    def _random(self, name: str, slot: str, size: int, dtype: Any) -> np.ndarray:
        rng = np.random.default_rng(zlib.crc32(f"{self.d['label']} {name}".encode()))
        count = size // np.dtype(dtype).itemsize
        if slot in self.tables:
            return np.frombuffer(self.tables[slot], dtype).copy()
        if name == "position":
            return np.full(1, self.position, np.int32)
        if name == "token":
            return np.full(1, 77, np.uint32)
        if name in ("ids", "given_ids"):
            scales = next(a for a in self.d["arguments"]
                          if a["name"] in ("down_scales", "gate_scales"))  # fmt: skip
            c = self.c
            experts = scales["bytes"] // (2 * c["kHidden"] * c["kWidth"] // c["kMoeGroup"])
            return rng.permutation(experts)[:count].astype(np.uint32)
        if name == "partial_ids":
            return rng.permutation(count).astype(np.uint32)
        if dtype == np.uint32:
            return rng.integers(0, 2**32, count, dtype=np.uint32)
        if name == "a_log":
            return np.log(rng.uniform(0.01, 16, count)).astype(np.float32)
        scale = {"logits": 2.0, "state": 0.1, "conv_weight": 0.5}.get(name, 1.0)
        if name == "weights":
            return rng.uniform(0.05, 0.3, count).astype(np.float32)
        x = rng.standard_normal(count, np.float32) * np.float32(scale)
        if "scales" in name:
            x *= np.float32(0.0125)
        if "biases" in name:
            x *= np.float32(0.05)
        if name == "norm_weight" or name in ("q_norm", "k_norm"):
            x = x * np.float32(0.2) + np.float32(1)
        if name in ("k_cache", "v_cache"):  # a row past the context that is read shows
            x.reshape(-1, self.values["capacity"], 256)[:, self.position + 1 :] = np.nan
        return A.store(x) if dtype == np.uint16 else x.astype(dtype)

    def __getitem__(self, name: str) -> np.ndarray:
        """An argument's values as float32 (whole numbers as they are)."""
        array = self.arrays[name]
        return A.load(array) if array.dtype == np.uint16 else array

    def old(self, name: str) -> np.ndarray:
        """An argument's values before the launch."""
        array = self.before[name]
        return A.load(array) if array.dtype == np.uint16 else array

    def matrix(self, w: str, scales: str, biases: str, rows: int, columns: int, bits: int,
               group: int) -> Matrix:  # fmt: skip
        found = (self.arrays[n] for n in (w, scales, biases))
        return Matrix(*found, rows, columns, bits, group)

    def launch(self, run: Executor) -> dict[str, bytes]:
        """Run it on fresh outputs; what it wrote."""
        for name in self.writes & set(self.before):
            self.arrays[name][...] = self.before[name]
        arrays = {a["index"]: self.arrays[a["name"]] for a in self.d["arguments"] if "slot" in a}
        run(self.d, arrays, self.key)
        return {n: self.arrays[n].tobytes() for n in self.writes if n in self.before}


# ---- What each kernel must have written: (error over what is allowed, what was looked at)


def _worst(*parts: tuple[np.ndarray, np.ndarray, ref.Dtype, Any]) -> float:
    return max(float(ref.rounding_excess(*p)[0].max()) for p in parts)


def _equal(a: np.ndarray, b: np.ndarray) -> float:
    return 0.0 if np.array_equal(a, b) else np.inf


def _weight(d: Dispatch, number: int, suffix: str = "") -> Matrix:
    """A kernel's matrix of that number; the tensor-core forms have no constants for its format."""
    names = (f"{name}{suffix}" for name in ("w", "scales", "biases"))
    c = d.c
    bits, group = c.get(f"kBits{number}", 4), c.get("kGroup", 64)
    return d.matrix(*names, c[f"kRows{number}"], c["kK"], bits, group)


def _embed(d: Dispatch) -> float:
    m = _weight(d, 0)
    token = int(d.arrays["token"][0])
    return _equal(d.arrays["h"], A.store(m.values(0, slice(token, token + 1))[0]))


def _row(d: Dispatch) -> tuple[np.ndarray, float]:
    """The row of a product, normalised where the kernel does it, and how sure its roundings are."""
    x, c = d["h"], d.c
    if not c["kNorm"]:
        return x, 0.0
    x = ref.rms_norm(x, d["norm_weight"], c["kEps"], A)
    # The norm's sum is added in another order: a value on an edge may round the other way.
    return x, A.ulp * 1e4


def _sum_size(d: Dispatch) -> float:
    """What the fp32 sums of a tensor core carry, 128 x besides code * x (gemv_mma.h)."""
    return 8.0 if d.d["kernel"].startswith("mma_") else 1.0


def _gemv(d: Dispatch) -> float:
    c, excess = d.c, 0.0
    x, slack = _row(d)
    out = ref.FP32 if "_fp32_" in d.d["kernel"] else A
    if c["kWriteX"]:
        got = d["x_out"]
        if np.abs(got - x).max() > A.ulp * np.abs(x).max() or (got != x).mean() > 0.02:
            return np.inf
        x, slack = got, 0.0
    for i in range(4):
        if not c[f"kRows{i}"]:
            continue
        m = _weight(d, i, str(i))
        exact, size = m.product(x)
        size = size * (_sum_size(d) + slack)
        if c["kResidual"]:
            # The product is rounded before the residual is added.
            size = size + np.abs(exact) * A.ulp * 2.6e5
            exact = exact + d["residual"]
        excess = max(excess, _worst((d[f"y{i}"], exact, out, size)))
    return excess


def _head(d: Dispatch) -> float:
    x, slack = _row(d)
    m = _weight(d, 0)
    exact, size = m.product(x)
    logits = d["logits"]
    best = int(np.argmax(logits))
    values, ids = d["partial_values"], d["partial_ids"]
    place = int(np.lexsort((ids, -values))[0])
    chosen = 0.0 if values[place] == logits[best] and ids[place] == best else np.inf
    return max(chosen, _worst((logits, exact, ref.FP32, size * (_sum_size(d) + slack))))


def _argmax(d: Dispatch) -> float:
    values, ids = d["partial_values"], d["partial_ids"]
    place = int(np.lexsort((ids, -values))[0])
    return _equal(d.arrays["token"], ids[place : place + 1])


def _delta_step(d: Dispatch) -> float:
    c = d.c
    s = ref.GatedDeltaShape(c["kKeyHeads"], c["kValueHeads"])
    channels, heads = s.channels, s.value_heads
    conv, conv_state = ref.gated_delta_conv(
        d["qkv"], d.old("conv_state").reshape(3, channels), d["conv_weight"].reshape(channels, 4)
    )
    q, k, v = ref.gated_delta_split(conv, s, A)
    g, beta = ref.gated_delta_gates(d["a"], d["b"], d["a_log"], d["dt_bias"])
    y, state = ref.gated_delta_delta(q, k, v, g, beta, d.old("state").reshape(heads, s.dv, s.dk), s)
    want = ref.gated_delta_gated_norm(
        y, d["z"].reshape(heads, s.dv), d["norm_weight"], c["kGatedDeltaEps"]
    )
    # A value of q^ or k^ on the edge between two roundings moves the state by one ulp of it.
    slack = A.ulp * np.abs(state).max() * 0.6 + 1e-6
    off = np.abs(d["state_out"].reshape(state.shape) - state)
    rms = np.sqrt((want**2).mean(-1, keepdims=True))
    return max(
        _equal(d["conv_state_out"].reshape(3, channels), conv_state),
        float(np.nan_to_num(off.max() / slack, nan=np.inf)),
        float(np.nan_to_num(off.mean() / (2e-6 + slack * 0.02), nan=np.inf)),
        _worst((d["out"].reshape(want.shape), want, A, 1 + rms * A.ulp * 5e5)),
    )


def _experts(d: Dispatch, name: str, rows: int, columns: int) -> Matrix:
    return d.matrix(f"{name}_w", f"{name}_scales", f"{name}_biases", rows, columns,
                    d.c["kExpertBits"], d.c["kMoeGroup"])  # fmt: skip


def _shared(d: Dispatch, name: str, rows: int, columns: int) -> Matrix:
    return d.matrix(f"shared_{name}_w", f"shared_{name}_scales", f"shared_{name}_biases", rows,
                    columns, d.c["kSharedBits"], d.c["kMoeGroup"])  # fmt: skip


def _route(d: Dispatch) -> float:
    ids, weights = ref.route(d["logits"], d.c["kTopK"], d.c["kNormTopK"])
    if not np.array_equal(d["ids"], ids):
        return np.inf
    return float(np.abs(d["weights"] / weights - 1).max() / 4e-6)


def _gate_up(d: Dispatch) -> float:
    c = d.c
    excess, ids = (_route(d), d["ids"]) if c["kSelect"] else (0.0, d["given_ids"])
    x, act, width = d["x"], d["act"], c["kWidth"]
    slots = [
        (_experts(d, "gate", width, c["kHidden"]), _experts(d, "up", width, c["kHidden"]), int(e))
        for e in ids
    ]
    size = (c["kSharedWidth"], c["kHidden"])
    slots.append((_shared(d, "gate", *size), _shared(d, "up", *size), 0))
    at = 0
    for gate, up, e in slots:
        (g, g_size), (u, u_size) = gate.product(x, e), up.product(x, e)
        size = g_size * np.abs(u) + u_size * np.abs(ref.silu(g))
        part = act[at : at + gate.rows]
        excess = max(excess, _worst((part, ref.silu(g) * u, A, size)))
        at += gate.rows
    return excess


def _moe_down(d: Dispatch) -> float:
    c = d.c
    act, hidden, width = d["act"], c["kHidden"], c["kWidth"]
    y, size = np.zeros(hidden), np.zeros(hidden)
    down = _experts(d, "down", hidden, width)
    for i, (e, w) in enumerate(zip(d["ids"], d["weights"], strict=True)):
        p, n = down.product(act[i * width : (i + 1) * width], int(e))
        y, size = y + float(w) * p, size + float(w) * n
    p, n = _shared(d, "down", hidden, c["kSharedWidth"]).product(act[c["kTopK"] * width :])
    gate = float(ref.sigmoid(d["shared_gate"])[0])
    y, size = y + gate * p, size + gate * n
    want = d["h"].astype(F64) + y  # y is rounded before the residual is added
    return _worst((d["out"], want, A, size + np.abs(y) * A.ulp * 2.6e5))


def _prepare(d: Dispatch) -> float:
    c, D = d.c, 256
    heads, kv, at = c["kQueryHeads"], c["kKvHeads"], d.position
    capacity = d.values["capacity"]
    inv_freq, eps = d["inv_freq"], c["kHeadEps"]
    q = d["q_gate"].reshape(heads, 2, D)[:, 0]
    q = ref.rope(ref.head_norm(q, d["q_norm"], eps), at, inv_freq)
    k = ref.rope(ref.head_norm(d["k"].reshape(kv, D), d["k_norm"], eps), at, inv_freq)
    excess = 0.0
    for name, new in (("k_cache", None), ("v_cache", d.arrays["v"].reshape(kv, D))):
        got = d.arrays[name].reshape(kv, capacity, D)
        if name in d.before:
            want = d.before[name].reshape(kv, capacity, D).copy()
            want[:, at] = got[:, at]
            excess = max(excess, _equal(got, want))
        if new is not None:
            excess = max(excess, _equal(got[:, at], new))
    k_got = A.load(d.arrays["k_cache"].reshape(kv, capacity, D)[:, at])
    return max(
        excess,
        _worst((d["q_out"].reshape(q.shape), q, A, 2 + np.abs(q).max()),
               (k_got, k, A, 2 + np.abs(k).max())),
    )  # fmt: skip


def _attention(d: Dispatch) -> float:
    """The partial results are judged by what the merge makes of them."""
    capacity, n, D = d.values["capacity"], d.position + 1, 256
    keys, values = (d.arrays[x].reshape(-1, capacity, D)[:, :n] for x in ("k_cache", "v_cache"))
    q = d["q"].reshape(d.c["kQueryHeads"], D)
    d.kept["attention"] = ref.attend(q, A.load(keys), A.load(values))
    return 0.0


def _merge(d: Dispatch) -> float:
    want = d.kept["attention"]
    gate = d["q_gate"].reshape(len(want), 2, -1)[:, 1]
    return _worst((d["out"].reshape(want.shape), want * ref.sigmoid(gate), A, 4.0))


CHECKS: dict[str, Callable[[Dispatch], float]] = {
    "embed_row": _embed,
    "gemv": _gemv,
    "head_gemv": _head,
    "argmax_final": _argmax,
    "gated_delta_step": _delta_step,
    "moe_route": _route,
    "moe_gate_up": _gate_up,
    "moe_down": _moe_down,
    "attention_prepare": _prepare,
    "attention_decode": _attention,
    "attention_merge": _merge,
}
"""Kernel, without its types and sizes -> its check."""


def check_of(kernel: str) -> Callable[[Dispatch], float]:
    """The check of a kernel. Raises KeyError, naming it, where there is none."""
    found = [name for name in CHECKS if kernel.removeprefix("mma_").startswith(name)]
    if not found:
        raise KeyError(f"kernel {kernel!r} has no reference in tests/gpu/dispatches.py; add one")
    return CHECKS[max(found, key=len)]


# ---- Programs


def capacity_of(context: int) -> int:
    return max(256, (context + 255) // 256 * 256)


def distinct_layers(shapes: dict[str, Any]) -> dict[str, Any]:
    """The shapes with one layer of each kind, and the last, whose pick asks for no weights."""
    *others, last = shapes["layers"]
    layers = [layer for i, layer in enumerate(others) if layer not in others[:i]]
    return {**shapes, "layers": [*layers, last]}


def run_program(
    shapes: dict[str, Any],
    run: Executor,
    context: int,
    capacity: int | None = None,
    only: Callable[[str], bool] = lambda label: True,
    options: dict[str, Any] | None = None,
) -> Iterator[Outcome]:
    """Check every different dispatch of a decode step after which the caches hold `context` tokens.

    Args:
        shapes: as `lily_mlx.spec.model` gives them.
        only: chooses dispatches by label.
        options: changes to the decode step's Program on an NVIDIA GPU.
    """
    kernels.load()
    entries = {k["kernel"]: k for k in json.loads((kernels.folder() / "manifest.json").read_text())}
    capacity = capacity or capacity_of(context)
    few = distinct_layers(shapes)
    built = _ext.step_program("cuda", few, capacity, {**(options or {}), "context": context})
    kept: dict[str, Any] = {}
    seen = set()
    for i in range(len(built.program)):
        described = built.program.describe(i)
        what = (described["label"], described["pipeline"])
        if what in seen or not only(described["label"]):
            continue
        seen.add(what)
        entry = entries[described["kernel"]]
        d = Dispatch(built.program, i, entry, context - 1, kept, built.tables)
        check = check_of(described["kernel"])
        first = d.launch(run)
        excess = check(d)
        yield Outcome(described["label"], described["kernel"], excess, d.launch(run) == first)
