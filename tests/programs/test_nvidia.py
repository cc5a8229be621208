"""The layer primitives with the kernels of NVIDIA GPUs, on the Metal host; their PTX's index."""

import json

import mlx.core as mx
import pytest
from small import error, only
from test_layers import linear, normal

import lily_mlx
from lily_mlx import _ext, kernels, layers, ptx, ptx_archive, spec
from lily_mlx.loading import load
from lily_mlx.shapes import qwen3_6_35b_a3b

BF16 = mx.bfloat16


@pytest.fixture(scope="module")
def shapes():
    """Those of the 35B model."""
    return spec.model(qwen3_6_35b_a3b().language_model)


@pytest.mark.parametrize("rows", [1, 16, 17, 70])
def test_projections(rows):
    mx.random.seed(rows)
    modules = [linear(n, 256, BF16) for n in (1, 40, 130)]
    x = normal((1, rows, 256), BF16)
    wanted = layers.project(x, *modules)
    mx.eval(wanted)
    with only("gemv_rows" if rows <= 16 else "qgemm", target="cuda"):
        got = layers.project(x, *modules)
        mx.eval(got)
    for a, b in zip(got, wanted, strict=True):
        assert error(a, b) < 0.01


@pytest.mark.parametrize("tokens", [1, 12, 40])
def test_layers_of_the_bundled_model(tokens):
    model, _ = load(str(lily_mlx.BUNDLED_MODEL))
    mx.random.seed(0)
    x = normal((2, tokens, model.language_model.args.hidden_size), BF16)
    for layer, field in ((0, "linear_attn"), (0, "mlp"), (3, "self_attn")):
        wanted = model.layers[layer][field](x)
        mx.eval(wanted)
        with kernels.metal_host(target="cuda"):
            got = model.layers[layer][field](x)
            mx.eval(got)
        # Nine rows in ten: one may have two experts so close that rounding decides between them.
        a, b = (y.astype(mx.float32).reshape(2 * tokens, -1) for y in (got, wanted))
        rows = mx.sort(mx.linalg.norm(a - b, axis=-1) / mx.linalg.norm(b, axis=-1))
        assert rows[int(0.9 * (rows.size - 1))] < 0.03
    names = {row[1] for row in _ext.run_counts()}
    assert names >= {"gated_delta_scan", "gemv_rows" if 2 * tokens <= 16 else "qgemm"}
    assert names.isdisjoint({"gemv", "gated_delta_step"})


def test_a_chunk_uses_tensor_cores_and_has_no_conflicts(shapes):
    few = {**shapes, "layers": shapes["layers"][2:4]}
    for tokens in (20, 600, 2048):
        program = _ext.chunk_program("cuda", few, tokens).program
        assert program.check_hazards() == []
        assert any(p["file"].endswith("_mma.metal") for p in program.pipelines)
        assert all("simdgroup" not in p["kernel"] for p in program.pipelines)


def test_the_index_covers_any_number_of_rows(shapes):
    known = set(ptx.layer_pipelines(shapes))
    moe = shapes["layers"][0]["moe"]
    delta = shapes["layers"][0]["delta"]
    for rows in (*range(1, 40), 63, 64, 65, 127, 128, 129, 300, 511, 2048, 4096, 9000):
        matrices = [delta["qkv"], delta["z"], delta["b"], delta["a"]]
        programs = [_ext.moe_program("cuda", "bfloat16", rows, moe)]
        programs.append(_ext.linear_program("cuda", "bfloat16", rows, matrices))
        programs.append(_ext.linear_program("cuda", "bfloat16", rows, [shapes["head"]], True))
        programs.append(_ext.embed_program("cuda", "bfloat16", rows, shapes["embedding"]))
        needed = {p["key"] for b in programs for p in b.program.pipelines}
        assert needed <= known, rows


def test_the_index_covers_any_capacity(shapes):
    known = set(ptx.decode_pipelines(shapes, ptx.CAPACITIES))
    ways = set()
    for capacity in (256, 1024, 1280, 6144, 6400, 24576, 24832, 98304, 98560, 262144):
        program = _ext.step_program("cuda", shapes, capacity).program
        assert {p["key"] for p in program.pipelines} <= known, capacity
        one = _dispatch(program, "attention")
        ways.add((one["kernel"], one["grid"][0], one["threadgroup"][0]))
    assert len(ways) == len(ptx.CAPACITIES), ways


def test_tiles_of_the_35b_are_for_its_shapes_alone(shapes):
    """A router of 4 bits, or another hidden size, gets the tiles that fit everything."""
    four = json.loads(json.dumps(shapes))
    for layer in four["layers"]:
        layer["moe"]["router"][2] = 4
    assert _threads(shapes, "router") == 512 and _threads(four, "router") != 512
    assert _threads(_bundled_shapes(), "router") < 512
    small = _other(shapes, heads=(4, 1))
    assert _threads(shapes, "attention in") == 288 != _threads(small, "attention in")


