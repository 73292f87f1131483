// What a chunk of a prompt needs beside cuBLAS: 4-bit weights unpacked, LoRA of many tokens. Read engine/kernels/dequantize.py first:
// it says what each kernel computes and in which shapes. n tokens. values.cuh stands in front of this.

// A packed weight in 16 bits, with the bits of its format's own library (`Unpacked`, a header for each format). A thread is 4 times 8
// neighbours; neighbours read and write what lies beside each other. Values that share a scale are 8 or more. Grid: [values / 8192].
// APART: rows of `width` values (a multiple of 8) begin `stride` apart.
template <bool SCALES_OF_SCALES, bool APART>
__device__ __forceinline__ void unpack_values(
    const u8* packed, const void* scale, const void* second, const float* offset, const float* code2, const float* code,
    i64 values, int shift, int outer_shift, u16* out, int half, int width = 0, int stride = 0) {
  typedef Unpacked<SCALES_OF_SCALES> Own;
  const Own own(scale, second, offset, code2, code, shift, outer_shift);
  const i64 first = (i64)blockIdx.x * 8192 + threadIdx.x * 8;
  typename Own::Word words[4];
  typename Own::Scale scales[4];
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const i64 at = first + k * 2048;
    words[k] = {};
    if (at < values) words[k] = Own::word_at(packed, at);
  }
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const i64 at = first + k * 2048;
    scales[k] = {};
    if (at < values) scales[k] = own.scale_at(at);
  }
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const i64 at = first + k * 2048;
    if (at >= values) break;
    float v[8];
    own.values(v, words[k], scales[k], half);
    i64 to = at;
    if (APART) {
      const u32 piece = (u32)(at >> 3), each = (u32)width >> 3, row = piece / each;
      to = (i64)row * stride + (piece - row * each) * 8;
    }
    store<8>(out + to, v, half);
  }
}
#define UNPACK_PARAMETERS \
  const u8 *packed, const void *scale, const void *second, const float *offset, const float *code2, const float *code, i64 values, \
      int shift, int outer_shift, u16 *out, int half
#define UNPACK_GIVEN packed, scale, second, offset, code2, code, values, shift, outer_shift, out, half
#if IS_CODED
extern "C" __global__ void __launch_bounds__(256) unpack_nested(UNPACK_PARAMETERS) { unpack_values<true, false>(UNPACK_GIVEN); }
#endif
extern "C" __global__ void __launch_bounds__(256) unpack_plain(UNPACK_PARAMETERS) { unpack_values<false, false>(UNPACK_GIVEN); }

#if !IS_CODED
// Rows of a packed table by their ids [n], [n, width]. An id without a row gives values that are not numbers. Grid: [width / 2048, n].
extern "C" __global__ void __launch_bounds__(256) unpack_rows(UNPACK_PARAMETERS, const i64* ids, int width) {
  typedef Unpacked<false> Own;
  const Own own(scale, second, offset, code2, code, shift, outer_shift);
  const int at = (blockIdx.x * 256 + threadIdx.x) * 8;
  const i64 id = __ldcg(ids + blockIdx.y), from = id * width + at;
  if (at >= width) return;
  float v[8];
  if (id >= 0 && from < values) {
    own.values(v, Own::word_at(packed, from), own.scale_at(from), half);
  } else {
    for (int i = 0; i < 8; i++) v[i] = __uint_as_float(0x7fc00000);
  }
  store<8>(out + (size_t)blockIdx.y * width + at, v, half);
}
#endif

