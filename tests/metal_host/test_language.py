# ruff: noqa: E501 (programs on one line)
"""Programs that Metal rejects and programs that it accepts."""

import pytest

from metal.host import CompileError
from metal.host.compiler import Source

PRELUDE = "#include <metal_stdlib>\nusing namespace metal;\n"


def kernel(body, parameters="device float* y [[buffer(0)]]", before=""):
    return f"{before}\n[[kernel]] void k({parameters}) {{\n{body}\n}}\n"


# name -> (program, what the message must say)
REJECTED = {
    "threadgroup pointer to device": (
        kernel(
            "device float* p = t; y[0] = p[0];",
            "device float* y [[buffer(0)]], threadgroup float* t [[threadgroup(0)]]",
        ),
        "cannot initialize a variable of type '__global float \\*'",
    ),
    "device pointer to thread": (
        kernel("float* p = y; p[0] = 1.0f;"),
        "cannot initialize a variable of type 'float \\*'|address-space-spelt",
    ),
    "C cast between spaces": (
        kernel(
            "y[0] = ((device float*)t)[0];",
            "device float* y [[buffer(0)]], threadgroup float* t [[threadgroup(0)]]",
        ),
        "a cast from one address space to another",
    ),
    "thread array where device is wanted": (
        kernel(
            "float a[4] = {0.0f}; g(a); y[0] = a[0];",
            before="void g(device float* x) { x[0] = 1.0f; }",
        ),
        "no matching function",
    ),
    "reference to another space": (
        kernel("g(y[0]);", before="void g(threadgroup float& x) { x = 1.0f; }"),
        "no matching function",
    ),
    "write to constant": (
        kernel(
            "x[0] = 1.0f; y[0] = x[0];",
            "device float* y [[buffer(0)]], constant float* x [[buffer(1)]]",
        ),
        "read-only variable is not assignable",
    ),
    "write through a constant reference": (
        kernel(
            "n = 1; y[0] = float(n);",
            "device float* y [[buffer(0)]], constant int& n [[buffer(1)]]",
        ),
        "cannot assign to",
    ),
    "method for another space": (
        kernel(
            "S s; y[0] = s.get();", before="struct S { float a; float get() device { return a; } };"
        ),
        "address-space|no matching member function",
    ),
    "thread method on a device object": (
        kernel(
            "y[0] = x->set();",
            "device float* y [[buffer(0)]], device S* x [[buffer(1)]]",
            before="struct S { float a; float set() { a = 1.0f; return a; } };",
        ),
        "cannot initialize object parameter",
    ),
    "double variable": (kernel("double d = y[0]; y[0] = float(d);"), "no-double"),
    "double parameter": (
        kernel("y[0] = g(y[0]);", before="float g(double x) { return float(x); }"),
        "no-double",
    ),
    "128-bit integer": (kernel("__int128 n = 1; y[0] = float(n);"), "no-int128"),
    "float to bfloat": (kernel("bfloat b = y[0]; y[0] = float(b);"), "bfloat-conversion"),
    "bfloat to half": (
        kernel(
            "half h = x[0]; y[0] = float(h);",
            "device float* y [[buffer(0)]], device bfloat* x [[buffer(1)]]",
        ),
        "error",
    ),
    "vector of another type": (
        kernel("int4 i = int4(1); y[0] = i;", "device float4* y [[buffer(0)]]"),
        "vector-cast|incompatible type|cannot",
    ),
    "vector with too few parts": (
        kernel("float4 v = float4(1.0f, 2.0f); y[0] = v.x;"),
        "wrong number of components",
    ),
    "kernel that returns a value": (
        "[[kernel]] int k(device float* y [[buffer(0)]]) { return int(y[0]); }\n",
        "kernel-signature",
    ),
    "kernel parameter by value": (
        kernel("y[0] = float(n);", "device float* y [[buffer(0)]], int n"),
        "kernel-signature",
    ),
    "kernel pointer without a space": (
        kernel("y[0] = 1.0f;", "float* y [[buffer(0)]]"),
        "kernel-signature",
    ),
    "buffer index twice": (
        kernel("y[0] = z[0];", "device float* y [[buffer(0)]], device float* z [[buffer(0)]]"),
        "kernel-signature",
    ),
    "buffer index too large": (
        kernel("y[0] = 1.0f;", "device float* y [[buffer(31)]]"),
        "kernel-signature",
    ),
    "vector for a scalar attribute": (
        kernel(
            "y[0] = float(t.x);",
            "device float* y [[buffer(0)]], uint2 t [[thread_index_in_simdgroup]]",
        ),
        "kernel-signature",
    ),
    "signed position": (
        kernel(
            "y[0] = float(t);", "device float* y [[buffer(0)]], int t [[thread_position_in_grid]]"
        ),
        "kernel-signature",
    ),
    "threadgroup variable in a function": (
        kernel("g(); y[0] = 1.0f;", before="void g() { threadgroup float t[4]; t[0] = 1.0f; }"),
        "threadgroup-scope",
    ),
    "threadgroup memory beyond 32 KiB": (
        kernel("threadgroup float t[9000]; t[0] = y[0]; y[1] = t[0];"),
        "threadgroup-limit",
    ),
    "recursion": (
        kernel(
            "y[0] = r(y[0]);", before="float r(float x) { return x > 0.0f ? r(x - 1.0f) : 0.0f; }"
        ),
        "no-recursion",
    ),
    "mutual recursion": (
        kernel(
            "y[0] = a(y[0]);",
            before="float b(float x);\nfloat a(float x) { return x > 1.0f ? b(x) : x; }\nfloat b(float x) { return a(x - 1.0f); }",
        ),
        "no-recursion",
    ),
    "call through a pointer": (
        kernel("float (*f)(float) = g; y[0] = f(y[0]);", before="float g(float x) { return x; }"),
        "no-function-pointer",
    ),
    "virtual function": (
        kernel("V v; y[0] = v.f();", before="struct V { virtual float f() { return 1.0f; } };"),
        "no-virtual",
    ),
    "program-scope variable": (kernel("y[0] = g;", before="float g = 1.0f;"), "constant-scope"),
    "static variable": (kernel("static int s; s++; y[0] = float(s);"), "no-static"),
    "static constant": (
        kernel("static constant float s = 1.0f; y[0] = s;"),
        "no-static",
    ),
    "pointer parameter without a space": (
        kernel(
            "float a[4] = {0.0f}; y[0] = g(a);", before="float g(const float* p) { return p[0]; }"
        ),
        "address-space-spelt",
    ),
    "reference parameter without a space": (
        kernel("float a = 0.0f; g(a); y[0] = a;", before="void g(float& x) { x = 1.0f; }"),
        "address-space-spelt",
    ),
    "template parameter without a space": (
        kernel(
            "float a = 0.0f; g(a); y[0] = a;",
            before="template <typename T> void g(T& x) { x = T(1); }",
        ),
        "address-space-spelt",
    ),
    "local pointer without a space": (
        kernel("float a[4] = {0.0f}; float* p = a + 1; y[0] = *p;"),
        "address-space-spelt",
    ),
    "field without a space": (
        kernel("float a = 1.0f; S s; s.p = &a; y[0] = *s.p;", before="struct S { float* p; };"),
        "address-space-spelt",
    ),
    "array parameter without a space": (
        kernel("float a[4] = {0.0f}; y[0] = g(a);", before="float g(float p[4]) { return p[0]; }"),
        "address-space-spelt",
    ),
    "long long": (kernel("long long n = 1; y[0] = float(n);"), "no-long-long"),
    "device variable": (kernel("device float x = 1.0f; y[0] = x;"), "address-space|error"),
    "new": (kernel("int* p = new int(1); y[0] = float(*p);"), "no-new"),
    "throw": (kernel("if (y[0] > 1.0f) throw 1;"), "no-exceptions|cannot use 'throw'"),
    "goto": (kernel("again: y[0] += 1.0f; if (y[0] < 3.0f) goto again;"), "no-goto"),
    "lambda before Metal 3.2": (
        kernel("auto f = [](float a) { return a; }; y[0] = f(y[0]);"),
        "no-lambda",
    ),
    "variable-length array": (
        kernel(
            "float a[n]; a[0] = 1.0f; y[0] = a[0];",
            "device float* y [[buffer(0)]], constant int& n [[buffer(1)]]",
        ),
        "variable length array|no-vla",
    ),
    "inline assembly": (kernel('asm volatile("nop"); y[0] = 1.0f;'), "no-asm"),
    "compiler builtin": (kernel("y[0] = __builtin_expf(y[0]);"), "function-whitelist"),
    "C library name": (kernel("y[0] = sqrtf(y[0]);"), "function-whitelist|undeclared"),
    "C library declaration": (kernel("y[0] = expf(y[0]);"), "function-whitelist|undeclared"),
    "host internals": (
        kernel("y[0] = metal::__reduce(y[0], metal::__add());"),
        "function-whitelist",
    ),
    "internal Apple name": (kernel("y[0] = __metal_exp(y[0]);"), "function-whitelist"),
    "64-bit simd_sum": (
        kernel("y[0] = simd_sum(y[1]);", "device ulong* y [[buffer(0)]]"),
        "no matching function",
    ),
    "bfloat simd_sum": (
        kernel("y[0] = simd_sum(y[1]);", "device bfloat* y [[buffer(0)]]"),
        "no matching function",
    ),
    "as_type of another size": (kernel("y[0] = as_type<float>(ushort(1));"), "one size"),
    "undeclared name": (kernel("y[0] = foo(y[0]);"), "undeclared"),
    "standard library header": (
        "#include <vector>\n" + kernel("y[0] = 1.0f;"),
        "file not found|error",
    ),
    "statement expression": (kernel("y[0] = ({ float a = y[1]; a * 2.0f; });"), "gnu-extension"),
    "designated initialiser": (
        kernel("S s = {.a = 1.0f}; y[0] = s.a;", before="struct S { float a; };"),
        "cxx20",
    ),
    "missing include": (
        "@[[kernel]] void k(device float* y [[buffer(0)]]) { y[0] = 1.0f; }\n",
        "error",
    ),
    # rules of this project that Metal itself does not have
    "project: instance without host_name": (
        "template <int N> [[kernel]] void k(device float* y [[buffer(0)]]) { y[0] = float(N); }\n"
        "template [[kernel]] void k<3>(device float*);\n",
        "host-name",
    ),
    "project: bfloat literal without a cast": (
        kernel("bfloat b = 1.0f; y[0] = float(b);"),
        "bfloat-conversion",
    ),
    "project: unused variable": (kernel("int unused = 1; y[0] = 1.0f;"), "unused variable"),
    "project: signed and unsigned compared": (
        kernel(
            "if (i < n) y[i] = 1.0f;",
            "device float* y [[buffer(0)]], constant int& n [[buffer(1)]], uint i [[thread_position_in_grid]]",
        ),
        "comparison of integers of different signs",
    ),
}

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
        "uint3 g [[threads_per_threadgroup]], uint2 h [[threads_per_grid]], ushort3 n [[threadgroups_per_grid]], "
        "uint m [[threads_per_simdgroup]], uint s [[simdgroups_per_threadgroup]]",
    ),
    "limit on threads": "[[kernel, max_total_threads_per_threadgroup(256)]] void k(device float* y [[buffer(0)]]) { y[0] = 1.0f; }\n",
    "threadgroup memory": kernel(
        "threadgroup float t[32]; threadgroup half u[2][16]; t[i] = y[i]; u[0][i & 15] = half(y[i]);\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device); y[i] = t[31 - i] + float(u[0][0]);",
        POSITION,
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
    "unions and bit fields": kernel(
        "U u; u.f = y[i]; B b; b.low = u.u; y[i] = float(b.low);",
        POSITION,
        before="union U { float f; uint u; };\nstruct B { uint low : 4; uint high : 28; };",
    ),
}