def _other(shapes, hidden=2048, experts=256, heads=(16, 2), value_heads=32, bits=4, shared=8):
    """A DeltaNet and an attention layer of another size or format; shared: bits of that gate."""

    def matrix(rows, columns, bits=bits, count=1):
        return [rows, columns, bits, 64 if bits else 0, count]

    delta, attention = (dict(layer) for layer in shapes["layers"][2:4])
    query, kv = heads
    delta["delta"] = delta["delta"] | {
        "value_heads": value_heads,
        "qkv": matrix(128 * (32 + value_heads), hidden), "z": matrix(128 * value_heads, hidden),
        "b": matrix(value_heads, hidden), "a": matrix(value_heads, hidden),
        "out": matrix(hidden, 128 * value_heads),
    }  # fmt: skip
    attention["attention"] = attention["attention"] | {
        "heads": query, "kv_heads": kv, "q": matrix(512 * query, hidden),
        "k": matrix(256 * kv, hidden), "v": matrix(256 * kv, hidden),
        "out": matrix(hidden, 256 * query),
    }  # fmt: skip
    moe = delta["moe"] | {
        "router": matrix(experts, hidden, 8), "shared_router": matrix(1, hidden, shared),
        **dict.fromkeys(("gate", "up"), matrix(512, hidden, count=experts)),
        **dict.fromkeys(("shared_gate", "shared_up"), matrix(512, hidden)),
        "down": matrix(hidden, 512, count=experts), "shared_down": matrix(hidden, 512),
    }  # fmt: skip
    tables = dict.fromkeys(("embedding", "head"), matrix(50000, hidden))
    return {**shapes, **tables, "layers": [delta | {"moe": moe}, attention | {"moe": moe}]}


@pytest.mark.parametrize("hidden", [1024, 2048, 2560, 4096])
@pytest.mark.parametrize("bits", [0, 4, 6, 8])
def test_other_models_have_a_step_too(shapes, hidden, bits):
    """The tiles tuned for one model must not leave another without threads that fit."""
    for experts in (64, 256, 512):
        for heads, value_heads in (((4, 1), 16), ((16, 2), 32), ((32, 4), 64)):
            for shared in (0, 4, 6, 8):
                other = _other(shapes, hidden, experts, heads, value_heads, bits, shared)
                for capacity in (256, 4096):
                    program = _ext.step_program("cuda", other, capacity).program
                    assert len(program) == 2 + 7 + 9 + 1


def _bundled_shapes():
    return spec.model(load(str(lily_mlx.BUNDLED_MODEL), lazy=True)[0].language_model)


def _described(program):
    return [program.describe(i) for i in range(len(program))]


def _dispatch(program, label):
    return next(d for d in _described(program) if d["label"] == label)


def _threads(shapes, label):
    program = _ext.step_program("cuda", shapes, 256).program
    return _dispatch(program, label)["threadgroup"][0]


@pytest.mark.parametrize(
    "tiles,words",
    [
        ({"delta out.r": 3}, "delta out: no kernel for lanes 32, r 3"),
        ({"experts up.r": 3}, "experts: no kernel for up r 3"),
        ({"experts down.u": 4}, "down r 4, u 4"),
        ({"experts up.lanes": 3}, "no multiple of lanes"),
        ({"delta step.simdgroups": 12}, "delta step: no kernel for 12 simdgroups"),
        ({"delta in.u": 3}, "delta in: no kernel"),
    ],
)
def test_a_tile_without_a_kernel_is_refused(shapes, tiles, words):
    """It would run as nothing: the constants choose none of the shapes that are compiled in."""
    with pytest.raises(ValueError, match=words):
        _ext.step_program("cuda", shapes, 256, tiles)


def test_the_experts_are_known_before_their_kernels_wait(shapes):
    """moe_gate_up and moe_down ask for what moe_route wrote before they wait for the one before."""
    program = _ext.step_program("cuda", shapes, 256).program
    labels = [d["label"] for d in _described(program)]
    at = labels.index("route")
    assert labels[at - 1 : at + 3] == ["router", "route", "experts up", "experts down"]


# What a kernel reads before it waits for the dispatch before it, weights and tables apart
# (wait_for_previous in metal/common.h).
EARLY_READS = {
    "attention_prepare": {"position"},
    "attention_decode": {"k_cache", "v_cache", "position"},
    "attention_merge": {"q_gate", "position"},
    "gated_delta_step": {"conv_state", "state"},
    "moe_gate_up": {"x"},
    "moe_down": {"ids", "weights", "shared_gate", "h"},
}
FORMS = [{}, *({name: False} for name in ("mma", "fuse_norm", "fuse_projections", "fuse_residual",
                                          "fuse_delta"))]  # fmt: skip


