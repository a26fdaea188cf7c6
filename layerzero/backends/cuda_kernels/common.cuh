// What all kernels here share: types, a load of sixteen bytes that are read once, and numbers of sixteen bits.
// HALF is 1 for bfloat16, 0 for float16.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

// A kernel may begin before the one before it on its stream has ended (compiled.py): what that one wrote is there
// behind `wait_for_previous`, and `let_next_begin` comes behind it, so that all that is older has ended too.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

struct __align__(16) Four { u32 x[4]; };

__device__ __forceinline__ Four load_once(const u8* from) {
  Four f;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(f.x[0]), "=r"(f.x[1]), "=r"(f.x[2]), "=r"(f.x[3]) : "l"(from));
  return f;
}

__device__ __forceinline__ Four load_rows(const u16* from) {
  Four f;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(f.x[0]), "=r"(f.x[1]), "=r"(f.x[2]), "=r"(f.x[3]) : "l"(from));
  return f;
}

__device__ __forceinline__ u16 narrow(float x) {
  u16 out;
#if HALF == 1
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(x));
#else
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(x));
#endif
  return out;
}

__device__ __forceinline__ float wide(u16 bits) {
#if HALF == 1
  return __uint_as_float((u32)bits << 16);
#else
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(bits));
  return out;
#endif
}
