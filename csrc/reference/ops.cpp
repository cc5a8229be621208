#include "reference/ops.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <stdexcept>

#include "reference/functions.h"
#include "reference/micro.h"
#include "reference/parallel.h"

namespace lily::reference {
namespace {

// x rows that a task multiplies by one block of weight rows before it goes on: keeps them in cache.
constexpr int kXBlock = 64;

float silu(float x) {
  return x * sigmoid(x);
}

float softplus(float x) {
  // log(1 + e^x) without overflow.
  return std::max(x, 0.0f) + std::log1p(std::exp(-std::abs(x)));
}

// y[t, 0..count) for weight rows [row, row + count) of m, any count.
void block_product(const Matrix& m, int row, int count, const float* x, int T, float* y,
                   int64_t ldy, std::vector<float>& scratch) {
  const Micro& k = micro();
  if (T <= kFusedRows) {
    for (int r = 0; r < count; r += kRows) {
      k.product(m, row + r, std::min(kRows, count - r), x, T, y + r, ldy);
    }
    return;
  }
  scratch.resize(int64_t(count) * m.cols);
  for (int r = 0; r < count; ++r) {
    k.unpack(m, row + r, scratch.data() + int64_t(r) * m.cols);
  }
  for (int t = 0; t < T; t += kXBlock) {
    for (int r = 0; r < count; r += kRows) {
      k.tile(scratch.data() + int64_t(r) * m.cols, std::min(kRows, count - r), m.cols,
             x + int64_t(t) * m.cols, std::min(kXBlock, T - t), y + t * ldy + r, ldy);
    }
  }
}

// Weight rows of one task: a multiple of 32, so that a block of outputs is also whole in arranged
// order.
int rows_per_task(const Matrix& m, int T) {
  int64_t rows = kTaskWork / std::max<int64_t>(1, int64_t(m.cols) * T);
  return static_cast<int>(std::clamp<int64_t>(rows / 32 * 32, 32, 256));
}

// Rows of x as fp32, in the order that matrices of these bits want.
struct Arranged {
  std::vector<float> plain, nibbles;

  Arranged(Type t, const void* x, int64_t ldx, int rows, int cols, bool want_plain,
           bool want_nibbles) {
    if (want_plain) {
      plain.resize(int64_t(rows) * cols);
    }
    if (want_nibbles) {
      nibbles.resize(int64_t(rows) * cols);
    }
    parallel_ranges(rows, cols, [&](size_t begin, size_t end) {
      for (size_t r = begin; r < end; ++r) {
        const void* row = at(t, x, r * ldx);
        if (want_plain) {
          micro().arrange(8, t, row, cols, plain.data() + r * cols);
        }
        if (want_nibbles) {
          micro().arrange(4, t, row, cols, nibbles.data() + r * cols);
        }
      }
    });
  }
  const float* of(const Matrix& m) const {
    return m.bits == 4 ? nibbles.data() : plain.data();
  }
};

struct Task {
  int product;
  int row;
  int count;
};

void rms_row(Type t, const float* x, Type wt, const void* w, float eps, int dim, float* out) {
  const float scale = 1.0f / std::sqrt(sum_of_squares(x, dim) / dim + eps);
  for (int i = 0; i < dim; ++i) {
    out[i] = round_to(t, x[i] * scale * load(wt, w, i));
  }
}

}  // namespace

void rms_norm(Type t, const void* x, Type weight_type, const void* weight, float eps, int64_t rows,
              int dim, void* out) {
  parallel_ranges(rows, dim, [&](size_t begin, size_t end) {
    std::vector<float> in(dim), normed(dim);
    for (size_t r = begin; r < end; ++r) {
      for (int i = 0; i < dim; ++i) {
        in[i] = load(t, x, r * dim + i);
      }
      rms_row(t, in.data(), weight_type, weight, eps, dim, normed.data());
      for (int i = 0; i < dim; ++i) {
        store(t, out, r * dim + i, normed[i]);
      }
    }
  });
}

void project(const std::vector<Product>& products, Type t, const void* x, int64_t ldx, int rows) {
  if (rows == 0) {
    return;
  }
  bool nibbles = false, plain = false;
  std::vector<Task> tasks;
  for (int p = 0; p < static_cast<int>(products.size()); ++p) {
    const Matrix& m = products[p].m;
    (m.bits == 4 ? nibbles : plain) = true;
    const int step = rows_per_task(m, rows);
    for (int r = 0; r < m.rows; r += step) {
      tasks.push_back({p, r, std::min(step, m.rows - r)});
    }
  }
  Arranged xs(t, x, ldx, rows, products[0].m.cols, plain, nibbles);
  parallel_for(tasks.size(), [&](size_t i) {
    const Task& task = tasks[i];
    const Product& p = products[task.product];
    std::vector<float> y(int64_t(rows) * task.count), scratch;
    block_product(p.m, task.row, task.count, xs.of(p.m), rows, y.data(), task.count, scratch);
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < task.count; ++c) {
        store(p.out, p.y, r * p.ldy + task.row + c, y[int64_t(r) * task.count + c]);
      }
    }
  });
}

