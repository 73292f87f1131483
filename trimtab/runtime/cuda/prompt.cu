// What a chunk of a prompt needs beside cuBLAS: 4-bit weights unpacked, LoRA of many tokens. Read runtime/prompt_kernels.py first:
// it says what each kernel computes and in which shapes. n tokens. values.cuh stands in front of this.

// out = code[q] * absmax, rounded once; with NESTED absmax = code2[absmax8] * outer + offset, rounded after each of the two, as
// bitsandbytes does. A thread is 16 bytes of packed weight, 32 values, the even one in a byte's upper half. A block of a weight that
// shares a scale has 32 values or more. Grid: [values / 8192].
template <bool NESTED>
__device__ __forceinline__ void unpack_4bit(
    const u8* packed, const void* absmax, const float* outer, const float* offset, const float* code2, const float* code,
    i64 values, int shift, int outer_shift, u16* out, int half) {
  __shared__ float table[16];
  if (threadIdx.x < 16) table[threadIdx.x] = code[threadIdx.x];
  __syncthreads();
  const i64 at = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 32;
  if (at >= values) return;
  const uint4 q = streamed_16(packed + at / 2);
  const i64 block = at >> shift;
  float scale;
  if (NESTED)
    scale = __fadd_rn(__fmul_rn(__ldg(code2 + ((const u8*)absmax)[block]), __ldg(outer + (block >> outer_shift))), __ldg(offset));
  else
    scale = __ldg((const float*)absmax + block);
  const u32 words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
  for (int w = 0; w < 4; w++) {
    float v[8];
#pragma unroll
    for (int b = 0; b < 4; b++) {
      const u32 byte = words[w] >> (8 * b) & 255;
      v[2 * b] = table[byte >> 4] * scale;
      v[2 * b + 1] = table[byte & 15] * scale;
    }
    store<8>(out + at + w * 8, v, half);
  }
}
#define UNPACK_PARAMETERS \
  const u8 *packed, const void *absmax, const float *outer, const float *offset, const float *code2, const float *code, i64 values, \
      int shift, int outer_shift, u16 *out, int half
extern "C" __global__ void __launch_bounds__(256) unpack_nested(UNPACK_PARAMETERS) {
  unpack_4bit<true>(packed, absmax, outer, offset, code2, code, values, shift, outer_shift, out, half);
}
extern "C" __global__ void __launch_bounds__(256) unpack_plain(UNPACK_PARAMETERS) {
  unpack_4bit<false>(packed, absmax, outer, offset, code2, code, values, shift, outer_shift, out, half);
}

