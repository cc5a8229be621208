"""Programs: what they accept, how they are bound, what they count."""

import json

import pytest
from program_kernels import MANIFEST

from lily_mlx import _ext
from lily_mlx.trace import Trace


def full_map(registry, p, x, y):
    d = _ext.Dispatch(registry.at("map_f32")).constant("bits", 4).value("n", 7)
    return d.read("x", x).write("y", y).threadgroup_memory("sums", 100).grid(3).threads(32, 2)


# ---- what a dispatch accepts


@pytest.fixture
def xy():
    p = _ext.Program("p")
    return p, p.slot("x", "input", 64), p.slot("y", "output", 64)


def test_complete_dispatch_is_described(registry, xy):
    p, x, y = xy
    p.add(full_map(registry, p, x, y).label("double").layer(3, "moe"))
    p.finish()
    d = p.describe(0)
    assert (d["kernel"], d["label"], d["layer"], d["phase"]) == ("map_f32", "double", 3, "moe")
    assert d["constants"] == {"bits": 4}
    assert (list(d["grid"]), tuple(d["threadgroup"])) == ([3, 1, 1], (32, 2, 1))
    assert d["threadgroup_memory"] == {"sums": 112}  # in multiples of 16
    assert [(a["name"], a["index"]) for a in d["arguments"]] == [("x", 0), ("y", 1), ("n", 2)]
    pipeline = {"key": "map_f32_0:4", "kernel": "map_f32", "file": "map.metal"}
    assert p.pipelines == [{**pipeline, "constants": {"bits": 4}}]


def without(names, registry, p, x, y):
    d = _ext.Dispatch(registry.at("map_f32"))
    steps = {
        "bits": lambda: d.constant("bits", 4),
        "x": lambda: d.read("x", x),
        "y": lambda: d.write("y", y),
        "n": lambda: d.value("n", 7),
        "sums": lambda: d.threadgroup_memory("sums", 16),
    }
    for name, step in steps.items():
        if name not in names:
            step()
    return d


@pytest.mark.parametrize("name", ["bits", "x", "y", "n", "sums"])
def test_missing_part_is_named(registry, xy, name):
    p, x, y = xy
    with pytest.raises(ValueError, match=f"'map_f32'.*'{name}'.*missing"):
        p.add(without({name}, registry, p, x, y))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d, x, y: d.read("w", x), "no argument 'w'; it has: x, y, n, sums"),
        (lambda d, x, y: d.constant("rows", 1), "no function constant 'rows'; it has: bits"),
        (lambda d, x, y: d.write("x", y), "'x' is declared write.*allows read only"),
        (lambda d, x, y: d.read("x", x).read("x", x), "'x' is given twice"),
        (lambda d, x, y: d.constant("bits", 4).constant("bits", 8), "'bits' is given twice"),
        (lambda d, x, y: d.value("x", 1.0), "'x' is device float\\* and cannot take"),
        (lambda d, x, y: d.read("sums", x), "'sums' is in threadgroup space"),
        (lambda d, x, y: d.threadgroup_memory("x", 64), "'x' is in device space"),
        (lambda d, x, y: d.traffic(4), "follows the buffer argument"),
    ],
)
def test_wrong_argument_is_named(registry, xy, change, message):
    _, x, y = xy
    with pytest.raises(ValueError, match=message):
        change(_ext.Dispatch(registry.at("map_f32")), x, y)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d, x, y: d.read("x", x, 60, 8).write("y", y), "8 bytes at offset 60 of slot 'x'"),
        (lambda d, x, y: d.read("x", x, 64).write("y", y), "of slot 'x', which has 64"),
        (lambda d, x, y: d.read("x", x).write("y", x), "writes slot 'x', which is a input"),
        (lambda d, x, y: d.read("x", x).traffic(65).write("y", y), "cannot move 65 bytes"),
        (lambda d, x, y: d.read("x", x).write("y", y).threads(2048), "2048 threads"),
        (lambda d, x, y: d.read("x", x).write("y", y).grid(4, 0), "empty grid"),
    ],
)
def test_wrong_range_or_size_is_named(registry, xy, change, message):
    p, x, y = xy
    d = without({"x", "y"}, registry, p, x, y)
    with pytest.raises(ValueError, match=message):
        p.add(change(d, x, y))


def test_threadgroup_memory_limit(registry, xy):
    p, x, y = xy
    d = without({"sums"}, registry, p, x, y).threadgroup_memory("sums", 40000)
    with pytest.raises(ValueError, match="40000 bytes of threadgroup memory"):
        p.add(d)


