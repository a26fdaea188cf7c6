// Norms and rotations of rows in float32: one pass over each row, one call for what torch does in several.
//
// A row's sums are taken in one order whatever stands beside it, so a row gives the same bits in every batch.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>

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

// out = norm(x) or, with a residual, total = x + residual and out = norm(total); all of one dense shape.
void norm(
    const at::Tensor& out, const at::Tensor& x, const std::optional<at::Tensor>& residual,
    const std::optional<at::Tensor>& total, const std::optional<at::Tensor>& weight, double eps) {
  const int64_t width = x.size(-1), rows = x.numel() / width;
  const float* from = x.const_data_ptr<float>();
  const float* beside = residual ? residual->const_data_ptr<float>() : nullptr;
  const float* by = weight ? weight->const_data_ptr<float>() : nullptr;
  float* to = out.mutable_data_ptr<float>();
  float* sum = total ? total->mutable_data_ptr<float>() : nullptr;
  pybind11::gil_scoped_release release;
  each_row(rows, width, [&](int64_t i) {
    const float* row = from + i * width;
    if (beside != nullptr) {
      const float* other = beside + i * width;
      float* added = sum + i * width;
      for (int64_t j = 0; j < width; ++j) added[j] = row[j] + other[j];
      row = added;
    }
    norm_row(row, by, to + i * width, width, float(eps));
  });
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
    const at::Tensor& q_out, const at::Tensor& k_out, const at::Tensor& q, const at::Tensor& k,
    const at::Tensor& positions, const at::Tensor& cos, const at::Tensor& sin) {
  const Heads queries = heads_of(q_out, q), keys = heads_of(k_out, k);
  const int64_t width = q.size(2);
  pybind11::gil_scoped_release release;
  return positions.scalar_type() == at::kLong ? rotate<int64_t>(queries, keys, positions, cos, sin, width)
                                              : rotate<int32_t>(queries, keys, positions, cos, sin, width);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("norm", &norm);
  m.def("rope", &rope);
}
