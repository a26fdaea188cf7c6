// Parts of a result, put together in a fixed order.

// A block a row, a thread a feature: parts (row, part, feature), each beside its largest score and its weight.
extern "C" __global__ void join_parts(
    const float* mixed, const float* best, const float* weight, u16* out, int parts) {
  wait_for_previous();
  const i64 row = blockIdx.x;
  const int width = blockDim.x;
  float largest = -__int_as_float(0x7f800000), total = 0.0f, sum = 0.0f;
  for (int part = 0; part < parts; ++part) largest = fmaxf(largest, best[row * parts + part]);
  for (int part = 0; part < parts; ++part) {
    if (best[row * parts + part] == -__int_as_float(0x7f800000)) continue;
    const float share = exp2f(best[row * parts + part] - largest);
    total += weight[row * parts + part] * share;
    sum += mixed[(row * parts + part) * width + threadIdx.x] * share;
  }
  out[row * width + threadIdx.x] = narrow(total > 0.0f ? sum / total : 0.0f * total);
}

extern "C" __global__ void add_parts(
    const float* sums, const u16* bias, u16* out, int count, int width, int has_bias, int parts) {
  wait_for_previous();
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= count) return;
  float total = 0.0f;
  for (int part = 0; part < parts; ++part) total += sums[(i64)part * count + at];
  if (has_bias) total += wide(bias[at % width]);
  out[at] = narrow(total);
}
