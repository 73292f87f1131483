// 9 to 128 rows: a product of 4-bit weights on tensor cores, and LoRA adapters chosen by each row. Read
// engine/kernels/gemm4.py first: it says what each kernel computes and in which shapes. values.cuh and the headers of the formats
// stand in front of this.

#define CHUNK Many::COLUMNS  // of x that a block holds at a time: 128 bytes of a row of weights, and what `copy_scales` brings
#define UNIT 128   // outputs of a block
#define THREADS 256

// The member that a unit of 128 outputs belongs to; its first output in the member, and the outputs of the members in front.
struct Unit {
  Member own;
  int first, begins;
};
__device__ __forceinline__ Unit unit_of(const Member* members, int number) {
  Unit unit = {members[0], number * UNIT, 0};
#pragma unroll
  for (int m = 1; m < MEMBERS; m++) {
    const int before = (unit.own.rows + UNIT - 1) / UNIT * UNIT;
    if (unit.first < before) break;
    unit.first -= before;
    unit.begins += unit.own.rows;
    unit.own = members[m];
  }
  return unit;
}

// out[i, :] = x[i, :] W^T (+ bias) of up to three weights over the same x. A weight becomes code * absmax in float32, rounded once to
// the type of x, as bitsandbytes unpacks it; sums are float32. An item of work is 256 columns of a unit of 128 outputs, for 8 TILES rows of
// x; a block has `each` items, which follow each other, and begins the next one's copies (x, packed weights, scales) before it computes one.
// Of its eight warps, warp w has the outputs 32 (w % 4) .. + 31, all rows, and one half of the columns; both halves are added at the end of a
// unit. parts: where a unit's items are several blocks', the sums of each, [blocks of a unit, n, all outputs] float32, for `rows_up` to add.
// Grid: [blocks, 1, pieces of 8 TILES rows]. Dynamic shared memory, from a multiple of 2048 on: codes, of each lane's own so that no two
// lanes meet in a bank, then the codes of scales, sums of 8 rows and the stages.
template <int TILES>
__device__ __forceinline__ void rows_product(
    const u16* x, int x_stride, int n, int columns, const Member* members, const float* code, const float* nested_code, u16* out,
    int out_stride, float* parts, int total, int each, int items, int half, u8* shared) {
  constexpr int X_BYTES = TILES * 8 * CHUNK * 2, W_BYTES = UNIT * 128, STAGE = X_BYTES + W_BYTES + UNIT * Many::ROW_BYTES;
  float* made = (float*)shared + Many::FRONT;
  constexpr int HS = CHUNK / 64;  // eights of neighbours that a lane has
  constexpr int UNROLLED = TILES == 8 ? 1 : HS;  // registers of the largest do not suffice for more
  u8* stages = (u8*)(made + 8 * (UNIT + 1));
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  let_next_start();
  const int row_first = blockIdx.z * (TILES * 8), here = min(n - row_first, TILES * 8);
  x += (size_t)row_first * x_stride;
  Many many(members[0], (float*)shared);
  const int chunks = columns / CHUNK;
  const int from = blockIdx.x * each, count = min(each, items - from);

  // Of the item that is copied next: its unit and chunk. Rows beyond the member's last are the last again. Pieces of 16 bytes lie where
  // neighbouring rows meet in no bank.
  int next_unit = from / chunks, next_chunk = from % chunks;
  const auto copy_weights = [&](int stage) {
    const Unit unit = unit_of(members, next_unit);
    u8* to = stages + stage * STAGE + X_BYTES;
#pragma unroll
    for (int i = tid; i < UNIT * 8; i += THREADS) {
      const int r = i >> 3, piece = i & 7, row = min(unit.first + r, unit.own.rows - 1);
      const u8* from = unit.own.weight + ((size_t)row * (columns / CHUNK) + next_chunk) * Many::CHUNK_BYTES;
      copy_async<Many::PIECE_BYTES>(to + r * 128 + ((piece ^ ((r & 1) << 2)) << 4), from + Many::place(piece));
    }
    if (tid < UNIT) many.copy_scales(to + W_BYTES, tid, unit.own, min(unit.first + tid, unit.own.rows - 1), columns, next_chunk);
  };
  const auto copy_x = [&](int stage) {
    u8* to = stages + stage * STAGE;
#pragma unroll
    for (int i = tid; i < TILES * 8 * (CHUNK / 8); i += THREADS) {
      const int r = i / (CHUNK / 8), piece = i % (CHUNK / 8);
      if (r < here)
        copy_async<16>(to + r * (CHUNK * 2) + ((piece ^ ((r & 1) << 1)) << 4), x + (size_t)r * x_stride + (size_t)next_chunk * CHUNK + piece * 8);
    }
  };
  const auto advance = [&]() {
    if (++next_chunk == chunks) next_chunk = 0, next_unit++;
  };
  copy_weights(0);
  many.prepare(code, nested_code);
  // Rows of x that are not there: zeros, once, in both stages.
  for (int i = tid; i < 2 * (TILES * 8 - here) * (CHUNK / 8); i += THREADS) {
    const int piece = i % (CHUNK / 8), r = i / (CHUNK / 8);
    *(uint4*)(stages + (r & 1) * STAGE + (here + (r >> 1)) * (CHUNK * 2) + piece * 16) = make_uint4(0, 0, 0, 0);
  }
  wait_for_previous();
  copy_x(0);
  commit_copies();

  float sums[2][TILES][4] = {};
  const int r0 = (warp & 3) * 32 + g, step = warp >> 2, high = t >> 1;
  // The neighbours of a row that a lane has.
  const int w_at = r0 * 128 + (((step * 4 + t) ^ ((g & 1) << 2)) << 4);
  const int x_at = g * (CHUNK * 2), x_piece = (step * 4 + t) * HS, piece = step * 4 + t;
  int chunk = next_chunk, number = next_unit;
  Unit unit = unit_of(members, number);
  many.begin(unit.own);
#pragma unroll 1
  for (int item = 0; item < count; item++) {
    float outer[4];
#pragma unroll
    for (int r = 0; r < 4; r++) outer[r] = many.outer(unit.own, min(unit.first + r0 + 8 * r, unit.own.rows - 1), columns, chunk, piece);
    wait_for_copies<0>();
    __syncthreads();
    advance();
    if (item + 1 < count) {
      copy_weights((item + 1) & 1);
      copy_x((item + 1) & 1);
    }
    commit_copies();
    const u8* stage = stages + (item & 1) * STAGE;
    const u8 *w = stage + X_BYTES, *scales = w + W_BYTES;
    // The neighbours that a lane has of each of four rows; lanes 2 and 3 take theirs in another order, as the banks of x want it.
    Many::Word words[4][HS];
    Many::Scale scale[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const uint4 a = *(const uint4*)(w + w_at + r * (8 * 128));
      Many::words(words[r], a, high, scales, r0 + 8 * r, piece);
      scale[r] = many.scale(scales, r0 + 8 * r, piece, outer[r]);
    }
#pragma unroll UNROLLED
    for (int h = 0; h < HS; h++) {
      u32 pairs[4][4];
      Many::Word now[4];
#pragma unroll
      for (int r = 0; r < 4; r++) {
        now[r] = words[r][0];
#pragma unroll
        for (int i = 0; i < HS - 1; i++) words[r][i] = words[r][i + 1];
      }
#pragma unroll
      for (int k = 0; k < 4; k++) {
#pragma unroll
        for (int r = 0; r < 4; r++) {
          float v0, v1;
          many.values(v0, v1, now[r], k, scale[r], half);
          pairs[r][k] = half ? two_halves(v0, v1) : two_bf16(v0, v1);
        }
      }
      const u8* from_x = stage + x_at + (((x_piece + (h ^ high)) ^ ((g & 1) << 1)) << 4);
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) {
        const uint4 v = *(const uint4*)(from_x + tile * (8 * CHUNK * 2));
#pragma unroll
        for (int m = 0; m < 2; m++) {
          const u32(*own_pairs)[4] = pairs + 2 * m;
          if (half) {
            mma_m16n8k16(sums[m][tile], own_pairs[0][0], own_pairs[1][0], own_pairs[0][1], own_pairs[1][1], v.x, v.y);
            mma_m16n8k16(sums[m][tile], own_pairs[0][2], own_pairs[1][2], own_pairs[0][3], own_pairs[1][3], v.z, v.w);
          } else {
            mma_m16n8k16_bf16(sums[m][tile], own_pairs[0][0], own_pairs[1][0], own_pairs[0][1], own_pairs[1][1], v.x, v.y);
            mma_m16n8k16_bf16(sums[m][tile], own_pairs[0][2], own_pairs[1][2], own_pairs[0][3], own_pairs[1][3], v.z, v.w);
          }
        }
      }
    }
    if (++chunk < chunks && item + 1 < count) continue;
    // The unit's end, or the block's: by rows of x, so that neighbours are written together; one half of the columns, then the other.
    const int part = blockIdx.x - number * chunks / each;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
      for (int turn = 1; turn >= 0; turn--) {
        if (step == turn) {
#pragma unroll
          for (int m = 0; m < 2; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
              float* to = made + (t * 2 + (i & 1)) * (UNIT + 1) + r0 + m * 16 + (i >> 1) * 8;
              *to = turn ? sums[m][tile][i] : sums[m][tile][i] + *to;
              sums[m][tile][i] = 0.f;
            }
        }
        __syncthreads();
      }
      for (int i = tid; i < 8 * UNIT; i += THREADS) {
        const int row = tile * 8 + i / UNIT, r = i % UNIT;
        if (unit.first + r >= unit.own.rows || row >= here) continue;
        float sum = made[i / UNIT * (UNIT + 1) + r];
        if (parts) {
          parts[((size_t)part * n + row_first + row) * total + unit.begins + unit.first + r] = sum;
        } else {
          if (unit.own.bias) sum += value(__ldg(unit.own.bias + unit.first + r), half);
          out[(size_t)(row_first + row) * out_stride + unit.begins + unit.first + r] = stored(sum, half);
        }
      }
      __syncthreads();
    }
    chunk = 0;
    unit = unit_of(members, ++number);
    if (item + 1 < count) many.begin(unit.own);
  }
}

