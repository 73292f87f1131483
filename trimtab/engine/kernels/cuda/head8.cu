// The product with an 8-bit head for 1 to 8 rows: y[n, V] = round(scale[V] * (x[n, D] . q[V, D])). Read engine/formats/int8_head.py
// first: it says in which shapes. values.cuh stands in front of this.
//
// A warp takes 16 rows of q at a time and multiplies them with up to 8 rows of x by tensor core instructions m16n8k16:
// bf16 in, float32 out; whole numbers up to 127 are exact in bf16. Which k an instruction sees where does not matter as
// long as q and x agree, so a lane takes 16 neighbours of a row: lane 4 g + t has k = 16 t .. 16 t + 15 of rows g and g + 8
// out of 64, four instructions of 4 each. Of four neighbours 0 and 2 come first, then 1 and 3: masks alone part them.
#ifndef TRIMTAB_CPU
// Weights are read once: past L1, and neighbouring lines of L2 with them.
#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ uint4 load_once_16(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
__device__ __forceinline__ u32 add_bf16x2(u32 a, u32 b) {
  u32 v;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(0x3f803f80u), "r"(b));
  return v;
}
#else
// Compute capability 7.5 compiles this and cannot use it: without bf16 arithmetic the product is NaN, as in values.cuh.
__device__ __forceinline__ uint4 load_once_16(const void* p) { return streamed_16((const u8*)p); }
__device__ __forceinline__ u32 add_bf16x2(u32, u32) { return 0x7fff7fffu; }
#endif
#endif

#define WARPS 8
#define BLOCK 64
#define GROUP 4  // blocks of 64 of both its rows that a lane asks for at once

// Bytes 0 and 2 of a word as bf16. 0x4300 is 128, where a step is 1: with the low seven bits it is 128 + them, and the
// sign bit takes off another 128 (0xc300 is -128, 0xc380 is -256).
__device__ __forceinline__ u32 decoded(u32 w) {
  return add_bf16x2((w & 0x007f007fu) | 0x43004300u, (w & 0x00800080u) | 0xc300c300u);
}

__device__ __forceinline__ void fetch(uint4 (*to)[GROUP], const u8* q, int tile, int group, int rows, int width) {
  const int lane = threadIdx.x & 31, first = tile * 16 + (lane >> 2);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const u8* row = q + (size_t)min(first + 8 * half, rows - 1) * width + 16 * (lane & 3);
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
      const int at = (group * GROUP + i) * BLOCK;
      to[half][i] = at < width ? load_once_16(row + at) : make_uint4(0, 0, 0, 0);
    }
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) head8(
    const u16* x, int x_stride, int n, const u8* q, const float* scale, const u16* bias, u16* out, int out_stride, int rows,
    int width) {
  extern __shared__ __align__(16) u8 held[];
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int pitch = 2 * width + 16;  // so that two rows of x lie in different banks
  const int tiles = (rows + 15) / 16, groups = (width + GROUP * BLOCK - 1) / (GROUP * BLOCK), warps = gridDim.x * WARPS;
  int tile = blockIdx.x * WARPS + (threadIdx.x >> 5);
  uint4 next[2][GROUP];
  let_next_start();
  // Weights do not come from the kernel in front.
  if (tile < tiles) fetch(next, q, tile, 0, rows, width);
  wait_for_previous();
  for (int r = 0; r < n; r++)
    for (int k = threadIdx.x * 4; k < width; k += WARPS * 32 * 4) {
      const uint2 v = __ldcg((const uint2*)(x + (size_t)r * x_stride + k));
      *(uint2*)(held + r * pitch + 2 * k) = make_uint2((v.x & 0xffffu) | v.y << 16, v.x >> 16 | (v.y & 0xffff0000u));
    }
  __syncthreads();
  const u8* own = held + g * pitch + 32 * t;
  for (; tile < tiles; tile += warps) {
    const int first = tile * 16 + g;
    const float scales[2] = {__ldg(scale + min(first, rows - 1)), __ldg(scale + min(first + 8, rows - 1))};
    float c[4] = {};
    for (int group = 0; group < groups; group++) {
      uint4 now[2][GROUP];
#pragma unroll
      for (int i = 0; i < GROUP; i++) now[0][i] = next[0][i], now[1][i] = next[1][i];
      if (group + 1 < groups)
        fetch(next, q, tile, group + 1, rows, width);
      else if (tile + warps < tiles)
        fetch(next, q, tile + warps, 0, rows, width);
#pragma unroll
      for (int i = 0; i < GROUP; i++) {
        const int block = group * GROUP + i;
        if (block * BLOCK >= width) break;
        uint4 x0 = make_uint4(0, 0, 0, 0), x1 = x0;
        if (g < n) x0 = *(const uint4*)(own + 128 * block), x1 = *(const uint4*)(own + 128 * block + 16);
        const u32 a[4] = {now[0][i].x, now[0][i].y, now[0][i].z, now[0][i].w};
        const u32 b[4] = {now[1][i].x, now[1][i].y, now[1][i].z, now[1][i].w};
        const u32 columns[8] = {x0.x, x0.y, x0.z, x0.w, x1.x, x1.y, x1.z, x1.w};
#pragma unroll
        for (int s = 0; s < 4; s++)
          mma_m16n8k16_bf16(c, decoded(a[s]), decoded(b[s]), decoded(a[s] >> 8), decoded(b[s] >> 8), columns[2 * s],
                            columns[2 * s + 1]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = first + 8 * (i >> 1), column = 2 * t + (i & 1);
      if (row < rows && column < n) {
        const float y = c[i] * scales[i >> 1];
        out[(size_t)column * out_stride + row] = to_bf16(bias ? y + from_bf16(__ldg(bias + row)) : y);
      }
    }
  }
}
