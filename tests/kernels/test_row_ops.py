"""Norm, add, SwiGLU and combine over rows."""

import numpy as np
import pytest

from tests.kernels import reference as ref
from tests.kernels.harness import HOSTS, ceil_div, halves, launch, params
from tests.kernels.reference import assert_close

EPS = 1e-6


@halves
@pytest.mark.parametrize("host", HOSTS)
def test_rms_norm_rows(a, host):
    rng = np.random.default_rng(0)
    for rows, hidden in ((1, 256), (3, 2048), (2, 4), (2, 1028)):
        h, w = (
            a.store(rng.standard_normal((rows, hidden)) * 2),
            a.store(rng.standard_normal(hidden)),
        )
        h[0, :] = 0
        x = np.zeros_like(h)
        launch(f"rms_norm_rows_{a.name}", [h, w, x, hidden, EPS], rows, 256, host)
        assert_close(a.load(x), ref.rms_norm(a.load(h), a.load(w), EPS, a), a.ulp)


@halves
@pytest.mark.parametrize("host", HOSTS)
def test_add_and_swiglu_rows(a, host):
    rng = np.random.default_rng(1)
    for n in (4, 1024, 1028, 5000):
        h, y, out = a.store(rng.standard_normal(n)), a.store(rng.standard_normal(n)), a.empty(n)
        groups = ceil_div(n, 1024)
        launch(f"add_rows_{a.name}", [h, y, out, n], groups, 256, host)
        np.testing.assert_array_equal(a.load(out), a.rnd(a.load(h) + a.load(y)))
        g, u = (rng.standard_normal(n).astype(np.float32) * 4 for _ in range(2))
        g[0], g[1] = -200.0, 200.0
        launch(f"swiglu_rows_{a.name}", [g, u, out, n], groups, 256, host)
        assert_close(a.load(out), a.rnd(ref.silu(g) * u), a.ulp)


@halves
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
        h, out = a.store(rng.standard_normal((tokens, hidden))), a.empty(tokens, hidden)
        buffers = [down, weights, sd, sg, h, out, params(hidden, k, shared, residual)]
        launch(f"moe_combine_{a.name}", buffers, tokens, 256, host)
        before = a.load(h) if residual else None
        want = ref.combine(down, weights, sd if shared else None, sg, before, a)
        assert_close(a.load(out), want, 1.01 * a.ulp)
