// Steps of 9 to 64 rows: a product of 4-bit weights on tensor cores, and LoRA adapters chosen by each row. Read
// runtime/many_rows.py first: it says what each kernel computes and in which shapes. values.cuh stands in front of this.

#define CHUNK 256               // columns of x that a block holds at a time
#define X_STRIDE (CHUNK * 2 + 32)  // bytes: neighbouring rows of x fall on different banks
#define UNIT 64                 // outputs of a block, 16 for each of its four warps
#define THREADS 128
#define MEMBERS 3

// 4 or 16 bytes to shared memory; the copies between two commits are a group. Compute capability 7.5 copies at once: a stage that is
// being filled is read behind the next barrier at the earliest.
#ifndef TRIMTAB_CPU
#if __CUDA_ARCH__ >= 800
template <int BYTES>
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all groups but the last PENDING are there.
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
#else
template <int BYTES>
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  if constexpr (BYTES == 16)
    *(uint4*)to = __ldcg((const uint4*)from);
  else
    *(u32*)to = __ldcg((const u32*)from);
}
__device__ __forceinline__ void commit_copies() {}
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {}
#endif
#endif

struct Member {
  const u8* weight;
  const u8* absmax;
  const float *nested, *offset;
  const u16* bias;
  int rows;
};

// out[i, :] = x[i, :] W^T (+ bias) of up to three weights over the same x. A weight becomes code * absmax in float32, rounded once to
// the type of x, as bitsandbytes unpacks it; sums are float32. Warp w of a block has outputs 16 w .. 16 w + 15 of 64 and all rows of x.
// Chunks of 256 columns (x, packed weights, scales) come through a ring of stages. parts: with several splits of the columns the sums of
// each, [splits, n, all outputs] float32, for `rows_up` to add. Grid: [units of 64 outputs, splits].
template <int TILES, int STAGES>
__device__ __forceinline__ void rows_product(
    const u16* x, int x_stride, int n, int columns, const Member* members, const float* code, const float* nested_code, u16* out,
    int out_stride, float* parts, int total, int split_chunks, int half) {
  constexpr int X_BYTES = TILES * 8 * X_STRIDE, W_BYTES = UNIT * CHUNK / 2;
  extern __shared__ __align__(16) u8 shared[];
  __shared__ float table[16 * 32];  // of each lane's own: no two lanes meet in a bank
  __shared__ float codes[256];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  let_next_start();
  Member own = members[0];
  int first = blockIdx.x * UNIT, begins = 0;
#pragma unroll
  for (int m = 1; m < MEMBERS; m++) {
    const int before = (own.rows + UNIT - 1) / UNIT * UNIT;
    if (first < before) break;
    first -= before;
    begins += own.rows;
    own = members[m];
  }
  const bool nested = own.nested != nullptr;
  const int blocks = columns / 64, scale_bytes = nested ? 4 : 16;
  const int from = blockIdx.y * split_chunks, count = min(split_chunks, columns / CHUNK - from);
  const int stage_bytes = X_BYTES + W_BYTES + UNIT * 16;
  float* outer = (float*)(shared + STAGES * stage_bytes);
  const int outer_first = (int)((i64)first * blocks >> 8);

  // Row r of the unit; beyond the last one the last again.
  const auto row_of = [&](int r) { return min(first + r, own.rows - 1); };
  const auto ask_weights = [&](int chunk) {
    u8* to = shared + chunk % STAGES * stage_bytes + X_BYTES;
#pragma unroll
    for (int i = tid; i < UNIT * 8; i += THREADS) {
      const int r = i >> 3, piece = i & 7;
      copy_async<16>(to + r * 128 + ((piece ^ ((r & 1) << 2)) << 4), own.weight + (size_t)row_of(r) * (columns / 2) + (from + chunk) * 128 + piece * 16);
    }
    if (tid < UNIT) {
      const size_t at = (size_t)row_of(tid) * blocks + (from + chunk) * 4;
      u8* scales = to + W_BYTES + tid * scale_bytes;
      if (nested)
        copy_async<4>(scales, own.absmax + at);
      else
        copy_async<16>(scales, own.absmax + at * 4);
    }
  };
  const auto ask_x = [&](int chunk) {
    u8* to = shared + chunk % STAGES * stage_bytes;
    for (int i = tid; i < TILES * 8 * (CHUNK / 8); i += THREADS) {
      const int r = i / (CHUNK / 8), piece = i % (CHUNK / 8);
      if (r < n) copy_async<16>(to + r * X_STRIDE + piece * 16, x + (size_t)r * x_stride + (size_t)(from + chunk) * CHUNK + piece * 8);
    }
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++)
    if (s < count) ask_weights(s);
  for (int i = tid; i < 16 * 32; i += THREADS) table[i] = __ldg(code + (i >> 5));
  if (nested) {
    for (int i = tid; i < 256; i += THREADS) codes[i] = __ldg(nested_code + i);
    const int outer_last = (int)((i64)(row_of(UNIT - 1) + 1) * blocks - 1 >> 8);
    for (int i = tid; i <= outer_last - outer_first; i += THREADS) outer[i] = __ldg(own.nested + outer_first + i);
  }
  const float offset = nested ? __ldg(own.offset) : 0.f;
  // Rows of x that are not there: zeros, once, in every stage.
  for (int i = tid; i < STAGES * (TILES * 8 - n) * (X_STRIDE / 16); i += THREADS) {
    const int piece = i % (X_STRIDE / 16), r = i / (X_STRIDE / 16);
    *(uint4*)(shared + r % STAGES * stage_bytes + (n + r / STAGES) * X_STRIDE + piece * 16) = make_uint4(0, 0, 0, 0);
  }
  wait_for_previous();
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    if (s < count) ask_x(s);
    commit_copies();
  }

  float sums[TILES][4] = {};
  const int r0 = warp * 16 + g, r1 = r0 + 8, high = t >> 1;
  const i64 scales_0 = (i64)row_of(r0) * blocks, scales_1 = (i64)row_of(r1) * blocks;
