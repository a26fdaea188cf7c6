// Attention of one token a sequence over pages of codes of eight bits. A warp takes 16 tokens at a time: what it
// loads goes into the matrix units' registers as it lies, because sums over features may go in any order that
// queries and keys share, and so may columns of the result. Codes become float16, exactly; queries are scaled
// by a power of two so that they fit. Source of the online softmax: arXiv 1805.02867; of parts: Flash-Decoding.
//
// HEADS query heads share a key head (at most 8), WIDTH is 128, PAGE the tokens of a page; KIND is 0 for e4m3,
// 1 for e5m2, 2 for int8; BY_TOKEN says that scales are a token's; INDEX is the type of tables and lengths.

#define WARPS 4
#define TILES (WIDTH / 8)
#define FULL 0xffffffffu

// Two codes in the low half of `pair` as two numbers of float16.
__device__ __forceinline__ u32 numbers(u32 pair) {
  u32 out;
#if KIND == 0
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(out) : "h"((u16)pair));
#elif KIND == 1
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(out) : "h"((u16)pair));
#else
  asm("{.reg .b32 t; prmt.b32 t, %1, 0x64646464, 0x4140; xor.b32 t, t, 0x00800080;"
      "sub.rn.f16x2 %0, t, %2;}" : "=r"(out) : "r"(pair), "r"(0x64806480u));
#endif
  return out;
}

__device__ __forceinline__ u32 as_halves(float low, float high) {
  u32 out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

// sums (16 x 8) += a (16 x 16) * b (16 x 8)
__device__ __forceinline__ void multiply(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9},"
               "{%0,%1,%2,%3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// A matrix of 8 x 8 numbers in pairs, its rows and columns exchanged.
__device__ __forceinline__ u32 transposed(u32 pair) {
  u32 out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
  return out;
}

__device__ __forceinline__ float exp2_of(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

__device__ __forceinline__ float over_lanes(float x, int from, int to, bool largest) {
  #pragma unroll
  for (int distance = from; distance <= to; distance *= 2) {
    const float other = __shfl_xor_sync(FULL, x, distance);
    x = largest ? fmaxf(x, other) : x + other;
  }
  return x;
}

struct Tile {
  Four keys[4], values[4];  // of tokens g and g + 8, two loads each; of tokens 2t, 2t + 1, 2t + 8, 2t + 9
  float scale;  // by lane: of keys g and g + 8, then the logarithms of those of values
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) decode(
    const u16* q, const u8* k, const u8* v, const INDEX* tables, const INDEX* lens,
    void* out, float* best_out, float* weight_out, const float* k_scale, const float* v_scale,
    double scale_log2, int q_row, int q_head, int k_page, int k_token, int k_head, int v_page, int v_token,
    int v_head, int tables_row, int scale_page, int scale_token, int scale_head, int parts) {
  wait_for_previous();
  const int sequence = blockIdx.x, head = blockIdx.y, part = blockIdx.z, key_heads = gridDim.y;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int length = (int)lens[sequence];
  const int size = ((length + parts - 1) / parts + 63) / 64 * 64;
  const int first = part * size, last = min(first + size, length);
  const INDEX* table = tables + (i64)sequence * tables_row;
  const float infinity = __int_as_float(0x7f800000);

  // Queries: column g of the second operand, features in the order in which a lane holds those of a key.
  u32 queries[TILES / 2][2];
  float factor = 1.0f;
  {
    float x[TILES / 2][4], largest = 0.0f;
    const u16* row = q + (i64)sequence * q_row + (i64)(head * HEADS + (g < HEADS ? g : 0)) * q_head;
    #pragma unroll
    for (int step = 0; step < TILES / 2; ++step)
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[step][i] = g < HEADS ? wide(row[step / 4 * 64 + 16 * t + step % 4 * 4 + i]) : 0.0f;
        largest = fmaxf(largest, fabsf(x[step][i]));
      }
    largest = over_lanes(largest, 1, 2, true);
    const int exponent = (__float_as_int(largest) >> 23) & 0xff;
    if (exponent >= 10 && exponent < 255) factor = __int_as_float((2 * 127 + 10 - exponent) << 23);
    #pragma unroll
    for (int step = 0; step < TILES / 2; ++step) {
      queries[step][0] = as_halves(x[step][0] * factor, x[step][1] * factor);
      queries[step][1] = as_halves(x[step][2] * factor, x[step][3] * factor);
    }
  }
  float own_log2 = (float)scale_log2 / factor;
#if !BY_TOKEN
  own_log2 *= k_scale[head * scale_head];
#endif
  // Scores are of heads 2t and 2t + 1: their factors come from the lanes of these rows.
  const float to_log2[2] = {__shfl_sync(FULL, own_log2, 8 * t), __shfl_sync(FULL, own_log2, 8 * t + 4)};

  auto fetch = [&](int start, Tile& tile) {
    // Sixteen tokens from a multiple of sixteen lie in one page, where pages have a multiple of sixteen.
    const i64 page_of_first = (i64)table[start / PAGE];
    auto page_of = [&](int token) { return PAGE % 16 == 0 ? page_of_first : (i64)table[token / PAGE]; };
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = min(start + g + 8 * i, last - 1);
      const u8* row = k + page_of(token) * k_page + (i64)(token % PAGE) * k_token + (i64)head * k_head;
      tile.keys[2 * i] = load_once(row + 16 * t);
      tile.keys[2 * i + 1] = load_once(row + 64 + 16 * t);
    }
#if BY_TOKEN
    {
      const int token = min(start + g + t % 2 * 8, last - 1);
      const i64 place = page_of(token) * scale_page + (i64)(token % PAGE) * scale_token + (i64)head * scale_head;
      tile.scale = (t < 2 ? k_scale : v_scale)[place];
    }
#endif
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = min(start + 2 * t + i % 2 + i / 2 * 8, last - 1);
      tile.values[i] = load_once(
          v + page_of(token) * v_page + (i64)(token % PAGE) * v_token + (i64)head * v_head + 16 * g);
    }
  };

  // Rows g and g + 8 of tile i are features 16g + 2i and 16g + 2i + 1, columns are heads 2t and 2t + 1.
  float mixed[TILES / 2][4];
  #pragma unroll
  for (int i = 0; i < TILES / 2; ++i)
    #pragma unroll
    for (int j = 0; j < 4; ++j) mixed[i][j] = 0.0f;
  // `best` is of the scores, `top` of the scores with their values' scales in them: what `mixed` is scaled by.
  float best[2] = {-infinity, -infinity}, weight[2] = {0.0f, 0.0f};
