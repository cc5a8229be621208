"""Norm, add, SwiGLU and combine over rows."""

import numpy as np
import pytest

from tests.kernels import reference_prefill as ref
from tests.kernels.prefill.harness import TYPES, ULP, assert_close, ints, normal, rnd, run, values

EPS = 1e-6
HOSTS = ("cpu", "checked")


def i32(x):
    return np.array([x], np.int32)


@pytest.mark.parametrize("a", TYPES)
@pytest.mark.parametrize("host", HOSTS)
def test_rms_norm_rows(a, host):
    rng = np.random.default_rng(0)
    for rows, hidden in ((1, 256), (3, 2048), (2, 4), (2, 1028)):
        h, w = normal(rng, (rows, hidden), a, 2.0), normal(rng, hidden, a)
        h[0, :] = 0
        x = np.zeros_like(h)
        buffers = [h, w, x, i32(hidden), np.array([EPS], np.float32)]
        run("prefill_ops", f"rms_norm_rows_{a}", buffers, (rows, 1, 1), (256, 1, 1), host)
        want = rnd(ref.rms_norm(values(h, a), values(w, a), EPS), a)
        assert_close(values(x, a), want, ULP[a])


@pytest.mark.parametrize("a", TYPES)
@pytest.mark.parametrize("host", HOSTS)
def test_add_and_swiglu_rows(a, host):
    rng = np.random.default_rng(1)
    for n in (4, 1024, 1028, 5000):
        h, y, out = normal(rng, n, a), normal(rng, n, a), np.zeros(n, np.uint16)
        grid = (-(-n // 1024), 1, 1)
        run("prefill_ops", f"add_rows_{a}", [h, y, out, i32(n)], grid, (256, 1, 1), host)
        np.testing.assert_array_equal(values(out, a), rnd(values(h, a) + values(y, a), a))
        g, u = (rng.standard_normal(n).astype(np.float32) * 4 for _ in range(2))
        g[0], g[1] = -200.0, 200.0
        run("prefill_ops", f"swiglu_rows_{a}", [g, u, out, i32(n)], grid, (256, 1, 1), host)
        assert_close(values(out, a), rnd(ref.silu(g) * u, a), ULP[a])


@pytest.mark.parametrize("a", TYPES)
@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("residual", [True, False])
def test_combine(a, host, shared, residual):
    rng = np.random.default_rng(2)
    for tokens, k, hidden in ((1, 8, 256), (3, 8, 2048), (2, 1, 4)):
        down = rng.standard_normal((tokens, k, hidden)).astype(np.float32)
        weights = rng.uniform(0, 1, (tokens, k)).astype(np.float32)
        sd = rng.standard_normal((tokens, hidden)).astype(np.float32)
        sg = rng.standard_normal(tokens).astype(np.float32) * 3
        h, out = normal(rng, (tokens, hidden), a), np.zeros((tokens, hidden), np.uint16)
        p = ints(hidden, k, shared, residual)
        buffers = [down, weights, sd, sg, h, out, p]
        run("prefill_ops", f"moe_combine_{a}", buffers, (tokens, 1, 1), (256, 1, 1), host)
        want = ref.combine(
            down,
            weights,
            sd if shared else None,
            sg,
            values(h, a) if residual else None,
            lambda x: rnd(x, a),
        )
        assert_close(values(out, a), want, 1.01 * ULP[a])
