// Up to ROWS rows at a time (32, 64 or 128) times a weight of four-bit codes. `arrange` writes the rows in the order
// in which codes come out of their words, as tiles that the matrix units load; `product` streams both through
// shared memory, STAGES - 1 turns ahead. A group of four warps has 64 columns of the result and one chunk of 128
// of K in a turn; KGROUPS pairs of groups share K. Rows are the matrix units' operand in shared memory, codes
// become the one in registers: those of the next turn while the matrix units have this one.

typedef unsigned long long u64;
#define CHUNK_BYTES (ROWS * 256)
#define COLUMNS 128
#define BARRIER_BYTES 128
#define TILE_BYTES (KGROUPS * CHUNK_BYTES)
#define STAGE_BYTES (KGROUPS * (CHUNK_BYTES + 2 * 256 * 16))
#define THREADS (KGROUPS * 256)
#define BLOCKS_OF_8 (ROWS / 8)

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

// By one thread: a tile of rows, copied the way that the matrix units read.
__device__ __forceinline__ void copy_tile(u32 to, const u8* from, u32 barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "n"(TILE_BYTES) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "n"(TILE_BYTES), "r"(barrier) : "memory");
}

// Until a barrier's phase has ended; phases are even and odd in turns.
__device__ __forceinline__ void wait_for(u32 barrier, u32 phase) {
  u32 done;
  do {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done) : "r"(barrier), "r"(phase) : "memory");
  } while (!done);
}

// A tile of rows as the matrix units find it: 8 rows of 16 bytes lie together, 128 bytes from one such block to
// the next along the rows, ROWS * 16 along K. Source: PTX ISA, matrix descriptors without swizzling.
__device__ __forceinline__ u64 descriptor(u32 address) {
  return (u64)(address >> 4 & 0x3fff) | (u64)ROWS << 16 | (u64)8 << 32;
}

// The registers of a group's sums, named and bound, by how many a lane has of them.
#define R16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define R32 R16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define R64 R32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define B4(m) "+f"(d[m][0]), "+f"(d[m][1]), "+f"(d[m][2]), "+f"(d[m][3])
#define B16 B4(0), B4(1), B4(2), B4(3)
#define B32 B16, B4(4), B4(5), B4(6), B4(7)
#define B64 B32, B4(8), B4(9), B4(10), B4(11), B4(12), B4(13), B4(14), B4(15)
#if ROWS == 32
#define REGISTERS R16
#define OTHERS "{%16,%17,%18,%19}, %20, %21"
#define BOUND B16
#define SHAPE "m64n32k16"
#elif ROWS == 64
#define REGISTERS R32
#define OTHERS "{%32,%33,%34,%35}, %36, %37"
#define BOUND B32
#define SHAPE "m64n64k16"
#else
#define REGISTERS R64
#define OTHERS "{%64,%65,%66,%67}, %68, %69"
#define BOUND B64
#define SHAPE "m64n128k16"
#endif

// sums (64 columns x ROWS rows) = a (64 x 16) * the tile's 16 of K, plus themselves where ADDS
template <int ADDS>
__device__ __forceinline__ void multiply_group(float (&d)[BLOCKS_OF_8][4], const u32 (&a)[4], u64 tile) {
  asm volatile("wgmma.mma_async.sync.aligned." SHAPE ".f32." TYPE "." TYPE " {" REGISTERS "}, " OTHERS ", 1, 1, 0;"
               : BOUND
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tile), "n"(ADDS));
}

// A lane's part of a chunk: numbers for the eight steps along K, their scales by column, and the scales that are
// on their way for the chunk behind the next one.
struct Chunk {
  u32 a[8][4];
  float scale[2];
  Scales fetched[2];
};

