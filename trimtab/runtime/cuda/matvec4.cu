// 4-bit matrix-vector products for 1 to 8 rows, and LoRA beside them. Read runtime/matvec.py first: it says what each
// kernel computes, in which shapes, and how the launch is cut.
//
// How a weight is decoded. A byte holds two weights; a table of 256 entries in shared memory gives both as fp16 at once.
// The table is there once for every lane (32 x 4 bytes an entry), so that no two lanes ask the same bank. An entry takes
// 256 bytes, half of them empty: byte b and lane l are at offset b * 256 + l * 4, which one PRMT puts together.
// The products are tensor core instructions m16n8k16: 16 rows of W, up to 8 rows of x, fp16 in, float32 out. A block of
// 64 weights with one scale is four of them; the scale multiplies their float32 sum. Which k an instruction sees where
// does not matter as long as W and x agree, so a lane takes 8 consecutive bytes of a row: k = 16 t .. 16 t + 15.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// What the machine does; the CPU's version (tests) brings its own of these.
#ifndef TRIMTAB_CPU
__device__ __forceinline__ void mma_m16n8k16(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Weights are read once: past L1, and a whole line of L2 at a time.
__device__ __forceinline__ uint2 load_once(const u8* p) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
// The first value goes to the low half.
__device__ __forceinline__ u32 two_halves(float low, float high) {
  u32 v;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
__device__ __forceinline__ u16 to_half(float f) {
  u16 v;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(v) : "f"(f));
  return v;
}
__device__ __forceinline__ float from_half(u16 h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}
__device__ __forceinline__ u16 to_bf16(float f) {
  u16 v;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(v) : "f"(f));
  return v;
}
#if __CUDA_ARCH__ >= 900
// Programmatic dependent launch; without that launch attribute both do nothing.
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#else
__device__ __forceinline__ void wait_for_previous() {}
__device__ __forceinline__ void let_next_start() {}
#endif
#endif

__device__ __forceinline__ float from_bf16(u16 v) { return __uint_as_float((u32)v << 16); }
__device__ __forceinline__ float value(const void* p, size_t i, int half) {
  const u16 v = ((const u16*)p)[i];
  return half ? from_half(v) : from_bf16(v);
}
__device__ __forceinline__ u16 stored(float f, int half) { return half ? to_half(f) : to_bf16(f); }
__device__ __forceinline__ float rounded(float f, int half) { return half ? from_half(to_half(f)) : from_bf16(to_bf16(f)); }
__device__ __forceinline__ float low_value(u32 v, int half) { return half ? from_half((u16)v) : __uint_as_float(v << 16); }
__device__ __forceinline__ float high_value(u32 v, int half) {
  return half ? from_half((u16)(v >> 16)) : __uint_as_float(v & 0xffff0000u);
}

#define TABLE_BYTES 65536
#define LANES 32
#define MEMBERS 3
#define COLUMNS 8
#define KEPT 4  // values of the preparation that a thread holds in registers between two barriers

struct LoraEntry {
  const float* B;
  float scale;
  int rank;
};

struct Matvec {
  const void* x;
  int x_stride, n, blocks;  // blocks: of 64 weights in a row
  void* out;
  int out_stride, half;
  const u8* weight[MEMBERS];
  const void* absmax[MEMBERS];
  const float* nested[MEMBERS];
  const float* offset[MEMBERS];
  const void* bias[MEMBERS];
  int rows[MEMBERS];
  const float* code;
  const float* nested_code;
  const i64* lora_B;
  int lora_B_stride;
  const int* lora_rank;
  int lora_rank_stride;
  const float* lora_scale;
  int lora_scale_stride;
  const int* slots;
  const float* low;
  int low_row, low_member;
  float* parts;
  u32* arrived;
  int row_warps, k_warps, chunk_blocks, late_wait;
};