void embed(const Matrix& m, Type t, const uint32_t* ids, int64_t count, void* out) {
  std::vector<float> row(m.cols);
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] >= static_cast<uint32_t>(m.rows)) {
      std::ostringstream text;
      text << "token id " << ids[i] << " is outside the vocabulary of " << m.rows
           << "; check that the tokenizer belongs to the model";
      throw std::out_of_range(text.str());
    }
    micro().unpack(m, static_cast<int>(ids[i]), row.data());
    for (int c = 0; c < m.cols; ++c) {
      store(t, out, i * m.cols + c, row[arranged_index(m.bits, c)]);
    }
  }
}

void add(Type t, const void* a, const void* b, int64_t n, void* out) {
  for (int64_t i = 0; i < n; ++i) {
    store(t, out, i, load(t, a, i) + load(t, b, i));
  }
}

void gated_delta(const DeltaShape& s, const DeltaWeights& w, const DeltaInputs& in,
                 void* conv_state, float* state, void* out) {
  const int C = s.channels();
  const int past = s.width - 1;
  const Type t = s.t;

  // Raw row `i` of [conv_state | qkv], channel c; a padded row counts as zeros.
  auto raw = [&](int b, int i, int c) -> float {
    if (i < past) {
      return in.conv_state == nullptr ? 0.0f
                                      : load(t, in.conv_state, (int64_t(b) * past + i) * C + c);
    }
    const int row = i - past;
    if (in.mask != nullptr && !in.mask[int64_t(b) * s.T + row]) {
      return 0.0f;
    }
    return load(t, in.qkv, (int64_t(b) * s.T + row) * C + c);
  };

  // Convolved, normed, rounded q, k and v as fp32, and the gates.
  std::vector<float> mixed(int64_t(s.B) * s.T * C);
  std::vector<float> gates(int64_t(s.B) * s.T * s.Hv), betas(gates.size());
  const int heads = 2 * s.Hk + s.Hv;
  std::vector<float> taps(int64_t(C) * s.width), decay(s.Hv), bias(s.Hv), norm(s.Dv);
  for (size_t i = 0; i < taps.size(); ++i) {
    taps[i] = load(w.conv_type, w.conv, i);
  }
  for (int h = 0; h < s.Hv; ++h) {
    decay[h] = std::exp(load(w.A_log_type, w.A_log, h));
    bias[h] = load(w.dt_bias_type, w.dt_bias, h);
  }
  for (int i = 0; i < s.Dv; ++i) {
    norm[i] = load(w.norm_type, w.norm, i);
  }

  parallel_ranges(int64_t(s.B) * s.T, 8 * C, [&](size_t begin, size_t end) {
    std::vector<float> x(C);
    for (size_t r = begin; r < end; ++r) {
      const int b = static_cast<int>(r / s.T), row = static_cast<int>(r % s.T);
      for (int c = 0; c < C; ++c) {
        float sum = 0.0f;
        for (int j = 0; j < s.width; ++j) {
          sum += taps[int64_t(c) * s.width + j] * raw(b, row + j, c);
        }
        x[c] = silu(sum);
      }
      float* to = mixed.data() + r * C;
      for (int h = 0; h < heads; ++h) {
        const bool is_v = h >= 2 * s.Hk;
        const int dim = is_v ? s.Dv : s.Dk;
        const int c0 = is_v ? 2 * s.Hk * s.Dk + (h - 2 * s.Hk) * s.Dv : h * s.Dk;
        float scale = 1.0f;
        if (!is_v) {
          scale = 1.0f / std::sqrt(sum_of_squares(&x[c0], dim) + 1e-6f);
          if (h < s.Hk) {
            scale *= 1.0f / std::sqrt(float(s.Dk));
          }
        }
        for (int i = 0; i < dim; ++i) {
          to[c0 + i] = round_to(t, x[c0 + i] * scale);
        }
      }
      for (int h = 0; h < s.Hv; ++h) {
        gates[r * s.Hv + h] = std::exp(-decay[h] * softplus(load(t, in.a, r * s.Hv + h) + bias[h]));
        betas[r * s.Hv + h] = sigmoid(load(t, in.b, r * s.Hv + h));
      }
    }
  });

  const int64_t size = int64_t(s.Dv) * s.Dk;
  parallel_for(int64_t(s.B) * s.Hv, [&](size_t i) {
    const int b = static_cast<int>(i / s.Hv), h = static_cast<int>(i % s.Hv);
    const int hk = h / (s.Hv / s.Hk);
    float* S = state + i * size;
    if (in.state == nullptr) {
      std::fill_n(S, size, 0.0f);
    } else if (in.state != state) {
      std::copy_n(in.state + i * size, size, S);
    }
    std::vector<float> y(s.Dv);
    for (int r = 0; r < s.T; ++r) {
      const int64_t row = int64_t(b) * s.T + r;
      const float* x = mixed.data() + row * C;
      const float *q = x + hk * s.Dk, *k = x + (s.Hk + hk) * s.Dk,
                  *v = x + 2 * s.Hk * s.Dk + h * s.Dv;
      if (in.mask == nullptr || in.mask[row]) {
        micro().delta(S, q, k, v, gates[row * s.Hv + h], betas[row * s.Hv + h], s.Dk, s.Dv,
                      y.data());
      } else {
        std::fill(y.begin(), y.end(), 0.0f);
      }
      const float scale = 1.0f / std::sqrt(sum_of_squares(y.data(), s.Dv) / s.Dv + s.eps);
      const int64_t to = (row * s.Hv + h) * s.Dv;
      for (int d = 0; d < s.Dv; ++d) {
        store(t, out, to + d, y[d] * scale * norm[d] * silu(load(t, in.z, to + d)));
      }
    }
  });

  for (int b = 0; b < s.B; ++b) {
    const int end = in.lengths == nullptr ? s.T : std::clamp(int(in.lengths[b]), 0, s.T);
    for (int j = 0; j < past; ++j) {
      for (int c = 0; c < C; ++c) {
        store(t, conv_state, (int64_t(b) * past + j) * C + c, raw(b, end + j, c));
      }
    }
  }
}