// The same with columns behind each row of bfloat16, from `width` to `stride`: they multiply what extend_input puts behind x. Three for
// each rank of the layer's B [rows, rank]: hi(b), hi(b), lo(b), where hi(b) is b rounded and lo(b) is b - hi(b) rounded. `before` ranks
// of other layers and the columns behind the last, up to `end`, are zeros. A thread is 8 columns. Grid: [values / 8192 + columns / 2048].
__device__ __forceinline__ void store_columns(
    int number, const float* B, int rank, int before, int rows, int width, int end, int stride, u16* out) {
  const int each = (end - width) >> 3, row = number / each, first = (number - row * each) * 8;
  if (row >= rows) return;
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    u32 two[2];
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const int column = first + 2 * i + k - 3 * before;
      two[k] = 0;
      if (column < 0 || column >= 3 * rank) continue;
      const float b = __ldg(B + (size_t)row * rank + column / 3);
      const u16 high = to_bf16(b);
      two[k] = column % 3 < 2 ? high : to_bf16(b - from_bf16(high));
    }
    words[i] = two[0] | two[1] << 16;
  }
  *(uint4*)(out + (size_t)row * stride + width + first) = make_uint4(words[0], words[1], words[2], words[3]);
}
#define COLUMN_PARAMETERS const float *B, int rank, int before, int width, int stride
template <bool SCALES_OF_SCALES>
__device__ __forceinline__ void unpack_with_columns(UNPACK_PARAMETERS, COLUMN_PARAMETERS) {
  const int blocks = (int)((values + 8191) / 8192);
  if ((int)blockIdx.x < blocks)
    unpack_values<SCALES_OF_SCALES, true>(UNPACK_GIVEN, width, stride);
  else
    store_columns((blockIdx.x - blocks) * 256 + threadIdx.x, B, rank, before, (int)(values / width), width, stride, stride, out);
}
#if IS_CODED
extern "C" __global__ void __launch_bounds__(256) unpack_columns_nested(UNPACK_PARAMETERS, COLUMN_PARAMETERS) {
  unpack_with_columns<true>(UNPACK_GIVEN, B, rank, before, width, stride);
}
#endif
extern "C" __global__ void __launch_bounds__(256) unpack_columns_plain(UNPACK_PARAMETERS, COLUMN_PARAMETERS) {
  unpack_with_columns<false>(UNPACK_GIVEN, B, rank, before, width, stride);
}

#if IS_FIRST  // what knows no weights is compiled once
// The columns of weights that stay unpacked, for one adapter. A line of `lines` is a weight: the addresses of its B (0: none) and of its
// first row, then rank, before, rows, width, end and stride, see store_columns. Grid: [the most columns of a weight / 2048, weights].
extern "C" __global__ void __launch_bounds__(256) write_columns(const i64* lines) {
  const i64* line = lines + blockIdx.y * 8;
  store_columns(
      blockIdx.x * 256 + threadIdx.x, (const float*)line[0], (int)line[2], (int)line[3], (int)line[4], (int)line[5], (int)line[6],
      (int)line[7], (u16*)line[1]);
}

#define TOKENS 8
#define RANKS 8
#define SLICE 1024
// low[s, t, r] = sum of A[r, k] x[t, k] over the slice s of k; a token's values are `stride` apart. A block is 8 tokens and one slice,
// a thread 4 neighbours of it. Grid: [n / 8, slices].
__device__ __forceinline__ void low_of(
    const u16* x, int x_stride, int n, int width, const float* A, int rank, float* low, int stride, int half) {
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
      if (t < n && r < rank) low[((size_t)blockIdx.y * n + t) * stride + r] = all;
    }
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(256) lora_low(
    const u16* x, int x_stride, int n, int width, const float* A, int rank, float* low, int half) {
  low_of(x, x_stride, n, width, A, rank, low, rank, half);
}