#define TOKENS 8
#define RANKS 8
#define SLICE 1024
// low[s, t, r] = sum of A[r, k] x[t, k] over the slice s of k. A block is 8 tokens and one slice, a thread 4 neighbours of it.
// Grid: [n / 8, slices].
extern "C" __global__ void __launch_bounds__(256) lora_low(
    const u16* x, int x_stride, int n, int width, const float* A, int rank, float* low, int half) {
  __shared__ float sums[8][TOKENS * RANKS];
  const int first = blockIdx.x * TOKENS, at = blockIdx.y * SLICE + threadIdx.x * 4;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const bool live = at < width;
  float v[TOKENS][4];
#pragma unroll
  for (int t = 0; t < TOKENS; t++) {
    v[t][0] = v[t][1] = v[t][2] = v[t][3] = 0.f;
    if (live && first + t < n) load<4>(v[t], x + (size_t)(first + t) * x_stride + at, half);
  }
  for (int r0 = 0; r0 < rank; r0 += RANKS) {
    float sum[TOKENS * RANKS];
#pragma unroll
    for (int r = 0; r < RANKS; r++) {
      float4 a = make_float4(0.f, 0.f, 0.f, 0.f);
      if (live && r0 + r < rank) a = *(const float4*)(A + (size_t)(r0 + r) * width + at);
#pragma unroll
      for (int t = 0; t < TOKENS; t++)
        sum[t * RANKS + r] = fmaf(a.w, v[t][3], fmaf(a.z, v[t][2], fmaf(a.y, v[t][1], a.x * v[t][0])));
    }
    // Each step of the butterfly halves what a lane keeps: in the end it has two of the 64 sums over its warp.
#pragma unroll
    for (int d = 16, kept = 32; d; d /= 2, kept /= 2) {
      const bool upper = lane & d;
#pragma unroll
      for (int i = 0; i < kept; i++) {
        const float mine = upper ? sum[i + kept] : sum[i], other = upper ? sum[i] : sum[i + kept];
        sum[i] = mine + __shfl_xor_sync(ALL, other, d);
      }
    }
    const int place = ((lane & 16) ? 32 : 0) + ((lane & 8) ? 16 : 0) + ((lane & 4) ? 8 : 0) + ((lane & 2) ? 4 : 0) +
                      ((lane & 1) ? 2 : 0);
    sums[warp][place] = sum[0];
    sums[warp][place + 1] = sum[1];
    __syncthreads();
    if (threadIdx.x < TOKENS * RANKS) {
      const int t = first + threadIdx.x / RANKS, r = r0 + threadIdx.x % RANKS;
      float all = 0.f;
#pragma unroll
      for (int w = 0; w < 8; w++) all += sums[w][threadIdx.x];
      if (t < n && r < rank) low[((size_t)blockIdx.y * n + t) * rank + r] = all;
    }
    __syncthreads();
  }
}

// y[t, c] += scale * sum over r of B[c, r] low[t, r], where low is the sum over its slices; the change is rounded first if
// round_change. A block is 8 tokens and 512 columns, a thread two neighbours. Shared: 8 * rank floats. Grid: [columns / 512, n / 8].
extern "C" __global__ void __launch_bounds__(256) lora_up(
    const float* low, int slices, int n, int rank, const float* B, float scale, u16* y, int y_stride, int width,
    int round_change, int half) {
  extern __shared__ __align__(16) float own[];
  const int first = blockIdx.y * TOKENS, at = (blockIdx.x * 256 + threadIdx.x) * 2;
  for (int i = threadIdx.x; i < TOKENS * rank; i += 256) {
    const int t = first + i / rank;
    float all = 0.f;
    if (t < n)
      for (int s = 0; s < slices; s++) all += low[((size_t)s * n + t) * rank + i % rank];
    own[i] = all;
  }
  __syncthreads();
  if (at >= width) return;
  float before[TOKENS][2], sum[TOKENS][2];
#pragma unroll
  for (int t = 0; t < TOKENS; t++) {
    sum[t][0] = sum[t][1] = before[t][0] = before[t][1] = 0.f;
    if (first + t < n) load<2>(before[t], y + (size_t)(first + t) * y_stride + at, half);
  }
  const float *b0 = B + (size_t)at * rank, *b1 = b0 + rank;
  for (int r0 = 0; r0 < rank; r0 += RANKS) {
    float p[RANKS], q[RANKS];
#pragma unroll
    for (int r = 0; r < RANKS; r++) {
      p[r] = r0 + r < rank ? __ldg(b0 + r0 + r) : 0.f;
      q[r] = r0 + r < rank ? __ldg(b1 + r0 + r) : 0.f;
    }
#pragma unroll
    for (int t = 0; t < TOKENS; t++)
#pragma unroll
      for (int r = 0; r < RANKS; r++) {
        const float l = r0 + r < rank ? own[t * rank + r0 + r] : 0.f;
        sum[t][0] = fmaf(p[r], l, sum[t][0]);
        sum[t][1] = fmaf(q[r], l, sum[t][1]);
      }
  }
#pragma unroll
  for (int t = 0; t < TOKENS; t++) {
    if (first + t >= n) break;
    float v[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float change = sum[t][i] * scale;
      v[i] = before[t][i] + (round_change ? rounded(change, half) : change);
    }
    store<2>(y + (size_t)(first + t) * y_stride + at, v, half);
  }
}
