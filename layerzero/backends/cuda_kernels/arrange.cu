// Rows of sixteen bits in the order in which four-bit codes come out of their words, as tiles of ROWS that the matrix
// units load (wide_products.cu): image[tile of rows][chunk of 128][step][half][row][lane of four], in pairs of numbers.

extern "C" __global__ void arrange(const u16* x, u32* image, int rows, int inner, int x_row) {
  wait_for_previous();
  let_next_begin();
  const int chunk = blockIdx.x, tile = blockIdx.y, chunks = inner / 128;
  u32* to = image + ((i64)tile * chunks + chunk) * (ROWS * 64);
  const int piece = blockIdx.z * blockDim.x + threadIdx.x;
  const int t = piece % 4, line = piece / 4 % ROWS, j = piece / 4 / ROWS, row = tile * ROWS + line;
  Four r{{0, 0, 0, 0}};
  if (row < rows) r = load_rows(x + (i64)row * x_row + chunk * 128 + 32 * t + 8 * j);
  const u32 pairs[4] = {__byte_perm(r.x[0], r.x[2], 0x5410), __byte_perm(r.x[0], r.x[2], 0x7632),
                        __byte_perm(r.x[1], r.x[3], 0x5410), __byte_perm(r.x[1], r.x[3], 0x7632)};
  #pragma unroll
  for (int i = 0; i < 4; ++i) to[((4 * j + i) * ROWS + line) * 4 + t] = pairs[i];
}