// Where a unit (MT tiles of 16 rows) lies: its member, or -1 past the last one, and its first row there.
struct Unit {
  int member, row;
};
template <int MT>
__device__ __forceinline__ Unit locate(const Matvec& a, int unit) {
  Unit found = {-1, 0};
#pragma unroll
  for (int m = 0; m < MEMBERS; m++) {
    const int units = (a.rows[m] + 16 * MT - 1) / (16 * MT);
    if (found.member < 0 && unit < units) found = {m, unit * 16 * MT};
    unit -= units;
  }
  return found;
}
// i / d for 0 <= i < 2^21, with inverse = 1.f / d: half a step of d is more than what float32 loses.
__device__ __forceinline__ int quotient(int i, float inverse) { return (int)(((float)i + 0.5f) * inverse); }
template <typename T>
__device__ __forceinline__ T of(const T* member, int m) {
  return m == 0 ? member[0] : m == 1 ? member[1] : member[2];
}

// B low of one output of one row of x, float32.
__device__ __forceinline__ float lora_product(const float* B, const float* low, int rank) {
  float sum = 0.f;
  if ((rank & 3) == 0 && ((size_t)B & 15) == 0 && ((size_t)low & 15) == 0) {
#pragma unroll 8
    for (int j = 0; j < rank; j += 4) {
      const float4 b = __ldg((const float4*)(B + j)), v = __ldcg((const float4*)(low + j));
      sum = fmaf(b.x, v.x, sum);
      sum = fmaf(b.y, v.y, sum);
      sum = fmaf(b.z, v.z, sum);
      sum = fmaf(b.w, v.w, sum);
    }
  } else {
    for (int j = 0; j < rank; j++) sum = fmaf(__ldg(B + j), __ldcg(low + j), sum);
  }
  return sum;
}

