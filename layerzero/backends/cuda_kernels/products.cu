// Few rows of sixteen bits times a weight of four-bit codes, which are read once, as they lie. The warps of a
// block share 16 * STRIPS columns of the result and divide K; a lane reads 32 neighbouring codes of a column.
// Sums over K may go in any order that both operands share, so codes become numbers in the order in which their
// bits come out, and rows are read in that order. Where the device needs more blocks, K is cut in parts.
// TILES (1 or 2) are 8 rows each.

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) product(
    const u16* x, const u8* codes, const u8* scales, const u8* zeros, const float* second, const u16* bias,
    void* out, int rows, int width, int inner, int x_row, int codes_row, int scale_row,
    int has_second, int has_bias, int parts) {
  wait_for_previous();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first_column = blockIdx.x * 16 * STRIPS, part = blockIdx.y, first_row = blockIdx.z * 8 * TILES;
  const int chunks = inner / 128, from = chunks * part / parts, to = chunks * (part + 1) / parts;

  float sums[STRIPS][TILES][4];
  #pragma unroll
  for (int s = 0; s < STRIPS; ++s)
    #pragma unroll
    for (int m = 0; m < TILES; ++m)
      #pragma unroll
      for (int i = 0; i < 4; ++i) sums[s][m][i] = 0.0f;

  auto column_of = [&](int strip, int half) { return min(first_column + 16 * strip + g + 8 * half, width - 1); };
  Four next[AHEAD][STRIPS][2];  // what is on its way, by turn
  Scales next_scales[AHEAD][STRIPS][2];
  Four next_lines[AHEAD][TILES][4];  // rows, which come from the cache, too: they wait as long
  auto fetch = [&](int chunk, Four (&into)[STRIPS][2], Scales (&scales_into)[STRIPS][2], Four (&lines_into)[TILES][4]) {
    if (chunk >= to) return;
    #pragma unroll
    for (int s = 0; s < STRIPS; ++s)
      #pragma unroll
      for (int h = 0; h < 2; ++h) {
        into[s][h] = load_once(codes + (i64)column_of(s, h) * codes_row + chunk * 64 + 16 * t);
        const i64 own_scales = (i64)column_of(s, h) * scale_row;
        scales_into[s][h] = load_scales(
            scales + own_scales * (SCALE == 0 ? 4 : 1), zeros + own_scales, chunk, t);
      }
    #pragma unroll
    for (int m = 0; m < TILES; ++m) {
      const int row = first_row + 8 * m + g;
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        lines_into[m][j] = Four{{0, 0, 0, 0}};
        if (row < rows) lines_into[m][j] = load_rows(x + (i64)row * x_row + chunk * 128 + 32 * t + 8 * j);
      }
    }
  };
  #pragma unroll
  for (int turn = 0; turn < AHEAD; ++turn) 
      fetch(from + warp + turn * WARPS, next[turn], next_scales[turn], next_lines[turn]);
  for (int begin = from + warp; begin < to; begin += AHEAD * WARPS) {
   #pragma unroll
   for (int turn = 0; turn < AHEAD; ++turn) {
    const int chunk = begin + turn * WARPS;
    if (chunk >= to) break;
    Four now[STRIPS][2];
    Scales own[STRIPS][2];
    #pragma unroll
    for (int s = 0; s < STRIPS; ++s)
      #pragma unroll
      for (int h = 0; h < 2; ++h) {
        now[s][h] = next[turn][s][h];
        own[s][h] = next_scales[turn][s][h];
      }
    Four lines[TILES][4];
    #pragma unroll
    for (int m = 0; m < TILES; ++m) {
      #pragma unroll
      for (int j = 0; j < 4; ++j) lines[m][j] = next_lines[turn][m][j];
    }
    fetch(chunk + AHEAD * WARPS, next[turn], next_scales[turn], next_lines[turn]);
    #pragma unroll
    for (int s = 0; s < STRIPS; ++s) {
      Base base[2][2];  // of the column's first and second half of a lane's codes
      float scale[2];
      #pragma unroll
      for (int h = 0; h < 2; ++h)
        use_scales(base[h], scale[h], own[s][h]);
      float partial[TILES][4];
      #pragma unroll
      for (int m = 0; m < TILES; ++m)
        #pragma unroll
        for (int i = 0; i < 4; ++i) partial[m][i] = 0.0f;
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        const u32 even = now[s][0].x[j], odd = now[s][1].x[j];
        const Base &b = base[0][j / 2], &c = base[1][j / 2];
        const u32 a[2][4] = {{numbers<0>(even, b), numbers<0>(odd, c), numbers<1>(even, b), numbers<1>(odd, c)},
                             {numbers<2>(even, b), numbers<2>(odd, c), numbers<3>(even, b), numbers<3>(odd, c)}};
        #pragma unroll
        for (int m = 0; m < TILES; ++m) {
          const Four& r = lines[m][j];
          multiply(partial[m], a[0], __byte_perm(r.x[0], r.x[2], 0x5410), __byte_perm(r.x[0], r.x[2], 0x7632));
          multiply(partial[m], a[1], __byte_perm(r.x[1], r.x[3], 0x5410), __byte_perm(r.x[1], r.x[3], 0x7632));
        }
      }
      #pragma unroll
      for (int m = 0; m < TILES; ++m)
        #pragma unroll
        for (int i = 0; i < 4; ++i)
#if SCALE == 0
          sums[s][m][i] += partial[m][i] * scale[i / 2];
#else
          sums[s][m][i] += partial[m][i];
#endif
    }
   }
  }

  let_next_begin();
  // The warps' sums, added in the order of the warps. Lane (g, t) has columns g and g + 8, rows 2t and 2t + 1.
  __shared__ float shares[WARPS][8 * TILES][16 * STRIPS + 4];
  #pragma unroll
  for (int s = 0; s < STRIPS; ++s)
    #pragma unroll
    for (int m = 0; m < TILES; ++m)
      #pragma unroll
      for (int i = 0; i < 4; ++i)
        shares[warp][8 * m + 2 * t + i % 2][16 * s + g + i / 2 * 8] = sums[s][m][i];
  __syncthreads();
  for (int at = threadIdx.x; at < 128 * TILES * STRIPS; at += WARPS * 32) {
    const int column = at % (16 * STRIPS), row = at / (16 * STRIPS);
    if (first_row + row >= rows || first_column + column >= width) continue;
    float total = 0.0f;
    #pragma unroll
    for (int w = 0; w < WARPS; ++w) total += shares[w][row][column];
    total *= has_second ? *second * LIFTED : LIFTED;
    const i64 place = (i64)(first_row + row) * width + first_column + column;
    if (parts > 1) {
      ((float*)out)[(i64)part * rows * width + place] = total;
    } else {
      if (has_bias) total += wide(bias[first_column + column]);
      ((u16*)out)[place] = narrow(total);
    }
  }
}
