// The mixers between their projections as MLX primitives: Gated DeltaNet and attention.
#include "mlx/ops.h"
#include "ops/attention.h"
#include "ops/gated_delta.h"
#include "primitives/layers.h"
#include "run.h"

namespace lily {
namespace {

// inputs: qkv z b a conv A_log dt_bias norm [conv_state] [state] [mask] [lengths]
class GatedDeltaOp : public Primitive {
 public:
  struct Options {
    GatedDeltaShape shape;
    bool has_conv_state, has_state, has_mask, has_lengths;
  };
  GatedDeltaOp(mx::Stream s, Options o) : Primitive(s), o_(o) {}

  void eval_cpu(const Arrays& in, Arrays& out) override {
    for (auto& a : out) {
      allocate(a);
    }
    if (runs_program(in, out)) {
      return;
    }
    const reference::DeltaShape shape =
        reference_shape(type_of(in[0].dtype(), "qkv"), in[0].shape(0), in[0].shape(1), o_.shape);
    reference::DeltaWeights w{type_of(in[4].dtype(), "conv weight"), in[4].data<char>(),
                              type_of(in[5].dtype(), "A_log"),       in[5].data<char>(),
                              type_of(in[6].dtype(), "dt_bias"),     in[6].data<char>(),
                              type_of(in[7].dtype(), "norm weight"), in[7].data<char>()};
    reference::DeltaInputs x{in[0].data<char>(), in[1].data<char>(), in[2].data<char>(),
                             in[3].data<char>()};
    size_t next = 8;
    if (o_.has_conv_state) {
      x.conv_state = in[next++].data<char>();
    }
    if (o_.has_state) {
      x.state = in[next++].data<float>();
    }
    if (o_.has_mask) {
      x.mask = in[next++].data<bool>();
    }
    if (o_.has_lengths) {
      x.lengths = in[next++].data<int32_t>();
    }
    encoder(stream()).dispatch(
        [shape, w, x, y = out[0].data<char>(), conv = out[1].data<char>(),
         state = out[2].data<float>()] { reference::gated_delta(shape, w, x, conv, state, y); });
  }
  const char* name() const override {
    return "LilyGatedDelta";
  }
  std::vector<mx::Shape> output_shapes(const Arrays& in) override {
    const int B = in[0].shape(0);
    const GatedDeltaShape& d = o_.shape;
    return {{B, in[0].shape(1), d.value_heads * d.value_dim},
            {B, d.conv_width - 1, d.channels()},
            {B, d.value_heads, d.value_dim, d.key_dim}};
  }

 protected:
  bool run_program(Target target, const Arrays& in, Arrays& out) override {
    const Type t = type_of(in[0].dtype(), "qkv");
    const GatedDeltaShape& d = o_.shape;
    const GatedDeltaRows rows{in[0].shape(0), in[0].shape(1), o_.has_conv_state,
                              o_.has_state,   o_.has_mask,    o_.has_lengths};
    const GatedDeltaVectors v{spec_of(in[4]), spec_of(in[5]), spec_of(in[6]), spec_of(in[7])};
    Key key;
    key << name_of(t) << rows.B << rows.T << d.key_heads << d.value_heads << d.eps
        << rows.has_conv_state << rows.has_state << rows.has_mask << rows.has_lengths;
    return run_layer(
        stream(), "gated_delta",
        gated_delta_kernel(target, t, d, v, rows.B * rows.T, rows.has_mask || rows.has_lengths),
        key, [&](auto& o) { return gated_delta_program(target, t, d, rows, o); }, in, out);
  }

 private:
  Options o_;
};

// inputs: q_gate k q_norm k_norm offset
class AttentionPrepare : public Primitive {
 public:
  AttentionPrepare(mx::Stream s, lily::AttentionShape shape) : Primitive(s), shape_(shape) {}

