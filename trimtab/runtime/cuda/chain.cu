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
// What a launch costs beside its bytes is instructions in a row. So what is the same for all threads of a block is found once
// (Local), and four warps of a block, the helpers, do what the product's 20 need not wait for: the next product's scales, the
// block's values of A x, and what it needs of others'. Barriers: 0 of all threads, 1 of the product's warps, 2 of the helpers.
//
// Compiled for HALF, NESTED, ROWS (1, 2 or 4), HIDDEN (blocks of 64 of the residual, a multiple of 8), WARPS, DEPTH (pieces of
// each warp on their way), STAGES (products at most), XB (blocks of x at most in a block of threads), and where things lie in
// shared memory (AT_..., bytes).

#ifdef ROWS
#define STRIDE 20
#define PAIR_BYTES 288
#define THREADS (WARPS * 32)  // that multiply
#define HELPERS 4             // warps
#define HELP_THREADS (HELPERS * 32)
#define MEMBERS 3
#define QUADS (HIDDEN * 16)  // of a row of the residual
#define ROW_SUMS (QUADS / 32)
#define PIECES ((ROWS * QUADS + THREADS - 1) / THREADS)
#define X_BYTES (XB / 2 * PAIR_BYTES + 16)
#define PIECE_BYTES 1024
#define A_AHEAD 5  // quads of a row of A that a helper's thread has ready before x is
#define B_AHEAD 2
#define SCALES_AT_ONCE 8

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
  int members, blocks, split_log, units, k_warps, steps, all_units, gate, kind, from_kind, from_parts, from_width, to_kind, to_width;
  int lora_stride, low_width, other_stride;
  float eps;
  int k_inverse, first_turn, turns, scales_at, spare[3];
};
// The same for all threads of a block.
struct Local {
  int own, split, unit, units, chunk, quads, stride, dots, owners, width_log, adapted, groups;
  float quads_inverse, factor;
  int spare[2];
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
  int member = 0;
#pragma unroll
  for (int m = 0; m < MEMBERS - 1; m++) {
    const int units = (a.rows[m] + 15) / 16;
    if (member == m && unit >= units && m + 1 < a.members) member++, unit -= units;
  }
  return unit * 16 < a.rows[member] ? Unit{member, unit * 16} : Unit{-1, 0};
}
__device__ __forceinline__ float dot_4(float4 a, float4 x, float sum) {
  return fmaf(a.w, x.w, fmaf(a.z, x.z, fmaf(a.y, x.y, fmaf(a.x, x.x, sum))));
}
// i / d for 0 <= i < 2^21, with inverse = 1.f / d.
__device__ __forceinline__ int quotient(int i, float inverse) { return (int)(((float)i + 0.5f) * inverse); }

