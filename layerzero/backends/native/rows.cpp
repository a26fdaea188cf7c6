// Norms and rotations of rows: one pass over each row, one call for what torch does in several. Norms also take
// bfloat16, which is widened row by row; rotations are in float32.
//
// A row's sums are taken in one order whatever stands beside it, so a row gives the same bits in every batch.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

#include "memory.h"

namespace {

constexpr int64_t LANES = 16;           // partial sums, which the compiler keeps in registers
constexpr int64_t WORK = int64_t(1) << 15;  // elements that are worth a thread

template <typename Row>
void each_row(int64_t rows, int64_t width, Row&& row) {
  at::parallel_for(0, rows, std::max<int64_t>(1, WORK / std::max<int64_t>(1, width)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) row(i);
  });
}

void norm_row(const float* x, const float* weight, float* out, int64_t width, float eps) {
  float sums[LANES] = {};
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES)
    for (int64_t j = 0; j < LANES; ++j) sums[j] += x[i + j] * x[i + j];
  float sum = 0;
  for (int64_t j = 0; j < LANES; ++j) sum += sums[j];
  for (; i < width; ++i) sum += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(sum / float(width) + eps);
  if (weight == nullptr)
    for (int64_t j = 0; j < width; ++j) out[j] = x[j] * scale;
  else
    for (int64_t j = 0; j < width; ++j) out[j] = x[j] * scale * weight[j];
}

// Numbers in memory as float32, written as they are or rounded to the nearest, ties to even.
struct Single {
  using Stored = float;
  static float wide(float x) { return x; }
  static float narrow(float x) { return x; }
};
struct Brain {
  using Stored = uint16_t;
  static float wide(uint16_t x) { return std::bit_cast<float>(uint32_t(x) << 16); }
  static uint16_t narrow(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return uint16_t(x == x ? rounded : 0x7fc0u);
  }
};

template <typename Form>
void norm_rows(const at::Tensor& out, const at::Tensor& x, const std::optional<at::Tensor>& residual,
               const std::optional<at::Tensor>& total, const float* by, float eps) {
  using Stored = typename Form::Stored;
  const auto data = [](const at::Tensor& t) { return static_cast<Stored*>(t.mutable_data_ptr()); };
  const int64_t width = x.size(-1), rows = x.numel() / width;
  const auto* from = static_cast<const Stored*>(x.const_data_ptr());
  const auto* beside = residual ? static_cast<const Stored*>(residual->const_data_ptr()) : nullptr;
  Stored *to = data(out), *sum = total ? data(*total) : nullptr;
  constexpr bool DIRECT = std::is_same_v<Stored, float>;
  each_row(rows, width, [&](int64_t i) {
    const Stored* row = from + i * width;
    if (beside != nullptr) {
      const Stored* other = beside + i * width;
      Stored* added = sum + i * width;
      for (int64_t j = 0; j < width; ++j) added[j] = Form::narrow(Form::wide(row[j]) + Form::wide(other[j]));
      row = added;
    }
    if constexpr (DIRECT) {
      norm_row(row, by, to + i * width, width, eps);
    } else {
      thread_local std::vector<float> room;
      if (int64_t(room.size()) < width) room.resize(width);
      float* widened = room.data();
      for (int64_t j = 0; j < width; ++j) widened[j] = Form::wide(row[j]);
      norm_row(widened, by, widened, width, eps);
      Stored* narrowed = to + i * width;
      for (int64_t j = 0; j < width; ++j) narrowed[j] = Form::narrow(widened[j]);
    }
  });
}

// out = norm(x) or, with a residual, total = x + residual and out = norm(total); all of one dense shape.
void norm(
    const at::Tensor& out, const at::Tensor& x, const std::optional<at::Tensor>& residual,
    const std::optional<at::Tensor>& total, const std::optional<at::Tensor>& weight, double eps) {
  // Memory is read: what only a flag negates is negated before.
  const at::Tensor rows = x.resolve_neg();
  const auto beside = residual ? std::optional(residual->resolve_neg()) : std::nullopt;
  const auto by = weight ? std::optional(weight->to(at::kFloat).resolve_neg()) : std::nullopt;
  const float* factors = by ? by->const_data_ptr<float>() : nullptr;
  pybind11::gil_scoped_release release;
  if (x.scalar_type() == at::kBFloat16)
    norm_rows<Brain>(out, rows, beside, total, factors, float(eps));
  else
    norm_rows<Single>(out, rows, beside, total, factors, float(eps));
}

struct Heads {  // (T, H, D), the last axis dense
  const float* from;
  float* to;
  int64_t heads, token, head;  // strides of what is read
};

Heads heads_of(const at::Tensor& out, const at::Tensor& x) {
  return {x.const_data_ptr<float>(), out.mutable_data_ptr<float>(), x.size(1), x.stride(0), x.stride(1)};
}

void turn(const Heads& of, int64_t token, int64_t width, const float* cos, const float* sin, int64_t half) {
  for (int64_t h = 0; h < of.heads; ++h) {
    const float* from = of.from + token * of.token + h * of.head;
    float* to = of.to + (token * of.heads + h) * width;
    for (int64_t j = 0; j < half; ++j) {
      const float first = from[j], second = from[j + half];
      to[j] = first * cos[j] - second * sin[j];
      to[j + half] = second * cos[j] + first * sin[j];
    }
    std::copy(from + 2 * half, from + width, to + 2 * half);
  }
}

template <typename Index>
bool rotate(
    const Heads& q, const Heads& k, const at::Tensor& positions, const at::Tensor& cos, const at::Tensor& sin,
    int64_t width) {
  const Index* at = positions.const_data_ptr<Index>();
  const int64_t tokens = positions.size(0), step = positions.stride(0), half = cos.size(1), last = cos.size(0);
  for (int64_t i = 0; i < tokens; ++i)
    if (at[i * step] < 0 || int64_t(at[i * step]) >= last) return false;
  const float *cosines = cos.const_data_ptr<float>(), *sines = sin.const_data_ptr<float>();
  each_row(tokens, (q.heads + k.heads) * width, [&](int64_t i) {
    const int64_t row = int64_t(at[i * step]) * half;
    turn(q, i, width, cosines + row, sines + row, half);
    turn(k, i, width, cosines + row, sines + row, half);
  });
  return true;
}

// q and k (T, H, D) turned by halves into dense outputs; False where the tables lack a position.
bool rope(
    const at::Tensor& q_out, const at::Tensor& k_out, const at::Tensor& q_in, const at::Tensor& k_in,
    const at::Tensor& positions, const at::Tensor& cos_in, const at::Tensor& sin_in) {
  const at::Tensor q = q_in.resolve_neg(), k = k_in.resolve_neg();
  const at::Tensor cos = cos_in.resolve_neg(), sin = sin_in.resolve_neg();
  const Heads queries = heads_of(q_out, q), keys = heads_of(k_out, k);
  const int64_t width = q.size(2);
  pybind11::gil_scoped_release release;
  return positions.scalar_type() == at::kLong ? rotate<int64_t>(queries, keys, positions, cos, sin, width)
                                              : rotate<int32_t>(queries, keys, positions, cos, sin, width);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("norm", reading(&norm));
  m.def("rope", reading(&rope));
}
