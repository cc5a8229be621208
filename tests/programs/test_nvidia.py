"""The layer primitives with the kernels of NVIDIA GPUs, on the Metal host; their PTX's index."""

import json

import mlx.core as mx
import pytest
from small import error, only
from test_layers import linear, normal

import lily_mlx
from benchmarks import ledger
from lily_mlx import _ext, kernels, layers, ptx
from lily_mlx.loading import load
from lily_mlx.trace import dims

BF16 = mx.bfloat16


@pytest.fixture(scope="module")
def shapes():
    """Those of the 35B model."""
    return dims(ledger.model().language_model)


@pytest.mark.parametrize("rows", [1, 16, 17, 70])
def test_projections(rows):
    mx.random.seed(rows)
    modules = [linear(n, 256, BF16) for n in (1, 40, 130)]
    x = normal((1, rows, 256), BF16)
    wanted = layers.project(x, *modules)
    mx.eval(wanted)
    with only("gemv_rows" if rows <= 16 else "qgemm", nvidia=True):
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
        with kernels.metal_host(nvidia=True):
            got = model.layers[layer][field](x)
            mx.eval(got)
        # Nine rows in ten: one may have two experts so close that rounding decides between them.
        a, b = (y.astype(mx.float32).reshape(2 * tokens, -1) for y in (got, wanted))
        rows = mx.sort(mx.linalg.norm(a - b, axis=-1) / mx.linalg.norm(b, axis=-1))
        assert rows[int(0.9 * (rows.size - 1))] < 0.03
    names = {row[1] for row in _ext.metal_host_counts()}
    assert names >= {"gdn_scan", "gemv_rows" if 2 * tokens <= 16 else "qgemm"}
    assert names.isdisjoint({"gemv", "gdn_step"})


def test_a_chunk_uses_tensor_cores_and_has_no_conflicts(shapes):
    few = {**shapes, "layers": shapes["layers"][2:4]}
    for tokens in (20, 600, 2048):
        program = _ext.prefill_program(few, tokens, scan="apart", unit="nvidia").program
        assert program.check_hazards() == []
        assert any(p["file"].endswith("_sync.metal") for p in program.pipelines)
        assert all("simdgroup" not in p["kernel"] for p in program.pipelines)


def test_the_index_covers_any_number_of_rows(shapes):
    known = set(ptx.prefill_pipelines(shapes))
    moe = shapes["layers"][0]["moe"]
    delta = shapes["layers"][0]["delta"]
    for rows in (*range(1, 40), 63, 64, 65, 127, 128, 129, 300, 511, 2048, 4096, 9000):
        few = rows <= 16
        matrices = [delta["qkv"], delta["z"], delta["b"], delta["a"]]
        programs = [
            _ext.moe_program("bfloat16", "moe_rows" if few else "moe_gemm", rows, moe, "nvidia")
        ]
        for wide in (False, True):
            kernel = "gemv_rows" if few else "qgemm"
            programs.append(
                _ext.project_program("bfloat16", kernel, rows, matrices, wide, "nvidia")
            )
        programs.append(_ext.embed_program("bfloat16", rows, shapes["embedding"]))
        needed = {p["key"] for b in programs for p in b.program.pipelines}
        assert needed <= known, rows


def test_the_index_covers_any_capacity(shapes):
    known = set(ptx.decode_pipelines(shapes, ptx.CAPACITIES))
    ways = set()
    for capacity in (256, 1024, 1280, 6144, 6400, 24576, 24832, 98304, 98560, 262144):
        program = _ext.decode_program(shapes, capacity, ptx.NVIDIA).program
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
    bundled = dims(load(str(lily_mlx.BUNDLED_MODEL), lazy=True)[0].language_model)
    assert _threads(bundled, "router") < 512


def _dispatch(program, label):
    described = map(program.describe, range(len(program)))
    return next(d for d in described if d["label"] == label)


def _threads(shapes, label):
    program = _ext.decode_program(shapes, 256, ptx.NVIDIA).program
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
        _ext.decode_program(shapes, 256, ptx.NVIDIA | tiles)


def test_the_experts_are_known_before_their_kernels_wait(shapes):
    """moe_gate_up and moe_down ask for what moe_route wrote before they wait for the one before."""
    program = _ext.decode_program(shapes, 256, ptx.NVIDIA).program
    labels = [program.describe(i)["label"] for i in range(len(program))]
    at = labels.index("route")
    assert labels[at - 1 : at + 3] == ["router", "route", "experts up", "experts down"]


def test_kernels_depend_on_formats_not_on_sizes():
    names = ptx.layer_pipelines("project", "bfloat16", frozenset({(4, 64)}))
    assert all(key.endswith("_0:4_1:64") for key in names)
    assert ptx.layer_pipelines("gated_delta", "bfloat16").keys() == {
        "conv_prefill_bf16", "gdn_scan_bf16_r2", "gated_norm_bf16",
    }  # fmt: skip


def _gemm_keys(rows, columns, experts=256, top_k=8):
    """What a projection and an MoE block of such sizes run."""
    matrix = (columns, 256, 4, 64, 1)
    kernel = "gemv_rows" if rows <= 16 else "qgemm"
    built = [_ext.project_program("bfloat16", kernel, rows, [matrix], True, ptx.UNIT)]
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
    kernel = "moe_rows" if rows <= 16 else "moe_gemm"
    built.append(_ext.moe_program("bfloat16", kernel, rows, routed | shared | rest, ptx.UNIT))
    return [{p["key"] for p in b.program.pipelines} for b in built]


@pytest.mark.parametrize("experts,top_k", [(256, 8), (8, 2), (64, 1)])
def test_no_size_needs_a_kernel_that_was_not_compiled(experts, top_k):
    formats = frozenset({(4, 64)})
    project = ptx.layer_pipelines("project", "bfloat16", formats).keys()
    moe = ptx.layer_pipelines("moe", "bfloat16", formats, experts, top_k).keys()
    for rows in (1, 6, 16, 17, 32, 33, 100, 256, 512, 700, 1024, 2048, 4096, 20000):
        for columns in (64, 256, 2048, 9216, 12352, 40000):
            a, b = _gemm_keys(rows, columns, experts, top_k)
            assert a <= project and b <= moe, (rows, columns)


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
        assert f"sync_moe_down_bf16_m{block}_0:4_1:64" in _gemm_keys(rows, 2048)[1]