// Four values of a row of x.
struct Four {
  float v[4];
};
__device__ __forceinline__ float word_value(u32 w) { return HALF ? from_half((u16)(w >> 16)) : __uint_as_float(w & 0xffff0000u); }
// As words: until all four are there.
__device__ __forceinline__ Four words_four(const u32* p, u32 tag, uint4 w) {
  for (int turns = SPINS; (((w.x ^ tag) | (w.y ^ tag) | (w.z ^ tag) | (w.w ^ tag)) & 0xffff); w = look_16(p)) {
    if (!turns--) __trap();
    others_run();
  }
  return Four{{word_value(w.x), word_value(w.y), word_value(w.z), word_value(w.w)}};
}
// As parts: y = round(their sum); y = round(y + change). The change is the first part's. two, three: how many parts more are
// looked at at once with the first.
__device__ __forceinline__ Four parts_four(const uint2* p, int parts, size_t apart, u32 tag) {
  Four y = {{0.f, 0.f, 0.f, 0.f}};
  float change[4];
#pragma unroll 1
  for (int s = 0; s < parts; s += 2) {
    uint4 w[4];
#pragma unroll
    for (int k = 0; k < 4; k++) w[k] = look_16((const u32*)(p + (s + k / 2) * apart) + (k & 1) * 4);
#pragma unroll
    for (int k = 0; k < 4; k++) {
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

extern "C" __global__ void __launch_bounds__(THREADS + HELP_THREADS, 1) chain(
    const Stage* given, int count, const int* slots, const u32* table, const float* nested_code, const u16* h_in, const u32* epoch,
    int tags, int number) {
  extern __shared__ __align__(16) u8 shared[];
  float* codes = (float*)(shared + AT_CODES);
  Stage* stages = (Stage*)(shared + AT_STAGES);
  Local* locals = (Local*)(shared + AT_LOCALS);
  LoraEntry* lora = (LoraEntry*)(shared + AT_LORA);
  u8* xs = shared + AT_XS;
  float* factors = (float*)(shared + AT_FACTORS);
  float* sums = (float*)(shared + AT_SUMS);
  float* row_sums = (float*)(shared + AT_ROW_SUMS);
  float* dot_sums = (float*)(shared + AT_DOTS);
  float* lows = (float*)(shared + AT_LOWS);
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3, block = blockIdx.x;
  let_next_start();

  for (int i = tid; i < count * (int)(sizeof(Stage) / 16); i += THREADS + HELP_THREADS) ((uint4*)stages)[i] = __ldg((const uint4*)given + i);
  const u32 turn = (u32)__ldcg((const int*)epoch) * (u32)tags + (u32)number, tag = turn & 0xffff;
  barrier(0, THREADS + HELP_THREADS);

  // The helpers ----------------------------------------------------------------------------------------------------------
  if (warp >= WARPS) {
    const int own_tid = tid - THREADS, own_warp = warp - WARPS;
#if NESTED
    for (int i = own_tid; i < 256; i += HELP_THREADS) codes[i] = __ldg(nested_code + i);
#endif
    for (int e = own_tid; e < count * MEMBERS * ROWS; e += HELP_THREADS) {
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
    barrier(2, HELP_THREADS);
    if (own_tid < count) {
      const Stage& a = stages[own_tid];
      Local own = {};
      own.own = block >> a.split_log, own.split = block - (own.own << a.split_log);
      own.unit = own.own * a.units, own.units = max(0, min(a.units, a.all_units - own.unit));
      own.chunk = a.blocks >> a.split_log, own.quads = own.chunk / 4, own.stride = (own.quads | 1) * 4;
      own.quads_inverse = __fdividef(1.f, (float)own.quads);
      own.groups = (WARPS * a.k_inverse) >> 16, own.owners = gridDim.x >> a.split_log;
      own.factor = a.scalar ? value(__ldg(a.scalar), HALF) : 1.f;
      int most = 0;
      for (int e = 0; e < MEMBERS * ROWS; e++) most = max(most, lora[own_tid * MEMBERS * ROWS + e].rank);
      own.dots = own.own < own.owners ? ROWS * a.members * most : 0;
      own.adapted = most && own.split == 0 && own.units;
      // So many lanes make an output that each adds few columns' sums and few ranks, as long as there are threads.
      while (own.width_log < 3 && ((4 << own.width_log) < most || (4 << own.width_log) < a.k_warps) &&
             ((own.units * 16 * ROWS) << (own.width_log + 1)) <= THREADS)
        own.width_log++;
      locals[own_tid] = own;
    }
    barrier(2, HELP_THREADS);

    // Scales of a product's rows of this block, four of a row at once: asked for, and later put where the product reads them.
#if NESTED
    u32 found[SCALES_AT_ONCE];
    float outer[SCALES_AT_ONCE], offset[SCALES_AT_ONCE];
#else
    float4 found[SCALES_AT_ONCE];
#endif
    const auto ask_scales = [&](int s, int from) {
      const Stage& a = stages[s];
      const Local& own = locals[s];
      const int all = own.units * 16 * own.quads, quads = own.quads, first = own.split * own.chunk;
      const float inverse = own.quads_inverse;
#pragma unroll
      for (int k = 0; k < SCALES_AT_ONCE; k++) {
        if (from + k * HELP_THREADS >= all) continue;
        const int e = from + k * HELP_THREADS, r = quotient(e, inverse), q = (e - r * quads) * 4;
        const Unit unit = locate(a, own.unit + (r >> 4));
        const int member = max(unit.member, 0), at = min(unit.row + (r & 15), a.rows[member] - 1) * a.blocks + first + q;
#if NESTED
        found[k] = __ldg((const u32*)((const u8*)a.absmax[member] + at));
        outer[k] = __ldg(a.nested[member] + (at >> 8));
        offset[k] = __ldg(a.offset[member]);
#else
        found[k] = __ldg((const float4*)((const float*)a.absmax[member] + at));
#endif
      }
    };
    const auto keep_scales = [&](int s, int from) {
      const Local& own = locals[s];
      float* to = (float*)(shared + AT_SCALES + stages[s].scales_at);
      const int all = own.units * 16 * own.quads, quads = own.quads, stride = own.stride;
      const float inverse = own.quads_inverse;
#pragma unroll
      for (int k = 0; k < SCALES_AT_ONCE; k++) {
        if (from + k * HELP_THREADS >= all) continue;
        const int e = from + k * HELP_THREADS, r = quotient(e, inverse), q = (e - r * quads) * 4;
        float4 v;
#if NESTED
        v.x = fmaf(codes[found[k] & 255], outer[k], offset[k]);
        v.y = fmaf(codes[found[k] >> 8 & 255], outer[k], offset[k]);
        v.z = fmaf(codes[found[k] >> 16 & 255], outer[k], offset[k]);
        v.w = fmaf(codes[found[k] >> 24], outer[k], offset[k]);
#else
        v = found[k];
#endif
        *(float4*)(to + r * stride + q) = v;
      }
    };
    const auto bring_rest = [&](int s) {  // behind the first ones
      const int all = locals[s].units * 16 * locals[s].quads;
#pragma unroll 1
      for (int from = own_tid + SCALES_AT_ONCE * HELP_THREADS; from < all; from += SCALES_AT_ONCE * HELP_THREADS) {
        ask_scales(s, from);
        keep_scales(s, from);
      }
    };
    const auto bring_norm = [&](int s) {  // into L2
      const Stage& a = stages[s];
      if (a.post && own_tid < HIDDEN) prefetch(a.post + own_tid * 64);
      if (a.next && own_tid < HIDDEN) prefetch(a.next + own_tid * 64);
    };
#pragma unroll 1
    for (int s = 0; s < min(count, 2); s++) {
      ask_scales(s, own_tid);
      keep_scales(s, own_tid);
      bring_rest(s);
      bring_norm(s);
    }
    barrier(0, THREADS + HELP_THREADS);
    wait_for_previous();

#pragma unroll 1
    for (int s = 0; s < count; s++) {
      const Stage& a = stages[s];
      const Local& own = locals[s];
      const LoraEntry* own_lora = lora + s * MEMBERS * ROWS;
      const int dots = own.dots, fours = own.chunk * 16;
      // A value of A x over this block's columns: low numbers first. Its row of A is on the way before x is there.
      int dot_i = 0, dot_m = 0, dot_j = 0;
      const auto dot_at = [&](int number) {
        const int both = ROWS * a.members;
        dot_j = number / both, dot_i = ROWS == 1 ? 0 : (number - dot_j * both) / a.members, dot_m = number - dot_j * both - dot_i * a.members;
        const LoraEntry& entry = own_lora[dot_m * ROWS + dot_i];
        return dot_j < entry.rank ? entry.A + (size_t)dot_j * a.blocks * 64 + own.split * own.chunk * 64 : nullptr;
      };
      const float* A = own.own < dots ? dot_at(own.own) : nullptr;
      float4 first_A[A_AHEAD];
#pragma unroll
      for (int k = 0; k < A_AHEAD; k++) {
        first_A[k] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (A && own_tid + k * HELP_THREADS < fours) first_A[k] = __ldg((const float4*)A + own_tid + k * HELP_THREADS);
      }
      const bool brings = s && s + 1 < count;
      if (brings) ask_scales(s + 1, own_tid), bring_norm(s + 1);
      barrier(0, THREADS + HELP_THREADS);  // x is there
      int turn_of_sums = 0;
#pragma unroll 1
      for (int number = own.own; number < dots; number += own.owners) {
        const bool is_first = number == own.own;
        if (!is_first) A = dot_at(number);
        if (!A) continue;  // so for all helpers of the block
        const auto x_4 = [&](int quad) {
          const int b = quad >> 4;
          const uint2 v = *(const uint2*)(xs + dot_i * X_BYTES + (b >> 1) * PAIR_BYTES + (b & 1) * 160 + (quad & 15) * 8);
          const float f = factors[dot_i * XB + b];
          return make_float4(f * from_half((u16)v.x), f * from_half((u16)(v.x >> 16)), f * from_half((u16)v.y),
                             f * from_half((u16)(v.y >> 16)));
        };
        float sum = 0.f;
        if (is_first) {
#pragma unroll
          for (int k = 0; k < A_AHEAD; k++)
            if (own_tid + k * HELP_THREADS < fours) sum = dot_4(first_A[k], x_4(own_tid + k * HELP_THREADS), sum);
        }
#pragma unroll 4
        for (int quad = own_tid + (is_first ? A_AHEAD * HELP_THREADS : 0); quad < fours; quad += HELP_THREADS)
          sum = dot_4(__ldg((const float4*)A + quad), x_4(quad), sum);
        sum = warp_sum(sum);
        float* to = dot_sums + turn_of_sums * HELPERS;
        if (lane == 0) to[own_warp] = sum;
        barrier(2, HELP_THREADS);
        turn_of_sums ^= 1;
        if (own_tid == 0) {
          float all = 0.f;
#pragma unroll
          for (int w = 0; w < HELPERS; w++) all += to[w];
          const size_t low = (((size_t)own.split * ROWS + dot_i) * MEMBERS + dot_m) * a.low_width + dot_j;
          publish_8(a.low + low, __float_as_uint(all), turn);
        }
      }
      if (brings) keep_scales(s + 1, own_tid), bring_rest(s + 1);
      if (own.adapted)
#pragma unroll 1
        for (int e = own_tid; e < dots; e += HELP_THREADS) {
          if (!dot_at(e)) continue;
          float sum = 0.f;
#pragma unroll 1
          for (int split = 0; split < 1 << a.split_log; split++) {
            const u64* from = a.low + (((size_t)split * ROWS + dot_i) * MEMBERS + dot_m) * a.low_width + dot_j;
            uint2 v = look_8(from);
            for (int turns = SPINS; v.y != turn; v = look_8(from)) {
              if (!turns--) __trap();
              others_run();
            }
            sum += __uint_as_float(v.x);
          }
          lows[(dot_m * ROWS + dot_i) * a.low_width + dot_j] = sum;
        }
      barrier(0, THREADS + HELP_THREADS);  // products, A x and the next scales are there
    }
    return;
  }

  // This warp's weights: turns of products, each a few pieces of 16 rows. A lane knows one turn ------------------------------
  int turns = 0, own_steps = 0, own_last = 0, own_row_bytes = 0;
  const u8* own_base = nullptr;
  for (int s = 0; s < count; s++) {
    const Stage& a = stages[s];
    turns = a.first_turn + a.turns;
    if (lane < a.first_turn || lane >= turns) continue;
    const int groups = (WARPS * a.k_inverse) >> 16, group = (warp * a.k_inverse) >> 16, kw = warp - group * a.k_warps;
    const int own = block >> a.split_log, split = block & ((1 << a.split_log) - 1), chunk = a.blocks >> a.split_log;
    const int u = group + (lane - a.first_turn) * groups;
    if (group >= groups || u >= a.units || own * a.units + u >= a.all_units) continue;
    const Unit unit = locate(a, own * a.units + u);
    const int member = max(unit.member, 0);
    own_steps = max(0, min(a.steps, chunk / 2 - kw * a.steps));
    own_last = a.rows[member] - 1 - unit.row;  // rows past the end: not stored
    own_row_bytes = a.blocks * 32;
    own_base = a.weight[member] + ((size_t)unit.row * a.blocks + split * chunk) * 32 + kw * a.steps * 64;
  }
  int at_turn = -1, steps_left = 0;
  const u8 *from0 = nullptr, *from1 = nullptr;
  const auto next_turn = [&] {
    while (++at_turn < turns) {
      steps_left = __shfl_sync(ALL, own_steps, at_turn);
      if (!steps_left) continue;
      const int last = __shfl_sync(ALL, own_last, at_turn), row_bytes = __shfl_sync(ALL, own_row_bytes, at_turn);
      const u8* base = (const u8*)__shfl_sync(ALL, (u64)own_base, at_turn) + t * 16;
      from0 = base + (size_t)(min(g, last) * row_bytes), from1 = base + (size_t)(min(g + 8, last) * row_bytes);
      return;
    }
  };
  u8* const ring = shared + AT_RING + warp * DEPTH * PIECE_BYTES + lane * 16;
  u8* const ring_end = ring + DEPTH * PIECE_BYTES;
  u8* place = ring;
  const auto ask = [&] {  // for the next piece, where the last one was used
    if (at_turn < turns) {
      copy_16(place, from0);
      copy_16(place + 512, from1);
      from0 += 64, from1 += 64;
      if (--steps_left == 0) next_turn();
    }
    end_of_copies();
    place += PIECE_BYTES;
    if (place == ring_end) place = ring;
  };
  next_turn();
#pragma unroll 1
  for (int i = 0; i < DEPTH; i++) ask();
  for (int i = tid; i < 2048; i += THREADS) {
    const u32 v = __ldg(table + (i >> 3));
    *(uint4*)(shared + AT_TABLE + (i >> 3) * 256 + (i & 7) * 16) = make_uint4(v, v, v, v);
  }
  barrier(0, THREADS + HELP_THREADS);

  // The residual: a thread's own four values of each piece, as they are stored.
  const auto row_of = [&](int k) { return ROWS == 1 ? 0 : (tid + k * THREADS) / QUADS; };
  const auto is_there = [&](int k) { return ROWS * QUADS % THREADS == 0 || tid + k * THREADS < ROWS * QUADS; };
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

  // Four values as words; what is plain is there.
  const auto look_four = [&](const Stage& a, size_t at) {
    if (a.from_kind == WORDS) return look_16((const u32*)a.from + at);
    const uint2 v = __ldcg((const uint2*)((const u16*)a.from + at));
    return make_uint4(v.x << 16 | tag, (v.x & 0xffff0000u) | tag, v.y << 16 | tag, (v.y & 0xffff0000u) | tag);
  };

#pragma unroll 1
  for (int s = 0; s < count; s++) {
    const Stage& a = stages[s];
    const Local& own = locals[s];
    const LoraEntry* own_lora = lora + s * MEMBERS * ROWS;
    const int units = own.units, width_log = own.width_log, lanes = 1 << width_log, outputs = (units * 16 * ROWS) << width_log;
    const int fours = own.chunk * 16;
    const bool adapted = own.adapted, needs_x = units || own.own < own.dots;

    // Without the input ------------------------------------------------------------------------------------------------
    // An output of this block: `lanes` neighbours make it. Of a pair, gate and up are neighbours.
    struct Output {
      int i, u, member, at;
      bool is_there;
    };
    const auto output = [&](int e) {
      Output o;
      int at = e >> width_log, r;
      if (a.gate == PAIR) {
        const int m = at & 1;
        at >>= 1, r = at & 15, at >>= 4;
        o.i = ROWS == 1 ? 0 : at / (units / 2), o.u = (at - o.i * (units / 2)) * 2 + m;
      } else {
        r = at & 15, at >>= 4;
        o.i = ROWS == 1 ? 0 : at / units, o.u = at - o.i * units;
      }
      const Unit unit = locate(a, own.unit + o.u);
      o.member = max(unit.member, 0), o.at = unit.row + r;
      o.is_there = e < outputs && unit.member >= 0 && o.at < a.rows[o.member];
      return o;
    };
    Output first = {0, 0, 0, 0, false};
    float4 first_B[B_AHEAD];
    float first_other = 0.f;
    if (tid < outputs) {
      first = output(tid);
      if (first.is_there && a.gate == MULTIPLY) first_other = value(__ldcg(a.other + (size_t)first.i * a.other_stride + first.at), HALF);
      if (first.is_there && adapted) {
        const LoraEntry& entry = own_lora[first.member * ROWS + first.i];
        if ((entry.rank & 3) == 0)
#pragma unroll
          for (int k = 0; k < B_AHEAD; k++) {
            const int j = ((tid & (lanes - 1)) << 2) + (k << (width_log + 2));
            if (j < entry.rank) first_B[k] = __ldg((const float4*)(entry.B + (size_t)first.at * entry.rank + j));
          }
      }
    }

    // The input ------------------------------------------------------------------------------------------------------
    if (a.post) {
      uint2 post[PIECES], next[PIECES];
      uint4 words[PIECES];
#pragma unroll
      for (int k = 0; k < PIECES; k++) {
        post[k] = next[k] = make_uint2(0, 0);
        if (!is_there(k)) continue;
        if (a.from_kind != PARTS) words[k] = look_four(a, (size_t)(tid + k * THREADS) * 4);
        post[k] = __ldg((const uint2*)a.post + quad_of(k));
        if (a.next) next[k] = __ldg((const uint2*)a.next + quad_of(k));
      }
      Four y[PIECES];
      const auto row_sum = [&](const float* to, int k) {
        const float* from = to + row_of(k) * ROW_SUMS;
        float4 all = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int w = 0; w < ROW_SUMS; w += 4) {
          const float4 v = *(const float4*)(from + w);
          all.x += v.x, all.y += v.y, all.z += v.z, all.w += v.w;
        }
        return rsqrtf(((all.x + all.y) + (all.z + all.w)) * (1.f / (HIDDEN * 64)) + a.eps);
      };
#pragma unroll
      for (int k = 0; k < PIECES; k++) {
        y[k] = Four{{0.f, 0.f, 0.f, 0.f}};
        if (is_there(k)) {
          if (a.from_kind != PARTS)
            y[k] = words_four((const u32*)a.from + (tid + k * THREADS) * 4, tag, words[k]);
          else
            y[k] = parts_four((const uint2*)a.from + (tid + k * THREADS) * 4, a.from_parts, ROWS * HIDDEN * 64, tag);
        }
        float sum = 0.f;
#pragma unroll
        for (int e = 0; e < 4; e++) sum = fmaf(y[k].v[e], y[k].v[e], sum);
        sum = warp_sum(sum);
        if (lane == 0) row_sums[k * WARPS + warp] = sum;
      }
      barrier(1, THREADS);
#pragma unroll
      for (int k = 0; k < PIECES; k++) {
        float w[4], b[4], sum = 0.f;
        const float r = is_there(k) ? row_sum(row_sums, k) : 0.f;
        unpack(w, post[k].x, HALF), unpack(w + 2, post[k].y, HALF);
        unpack(b, h[k].x, HALF), unpack(b + 2, h[k].y, HALF);
#pragma unroll
        for (int e = 0; e < 4; e++) {
          b[e] = rounded(b[e] + rounded(y[k].v[e] * r * w[e], HALF), HALF);
          b[e] = rounded(b[e] * own.factor, HALF);  // without a scalar: 1
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
      if (needs_x) {
        if (a.next) barrier(1, THREADS);
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
    } else if (needs_x) {
      const int all = ROWS * fours;  // of a row: a multiple of 64
#pragma unroll 1
      for (int e = tid; e < all; e += 2 * THREADS) {
        uint4 w[2];
        int row[2], quad[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
          const int at = e + k * THREADS;
          row[k] = ROWS == 1 ? 0 : at / fours, quad[k] = at - row[k] * fours;
          const size_t from = (size_t)row[k] * a.from_width + (own.split * fours + quad[k]) * 4;
          if (at >= all) continue;
          w[k] = look_four(a, from);
        }
#pragma unroll
        for (int k = 0; k < 2; k++) {
          if (e + k * THREADS >= all) break;  // so for whole warps
          const Four x = words_four((const u32*)a.from + (size_t)row[k] * a.from_width + (own.split * fours + quad[k]) * 4, tag, w[k]);
          put(row[k], quad[k], x.v);
        }
      }
    }
    barrier(0, THREADS + HELP_THREADS);  // x is there

    // The product ------------------------------------------------------------------------------------------------------
    {
      const int group = (warp * a.k_inverse) >> 16, kw = warp - group * a.k_warps;
      const u32 lane4 = lane * 4;
#define TWO(w, byte) shared_word<AT_TABLE>(__byte_perm(w, lane4, 0x5504 + (byte)*16))
      const bool has_x = (g >> 1) < ROWS && (t >> 1) == (g & 1);
      const int stride = own.stride, pieces = group < own.groups ? min(a.steps, own.chunk / 2 - kw * a.steps) : 0;
      uint4 xa = make_uint4(0, 0, 0, 0);
#pragma unroll 1
      for (int u = group; u < units && pieces > 0; u += own.groups) {
        float sum[4] = {0.f, 0.f, 0.f, 0.f};
        const float* scale = (const float*)(shared + AT_SCALES + a.scales_at) + (u * 16 + g) * stride + kw * a.steps * 2;
        const u8* x = xs + (g >> 1) * X_BYTES + (t >> 1) * 160 + (t & 1) * 64 + kw * a.steps * PAIR_BYTES;
        const float* factor = factors + min(t, ROWS - 1) * XB + kw * a.steps * 2;
#pragma unroll 1
        for (int step = 0; step < pieces; step++) {
          copies_but<DEPTH - 1>();
          const uint4 v0 = *(const uint4*)place, v1 = *(const uint4*)(place + 512);
          const u32 word0[4] = {v0.x, v0.y, v0.z, v0.w}, word1[4] = {v1.x, v1.y, v1.z, v1.w};
          const float2 f = *(const float2*)factor;
          const float2 z0 = *(const float2*)scale, z1 = *(const float2*)(scale + 8 * stride);
          float c[4] = {0.f, 0.f, 0.f, 0.f}, d[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
          for (int q = 0; q < 4; q++) {
            if (has_x) xa = *(const uint4*)(x + q * 16);
            mma_m16n8k16(c, TWO(word0[q], 0), TWO(word1[q], 0), TWO(word0[q], 1), TWO(word1[q], 1), xa.x, xa.y);
            mma_m16n8k16(d, TWO(word0[q], 2), TWO(word1[q], 2), TWO(word0[q], 3), TWO(word1[q], 3), xa.z, xa.w);
          }
          ask();
          sum[0] = fmaf(z0.x * f.x, c[0] + d[0], fmaf(z0.y * f.y, c[1] + d[1], sum[0]));
          sum[1] = fmaf(z1.x * f.x, c[2] + d[2], fmaf(z1.y * f.y, c[3] + d[3], sum[1]));
          scale += 2, factor += 2, x += PAIR_BYTES;
        }
        float* to = sums + (u * a.k_warps + kw) * ROWS * STRIDE + g;
        if (t < ROWS) to[t * STRIDE] = sum[0], to[t * STRIDE + 8] = sum[1];
      }
    }
    barrier(0, THREADS + HELP_THREADS);  // products, A x and the next scales are there

    // Outputs ----------------------------------------------------------------------------------------------------------
#pragma unroll 1
    for (int from = warp * 32; from < outputs; from += THREADS) {
      const int e = from + lane, l = e & (lanes - 1);
      const bool is_first = e == tid;
      const Output o = is_first ? first : output(e);
      float up = first_other, y = 0.f, change = 0.f;
      if (!is_first && a.gate == MULTIPLY && o.is_there) up = value(__ldcg(a.other + (size_t)o.i * a.other_stride + o.at), HALF);
      const LoraEntry entry = own_lora[o.member * ROWS + o.i];
      if (adapted && entry.rank && o.is_there) {
        const float *B = entry.B + (size_t)o.at * entry.rank, *low = lows + (o.member * ROWS + o.i) * a.low_width;
        if ((entry.rank & 3) == 0) {
#pragma unroll 1
          for (int j = l * 4, k = 0; j < entry.rank; j += 4 << width_log, k++) {
            const float4 b = is_first && k == 0 ? first_B[0] : is_first && k == 1 ? first_B[1] : __ldg((const float4*)(B + j));
            change = dot_4(b, *(const float4*)(low + j), change);
          }
        } else {
          for (int j = l; j < entry.rank; j += lanes) change = fmaf(__ldg(B + j), low[j], change);
        }
      }
      const float* sum = sums + ((o.u * a.k_warps + l) * ROWS + o.i) * STRIDE + (o.at & 15);
#pragma unroll 4
      for (int k = l; k < a.k_warps; k += lanes, sum += (ROWS * STRIDE) << width_log) y += *sum;
#pragma unroll 1
      for (int d = lanes / 2; d; d /= 2) y += __shfl_xor_sync(ALL, y, d), change += __shfl_xor_sync(ALL, change, d);
      change = rounded(change * entry.scale, HALF);
      const bool writes = o.is_there && l == 0;
      int to = o.at + (o.member > 0 ? a.rows[0] : 0) + (o.member > 1 ? a.rows[1] : 0);
      if (a.to_kind == PARTS) {
        const u32 half = (u32)stored(change, HALF) << 16 | tag;
        if (writes) publish_8((u64*)a.to + ((size_t)own.split * ROWS + o.i) * a.to_width + to, __float_as_uint(y), half);
        continue;
      }
      y = rounded(rounded(y, HALF) + change, HALF);  // without an adapter: 0
      if (a.gate == PAIR) up = __shfl_xor_sync(ALL, y, lanes);
      if (a.gate) y = rounded(activated(y, a.kind), HALF) * up, to = o.at;
      if (!writes || (a.gate == PAIR && o.member)) continue;
      const u16 v = stored(y, HALF);
      if (a.to_kind == WORDS)
        publish((u32*)a.to + (size_t)o.i * a.to_width + to, (u32)v << 16 | tag);
      else
        ((u16*)a.to)[(size_t)o.i * a.to_width + to] = v;
    }
  }
  copies_but<0>();
}
#endif
