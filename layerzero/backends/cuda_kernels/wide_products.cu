// Up to 64 rows at a time times a weight of four-bit codes. `arrange` writes the rows in the order in which
// codes come out of their words, as tiles that the matrix units load; `product` streams both through shared
// memory. A group of four warps has 128 columns of the result, two tiles of 64; two groups take every second
// 128 of K. Rows are the matrix units' operand in shared memory, codes become the one in registers.

typedef unsigned long long u64;
#define ROWS 64
#define STAGES 3
#define CHUNK_BYTES (ROWS * 256)
#define COLUMNS 128

// image[tile of rows][chunk][step][half][row][lane of four], in pairs of numbers
extern "C" __global__ void arrange(const u16* x, u32* image, int rows, int inner, int x_row) {
  const int chunk = blockIdx.x, tile = blockIdx.y, chunks = inner / 128;
  u32* to = image + ((i64)tile * chunks + chunk) * (CHUNK_BYTES / 4);
  for (int piece = threadIdx.x; piece < ROWS * 16; piece += blockDim.x) {
    const int t = piece % 4, line = piece / 4 % ROWS, j = piece / 4 / ROWS, row = tile * ROWS + line;
    Four r{{0, 0, 0, 0}};
    if (row < rows) r = load_rows(x + (i64)row * x_row + chunk * 128 + 32 * t + 8 * j);
    const u32 pairs[4] = {__byte_perm(r.x[0], r.x[2], 0x5410), __byte_perm(r.x[0], r.x[2], 0x7632),
                          __byte_perm(r.x[1], r.x[3], 0x5410), __byte_perm(r.x[1], r.x[3], 0x7632)};
    #pragma unroll
    for (int i = 0; i < 4; ++i) to[((4 * j + i) * ROWS + line) * 4 + t] = pairs[i];
  }
}

__device__ __forceinline__ void copy_async(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}

// A tile of rows as the matrix units find it: 8 rows of 16 bytes lie together, 128 bytes from one such block to
// the next along the rows, ROWS * 16 along K. Source: PTX ISA, matrix descriptors without swizzling.
__device__ __forceinline__ u64 descriptor(u32 address) {
  return (u64)(address >> 4 & 0x3fff) | (u64)ROWS << 16 | (u64)8 << 32;
}

// sums (64 columns x 64 rows) = a (64 x 16) * the tile's 16 of K, plus themselves where `adds`
__device__ __forceinline__ void multiply_group(float (&d)[8][4], const u32 (&a)[4], u64 tile, int adds) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %37, 0;"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1, 0;}"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tile), "r"(adds));
}

