// Up to ROWS rows at a time (16 to 256), as arrange.cu writes them, times a weight of four-bit codes. Both stream
// through shared memory: one thread copies rows, ROW_STAGES turns ahead, each lane its own codes, CODE_STAGES ahead.
// A group of four warps has 64 columns of the result and one chunk of 128 of K in a turn; KGROUPS pairs of groups
// share K. Rows are the matrix units' operand in shared memory, codes become the one in registers, half a chunk
// at a time: the next half while the matrix units have this one.
// Float32 scales: one a column is multiplied at the end (GROUP is all of K: WHOLE). FOLDED: they are rounded to the
// rows' type and multiplied into the numbers, so that one set of sums is enough; else they multiply a chunk's sums.
// The kernel before it on the stream is arrange.cu's, which waits for all that is older.

typedef unsigned long long u64;
#define CHUNK_BYTES (ROWS * 256)
#define COLUMNS 128
#define BARRIER_BYTES 128
#define TILE_BYTES (KGROUPS * CHUNK_BYTES)
#define CODE_BYTES (KGROUPS * 2 * 256 * 16)
#define CONSUMERS (KGROUPS * 256)
// What a block is launched with (168 or 96 a thread), less the 24 of those that copy.
#define CONSUMER_REGISTERS (KGROUPS == 1 ? 240 : 112)
#define BLOCKS_OF_8 (ROWS / 8)
#define APART (SCALE == 0 && !FOLDED && !WHOLE)

__device__ __forceinline__ void copy_async(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
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

// A place in a ring of stages, and which time around it is.
template <int STAGES>
struct Ring {
  u32 at = 0, phase = 0;
  __device__ __forceinline__ void next() {
    if (++at == STAGES) {
      at = 0;
      phase ^= 1;
    }
  }
};

// The registers of a group's sums, named and bound, by how many a lane has of them.
#define R8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define R16 R8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define R32 R16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define R64 R32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define R128 R64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define B4(m) "+f"(d[m][0]), "+f"(d[m][1]), "+f"(d[m][2]), "+f"(d[m][3])
#define B8 B4(0), B4(1)
#define B16 B8, B4(2), B4(3)
#define B32 B16, B4(4), B4(5), B4(6), B4(7)
#define B64 B32, B4(8), B4(9), B4(10), B4(11), B4(12), B4(13), B4(14), B4(15)
#define B128 B64, B4(16), B4(17), B4(18), B4(19), B4(20), B4(21), B4(22), B4(23), B4(24), B4(25), B4(26), B4(27), B4(28), B4(29), B4(30), B4(31)
#if ROWS == 16
#define REGISTERS R8
#define OTHERS "{%8,%9,%10,%11}, %12, %13"
#define BOUND B8
#define SHAPE "m64n16k16"
#elif ROWS == 32
#define REGISTERS R16
#define OTHERS "{%16,%17,%18,%19}, %20, %21"
#define BOUND B16
#define SHAPE "m64n32k16"
#elif ROWS == 64
#define REGISTERS R32
#define OTHERS "{%32,%33,%34,%35}, %36, %37"
#define BOUND B32
#define SHAPE "m64n64k16"
#elif ROWS == 128
#define REGISTERS R64
#define OTHERS "{%64,%65,%66,%67}, %68, %69"
#define BOUND B64
#define SHAPE "m64n128k16"
#else
#define REGISTERS R128
#define OTHERS "{%128,%129,%130,%131}, %132, %133"
#define BOUND B128
#define SHAPE "m64n256k16"
#endif

typedef float Sums[BLOCKS_OF_8][4];

// sums (64 columns x ROWS rows) = a (64 x 16) * the tile's 16 of K, plus themselves where ADDS. A tile of rows lies
// as the matrix units find it: 8 rows of 16 bytes together, 128 bytes from one such block to the next along the
// rows, ROWS * 16 along K; `place` is the lower half of its descriptor. Source: PTX ISA, without swizzling.
template <int ADDS>
__device__ __forceinline__ void multiply_group(Sums& d, const u32 (&a)[4], u32 place) {
  u64 tile;
  asm("mov.b64 %0, {%1, 8};" : "=l"(tile) : "r"(place));
  asm volatile("wgmma.mma_async.sync.aligned." SHAPE ".f32." TYPE "." TYPE " {" REGISTERS "}, " OTHERS ", 1, 1, 0;"
               : BOUND
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tile), "n"(ADDS));
}

