// The norm of one row, alone and in front of a product: a row's sums are taken in one order wherever it is normed.

#pragma once

#include <cmath>
#include <cstdint>

namespace {

constexpr int64_t LANES = 16;  // partial sums, which the compiler keeps in registers

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

}  // namespace