  void eval_cpu(const Arrays& in, Arrays& out) override {
    allocate(out[0]);
    allocate(out[1]);
    if (runs_program(in, out)) {
      return;
    }
    const reference::AttentionShape shape =
        reference_shape(type_of(in[0].dtype(), "q"), in[0].shape(0), in[0].shape(1), shape_,
                        type_of(in[2].dtype(), "q_norm"));
    encoder(stream()).dispatch([shape, in_q = in[0].data<char>(), in_k = in[1].data<char>(),
                                q_norm = in[2].data<char>(), k_norm = in[3].data<char>(),
                                offset = in[4].data<int32_t>(), broadcast = in[4].size() == 1,
                                q = out[0].data<char>(), k = out[1].data<char>()] {
      std::vector<int32_t> offsets(shape.B);
      for (int b = 0; b < shape.B; ++b) {
        offsets[b] = offset[broadcast ? 0 : b];
      }
      reference::attention_prepare(shape, in_q, in_k, q_norm, k_norm, offsets.data(), q, k,
                                   int64_t(shape.T) * shape.D);
    });
  }
  const char* name() const override {
    return "LilyAttentionPrepare";
  }
  std::vector<mx::Shape> output_shapes(const Arrays& in) override {
    const int B = in[0].shape(0), T = in[0].shape(1), D = shape_.head_dim;
    return {{B, shape_.heads, T, D}, {B, shape_.kv_heads, T, D}};
  }

 protected:
  bool run_program(Target target, const Arrays& in, Arrays& out) override {
    const Type t = type_of(in[0].dtype(), "q");
    const AttentionRows rows{in[0].shape(0), in[0].shape(1), in[4].size() > 1};
    Key key;
    key << name_of(t) << rows.B << rows.T << rows.offset_each << shape_.heads << shape_.kv_heads
        << shape_.rotary << shape_.base << shape_.eps;
    return run_layer(
        stream(), "attention_prepare",
        attention_kernel(target, t, shape_, spec_of(in[2]), spec_of(in[3]), "none"), key,
        [&](auto&) { return attention_prepare_program(target, t, shape_, rows); }, in, out);
  }

 private:
  lily::AttentionShape shape_;
};

// inputs: q keys values q_gate [mask]
class Attend : public Primitive {
 public:
  Attend(mx::Stream s, bool causal, bool has_mask)
      : Primitive(s), causal_(causal), has_mask_(has_mask) {}

  void eval_cpu(const Arrays& in, Arrays& out) override {
    allocate(out[0]);
    if (metal_host()) {
      count_run("attend", "reference",
                "on a GPU this is mx.fast.scaled_dot_product_attention, MLX's own kernel");
    }
    const auto &q = in[0], &k = in[1], &v = in[2];
    if (k.strides(3) != 1 || v.strides(3) != 1) {
      fail(name(), "keys and values must be contiguous along head_dim; use mx.contiguous");
    }
    reference::AttentionShape shape{type_of(q.dtype(), "q"),
                                    q.shape(0),
                                    q.shape(2),
                                    q.shape(1),
                                    k.shape(1),
                                    q.shape(3),
                                    0,
                                    0.0f,
                                    0.0f,
                                    Type::fp32};
    reference::KeyValues kv{k.data<char>(), v.data<char>(), k.strides(0),
                            k.strides(1),   k.strides(2),   v.strides(0),
                            v.strides(1),   v.strides(2),   k.shape(2)};
    reference::Mask mask{nullptr, 0, 0, causal_};
    if (has_mask_) {
      mask.data = in[4].data<bool>();
      mask.row = in[4].shape(-1);
      mask.batch = in[4].shape(0) == 1 ? 0 : int64_t(in[4].shape(2)) * in[4].shape(3);
    }
    encoder(stream()).dispatch(
        [shape, kv, mask, qp = q.data<char>(), gate = in[3].data<char>(), y = out[0].data<char>()] {
          reference::attend(shape, qp, kv, mask, gate, y);
        });
  }
  const char* name() const override {
    return "LilyAttend";
  }
  std::vector<mx::Shape> output_shapes(const Arrays& in) override {
    return {{in[0].shape(0), in[0].shape(2), in[0].shape(1) * in[0].shape(3)}};
  }