#if BY_TOKEN
  float top[2] = {-infinity, -infinity};
#endif

  Tile tile;
  int start = first + 16 * warp;
  if (start < last) fetch(start, tile);
  for (; start < last; start += 16 * WARPS) {
    const Tile now = tile;
    if (start + 16 * WARPS < last) fetch(start + 16 * WARPS, tile);
    float scores[2][4];  // of even and odd steps: two chains of sums
    #pragma unroll
    for (int i = 0; i < 2; ++i)
      #pragma unroll
      for (int j = 0; j < 4; ++j) scores[i][j] = 0.0f;
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32 (&low)[4] = now.keys[half].x, (&high)[4] = now.keys[2 + half].x;
      #pragma unroll
      for (int w = 0; w < 4; ++w)
        multiply(scores[w % 2], numbers(low[w]), numbers(high[w]), numbers(low[w] >> 16), numbers(high[w] >> 16),
                 queries[4 * half + w][0], queries[4 * half + w][1]);
    }
    float p[4];  // of tokens g and g + 8, heads 2t and 2t + 1 each
#if BY_TOKEN
    const float mine = t < 2 ? now.scale : __log2f(now.scale);
    const float of_keys[2] = {__shfl_sync(FULL, mine, lane & ~3), __shfl_sync(FULL, mine, lane & ~3 | 1)};
    const float of_values[2] = {__shfl_sync(FULL, mine, lane & ~3 | 2), __shfl_sync(FULL, mine, lane | 3)};
#endif
    float shrink[2];
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      p[i] = (scores[0][i] + scores[1][i]) * to_log2[i % 2];
#if BY_TOKEN
      p[i] *= of_keys[i / 2];
#endif
      if (start + g + i / 2 * 8 >= last) p[i] = -infinity;
    }
    #pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float new_best = fmaxf(best[n], over_lanes(fmaxf(p[n], p[n + 2]), 4, 16, true));
      const float base = new_best == -infinity ? 0.0f : new_best;
      shrink[n] = exp2_of(best[n] - base);
      best[n] = new_best;