template <int KEEP>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(KEEP) : "memory");
}

// The operand in registers of half a chunk's eight steps along K, from a lane's words of two columns.
template <int half>
__device__ __forceinline__ void decode(
    u32 (&a)[4][4], const Four& even, const Four& odd, const Base (&base)[2][2], const u32 (&fold)[2]) {
  #pragma unroll
  for (int word = 0; word < 2; ++word) {
    const u32 e = even.x[2 * half + word], o = odd.x[2 * half + word];
    const Base &b = base[0][half], &c = base[1][half];
    u32 (&first)[4] = a[2 * word], (&second)[4] = a[2 * word + 1];
    first[0] = numbers<0>(e, b), first[1] = numbers<0>(o, c), first[2] = numbers<1>(e, b), first[3] = numbers<1>(o, c);
    second[0] = numbers<2>(e, b), second[1] = numbers<2>(o, c), second[2] = numbers<3>(e, b);
    second[3] = numbers<3>(o, c);
  }
#if SCALE == 0 && FOLDED && ZEROS && !WHOLE
  #pragma unroll
  for (int step = 0; step < 4; ++step)
    #pragma unroll
    for (int i = 0; i < 4; ++i) a[step][i] = times(a[step][i], fold[i % 2]);
#endif
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1) product(
    const u8* image, const u8* codes, const u8* scales, const u8* zeros, const float* second, const u16* bias,
    void* out, int rows, int width, int inner, int codes_row, int scale_row, int has_second,
    int has_bias, int parts) {
  extern __shared__ __align__(128) u8 memory[];
  const int part = blockIdx.y, tile = blockIdx.z;
  // The host sees to it that K is a whole number of turns.
  const int all_turns = inner / (128 * KGROUPS), first_turn = all_turns * part / parts;
  const int turns = all_turns * (part + 1) / parts - first_turn, from = first_turn * KGROUPS;
  const u32 barriers = (u32)__cvta_generic_to_shared(memory), tiles = barriers + BARRIER_BYTES;
  const u32 own_thread = threadIdx.x;

  if (own_thread < 2 * ROW_STAGES)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                 ::"r"(barriers + 8 * own_thread), "r"(own_thread < ROW_STAGES ? 1 : CONSUMERS / 32)
                 : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();

  if (own_thread >= CONSUMERS) {  // a group of warps that gives its registers away; one thread copies rows
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (own_thread == CONSUMERS) {
      wait_for_previous();  // for the rows; weights are read meanwhile
      const u8* next_tile = image + ((i64)tile * (inner / 128) + from) * CHUNK_BYTES;
      Ring<ROW_STAGES> ring;
      for (int turn = 0; turn < turns; ++turn, ring.next(), next_tile += TILE_BYTES) {
        if (turn >= ROW_STAGES) wait_for(barriers + 8 * (ROW_STAGES + ring.at), ring.phase ^ 1);
        copy_tile(tiles + ring.at * TILE_BYTES, next_tile, barriers + 8 * ring.at);
      }
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
  const int lane = own_thread % 32, g = lane / 4, t = lane % 4, warp = own_thread / 32 % 8;
#if KGROUPS == 1
  const int kgroup = 0;
#else
  const int kgroup = __shfl_sync(0xffffffff, own_thread / 256, 0);
#endif
  const int own_column = 16 * warp + g;
  const u8 *own_codes[2], *own_scales[2], *own_zeros[2];
  #pragma unroll
  for (int h = 0; h < 2; ++h) {
    const i64 column = min((int)blockIdx.x * COLUMNS + own_column + 8 * h, width - 1);
    own_codes[h] = codes + column * codes_row + (from + kgroup) * 64 + 16 * t;
    own_scales[h] = scales + column * scale_row * (SCALE == 0 ? 4 : 1);
    own_zeros[h] = zeros + column * scale_row;
  }
  const u32 slots = BARRIER_BYTES + ROW_STAGES * TILE_BYTES + kgroup * (2 * 256 * 16) + own_thread % 256 * 16;
  Ring<CODE_STAGES> to_fetch, to_decode;
  Ring<ROW_STAGES> to_multiply;
  #pragma unroll
  for (int turn = 0; turn < CODE_STAGES - 1; ++turn) {
    if (turn < turns)
      #pragma unroll
      for (int h = 0; h < 2; ++h)
        copy_async(barriers + slots + turn * CODE_BYTES + h * (256 * 16), own_codes[h] + turn * (64 * KGROUPS));
    asm volatile("cp.async.commit_group;");
    to_fetch.next();
  }
  #pragma unroll
  for (int h = 0; h < 2; ++h) own_codes[h] += (CODE_STAGES - 1) * (64 * KGROUPS);
  auto fetch_codes = [&](int turn) {
    if (turn < turns)
      #pragma unroll
      for (int h = 0; h < 2; ++h) {
        copy_async(barriers + slots + to_fetch.at * CODE_BYTES + h * (256 * 16), own_codes[h]);
        own_codes[h] += 64 * KGROUPS;
      }
    asm volatile("cp.async.commit_group;");
    to_fetch.next();
  };
  auto fetch_scales = [&](int turn, Scales (&fetched)[2]) {
    const int chunk = from + min(turn, turns - 1) * KGROUPS + kgroup;
    #pragma unroll
    for (int h = 0; h < 2; ++h) fetched[h] = load_scales(own_scales[h], own_zeros[h], chunk, t);
  };
#if SCALE == 0
  // A column's four lanes have one turn's each, and hand them round.
  Scales own[2], following[2];
  fetch_scales(t, own);
  fetch_scales(t + 4, following);
  auto scales_of = [&](int turn, Scales (&current)[2]) {
    #pragma unroll
    for (int h = 0; h < 2; ++h) {
      current[h].value = __shfl_sync(0xffffffff, own[h].value, turn % 4, 4);
      current[h].zero = ZEROS ? __shfl_sync(0xffffffff, own[h].zero, turn % 4, 4) : 8u;
    }
    if (turn % 4 == 3) {
      own[0] = following[0], own[1] = following[1];
      fetch_scales(turn + 5 + t, following);
    }
  };
#else
  Scales even_scales[2], odd_scales[2];
  fetch_scales(0, even_scales);
  fetch_scales(1, odd_scales);
  auto scales_of = [&](int turn, Scales (&current)[2]) {
    Scales (&fetched)[2] = turn % 2 ? odd_scales : even_scales;
    current[0] = fetched[0], current[1] = fetched[1];
    fetch_scales(turn + 2, fetched);
  };
#endif

  Sums sums, first_partial, second_partial;
  u32 a[2][4][4];
  #pragma unroll
  for (int m = 0; m < BLOCKS_OF_8; ++m)
    #pragma unroll
    for (int i = 0; i < 4; ++i) sums[m][i] = second_partial[m][i] = 0.0f;
  float scale_before[2] = {0.0f, 0.0f};
  const u32 first_place = (tiles + kgroup * CHUNK_BYTES) >> 4 | ROWS << 16;

  auto add = [&](const Sums& partial) {
    #pragma unroll
    for (int m = 0; m < BLOCKS_OF_8; ++m)
      #pragma unroll
      for (int i = 0; i < 4; ++i) sums[m][i] += partial[m][i] * scale_before[i / 2];
  };
  // One turn into `partial`, beside which the matrix units end the turn before it, into `before`.
  auto multiply_turn = [&](int turn, Sums& partial, const Sums& before) {
    asm volatile("cp.async.wait_group %0;" ::"n"(CODE_STAGES - 2) : "memory");  // a lane's own codes of this turn
    const u8* place = memory + slots + to_decode.at * CODE_BYTES;
    const Four even = *(const Four*)place, odd = *(const Four*)(place + 256 * 16);
    to_decode.next();
    fetch_codes(turn + CODE_STAGES - 1);
    Base base[2][2];
    u32 fold[2];
    float scale[2];
    Scales current[2];
    scales_of(turn, current);
    #pragma unroll
    for (int h = 0; h < 2; ++h) {
      use_scales(base[h], scale[h], current[h]);
      fold[h] = twice(scale[h]);
    }
    decode<0>(a[0], even, odd, base, fold);
    wait_for(barriers + 8 * to_multiply.at, to_multiply.phase);
    const u32 rows_tile = first_place + to_multiply.at * (TILE_BYTES / 16);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    multiply_group<!APART>(partial, a[0][0], rows_tile);
    #pragma unroll
    for (int step = 1; step < 4; ++step) multiply_group<1>(partial, a[0][step], rows_tile + step * (2 * ROWS));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    wait_for_products<1>();
    if (turn > 0 && lane == 0) {  // this warp has read the tile of the turn before
      const u32 before_at = (to_multiply.at == 0 ? ROW_STAGES : to_multiply.at) - 1;
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barriers + 8 * (ROW_STAGES + before_at)) : "memory");
    }
    decode<1>(a[1], even, odd, base, fold);
#if APART
    add(before);
    scale_before[0] = scale[0], scale_before[1] = scale[1];
#endif
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    #pragma unroll
    for (int step = 0; step < 4; ++step)
      multiply_group<1>(partial, a[1][step], rows_tile + (4 + step) * (2 * ROWS));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    wait_for_products<1>();
    to_multiply.next();
  };

  for (int turn = 0; turn < turns; turn += 2) {
#if APART
    multiply_turn(turn, first_partial, second_partial);
    if (turn + 1 < turns) multiply_turn(turn + 1, second_partial, first_partial);
#else
    multiply_turn(turn, sums, sums);
    if (turn + 1 < turns) multiply_turn(turn + 1, sums, sums);
#endif
  }
  wait_for_products<0>();
  let_next_begin();
#if APART
  if (turns % 2) add(first_partial);
  else add(second_partial);
#elif SCALE == 0 && WHOLE
  #pragma unroll
  for (int m = 0; m < BLOCKS_OF_8; ++m)
    #pragma unroll
    for (int i = 0; i < 4; ++i) sums[m][i] *= __uint_as_float(*(const u32*)own_scales[i / 2]);
#endif

  // Lane (g, t) has columns g and g + 8 of a warp's 16, rows 2t and 2t + 1 of each 8. The other warps' copies and
  // products have ended when all are here.
  asm volatile("cp.async.wait_group 0;");
  auto meet = [] { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); };
  meet();
  float* shares = (float*)memory;
  #pragma unroll
  for (int m = 0; m < BLOCKS_OF_8; ++m)
    #pragma unroll
    for (int i = 0; i < 4; ++i)
      shares[(kgroup * ROWS + 8 * m + 2 * t + i % 2) * (COLUMNS + 4) + own_column + i / 2 * 8] = sums[m][i];
  meet();
  // A lane has four columns, a warp every row of as many as there are warps.
  const int line_column = lane * 4, column = blockIdx.x * COLUMNS + line_column;
  const bool whole = column + 4 <= width && width % 4 == 0;
  const float factor = has_second ? *second * LIFTED : LIFTED;
  float offset[4];
  #pragma unroll
  for (int i = 0; i < 4; ++i) offset[i] = has_bias && parts == 1 && column + i < width ? wide(bias[column + i]) : 0.0f;
  #pragma unroll 4
  for (int line = own_thread / 32; line < ROWS; line += CONSUMERS / 32) {
    const int row = tile * ROWS + line;
    if (row >= rows) break;
    float4 total = *(const float4*)(shares + line * (COLUMNS + 4) + line_column);
#if KGROUPS == 2
    const float4 other = *(const float4*)(shares + (ROWS + line) * (COLUMNS + 4) + line_column);
    total.x += other.x, total.y += other.y, total.z += other.z, total.w += other.w;
#endif
    const float sum[4] = {total.x * factor + offset[0], total.y * factor + offset[1],
                          total.z * factor + offset[2], total.w * factor + offset[3]};
    const i64 place = (i64)row * width + column;
    if (parts > 1) {
      float* to = (float*)out + (i64)part * rows * width + place;
      if (whole) *(float4*)to = make_float4(sum[0], sum[1], sum[2], sum[3]);
      else for (int i = 0; i < 4 && column + i < width; ++i) to[i] = sum[i];
    } else {
      u16* to = (u16*)out + place;
      if (whole) *(uint2*)to = make_uint2(narrow(sum[0]) | (u32)narrow(sum[1]) << 16,
                                          narrow(sum[2]) | (u32)narrow(sum[3]) << 16);
      else for (int i = 0; i < 4 && column + i < width; ++i) to[i] = narrow(sum[i]);
    }
  }
}
