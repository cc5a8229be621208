#include <algorithm>
#include <cmath>

#include "reference/functions.h"
#include "reference/micro.h"
#include "reference/ops.h"
#include "reference/parallel.h"

namespace lily::reference {
namespace {

// Keys of one partial result, and of one pass of scores. Fixed, so that the order of summation is
// too.
constexpr int kKeyChunk = 1024;
constexpr int kKeyBlock = 64;

// The partial softmax of one chunk of keys for the heads that share a KV head.
struct Partial {
  std::vector<float> top, total, out;  // [heads], [heads], [heads, D]

  void reset(int heads, int D) {
    top.assign(heads, -kInfinity);
    total.assign(heads, 0.0f);
    out.assign(int64_t(heads) * D, 0.0f);
  }

  // Adds the keys [begin, end) with scores s[heads, kKeyBlock]; masked ones are -inf.
  void step(Type t, const void* values, int64_t value_row, int count, float* s, int heads, int D) {
    std::vector<float> scale(heads);
    for (int h = 0; h < heads; ++h) {
      float* row = s + int64_t(h) * kKeyBlock;
      const float high = std::max(top[h], *std::max_element(row, row + count));
      if (high == -kInfinity) {
        scale[h] = 1.0f;
        std::fill_n(row, count, 0.0f);
        continue;
      }
      scale[h] = std::exp(top[h] - high);
      float sum = 0.0f;
      for (int j = 0; j < count; ++j) {
        row[j] = std::exp(row[j] - high);
        sum += row[j];
      }
      total[h] = total[h] * scale[h] + sum;
      top[h] = high;
    }
    micro().mix(t, values, value_row, count, s, kKeyBlock, scale.data(), heads, D, out.data());
  }