// The same for bfloat16 by tensor cores, exact but for the sums: a value of A is three of bfloat16. A block is 16 tokens and one
// slice, a warp 128 of it. width: a multiple of 16. Grid: [n / 16, slices].
__device__ __forceinline__ void low_of_tensor(
    const u16* x, int x_stride, int n, int width, const float* A, int rank, float* low, int stride) {
  __shared__ float sums[8][16 * RANKS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = lane >> 2, pair = (lane & 3) * 2;
  const int first = blockIdx.x * 16, begin = blockIdx.y * SLICE + warp * 128;
  u32 a[8][4];
#pragma unroll
  for (int k = 0; k < 8; k++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int t = first + group + (i & 1) * 8, at = begin + k * 16;
      a[k][i] = t < n && at < width ? __ldcg((const u32*)(x + (size_t)t * x_stride + at + pair + (i >> 1) * 8)) : 0;
    }
  for (int r0 = 0; r0 < rank; r0 += RANKS) {
    float2 w[8][2];
#pragma unroll
    for (int k = 0; k < 8; k++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int at = begin + k * 16;
        w[k][i] = make_float2(0.f, 0.f);
        if (at < width && r0 + group < rank) w[k][i] = __ldg((const float2*)(A + (size_t)(r0 + group) * width + at + pair + i * 8));
      }
    float c[4] = {};
#pragma unroll
    for (int k = 0; k < 8; k++)
#pragma unroll
      for (int part = 0; part < 3; part++) {
        u32 b[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          b[i] = two_bf16(w[k][i].x, w[k][i].y);
          w[k][i].x -= low_value(b[i], 0);
          w[k][i].y -= high_value(b[i], 0);
        }
        mma_m16n8k16_bf16(c, a[k][0], a[k][1], a[k][2], a[k][3], b[0], b[1]);
      }
#pragma unroll
    for (int i = 0; i < 4; i++) sums[warp][(group + (i >> 1) * 8) * RANKS + pair + (i & 1)] = c[i];
    __syncthreads();
    if (threadIdx.x < 16 * RANKS) {
      const int t = first + threadIdx.x / RANKS, r = r0 + threadIdx.x % RANKS;
      float all = 0.f;
#pragma unroll
      for (int w8 = 0; w8 < 8; w8++) all += sums[w8][threadIdx.x];
      if (t < n && r < rank) low[((size_t)blockIdx.y * n + t) * stride + r] = all;
    }
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(256) lora_low_tensor(
    const u16* x, int x_stride, int n, int width, const float* A, int rank, float* low) {
  low_of_tensor(x, x_stride, n, width, A, rank, low, rank);
}

// The input of a product over weights with columns (unpack_columns_nested): out[t] = [x[t], hi(v), lo(v), hi(v) of each rank, zeros]
// of bfloat16, where v = scale * (A x[t]) in float32. Up to three layers over one x, their ranks in order. hi and lo: as there, so
// v B is exact to about 2^-17 of it. A block is 16 tokens, one slice, and 8 ranks of one layer, or the copy of x (z = 0); the last one
// of a token's blocks sums the slices. counts: a zero for each 16 tokens, and zeros again afterwards. low: [slices, n, all ranks].
// Grid: [n / 16, slices, 1 + groups of 8 ranks].
extern "C" __global__ void __launch_bounds__(256) extend_input(
    const u16* x, int x_stride, int n, int width, const float* A0, int rank0, float scale0, const float* A1, int rank1, float scale1,
    const float* A2, int rank2, float scale2, float* low, u32* counts, u16* out, int out_stride) {
  const int first = blockIdx.x * 16, rank = rank0 + rank1 + rank2;
  if (blockIdx.z == 0) {
    const int at = blockIdx.y * SLICE + (threadIdx.x & 127) * 8, t0 = first + (threadIdx.x >> 7);
    uint4 v[8];
#pragma unroll
    for (int k = 0; k < 8; k++)
      if (at < width && t0 + 2 * k < n) v[k] = __ldcg((const uint4*)(x + (size_t)(t0 + 2 * k) * x_stride + at));
#pragma unroll
    for (int k = 0; k < 8; k++)
      if (at < width && t0 + 2 * k < n) *(uint4*)(out + (size_t)(t0 + 2 * k) * out_stride + at) = v[k];
    return;
  }
  const float* A = A0;
  int group = blockIdx.z - 1, own = rank0, before = 0;
  if (group >= (own + RANKS - 1) / RANKS) {
    group -= (own + RANKS - 1) / RANKS, before = rank0, own = rank1, A = A1;
    if (group >= (own + RANKS - 1) / RANKS) group -= (own + RANKS - 1) / RANKS, before += rank1, own = rank2, A = A2;
  }
  group *= RANKS;
  low_of_tensor(x, x_stride, n, width, A + (size_t)group * width, min(own - group, RANKS), low + before + group, rank);
  const u32 last = gridDim.y * (gridDim.z - 1) - 1;
  if (!__syncthreads_or(threadIdx.x == 0 && count_up(counts + blockIdx.x, last) == last)) return;
  for (int i = threadIdx.x; i < 16 * rank; i += 256) {
    const int t = first + i / rank, r = i % rank;
    if (t >= n) break;
    float all = 0.f;
    for (int s = 0; s < (int)gridDim.y; s += 4) {
      float some[4];
#pragma unroll
      for (int k = 0; k < 4; k++) some[k] = s + k < (int)gridDim.y ? __ldcg(low + ((size_t)(s + k) * n + t) * rank + r) : 0.f;
#pragma unroll
      for (int k = 0; k < 4; k++) all += some[k];
    }
    const float v = all * (r < rank0 ? scale0 : r < rank0 + rank1 ? scale1 : scale2);
    const u16 high = to_bf16(v);
    u16* to = out + (size_t)t * out_stride + width + 3 * r;
    to[0] = to[2] = high;
    to[1] = to_bf16(v - from_bf16(high));
  }
  const int empty = out_stride - width - 3 * rank;
  for (int i = threadIdx.x; i < 16 * empty; i += 256)
    if (first + i / empty < n) out[(size_t)(first + i / empty) * out_stride + width + 3 * rank + i % empty] = 0;
}

// Both for rows of `tokens` neighbours each (a multiple of what a block takes), a row with the adapter in its slot, or none: then
// nothing is written. stride: the largest rank.
extern "C" __global__ void __launch_bounds__(256) lora_low_rows(
    const u16* x, int x_stride, int n, int width, const i64* lora_A, const int* lora_rank, const int* slots, int tokens, float* low,
    int stride, int half) {
  const int slot = __ldg(slots + blockIdx.x * TOKENS / tokens), rank = slot < 0 ? 0 : __ldg(lora_rank + slot);
  if (rank) low_of(x, x_stride, n, width, (const float*)__ldg(lora_A + slot), rank, low, stride, half);
}
extern "C" __global__ void __launch_bounds__(256) lora_low_rows_tensor(
    const u16* x, int x_stride, int n, int width, const i64* lora_A, const int* lora_rank, const int* slots, int tokens, float* low,
    int stride) {
  const int slot = __ldg(slots + blockIdx.x * 16 / tokens), rank = slot < 0 ? 0 : __ldg(lora_rank + slot);
  if (rank) low_of_tensor(x, x_stride, n, width, (const float*)__ldg(lora_A + slot), rank, low, stride);
}

// y[t, c] += scale * sum over r of B[c, r] low[t, r], where low is the sum over its slices; the change is rounded first if
// round_change. A block is `tile` tokens (a multiple of 8), 8 at a time, and 512 columns, a thread two neighbours. Shared:
// tile * rank floats. Grid: [columns / 512, n / tile].
__device__ __forceinline__ void up_of(
    const float* low, int slices, int n, int rank, int stride, const float* B, float scale, u16* y, int y_stride, int width,
    int round_change, int tile, int half) {
  extern __shared__ __align__(16) float own[];
  const int start = blockIdx.y * tile, at = (blockIdx.x * 256 + threadIdx.x) * 2;
  float p[RANKS], q[RANKS];
  const float *b0 = B + (size_t)at * rank, *b1 = b0 + rank;
#pragma unroll
  for (int r = 0; r < RANKS; r++) {
    p[r] = at < width && r < rank ? __ldg(b0 + r) : 0.f;
    q[r] = at < width && r < rank ? __ldg(b1 + r) : 0.f;
  }
  for (int i = threadIdx.x; i < tile * rank; i += 256) {
    const int t = start + i / rank;
    float all = 0.f;
    for (int s = 0; t < n && s < slices; s += 8) {
      float some[8];
#pragma unroll
      for (int k = 0; k < 8; k++) some[k] = s + k < slices ? __ldcg(low + ((size_t)(s + k) * n + t) * stride + i % rank) : 0.f;
#pragma unroll
      for (int k = 0; k < 8; k++) all += some[k];
    }
    own[i] = all;
  }
  __syncthreads();
  if (at >= width) return;
  for (int t0 = 0; t0 < tile && start + t0 < n; t0 += TOKENS) {
    const int first = start + t0;
    float before[TOKENS][2], sum[TOKENS][2];
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
      sum[t][0] = sum[t][1] = before[t][0] = before[t][1] = 0.f;
      if (first + t < n) load<2>(before[t], y + (size_t)(first + t) * y_stride + at, half);
    }
    for (int r0 = 0; r0 < rank; r0 += RANKS) {
      if (rank > RANKS) {
#pragma unroll
        for (int r = 0; r < RANKS; r++) {
          p[r] = r0 + r < rank ? __ldg(b0 + r0 + r) : 0.f;
          q[r] = r0 + r < rank ? __ldg(b1 + r0 + r) : 0.f;
        }
      }
#pragma unroll
      for (int t = 0; t < TOKENS; t++)
#pragma unroll
        for (int r = 0; r < RANKS; r++) {
          const float l = r0 + r < rank ? own[(t0 + t) * rank + r0 + r] : 0.f;
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
}
extern "C" __global__ void __launch_bounds__(256) lora_up(
    const float* low, int slices, int n, int rank, const float* B, float scale, u16* y, int y_stride, int width,
    int round_change, int tile, int half) {
  up_of(low, slices, n, rank, rank, B, scale, y, y_stride, width, round_change, tile, half);
}
extern "C" __global__ void __launch_bounds__(256) lora_up_rows(
    const float* low, int slices, int n, int stride, const i64* lora_B, const int* lora_rank, const float* lora_scale,
    const int* slots, int tokens, u16* y, int y_stride, int width, int round_change, int tile, int half) {
  const int slot = __ldg(slots + blockIdx.y * tile / tokens), rank = slot < 0 ? 0 : __ldg(lora_rank + slot);
  if (rank)
    up_of(
        low, slices, n, rank, stride, (const float*)__ldg(lora_B + slot), __ldg(lora_scale + slot), y, y_stride, width, round_change,
        tile, half);
}
#endif