#if BY_TOKEN
      const float shifted[2] = {p[n] + of_values[0], p[n + 2] + of_values[1]};
      const float new_top = fmaxf(top[n], over_lanes(fmaxf(shifted[0], shifted[1]), 4, 16, true));
      const float top_base = new_top == -infinity ? 0.0f : new_top;
      weight[n] = weight[n] * shrink[n] + exp2_of(p[n] - base) + exp2_of(p[n + 2] - base);
      shrink[n] = exp2_of(top[n] - top_base);
      top[n] = new_top;
      p[n] = exp2_of(shifted[0] - top_base);
      p[n + 2] = exp2_of(shifted[1] - top_base);
#else
      p[n] = exp2_of(p[n] - base);
      p[n + 2] = exp2_of(p[n + 2] - base);
      weight[n] = weight[n] * shrink[n] + p[n] + p[n + 2];
#endif
    }
    const u32 p_low = transposed(as_halves(p[0], p[1])), p_high = transposed(as_halves(p[2], p[3]));
    if (__any_sync(FULL, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
      #pragma unroll
      for (int i = 0; i < TILES / 2; ++i)
        #pragma unroll
        for (int j = 0; j < 4; ++j) mixed[i][j] *= shrink[j % 2];
    }
    #pragma unroll
    for (int w = 0; w < 4; ++w) {
      // The codes of two tokens beside each other, feature by feature.
      const u32 a = __byte_perm(now.values[0].x[w], now.values[1].x[w], 0x5140);
      const u32 b = __byte_perm(now.values[0].x[w], now.values[1].x[w], 0x7362);
      const u32 c = __byte_perm(now.values[2].x[w], now.values[3].x[w], 0x5140);
      const u32 d = __byte_perm(now.values[2].x[w], now.values[3].x[w], 0x7362);
      multiply(mixed[2 * w], numbers(a), numbers(a >> 16), numbers(c), numbers(c >> 16), p_low, p_high);
      multiply(mixed[2 * w + 1], numbers(b), numbers(b >> 16), numbers(d), numbers(d >> 16), p_low, p_high);
    }
  }

  // The warps' shares meet.
  __shared__ float shares[WARPS][8][WIDTH + 4], bests[WARPS][8], weights[WARPS][8];
  #pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int row = 2 * t + n;
#if BY_TOKEN
    const float scaled = top[n] == -infinity ? 0.0f : exp2_of(top[n] - best[n]);
#else
    const float scaled = v_scale[head * scale_head];
#endif
    const float sum = over_lanes(weight[n], 4, 16, false);
    if (g == 0) {
      bests[warp][row] = best[n];
      weights[warp][row] = sum;
    }
    #pragma unroll
    for (int i = 0; i < TILES / 2; ++i) {
      shares[warp][row][16 * g + 2 * i] = mixed[i][n] * scaled;
      shares[warp][row][16 * g + 2 * i + 1] = mixed[i][n + 2] * scaled;
    }
  }
  __syncthreads();
  for (int at = threadIdx.x; at < HEADS * WIDTH; at += WARPS * 32) {
    const int row = at / WIDTH, feature = at % WIDTH;
    float top_of_all = -infinity;
    for (int w = 0; w < WARPS; ++w) top_of_all = fmaxf(top_of_all, bests[w][row]);
    float total = 0.0f, sum = 0.0f;
    for (int w = 0; w < WARPS; ++w) {
      if (bests[w][row] == -infinity) continue;
      const float part_of_all = exp2_of(bests[w][row] - top_of_all);
      total += weights[w][row] * part_of_all;
      sum += shares[w][row][feature] * part_of_all;
    }
    const i64 place = ((i64)sequence * key_heads * HEADS + head * HEADS + row) * parts + part;
    if (parts == 1) {
      ((u16*)out)[place * WIDTH + feature] = narrow(total > 0.0f ? sum / total : 0.0f * total);
    } else {
      ((float*)out)[place * WIDTH + feature] = sum;
      if (feature == 0) {
        best_out[place] = top_of_all;
        weight_out[place] = total;
      }
    }
  }
}
