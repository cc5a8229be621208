// moe_decode.h's experts on NVIDIA's tensor cores (gemv_sync.h), for PTX alone. Codes of 4 bits in
// groups of 64.
//
// Layout of threads. moe_gate_up: all kUpSimdgroups simdgroups share a threadgroup's rows, each a slice
// of the hidden size of 128 kUpU values; 8 gate rows and their 8 up rows make the 16 of a product.
// moe_down: a simdgroup a slot as in moe_decode.h, blocks of 16 rows, the whole width at once: kDownU =
// width / 128 is 1, 2 or 4.
//
// Bytes: moe_decode.h's.
//
// Divisibility: hidden = 128 kUpU kUpSimdgroups; kUpSimdgroups kUpR 32 / kUpLanes, the rows of a
// threadgroup, a multiple of 8 and at most 64; kDownR 32 / kDownLanes a multiple of 16; both widths 128
// kDownU.
#pragma once

#include "gemv_sync.h"
#include "moe_decode.h"

namespace lily {

template <typename A, int UNITS>
METAL_FUNC void load_gate_up(thread RowPair<A, UNITS>& t, Rows3<A> gate, Rows3<A> up, int row,
                             uint simdgroup, uint lane) {
  load_row(t, 0, gate.w, gate.scales, gate.biases, row, kHidden / 32, int(simdgroup), lane);
  load_row(t, 1, up.w, up.scales, up.biases, row, kHidden / 32, int(simdgroup), lane);
}

template <typename A, int UNITS>
METAL_FUNC void gate_up_sync_body(Rows3<A> gate, Rows3<A> up, device A* act, StagedRow<A> x,
                                  threadgroup float* scratch, int first_row, int width, int row0,
                                  int rows, uint tid, uint simdgroup, uint lane) {
  const int tiles = rows / 8;
  const int own = row0 + int(lane / 4);
  RowPair<A, UNITS> next;
  load_gate_up(next, gate, up, first_row + min(own, width - 1), simdgroup, lane);
  issue_loads();
  SliceX<A, UNITS> slice;
  load_slice(slice, x, int(simdgroup), lane);
  for (int j = 0; j < tiles; ++j) {
    const RowPair<A, UNITS> now = next;
    if (j + 1 < tiles) {
      load_gate_up(next, gate, up, first_row + min(own + (j + 1) * 8, width - 1), simdgroup, lane);
      issue_loads();
    }
    put_slice(scratch + (j * kUpSimdgroups + int(simdgroup)) * 16, slice_product(now, slice), lane);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int row = row0 + int(tid);
  if (int(tid) < rows && row < width) {
    threadgroup const float* parts = scratch + int(tid) / 8 * kUpSimdgroups * 16 + int(tid) % 8;
    float g = parts[0];
    float u = parts[8];
    for (int i = 1; i < kUpSimdgroups; ++i) {
      g += parts[i * 16];
      u += parts[i * 16 + 8];
    }
    act[row] = A(silu(g) * u);
  }
}

struct SyncUp {
  constexpr static constant int kScratch = 8 * kMaxSimdgroups * 16;

  template <typename A>
  static METAL_FUNC void run(Rows3<A> gate, Rows3<A> up, device A* act, StagedRow<A> x,
                             threadgroup float* scratch, int first_row, int width, int, int block,
                             uint tid, uint simdgroup, uint lane) {
    const int rows = kUpSimdgroups * kUpR * (32 / at_least_1(kUpLanes));
    if (kUpU == 2) {
      gate_up_sync_body<A, 2>(gate, up, act, x, scratch, first_row, width, block * rows, rows, tid,
                              simdgroup, lane);
    }
    if (kUpU == 4) {
      gate_up_sync_body<A, 4>(gate, up, act, x, scratch, first_row, width, block * rows, rows, tid,
                              simdgroup, lane);
    }
  }
};

template <typename A, int UNITS>
METAL_FUNC void down_sync_body(Rows3<A> down, device const A* act, threadgroup float* products,
                               int first_row, int row0, uint lane) {
  const int tiles = kDownR * (32 / at_least_1(kDownLanes)) / 16;
  SliceX<A, UNITS> slice;
  for (int j = 0; j < tiles; ++j) {
    const int row = row0 + j * 16 + int(lane / 4);
    RowPair<A, UNITS> t;
    load_row(t, 0, down.w, down.scales, down.biases, first_row + min(row, kHidden - 1), 4 * UNITS,
             0, lane);
    load_row(t, 1, down.w, down.scales, down.biases, first_row + min(row + 8, kHidden - 1),
             4 * UNITS, 0, lane);
    issue_loads();
    if (j == 0) {
      load_slice(slice, act, lane);
    }
    put_slice(products + j * 16, slice_product(t, slice), lane);
  }
}

struct SyncDown {
  template <typename A>
  static METAL_FUNC void run(Rows3<A> down, device const A* act, threadgroup float* products,
                             int first_row, int row0, int, int, uint lane) {
    if (kDownU == 1) {
      down_sync_body<A, 1>(down, act, products, first_row, row0, lane);
    }
    if (kDownU == 2) {
      down_sync_body<A, 2>(down, act, products, first_row, row0, lane);
    }
    if (kDownU == 4) {
      down_sync_body<A, 4>(down, act, products, first_row, row0, lane);
    }
  }
};

}  // namespace lily