def _ways_to_start(program):
    """Of each dispatch, by its PTX: waits (starts early and waits by itself), starts_next."""
    archive = ptx_archive.read(ptx_archive.PACKAGED)
    ways = []
    for d in _described(program):
        # A form that no package carries: another tile of the kernel starts its follower alike.
        name, _ = archive.pipelines.get(program.pipelines[d["pipeline"]]["key"], ("", ""))
        alike = [name] if name else [t for t in archive.texts if t.startswith(f"{d['kernel']}-")]
        texts = [archive.texts[t] for t in alike] or [""]
        waits = [text.find("griddepcontrol.wait") for text in texts]
        starts = [text.find("griddepcontrol.launch_dependents") for text in texts]
        assert len({(w < 0, s < w) for w, s in zip(waits, starts, strict=True)}) == 1, d["kernel"]
        ways.append((waits[0] >= 0, starts[0] < waits[0]))
    return ways


def _complete(ways, after, i):
    """The dispatches that are complete, for sure, when dispatch i may start (cuda.cpp's edges)."""
    before = after[i]
    if len(before) == 1 and ways[i][0] and ways[before[0]][0]:
        # The one before has started; or it has waited itself.
        one = before[0]
        return _complete(ways, after, one) if ways[one][1] else _ancestors(after, one)
    return _ancestors(after, i)  # it waits for all of them, or they tell nobody before their end


def _ancestors(after, i):
    return {j for one in after[i] for j in {one} | _ancestors(after, one)}


@pytest.mark.parametrize("capacity", [256, 2048])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_what_is_read_before_a_wait_was_there(shapes, form, capacity):
    few = {**shapes, "layers": shapes["layers"][2:5]}
    program = _ext.step_program("cuda", few, capacity, form).program
    ways, written, checked = _ways_to_start(program), {}, 0
    described = _described(program)
    after = [d["after"] for d in described]
    for i, d in enumerate(described):
        kernel = d["kernel"].removeprefix("mma_")
        early = next((v for k, v in EARLY_READS.items() if kernel.startswith(k)), set())
        if not d["constants"].get("kGivenIds", True):  # the expert kernels wait first then
            early = set()
        for a in d["arguments"]:
            if a["name"] in early and a["access"] != "write":
                # The newest row of the caches is read after the wait (attention_decode.h).
                newest = kernel.startswith("attention_decode") and a["name"].endswith("_cache")
                if not newest and a["slot"] in written:
                    done = _complete(ways, after, i)
                    assert written[a["slot"]] in done, (d["label"], a["name"])
                checked += 1
        for a in d["arguments"]:
            if a.get("access", "read") != "read":
                written[a["slot"]] = i
    assert checked > 10


def test_routers_and_projections_start_their_followers(shapes):
    program = _ext.step_program("cuda", {**shapes, "layers": shapes["layers"][2:4]}, 2048)
    program = program.program
    labels = [d["label"] for d in _described(program)]
    ways = _ways_to_start(program)
    found = {label for label, (_, starts) in zip(labels, ways, strict=True) if starts}
    assert found == {"delta out", "router", "attention in", "attention merge", "attention out"}
    assert {x for x, (waits, _) in zip(labels, ways, strict=True) if not waits} == {"embedding"}


def test_a_pick_asks_for_the_next_layers_weights(shapes):
    """8 MB of them, or all there are; the last layer has no next."""
    for model_shapes, most in ((shapes, 8 << 20), (_bundled_shapes(), 1 << 20)):
        count = len(model_shapes["layers"])
        program = _ext.step_program("cuda", model_shapes, 256).program
        routes = [d for d in _described(program) if d["label"] == "route"]
        assert len(routes) == count and routes[-1]["grid"][0] == 1
        last = {a["name"]: a.get("value") for a in routes[-1]["arguments"]}
        assert last == {"logits": None, "ids": None, "weights": None, "lines": 0}
        for layer, d in enumerate(routes[:-1]):
            args = {a["name"]: a for a in d["arguments"]}
            mixer = model_shapes["layers"][layer + 1].get("delta")
            part = "linear_attn.in_proj_qkv" if mixer else "self_attn.q_proj"
            assert args["ahead"]["slot"] == f"layers.{layer + 1}.{part}.weight"
            assert args["lines"]["value"] * 128 == min(most, args["ahead"]["bytes"])
            assert args["ahead"]["traffic"] == 0 and d["grid"][0] > 1