// The operand in registers of a chunk's eight steps along K, from a lane's words of two columns.
__device__ __forceinline__ void decode(
    u32 (&a)[8][4], const u8* own_codes, const u32 (&base)[2][2]) {
  const Four even = *(const Four*)own_codes, odd = *(const Four*)(own_codes + 256 * 16);
  #pragma unroll
  for (int j = 0; j < 4; ++j) {
    const u32 b = base[0][j / 2], c = base[1][j / 2];
    a[2 * j][0] = numbers<0>(even.x[j], b);
    a[2 * j][1] = numbers<0>(odd.x[j], c);
    a[2 * j][2] = numbers<1>(even.x[j], b);
    a[2 * j][3] = numbers<1>(odd.x[j], c);
    a[2 * j + 1][0] = numbers<2>(even.x[j], b);
    a[2 * j + 1][1] = numbers<2>(odd.x[j], c);
    a[2 * j + 1][2] = numbers<3>(even.x[j], b);
    a[2 * j + 1][3] = numbers<3>(odd.x[j], c);
  }
  // Here, and not where they are used: behind the matrix units, which this is to hide.
  #pragma unroll
  for (int step = 0; step < 8; ++step)
    #pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[step][i]));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) product(
    const u8* image, const u8* codes, const u8* scales, const u8* zeros, const float* second, const u16* bias,
    void* out, int rows, int width, int inner, int codes_row, int scale_row, int has_zeros, int has_second,
    int has_bias, int parts) {
  extern __shared__ __align__(128) u8 memory[];
  const int warp = threadIdx.x / 32 % 8, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int kgroup = threadIdx.x / 256, part = blockIdx.y, tile = blockIdx.z;
  const int own_column = 16 * warp + g;
  // The host sees to it that K is a whole number of turns.
  const int all_turns = inner / (128 * KGROUPS), first_turn = all_turns * part / parts;
  const int turns = all_turns * (part + 1) / parts - first_turn, from = first_turn * KGROUPS;
  const u8* rows_image = image + ((i64)tile * (inner / 128) + from) * CHUNK_BYTES;
  const u32 barriers = (u32)__cvta_generic_to_shared(memory), base_address = barriers + BARRIER_BYTES;
  const u32 own_codes = TILE_BYTES + threadIdx.x % 256 * 16 + kgroup * (2 * 256 * 16);
  if (threadIdx.x < 2 * STAGES)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                 ::"r"(barriers + 8 * threadIdx.x), "r"(threadIdx.x < STAGES ? 1 : THREADS / 32)
                 : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  int column[2];
  #pragma unroll
  for (int h = 0; h < 2; ++h) column[h] = min((int)blockIdx.x * COLUMNS + own_column + 8 * h, width - 1);

  auto fetch = [&](int turn) {
    if (turn < turns) {
      const u32 stage = base_address + turn % STAGES * STAGE_BYTES;
      if (threadIdx.x == 0) {
        const u32 filled = barriers + turn % STAGES * 8;
        if (turn >= STAGES) wait_for(filled + STAGES * 8, (turn / STAGES - 1) % 2);
        copy_tile(stage, rows_image + (i64)turn * TILE_BYTES, filled);
      }
      #pragma unroll
      for (int h = 0; h < 2; ++h)
        copy_async(stage + own_codes + h * (256 * 16),
                   codes + (i64)column[h] * codes_row + (from + turn * KGROUPS + kgroup) * 64 + 16 * t);
    }
    asm volatile("cp.async.commit_group;");
  };
  auto fetch_scales = [&](int turn, Scales (&fetched)[2]) {
    const int chunk = from + min(turn, turns - 1) * KGROUPS + kgroup;
    #pragma unroll
    for (int h = 0; h < 2; ++h)
      fetched[h] = load_scales(scales, zeros, has_zeros, (i64)column[h] * scale_row, chunk, t);
  };
  auto decode_turn = [&](int turn, Chunk& chunk) {
    u32 base[2][2];
    #pragma unroll
    for (int h = 0; h < 2; ++h) use_scales(base[h], chunk.scale[h], chunk.fetched[h]);
    fetch_scales(turn + 2, chunk.fetched);
    decode(chunk.a, memory + BARRIER_BYTES + turn % STAGES * STAGE_BYTES + own_codes, base);
  };

  float sums[BLOCKS_OF_8][4];
  #pragma unroll
  for (int m = 0; m < BLOCKS_OF_8; ++m)
    #pragma unroll
    for (int i = 0; i < 4; ++i) sums[m][i] = 0.0f;

  auto wait_for_rows = [&](int turn) { wait_for(barriers + turn % STAGES * 8, turn / STAGES % 2); };
  // The product of a turn, whose rows are there, while the next copies begin and the codes of the next turn become numbers.
  auto multiply_turn = [&](int turn, const Chunk& chunk, Chunk& next) {
    const u64 rows_tile = descriptor(base_address + turn % STAGES * STAGE_BYTES + kgroup * CHUNK_BYTES);
#if SCALE == 0
    float partial[BLOCKS_OF_8][4];
#else
    float (&partial)[BLOCKS_OF_8][4] = sums;
#endif
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    multiply_group<SCALE != 0>(partial, chunk.a[0], rows_tile);
    #pragma unroll
    for (int step = 1; step < 8; ++step)
      multiply_group<1>(partial, chunk.a[step], rows_tile + step * (2 * ROWS));
    asm volatile("wgmma.commit_group.sync.aligned;");
    fetch(turn + STAGES - 1);
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));  // a lane's own codes of the next turn
    decode_turn(turn + 1, next);
    if (turn + 1 < turns) wait_for_rows(turn + 1);
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    if (lane == 0)  // this warp has read the tile
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barriers + (STAGES + turn % STAGES) * 8) : "memory");
#if SCALE == 0
    #pragma unroll
    for (int m = 0; m < BLOCKS_OF_8; ++m)
      #pragma unroll
      for (int i = 0; i < 4; ++i) sums[m][i] += partial[m][i] * chunk.scale[i / 2];
#endif
  };

  Chunk even, odd;
  fetch_scales(0, even.fetched);
  fetch_scales(1, odd.fetched);
  #pragma unroll
  for (int turn = 0; turn < STAGES - 1; ++turn) fetch(turn);
  asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
  decode_turn(0, even);
  wait_for_rows(0);
  for (int turn = 0; turn < turns; turn += 2) {
    multiply_turn(turn, even, odd);
    if (turn + 1 < turns) multiply_turn(turn + 1, odd, even);
  }

  // Lane (g, t) has columns g and g + 8 of a warp's 16, rows 2t and 2t + 1 of each 8.
  asm volatile("cp.async.wait_group 0;");
  __syncthreads();
  float* shares = (float*)memory;
  #pragma unroll
  for (int m = 0; m < BLOCKS_OF_8; ++m)
    #pragma unroll
    for (int i = 0; i < 4; ++i)
      shares[(kgroup * ROWS + 8 * m + 2 * t + i % 2) * (COLUMNS + 4) + own_column + i / 2 * 8] = sums[m][i];
  __syncthreads();
  for (int at = threadIdx.x; at < ROWS * COLUMNS; at += THREADS) {
    const int line = at / COLUMNS, row = tile * ROWS + line, own = at % COLUMNS;
    const int place_in_row = blockIdx.x * COLUMNS + own;
    if (row >= rows || place_in_row >= width) continue;
    float total = shares[line * (COLUMNS + 4) + own];
#if KGROUPS == 2
    total += shares[(ROWS + line) * (COLUMNS + 4) + own];
#endif
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
