// Several 4-bit products in one launch, each reading what the one in front of it made: what follows attention in a layer, and
// the next layer's projections. 1 to 4 rows. Read runtime/chain.py first. values.cuh stands in front of this.
//
// Between two launches lie the end of the one (its last block, its writes on their way) and the beginning of the other; here
// lies one trip through L2. A block that makes a value stores it together with a tag of this step, in one word; whoever needs it
// reads the word until the tag is there. No flag, no fence, no counter, nothing to be cleared: a tag comes once in 65,536 launches.
// Every block must run at once for that: the grid is at most one block a multiprocessor, which the caller sees to.
//
// Weights do not wait for values. Each warp has a ring of its own in shared memory and asks for its next pieces of weights while
// it works on the present ones, across the products' borders: the memory is busy while blocks wait for each other. A lane reads
// back only what it asked for itself, so that a ring needs no barrier. Scales come one product ahead, in registers.
//
// How a weight is decoded and multiplied is matvec4.cu's (matvec_4): read there about table, pairs of blocks and columns.
//
// Compiled for HALF, NESTED, ROWS (1, 2 or 4), HIDDEN (blocks of 64 of the residual, an even number), WARPS, DEPTH (pieces of
// each warp on their way), STAGES (products at most), XB (blocks of x at most in a block of threads), SCALES and SUMS (floats).

#ifdef ROWS
#define TABLE_BYTES 65536
#define STRIDE 20
#define PAIR_BYTES 288
#define THREADS (WARPS * 32)
#define MEMBERS 3
#define QUADS (HIDDEN * 16)  // of a row of the residual
#define PIECES ((ROWS * QUADS + THREADS - 1) / THREADS)
#define X_BYTES (XB / 2 * PAIR_BYTES + 16)
#define OWN_SCALES ((SCALES / 4 + THREADS - 1) / THREADS)  // quads that a thread brings
#define A_AHEAD 2
#define PIECE_BYTES 1024

#define PAIR 1      // out = act(first member) second member
#define MULTIPLY 2  // out = act(product) other

// How values lie in memory: as they are; a word each, value in the high half and tag in the low one; or 8 bytes each, float32 of
// one part of the columns, then the adapter's change in the high half and the tag in the low one, `parts` of them apart.
#define PLAIN 0
#define WORDS 1
#define PARTS 2

// One product. Mirrored by chain.Stage.
struct Stage {
  const u8* weight[MEMBERS];
  const void* absmax[MEMBERS];
  const float* nested[MEMBERS];
  const float* offset[MEMBERS];
  const i64 *lora_A, *lora_B;
  const int* lora_rank;
  const float* lora_scale;
  const u16 *post, *next, *scalar;  // the norm in front, post null: there is none
  const u16* other;
  const void* from;
  void* to;
  u64* low;
  u16* h;  // where the residual goes as it is behind this norm; null: nowhere
  int rows[MEMBERS];
  int members, blocks, splits, units, k_warps, steps, all_units, gate, kind, from_kind, from_parts, from_width, to_kind, to_width;
  int lora_stride, low_width, other_stride;
  float eps;
  int spare[3];
};

struct LoraEntry {
  const float *A, *B;
  float scale;
  int rank;
};
struct Unit {
  int member, row;
};
__device__ __forceinline__ Unit locate(const Stage& a, int unit) {
  if (a.gate == PAIR) {
    const Unit found = {unit & 1, (unit >> 1) * 16};
    return found.row < a.rows[0] ? found : Unit{-1, 0};
  }
#pragma unroll
  for (int m = 0; m < MEMBERS; m++) {
    const int units = m < a.members ? (a.rows[m] + 15) / 16 : 0;
    if (unit < units) return Unit{m, unit * 16};
    unit -= units;
  }
  return Unit{-1, 0};
}
__device__ __forceinline__ float dot_4(float4 a, float4 x, float sum) {
  return fmaf(a.w, x.w, fmaf(a.z, x.z, fmaf(a.y, x.y, fmaf(a.x, x.x, sum))));
}