def test_a_sweep_may_ask_for_more_or_nothing(shapes):
    few = {**shapes, "layers": shapes["layers"][2:4]}
    for kilobytes, lines in ((0, 0), (1, 8), (4096, 32768), (1 << 20, 65536)):
        program = _ext.step_program("cuda", few, 256, {"ahead": kilobytes}).program
        args = {a["name"]: a.get("value") for a in _dispatch(program, "route")["arguments"]}
        assert args["lines"] == lines and ("ahead" in args) == (lines > 0)


@pytest.mark.parametrize("kinds", ["a", "aaa", "ba", "aab", "bbab"])
def test_one_layer_of_each_kind_runs_all_that_a_model_does(shapes, kinds):
    """The last layer's pick asks for no weights, whichever kind it is of."""
    one = shapes["layers"][3]
    other = one | {"moe": one["moe"] | {"top_k": 4}}
    model = {**shapes, "layers": [{"a": one, "b": other}[kind] for kind in kinds]}
    known = ptx.decode_pipelines(model, (256,)).keys()
    program = _ext.step_program("cuda", model, 256).program
    assert {p["key"] for p in program.pipelines} == set(known)


def test_kernels_depend_on_formats_not_on_sizes():
    found = _ext.linear_pipelines("cuda", "bfloat16", [(64, 64, 4, 64, 1)])
    assert all(p["key"].endswith("_0:4_1:64") for p in found)
    found = _ext.gated_delta_pipelines("cuda", "bfloat16")
    assert {p["key"] for p in found} == {
        "gated_delta_conv_rows_bf16", "gated_delta_scan_bf16_r2", "gated_norm_bf16",
    }  # fmt: skip


def _gemm_keys(rows, columns, experts=256, top_k=8):
    """What a projection and an MoE block of such sizes run."""
    matrix = (columns, 256, 4, 64, 1)
    built = [_ext.linear_program("cuda", "bfloat16", rows, [matrix], True)]
    moe = _moe(columns, experts, top_k)
    built.append(_ext.moe_program("cuda", "bfloat16", rows, moe))
    return [{p["key"] for p in b.program.pipelines} for b in built]


def _moe(columns, experts, top_k):
    routed = dict.fromkeys(("gate", "up"), (64, columns, 4, 64, experts))
    shared = dict.fromkeys(("shared_gate", "shared_up"), (columns, columns, 4, 64, 1))
    rest = {
        "down": (columns, 64, 4, 64, experts),
        "shared_down": (columns, columns, 4, 64, 1),
        "router": (experts, columns, 4, 64, 1),
        "shared_router": (1, columns, 4, 64, 1),
        "top_k": top_k,
        "normalize": True,
    }
    return routed | shared | rest


@pytest.mark.parametrize("experts,top_k", [(256, 8), (8, 2), (64, 1)])
def test_no_size_needs_a_kernel_that_was_not_compiled(experts, top_k):
    linear = _ext.linear_pipelines("cuda", "bfloat16", [(64, 64, 4, 64, 1)], True)
    moe = _ext.moe_pipelines("cuda", "bfloat16", _moe(64, experts, top_k))
    linear, moe = ({p["key"] for p in found} for found in (linear, moe))
    for rows in (1, 6, 16, 17, 32, 33, 100, 256, 512, 700, 1024, 2048, 4096, 20000):
        for columns in (64, 256, 2048, 9216, 12352, 40000):
            a, b = _gemm_keys(rows, columns, experts, top_k)
            assert a <= linear and b <= moe, (rows, columns)


@pytest.mark.parametrize(
    "columns,blocks",
    [
        # rows: rows of a block. The fastest of each in `python -m benchmarks gpu_gemm`.
        (12352, {64: 16, 128: 32, 256: 32, 512: 64, 1024: 64, 2048: 64}),
        (9216, {64: 16, 128: 32, 256: 32, 512: 32, 1024: 64, 2048: 64}),
        (2048, {64: 16, 128: 16, 256: 16, 512: 32, 1024: 64, 2048: 64}),
        (257, {64: 16, 512: 16, 1024: 16, 2048: 16}),
    ],
)
def test_a_gemm_gets_the_block_that_was_fastest_at_its_size(columns, blocks):
    for rows, block in blocks.items():
        (key,) = (k for k in _gemm_keys(rows, columns)[0] if "qgemm" in k)
        assert f"_m{block}_" in key, (rows, key)


def test_experts_get_blocks_of_the_rows_that_they_have():
    for rows, block in {256: 16, 512: 16, 544: 32, 1024: 32, 1568: 64, 2048: 64}.items():
        assert f"mma_moe_down_bf16_m{block}_0:4_1:64" in _gemm_keys(rows, 2048)[1]