// A block computes row_warps units of rows over one chunk of K; k_warps warps share a unit.
template <int MT, int UB>
__device__ __forceinline__ void matvec(const Matvec& a, u8* shared) {
  const int tid = threadIdx.x, threads = blockDim.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  const int rw = warp / a.k_warps, kw = warp - rw * a.k_warps, n = a.n;
  const int block_rows = a.row_warps * MT * 16;
  const int first_block = blockIdx.y * a.chunk_blocks, blocks = min(a.chunk_blocks, a.blocks - first_block);
  const int batches = (blocks + UB - 1) / UB;
  const int x_bytes = a.chunk_blocks * 128 + 16;               // 16: two rows of x side by side fall on different banks
  const int sc_stride = ((a.chunk_blocks + 3) / 4 | 1) * 4;    // 4 x odd: 16-byte reads of 8 rows touch every bank once
  u8* xs = shared + TABLE_BYTES;
  float* sc = (float*)(xs + n * x_bytes);
  float* nested_code = sc + block_rows * sc_stride;
  LoraEntry* lora = (LoraEntry*)(nested_code + 256);
  Unit* units = (Unit*)(lora + MEMBERS * COLUMNS);
  u32* largest = (u32*)(units + 32);
  u32* last = largest + COLUMNS;

  let_next_start();
  // The weights of the first two batches are on their way while everything else is prepared.
  const Unit mine = locate<MT>(a, blockIdx.x * a.row_warps + rw);
  const bool live = mine.member >= 0;
  const u8* from[MT][2];
  uint2 wa[UB][MT][2], wb[UB][MT][2];
  if (live) {
#pragma unroll
    for (int j = 0; j < MT; j++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int row = min(mine.row + j * 16 + h * 8 + g, of(a.rows, mine.member) - 1);  // past the end: not stored
        from[j][h] = of(a.weight, mine.member) + ((size_t)row * a.blocks + first_block + kw * UB) * 32 + t * 8;
      }
  }
  const int step = a.k_warps * UB * 32;
#define LOAD(held, batch)                                             \
  if (live && (batch) < batches) {                                    \
    _Pragma("unroll") for (int u = 0; u < UB; u++)                    \
        if ((batch)*UB + u < blocks) {                                \
      _Pragma("unroll") for (int j = 0; j < MT; j++) {                \
        held[u][j][0] = load_once(from[j][0] + u * 32);               \
        held[u][j][1] = load_once(from[j][1] + u * 32);               \
      }                                                               \
    }                                                                 \
    _Pragma("unroll") for (int j = 0; j < MT; j++) {                  \
      from[j][0] += step;                                             \
      from[j][1] += step;                                             \
    }                                                                 \
  }
  LOAD(wa, kw)
  LOAD(wb, kw + a.k_warps)
  if (tid < COLUMNS) largest[tid] = 0;
  if (tid < a.row_warps) units[tid] = locate<MT>(a, blockIdx.x * a.row_warps + tid);
  __syncthreads();

  // Stored scales: of four blocks of a row at once where rows allow it.
  const int per = (a.blocks & 3) == 0 ? 4 : 1, quads = blocks / per, scale_count = block_rows * quads;
  const float quads_inverse = 1.f / quads;
  u32 q_kept[KEPT];
  float m_kept[KEPT];
#define SCALE(e)                                                                                          \
  const int r = quotient(e, quads_inverse), q = (e - r * quads) * per;                                    \
  const Unit unit = units[r / (16 * MT)];                                                                 \
  if (unit.member < 0) continue;                                                                          \
  const int at = min(unit.row + r % (16 * MT), of(a.rows, unit.member) - 1);                              \
  const float* nested = of(a.nested, unit.member);                                                        \
  const size_t stored_at = (size_t)at * a.blocks + first_block + q;
#pragma unroll
  for (int k = 0; k < KEPT; k++) {
    const int e = k * threads + tid;
    if (per == 4 && e < scale_count) {
      SCALE(e)
      if (nested) {
        q_kept[k] = __ldg((const u32*)((const u8*)of(a.absmax, unit.member) + stored_at));
        m_kept[k] = __ldg(nested + (stored_at >> 8));
      }
    }
  }

  int slot = -1;
  if (a.slots && tid % COLUMNS < n && tid < MEMBERS * COLUMNS && of(a.rows, tid / COLUMNS) > 0)
    slot = __ldcg(a.slots + tid % COLUMNS);

  // x as fp16, exact for bf16: every row times a power of two that puts its largest value just below 2^15. Powers of
  // two down to 2^-32 of the largest value lose nothing; what is smaller loses less than 2^-40 of the largest.
  if (!a.late_wait) wait_for_previous();
  const int x_vectors = blocks * 8, x_count = n * x_vectors;
  const float x_inverse = 1.f / x_vectors;
  uint4 x_kept[KEPT];
#define X_VECTOR(i, r) __ldcg((const uint4*)((const u16*)a.x + (size_t)r * a.x_stride + first_block * 64) + (i - r * x_vectors))
#pragma unroll
  for (int k = 0; k < KEPT; k++) {
    const int i = k * threads + tid, r = quotient(i, x_inverse);
    x_kept[k] = make_uint4(0, 0, 0, 0);
    if (i < x_count) x_kept[k] = X_VECTOR(i, r);
  }
  for (int i = tid; i < 2048; i += threads) {
    const int entry = i >> 3;  // the first weight of a byte is its high nibble
    const u32 v = two_halves(__ldg(a.code + (entry >> 4)), __ldg(a.code + (entry & 15)));
    *(uint4*)(shared + entry * 256 + (i & 7) * 16) = make_uint4(v, v, v, v);
  }
  if (a.nested_code)
    for (int i = tid; i < 256; i += threads) nested_code[i] = __ldg(a.nested_code + i);
  // Addresses behind addresses: each is asked for here and waited for later.
  LoraEntry entry = {0, 0.f, 0};
  if (slot >= 0) {
    entry.B = (const float*)__ldcg(a.lora_B + (size_t)(tid / COLUMNS) * a.lora_B_stride + slot);
    entry.scale = __ldcg(a.lora_scale + (size_t)(tid / COLUMNS) * a.lora_scale_stride + slot);
    entry.rank = __ldcg(a.lora_rank + (size_t)(tid / COLUMNS) * a.lora_rank_stride + slot);
  }
#pragma unroll 1
  for (int first = 0; first < x_count; first += KEPT * threads) {
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
      const int i = first + k * threads + tid, r = quotient(i, x_inverse);
      uint4 v = x_kept[k];
      if (first && i < x_count) v = X_VECTOR(i, r);
      const u32 word[4] = {v.x, v.y, v.z, v.w};
      u32 m = 0;
#pragma unroll
      for (int w = 0; w < 4; w++) {
        m = max(m, __float_as_uint(low_value(word[w], a.half)) & 0x7fffffffu);
        m = max(m, __float_as_uint(high_value(word[w], a.half)) & 0x7fffffffu);
      }
#pragma unroll
      for (int d = 1; d < 8; d *= 2) m = max(m, __shfl_xor_sync(0xffffffffu, m, d));
      if ((lane & 7) == 0 && i < x_count) atomicMax(largest + r, m);  // eight neighbours are 64 values of one row
    }
  }
  if (tid < MEMBERS * COLUMNS) lora[tid] = entry;
  __syncthreads();
  // The exponent of the largest value, within what a power of two in float32 can undo.