  void merge(const Partial& other, int heads, int D) {
    for (int h = 0; h < heads; ++h) {
      const float high = std::max(top[h], other.top[h]);
      if (high == -kInfinity) {
        continue;
      }
      const float mine = std::exp(top[h] - high), theirs = std::exp(other.top[h] - high);
      total[h] = total[h] * mine + other.total[h] * theirs;
      for (int d = 0; d < D; ++d) {
        const int64_t i = int64_t(h) * D + d;
        out[i] = out[i] * mine + other.out[i] * theirs;
      }
      top[h] = high;
    }
  }
};

}  // namespace

void attention_prepare(const AttentionShape& s, const void* q_gate, const void* k,
                       const void* q_norm, const void* k_norm, const int32_t* offsets, void* q,
                       void* keys, int64_t key_head_stride) {
  const int half = s.rotary / 2;
  std::vector<float> frequency(half);
  for (int i = 0; i < half; ++i) {
    frequency[i] = static_cast<float>(std::pow(double(s.base), -2.0 * i / s.rotary));
  }
  const int heads = s.H + s.Hkv;
  parallel_ranges(int64_t(s.B) * s.T, 8 * heads * s.D, [&](size_t begin, size_t end) {
    std::vector<float> x(s.D), cosine(half), sine(half);
    for (size_t r = begin; r < end; ++r) {
      const int b = static_cast<int>(r / s.T), row = static_cast<int>(r % s.T);
      const float position = static_cast<float>(offsets[b] + row);
      for (int i = 0; i < half; ++i) {
        cosine[i] = std::cos(position * frequency[i]);
        sine[i] = std::sin(position * frequency[i]);
      }
      for (int h = 0; h < heads; ++h) {
        const bool is_q = h < s.H;
        const int head = is_q ? h : h - s.H;
        const void* from = is_q ? at(s.t, q_gate, (int64_t(r) * s.H + head) * 2 * s.D)
                                : at(s.t, k, (int64_t(r) * s.Hkv + head) * s.D);
        const void* weight = is_q ? q_norm : k_norm;
        for (int i = 0; i < s.D; ++i) {
          x[i] = load(s.t, from, i);
        }
        const float scale = 1.0f / std::sqrt(sum_of_squares(x.data(), s.D) / s.D + s.eps);
        for (int i = 0; i < s.D; ++i) {
          x[i] = x[i] * scale * load(s.norm_type, weight, i);
        }
        for (int i = 0; i < half; ++i) {
          const float x0 = x[i], x1 = x[i + half];
          x[i] = x0 * cosine[i] - x1 * sine[i];
          x[i + half] = x0 * sine[i] + x1 * cosine[i];
        }
        const int64_t to = is_q
                               ? ((int64_t(b) * s.H + head) * s.T + row) * s.D
                               : (int64_t(b) * s.Hkv + head) * key_head_stride + int64_t(row) * s.D;
        for (int i = 0; i < s.D; ++i) {
          store(s.t, is_q ? q : keys, to + i, x[i]);
        }
      }
    }
  });
}

void attend(const AttentionShape& s, const void* q, const KeyValues& kv, const Mask& mask,
            const void* q_gate, void* out) {
  const int group = s.H / s.Hkv;
  const float scale = 1.0f / std::sqrt(float(s.D));
  const int chunks = (kv.L + kKeyChunk - 1) / kKeyChunk;

  auto query = [&](int b, int hkv, int row, std::vector<float>& to) {
    to.resize(int64_t(group) * s.D);
    for (int g = 0; g < group; ++g) {
      const int64_t from = ((int64_t(b) * s.H + hkv * group + g) * s.T + row) * s.D;
      for (int d = 0; d < s.D; ++d) {
        to[int64_t(g) * s.D + d] = load(s.t, q, from + d) * scale;
      }
    }
  };
  auto visible = [&](int row) { return mask.causal ? kv.L - s.T + row + 1 : kv.L; };
  // Chunks start at the first key that a row sees, so that left padding does not change its sums.
  auto first_key = [&](int b, int row) {
    int j = 0;
    if (mask.data != nullptr) {
      const bool* keep = mask.data + b * mask.batch + row * mask.row;
      while (j < kv.L && !keep[j]) {
        ++j;
      }
    }
    return j;
  };
  auto chunk_of = [&](int b, int hkv, int row, int start, const float* qs,
                      std::vector<float>& scores, Partial& part) {
    part.reset(group, s.D);
    scores.resize(int64_t(group) * kKeyBlock);
    const int end = std::min(visible(row), start + kKeyChunk);
    for (int j = start; j < end; j += kKeyBlock) {
      const int count = std::min(kKeyBlock, end - j);
      const void* keys = at(s.t, kv.keys, b * kv.key_batch + hkv * kv.key_head + j * kv.key_row);
      const void* values =
          at(s.t, kv.values, b * kv.value_batch + hkv * kv.value_head + j * kv.value_row);
      micro().scores(s.t, keys, kv.key_row, count, qs, group, s.D, scores.data(), kKeyBlock);
      if (mask.data != nullptr) {
        const bool* keep = mask.data + b * mask.batch + row * mask.row + j;
        for (int g = 0; g < group; ++g) {
          for (int i = 0; i < count; ++i) {
            if (!keep[i]) {
              scores[int64_t(g) * kKeyBlock + i] = -kInfinity;
            }
          }
        }
      }
      part.step(s.t, values, kv.value_row, count, scores.data(), group, s.D);
    }
  };
  auto finish = [&](int b, int hkv, int row, const Partial& all) {
    for (int g = 0; g < group; ++g) {
      const int h = hkv * group + g;
      const int64_t r = (int64_t(b) * s.T + row) * s.H + h;
      // A query that sees no key (padding) yields zeros.
      const float inverse = all.total[g] > 0.0f ? 1.0f / all.total[g] : 0.0f;
      for (int d = 0; d < s.D; ++d) {
        const float gate = load(s.t, q_gate, (r * 2 + 1) * s.D + d);
        store(s.t, out, r * s.D + d, all.out[int64_t(g) * s.D + d] * inverse * sigmoid(gate));
      }
    }
  };

  const int64_t rows = int64_t(s.B) * s.Hkv * s.T;
  struct Place {
    int b, hkv, row;
  };
  auto place = [&](int64_t i) {
    return Place{int(i / s.T / s.Hkv), int(i / s.T % s.Hkv), int(i % s.T)};
  };
  if (rows >= 2 * num_threads() || chunks == 1) {
    parallel_for(rows, [&](size_t i) {
      const auto [b, hkv, row] = place(i);
      std::vector<float> qs, scores;
      Partial all, part;
      query(b, hkv, row, qs);
      all.reset(group, s.D);
      for (int start = first_key(b, row); start < visible(row); start += kKeyChunk) {
        chunk_of(b, hkv, row, start, qs.data(), scores, part);
        all.merge(part, group, s.D);
      }
      finish(b, hkv, row, all);
    });
    return;
  }
  // Few rows over many keys: the chunks are shared out, and merged in the same order.
  std::vector<Partial> parts(rows * chunks);
  parallel_for(parts.size(), [&](size_t i) {
    const auto [b, hkv, row] = place(i / chunks);
    const int start = first_key(b, row) + int(i % chunks) * kKeyChunk;
    if (start >= visible(row)) {
      return;
    }
    std::vector<float> qs, scores;
    query(b, hkv, row, qs);
    chunk_of(b, hkv, row, start, qs.data(), scores, parts[i]);
  });
  for (int64_t i = 0; i < rows; ++i) {
    const auto [b, hkv, row] = place(i);
    Partial all;
    all.reset(group, s.D);
    const int keys = visible(row) - first_key(b, row);
    for (int c = 0; c * kKeyChunk < keys; ++c) {
      all.merge(parts[i * chunks + c], group, s.D);
    }
    finish(b, hkv, row, all);
  }
}

}  // namespace lily::reference