#pragma unroll 1
  for (int chunk = 0; chunk < count; chunk++) {
    wait_for_copies<STAGES - 2>();
    __syncthreads();
    if (chunk + STAGES - 1 < count) {
      ask_weights(chunk + STAGES - 1);
      ask_x(chunk + STAGES - 1);
    }
    commit_copies();
    const u8* stage = shared + chunk % STAGES * stage_bytes;
    const u8 *w = stage + X_BYTES, *scales = w + W_BYTES;
    const auto scale_of = [&](int r, i64 begin, int block) {
      if (!nested) return *(const float*)(scales + r * 16 + block * 4);
      const float inner = codes[scales[r * 4 + block]];
      return __fadd_rn(__fmul_rn(inner, outer[(int)(begin + (from + chunk) * 4 + block >> 8) - outer_first]), offset);
    };
#pragma unroll
    for (int step = 0; step < 2; step++) {
      // 32 neighbours of each of two rows; lanes 2 and 3 take theirs in another order, as the banks of x want it.
      const int piece = step * 4 + t;
      const uint4 a = *(const uint4*)(w + r0 * 128 + ((piece ^ ((r0 & 1) << 2)) << 4));
      const uint4 b = *(const uint4*)(w + r1 * 128 + ((piece ^ ((r1 & 1) << 2)) << 4));
      const u32 words[2][4] = {{high ? a.y : a.x, high ? a.x : a.y, high ? a.w : a.z, high ? a.z : a.w},
                               {high ? b.y : b.x, high ? b.x : b.y, high ? b.w : b.z, high ? b.z : b.w}};
      const float s0 = scale_of(r0, scales_0, step * 2 + high), s1 = scale_of(r1, scales_1, step * 2 + high);
#pragma unroll
      for (int h = 0; h < 4; h++) {
        u32 pairs[2][4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
#pragma unroll
          for (int r = 0; r < 2; r++) {
            const u32 byte = words[r][h] >> (8 * k) & 255;
            const float s = r ? s1 : s0, v0 = table[(byte >> 4) * 32 + lane] * s, v1 = table[(byte & 15) * 32 + lane] * s;
            pairs[r][k] = half ? two_halves(v0, v1) : two_bf16(v0, v1);
          }
        }
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
          const uint4 v = *(const uint4*)(stage + (tile * 8 + g) * X_STRIDE + step * 256 + t * 64 + ((h ^ high) << 4));
          if (half) {
            mma_m16n8k16(sums[tile], pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1], v.x, v.y);
            mma_m16n8k16(sums[tile], pairs[0][2], pairs[1][2], pairs[0][3], pairs[1][3], v.z, v.w);
          } else {
            mma_m16n8k16_bf16(sums[tile], pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1], v.x, v.y);
            mma_m16n8k16_bf16(sums[tile], pairs[0][2], pairs[1][2], pairs[0][3], pairs[1][3], v.z, v.w);
          }
        }
      }
    }
  }
  // By rows of x: [n, 64], so that neighbours are written together.
  wait_for_copies<0>();
  __syncthreads();
  float* made = (float*)shared;
