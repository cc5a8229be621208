// Address spaces, scalars, vectors, constants.
#define __METAL__ 1
#ifndef __METAL_VERSION__
#define __METAL_VERSION__ 310
#endif

#define thread
#define device __global
#define threadgroup __local
#if __METAL_VERSION__ >= 320
#define coherent(scope)  // one interleaving runs at a time
#endif
#define METAL_FUNC inline __attribute__((always_inline))
#define METAL_INTERNAL inline __attribute__((always_inline))
#define __MSL static inline __attribute__((always_inline))
#define is_function_constant_defined(name) __msl_defined_##name
#pragma clang attribute push(__attribute__((msl_variable)), apply_to = variable)

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned long size_t;
typedef long ptrdiff_t;
typedef long intptr_t;
typedef unsigned long uintptr_t;
typedef __fp16 half;
typedef __bf16 bfloat;

#define __MSL_VECTOR(name, type)                            \
  typedef type name##2 __attribute__((ext_vector_type(2))); \
  typedef type name##3 __attribute__((ext_vector_type(3))); \
  typedef type name##4 __attribute__((ext_vector_type(4)));
__MSL_VECTOR(bool, unsigned char)
__MSL_VECTOR(char, char)
__MSL_VECTOR(uchar, uchar)
__MSL_VECTOR(short, short)
__MSL_VECTOR(ushort, ushort)
__MSL_VECTOR(int, int)
__MSL_VECTOR(uint, uint)
__MSL_VECTOR(long, long)
__MSL_VECTOR(ulong, ulong)
__MSL_VECTOR(half, half)
__MSL_VECTOR(float, float)
__MSL_VECTOR(bfloat, bfloat)
#undef __MSL_VECTOR

namespace metal {
using ::bfloat;
using ::bfloat2;
using ::bfloat3;
using ::bfloat4;
using ::bool2;
using ::bool3;
using ::bool4;
using ::char2;
using ::char3;
using ::char4;
using ::float2;
using ::float3;
using ::float4;
using ::half;
using ::half2;
using ::half3;
using ::half4;
using ::int16_t;
using ::int2;
using ::int3;
using ::int32_t;
using ::int4;
using ::int64_t;
using ::int8_t;
using ::intptr_t;
using ::long2;
using ::long3;
using ::long4;
using ::ptrdiff_t;
using ::short2;
using ::short3;
using ::short4;
using ::size_t;
using ::uchar;
using ::uchar2;
using ::uchar3;
using ::uchar4;
using ::uint;
using ::uint16_t;
using ::uint2;
using ::uint3;
using ::uint32_t;
using ::uint4;
using ::uint64_t;
using ::uint8_t;
using ::uintptr_t;
using ::ulong;
using ::ulong2;
using ::ulong3;
using ::ulong4;
using ::ushort;
using ::ushort2;
using ::ushort3;
using ::ushort4;
}  // namespace metal

#define INFINITY __builtin_inff()
#define HUGE_VALF __builtin_inff()
#define NAN __builtin_nanf("")
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LOG10E_F 0.43429448190325182765f
#define M_LN2_F 0.69314718055994530942f
#define M_LN10_F 2.30258509299404568402f
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_PI_4_F 0.78539816339744830962f
#define M_1_PI_F 0.31830988618379067154f
#define M_2_PI_F 0.63661977236758134308f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.70710678118654752440f
#define M_PI_H 3.14159265358979323846h
#define FLT_MAX __FLT_MAX__
#define MAXFLOAT __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define HALF_MAX 6.5504e+4h
#define MAXHALF HALF_MAX
#define HUGE_VALH ((half)__builtin_inff())
#define HALF_MIN 6.103515625e-5h
#define HALF_EPSILON 9.765625e-4h
#define CHAR_BIT 8
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define SHRT_MAX 32767
#define USHRT_MAX 65535
#define LONG_MAX 9223372036854775807L
#define ULONG_MAX 18446744073709551615UL
#define __METAL_MAYBE_FAST_MATH__ 0
#define __METAL_FAST_MATH__ 1
#define __METAL_PRECISE_MATH__ 0