#define EXPONENT(r) min(max((int)(largest[r] >> 23), 15), 254)
#pragma unroll 1
  for (int first = 0; first < x_count; first += KEPT * threads) {
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
      const int i = first + k * threads + tid, r = quotient(i, x_inverse);
      if (i < x_count) {
        const uint4 v = first ? X_VECTOR(i, r) : x_kept[k];
        const float up = __uint_as_float((u32)(268 - EXPONENT(r)) << 23);
        uint4 p;
        p.x = two_halves(low_value(v.x, a.half) * up, high_value(v.x, a.half) * up);
        p.y = two_halves(low_value(v.y, a.half) * up, high_value(v.y, a.half) * up);
        p.z = two_halves(low_value(v.z, a.half) * up, high_value(v.z, a.half) * up);
        p.w = two_halves(low_value(v.w, a.half) * up, high_value(v.w, a.half) * up);
        *(uint4*)(xs + r * x_bytes + (i - r * x_vectors) * 16) = p;
      }
    }
  }
#pragma unroll 1
  for (int first = 0; first < scale_count; first += KEPT * threads) {
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
      const int e = first + k * threads + tid;
      if (e < scale_count) {
        SCALE(e)
        float* to = sc + r * sc_stride + q;
        const void* absmax = of(a.absmax, unit.member);
        if (nested) {
          const float off = __ldg(of(a.offset, unit.member));
          if (per == 4) {
            const u32 v = first ? __ldg((const u32*)((const u8*)absmax + stored_at)) : q_kept[k];
            const float scale = first ? __ldg(nested + (stored_at >> 8)) : m_kept[k];
            to[0] = fmaf(nested_code[v & 255], scale, off);
            to[1] = fmaf(nested_code[(v >> 8) & 255], scale, off);
            to[2] = fmaf(nested_code[(v >> 16) & 255], scale, off);
            to[3] = fmaf(nested_code[v >> 24], scale, off);
          } else {
            *to = fmaf(nested_code[__ldg((const u8*)absmax + stored_at)], __ldg(nested + (stored_at >> 8)), off);
          }
        } else if (per == 4) {
          *(float4*)to = __ldg((const float4*)((const float*)absmax + stored_at));
        } else {
          *to = __ldg((const float*)absmax + stored_at);
        }
      }
    }
  }
  const float rows_inverse = 1.f / block_rows;
  // For every output of this block: e of all, row i of x, row r of the block, row `at` of its member, `place` in y.
