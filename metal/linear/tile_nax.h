// tile_simdgroup.h's interface over Metal 4 tensor operations (M5 and later, macOS 26.2 and later).
//
// One simdgroup's tile of 8 TM rows by 8 TN columns as (TM / 2) x (TN / 4) products of 16 x 32 x 16
// by matmul2d, operands in cooperative tensors, fp32 sums. Compile for Metal 4.0.
//
// Lane layout of a 16 x 16 fragment: lane l holds rows r and r + 8, r = (l >> 2 & 4) + (l >> 1 &
// 3), columns c .. c + 3, c = 4 ((l >> 2 & 2) + (l & 1)); a 16 x 32 or 32 x 16 operand is two
// fragments. Apple documents it nowhere; MLX's own tensor kernels rely on it.
//
// Bytes: a product reads (16 + 32) 16 values for 16,384 flops. Registers: 2 TM TN fp32 a lane.
#pragma once

#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>

#include "common.h"

namespace lily {

template <typename A, int TM, int TN>
struct TensorTile {
  static_assert(TM % 2 == 0 && TN % 4 == 0, "a tensor tile is made of 16 x 32 products");
  float sums[TM / 2][TN / 4][16];
  int row;
  int column;

  METAL_FUNC void start(uint lane) {
    row = int((lane >> 2 & 4) + (lane >> 1 & 3));
    column = int(4 * ((lane >> 2 & 2) + (lane & 1)));
#pragma clang loop unroll(full)
    for (int i = 0; i < TM / 2; ++i) {
#pragma clang loop unroll(full)
      for (int j = 0; j < TN / 4; ++j) {
#pragma clang loop unroll(full)
        for (int e = 0; e < 16; ++e) {
          sums[i][j][e] = 0.0f;
        }
      }
    }
  }

  template <int K>
  METAL_FUNC void multiply_nt(
      const threadgroup A* x, int x_stride, const threadgroup A* w, int w_stride) {
    constexpr auto desc = mpp::tensor_ops::matmul2d_descriptor(
        16,
        32,
        16,
        false,
        true,
        false,
        mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
    mpp::tensor_ops::matmul2d<desc, metal::execution_simdgroup> op;
    auto a = op.template get_left_input_cooperative_tensor<A, A, float>();
    auto b = op.template get_right_input_cooperative_tensor<A, A, float>();
    auto c = op.template get_destination_cooperative_tensor<
        metal::remove_addrspace_t<decltype(a)>,
        metal::remove_addrspace_t<decltype(b)>,
        float>();
#pragma clang loop unroll(full)
    for (int i = 0; i < TM / 2; ++i) {
#pragma clang loop unroll(full)
      for (int j = 0; j < TN / 4; ++j) {
#pragma clang loop unroll(full)
        for (int e = 0; e < 16; ++e) {
          c[e] = sums[i][j][e];
        }
        const threadgroup A* xs = x + (16 * i + row) * x_stride + column;
        const threadgroup A* ws = w + (32 * j + row) * w_stride + column;
        for (int k = 0; k < K; k += 16) {
#pragma clang loop unroll(full)
          for (int e = 0; e < 8; ++e) {
            a[e] = xs[e / 4 * 8 * x_stride + k + e % 4];
          }
#pragma clang loop unroll(full)
          for (int e = 0; e < 16; ++e) {
            b[e] = ws[e / 4 * 8 * w_stride + k + e % 4];
          }
          op.run(a, b, c);
        }
#pragma clang loop unroll(full)
        for (int e = 0; e < 16; ++e) {
          sums[i][j][e] = c[e];
        }
      }
    }
  }

  METAL_FUNC void store(threadgroup float* y, int stride) {
#pragma clang loop unroll(full)
    for (int i = 0; i < TM / 2; ++i) {
#pragma clang loop unroll(full)
      for (int j = 0; j < TN / 4; ++j) {
#pragma clang loop unroll(full)
        for (int e = 0; e < 16; ++e) {
          const int r = 16 * i + row + e % 8 / 4 * 8;
          const int c = 32 * j + e / 8 * 16 + column + e % 4;
          y[r * stride + c] = sums[i][j][e];
        }
      }
    }
  }
};

}  // namespace lily