#pragma unroll
  for (int tile = 0; tile < TILES; tile++)
#pragma unroll
    for (int i = 0; i < 4; i++) made[(tile * 8 + t * 2 + (i & 1)) * (UNIT + 1) + r0 + (i >> 1) * 8] = sums[tile][i];
  __syncthreads();
  for (int i = tid; i < n * UNIT; i += THREADS) {
    const int row = i / UNIT, r = i % UNIT;
    if (first + r >= own.rows) continue;
    float sum = made[row * (UNIT + 1) + r];
    if (parts) {
      parts[((size_t)blockIdx.y * n + row) * total + begins + first + r] = sum;
    } else {
      if (own.bias) sum += value(__ldg(own.bias + first + r), half);
      out[(size_t)row * out_stride + begins + first + r] = stored(sum, half);
    }
  }
}

#define MEMBER(i) \
  const u8 *weight##i, const u8 *absmax##i, const float *nested##i, const float *offset##i, const u16 *bias##i, int rows##i
#define PRODUCT_PARAMETERS \
  const u16 *x, int x_stride, int n, int columns, MEMBER(0), MEMBER(1), MEMBER(2), const float *code, const float *nested_code, \
      u16 *out, int out_stride, float *parts, int total, int split_chunks, int half
#define PRODUCT(TILES, STAGES) \
  const Member members[MEMBERS] = {{weight0, absmax0, nested0, offset0, bias0, rows0}, \
                                   {weight1, absmax1, nested1, offset1, bias1, rows1}, \
                                   {weight2, absmax2, nested2, offset2, bias2, rows2}}; \
  rows_product<TILES, STAGES>( \
      x, x_stride, n, columns, members, code, nested_code, out, out_stride, parts, total, split_chunks, half)
extern "C" __global__ void __launch_bounds__(THREADS) rows_product_16(PRODUCT_PARAMETERS) { PRODUCT(2, 4); }
extern "C" __global__ void __launch_bounds__(THREADS) rows_product_32(PRODUCT_PARAMETERS) { PRODUCT(4, 4); }
extern "C" __global__ void __launch_bounds__(THREADS) rows_product_64(PRODUCT_PARAMETERS) { PRODUCT(8, 3); }