def test_pipelines_differ_in_any_bit_of_a_constant(registry, xy):
    entry = {**MANIFEST[1], "kernel": "eps", "constants": [{"id": 1, "name": "e", "type": "float"}]}
    registry.add(entry)
    p, x, y = xy
    for e in (1e-6, 1.0000001e-6, 1e-6):
        d = _ext.Dispatch(registry.at("eps")).constant("e", e).read("x", x).read("z", x)
        p.add(d.write("y", y))
    p.finish()
    assert [p.describe(i)["pipeline"] for i in range(3)] == [0, 1, 0]


def test_struct_by_value_must_have_the_kernels_size(registry, xy):
    entry = json.loads(json.dumps(MANIFEST[0]))
    entry["kernel"] = "with_struct"
    entry["arguments"][2].update(type="Params", size=12)
    registry.add(entry)
    d = _ext.Dispatch(registry.at("with_struct"))
    with pytest.raises(ValueError, match="'n' is a Params of 12 bytes, not 8 bytes"):
        d.value("n", bytes(8))
    d.value("n", bytes(12))


def test_limits_that_the_kernel_itself_sets(registry, xy):
    entry = {**MANIFEST[0], "kernel": "limited", "threadgroup_bytes": 32000, "max_threads": 64}
    registry.add(entry)
    p, x, y = xy

    def dispatch(memory, threads):
        d = _ext.Dispatch(registry.at("limited")).constant("bits", 4).read("x", x).write("y", y)
        return d.value("n", 1).threadgroup_memory("sums", memory).threads(threads)

    with pytest.raises(ValueError, match="takes 32784 bytes of threadgroup memory"):
        p.add(dispatch(784, 64))
    with pytest.raises(ValueError, match="has 65 threads a threadgroup; 1 to 64"):
        p.add(dispatch(768, 65))
    p.add(dispatch(768, 64))


def test_argument_behind_a_constant(registry):
    p = _ext.Program("p")
    y, m = p.slot("y", "output", 4), p.slot("m", "input", 4)

    def dispatch(has_mask):
        return _ext.Dispatch(registry.at("guarded")).constant("has_mask", has_mask).write("y", y)

    p.add(dispatch(False))
    with pytest.raises(ValueError, match="'mask' .* is missing"):
        p.add(dispatch(True))
    with pytest.raises(ValueError, match="'mask' is given, but has_mask is false"):
        p.add(dispatch(False).read("mask", m))
    p.add(dispatch(True).read("mask", m))
    assert len(p.pipelines) == 2


def test_argument_behind_a_derived_condition_is_optional(registry, xy):
    entry = json.loads(json.dumps(MANIFEST[2]))
    entry["kernel"] = "derived"
    entry["arguments"][1]["condition"] = "has_mask_and_rows"
    registry.add(entry)
    p, x, y = xy
    for given in (False, True):
        d = _ext.Dispatch(registry.at("derived")).constant("has_mask", True).write("y", y)
        p.add(d.read("mask", x) if given else d)
    p.finish()


def test_scalar_of_another_type(registry, xy):
    p, x, y = xy
    n = p.scalar("n", 1.0, "float")
    with pytest.raises(ValueError, match="'n' is int&, but scalar 'n' is float"):
        p.add(without({"n"}, registry, p, x, y).scalar("n", n))


def test_slot_that_the_program_does_not_have(registry, xy):
    _, x, y = xy
    other = _ext.Program("other")
    with pytest.raises(ValueError, match="not of program 'other'"):
        other.add(full_map(registry, other, x, y))


def test_finished_program_is_closed(registry, xy):
    p, x, y = xy
    p.add(full_map(registry, p, x, y))
    with pytest.raises(ValueError, match="not finished"):
        p.check_hazards()
    p.finish()
    with pytest.raises(ValueError, match="is finished"):
        p.slot("z", "input", 4)


def test_unused_slot_is_named(registry, xy):
    p, x, y = xy
    p.slot("forgotten", "weight", 4)
    p.add(full_map(registry, p, x, y))
    with pytest.raises(ValueError, match="no dispatch uses slot 'forgotten'"):
        p.finish()


# ---- the registry


