# ruff: noqa: E501 (programs on one line)
"""Programs that Metal, or this project, rejects."""


def kernel(body, parameters="device float* y [[buffer(0)]]", before=""):
    return f"{before}\n[[kernel]] void k({parameters}) {{\n{body}\n}}\n"


CONSTANTS = (
    "constant int n [[function_constant(0)]];\nconstant bool flag [[function_constant(1)]];\n"
)

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
    "threadgroup variable with a value": (
        kernel("threadgroup float t = 1.0f; y[0] = t;"),
        "threadgroup-initialiser",
    ),
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
    # a function constant is known when a pipeline is made, not when the source is compiled
    "function constant as array size": (
        kernel("float a[n]; a[0] = y[0]; y[0] = a[0];", before=CONSTANTS),
        "variable length array|no-vla",
    ),
    "array size from a function constant": (
        kernel(
            "float a[m]; a[0] = y[0]; y[0] = a[0];", before=CONSTANTS + "constant int m = n + 1;"
        ),
        "variable length array|no-vla",
    ),
    "function constant as template argument": (
        kernel(
            "y[0] = g<n>();",
            before=CONSTANTS + "template <int N> float g() { return float(N); }",
        ),
        "no matching function",
    ),
    "function constant as case": (
        kernel("switch (int(y[0])) { case n: y[0] = 1.0f; break; }", before=CONSTANTS),
        "not a constant expression",
    ),
    "function constant in if constexpr": (
        kernel("if constexpr (flag) { y[0] = 1.0f; }", before=CONSTANTS),
        "not a constant expression",
    ),
    "function constant in static_assert": (
        kernel('static_assert(n >= 0, ""); y[0] = 1.0f;', before=CONSTANTS),
        "not an integral constant expression",
    ),
    "constexpr without constant": (
        kernel("y[0] = float(n);", before="constexpr int n = 3;"),
        "constant-scope",
    ),
    "static member without constant": (
        kernel("y[0] = float(S::n);", before="struct S { static constexpr int n = 3; };"),
        "constant-scope",
    ),
    "max of float and int": (kernel("int n = 2; y[0] = max(y[0], n);"), "deleted function"),
    "min of uint and int": (
        kernel("uint n = 2u; int m = 3; y[0] = float(min(n, m));"),
        "deleted function",
    ),
    "clamp of float and int": (kernel("y[0] = clamp(y[0], 0, 1);"), "no matching function"),
    "kernel called by a kernel": (
        "[[kernel]] void other(device float* y [[buffer(0)]]) { y[0] = 1.0f; }\n"
        + kernel("other(y);"),
        "kernel-call",
    ),
    "host_name twice": (
        "template <int N> [[kernel]] void f(device float* y [[buffer(0)]]) { y[0] = float(N); }\n"
        'template [[host_name("f3")]] [[kernel]] decltype(f<3>) f<3>;\n'
        'template [[host_name("f3")]] [[kernel]] decltype(f<4>) f<4>;\n',
        "kernel-name",
    ),
    "overloaded kernels": (
        kernel("y[0] = 2.0f;")
        + kernel("y[0] = x[0];", "device float* y [[buffer(0)]], device float* x [[buffer(1)]]"),
        "kernel-name",
    ),
    "32 buffers": (
        kernel("y0[0] = 1.0f;", ", ".join(f"device float* y{i}" for i in range(32))),
        "31 buffers",
    ),
    "positions of different sizes": (
        kernel(
            "y[0] = float(i + g.x);",
            "device float* y [[buffer(0)]], uint i [[thread_position_in_grid]], "
            "uint3 g [[threadgroup_position_in_grid]]",
        ),
        "one number of components",
    ),
    "limit on threads that is no constant": (
        "constant int n [[function_constant(0)]];\n"
        "[[kernel, max_total_threads_per_threadgroup(n)]] void k(device float* y [[buffer(0)]]) { y[0] = 1.0f; }\n",
        "a limit on threads",
    ),
    "cast to a pointer without a space": (
        kernel("int a[4] = {0}; y[0] = ((float*)a)[1];"),
        "address-space-spelt",
    ),
    "reinterpret_cast without a space": (
        kernel("int a[4] = {0}; y[0] = reinterpret_cast<float*>(a)[1];"),
        "address-space-spelt",
    ),
    "typedef without a space": (
        kernel("float a[4] = {0.0f}; P p = a; y[0] = p[1];", before="typedef float* P;"),
        "address-space-spelt",
    ),
    "alias without a space": (
        kernel("float a[4] = {0.0f}; P p = a; y[0] = p[1];", before="using P = float*;"),
        "address-space-spelt",
    ),
    "returned pointer without a space": (
        kernel(
            "float a[4] = {0.0f}; y[0] = g(a)[1];",
            before="METAL_FUNC float* g(thread float* p) { return p; }",
        ),
        "address-space-spelt",
    ),
    "returned reference without a space": (
        kernel(
            "float a[4] = {0.0f}; y[0] = g(a);", before="float& g(thread float* p) { return p[0]; }"
        ),
        "address-space-spelt",
    ),
    "thread reference to constant memory": (
        kernel(
            "y[0] = ((thread float&)x);",
            "device float* y [[buffer(0)]], constant float& x [[buffer(1)]]",
        ),
        "a cast from one address space to another",
    ),
    "long double": (kernel("long double d = 1; y[0] = float(d);"), "no-double"),
    "long double literal": (kernel("y[0] = float(1.0L);"), "no-double"),
    "unsigned 128-bit integer": (
        kernel("unsigned __int128 n = 1; y[0] = float(n);"),
        "no-int128",
    ),
    "complex number": (kernel("_Complex float c = 1.0f; y[0] = __real__ c;"), "no-complex"),
    "_BitInt": (kernel("_BitInt(17) n = 1; y[0] = float(n);"), "no-bitint"),
    "vector of five": (
        kernel("vec<float, 5> v = vec<float, 5>(1.0f); y[0] = v[0];"),
        "vector-size",
    ),
    "atomic addition to ulong": (
        kernel(
            "atomic_fetch_add_explicit(n, 1ul, memory_order_relaxed); y[0] = 1.0f;",
            "device float* y [[buffer(0)]], device atomic_ulong* n [[buffer(1)]]",
        ),
        "no matching function",
    ),
    "atomic addition to bool": (
        kernel(
            "atomic_fetch_add_explicit(n, true, memory_order_relaxed); y[0] = 1.0f;",
            "device float* y [[buffer(0)]], device atomic_bool* n [[buffer(1)]]",
        ),
        "no matching function",
    ),
    "copied atomic": (
        kernel(
            "atomic_uint m = n[0]; y[0] = float(atomic_load_explicit(&m, memory_order_relaxed));",
            "device float* y [[buffer(0)]], device atomic_uint* n [[buffer(1)]]",
        ),
        "no matching constructor",
    ),
    "assigned atomic": (
        kernel(
            "n[0] = n[1]; y[0] = 1.0f;",
            "device float* y [[buffer(0)]], device atomic_uint* n [[buffer(1)]]",
        ),
        "no viable overloaded '='",
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
    "project: float added to bfloat": (
        kernel("b[0] += y[0];", "device float* y [[buffer(0)]], device bfloat* b [[buffer(1)]]"),
        "bfloat-conversion",
    ),
    "project: half and bfloat": (
        kernel(
            "y[0] = float(h[0] + b[0]);",
            "device float* y [[buffer(0)]], device bfloat* b [[buffer(1)]], device half* h [[buffer(2)]]",
        ),
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
