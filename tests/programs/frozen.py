"""python -m tests.programs.frozen: writes frozen.json, a digest of each dispatch of many Programs.

A change of structure keeps them all; a change that means to launch something else writes the file
anew, and its review sees which Programs changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lily_mlx
from lily_mlx import _ext, kernels, spec
from lily_mlx.loading import load
from lily_mlx.shapes import qwen3_6_35b_a3b

FILE = Path(__file__).with_name("frozen.json")
CAPACITIES = (256, 1280, 8448, 32768, 131072)
ROWS = (1, 5, 17, 64, 512, 2048)


def models() -> dict[str, dict[str, Any]]:
    """Shapes of the bundled model and of the 35B: a layer of each kind, and the last."""
    loaded = {
        "bundled": load(str(lily_mlx.BUNDLED_MODEL), lazy=True)[0],
        "35b": qwen3_6_35b_a3b(),
    }
    found = {name: spec.model(model.language_model) for name, model in loaded.items()}
    return {
        name: {**m, "layers": [*m["layers"][2:4], m["layers"][-1]]} for name, m in found.items()
    }


def programs(shapes: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(name, Program) of a model on every target: decode steps, and layers at several rows."""
    dtype = shapes["dtype"]
    delta, attention, moe = (
        shapes["layers"][0]["delta"], shapes["layers"][1]["attention"], shapes["layers"][0]["moe"]
    )  # fmt: skip
    products = {
        "delta in": ([delta[k] for k in ("qkv", "z", "b", "a")], False),
        "attention in": ([attention[k] for k in "qkv"], False),
        "attention out": ([attention["out"]], False),
        "head": ([shapes["head"]], True),
    }
    for on in ("metal", "metal_nax", "cuda"):
        for capacity in CAPACITIES:
            options = {"logits": True}
            yield f"step {on} {capacity}", _ext.step_program(on, shapes, capacity, options)
        for rows in ROWS:
            for name, (matrices, float32) in products.items():
                built = _ext.linear_program(on, dtype, rows, matrices, float32)
                yield f"{name} {on} {rows}", built
            yield f"moe {on} {rows}", _ext.moe_program(on, dtype, rows, moe)
            yield f"embed {on} {rows}", _ext.embed_program(on, dtype, rows, shapes["embedding"])
            for masked in (False, True):
                built = _ext.gated_delta_program(on, dtype, 1, rows, delta, masked, masked)
                yield f"gated_delta {on} {rows} masked={masked}", built


def dispatches(program: Any) -> list[str]:
    """A line a dispatch: label, kernel, digest of all that it is launched with."""
    slots = {s["name"]: (s["kind"], s["bytes"]) for s in program.slots}
    numbers: dict[str, int] = {}
    lines = []
    for i in range(len(program)):
        d = program.describe(i)
        arguments = []
        for a in sorted(d["arguments"], key=lambda a: a["index"]):
            if "slot" in a:  # which slot it is, not how it is called
                number = numbers.setdefault(a["slot"], len(numbers))
                moved = (a["offset"], a["bytes"], a["access"], a["traffic"])
                arguments.append((a["name"], number, *slots[a["slot"]], *moved))
            else:
                arguments.append((a["name"], a["value"]))
        launch = (d["constants"], d["grid"], d["threadgroup"], d["threadgroup_memory"])
        digest = hashlib.sha256(repr((*launch, d["level"], d["after"], arguments)).encode())
        lines.append(f"{d['label']}: {d['kernel']} {digest.hexdigest()[:10]}")
    return lines


def collect() -> dict[str, list[str]]:
    """Every Program's dispatches."""
    kernels.load()
    return {
        f"{model} {name}": dispatches(built.program)
        for model, shapes in models().items()
        for name, built in programs(shapes)
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(collect(), indent=0) + "\n")