#define EACH_OUTPUT                                                                            \
  _Pragma("unroll 1") for (int e = tid; e < block_rows * n; e += threads) {                    \
    const int i = quotient(e, rows_inverse), r = e - i * block_rows;                           \
    const Unit unit = units[r / (16 * MT)];                                                    \
    const int at = unit.row + r % (16 * MT);                                                   \
    if (unit.member < 0 || at >= of(a.rows, unit.member)) continue;                            \
    const int place = at + (unit.member > 0 ? a.rows[0] : 0) + (unit.member > 1 ? a.rows[1] : 0);
  // B of the rows of this block, on its way to L2 until the end needs it.
  if (a.slots && gridDim.y == 1) {
    EACH_OUTPUT
      (void)place;
      const LoraEntry entry = lora[unit.member * COLUMNS + i];
      if (entry.rank && (i == 0 || lora[unit.member * COLUMNS + i - 1].B != entry.B))
        for (int j = 0; j < entry.rank; j += 32) prefetch(entry.B + (size_t)at * entry.rank + j);
    }
  }
  __syncthreads();

  float sum[MT][4];
#pragma unroll
  for (int j = 0; j < MT; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) sum[j][i] = 0.f;
  const u8* x_lane = xs + g * x_bytes + t * 32;
  const float* sc_lane = sc + (rw * MT * 16 + g) * sc_stride;
  const int sc_tile = 16 * sc_stride;
  const u32 lane4 = lane * 4;
  uint4 xa = make_uint4(0, 0, 0, 0), xb = xa;  // lanes without a row keep zeros: their columns are not stored
#define TWO(w, byte) (*(const u32*)(shared + __byte_perm(w, lane4, 0x5504 + (byte)*16)))
#define COMPUTE(held, batch)                                                                     \
  _Pragma("unroll") for (int u = 0; u < UB; u++) {                                               \
    const int b = (batch)*UB + u;                                                                \
    if (b < blocks) {                                                                            \
      if (g < n) {                                                                               \
        xa = *(const uint4*)(x_lane + b * 128);                                                  \
        xb = *(const uint4*)(x_lane + b * 128 + 16);                                             \
      }                                                                                          \
      _Pragma("unroll") for (int j = 0; j < MT; j++) {                                           \
        const uint2 w0 = held[u][j][0], w1 = held[u][j][1];                                      \
        float c[4] = {0.f, 0.f, 0.f, 0.f};                                                       \
        mma_m16n8k16(c, TWO(w0.x, 0), TWO(w1.x, 0), TWO(w0.x, 1), TWO(w1.x, 1), xa.x, xa.y);     \
        mma_m16n8k16(c, TWO(w0.x, 2), TWO(w1.x, 2), TWO(w0.x, 3), TWO(w1.x, 3), xa.z, xa.w);     \
        mma_m16n8k16(c, TWO(w0.y, 0), TWO(w1.y, 0), TWO(w0.y, 1), TWO(w1.y, 1), xb.x, xb.y);     \
        mma_m16n8k16(c, TWO(w0.y, 2), TWO(w1.y, 2), TWO(w0.y, 3), TWO(w1.y, 3), xb.z, xb.w);     \
        const float* s = sc_lane + j * sc_tile + b;                                              \
        const float s0 = s[0], s1 = s[8 * sc_stride];                                            \
        sum[j][0] = fmaf(s0, c[0], sum[j][0]);                                                   \
        sum[j][1] = fmaf(s0, c[1], sum[j][1]);                                                   \
        sum[j][2] = fmaf(s1, c[2], sum[j][2]);                                                   \
        sum[j][3] = fmaf(s1, c[3], sum[j][3]);                                                   \
      }                                                                                          \
    }                                                                                            \
  }
  if (live) {
#pragma unroll 1
    for (int batch = kw; batch < batches; batch += 2 * a.k_warps) {
      COMPUTE(wa, batch)
      LOAD(wa, batch + 2 * a.k_warps)
      if (batch + a.k_warps < batches) {
        COMPUTE(wb, batch + a.k_warps)
        LOAD(wb, batch + 3 * a.k_warps)
      }
    }
  }
  __syncthreads();

  // The sums of the warps that share a unit, through the memory of the table: [warp][column][row].
  const int stride = MT * 16 + 4;
  float* sums = (float*)shared;
