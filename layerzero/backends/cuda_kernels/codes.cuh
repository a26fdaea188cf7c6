// What products with codes of four bits share: loads, numbers from codes, and matrix units.
// KIND is 0 for int4, 1 for e2m1; SCALE is 0 for float32 scales of
// GROUP codes (a multiple of 128), 1 for powers of two of 32, 2 for e4m3 of 16; ZEROS says that zero points are given.
// Numbers from codes are too small by LIFTED, by which a result is multiplied: the bits of a code, as they lie, are
// a subnormal number, so that one multiplication and addition makes the number of it. Where the scale is in that
// multiplication (SCALED), it is one of 2^-62 to 2^58.

#if HALF == 1
#define TYPE "bf16"
#define TO_EXPONENT 6
#define FACTOR (SCALE == 2 ? 0x7a007a00u : 0x7e807e80u)  // 2^117, 2^126
#else
#define TYPE "f16"
#define TO_EXPONENT 9
#define FACTOR (SCALE == 2 ? 0x50005000u : 0x74007400u)  // 2^5, 2^14
#endif
#define SCALED (SCALE == 0 && FOLDED && !ZEROS && !WHOLE)
#if SCALED
#define LIFTED 18446744073709551616.0f
#elif SCALE == 1
#define LIFTED 1.0f
#else
#define LIFTED 512.0f
#endif

// What codes are multiplied by, in their lower and upper places, and what is added.
struct Base { u32 by[2], plus; };

__device__ __forceinline__ u32 times_plus(u32 a, u32 b, u32 c) {
  u32 out;
  asm("fma.rn." TYPE "x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}

__device__ __forceinline__ u32 times(u32 a, u32 b) {
  u32 out;
  asm("mul.rn." TYPE "x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

__device__ __forceinline__ u32 shifted(u32 word, int left) { return left >= 0 ? word << left : word >> -left; }

// Codes i and i + 4 of a word.
template <int i>
__device__ __forceinline__ u32 numbers(u32 word, const Base& base) {
#if KIND == 0
  return times_plus(word >> (i / 2 * 8) & (i % 2 ? 0x00f000f0u : 0x000f000fu), base.by[i % 2], base.plus);
#else
  const u32 sign = shifted(word, 12 - 4 * i) & 0x80008000u;
  const u32 size = shifted(word, TO_EXPONENT - 4 * i) & (7u << TO_EXPONENT | 7u << (TO_EXPONENT + 16));
#if SCALE == 2
  return times(size | sign, base.by[0]);
#else
  return times(times(size | sign, FACTOR), base.by[0]);
#endif
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
    const u8* scales, const u8* zeros, int chunk, int t) {
#if SCALE == 0
  const int group = chunk * 128 / GROUP;
  return {((const u32*)scales)[group], ZEROS ? zeros[group] : 8u};
#elif SCALE == 1
  return {scales[chunk * 4 + t], 0};
#else
  return {*(const u16*)(scales + chunk * 8 + 2 * t), 0};
#endif
}

// Bases of both halves of a lane's codes, and a float32 scale.
__device__ __forceinline__ void use_scales(Base (&base)[2], float& scale, Scales from) {
#if SCALE == 0
  scale = __uint_as_float(from.value);
#if SCALED
  const u32 folded = twice(scale);  // times 2^69, 2^65 and -8 * 2^-64
  base[0] = {{times(folded, 0x62006200u), times(folded, 0x60006000u)}, times(folded, 0xa100a100u)};
#elif HALF == 1
  base[0] = {{0x7d807d80u, 0x7b807b80u}, twice((float)from.zero * (-1.0f / LIFTED))};  // 2^124, 2^120
#else
  base[0] = {{0x78007800u, 0x68006800u}, twice((float)from.zero * (-1.0f / LIFTED))};  // 2^15, 2^11
#endif
  base[1] = base[0];
#elif SCALE == 1
  base[0].by[0] = base[1].by[0] = twice(power_of_two(from.value));
#else
  base[0].by[0] = times(twice(of_e4m3(from.value & 255)), FACTOR);
  base[1].by[0] = times(twice(of_e4m3(from.value >> 8)), FACTOR);
#endif
}