 private:
  bool causal_, has_mask_;
};

}  // namespace

Arrays gated_delta(const mx::array& qkv, const mx::array& z, const mx::array& b, const mx::array& a,
                   const mx::array& conv_weight, const mx::array& A_log, const mx::array& dt_bias,
                   const mx::array& norm_weight, float eps, int Hk, int Hv, int Dk, int Dv,
                   const std::optional<mx::array>& conv_state,
                   const std::optional<mx::array>& state, const std::optional<mx::array>& mask,
                   const std::optional<mx::array>& lengths, mx::StreamOrDevice s_) {
  const char* op = "gated_delta";
  auto s = mx::to_stream(s_);
  type_of(qkv.dtype(), "gated_delta: qkv");
  check_ndim(op, "qkv", qkv, 3);
  if (Hk < 1 || Hv < 1 || Hv % Hk != 0) {
    fail(op, std::to_string(Hv) + " value heads are no multiple of " + std::to_string(Hk) +
                 " key heads");
  }
  if (Dk % 16 != 0 || Dv % 4 != 0) {
    fail(op, "Dk " + std::to_string(Dk) + " must be a multiple of 16 and Dv " + std::to_string(Dv) +
                 " of 4");
  }
  const int B = qkv.shape(0), T = qkv.shape(1), channels = 2 * Hk * Dk + Hv * Dv;
  if (T < 1) {
    fail(op, "qkv " + shape_text(qkv) + " has no rows");
  }
  check_shape(op, "qkv", qkv, {B, T, channels});
  check_shape(op, "z", z, {B, T, Hv * Dv});
  check_shape(op, "b", b, {B, T, Hv});
  check_shape(op, "a", a, {B, T, Hv});
  check_ndim(op, "conv weight", conv_weight, 3);
  const int width = conv_weight.shape(1);
  check_shape(op, "conv weight", conv_weight, {channels, width, 1});
  check_shape(op, "A_log", A_log, {Hv});
  check_shape(op, "dt_bias", dt_bias, {Hv});
  check_shape(op, "norm weight", norm_weight, {Dv});
  for (auto* x : {&z, &b, &a}) {
    check_dtype(op, "z, b or a", *x, qkv.dtype());
  }
  Arrays in;
  for (auto* x : {&qkv, &z, &b, &a, &conv_weight, &A_log, &dt_bias, &norm_weight}) {
    in.push_back(contiguous(*x, s));
  }
  if (conv_state) {
    check_shape(op, "conv_state", *conv_state, {B, width - 1, channels});
    check_dtype(op, "conv_state", *conv_state, qkv.dtype());
    in.push_back(contiguous(*conv_state, s));
  }
  if (state) {
    check_shape(op, "state", *state, {B, Hv, Dv, Dk});
    check_dtype(op, "state (float32)", *state, mx::float32);
    in.push_back(contiguous(*state, s));
  }
  if (mask) {
    in.push_back(contiguous(mx::broadcast_to(mx::astype(*mask, mx::bool_, s), {B, T}, s), s));
  }
  if (lengths) {
    in.push_back(contiguous(mx::broadcast_to(mx::astype(*lengths, mx::int32, s), {B}, s), s));
  }
  GatedDeltaOp::Options o{{Hk, Hv, Dk, Dv, width, eps},
                          conv_state.has_value(),
                          state.has_value(),
                          mask.has_value(),
                          lengths.has_value()};
  return mx::array::make_arrays({{B, T, Hv * Dv}, {B, width - 1, channels}, {B, Hv, Dv, Dk}},
                                {qkv.dtype(), qkv.dtype(), mx::float32},
                                std::make_shared<GatedDeltaOp>(s, o), in);
}

Arrays attention_prepare(const mx::array& q_gate, const mx::array& k, const mx::array& q_norm,
                         const mx::array& k_norm, const mx::array& offset, int H, int Hkv,
                         int rotary, float base, float eps, mx::StreamOrDevice s_) {
  const char* op = "attention_prepare";
  auto s = mx::to_stream(s_);
  type_of(q_gate.dtype(), "attention_prepare: q");
  check_ndim(op, "q", q_gate, 3);
  check_ndim(op, "k", k, 3);
  if (H < 1 || Hkv < 1 || H % Hkv != 0 || k.shape(2) % Hkv != 0) {
    fail(op, std::to_string(H) + " query heads, " + std::to_string(Hkv) + " KV heads and k " +
                 shape_text(k) + " do not fit each other");
  }
  const int B = q_gate.shape(0), T = q_gate.shape(1), D = k.shape(2) / Hkv;
  if (D % 16 != 0 || rotary % 2 != 0 || rotary < 0 || rotary > D) {
    fail(op, "head_dim " + std::to_string(D) + " must be a multiple of 16 and rotary dims " +
                 std::to_string(rotary) + " even and at most that");
  }
  check_shape(op, "q", q_gate, {B, T, H * D * 2});
  check_shape(op, "k", k, {B, T, Hkv * D});
  check_dtype(op, "k", k, q_gate.dtype());
  check_shape(op, "q_norm", q_norm, {D});
  check_shape(op, "k_norm", k_norm, {D});
  check_dtype(op, "k_norm", k_norm, q_norm.dtype());
  if (offset.size() != 1 && offset.size() != static_cast<size_t>(B)) {
    fail(op, "offset has shape " + shape_text(offset) + " for a batch of " + std::to_string(B));
  }
  Arrays in;
  for (auto* x : {&q_gate, &k, &q_norm, &k_norm}) {
    in.push_back(contiguous(*x, s));
  }
  in.push_back(contiguous(mx::astype(offset, mx::int32, s), s));
  return mx::array::make_arrays(
      {{B, H, T, D}, {B, Hkv, T, D}}, {q_gate.dtype(), q_gate.dtype()},
      std::make_shared<AttentionPrepare>(s, lily::AttentionShape{H, Hkv, D, rotary, base, eps}),
      in);
}

mx::array attend(const mx::array& q, const mx::array& keys, const mx::array& values,
                 const mx::array& q_gate, const std::optional<mx::array>& mask, bool causal,
                 mx::StreamOrDevice s_) {
  const char* op = "attend";
  auto s = mx::to_stream(s_);
  type_of(q.dtype(), "attend: q");
  check_ndim(op, "q", q, 4);
  check_ndim(op, "keys", keys, 4);
  const int B = q.shape(0), H = q.shape(1), T = q.shape(2), D = q.shape(3), Hkv = keys.shape(1),
            L = keys.shape(2);
  if (Hkv < 1 || H % Hkv != 0 || D % 16 != 0) {
    fail(op, std::to_string(H) + " query heads must be a multiple of " + std::to_string(Hkv) +
                 " KV heads and head_dim " + std::to_string(D) + " of 16");
  }
  check_shape(op, "keys", keys, {B, Hkv, L, D});
  check_shape(op, "values", values, {B, Hkv, L, D});
  check_shape(op, "q_gate", q_gate, {B, T, H * D * 2});
  for (auto* x : {&keys, &values, &q_gate}) {
    check_dtype(op, "keys, values or q_gate", *x, q.dtype());
  }
  if (causal && T > L) {
    fail(op, std::to_string(T) + " queries over " + std::to_string(L) + " keys cannot be causal");
  }
  Arrays in{contiguous(q, s), keys, values, contiguous(q_gate, s)};
  if (mask) {
    if (mask->dtype() != mx::bool_) {
      fail(op, "the mask must be boolean, true where a key is seen");
    }
    const int batch = mask->ndim() == 4 ? mask->shape(0) : 1;
    in.push_back(contiguous(mx::broadcast_to(*mask, {batch, 1, T, L}, s), s));
  }
  return mx::array({B, T, H * D}, q.dtype(), std::make_shared<Attend>(s, causal, mask.has_value()),
                   in);
}

}  // namespace lily