#pragma unroll
  for (int j = 0; j < MT; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int column = 2 * t + (i & 1);
      if (column < n) {
        const float down = __uint_as_float((u32)(EXPONENT(column) - 14) << 23);
        sums[(warp * COLUMNS + column) * stride + j * 16 + (i >> 1) * 8 + g] = sum[j][i] * down;
      }
    }
  __syncthreads();
  const int splits = gridDim.y, total_rows = a.rows[0] + a.rows[1] + a.rows[2];
#define OWN_SUM(y)                                                                                 \
  for (int k = 0; k < a.k_warps; k++)                                                              \
    y += sums[((r / (16 * MT) * a.k_warps + k) * COLUMNS + i) * stride + r % (16 * MT)];
  if (splits > 1) {
    EACH_OUTPUT
      float y = 0.f;
      OWN_SUM(y)
      a.parts[((size_t)blockIdx.y * n + i) * total_rows + place] = y;
    }
    // The block that arrives last adds the parts, always in the same order, and leaves the counter at zero.
    __threadfence();
    __syncthreads();
    if (tid == 0) *last = atomicAdd(a.arrived + blockIdx.x, 1u) == splits - 1;
    __syncthreads();
  }
  if (a.late_wait) wait_for_previous();
  if (splits > 1) {
    if (!*last) return;
    if (tid == 0) a.arrived[blockIdx.x] = 0;
    __threadfence();
  }
  EACH_OUTPUT
    float y = 0.f;
    if (splits > 1) {
      for (int s = 0; s < splits; s++) y += __ldcg(a.parts + ((size_t)s * n + i) * total_rows + place);
    } else {
      OWN_SUM(y)
    }
    const void* bias = of(a.bias, unit.member);
    if (bias) y += value(bias, at, a.half);
    if (a.slots) {
      const LoraEntry entry = lora[unit.member * COLUMNS + i];
      if (entry.rank) {
        const float* low = a.low + (size_t)i * a.low_row + (size_t)unit.member * a.low_member;
        const float change = entry.scale * lora_product(entry.B + (size_t)at * entry.rank, low, entry.rank);
        y = rounded(y, a.half) + rounded(change, a.half);
      }
    }
    ((u16*)a.out)[(size_t)i * a.out_stride + place] = stored(y, a.half);
  }
}

#define MATVEC(name, MT, UB)                                                                                             \
  extern "C" __global__ void __launch_bounds__(640) name(                                                                \
      const void* x, int x_stride, int n, int blocks, void* out, int out_stride, int half,                               \
      const u8* w0, const u8* w1, const u8* w2, const void* s0, const void* s1, const void* s2,                          \
      const float* t0, const float* t1, const float* t2, const float* f0, const float* f1, const float* f2,              \
      const void* b0, const void* b1, const void* b2, int r0, int r1, int r2, const float* code,                         \
      const float* nested_code, const i64* lora_B, int lora_B_stride, const int* lora_rank, int lora_rank_stride,        \
      const float* lora_scale, int lora_scale_stride, const int* slots, const float* low, int low_row,                   \
      int low_member, float* parts, u32* arrived, int row_warps, int k_warps, int chunk_blocks, int late_wait) {          \
    extern __shared__ __align__(16) u8 shared[];                                                                         \
    const Matvec a = {x, x_stride, n, blocks, out, out_stride, half, {w0, w1, w2}, {s0, s1, s2}, {t0, t1, t2},           \
                      {f0, f1, f2}, {b0, b1, b2}, {r0, r1, r2}, code, nested_code, lora_B, lora_B_stride, lora_rank,     \
                      lora_rank_stride, lora_scale, lora_scale_stride, slots, low, low_row, low_member, parts,           \
                      arrived, row_warps, k_warps, chunk_blocks, late_wait};                                             \
    matvec<MT, UB>(a, shared);                                                                                           \
  }