#define MEMBER(i) \
  const u8 *weight##i, const void *scale##i, const void *second##i, const float *offset##i, const u16 *bias##i, int rows##i
#define PRODUCT_PARAMETERS \
  const u16 *x, int x_stride, int n, int columns, MEMBER(0), MEMBER(1), MEMBER(2), const float *code, const float *nested_code, \
      u16 *out, int out_stride, float *parts, int total, int each, int items, int half
// A program for each type, but for the largest, whose registers do not suffice for that.
#define PRODUCT(TILES) \
  const Member members[MEMBERS] = {{weight0, scale0, second0, offset0, bias0, rows0}, \
                                   {weight1, scale1, second1, offset1, bias1, rows1}, \
                                   {weight2, scale2, second2, offset2, bias2, rows2}}; \
  extern __shared__ __align__(16) u8 given[]; \
  const auto product = [&](int type) { \
    rows_product<TILES>( \
        x, x_stride, n, columns, members, code, nested_code, out, out_stride, parts, total, each, items, type, aligned_shared(given)); \
  }; \
  if (TILES == 8) product(half); \
  else if (half) product(1); \
  else product(0)
#ifndef TRIMTAB_CPU
__device__ __forceinline__ u8* aligned_shared(u8* p) { return p + (-shared_address(p) & 2047u); }
#else
__device__ __forceinline__ u8* aligned_shared(u8* p) { return p; }
#endif
extern "C" __global__ void __launch_bounds__(THREADS, 2) rows_product_16(PRODUCT_PARAMETERS) { PRODUCT(2); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) rows_product_32(PRODUCT_PARAMETERS) { PRODUCT(4); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) rows_product_64(PRODUCT_PARAMETERS) { PRODUCT(8); }

#if IS_FIRST  // what knows no weights is compiled once
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
    u16* y, int y_stride, int n, int rows0, int rows1, int rows2, const float* parts, const u16* bias0,
    const u16* bias1, const u16* bias2, const i64* lora_B, int B_stride, const int* lora_rank, int rank_stride,
    const float* lora_scale, int scale_stride, const int* slots, const float* low, int low_row, int low_member, int round_change,
    int half, int chunks, int each) {
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
    // The blocks that had items of this output's unit.
    const int unit = (m > 0 ? (rows0 + UNIT - 1) / UNIT : 0) + (m > 1 ? (rows1 + UNIT - 1) / UNIT : 0) + c / UNIT;
    const int splits = ((unit + 1) * chunks - 1) / each - unit * chunks / each + 1;
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
#endif
