// The part that the products of one row share: tiles of weight rows, and the row x in threadgroup
// memory.
#pragma once

#include "quant.h"

namespace lily {

// Units of R rows, loaded before any is used.
template <typename A, int R, int U>
struct Tile {
  uint4 q[R * U];
  A scale[R * U];
  A bias[R * U];
};

// Loads U units of R rows: units first_unit, first_unit + lanes, ... of each row. `bits` above 8
// means unquantized: no scales. `groups` is groups a row.
template <typename A, int R, int U>
METAL_FUNC void load_tile(thread Tile<A, R, U>& t, const device uint* w, const device A* scales,
                          const device A* biases, thread const int* rows, int units, int groups,
                          int bits, int group, int first_unit, int lanes) {
  for (int r = 0; r < R; ++r) {
    for (int u = 0; u < U; ++u) {
      t.q[r * U + u] = unit_at(w, rows[r] * units + first_unit + u * lanes, bits);
    }
  }
  if (bits <= 8) {
    const int codes = unit_codes(bits);
    for (int r = 0; r < R; ++r) {
      for (int u = 0; u < U; ++u) {
        const int g = rows[r] * groups + (first_unit + u * lanes) * codes / group;
        t.scale[r * U + u] = scales[g];
        t.bias[r * U + u] = biases[g];
      }
    }
  }
}

// ---------------------------------------------------------------- the row x in threadgroup memory
//
// Pieces of eight values, kept as A, with the sums over even and odd positions of each piece. A
// lane reads the four (two, one) neighbouring pieces of its unit, so pieces are permuted to keep
// the lanes of one read on different banks.

METAL_FUNC int piece_slot(int piece) {
  return piece ^ ((piece >> 3) & 3);
}

template <typename A>
struct StagedRow {
  threadgroup uint4* words;
  threadgroup float2* sums;
};

// x holds values that A represents exactly.
template <typename A>
METAL_FUNC void store_piece(StagedRow<A> row, int piece, thread const float* x) {
  const int slot = piece_slot(piece);
  row.words[slot] = narrow(x, A(0.0f));
  float2 sums;
  sums.x = (x[0] + x[2]) + (x[4] + x[6]);
  sums.y = (x[1] + x[3]) + (x[5] + x[7]);
  row.sums[slot] = sums;
}

// The part of x that meets unit `unit` of a weight row.
template <typename A, int BITS>
METAL_FUNC void load_unit_x(StagedRow<A> row, int unit, thread UnitX<BITS>& v) {
  constexpr int kPieces = unit_codes(BITS) / 8;
  v.even = 0.0f;
  v.odd = 0.0f;
  for (int i = 0; i < kPieces; ++i) {
    const int slot = piece_slot(unit * kPieces + i);
    widen(row.words[slot], v.x + i * 8, A(0.0f));
    const float2 sums = row.sums[slot];
    v.even += sums.x;
    v.odd += sums.y;
  }
  v.exponent = runtime_exponent(v.even);
}

// acc[r] += the tile's units of row r, times x.
template <typename A, int R, int U, int BITS>
METAL_FUNC void add_tile(thread const Tile<A, R, U>& t, StagedRow<A> x, int first_unit, int lanes,
                         thread float* acc) {
  for (int u = 0; u < U; ++u) {
    UnitX<BITS> v;
    load_unit_x(x, first_unit + u * lanes, v);
    for (int r = 0; r < R; ++r) {
      acc[r] = add_unit(t.q[r * U + u], t.scale[r * U + u], t.bias[r * U + u], v, acc[r]);
    }
  }
}

// Stages K values of h (K a multiple of 8), normalised when `norm`: rnd(h * rsqrt(mean(h^2) + eps)
// * weight), by `simdgroups` simdgroups. A barrier must follow. copy, when not null, gets the
// staged row too. Where `waits`, h is the previous dispatch's result, and the norm's weight, which
// comes from memory while h is in the cache, is asked for before the wait for it.
template <typename A>
METAL_FUNC void stage_pieces(StagedRow<A> row, const device A* h, const device A* weight,
                             device A* copy, int K, bool norm, bool write_copy, float eps,
                             threadgroup float* scratch, uint tid, uint simdgroup, uint lane,
                             int simdgroups, bool waits) {
  const int threads = simdgroups * 32;
  const int pieces = K / 8;
  // The first piece of a thread stays in registers: it is all there is when K <= 8 * threads.
  float x[8];
  float w[8];
  uint4 first_weight;
  const bool has = int(tid) < pieces;
  if (has && norm) {
    first_weight = *(const device uint4*)(weight + tid * 8);
  }
  if (waits) {
    wait_for_previous();
  }
  if (has) {
    load8(h + tid * 8, x);
  }
  float scale = 1.0f;
  if (norm) {
    float squares = 0.0f;
    if (has) {
      for (int i = 0; i < 8; ++i) {
        squares = fma(x[i], x[i], squares);
      }
    }
    for (int p = int(tid) + threads; p < pieces; p += threads) {
      float y[8];
      load8(h + p * 8, y);
      for (int i = 0; i < 8; ++i) {
        squares = fma(y[i], y[i], squares);
      }
    }
    const float sum = threadgroup_sum(squares, scratch, simdgroup, lane, simdgroups);
    scale = precise::rsqrt(sum / float(K) + eps);
  }
  for (int p = int(tid); p < pieces; p += threads) {
    if (p != int(tid)) {
      load8(h + p * 8, x);
    }
    if (norm) {
      if (p == int(tid)) {
        widen(first_weight, w, A(0.0f));
      } else {
        load8(weight + p * 8, w);
      }
      for (int i = 0; i < 8; ++i) {
        x[i] = float(A(x[i] * scale * w[i]));
      }
    }
    store_piece(row, p, x);
    if (write_copy) {
      *(device uint4*)(copy + p * 8) = narrow(x, A(0.0f));
    }
  }
}

// The same by all simdgroups, with the wait and the barrier.
template <typename A>
METAL_FUNC void stage_row(StagedRow<A> row, const device A* h, const device A* weight,
                          device A* copy, int K, bool norm, bool write_copy, float eps,
                          threadgroup float* scratch, uint tid, uint simdgroup, uint lane,
                          int simdgroups) {
  stage_pieces(row, h, weight, copy, K, norm, write_copy, eps, scratch, tid, simdgroup, lane,
               simdgroups, true);
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

}  // namespace lily