namespace {

// Rows whose products share one fp32 buffer of this many bytes: scratch does not grow with the
// prompt.
constexpr int64_t kMoeScratch = 64 << 20;

void moe_chunk(const MoeWeights& w, const void* x, int rows, void* y, uint32_t* experts) {
  const int hidden = w.router.cols, E = w.router.rows, k = w.top_k;
  const int width = w.gate.rows, shared_width = w.shared_gate.rows;
  std::vector<float> logits(int64_t(rows) * E), shared_logit(rows);
  project({{w.router, Type::fp32, logits.data(), E},
           {w.shared_router, Type::fp32, shared_logit.data(), 1}},
          w.t, x, hidden, rows);

  // Slot (row, j): the j-th best expert of a row and its weight.
  std::vector<int> chosen(int64_t(rows) * k);
  std::vector<float> weights(chosen.size());
  parallel_ranges(rows, 8 * E, [&](size_t begin, size_t end) {
    std::vector<int> order(E);
    for (size_t r = begin; r < end; ++r) {
      bool poisoned = false;
      float* row = logits.data() + r * E;
      for (int e = 0; e < E; ++e) {
        order[e] = e;
        // A NaN has no order; below everything it leaves the sort well defined and shows in the
        // weights.
        poisoned |= std::isnan(row[e]);
        row[e] = std::isnan(row[e]) ? -kInfinity : row[e];
      }
      std::partial_sort(order.begin(), order.begin() + k, order.end(),
                        [&](int a, int b) { return row[a] != row[b] ? row[a] > row[b] : a < b; });
      float total = 0.0f;
      for (int e = 0; e < E; ++e) {
        total += std::exp(row[e] - row[order[0]]);
      }
      float kept = 0.0f;
      for (int j = 0; j < k; ++j) {
        chosen[r * k + j] = order[j];
        weights[r * k + j] = poisoned ? std::numeric_limits<float>::quiet_NaN()
                                      : std::exp(row[order[j]] - row[order[0]]) / total;
        kept += weights[r * k + j];
      }
      for (int j = 0; w.normalize && j < k; ++j) {
        weights[r * k + j] /= kept;
      }
    }
  });
  if (experts != nullptr) {
    std::copy(chosen.begin(), chosen.end(), experts);
  }

  // Slots sorted by expert; the shared expert is expert E and takes every row.
  std::vector<int> first(E + 2, 0), slot_row(int64_t(rows) * (k + 1)), place(chosen.size());
  for (int e : chosen) {
    ++first[e + 1];
  }
  for (int e = 0; e < E; ++e) {
    first[e + 1] += first[e];
  }
  first[E + 1] = first[E] + rows;
  {
    std::vector<int> next(first.begin(), first.end() - 1);
    for (int r = 0; r < rows; ++r) {
      for (int j = 0; j < k; ++j) {
        place[int64_t(r) * k + j] = next[chosen[int64_t(r) * k + j]]++;
        slot_row[place[int64_t(r) * k + j]] = r;
      }
    }
    for (int r = 0; r < rows; ++r) {
      slot_row[first[E] + r] = r;
    }
  }

  auto matrix = [&](const Matrix& routed, const Matrix& shared, int e) {
    return e < E ? routed.expert(e) : shared;
  };
  auto tasks_for = [&](const Matrix& routed, const Matrix& shared) {
    std::vector<Task> tasks;
    for (int e = 0; e <= E; ++e) {
      const Matrix& m = e < E ? routed : shared;
      const int T = first[e + 1] - first[e];
      if (T > 0) {
        const int step = rows_per_task(m, T);
        for (int r = 0; r < m.rows; r += step) {
          tasks.push_back({e, r, std::min(step, m.rows - r)});
        }
      }
    }
    return tasks;
  };

  // The rows of x in slot order, for the matrices' arrangement.
  auto nibbled = [](const Matrix& a, const Matrix& b) { return a.bits == 4 || b.bits == 4; };
  auto plain = [](const Matrix& a, const Matrix& b) { return a.bits != 4 || b.bits != 4; };
  const Arranged xs(w.t, x, hidden, rows, hidden,
                    plain(w.gate, w.up) || plain(w.shared_gate, w.shared_up),
                    nibbled(w.gate, w.up) || nibbled(w.shared_gate, w.shared_up));
  auto gather = [&](const Matrix& m, int e, std::vector<float>& to) -> const float* {
    const float* from = xs.of(m);
    const int T = first[e + 1] - first[e];
    if (e == E) {
      return from;
    }
    if (T == 1) {
      return from + int64_t(slot_row[first[e]]) * hidden;
    }
    to.resize(int64_t(T) * hidden);
    for (int i = 0; i < T; ++i) {
      std::copy_n(from + int64_t(slot_row[first[e] + i]) * hidden, hidden,
                  to.data() + int64_t(i) * hidden);
    }
    return to.data();
  };

  // act [slot, width], already in the order that its down matrix wants.
  const int max_width = std::max(width, shared_width);
  std::vector<float> act((int64_t(rows) * (k + 1)) * max_width);
  std::vector<Task> up_tasks = tasks_for(w.gate, w.shared_gate);
  parallel_for(up_tasks.size(), [&](size_t i) {
    const Task& task = up_tasks[i];
    const int e = task.product, T = first[e + 1] - first[e];
    const Matrix gate = matrix(w.gate, w.shared_gate, e), up = matrix(w.up, w.shared_up, e);
    const int down_bits = (e < E ? w.down : w.shared_down).bits;
    std::vector<float> g(int64_t(T) * task.count), u(g.size()), scratch, rows_of_x;
    const float* in = gather(gate, e, rows_of_x);
    block_product(gate, task.row, task.count, in, T, g.data(), task.count, scratch);
    if ((up.bits == 4) != (gate.bits == 4)) {
      in = gather(up, e, rows_of_x);
    }
    block_product(up, task.row, task.count, in, T, u.data(), task.count, scratch);
    for (int r = 0; r < T; ++r) {
      float* to = act.data() + int64_t(first[e] + r) * max_width;
      for (int c = 0; c < task.count; ++c) {
        const int64_t at = int64_t(r) * task.count + c;
        to[arranged_index(down_bits, task.row + c)] = round_to(w.t, silu(g[at]) * u[at]);
      }
    }
  });

  std::vector<float> down((int64_t(rows) * (k + 1)) * hidden);
  std::vector<Task> down_tasks = tasks_for(w.down, w.shared_down);
  parallel_for(down_tasks.size(), [&](size_t i) {
    const Task& task = down_tasks[i];
    const int e = task.product, T = first[e + 1] - first[e];
    const Matrix m = matrix(w.down, w.shared_down, e);
    std::vector<float> in, scratch;
    const float* a = act.data() + int64_t(first[e]) * max_width;
    if (m.cols != max_width) {
      in.resize(int64_t(T) * m.cols);
      for (int r = 0; r < T; ++r) {
        std::copy_n(a + int64_t(r) * max_width, m.cols, in.data() + int64_t(r) * m.cols);
      }
      a = in.data();
    }
    block_product(m, task.row, task.count, a, T,
                  down.data() + int64_t(first[e]) * hidden + task.row, hidden, scratch);
  });

  parallel_ranges(rows, 8 * hidden, [&](size_t begin, size_t end) {
    for (size_t r = begin; r < end; ++r) {
      const float gate = sigmoid(shared_logit[r]);
      for (int c = 0; c < hidden; ++c) {
        float sum = 0.0f;
        for (int j = 0; j < k; ++j) {
          sum += weights[r * k + j] * down[int64_t(place[r * k + j]) * hidden + c];
        }
        sum += gate * down[(int64_t(first[E]) + r) * hidden + c];
        store(w.t, y, r * hidden + c, sum);
      }
    }
  });
}

}  // namespace

void moe(const MoeWeights& w, const void* x, int rows, void* y, uint32_t* experts) {
  const int hidden = w.router.cols;
  const int64_t per_row = int64_t(w.top_k + 1) * hidden * 4;
  const int step = static_cast<int>(std::clamp<int64_t>(kMoeScratch / per_row, 16, 4096));
  for (int r = 0; r < rows; r += step) {
    moe_chunk(w, at(w.t, x, int64_t(r) * hidden), std::min(step, rows - r),
              at(w.t, y, int64_t(r) * hidden),
              experts == nullptr ? nullptr : experts + int64_t(r) * w.top_k);
  }
}

uint32_t argmax(const float* x, int64_t n) {
  int64_t best = 0;
  for (int64_t i = 1; i < n; ++i) {
    if (!(x[i] <= x[best]) && !std::isnan(x[best])) {
      best = i;
    }
  }
  return static_cast<uint32_t>(best);
}

}  // namespace lily::reference