def test_unknown_kernel(registry):
    with pytest.raises(ValueError, match="unknown kernel 'gemv'"):
        registry.at("gemv")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("index", 31, "'x' has index 31"),
        ("index", 1, "'y' \\(index 1\\) is given twice"),
        ("space", "thread", "unknown address space 'thread'"),
        ("access", "rw", "unknown access 'rw'"),
    ],
)
def test_unsound_manifest(field, value, message):
    entry = json.loads(json.dumps(MANIFEST[0]))
    entry["arguments"][0][field] = value
    with pytest.raises(ValueError, match=message):
        _ext.KernelRegistry().add(entry)


def test_same_kernel_twice(registry):
    with pytest.raises(ValueError, match="in the registry already"):
        registry.add(MANIFEST[0])


def test_manifest_and_source_from_a_folder(tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps(MANIFEST))
    (tmp_path / "a.h").write_text('#pragma once\n#include "b.h"\nint a;\n')
    (tmp_path / "b.h").write_text("#pragma once\nint b;\n")
    text = '#include <metal_stdlib>\n#include "b.h"\n  #include "a.h"\nint m;\n'
    (tmp_path / "map.metal").write_text(text)
    r = _ext.KernelRegistry()
    r.load(str(tmp_path))
    assert r.names() == ["guarded", "map_f32", "move"]
    name, source = r.source("map.metal")
    assert source == "#include <metal_stdlib>\nint b;\nint a;\nint m;\n"
    assert name.startswith("lily_map_")
    (tmp_path / "b.h").write_text("#pragma once\nint c;\n")
    assert r.source("map.metal")[0] != name