// Four values of a row of x, as words or parts or as they are.
struct Four {
  float v[4];
};
__device__ __forceinline__ bool have(uint4 w, u32 tag) { return (((w.x ^ tag) | (w.y ^ tag) | (w.z ^ tag) | (w.w ^ tag)) & 0xffff) == 0; }
__device__ __forceinline__ uint4 wait_words(const u32* p, u32 tag, uint4 w) {
  for (int turns = SPINS; !have(w, tag); w = look_16(p)) {
    if (!turns--) __trap();
    others_run();
  }
  return w;
}
__device__ __forceinline__ float word_value(u32 w) { return HALF ? from_half((u16)(w >> 16)) : __uint_as_float(w & 0xffff0000u); }
__device__ __forceinline__ Four words_four(uint4 w) { return Four{{word_value(w.x), word_value(w.y), word_value(w.z), word_value(w.w)}}; }
// y = round(sum of parts); y = round(y + change). The change is the first part's.
__device__ __forceinline__ Four parts_four(const uint2* p, int parts, size_t apart, u32 tag) {
  Four y = {{0.f, 0.f, 0.f, 0.f}};
  float change[4];
#pragma unroll 1
  for (int s = 0; s < parts; s += 2) {
    uint4 w[4];
#pragma unroll
    for (int k = 0; k < 4; k++)
      if (k < 2 || s + 1 < parts) w[k] = look_16((const u32*)(p + (s + k / 2) * apart) + (k & 1) * 4);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      if (k >= 2 && s + 1 >= parts) break;
      const u32* at = (const u32*)(p + (s + k / 2) * apart) + (k & 1) * 4;
      for (int turns = SPINS; ((w[k].y ^ tag) | (w[k].w ^ tag)) & 0xffff; w[k] = look_16(at)) {
        if (!turns--) __trap();
        others_run();
      }
      y.v[(k & 1) * 2] += __uint_as_float(w[k].x), y.v[(k & 1) * 2 + 1] += __uint_as_float(w[k].z);
      if (s == 0 && k < 2) change[k * 2] = word_value(w[k].y), change[k * 2 + 1] = word_value(w[k].w);
    }
  }