// low[i, m, r] = row r of A of the adapter that row i has for member m, times x_i, float32. A block is a row, a member and 8 values.
// Grid: [n, members, largest rank / 8].
#define LOW_THREADS 256
#define RANKS 8
extern "C" __global__ void __launch_bounds__(LOW_THREADS) rows_low(
    const u16* x, int x_stride, int columns, const i64* lora_A, int A_stride, const int* lora_rank, int rank_stride, const int* slots,
    float* low, int low_row, int low_member, int half) {
  __shared__ float all[LOW_THREADS / 32][RANKS];
  const int i = blockIdx.x, m = blockIdx.y, r0 = blockIdx.z * RANKS, tid = threadIdx.x, lane = tid & 31;
  let_next_start();
  const int slot = __ldcg(slots + i);
  const int rank = slot < 0 ? 0 : __ldcg(lora_rank + (size_t)m * rank_stride + slot);
  const float* A = slot < 0 ? nullptr : (const float*)__ldcg(lora_A + (size_t)m * A_stride + slot);
  wait_for_previous();
  if (r0 >= rank) return;  // so for all threads of the block
  const u16* row = x + (size_t)i * x_stride;
  A += (size_t)r0 * columns;
  const int own = min(RANKS, rank - r0);
  float sums[RANKS] = {};
  if (((((size_t)A & 15) | ((size_t)row & 7)) == 0) && (columns & 3) == 0) {
#pragma unroll 2
    for (int at = tid * 4; at < columns; at += LOW_THREADS * 4) {
      float v[4];
      load<4>(v, row + at, half);
      float4 a[RANKS];
#pragma unroll
      for (int r = 0; r < RANKS; r++) a[r] = r < own ? __ldg((const float4*)(A + (size_t)r * columns + at)) : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int r = 0; r < RANKS; r++)
        sums[r] = fmaf(a[r].w, v[3], fmaf(a[r].z, v[2], fmaf(a[r].y, v[1], fmaf(a[r].x, v[0], sums[r]))));
    }
  } else {
    for (int at = tid; at < columns; at += LOW_THREADS) {
      const float v = value(__ldcg(row + at), half);
#pragma unroll
      for (int r = 0; r < RANKS; r++)
        if (r < own) sums[r] = fmaf(__ldg(A + (size_t)r * columns + at), v, sums[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < RANKS; r++) {
    const float sum = warp_sum(sums[r]);
    if (lane == 0) all[tid >> 5][r] = sum;
  }
  __syncthreads();
  if (tid < own) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < LOW_THREADS / 32; w++) sum += all[w][tid];
    low[(size_t)i * low_row + (size_t)m * low_member + r0 + tid] = sum;
  }
}

// y[i, c] = round(sum of the parts + bias) where there are parts, else what is there; then + scale B low of row i's adapter, the
// change rounded first if round_change. c counts the outputs of up to three layers in turn. Shared: the largest rank, float32.
// Grid: [all outputs / 256, n].
extern "C" __global__ void __launch_bounds__(256) rows_up(
    u16* y, int y_stride, int n, int rows0, int rows1, int rows2, const float* parts, int splits, const u16* bias0,
    const u16* bias1, const u16* bias2, const i64* lora_B, int B_stride, const int* lora_rank, int rank_stride,
    const float* lora_scale, int scale_stride, const int* slots, const float* low, int low_row, int low_member, int round_change,
    int half) {
  const int i = blockIdx.y, at = blockIdx.x * 256 + threadIdx.x, total = rows0 + rows1 + rows2;
  let_next_start();
  const int m = at < rows0 ? 0 : at < rows0 + rows1 ? 1 : 2, c = at - (m > 0 ? rows0 : 0) - (m > 1 ? rows1 : 0);
  const int slot = slots && at < total ? __ldcg(slots + i) : -1;
  const int rank = slot < 0 ? 0 : __ldcg(lora_rank + (size_t)m * rank_stride + slot);
  const float scale = rank ? __ldcg(lora_scale + (size_t)m * scale_stride + slot) : 0.f;
  const float* B = rank ? (const float*)__ldcg(lora_B + (size_t)m * B_stride + slot) + (size_t)c * rank : nullptr;
  wait_for_previous();
  if (at >= total || (!rank && !parts)) return;
  float sum;
  if (parts) {
    sum = 0.f;
    for (int s = 0; s < splits; s++) sum += __ldcg(parts + ((size_t)s * n + i) * total + at);
    const u16* bias = m == 0 ? bias0 : m == 1 ? bias1 : bias2;
    if (bias) sum += value(__ldg(bias + c), half);
    sum = rounded(sum, half);
  } else {
    sum = value(y[(size_t)i * y_stride + at], half);
  }
  if (rank) {
    const float* own = low + (size_t)i * low_row + (size_t)m * low_member;
    float change = 0.f;
    if ((rank & 3) == 0 && (((size_t)B | (size_t)own) & 15) == 0) {
#pragma unroll 4
      for (int r = 0; r < rank; r += 4) {
        const float4 b = __ldg((const float4*)(B + r)), v = __ldcg((const float4*)(own + r));
        change = fmaf(b.w, v.w, fmaf(b.z, v.z, fmaf(b.y, v.y, fmaf(b.x, v.x, change))));
      }
    } else {
      for (int r = 0; r < rank; r++) change = fmaf(__ldg(B + r), __ldcg(own + r), change);
    }
    change *= scale;
    sum += round_change ? rounded(change, half) : change;
  }
  y[(size_t)i * y_stride + at] = stored(sum, half);
}