extern "C" __global__ void __launch_bounds__(256, 1) product(
    const u8* image, const u8* codes, const u8* scales, const u8* zeros, const float* second, const u16* bias,
    void* out, int rows, int width, int inner, int codes_row, int scale_row, int has_zeros, int has_second,
    int has_bias, int parts) {
  extern __shared__ __align__(128) u8 memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int beside = warp % 4, group = warp / 4, part = blockIdx.y, tile = blockIdx.z;
  const int first_column = blockIdx.x * COLUMNS + 16 * beside;
  const int chunks = inner / 128, from = chunks * part / parts, to = chunks * (part + 1) / parts;
  const int turns = (to - from + 1) / 2;
  const u8* rows_image = image + (i64)tile * chunks * CHUNK_BYTES;
  const u32 base_address = (u32)__cvta_generic_to_shared(memory);
  const u32 stage_bytes = 2 * CHUNK_BYTES + 256 * 64;
  int column[2][2];
  #pragma unroll
  for (int s = 0; s < 2; ++s)
    #pragma unroll
    for (int h = 0; h < 2; ++h) column[s][h] = min(first_column + 64 * s + g + 8 * h, width - 1);

  Scales next_scales[2][2];
  auto fetch_scales = [&](int turn) {
    const int chunk = min(from + 2 * turn + group, to - 1);
    #pragma unroll
    for (int s = 0; s < 2; ++s)
      #pragma unroll
      for (int h = 0; h < 2; ++h)
        next_scales[s][h] = load_scales(scales, zeros, has_zeros, (i64)column[s][h] * scale_row, chunk, t);
  };
  fetch_scales(0);
  auto fetch = [&](int turn) {
    if (turn < turns) {
      const u32 stage = base_address + turn % STAGES * stage_bytes;
      const int chunk = from + 2 * turn, count = min(2, to - chunk) * (CHUNK_BYTES / 16);
      for (int piece = threadIdx.x; piece < count; piece += 256)
        copy_async(stage + 16 * piece, rows_image + (i64)chunk * CHUNK_BYTES + 16 * piece);
      const int own = min(chunk + group, to - 1);
      #pragma unroll
      for (int i = 0; i < 4; ++i)
        copy_async(stage + 2 * CHUNK_BYTES + (i * 256 + threadIdx.x) * 16,
                   codes + (i64)column[i / 2][i % 2] * codes_row + own * 64 + 16 * t);
    }
    asm volatile("cp.async.commit_group;");
  };

  float sums[2][8][4];
  #pragma unroll
  for (int s = 0; s < 2; ++s)
    #pragma unroll
    for (int m = 0; m < 8; ++m)
      #pragma unroll
      for (int i = 0; i < 4; ++i) sums[s][m][i] = 0.0f;

  #pragma unroll
  for (int turn = 0; turn < STAGES - 1; ++turn) fetch(turn);
  for (int turn = 0; turn < turns; ++turn) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
    // The matrix units read shared memory by another way than the copies have written it.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    fetch(turn + STAGES - 1);
    const int chunk = from + 2 * turn + group;
    if (chunk >= to) continue;
    const u32 stage = base_address + turn % STAGES * stage_bytes;
    const u8* own_codes = memory + turn % STAGES * stage_bytes + 2 * CHUNK_BYTES;
    Four words[2][2];
    u32 base[2][2][2];
    float scale[2][2];
    #pragma unroll
    for (int s = 0; s < 2; ++s)
      #pragma unroll
      for (int h = 0; h < 2; ++h) {
        words[s][h] = *(const Four*)(own_codes + ((2 * s + h) * 256 + threadIdx.x) * 16);
        use_scales(base[s][h], scale[s][h], next_scales[s][h]);
      }
    fetch_scales(turn + 1);
    const u32 tiles = stage + group * CHUNK_BYTES;
#if SCALE == 0
    float partial[2][8][4];
#else
    float (&partial)[2][8][4] = sums;
#endif
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    #pragma unroll
    for (int j = 0; j < 4; ++j)
      #pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32 a[2][4];
        #pragma unroll
        for (int s = 0; s < 2; ++s) {
          const u32 even = words[s][0].x[j], odd = words[s][1].x[j], b = base[s][0][j / 2], c = base[s][1][j / 2];
          a[s][0] = half ? numbers<2>(even, b) : numbers<0>(even, b);
          a[s][1] = half ? numbers<2>(odd, c) : numbers<0>(odd, c);
          a[s][2] = half ? numbers<3>(even, b) : numbers<1>(even, b);
          a[s][3] = half ? numbers<3>(odd, c) : numbers<1>(odd, c);
        }
        const u64 tile = descriptor(tiles + (2 * j + half) * (2 * ROWS * 16));
        #pragma unroll
        for (int s = 0; s < 2; ++s) multiply_group(partial[s], a[s], tile, SCALE != 0 || j + half > 0);
      }
    asm volatile("wgmma.commit_group.sync.aligned;");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#if SCALE == 0
    #pragma unroll
    for (int s = 0; s < 2; ++s)
      #pragma unroll
      for (int m = 0; m < 8; ++m)
        #pragma unroll
        for (int i = 0; i < 4; ++i) sums[s][m][i] += partial[s][m][i] * scale[s][i / 2];
#endif
  }

  // Both groups' sums; lane (g, t) has columns g and g + 8, rows 2t and 2t + 1 of a tile.
  asm volatile("cp.async.wait_group 0;");
  __syncthreads();
  float* shares = (float*)memory;
  #pragma unroll
  for (int s = 0; s < 2; ++s)
    #pragma unroll
    for (int m = 0; m < 8; ++m)
      #pragma unroll
      for (int i = 0; i < 4; ++i)
        shares[(group * ROWS + 8 * m + 2 * t + i % 2) * (COLUMNS + 4) + 64 * s + 16 * beside + g + i / 2 * 8] =
            sums[s][m][i];
  __syncthreads();
  for (int at = threadIdx.x; at < ROWS * COLUMNS; at += 256) {
    const int line = at / COLUMNS, row = tile * ROWS + line, own = at % COLUMNS;
    const int place_in_row = blockIdx.x * COLUMNS + own;
    if (row >= rows || place_in_row >= width) continue;
    float total = shares[line * (COLUMNS + 4) + own] + shares[(ROWS + line) * (COLUMNS + 4) + own];
    if (has_second) total *= *second;
    const i64 place = (i64)row * width + place_in_row;
    if (parts > 1) {
      ((float*)out)[(i64)part * rows * width + place] = total;
    } else {
      if (has_bias) total += wide(bias[place_in_row]);
      ((u16*)out)[place] = narrow(total);
    }
  }
}
