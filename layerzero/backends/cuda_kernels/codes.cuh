// What products with codes of four bits share: loads, numbers from codes, and matrix units.
// KIND is 0 for int4, 1 for e2m1; SCALE is 0 for float32 scales of
// GROUP codes (a multiple of 128), 1 for powers of two of 32, 2 for e4m3 of 16.

#if HALF == 1
#define TYPE "bf16"
#define ONE 0x43004300u
#define TO_EXPONENT 6
#define FACTOR 0x7e807e80u
#else
#define TYPE "f16"
#define ONE 0x64006400u
#define TO_EXPONENT 9
#define FACTOR 0x74007400u
#endif

__device__ __forceinline__ u32 minus(u32 a, u32 b) {
  u32 out;
  asm("sub.rn." TYPE "x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

__device__ __forceinline__ u32 times(u32 a, u32 b) {
  u32 out;
  asm("mul.rn." TYPE "x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

__device__ __forceinline__ u32 shifted(u32 word, int left) { return left >= 0 ? word << left : word >> -left; }

// Codes i and i + 4 of a word. `base` is what the zero point becomes (int4), or the scale, twice (e2m1).
template <int i>
__device__ __forceinline__ u32 numbers(u32 word, u32 base) {
#if KIND == 0
  u32 bits;
  asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xea;" : "=r"(bits) : "r"(word >> (4 * i)), "r"(ONE));
  return minus(bits, base);
#else
  const u32 sign = shifted(word, 12 - 4 * i) & 0x80008000u;
  const u32 size = shifted(word, TO_EXPONENT - 4 * i) & (7u << TO_EXPONENT | 7u << (TO_EXPONENT + 16));
  return times(times(size | sign, FACTOR), base);
#endif
}

__device__ __forceinline__ void multiply(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7},"
               "{%8,%9}, {%0,%1,%2,%3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 twice(float x) { return (u32)narrow(x) * 0x10001u; }

__device__ __forceinline__ float power_of_two(u8 code) {
  return code == 255 ? __int_as_float(0x7fc00000) : __int_as_float(code ? (int)code << 23 : 0x00400000);
}

__device__ __forceinline__ float of_e4m3(u8 code) {
  u32 pair;
  float out;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((u16)code));
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low;}" : "=f"(out) : "r"(pair));
  return out;
}

// What the codes of a chunk of 128 are multiplied by, as it lies in memory: loaded with them, used behind them.
struct Scales { u32 value, zero; };

// `scales` and `zeros` are those of one column.
__device__ __forceinline__ Scales load_scales(
    const u8* scales, const u8* zeros, int has_zeros, int chunk, int t) {
#if SCALE == 0
  const int group = chunk * 128 / GROUP;
  return {((const u32*)scales)[group], has_zeros ? zeros[group] : 8u};
#elif SCALE == 1
  return {scales[chunk * 4 + t], 0};
#else
  return {*(const u16*)(scales + chunk * 8 + 2 * t), 0};
#endif
}

// Bases of both halves of a lane's codes, and a float32 scale.
__device__ __forceinline__ void use_scales(u32 (&base)[2], float& scale, Scales from) {
#if SCALE == 0
  scale = __uint_as_float(from.value);
  base[0] = base[1] = ONE + from.zero * 0x10001u;
#elif SCALE == 1
  base[0] = base[1] = twice(power_of_two(from.value));
#else
  base[0] = twice(of_e4m3(from.value & 255));
  base[1] = twice(of_e4m3(from.value >> 8));
#endif
}