def test_source_must_be_ascii_and_complete(tmp_path):
    r = _ext.KernelRegistry(str(tmp_path))
    (tmp_path / "k.metal").write_text("int a;\n// \u00b5s\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"k.metal:2 holds byte 194"):
        r.source("k.metal")
    (tmp_path / "k.metal").write_text('#include "gone.h"\n')
    with pytest.raises(ValueError, match="gone.h cannot be read"):
        r.source("k.metal")


# ---- levels, edges, hazards


@pytest.fixture
def chain(move):
    """x -> a, w -> b, a -> out: two levels when the slots are apart."""
    p = _ext.Program("chain")
    s = {
        n: p.slot(n, k, 64)
        for n, k in (("x", "input"), ("w", "weight"), ("a", "cache"), ("b", "cache"))
    }
    s["out"] = p.slot("out", "output", 64)
    move(p, (s["a"],), (s["x"],))
    move(p, (s["b"],), (s["w"],))
    move(p, (s["out"],), (s["a"],))
    p.finish()
    return p, s


def bound(p, s, **places):
    b = _ext.Bindings(p)
    for i, (name, slot) in enumerate(s.items()):
        buffer, offset = places.get(name, (100 + i, 0))
        b.bind(slot, id=buffer, bytes=256, offset=offset)
    return b


def test_bindings_without_aliases_use_the_programs_levels(chain):
    p, s = chain
    assert bound(p, s).levels == [0, 0, 1]
    # One buffer for all, ranges apart.
    apart = bound(p, s, x=(1, 0), a=(1, 64), b=(1, 128), out=(1, 192))
    assert apart.levels == [0, 0, 1]
    # Read-only slots may share.
    assert bound(p, s, x=(1, 0), w=(1, 0)).levels == [0, 0, 1]


def test_slots_bound_to_overlapping_bytes_conflict(chain):
    p, s = chain
    b = bound(p, s, a=(1, 0), b=(1, 63))
    assert b.levels == [0, 1, 2]
    assert p.check_hazards(b) == []
    assert {h["kind"] for h in p.check_hazards(b, levels=[0, 0, 1])} == {"WAW"}
    b.bind(s["b"], id=1, bytes=256, offset=64)
    assert b.levels == [0, 0, 1]
    b.bind(s["b"], id=1, bytes=256, offset=0)
    assert b.levels == [0, 1, 2]
    b.bind(s["b"], id=2, bytes=256, offset=0)
    assert b.levels == [0, 0, 1]
    b.bind(s["b"], id=1, bytes=256, offset=32)
    assert b.levels == [0, 1, 2]


def test_two_arguments_of_one_launch_on_the_same_bytes(registry, chain, move):
    p, s = chain
    with pytest.raises(ValueError, match=r"'a' bytes .* also has these bytes|in_place"):
        _ = bound(p, s, a=(1, 0), x=(1, 0)).levels

    p = _ext.Program("update")
    old, new, w = p.slot("old", "cache", 64), p.slot("new", "cache", 64), p.slot("w", "weight", 64)
    d = _ext.Dispatch(registry.at("move")).read("x", old).read("z", w).write("y", new)
    p.add(d.in_place("x", "y"))
    p.finish()
    b = _ext.Bindings(p)
    for slot, buffer in ((old, 1), (new, 1), (w, 2)):
        b.bind(slot, id=buffer, bytes=64)
    assert b.levels == [0]


def test_unbound_slot_is_named(chain):
    p, s = chain
    b = _ext.Bindings(p)
    for name in ("x", "w", "a", "out"):
        b.bind(s[name], id=hash(name) & 0xFFFF, bytes=64)
    with pytest.raises(ValueError, match="slot 'b' is not bound"):
        _ = b.levels


def test_unbound_arena_is_named(move):
    p = _ext.Program("p")
    x, a = p.slot("x", "input", 8), p.scratch("a", 8)
    move(p, (a,), (x,))
    p.finish()
    b = _ext.Bindings(p)
    b.bind(x, id=1, bytes=8)
    with pytest.raises(ValueError, match="scratch arena is not bound"):
        _ = b.levels
    with pytest.raises(ValueError, match="'a' is scratch"):
        b.bind(a, id=2, bytes=8)
    b.bind_arena(id=2, bytes=256)
    assert b.order == [0]


def test_buffer_that_is_too_small(chain):
    p, s = chain
    with pytest.raises(
        ValueError, match="'x' needs 64 bytes; the buffer has 64, bound at offset 1"
    ):
        _ext.Bindings(p).bind(s["x"], id=1, bytes=64, offset=1)


def test_scalars_set_arguments_grids_and_bytes_without_rebuilding(registry):
    p = _ext.Program("p")
    cache, out = p.slot("cache", "cache", 4096), p.slot("out", "output", 64)
    n = p.scalar("n", 1)
    d = _ext.Dispatch(registry.at("map_f32")).constant("bits", 4).scalar("n", n)
    d.read("x", cache).traffic(0, n, 16).write("y", out).threadgroup_memory("sums", 16)
    p.add(d.grid(2, n).label("attention"))
    p.finish()
    b = _ext.Bindings(p)
    b.bind(cache, id=1, bytes=4096)
    b.bind(out, id=2, bytes=64)
    assert p.describe(0, b)["read"] == 16
    b.set(n, 9)
    d = p.describe(0, b)
    assert list(d["grid"]) == [2, 9, 1]
    assert [a["value"] for a in d["arguments"] if "value" in a] == [9]
    assert p.report(b)["by_label"]["attention"] == {"dispatches": 1, "read": 144, "written": 64}
    assert p.report()["read"] == 16
    b.set(n, 0)
    with pytest.raises(ValueError, match="'n' is 0, which is no grid size"):
        p.describe(0, b)


# ---- counts and the listing


def test_weight_bytes_count_each_range_once(move):
    p = _ext.Program("p")
    w, o = p.slot("w", "weight", 100), [p.slot(f"o{i}", "output", 4) for i in range(3)]
    move(p, (o[0],), (w, 0, 60), (w, 40, 60))
    move(p, (o[1],), (w, 0, 60), (w, 40, 60))
    move(p, (o[2],), (w, 90, 10))
    p.finish()
    r = p.report()
    assert r["read"] == 120 + 120 + 20
    assert r["written"] == 12
    assert r["weights"] == 100


def test_experts_count_what_they_move(registry):
    p = _ext.Program("p")
    w, x, y = p.slot("w", "weight", 4096), p.slot("x", "input", 4), p.slot("y", "output", 4)
    for _ in range(2):
        d = _ext.Dispatch(registry.at("move")).read("x", w).traffic(128).read("z", x)
        p.add(d.write("y", y))
    p.finish()
    assert p.report()["read"] == 2 * (128 + 4)
    assert p.report()["weights"] == 128


def test_listing_and_json(registry, xy):
    p, x, y = xy
    p.add(full_map(registry, p, x, y).label("double").layer(3, "moe"))
    p.finish()
    trace = Trace(p)
    head, columns, row, pipeline = str(trace).splitlines()
    assert head.startswith("p: 1 dispatches, 1 levels, 0 barriers, 64 B read")
    assert columns.split()[:3] == ["index", "level", "layer"]
    assert " ".join(row.split()) == "0 0 3 moe double map_f32 #0 3 32x2 64 B 64 B"
    assert pipeline == "#0 map.metal map_f32 bits=4"
    data = json.loads(trace.to_json())
    assert data["dispatches"][0]["kernel"] == "map_f32"
    assert data["report"]["by_label"]["double"]["written"] == 64
    assert "1.000 of the floor" in trace.summary(floor=128)