#pragma unroll
  for (int e = 0; e < 4; e++) y.v[e] = rounded(rounded(y.v[e], HALF) + change[e], HALF);
  return y;
}
__device__ __forceinline__ Four plain_four(const u16* p) {
  const uint2 v = __ldcg((const uint2*)p);
  return Four{{low_value(v.x, HALF), high_value(v.x, HALF), low_value(v.y, HALF), high_value(v.y, HALF)}};
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) chain(
    const Stage* given, int count, const int* slots, const u32* table, const float* nested_code, const u16* h_in, const u32* epoch,
    int tags, int number) {
  extern __shared__ __align__(16) u8 shared[];
  float* codes = (float*)(shared + TABLE_BYTES);
  Stage* stages = (Stage*)(codes + 256);
  LoraEntry* lora = (LoraEntry*)(stages + STAGES);
  u8* ring = (u8*)(lora + STAGES * MEMBERS * ROWS);
  float* scales = (float*)(ring + WARPS * DEPTH * PIECE_BYTES);
  u8* xs = (u8*)(scales + SCALES);
  float* factors = (float*)(xs + ROWS * X_BYTES);
  float* sums = factors + ROWS * XB;
  float* row_sums = sums + SUMS;
  float* dot_sums = row_sums + 2 * PIECES * WARPS;
  float* lows = dot_sums + 64;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3, block = blockIdx.x, grid = gridDim.x;
  let_next_start();

  // What no other kernel makes ----------------------------------------------------------------------------------------
  for (int i = tid; i < count * (int)(sizeof(Stage) / 16); i += THREADS) ((uint4*)stages)[i] = __ldg((const uint4*)given + i);
  const u32 turn = (u32)__ldcg((const int*)epoch) * (u32)tags + (u32)number, tag = turn & 0xffff;
  __syncthreads();

  // This warp's pieces of weights, one after the other through all products.
  int at_stage = -1, at_unit = 0, at_step = 0, steps_here = 0;
  const u8 *from0 = nullptr, *from1 = nullptr;
  const auto place_unit = [&](const Stage& a) {  // of at_unit
    const int own = block / a.splits, split = block - own * a.splits, kw = warp % a.k_warps;
    const Unit unit = locate(a, own * a.units + at_unit);
    const int member = max(unit.member, 0), last = a.rows[member] - 1;
    const u8* weight = a.weight[member] + (size_t)split * (a.blocks / a.splits) * 32 + kw * a.steps * 64 + t * 16;
    from0 = weight + (size_t)min(unit.row + g, last) * a.blocks * 32;
    from1 = weight + (size_t)min(unit.row + g + 8, last) * a.blocks * 32;
    at_step = 0;
    steps_here = min(a.steps, a.blocks / a.splits / 2 - kw * a.steps);
  };
  const auto next_unit = [&] {  // the next unit of this warp that has steps, in this product or one behind it
    while (at_stage < count) {
      if (at_stage >= 0) {
        const Stage& a = stages[at_stage];
        at_unit += WARPS / a.k_warps;
        const int own = block / a.splits, units = min(a.units, a.all_units - own * a.units);
        if (at_unit < units && warp / a.k_warps < WARPS / a.k_warps) {
          place_unit(a);
          if (steps_here > 0) return;
        }
        if (at_unit < units && steps_here > 0) continue;
      }
      if (++at_stage < count) at_unit = warp / stages[at_stage].k_warps - WARPS / stages[at_stage].k_warps;
    }
  };
  u8* own_ring = ring + warp * DEPTH * PIECE_BYTES + lane * 16;
  int asked = 0;  // place in the ring
  const auto ask = [&] {
    if (at_stage < count) {
      copy_16(own_ring + asked * PIECE_BYTES, from0 + at_step * 64);
      copy_16(own_ring + asked * PIECE_BYTES + 512, from1 + at_step * 64);
      if (++at_step == steps_here) next_unit();
    }
    end_of_copies();
    if (++asked == DEPTH) asked = 0;
  };
  next_unit();
#pragma unroll 1
  for (int i = 0; i < DEPTH; i++) ask();

  // Scales of one product's rows of this block, four of a row at once.
#if NESTED
  u32 found[OWN_SCALES];
  float outer[OWN_SCALES], offset[OWN_SCALES];
#else
  float4 found[OWN_SCALES];
#endif
  const auto ask_scales = [&](const Stage& a) {
    const int own = block / a.splits, split = block - own * a.splits, chunk = a.blocks / a.splits, quads = chunk / 4;
    const float inverse = __fdividef(1.f, (float)quads);
#pragma unroll
    for (int k = 0; k < OWN_SCALES; k++) {
      const int e = tid + k * THREADS, r = (int)(((float)e + 0.5f) * inverse), q = (e - r * quads) * 4;
      if (e >= a.units * 16 * quads) break;
      const Unit unit = locate(a, own * a.units + (r >> 4));
      const int member = max(unit.member, 0);
      const size_t at = (size_t)min(unit.row + (r & 15), a.rows[member] - 1) * a.blocks + split * chunk + q;
#if NESTED
      found[k] = __ldg((const u32*)((const u8*)a.absmax[member] + at));
      outer[k] = __ldg(a.nested[member] + (at >> 8));
      offset[k] = __ldg(a.offset[member]);
#else
      found[k] = __ldg((const float4*)((const float*)a.absmax[member] + at));
#endif
    }
  };
  const auto keep_scales = [&](const Stage& a) {
    const int quads = a.blocks / a.splits / 4, stride = (quads | 1) * 4;
    const float inverse = __fdividef(1.f, (float)quads);
#pragma unroll
    for (int k = 0; k < OWN_SCALES; k++) {
      const int e = tid + k * THREADS, r = (int)(((float)e + 0.5f) * inverse), q = (e - r * quads) * 4;
      if (e >= a.units * 16 * quads) break;
      float4 v;
#if NESTED
      v.x = fmaf(codes[found[k] & 255], outer[k], offset[k]);
      v.y = fmaf(codes[found[k] >> 8 & 255], outer[k], offset[k]);
      v.z = fmaf(codes[found[k] >> 16 & 255], outer[k], offset[k]);
      v.w = fmaf(codes[found[k] >> 24], outer[k], offset[k]);
#else
      v = found[k];
#endif
      *(float4*)(scales + r * stride + q) = v;
    }
  };
  ask_scales(stages[0]);
#if NESTED
  if (tid < 256) codes[tid] = __ldg(nested_code + tid);
#endif
  for (int i = tid; i < 2048; i += THREADS) {
    const u32 v = __ldg(table + (i >> 3));
    *(uint4*)(shared + (i >> 3) * 256 + (i & 7) * 16) = make_uint4(v, v, v, v);
  }
  for (int e = tid; e < count * MEMBERS * ROWS; e += THREADS) {
    const int s = e / (MEMBERS * ROWS), m = (e - s * MEMBERS * ROWS) / ROWS, i = e % ROWS;
    LoraEntry entry = {nullptr, nullptr, 0.f, 0};
    const Stage& a = stages[s];
    if (a.lora_A && m < a.members) {
      const int slot = __ldcg(slots + i);
      if (slot >= 0) {
        const size_t at = (size_t)m * a.lora_stride + slot;
        entry.A = (const float*)__ldcg(a.lora_A + at), entry.B = (const float*)__ldcg(a.lora_B + at);
        entry.scale = __ldcg(a.lora_scale + at), entry.rank = __ldcg(a.lora_rank + at);
      }
    }
    lora[e] = entry;
  }
  __syncthreads();
  keep_scales(stages[0]);

  // The residual: a thread's own four values of each piece, as they are stored.
  const auto row_of = [&](int k) { return (tid + k * THREADS) / QUADS; };
  const auto is_there = [&](int k) { return tid + k * THREADS < ROWS * QUADS; };
  const auto quad_of = [&](int k) { return tid + k * THREADS - row_of(k) * QUADS; };
  uint2 h[PIECES];
  wait_for_previous();
#pragma unroll
  for (int k = 0; k < PIECES; k++) h[k] = is_there(k) ? __ldcg((const uint2*)h_in + tid + k * THREADS) : make_uint2(0, 0);

  // x as fp16: see matvec4.cu. Four values, quad `quad` of a row; 16 lanes have a block of 64.
  const auto put = [&](int row, int quad, const float* v) {
    u32 m = 0;
#pragma unroll
    for (int e = 0; e < 4; e++) m = max(m, __float_as_uint(v[e]) & 0x7fffffffu);
#pragma unroll
    for (int d = 1; d < 16; d *= 2) m = max(m, __shfl_xor_sync(ALL, m, d));
    const int exponent = min(max((int)(m >> 23), 15), 254);
    const float up = __uint_as_float((u32)(268 - exponent) << 23);
    const int b = quad >> 4;
    *(uint2*)(xs + row * X_BYTES + (b >> 1) * PAIR_BYTES + (b & 1) * 160 + (quad & 15) * 8) =
        make_uint2(two_halves(v[0] * up, v[1] * up), two_halves(v[2] * up, v[3] * up));
    if ((lane & 15) == 0) factors[row * XB + b] = __uint_as_float((u32)(exponent - 14) << 23);
  };
  const auto four_of = [&](const Stage& a, int row, int quad) {  // of x as it was made; waits for it
    if (a.from_kind == PLAIN) return plain_four((const u16*)a.from + (size_t)row * a.from_width + quad * 4);
    if (a.from_kind == PARTS)
      return parts_four((const uint2*)a.from + (size_t)row * a.from_width + quad * 4, a.from_parts, (size_t)ROWS * a.from_width, tag);
    const u32* p = (const u32*)a.from + (size_t)row * a.from_width + quad * 4;
    return words_four(wait_words(p, tag, look_16(p)));
  };

  int place = 0;  // in the ring
#pragma unroll 1
  for (int s = 0; s < count; s++) {
    const Stage& a = stages[s];
    const LoraEntry* own_lora = lora + s * MEMBERS * ROWS;
    const int own = block / a.splits, split = block - own * a.splits, chunk = a.blocks / a.splits;
    const int units = max(0, min(a.units, a.all_units - own * a.units));
    int most_rank = 0;
    if (a.lora_A)
      for (int e = 0; e < a.members * ROWS; e++) most_rank = max(most_rank, own_lora[e].rank);
    const int dots = ROWS * a.members * most_rank;

    // A value of A x: low numbers first. Its row of A is on the way before x is there.
    const auto dot_at = [&](int number, int& i, int& m, int& j) {
      const int both = ROWS * a.members;
      j = number / both, i = (number - j * both) / a.members, m = number - j * both - i * a.members;
      const LoraEntry& entry = own_lora[m * ROWS + i];
      return j < entry.rank ? entry.A + (size_t)j * a.blocks * 64 : nullptr;
    };
    int dot_i = 0, dot_m = 0, dot_j = 0;
    const float* A = block < dots ? dot_at(block, dot_i, dot_m, dot_j) : nullptr;
    float4 first_A[A_AHEAD];
    if (A)
#pragma unroll
      for (int k = 0; k < A_AHEAD; k++)
        if (tid + k * THREADS < a.blocks * 16) first_A[k] = __ldg((const float4*)A + tid + k * THREADS);

    // The input ------------------------------------------------------------------------------------------------------
    if (a.post) {
      uint2 post[PIECES], next[PIECES];
      const float factor = a.scalar ? value(__ldg(a.scalar), HALF) : 1.f;
      uint4 words[PIECES];
#pragma unroll
      for (int k = 0; k < PIECES; k++) {
        post[k] = next[k] = make_uint2(0, 0);
        if (!is_there(k)) continue;
        post[k] = __ldg((const uint2*)a.post + quad_of(k));
        if (a.next) next[k] = __ldg((const uint2*)a.next + quad_of(k));
        if (a.from_kind == WORDS) words[k] = look_16((const u32*)a.from + (size_t)(tid + k * THREADS) * 4);
      }
      Four y[PIECES];
      float own_sum[PIECES];
      const auto row_sum = [&](float* to, int k) {  // over the row of piece k; what the warps found is in `to`
        const int first = row_of(k) * (QUADS / 32);
        float all = 0.f;
#pragma unroll
        for (int w = 0; w < QUADS / 32; w++) all += to[first + w];
        return rsqrtf(all / (HIDDEN * 64) + a.eps);
      };
#pragma unroll
      for (int k = 0; k < PIECES; k++) {
        if (a.from_kind == WORDS && is_there(k))
          y[k] = words_four(wait_words((const u32*)a.from + (size_t)(tid + k * THREADS) * 4, tag, words[k]));
        else if (is_there(k))
          y[k] = four_of(a, row_of(k), quad_of(k));
        else
          y[k] = Four{{0.f, 0.f, 0.f, 0.f}};
        float sum = 0.f;
#pragma unroll
        for (int e = 0; e < 4; e++) sum = fmaf(y[k].v[e], y[k].v[e], sum);
        own_sum[k] = warp_sum(sum);
        if (lane == 0) row_sums[k * WARPS + warp] = own_sum[k];
      }
      __syncthreads();
#pragma unroll
      for (int k = 0; k < PIECES; k++) {
        float w[4], b[4], sum = 0.f;
        const float r = is_there(k) ? row_sum(row_sums, k) : 0.f;
        unpack(w, post[k].x, HALF), unpack(w + 2, post[k].y, HALF);
        unpack(b, h[k].x, HALF), unpack(b + 2, h[k].y, HALF);
#pragma unroll
        for (int e = 0; e < 4; e++) {
          b[e] = rounded(b[e] + rounded(y[k].v[e] * r * w[e], HALF), HALF);
          if (a.scalar) b[e] = rounded(b[e] * factor, HALF);
          sum = fmaf(b[e], b[e], sum);
          y[k].v[e] = b[e];
        }
        h[k] = make_uint2(pack(b, HALF), pack(b + 2, HALF));
        if (a.h && block == 0 && is_there(k)) *((uint2*)a.h + tid + k * THREADS) = h[k];
        if (a.next) {
          sum = warp_sum(sum);
          if (lane == 0) row_sums[(PIECES + k) * WARPS + warp] = sum;
        }
      }
      if (units || A) {
        if (a.next) __syncthreads();
#pragma unroll
        for (int k = 0; k < PIECES; k++) {
          if (!is_there(k)) continue;  // so for whole warps
          if (a.next) {
            float w[4];
            const float r = row_sum(row_sums + PIECES * WARPS, k);
            unpack(w, next[k].x, HALF), unpack(w + 2, next[k].y, HALF);
#pragma unroll
            for (int e = 0; e < 4; e++) y[k].v[e] = rounded(y[k].v[e] * r * w[e], HALF);
          }
          put(row_of(k), quad_of(k), y[k].v);
        }
      }
    } else if (units || (A && a.splits == 1)) {
      const int quads = chunk * 16, all = ROWS * quads;  // of a row: a multiple of 64
#pragma unroll 1
      for (int from = warp * 32; from < all; from += 4 * THREADS) {
        uint4 w[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
          const int e = from + k * THREADS + lane, row = ROWS == 1 ? 0 : e / quads;
          if (from + k * THREADS < all && a.from_kind == WORDS)
            w[k] = look_16((const u32*)a.from + (size_t)row * a.from_width + (split * quads + e - row * quads) * 4);
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
          if (from + k * THREADS >= all) break;
          const int e = from + k * THREADS + lane, row = ROWS == 1 ? 0 : e / quads, quad = e - row * quads;
          Four x;
          if (a.from_kind == WORDS)
            x = words_four(wait_words((const u32*)a.from + (size_t)row * a.from_width + (split * quads + quad) * 4, tag, w[k]));
          else
            x = four_of(a, row, split * quads + quad);
          put(row, quad, x.v);
        }
      }
    }
    __syncthreads();

    // A x --------------------------------------------------------------------------------------------------------------
    const auto x_4 = [&](int row, int quad) {
      if (a.splits > 1) {
        const Four x = four_of(a, row, quad);
        return make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
      }
      const int b = quad >> 4;
      const uint2 v = *(const uint2*)(xs + row * X_BYTES + (b >> 1) * PAIR_BYTES + (b & 1) * 160 + (quad & 15) * 8);
      const float f = factors[row * XB + b];
      return make_float4(f * from_half((u16)v.x), f * from_half((u16)(v.x >> 16)), f * from_half((u16)v.y),
                         f * from_half((u16)(v.y >> 16)));
    };
    int turn_of_sums = 0;
#pragma unroll 1
    for (int number = block; number < dots; number += grid) {
      if (number != block) A = dot_at(number, dot_i, dot_m, dot_j);
      if (!A) continue;  // so for all threads of the block
      float sum = 0.f;
#pragma unroll
      for (int k = 0; k < A_AHEAD; k++) {
        const int quad = tid + k * THREADS;
        if (quad < a.blocks * 16) sum = dot_4(number == block ? first_A[k] : __ldg((const float4*)A + quad), x_4(dot_i, quad), sum);
      }
#pragma unroll 2
      for (int quad = tid + A_AHEAD * THREADS; quad < a.blocks * 16; quad += THREADS)
        sum = dot_4(__ldg((const float4*)A + quad), x_4(dot_i, quad), sum);
      sum = warp_sum(sum);
      float* to = dot_sums + 32 * turn_of_sums;
      if (lane == 0) to[warp] = sum;
      __syncthreads();
      turn_of_sums ^= 1;
      if (warp == 0) {
        const float all = warp_sum(lane < WARPS ? to[lane] : 0.f);
        if (lane == 0)
          publish_8(a.low + ((size_t)dot_i * a.members + dot_m) * a.low_width + dot_j, __float_as_uint(all), turn);
      }
    }

    // The product ------------------------------------------------------------------------------------------------------
    if (s + 1 < count) ask_scales(stages[s + 1]);
    // An output of this block is made by `lanes` lanes, which share the columns' sums and the ranks.
    const int width = most_rank > 32 ? 8 : most_rank > 8 ? 4 : most_rank > 4 ? 2 : 1, outputs = units * 16;
    const bool adapted = most_rank && split == 0;
    const auto output = [&](int e, int& i, int& u, int& r) {
      int at = e / width;
      if (a.gate == PAIR) {
        const int m = at & 1;
        at >>= 1;
        r = at & 15, at >>= 4;
        i = ROWS == 1 ? 0 : at / (units / 2);
        u = (at - i * (units / 2)) * 2 + m;
      } else {
        r = at & 15, at >>= 4;
        i = ROWS == 1 ? 0 : at / units;
        u = at - i * units;
      }
    };
    if (adapted)
      for (int e = tid; e < outputs * ROWS * width; e += THREADS) {
        int i, u, r;
        output(e, i, u, r);
        const Unit unit = locate(a, own * a.units + u);
        if (unit.member < 0 || unit.row + r >= a.rows[unit.member]) continue;
        const LoraEntry& entry = own_lora[unit.member * ROWS + i];
        const int j = e % width * 32;
        if (j < entry.rank) prefetch(entry.B + (size_t)(unit.row + r) * entry.rank + j);
      }
    const int group = warp / a.k_warps, groups = WARPS / a.k_warps, kw = warp - group * a.k_warps;
    {
      const u32 lane4 = lane * 4;
#define TWO(w, byte) (*(const u32*)(shared + __byte_perm(w, lane4, 0x5504 + (byte)*16)))
      const bool has_x = (g >> 1) < ROWS && (t >> 1) == (g & 1);
      const u8* x_lane = xs + (g >> 1) * X_BYTES + (t >> 1) * 160 + (t & 1) * 64;
      const float* factor_lane = factors + min(t, ROWS - 1) * XB;
      const int stride = (chunk / 4 | 1) * 4, pieces = min(a.steps, chunk / 2 - kw * a.steps);
      uint4 xa = make_uint4(0, 0, 0, 0);
#pragma unroll 1
      for (int u = group; u < units && group < groups; u += groups) {
        float sum[4] = {0.f, 0.f, 0.f, 0.f};
        const float* scale = scales + (u * 16 + g) * stride + kw * a.steps * 2;
#pragma unroll 1
        for (int step = 0; step < pieces; step++) {
          copies_but<DEPTH - 1>();
          const uint4 v0 = *(const uint4*)(own_ring + place * PIECE_BYTES), v1 = *(const uint4*)(own_ring + place * PIECE_BYTES + 512);
          const u32 word0[4] = {v0.x, v0.y, v0.z, v0.w}, word1[4] = {v1.x, v1.y, v1.z, v1.w};
          const int pair = kw * a.steps + step;
          const u8* x = x_lane + pair * PAIR_BYTES;
          const float2 f = *(const float2*)(factor_lane + pair * 2);
          const float2 z0 = *(const float2*)(scale + step * 2), z1 = *(const float2*)(scale + 8 * stride + step * 2);
          float c[4] = {0.f, 0.f, 0.f, 0.f}, d[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
          for (int q = 0; q < 4; q++) {
            if (has_x) xa = *(const uint4*)(x + q * 16);
            mma_m16n8k16(c, TWO(word0[q], 0), TWO(word1[q], 0), TWO(word0[q], 1), TWO(word1[q], 1), xa.x, xa.y);
            mma_m16n8k16(d, TWO(word0[q], 2), TWO(word1[q], 2), TWO(word0[q], 3), TWO(word1[q], 3), xa.z, xa.w);
          }
          ask();
          if (++place == DEPTH) place = 0;
          sum[0] = fmaf(z0.x * f.x, c[0] + d[0], fmaf(z0.y * f.y, c[1] + d[1], sum[0]));
          sum[1] = fmaf(z1.x * f.x, c[2] + d[2], fmaf(z1.y * f.y, c[3] + d[3], sum[1]));
        }
        float* to = sums + (u * a.k_warps + kw) * ROWS * STRIDE + g;
        if (t < ROWS) to[t * STRIDE] = sum[0], to[t * STRIDE + 8] = sum[1];
      }
    }
    if (adapted && units)
      for (int e = tid; e < dots; e += THREADS) {
        int i, m, j;
        if (!dot_at(e, i, m, j)) continue;
        const u64* from = a.low + ((size_t)i * a.members + m) * a.low_width + j;
        uint2 v = look_8(from);
        for (int turns = SPINS; v.y != turn; v = look_8(from)) {
          if (!turns--) __trap();
          others_run();
        }
        lows[(m * ROWS + i) * a.low_width + j] = __uint_as_float(v.x);
      }
    __syncthreads();

    // Outputs ----------------------------------------------------------------------------------------------------------
#pragma unroll 1
    for (int from = warp * 32; from < outputs * ROWS * width; from += THREADS) {
      const int e = from + lane;
      int i = 0, u = 0, r = 0;
      output(min(e, outputs * ROWS * width - 1), i, u, r);
      const Unit unit = locate(a, own * a.units + u);
      const int member = max(unit.member, 0), at = min(unit.row + r, a.rows[member] - 1), l = e % width;
      float up = 0.f, y = 0.f, change = 0.f;
      if (a.gate == MULTIPLY && l == 0) up = value(__ldcg(a.other + (size_t)i * a.other_stride + at), HALF);
      const LoraEntry entry = own_lora[member * ROWS + i];
      if (adapted && entry.rank) {
        const float *B = entry.B + (size_t)at * entry.rank, *low = lows + (member * ROWS + i) * a.low_width;
        if (((entry.rank | a.low_width) & 3) == 0 && ((size_t)entry.B & 15) == 0) {
#pragma unroll 4
          for (int j = l * 4; j < entry.rank; j += width * 4) change = dot_4(__ldg((const float4*)(B + j)), *(const float4*)(low + j), change);
        } else {
          for (int j = l; j < entry.rank; j += width) change = fmaf(__ldg(B + j), low[j], change);
        }
      }
      for (int k = l; k < a.k_warps; k += width) y += sums[((u * a.k_warps + k) * ROWS + i) * STRIDE + r];
      for (int d = width / 2; d; d /= 2) y += __shfl_xor_sync(ALL, y, d), change += __shfl_xor_sync(ALL, change, d);
      change *= entry.scale;
      const bool writes = e < outputs * ROWS * width && l == 0 && unit.member >= 0 && unit.row + r < a.rows[member];
      int to = at + (member > 0 ? a.rows[0] : 0) + (member > 1 ? a.rows[1] : 0);
      if (a.to_kind == PARTS) {
        const u32 half = (u32)stored(change, HALF) << 16 | tag;
        if (writes) publish_8((u64*)a.to + ((size_t)split * ROWS + i) * a.to_width + to, __float_as_uint(y), half);
        continue;
      }
      y = rounded(y, HALF);
      if (adapted && entry.rank) y = rounded(y + rounded(change, HALF), HALF);
      if (a.gate == PAIR) up = __shfl_xor_sync(ALL, y, width);
      if (a.gate) y = rounded(activated(y, a.kind), HALF) * up, to = at;
      if (!writes || (a.gate == PAIR && (u & 1))) continue;
      const u16 v = stored(y, HALF);
      if (a.to_kind == WORDS)
        publish((u32*)a.to + (size_t)i * a.to_width + to, (u32)v << 16 | tag);
      else
        ((u16*)a.to)[(size_t)i * a.to_width + to] = v;
    }
    if (s + 1 < count) keep_scales(stages[s + 1]);
  }
  copies_but<0>();
}
#endif