MATVEC(matvec_1_4, 1, 4)
MATVEC(matvec_2_2, 2, 2)

// low[i, m, j] = row j of A of the adapter of row i, times x_i, float32. Grid: [width of low, members, n].
extern "C" __global__ void lora_shrink(
    const void* x, int x_stride, int columns, int half, const i64* lora_A, int lora_A_stride, const int* lora_rank,
    int lora_rank_stride, const int* slots, float* low, int low_row, int low_member) {
  __shared__ float sums[32];
  const int j = blockIdx.x, m = blockIdx.y, i = blockIdx.z, tid = threadIdx.x, threads = blockDim.x;
  wait_for_previous();
  // Not earlier: who is started by this trusts that x, made by the kernel in front of this one, is complete.
  let_next_start();
  const int slot = __ldcg(slots + i);
  if (slot < 0) return;
  const int rank = __ldcg(lora_rank + (size_t)m * lora_rank_stride + slot);
  const float* A = (const float*)__ldcg(lora_A + (size_t)m * lora_A_stride + slot) + (size_t)j * columns;
  if (j >= rank) return;
  const u16* from = (const u16*)x + (size_t)i * x_stride;
  float sum = 0.f;
  if ((columns & 3) == 0 && ((size_t)A & 15) == 0 && ((size_t)from & 7) == 0) {
#pragma unroll 4
    for (int k = tid * 4; k < columns; k += threads * 4) {
      const float4 w = __ldg((const float4*)(A + k));
      const uint2 v = __ldcg((const uint2*)(from + k));
      sum = fmaf(w.x, low_value(v.x, half), sum);
      sum = fmaf(w.y, high_value(v.x, half), sum);
      sum = fmaf(w.z, low_value(v.y, half), sum);
      sum = fmaf(w.w, high_value(v.y, half), sum);
    }
  } else {
    for (int k = tid; k < columns; k += threads) sum = fmaf(__ldg(A + k), value(from, k, half), sum);
  }
#pragma unroll
  for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  if ((tid & 31) == 0) sums[tid >> 5] = sum;
  __syncthreads();
  if (tid == 0) {
    float all = 0.f;
    for (int w = 0; w < threads / LANES; w++) all += sums[w];
    low[(size_t)i * low_row + (size_t)m * low_member + j] = all;
  }
}

// y += scale B low for one layer that is not 4-bit. Grid: [blocks of outputs, n]. round_change: as over a quantized layer.
extern "C" __global__ void lora_add(
    void* y, int y_stride, int rows, int half, int round_change, const i64* lora_B, const int* lora_rank,
    const float* lora_scale, const int* slots, const float* low, int low_row) {
  const int at = blockIdx.x * blockDim.x + threadIdx.x, i = blockIdx.y;
  wait_for_previous();
  let_next_start();
  const int slot = __ldcg(slots + i);
  if (slot < 0 || at >= rows) return;
  const int rank = __ldcg(lora_rank + slot);
  const float scale = __ldcg(lora_scale + slot);
  const float* B = (const float*)__ldcg(lora_B + slot) + (size_t)at * rank;
  if (!rank) return;
  const float change = scale * lora_product(B, low + (size_t)i * low_row, rank);
  u16* to = (u16*)y + (size_t)i * y_stride + at;
  *to = stored((half ? from_half(*to) : from_bf16(*to)) + (round_change ? rounded(change, half) : change), half);
}
