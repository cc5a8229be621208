# ruff: noqa: E501 (programs on one line)
"""Programs that Metal accepts."""

from .rejected import CONSTANTS, kernel

POSITION = "device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]"
ACCEPTED = {
    "empty kernel": kernel("y[0] = 1.0f;"),
    "old kernel keyword": "kernel void k(device float* y [[buffer(0)]]) { y[0] = 1.0f; }\n",
    "buffers without an index": kernel("y[0] = x[0];", "device const float* x, device float* y"),
    "pointers to vectors": kernel(
        "y[i] = x[i] * 2.0f + float4(z[i]);",
        "device const float4* x [[buffer(0)]], device float4* y [[buffer(1)]], device const half4* z [[buffer(2)]], "
        "uint i [[thread_position_in_grid]]",
    ),
    "bfloat vectors": kernel(
        "bfloat4 v = x[i]; y[i] = bfloat4(float4(v) * 2.0f);",
        "device const bfloat4* x [[buffer(0)]], device bfloat4* y [[buffer(1)]], uint i [[thread_position_in_grid]]",
    ),
    "struct argument": kernel(
        "y[0] = p.scale * float(p.rows);",
        "device float* y [[buffer(0)]], constant P& p [[buffer(1)]]",
        before="struct P { int rows; float scale; };",
    ),
    "struct copies between spaces": kernel(
        "S s = x[0]; y[0] = s; threadgroup S t[2]; t[0] = x[1]; S u = t[0]; y[1] = u; y[2] = x[2];",
        "device const S* x [[buffer(0)]], device S* y [[buffer(1)]]",
        before="struct S { float a; int b[3]; };",
    ),
    "methods for two spaces": kernel(
        "S s; s.a = x->get() + s.get(); y[0] = s.a;",
        "device float* y [[buffer(0)]], device const S* x [[buffer(1)]]",
        before="struct S { float a = 0.0f; float get() const { return a; } float get() const device { return a; } };",
    ),
    "overloads by space": kernel(
        "float t[1] = {1.0f}; y[0] = g(t) + g(y);",
        before="float g(const thread float* p) { return p[0]; }\nfloat g(const device float* p) { return 2.0f * p[0]; }",
    ),
    "template kernel instance": (
        "template <typename T, int N> [[kernel]] void f(device T* y [[buffer(0)]]) { y[0] = T(N); }\n"
        'template [[host_name("f_half")]] [[kernel]] void f<half, 3>(device half*);\n'
    ),
    "instance by decltype": (
        "template <int N> [[kernel]] void f(device float* y [[buffer(0)]]) { y[0] = float(N); }\n"
        'template [[host_name("f3")]] [[kernel]] decltype(f<3>) f<3>;\n'
    ),
    "function constants": kernel(
        "if (flag) y[0] = scale; else y[0] = float(count);",
        before="constant bool flag [[function_constant(0)]];\nconstant int count [[function_constant(1)]];\n"
        "constant float scale [[function_constant(2)]];\nconstant bool both = flag && count > 1;",
    ),
    "function constant with a default": kernel(
        "y[0] = float(size);",
        before="constant uint given [[function_constant(0)]];\n"
        "constant uint size = is_function_constant_defined(given) ? given : 4u;",
    ),
    "optional buffer": kernel(
        "y[0] = has_x ? x[0] : 0.0f;",
        "device float* y [[buffer(0)]], device const float* x [[buffer(1), function_constant(has_x)]]",
        before="constant bool has_x [[function_constant(7)]];",
    ),
    "all positions": kernel(
        "y[0] = float(a.x + b.y + c.z + d + e + f + g.x + h.x + n.y + m + s);",
        "device float* y [[buffer(0)]], uint3 a [[thread_position_in_grid]], uint3 b [[thread_position_in_threadgroup]], "
        "uint3 c [[threadgroup_position_in_grid]], uint d [[thread_index_in_threadgroup]], "
        "ushort e [[thread_index_in_simdgroup]], uint f [[simdgroup_index_in_threadgroup]], "
        "uint3 g [[threads_per_threadgroup]], uint3 h [[threads_per_grid]], ushort3 n [[threadgroups_per_grid]], "
        "uint m [[threads_per_simdgroup]], uint s [[simdgroups_per_threadgroup]]",
    ),
    "limit on threads": "[[kernel, max_total_threads_per_threadgroup(256)]] void k(device float* y [[buffer(0)]]) { y[0] = 1.0f; }\n",
    "threadgroup memory": kernel(
        "threadgroup float t[32]; threadgroup half u[2][16]; t[i] = y[i]; u[0][i & 15] = half(y[i]);\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device); y[i] = t[31 - i] + float(u[0][0]);",
        POSITION,
    ),
    "threadgroup arrays with a value": kernel(
        "threadgroup float t[32] = {0}; threadgroup half u[n] = {}; t[i] = y[i]; u[i] = half(y[i]);\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup); y[i] = t[31 - i] + float(u[31 - i]); g(t);",
        POSITION,
        before="constexpr constant int n = 32;\nvoid g(threadgroup float* t) { threadgroup float* p = t + 1; *p = 0.0f; }",
    ),
    "threadgroup argument": kernel(
        "t[i] = y[i]; threadgroup_barrier(mem_flags::mem_threadgroup); y[i] = t[31 - i];",
        POSITION + ", threadgroup float* t [[threadgroup(0)]]",
    ),
    "simd reductions": kernel(
        "float v = y[i]; uint u = uint(v); half h = half(v);\n"
        "y[i] = simd_sum(v) + simd_max(v) + simd_min(v) + simd_product(v) + float(simd_sum(h)) + float(simd_max(int(u)))\n"
        " + float(simd_and(u) + simd_or(u) + simd_xor(u)) + simd_prefix_inclusive_sum(v) + simd_prefix_exclusive_sum(v)\n"
        " + simd_sum(float2(v, v)).x;",
        POSITION,
    ),
    "simd shuffles": kernel(
        "float v = y[i]; uint2 p = uint2(i, i);\n"
        "y[i] = simd_shuffle(v, 3) + simd_shuffle_xor(v, 1) + simd_shuffle_down(v, 2) + simd_shuffle_up(v, 2)\n"
        " + simd_shuffle_rotate_down(v, 1) + simd_shuffle_and_fill_down(v, 0.0f, 1) + simd_broadcast(v, 0)\n"
        " + simd_broadcast_first(v) + float(simd_shuffle(p, 1).y) + quad_sum(v) + quad_broadcast(v, 1);",
        POSITION,
    ),
    "votes": kernel(
        "bool p = y[i] > 0.0f;\n"
        "y[i] = float(simd_any(p)) + float(simd_all(p)) + float(ulong(simd_ballot(p)) & 1ul) + float(simd_is_first());",
        POSITION,
    ),
    "simdgroup matrices": kernel(
        "simdgroup_matrix<float, 8, 8> c(0.0f); simdgroup_half8x8 a; simdgroup_matrix<bfloat, 8, 8> b;\n"
        "simdgroup_load(a, h, 8); simdgroup_load(b, f, 8, ulong2(0, 0), true); simdgroup_multiply_accumulate(c, a, b, c);\n"
        "simdgroup_store(c, y, 8); threadgroup float t[64]; simdgroup_store(c, t, 8); c.thread_elements()[0] = 1.0f;",
        "device float* y [[buffer(0)]], device const half* h [[buffer(1)]], device const bfloat* f [[buffer(2)]]",
    ),
    "atomics": kernel(
        "threadgroup atomic_uint t[4]; atomic_store_explicit(&t[i & 3], 0u, memory_order_relaxed);\n"
        "atomic_fetch_add_explicit(&t[0], 1u, memory_order_relaxed); atomic_fetch_max_explicit(a, 3, memory_order_relaxed);\n"
        "atomic_fetch_add_explicit(f, 1.0f, memory_order_relaxed); y[i] = float(atomic_load_explicit(&t[0], memory_order_relaxed));\n"
        "int expected = 0; atomic_compare_exchange_weak_explicit(a, &expected, 1, memory_order_relaxed, memory_order_relaxed);\n"
        "y[i] += float(atomic_exchange_explicit(a, 2, memory_order_relaxed));",
        POSITION + ", device atomic_int* a [[buffer(1)]], device atomic_float* f [[buffer(2)]]",
    ),
    "math": kernel(
        "float v = y[i]; half h = half(v);\n"
        "y[i] = exp(v) + log(v) + sqrt(v) + rsqrt(v) + precise::exp(v) + fast::exp(v) + metal::precise::tanh(v) + pow(v, 2.0f)\n"
        " + fma(v, v, v) + clamp(v, 0.0f, 1.0f) + float(exp(h)) + abs(v) + fabs(v) + floor(v) + ceil(v) + round(v) + trunc(v)\n"
        " + min(v, 1.0f) + max(v, 1.0f) + fmin(v, 1.0f) + sin(v) + cos(v) + exp2(v) + log2(v) + sign(v) + saturate(v)\n"
        " + mix(v, 1.0f, 0.5f) + copysign(v, -1.0f) + fract(v) + float(isnan(v)) + float(isinf(v)) + erf_like(v);",
        POSITION,
        before="inline float erf_like(float x) { return 1.0f / (1.0f + metal::exp(-x)); }",
    ),
    "vector math": kernel(
        "float4 v = float4(y[i], 1.0f, float2(2.0f, 3.0f)); v = exp(v) + min(v, float4(1.0f)) + clamp(v, 0.0f, 1.0f);\n"
        "v.xy = v.zw * 2.0f; y[i] = dot(v, float4(1.0f)) + length(v.xyz) + select(v, float4(0.0f), v > 1.0f).x\n"
        " + float(any(v > 2.0f)) + float(all(v < 3.0f));",
        POSITION,
    ),
    "integers": kernel(
        "uint u = i; int s = int(i); ulong w = ulong(u) << 32;\n"
        "y[i] = float(popcount(u) + clz(u) + ctz(u) + reverse_bits(u) + rotate(u, 3u) + extract_bits(u, 4, 8) + mulhi(u, u)\n"
        " + insert_bits(u, 3u, 2, 4)) + float(abs(s) + min(s, 3) + max(u, 3u) + clamp(s, 0, 7) + int(popcount(w)));",
        POSITION,
    ),
    "reinterpretation": kernel(
        "uint u = as_type<uint>(y[i]); half2 h = as_type<half2>(u); y[i] = as_type<float>(u << 16) + float(h.x)\n"
        " + float(as_type<bfloat>(ushort(u))) + float(as_type<uchar4>(u).w);",
        POSITION,
    ),
    "half literals and casts": kernel(
        "half h = 1.0h; h += half(y[i]) * 0.5h; bfloat b = bfloat(y[i]); y[i] = float(h) + float(b);",
        POSITION,
    ),
    "program-scope tables": kernel(
        "y[i] = table[i & 3] + float(counts[i & 1]);",
        POSITION,
        before="constant float table[4] = {1.0f, 2.0f, 3.0f, 4.0f};\nconstexpr constant int counts[2] = {1, 2};",
    ),
    "if constexpr and traits": (
        "template <typename T> float g(T x) {\n  if constexpr (is_same_v<T, float>) { return x; } else { return float(x); }\n}\n"
        + kernel(
            'static_assert(numeric_limits<half>::max() > 1.0h, ""); y[i] = g(y[i]) + g(half(1.0h)) + float(sizeof(float4));',
            POSITION,
        )
    ),
    "references to thread memory": kernel(
        "float a = y[i]; float b[4] = {a, a, a, a}; bump(a); fill(b); y[i] = a + b[3];",
        POSITION,
        before="void bump(thread float& x) { x += 1.0f; }\nvoid fill(thread float* p) { p[3] = 2.0f; }\n",
    ),
    "parameters from constant memory": kernel(
        "y[i] = float(shape[0] * at(shape, 1));",
        POSITION + ", constant int* shape [[buffer(1)]]",
        before="inline int at(constant int* p, int n) { return p[n]; }",
    ),
    "unrolled loops": kernel(
        "#pragma unroll\nfor (int j = 0; j < 4; j++) { y[i * 4 + uint(j)] = float(j); }", POSITION
    ),
    "device references": kernel(
        "set(y[i]);", POSITION, before="void set(device float& x) { x = 1.0f; }"
    ),
    "spaces spelt": kernel(
        "float a[4] = {0.0f}; thread float* p = a; const thread float& r = a[1]; auto& q = a[2]; S s; s.p = p;\n"
        "for (auto v : a) { y[i] += v; } y[i] = g(p) + r + q + s.p[0] + h(a);",
        POSITION,
        before="struct S { thread float* p; };\ntemplate <typename T> T g(const thread T* p) { return p[0]; }\n"
        "float h(thread float p[4]) { return p[0]; }",
    ),
    "struct assigned to a struct": kernel(
        "S a = x[0], b = x[1]; a = b; y[0] = a; x[1] = x[0]; a = S(); threadgroup S t[2]; t[0] = a; t[1] = t[0]; y[1] = t[1];",
        "device S* y [[buffer(0)]], device S* x [[buffer(1)]]",
        before="struct S { float a; int b[3]; };",
    ),
    "limit on threads from a template": (
        "template <int N, int M> [[kernel, max_total_threads_per_threadgroup(N * M * 32)]] void f(device float* y [[buffer(0)]]) { y[0] = float(N + M); }\n"
        'template [[host_name("f4")]] [[kernel]] decltype(f<2, 2>) f<2, 2>;\n'
    ),
    "infinity and its kin": kernel(
        "y[0] = -INFINITY; y[1] = NAN; y[2] = HUGE_VALF; y[3] = MAXFLOAT; y[4] = float(MAXHALF) + float(HUGE_VALH);"
    ),
    "filled simdgroup matrix": kernel(
        "simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8>(0.0f); simdgroup_store(m, y, 8);\n"
        "simdgroup_half8x8 n = make_filled_simdgroup_matrix<half, 8, 8>(0.0h); y[0] = float(n.thread_elements()[0]);"
    ),
    "constexpr function constant": kernel(
        "y[0] = float(n);", before="constexpr constant int n [[function_constant(0)]];"
    ),
    "function constant in a branch": kernel(
        "if (flag && n > 2) { y[0] = float(n); }", before=CONSTANTS
    ),
    "constants as constant expressions": kernel(
        "float a[n] = {0.0f}; if constexpr (S::m == 2) { a[0] = 1.0f; } y[0] = a[0];",
        before="constexpr constant int n = 3;\nstruct S { static constant constexpr int m = 2; };",
    ),
    "pointers returned and cast with their space": kernel(
        "float a[4] = {0.0f}; P p = g(a); y[0] = ((thread int*)p)[1] + reinterpret_cast<device int*>(y)[1];",
        before="typedef thread float* P;\nMETAL_FUNC thread float* g(thread float* p) { return p + 1; }",
    ),
    "min of one type": kernel(
        "int n = 2; uint u = 3u; y[0] = min(y[0], float(n)) + float(max(n, int(u))) + float(min(u, 7u));"
    ),
    "vector of eight": kernel("vec<float, 8> v = vec<float, 8>(1.0f); y[0] = v[7];"),
    "unions and bit fields": kernel(
        "U u; u.f = y[i]; B b; b.low = u.u; y[i] = float(b.low);",
        POSITION,
        before="union U { float f; uint u; };\nstruct B { uint low : 4; uint high : 28; };",
    ),
}