def check(program, **options):
    text = program[1:] if program.startswith("@") else PRELUDE + program
    return Source(None, source=text, **options).check()


@pytest.mark.parametrize("name", REJECTED)
def test_rejected(name):
    program, message = REJECTED[name]
    with pytest.raises(CompileError, match=message) as raised:
        check(program)
    assert "source.metal:" in str(raised.value)  # file and line


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name):
    assert check(ACCEPTED[name])


@pytest.mark.parametrize("name", [n for n in REJECTED if n.startswith("project: ")])
def test_project_rules_can_be_left_out(name):
    assert check(REJECTED[name][0], rules="metal")


def test_macros_of_the_user_do_not_reach_into_the_standard_headers():
    letters = {chr(c): 1 for c in range(ord("A"), ord("Z") + 1)}
    every = "\n".join(
        ACCEPTED[n].replace("[[kernel]] void k(", f"[[kernel]] void k{i}(")
        for i, n in enumerate(("simd reductions", "simdgroup matrices", "atomics", "vector math"))
    )
    assert check(every, defines={**letters, "MAX": 1, "MIN": 1, "Rows": 1, "Cols": 1})


def test_tables_are_large_enough():
    assert sum(not name.startswith("project: ") for name in REJECTED) >= 30 and len(ACCEPTED) >= 30


def test_tensor_operations_need_metal_4():
    source = "#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>\n" + kernel(
        "y[0] = 1.0f;"
    )
    with pytest.raises(CompileError, match="tensor operations need Metal 4"):
        check(source)
    assert check(source, metal="4.0")


def test_lambdas_come_with_metal_3_2():
    assert check(REJECTED["lambda before Metal 3.2"][0], metal="3.2")


def test_an_error_names_file_line_and_rule():
    with pytest.raises(
        CompileError, match=r"source\.metal:4:\d+: error: Metal has no double \[no-double\]"
    ):
        check(kernel("double d = y[0]; y[0] = float(d);").lstrip("\n"))
