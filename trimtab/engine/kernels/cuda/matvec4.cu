// 4-bit matrix-vector products for 1 to 8 rows, with LoRA and what follows a product at once. Read engine/kernels/gemv4.py first: it
// says what is computed, in which shapes, and how the launch is cut. values.cuh and the header of each format stand in front of this.
//
// How a weight is decoded. `Format` (nf4.cuh and the other headers) makes eight neighbours of a row fp16, as four pairs. Codes are looked up: a byte
// holds two weights; a table of 256 entries in shared memory gives both as fp16 at once.
// The table is there once for every lane (32 x 4 bytes an entry), so that no two lanes ask the same bank. An entry takes
// 256 bytes, half of them empty: byte b and lane l are at offset b * 256 + l * 4, which one PRMT puts together.
// The products are tensor core instructions m16n8k16: 16 rows of W, up to 8 rows of x, fp16 in, float32 out. A block of
// 64 weights with one scale is four of them; the scale multiplies their float32 sum. Which k an instruction sees where
// does not matter as long as W and x agree, so a lane takes 8 or 16 consecutive bytes of a row.
//
// Up to 4 rows of x (matvec_4), an instruction works on two blocks of 64 at once: lanes t = 0, 1 bring weights of the even
// one, t = 2, 3 of the odd one, and a row of x has two columns: one with zeros where the odd block's weights are, one with
// zeros where the even block's are. So a lane reads 16 bytes where it would read 8. Five to 8 rows (matvec_8) fill all columns.
// Where 32 values have a scale, each lane's part of a pair has its own: up to 2 rows of x have four columns each. More rows take two
// passes over the same weights, each with zeros where the other's are.
//
// How weights come. 16 rows of a whole K are neighbours in memory. One warp of a block does nothing but ask for them, piece
// by piece, into a ring of stages; on 9.0 and newer the copy engine brings them, so no warp spends a register or a turn.
// The others share each piece. The first pieces are asked for before the kernel in front has ended.
//
// Or each warp asks for its own weights, into registers (matvec_held): compiled for one shape and one cut, so that every
// loop is straight code and all that a block reads, or two batches of it, is under way before the kernel in front has ended.
//
// Compiled for one format: HALF (1: fp16, 0: bf16), FORMAT and what its header names, WHOLE (1: a row is a multiple of 4 blocks).
// FIXED_RANKS (1): how the sums of an adapter are shared among threads follows `low_width`, not the largest rank of these rows, so
// that no bit of a row depends on whose adapters the others have. ORDERED (1): x is in another order, and adapters read `residual`.
// Without them only the kernels for adapters of other layers are there. With HELD (pairs of blocks that a warp asks for at
// once) also for ROWS, BLOCKS, UNITS, K_WARPS, CHUNK, SPLITS, PAIRED, LAYERS and NORMED (1: the norm in front is a part of it),
// and matvec_held is the only product.
//
// All that does not depend on the kernel in front (weights, scales, table, addresses of adapters) is asked for before
// `wait_for_previous`.

#define COLUMNS 8
#define UB 4        // blocks of 64 weights of a row that a warp takes at once
#define STRIDE 20   // of the sums of 16 rows: two columns side by side fall on different banks
#define MOST_STAGES 32
#define PAIR_BYTES 288  // two blocks of x, 32 bytes apart more than they need: four lanes fall on different banks

#ifndef HELD
#define HELD 0
#endif
#ifndef NORMED
#define NORMED 0
#endif
#ifndef NORM_FORM
#define NORM_FORM 0  // where a norm rounds (values.cuh)
#endif
#ifndef HAS_POST
#define HAS_POST 1  // 0: what the layer in front made is added to the residual as it is
#endif
#ifndef ORDERED
#define ORDERED 0
#endif
#ifndef FIXED_RANKS
#define FIXED_RANKS 0
#endif
#if HELD
#define STEPS (CHUNK / 2 / K_WARPS)  // pairs of blocks that a warp takes
#define BATCHES (STEPS / HELD)
#define BUFFERS (BATCHES > 1 ? 2 : 1)
#define THREADS (UNITS * K_WARPS * 32)
#endif

// Asked for at once by a thread: quads of scales, pieces of x, words of the table. Weights that are held leave few registers.
#if HELD
#define KEPT 2
#define GIVES (ROWS > 4 ? 2 : 4)
#define TABLE_WORDS ((2047 + THREADS) / THREADS < 4 ? (2047 + THREADS) / THREADS : 4)
#else
#define KEPT 4
#define GIVES 4
#define TABLE_WORDS 4
#endif

#define PAIR 1      // out = act(first member) second member
#define MULTIPLY 2  // out = act(product) other

struct LoraEntry {
  const float *A, *B;
  float scale;
  int rank;
};

struct Matvec {
  const u16* x;
  int x_stride, n, blocks, columns;  // blocks: of 64 weights in a row
  u16* out;
  int out_stride, half;
  const u8* weight[MEMBERS];
  Stored stored;
  const u16* bias[MEMBERS];
  int rows[MEMBERS];
  const u32* table;
  const i64 *lora_A, *lora_B;
  int lora_A_stride, lora_B_stride;
  const int* lora_rank;
  int lora_rank_stride;
  const float* lora_scale;
  int lora_scale_stride;
  const int* slots;
  float* low;
  int low_row, low_member, low_width, makers, low_room, members;
  int gate, kind;
  const u16* other;
  int other_stride;
  float* parts;
  int units, k_warps, groups, chunk_blocks, piece_blocks, stages, splits, grid, all_units;
  // NORMED: x is what the layer in front made, and the product's own input is norm(h) next.
  const u16 *residual, *post, *next, *scalar;
  int residual_stride;
  u16* h;
  int h_stride;
  float eps;
  Ahead ahead;
};

// i / d for 0 <= i < 2^21, with inverse = 1.f / d: half a step of d is more than what
// float32 loses.
__device__ __forceinline__ int quotient(int i, float inverse) { return (int)(((float)i + 0.5f) * inverse); }
// Where a unit of 16 rows lies: its member, or -1 past the last one, and its first row there.
struct Unit {
  int member, row;
};
__device__ __forceinline__ Unit locate(const Matvec& a, int unit) {
  if (a.gate == PAIR) {
    const Unit found = {unit & 1, (unit >> 1) * 16};
    return found.row < a.rows[0] ? found : Unit{-1, 0};
  }
  Unit found = {-1, 0};
#pragma unroll
  for (int m = 0; m < MEMBERS; m++) {
    const int units = (a.rows[m] + 15) / 16;
    if (found.member < 0 && unit < units) found = {m, unit * 16};
    unit -= units;
  }
  return found;
}

// B low of one output of one row of x, float32: the share of one of 2^shift threads, from its value or group of four `first` on.
__device__ __forceinline__ float lora_product(const float* B, const float* low, int rank, int first, int shift, float sum) {
  if ((rank & 3) == 0 && ((size_t)B & 15) == 0 && ((size_t)low & 15) == 0) {
#pragma unroll 4
    for (int j = first; j < rank / 4; j += 1 << shift) {
      const float4 b = __ldg((const float4*)B + j), v = *((const float4*)low + j);
      sum = fmaf(b.x, v.x, sum);
      sum = fmaf(b.y, v.y, sum);
      sum = fmaf(b.z, v.z, sum);
      sum = fmaf(b.w, v.w, sum);
    }
  } else {
    for (int j = first; j < rank; j += 1 << shift) sum = fmaf(__ldg(B + j), low[j], sum);
  }
  return sum;
}

// A x ------------------------------------------------------------------------------------------------------------------

// low[i, m, j] = row j of A of the adapter of row i for member m, times x_i, float32; what has no adapter is left as it is. A
// product's blocks make it themselves, one value a block at a time: the first `makers` blocks, which surely run at once, so that
// whoever waits for a value waits for a block that runs. `low` is full of EMPTY before the launch; a value is there when it is
// something else: no flag, no fence, no counter. At the end each block takes the values that it needs into shared memory.
#if HELD
#define A_FOURS ((BLOCKS * 16 + THREADS - 1) / THREADS)
// Values of A, by four, that a thread has ready before x is: for one value of A x a block, or for several where registers are left.
#define IS_TIGHT (A_FOURS > 4 || (HELD * BUFFERS > 2 && THREADS > 512))
#define AHEAD (A_FOURS > 4 || !IS_TIGHT ? 4 : A_FOURS)
#else
#define IS_TIGHT 0
#define AHEAD 4
#endif
#define MORE 4       // that it asks for at once later
#define SHARE 8      // the most of them, by four, of one value that a thread has where a block makes several at once
#define FEW_RANKS 8  // up to here a thread has the whole row of B of its output, else eight threads share it

// A value of A x: row i of x, member m, row j of A; A null where the row's adapter has none.
struct Dot {
  const float* A;
  int i, m, j;
};
// The first value of all rows and members, then the second of all: so where ranks are less than `low_width` none is in vain.
__device__ __forceinline__ Dot dot_at(const Matvec& a, int number) {
  const int both = a.n * a.members, j = number / both;
  const int i = (number - j * both) / a.members;
  return Dot{nullptr, i, number - j * both - i * a.members, j};
}
__device__ __forceinline__ float dot_4(float4 a, float4 x, float sum) {
  return fmaf(a.w, x.w, fmaf(a.z, x.z, fmaf(a.y, x.y, fmaf(a.x, x.x, sum))));
}

#if HELD && NORMED
// h = (residual + norm(x) post) scalar (HAS_POST 0: residual + x), and norm(h) next, or h without next: as add_norm in fused.cu, the
// rows side by side. Every block needs all of them; one writes h. `put(row, at, v)` gets 8 values from `at` on, rounded; 32
// lanes have neighbours.
#define ROW_WARPS (UNITS * K_WARPS / ROWS < BLOCKS / 4 ? UNITS * K_WARPS / ROWS : BLOCKS / 4)
#define PIECES ((BLOCKS / 4 + ROW_WARPS - 1) / ROW_WARPS)  // of 256 values, that a warp has
// sums: two a warp. weights: room for post and next.
template <typename Put>
__device__ __forceinline__ void normed(const Matvec& a, float* sums, uint4* weights, bool writes, const Put& put) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = warp / ROW_WARPS, part = warp - row * ROW_WARPS;
  const float factor = a.scalar ? value(__ldcg(a.scalar), HALF) : 1.f;
  for (int i = threadIdx.x; i < BLOCKS * 8; i += THREADS) {
    if (HAS_POST) weights[i] = __ldg((const uint4*)a.post + i);
    if (a.next) weights[BLOCKS * 8 + i] = __ldg((const uint4*)a.next + i);
  }
  wait_for_previous();
  const auto at_of = [&](int k) { return ((part + k * ROW_WARPS) * 32 + lane) * 8; };
  const auto is_there = [&](int k) { return row < ROWS && part + k * ROW_WARPS < BLOCKS / 4; };
  const auto sum_of = [&](float sum, float* to) {  // over the row
    sum = warp_sum(sum);
    if (lane == 0) to[warp] = sum;
    __syncthreads();
    float all = 0.f;
    if (row < ROWS)
#pragma unroll
      for (int w = 0; w < ROW_WARPS; w++) all += to[row * ROW_WARPS + w];
    return rsqrtf(all / (BLOCKS * 64) + a.eps);
  };
  uint4 y[PIECES], h[PIECES];
  float sum = 0.f;
#pragma unroll
  for (int k = 0; k < PIECES; k++) {
    y[k] = h[k] = make_uint4(0, 0, 0, 0);
    if (!is_there(k)) continue;
    y[k] = __ldcg((const uint4*)(a.x + (size_t)row * a.x_stride + at_of(k)));
    h[k] = __ldcg((const uint4*)(a.residual + (size_t)row * a.residual_stride + at_of(k)));
  }
#if HAS_POST
#pragma unroll
  for (int k = 0; k < PIECES; k++) {
    float v[8];
    unpack_8(v, y[k], HALF);
#pragma unroll
    for (int e = 0; e < 8; e++) sum = fmaf(v[e], v[e], sum);
  }
  const float r = sum_of(sum, sums);
  sum = 0.f;
#endif
#pragma unroll
  for (int k = 0; k < PIECES; k++) {
    if (!is_there(k)) continue;
    float v[8], b[8];
    unpack_8(v, y[k], HALF);
    unpack_8(b, h[k], HALF);
#if HAS_POST
    float w[8];
    unpack_8(w, weights[at_of(k) / 8], HALF);
#pragma unroll
    for (int e = 0; e < 8; e++) v[e] = rounded(weighted(v[e] * r, w[e], NORM_FORM, HALF), HALF);
#endif
#pragma unroll
    for (int e = 0; e < 8; e++) {
      b[e] = rounded(b[e] + v[e], HALF);
      if (a.scalar) b[e] = rounded(b[e] * factor, HALF);
      sum = fmaf(b[e], b[e], sum);
    }
    h[k] = make_uint4(pack(b, HALF), pack(b + 2, HALF), pack(b + 4, HALF), pack(b + 6, HALF));
    if (writes) *(uint4*)(a.h + (size_t)row * a.h_stride + at_of(k)) = h[k];
  }
  const float s = a.next ? sum_of(sum, sums + UNITS * K_WARPS) : 1.f;
#pragma unroll
  for (int k = 0; k < PIECES; k++) {
    if (!is_there(k)) continue;
    float v[8], w[8];
    unpack_8(v, h[k], HALF);
    if (a.next) {
      unpack_8(w, weights[BLOCKS * 8 + at_of(k) / 8], HALF);
#pragma unroll
      for (int e = 0; e < 8; e++) v[e] = rounded(weighted(v[e] * s, w[e], NORM_FORM, HALF), HALF);
    }
    put(row, at_of(k), v);
  }
}

#endif

#ifdef WHOLE
// The product ----------------------------------------------------------------------------------------------------------

// A block computes `units` units of 16 rows over one chunk of K; k_warps warps share each piece of a unit, `groups` such groups take
// units in turn, and the last warp asks for the pieces. SPREAD: columns that a row of x has; 2 or 4 (FEW): up to 4 or 2 rows. HELD: a
// group has one unit, and asks itself.
template <int SPREAD>
__device__ __forceinline__ void matvec(const Matvec& a, u8* shared) {
  constexpr bool FEW = SPREAD > 1;
  constexpr int SCALES = Format::SCALES, QUADS = Format::QUADS, BYTES = Format::BYTES, LANE = Format::LANE_BYTES, PASSES = SCALES == 2 && SPREAD < 4 ? 2 : 1;
#if HELD
  const int threads = THREADS;
#else
  const int threads = blockDim.x;
#endif
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  let_next_start();
  const int n = a.n, index = blockIdx.x;
  const int own = a.splits > 1 ? index / a.splits : index, split = index - own * a.splits;
  const int first_block = split * a.chunk_blocks, blocks = min(a.chunk_blocks, a.blocks - first_block);
  const int units = min(a.units, a.all_units - own * a.units), chunks = (blocks + a.piece_blocks - 1) / a.piece_blocks;
  const int x_bytes = a.chunk_blocks / 2 * PAIR_BYTES + 16;  // 16: two rows of x side by side fall on different banks
  const int quads = a.chunk_blocks / UB * QUADS, scale_stride = (quads | 1) * UB;  // 16-byte reads of 8 rows touch every bank once
  const int group = a.groups > 1 ? warp / a.k_warps : 0, kw = warp - group * a.k_warps;
  // Rows of a stage: 8 of them are read at once, 16 bytes (FEW) or 8 bytes of each lane.
  const int stage_stride = (a.piece_blocks * BYTES + 127) / 128 * 128 + (FEW ? Format::PAD_FEW : Format::PAD), stage_bytes = 16 * stage_stride;
  u64* filled = (u64*)(shared + Format::FIRST_BYTES);
  u64* emptied = filled + MOST_STAGES;
  LoraEntry* lora = (LoraEntry*)(emptied + MOST_STAGES);
  u8* ring = (u8*)(lora + MEMBERS * COLUMNS);
  float* scales = (float*)(ring + a.stages * stage_bytes);
  u8* xs = (u8*)(scales + a.units * 16 * scale_stride);
  float* factors = (float*)(xs + n * x_bytes);
  float* x_sums = factors + a.chunk_blocks * (FEW ? n : COLUMNS);  // of each group of values, where there are zero points
  float* sums = x_sums + (Format::HAS_ZERO ? a.chunk_blocks * SCALES * (FEW ? n : COLUMNS) : 0);
  float* dot_sums = sums + a.units * a.k_warps * n * STRIDE;  // two sets of a value a warp
  // A x, where all of it fits beside the rest; else it is taken where the table was.
  const int norm_room = HELD && NORMED ? a.columns : 0;  // of two weights, and of x [n, columns] where the product's own is rounded
  u16* plain = (u16*)(dot_sums + 64 + norm_room);
  float* lows = a.low_room ? dot_sums + 64 + norm_room + (Format::ROUNDS_INPUT ? norm_room / 2 * n : 0) : (float*)shared;

#if HELD
  // Row g of the unit and the row 8 further, two batches of them: `t` has 16 bytes of a pair of blocks, or 8 of each.
  Format::Lane held0[BUFFERS][HELD], held1[BUFFERS][HELD];
  const Unit own_unit = locate(a, own * a.units + group);
  const int last_row = of(a.rows, max(own_unit.member, 0)) - 1;  // past the end: not stored
  const u8* weight = of(a.weight, max(own_unit.member, 0)) + (size_t)first_block * BYTES + kw * STEPS * 2 * BYTES + t * (FEW ? LANE / 2 : LANE / 4);
  const u8* from0 = weight + (size_t)min(own_unit.row + g, last_row) * a.blocks * BYTES;
  const u8* from1 = weight + (size_t)min(own_unit.row + g + 8, last_row) * a.blocks * BYTES;
  const auto ask = [&](int batch, int i) {
    const int at = (batch * HELD + i) * 2 * BYTES;
    held0[batch % BUFFERS][i] = Format::lane<FEW, Once>(from0 + at, t);
    held1[batch % BUFFERS][i] = Format::lane<FEW, Once>(from1 + at, t);
  };
#pragma unroll
  for (int batch = 0; batch < BUFFERS; batch++)
#pragma unroll
    for (int i = 0; i < HELD; i++) ask(batch, i);
#else
  // Every group has a part of the ring of its own, or a warp could not tell a phase from the one before the last.
  const int depth = a.stages / a.groups, turns = (units + a.groups - 1) / a.groups * chunks;
  const auto ask = [&](int turn, bool again) {
#pragma unroll 1
    for (int group = 0; group < a.groups; group++) {
      const int u = group + turn / chunks * a.groups, block = turn % chunks * a.piece_blocks;
      if (u >= units) break;
      const Unit unit = locate(a, own * a.units + u);
      const int row = min(unit.row + (lane & 15), of(a.rows, unit.member) - 1);  // past the end: not stored
      const u8* from = of(a.weight, unit.member) + ((size_t)row * a.blocks + first_block + block) * BYTES;
      const int stage = group * depth + turn % depth;
      if (again) barrier_wait(emptied + stage, (turn / depth - 1) & 1);
      fill(ring + stage * stage_bytes, stage_stride, from, min(a.piece_blocks, blocks - block) * BYTES, filled + stage);
    }
  };
  const int asks = a.k_warps * a.groups;  // the warp that asks
  if (warp == asks) {
    if (lane == 0) {  // one after the other: checkers take an instruction that is off for some lanes for theirs as well
#pragma unroll 1
      for (int stage = 0; stage < a.stages; stage++) {
        barrier_init(filled + stage, FILLERS);
        barrier_init(emptied + stage, a.k_warps);
      }
    }
    barriers_are_made();
    __syncwarp();
    for (int turn = 0; turn < min(turns, depth); turn++) ask(turn, false);
  }
#endif
  // Behind our own weights.
  if (tid == threads - 32) bring_ahead(a.ahead, index, gridDim.x);
  // Four chains of addresses, each step of which waits for the one before: so their steps take turns. First: the table's words,
  // codes of scales, the slots of the rows' adapters.
  const int fours = a.columns / 4, all_low = a.slots ? n * a.members * a.low_width : 0, makers = min(a.makers, (int)gridDim.x);
  // Lane 8 m + i of every warp has the adapter of row i for member m.
  const int lora_i = lane % COLUMNS, lora_m = lane / COLUMNS;
  int lora_slot = -1;
  if (all_low && lora_m < a.members && lora_i < n) lora_slot = __ldcg(a.slots + lora_i);
  Format::Near near;
  near.ask(a.stored);
  u32 words[TABLE_WORDS];
#pragma unroll
  for (int k = 0; k < TABLE_WORDS && Format::HAS_TABLE; k++) words[k] = tid + k * threads < 2048 ? __ldg(a.table + ((tid + k * threads) >> 3)) : 0;
  // Scales of the rows of this block, four of a row at once, as they were stored; blocks that are not there get none.
  const float quads_inverse = __fdividef(1.f, (float)quads);
  const int all_quads = a.units * 16 * quads;
  Format::Four found[KEPT];
  const auto ask_scales = [&](int from) {
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
      const int e = from + k * threads, r = quotient(e, quads_inverse), q = (e - r * quads) * UB;
      found[k].none();
      const Unit unit = locate(a, own * a.units + (r >> 4));
      if (e >= all_quads || q >= blocks * QUADS || unit.member < 0) continue;
      const int row = min(unit.row + (r & 15), of(a.rows, unit.member) - 1);
      found[k].ask(a.stored, unit.member, row, a.blocks, first_block * QUADS + q, (first_block + blocks) * QUADS);
    }
  };
  const auto keep_scales = [&](int from) {
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
      const int e = from + k * threads, r = quotient(e, quads_inverse), q = (e - r * quads) * UB;
      if (e < all_quads) *(float4*)(scales + r * scale_stride + q) = found[k].all(a.stored);
    }
  };
  ask_scales(tid);
  // Then the adapters' addresses, and what has come goes where it is read from.
  LoraEntry entry = {nullptr, nullptr, 0.f, 0};
  if (lora_slot >= 0) {
    entry.A = (const float*)__ldcg(a.lora_A + (size_t)lora_m * a.lora_A_stride + lora_slot);
    entry.rank = __ldcg(a.lora_rank + (size_t)lora_m * a.lora_rank_stride + lora_slot);
    if (warp == 0) {
      entry.B = (const float*)__ldcg(a.lora_B + (size_t)lora_m * a.lora_B_stride + lora_slot);
      entry.scale = __ldcg(a.lora_scale + (size_t)lora_m * a.lora_scale_stride + lora_slot);
    }
  }
#pragma unroll
  for (int k = 0; k < TABLE_WORDS && Format::HAS_TABLE; k++) {
    const int i = tid + k * threads;
    if (i < 2048) *(uint4*)(shared + (i >> 3) * 256 + (i & 7) * 16) = make_uint4(words[k], words[k], words[k], words[k]);
  }
  for (int i = tid + TABLE_WORDS * threads; Format::HAS_TABLE && i < 2048; i += threads) {
    const u32 v = __ldg(a.table + (i >> 3));
    *(uint4*)(shared + (i >> 3) * 256 + (i & 7) * 16) = make_uint4(v, v, v, v);
  }
  near.keep();
  // This block's first values of A x, one or, where there are more than blocks, `side` of them by as many groups of warps: what a
  // thread has of A is on its way before x is there, the rest on its way to L2.
  float4 first_A[AHEAD];
  const auto is_read_by_four = [&](const float* A) { return ((size_t)A & 15) == 0; };
  int most_rank = 0, side = 1;
  // Threads that make a value together, this one's place among them, and its first value. Warps that are left over have none.
  struct Part {
    int each, place, number;
  };
  const auto part_of = [&](int side) {
    if (side == 1) return Part{threads, tid, index};
    const int warps = threads / 32 / side, group = warp / warps;
    return Part{warps * 32, tid - group * warps * 32, group < side ? index + group * makers : 1 << 20};
  };
  if (all_low) {
#if FIXED_RANKS
    most_rank = a.low_width;
#else
    most_rank = entry.rank;
#pragma unroll
    for (int d = 1; d < 32; d *= 2)
      if ((d < COLUMNS ? n : a.members) > 1) most_rank = max(most_rank, __shfl_xor_sync(ALL, most_rank, d));
    most_rank = __shfl_sync(ALL, most_rank, 0);
#endif
    const int dots = n * a.members * most_rank;
    if (index < min(makers, dots)) {
      if (dots > makers) {
        const int most = min(SHARE * threads / fours, threads / 32);
        while (side < most && side * makers < dots) side++;
      }
      const Part part = part_of(side);
      const auto row_of = [&](int number) {  // what it is for lanes differs
        const Dot dot = dot_at(a, min(number, dots - 1));
        const u64 A = __shfl_sync(ALL, (u64)entry.A, dot.m * COLUMNS + dot.i);
        const int rank = __shfl_sync(ALL, entry.rank, dot.m * COLUMNS + dot.i);
        return number < dots && dot.j < rank ? (const float*)A + (size_t)dot.j * a.columns : nullptr;
      };
      const float* A = row_of(part.number);
      if (A && is_read_by_four(A)) {
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
          if (part.place + k * part.each < fours) first_A[k] = __ldg((const float4*)A + part.place + k * part.each);
        if (part.place == 0 && AHEAD * part.each < fours)
          bring_near((const u8*)A + AHEAD * part.each * 16, (fours - AHEAD * part.each) * 16);
      }
      if (warp == 0)
        for (int number = index + side * makers; number < dots; number += 32 * makers) {
          A = row_of(number + lane * makers);
          if (A && is_read_by_four(A)) bring_near((const u8*)A, fours * 16);
        }
    }
  }
  keep_scales(tid);
  for (int from = tid + KEPT * threads; from < all_quads; from += KEPT * threads) {
    ask_scales(from);
    keep_scales(from);
  }
  if (tid < MEMBERS * COLUMNS) lora[tid] = entry;

  // x as fp16, exact for bf16: every 64 values times a power of two that puts their largest just below 2^15. Powers of two
  // down to 2^-32 of the largest lose nothing; what is smaller loses less than 2^-40 of the largest. Blocks that are not
  // there are zeros.
  const auto put = [&](int row, int vector, const float* v) {  // 8 values from 8 `vector` on; eight lanes have a block
    u32 m = 0;
#pragma unroll
    for (int e = 0; e < 8; e++) m = max(m, __float_as_uint(v[e]) & 0x7fffffffu);
#pragma unroll
    for (int d = 1; d < 8; d *= 2) m = max(m, __shfl_xor_sync(ALL, m, d));
    const int exponent = min(max((int)(m >> 23), 15), 254);  // within what a power of two in float32 can undo
    const float up = __uint_as_float((u32)(268 - exponent) << 23);
    const int b = vector >> 3;
    float others[4];  // of the other eight of 16 values
    const bool is_odd = vector & 1;
#pragma unroll
    for (int e = 0; e < 4; e++) others[e] = Format::IS_CROSSED_WIDE ? __shfl_xor_sync(ALL, is_odd ? v[e] : v[4 + e], 1) * up : 0.f;
    const auto wide = [&](int e) { return is_odd ? two_halves(others[e], v[4 + e] * up) : two_halves(v[e] * up, others[e]); };
    const uint4 halves = Format::IS_CROSSED_WIDE ? make_uint4(wide(0), wide(1), wide(2), wide(3))
        : Format::IS_CROSSED  // as the pairs of weights are
        ? make_uint4(two_halves(v[0] * up, v[4] * up), two_halves(v[1] * up, v[5] * up), two_halves(v[2] * up, v[6] * up),
                     two_halves(v[3] * up, v[7] * up))
        : make_uint4(two_halves(v[0] * up, v[1] * up), two_halves(v[2] * up, v[3] * up), two_halves(v[4] * up, v[5] * up),
                     two_halves(v[6] * up, v[7] * up));
    *(uint4*)(xs + row * x_bytes + (b >> 1) * PAIR_BYTES + (b & 1) * 160 + (vector & 7) * 16) = halves;
    if constexpr (Format::HAS_ZERO) {
      float own[8], sum = 0.f;
      unpack_8(own, halves, 1);
#pragma unroll
      for (int e = 0; e < 8; e++) sum += own[e];
#pragma unroll
      for (int d = 1; d < 8 / SCALES; d *= 2) sum += __shfl_xor_sync(ALL, sum, d);
      const int group = vector / (8 / SCALES);
      if (lane % (8 / SCALES) == 0) x_sums[FEW ? row * a.chunk_blocks * SCALES + group : group * COLUMNS + row] = sum;
    }
    if ((lane & 7) == 0)
      factors[FEW ? row * a.chunk_blocks + b : b * COLUMNS + row] = __uint_as_float((u32)(exponent - 14) << 23);
  };
  const float in_scale = Format::static_scale(a.stored.offset[0], 0);
#if HELD && NORMED
  normed(a, sums, (uint4*)(dot_sums + 64), index == 0 && a.h, [&](int row, int at, float* v) {
    if constexpr (Format::ROUNDS_INPUT) {
      *(uint4*)(plain + row * a.columns + at) = make_uint4(pack(v, HALF), pack(v + 2, HALF), pack(v + 4, HALF), pack(v + 6, HALF));
#pragma unroll
      for (int e = 0; e < 8; e++) v[e] = Format::rounded_to_8(v[e], in_scale);
    }
    put(row, at / 8, v);
  });
#else
  wait_for_previous();
  const int vectors = a.chunk_blocks * 8, count = n * vectors;  // a multiple of 32: a warp is within one row
  const float inverse = __fdividef(1.f, (float)vectors);
#pragma unroll 1
  for (int from = warp * 32; from < count; from += GIVES * threads) {
    uint4 v[GIVES];
    int r[GIVES], c[GIVES];
#pragma unroll
    for (int k = 0; k < GIVES; k++) {
      const int i = from + k * threads;
      r[k] = n == 1 ? 0 : quotient(i, inverse);
      c[k] = i - r[k] * vectors + lane;
      v[k] = make_uint4(0, 0, 0, 0);
      if (i < count && c[k] < blocks * 8) v[k] = __ldcg((const uint4*)(a.x + (size_t)r[k] * a.x_stride + first_block * 64) + c[k]);
    }
#pragma unroll
    for (int k = 0; k < GIVES; k++) {
      if (from + k * threads >= count) break;
      float x[8];
      unpack_8(x, v[k], a.half);
#pragma unroll
      for (int e = 0; e < 8; e++) x[e] = Format::rounded_to_8(x[e], in_scale);
      put(r[k], c[k], x);
    }
  }
#endif
  __syncthreads();

  // Four values of row i of x: from shared memory, where it is whole and not rounded, or as they came.
  const auto x_4 = [&](int i, int four) {
#if ORDERED
    const uint2 v = __ldcg((const uint2*)(a.residual + (size_t)i * a.residual_stride) + four);
    return make_float4(low_value(v.x, a.half), high_value(v.x, a.half), low_value(v.y, a.half), high_value(v.y, a.half));
#else
    if (Format::ROUNDS_INPUT || a.splits > 1) {
      const uint2 v = norm_room ? *(const uint2*)(plain + i * a.columns + four * 4) : __ldcg((const uint2*)(a.x + (size_t)i * a.x_stride) + four);
      return make_float4(low_value(v.x, a.half), high_value(v.x, a.half), low_value(v.y, a.half), high_value(v.y, a.half));
    }
    const int b = four >> 4;
    uint2 v;
    if constexpr (Format::IS_CROSSED) {  // the low halves of 16 bytes, or the high ones
      const uint4 w = *(const uint4*)(xs + i * x_bytes + (b >> 1) * PAIR_BYTES + (b & 1) * 160 + (four & 14) * 8);
      const u32 which = four & 1 ? 0x7632 : 0x5410;
      v = make_uint2(__byte_perm(w.x, w.y, which), __byte_perm(w.z, w.w, which));
    } else {
      v = *(const uint2*)(xs + i * x_bytes + (b >> 1) * PAIR_BYTES + (b & 1) * 160 + (four & 15) * 8);
    }
    const float f = factors[FEW ? i * a.chunk_blocks + b : b * COLUMNS + i];
    return make_float4(f * from_half((u16)v.x), f * from_half((u16)(v.x >> 16)), f * from_half((u16)v.y),
                       f * from_half((u16)(v.y >> 16)));
#endif
  };
  int turn_of_sums = 0;
  as_is(side);
  const Part part = part_of(side);
#pragma unroll 1
  for (int from = 0; from < n * a.members * most_rank - index && index < makers; from += side * makers) {
    const bool is_first = from == 0;
    Dot dot = dot_at(a, part.number + from);
    if (dot.j < most_rank) {
      const LoraEntry entry = lora[dot.m * COLUMNS + dot.i];
      if (dot.j < entry.rank) dot.A = entry.A + (size_t)dot.j * a.columns;
    }
    float sum = 0.f;
    if (!dot.A) {
    } else if (!is_read_by_four(dot.A)) {
      for (int four = part.place; four < fours; four += part.each) {
        const float* A = dot.A + four * 4;
        sum = dot_4(make_float4(__ldg(A), __ldg(A + 1), __ldg(A + 2), __ldg(A + 3)), x_4(dot.i, four), sum);
      }
    } else {
#pragma unroll
      for (int k = 0; k < AHEAD; k++) {
        const int four = part.place + k * part.each;
        if (four < fours) sum = dot_4(is_first ? first_A[k] : __ldg((const float4*)dot.A + four), x_4(dot.i, four), sum);
      }
      if constexpr (IS_TIGHT) {  // few lines of a whole block: what is asked for at once takes registers of all that is held
#pragma unroll 4
        for (int four = part.place + AHEAD * part.each; four < fours; four += part.each)
          sum = dot_4(__ldg((const float4*)dot.A + four), x_4(dot.i, four), sum);
      } else {
#pragma unroll 1
        for (int from = part.place + AHEAD * part.each; from < fours; from += MORE * part.each) {
          float4 more[MORE];
#pragma unroll
          for (int k = 0; k < MORE; k++)
            if (from + k * part.each < fours) more[k] = __ldg((const float4*)dot.A + from + k * part.each);
#pragma unroll
          for (int k = 0; k < MORE; k++)
            if (from + k * part.each < fours) sum = dot_4(more[k], x_4(dot.i, from + k * part.each), sum);
        }
      }
    }
    sum = warp_sum(sum);
    float* to = dot_sums + 32 * turn_of_sums;
    if (lane == 0) to[warp] = sum;
    __syncthreads();
    turn_of_sums ^= 1;
    if (dot.A && part.place < 32) {  // a group's first warp
      const float all = warp_sum(lane < part.each / 32 ? to[warp + lane] : 0.f);
      if (lane == 0) {
        const u32 bits = __float_as_uint(all);
        publish((u32*)a.low + (size_t)dot.i * a.low_row + (size_t)dot.m * a.low_member + dot.j, not_empty(bits));
      }
    }
  }

  // An output of this block: unit u, row r of 16 there, row i of x. PAIR: u is the first member's.
  // Above FEW_RANKS eight lanes, and lane q of them, have one.
  const int outputs = (a.gate == PAIR ? a.units / 2 : a.units) * 16, places = outputs * n;
  const int shift = most_rank > FEW_RANKS ? 3 : 0, first_output = tid >> shift, q = tid & ((1 << shift) - 1);
#define EACH_OUTPUT(first, step)                                                           \
  for (int e = first; e < places; e += step) {                                             \
    const int i = n == 1 ? 0 : e / outputs, r = (e - i * outputs) & 15;                    \
    const int u = ((e - i * outputs) >> 4) * (a.gate == PAIR ? 2 : 1);                     \
    const Unit unit = locate(a, own * a.units + u);                                        \
    const int at = unit.row + r;                                                           \
    if (unit.member < 0 || at >= of(a.rows, unit.member)) continue;
  // B of the rows of this block, on its way to L2 until the end needs it.
  if (a.slots) {
    EACH_OUTPUT(tid, threads)
      for (int m = unit.member; m <= unit.member + (a.gate == PAIR); m++) {
        const LoraEntry entry = lora[m * COLUMNS + i];
        if (entry.rank && (i == 0 || lora[m * COLUMNS + i - 1].B != entry.B))
          for (int j = split * 32; j < entry.rank; j += a.splits * 32) prefetch(entry.B + (size_t)at * entry.rank + j);
      }
    }
  }

#define TWO(w, k, z, q) Format::pair(w, k, lane4, z.groups, q)
  const u32 lane4 = lane * 4;
#if !HELD
  if (warp == asks) {
    for (int turn = depth; turn < turns; turn++) ask(turn, true);
  } else
#endif
  {
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
    // Lanes without a row, or with zeros in their column, keep zeros: their columns are not stored, or are another part's.
    uint4 xa[PASSES], xb[PASSES];
    bool has_x[PASSES];
#pragma unroll
    for (int p = 0; p < PASSES; p++) {
      xa[p] = xb[p] = make_uint4(0, 0, 0, 0);
      // FEW: column g is row g / SPREAD of x where the weights of its part of the pair are.
      const bool is_part = SPREAD == 4 ? t == (g & 3) : PASSES == 2 ? (FEW ? t == (g & 1) * 2 + p : t >> 1 == p)
                                                                   : !FEW || t >> 1 == (g & 1);
      has_x[p] = g / SPREAD < n && is_part;
    }
    const u8* x_lane = FEW ? xs + g / SPREAD * x_bytes + (t >> 1) * 160 + (t & 1) * 64 : xs + g * x_bytes + t * 32;
    // Of two columns, whose sums this lane gets: of both blocks, of the parts of one (SPREAD 4), or of two rows.
    const int own_row = SPREAD == 4 ? t >> 1 : t, own_block = SPREAD == 4 ? t & 1 : 0;
    const int factor_at = FEW ? min(own_row, n - 1) * a.chunk_blocks + own_block : 2 * t;
    const float *factor_lane = factors + factor_at, *sum_lane = x_sums + (FEW ? factor_at * SCALES : factor_at);
    const auto keep = [&](int u) {
      float* to = sums + (u * a.k_warps + kw) * n * STRIDE + g;
      if constexpr (SPREAD == 4) {
#pragma unroll
        for (int i = 0; i < 2; i++) sum[i] += __shfl_xor_sync(ALL, sum[i], 1);
        if (own_row < n && own_block == 0) to[own_row * STRIDE] = sum[0], to[own_row * STRIDE + 8] = sum[1];
      } else if constexpr (FEW) {
        if (t < n) to[t * STRIDE] = sum[0], to[t * STRIDE + 8] = sum[1];
      } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (2 * t + (i & 1) < n) to[(2 * t + (i & 1)) * STRIDE + (i >> 1) * 8] = sum[i];
      }
      sum[0] = sum[1] = sum[2] = sum[3] = 0.f;
    };
    // A pair of blocks of two rows: pair `pair` of the chunk, the rows' scales (PairScales), their weights.
    struct PairScales {
      float of[SPREAD == 4 ? 2 : 2 * SCALES];
      Format::Groups<FEW> groups;  // of the lane's own values, where weights are scaled as they are decoded
    };
    const auto scales_of = [&](const float* from, int odd) {
      PairScales z;
      if constexpr (Format::HAS_GROUPS) {
        z.of[0] = z.of[1] = z.groups.read(from, odd, t);
      } else if constexpr (SCALES == 1 || SPREAD == 4) {
        const float2 v = *(const float2*)(from + own_block * 2);
        z.of[0] = v.x, z.of[1] = v.y;
      } else {
        const float4 v = *(const float4*)from;
        z.of[0] = v.x, z.of[1] = v.y, z.of[2] = v.z, z.of[3] = v.w;
      }
      return z;
    };
    const auto multiply = [&](int pair, PairScales z0, PairScales z1, Format::Lane v0, Format::Lane v1) {
      // What the zero point of a group takes from its sum c.
      const auto less = [&](float c, float z, int at) { return Format::HAS_ZERO ? fmaf(-Format::zero_of(z), sum_lane[at], c) : c; };
      if constexpr (FEW) {
        const u8* x = x_lane + pair * PAIR_BYTES;
        const float2 f = SPREAD == 4 ? make_float2(factor_lane[pair * 2], factor_lane[pair * 2]) : *(const float2*)(factor_lane + pair * 2);
        float c[PASSES][4] = {}, d[PASSES][4] = {};
#pragma unroll
        for (int q = 0; q < 4; q++) {
          const auto w0 = Format::word(v0, q), w1 = Format::word(v1, q);
#pragma unroll
          for (int p = 0; p < PASSES; p++) {
            if (has_x[p]) xa[p] = *(const uint4*)(x + q * 16);
            mma_m16n8k16(c[p], TWO(w0, 0, z0, q), TWO(w1, 0, z1, q), TWO(w0, 1, z0, q), TWO(w1, 1, z1, q), xa[p].x, xa[p].y);
            mma_m16n8k16(d[p], TWO(w0, 2, z0, q), TWO(w1, 2, z1, q), TWO(w0, 3, z0, q), TWO(w1, 3, z1, q), xa[p].z, xa[p].w);
          }
        }
#pragma unroll
        for (int p = PASSES - 1; p >= 0; p--) {
          const int first = p, second = SPREAD == 4 ? 1 : SCALES + p, at = pair * 2 * SCALES;
          const float a0 = z0.of[first], b0 = z0.of[second], a1 = z1.of[first], b1 = z1.of[second];
          sum[0] = fmaf(Format::scale_of(a0) * f.x, less(c[p][0] + d[p][0], a0, at + first),
                        fmaf(Format::scale_of(b0) * f.y, less(c[p][1] + d[p][1], b0, at + second), sum[0]));
          sum[1] = fmaf(Format::scale_of(a1) * f.x, less(c[p][2] + d[p][2], a1, at + first),
                        fmaf(Format::scale_of(b1) * f.y, less(c[p][3] + d[p][3], b1, at + second), sum[1]));
        }
      } else {
#pragma unroll
        for (int k = 0; k < 2; k++) {
          const u8* x = x_lane + pair * PAIR_BYTES + k * 160;
#pragma unroll
          for (int p = 0; p < PASSES; p++)
            if (has_x[p]) xa[p] = *(const uint4*)x, xb[p] = *(const uint4*)(x + 16);
          float c[PASSES][4] = {};
#pragma unroll
          for (int q = 0; q < 2; q++) {
            const int own = 2 * k + q;
            const auto w0 = Format::word(v0, own), w1 = Format::word(v1, own);
#pragma unroll
            for (int p = 0; p < PASSES; p++) {
              const uint4 v = q ? xb[p] : xa[p];
              mma_m16n8k16(c[p], TWO(w0, 0, z0, own), TWO(w1, 0, z1, own), TWO(w0, 1, z0, own), TWO(w1, 1, z1, own), v.x, v.y);
              mma_m16n8k16(c[p], TWO(w0, 2, z0, own), TWO(w1, 2, z1, own), TWO(w0, 3, z0, own), TWO(w1, 3, z1, own), v.z, v.w);
            }
          }
          const float2 f = *(const float2*)(factor_lane + (pair * 2 + k) * COLUMNS);
#pragma unroll
          for (int p = 0; p < PASSES; p++) {
            const int which = k * SCALES + p, at = (pair * 2 * SCALES + which) * COLUMNS;
            const float a0 = z0.of[which], a1 = z1.of[which];
            sum[0] = fmaf(Format::scale_of(a0), less(c[p][0], a0, at) * f.x, sum[0]);
            sum[1] = fmaf(Format::scale_of(a0), less(c[p][1], a0, at + 1) * f.y, sum[1]);
            sum[2] = fmaf(Format::scale_of(a1), less(c[p][2], a1, at) * f.x, sum[2]);
            sum[3] = fmaf(Format::scale_of(a1), less(c[p][3], a1, at + 1) * f.y, sum[3]);
          }
        }
      }
    };
#if HELD
    const float* scale = scales + (group * 16 + g) * scale_stride + (Format::HAS_GROUPS ? 0 : kw * STEPS * 2 * SCALES);
#pragma unroll
    for (int batch = 0; batch < BATCHES; batch++)
#pragma unroll
      for (int i = 0; i < HELD; i++) {
        const int step = batch * HELD + i, pair = kw * STEPS + step;
        const int odd = (STEPS % 2 ? pair : step) & 1, four = STEPS % 2 ? pair >> 1 : kw * (STEPS / 2) + step / 2;
        const float* own = scale + (Format::HAS_GROUPS ? four * UB * QUADS : step * 2 * SCALES);
        const PairScales z0 = scales_of(own, odd), z1 = scales_of(own + 8 * scale_stride, odd);
        multiply(pair, z0, z1, held0[batch % BUFFERS][i], held1[batch % BUFFERS][i]);
        if (batch + BUFFERS < BATCHES) ask(batch + BUFFERS, i);
      }
    keep(group);
#else
    const u8* ring_lane = ring + g * stage_stride + t * (FEW ? LANE / 2 : LANE / 4);
    const int batches = a.piece_blocks / UB;
    int u = group, chunk = 0, place = 0, phase = 0;
#pragma unroll 1
    while (u < units) {
      const int stage = group * depth + place;
      barrier_wait(filled + stage, phase);
#pragma unroll 1
      for (int own_batch = kw; own_batch < batches; own_batch += a.k_warps) {
        const int batch = chunk * batches + own_batch;  // of the unit
        if (batch * UB >= blocks) break;  // what no copy has filled may be NaN
        const u8 *from0 = ring_lane + stage * stage_bytes + own_batch * UB * BYTES, *from1 = from0 + 8 * stage_stride;
        const float* scale = scales + (u * 16 + g) * scale_stride + batch * UB * QUADS;
#pragma unroll
        for (int p = 0; p < 2; p++) {
          const float* own = scale + (Format::HAS_GROUPS ? 0 : p * 2 * SCALES);
          const PairScales z0 = scales_of(own, p), z1 = scales_of(own + 8 * scale_stride, p);
          multiply(batch * 2 + p, z0, z1, Format::lane<FEW, Shared>(from0 + p * 2 * BYTES, t), Format::lane<FEW, Shared>(from1 + p * 2 * BYTES, t));
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(emptied + stage);
      if (++place == depth) place = 0, phase ^= 1;
      if (++chunk < chunks) continue;
      keep(u);
      chunk = 0, u += a.groups;
    }
#endif
  }
  // B of this thread's first output, eight values or its share of 64, and what it is multiplied by, on their way while others end.
  float4 first_B[2][2];
  float first_other = 0.f;
  const auto is_early = [&](const LoraEntry& entry) { return ((entry.rank | a.low_width) & 3) == 0 && ((size_t)entry.B & 15) == 0; };
  if ((a.slots || a.gate == MULTIPLY) && first_output < places) {
    const int e = first_output, i = n == 1 ? 0 : e / outputs, r = (e - i * outputs) & 15;
    const int u = ((e - i * outputs) >> 4) * (a.gate == PAIR ? 2 : 1);
    const Unit unit = locate(a, own * a.units + u);
    const int at = unit.row + r;
    const bool is_there = unit.member >= 0 && at < of(a.rows, unit.member);
    if (is_there && a.gate == MULTIPLY) first_other = value(__ldcg(a.other + (size_t)i * a.other_stride + at), a.half);
    if (is_there && a.slots)
#pragma unroll
      for (int m = 0; m < 2; m++) {
        if (m > (a.gate == PAIR)) break;
        const LoraEntry entry = lora[(unit.member + m) * COLUMNS + i];
        if (!is_early(entry)) continue;
#pragma unroll
        for (int k = 0; k < 2; k++)
          if ((q + (k << shift)) * 4 < entry.rank)
            first_B[m][k] = __ldg((const float4*)(entry.B + (size_t)at * entry.rank) + q + (k << shift));
      }
  }
  const auto take_low = [&] {
    for (int e = tid; e < all_low; e += threads) {
      const int j = e % a.low_width, both = e / a.low_width, i = both / a.members, m = both - i * a.members;
      if (j >= lora[m * COLUMNS + i].rank) continue;
      const u32* from = (const u32*)a.low + (size_t)i * a.low_row + (size_t)m * a.low_member + j;
      u32 bits = look(from);
      // The blocks that make these run. If they should not: an error, not a wait without end.
      for (int turns = SPINS; bits == EMPTY; bits = look(from))
        if (!turns--) __trap();
      lows[e] = __uint_as_float(bits);
    }
  };
  if (a.low_room) take_low();
  __syncthreads();
  if (all_low && !a.low_room) {
    take_low();
    __syncthreads();
  }
  const auto own_sum = [&](int u, int r, int i) {
    float y = 0.f;
    for (int k = 0; k < a.k_warps; k++) y += sums[((u * a.k_warps + k) * n + i) * STRIDE + r];
    return y;
  };
  if (a.splits > 1) {
    // The group's last block adds the parts, always in the same order: it waits for blocks with lower numbers, which run by then. A
    // part says itself that it is there, as A x does; who has taken it leaves its place EMPTY for the next launch.
    u32* parts = (u32*)a.parts + (size_t)own * a.units * 16 * n;
    const size_t part_size = (size_t)a.grid * a.units * 16 * n;
    const bool adds = split == a.splits - 1;
    for (int e = tid; e < units * 16 * n; e += threads) {
      const int i = e % n, r = e / n & 15, u = e / n >> 4;
      const float mine = own_sum(u, r, i);
      if (!adds) {
        publish(parts + split * part_size + e, not_empty(__float_as_uint(mine)));
        continue;
      }
      float all = 0.f;
      for (int from = 0; from < split; from += 4) {
        u32 bits[4];
#pragma unroll
        for (int k = 0; k < 4; k++) bits[k] = from + k < split ? look(parts + (from + k) * part_size + e) : 0;
        // What is missing is asked for again all at once.
        for (int turns = SPINS; bits[0] == EMPTY || bits[1] == EMPTY || bits[2] == EMPTY || bits[3] == EMPTY;) {
          if (!turns--) __trap();
#pragma unroll
          for (int k = 0; k < 4; k++)
            if (bits[k] == EMPTY) bits[k] = look(parts + (from + k) * part_size + e);
        }
#pragma unroll
        for (int k = 0; k < 4; k++) all += __uint_as_float(bits[k]);
      }
      sums[(u * a.k_warps * n + i) * STRIDE + r] = all + mine;  // read by this thread alone until the barrier
    }
    if (!adds) return;
    __syncthreads();
    for (int e = tid; e < units * 16 * n; e += threads)
      for (int s = 0; s < split; s++) parts[s * part_size + e] = EMPTY;
  }
  const auto finished = [&](int member, int u, int r, int at, int i, int early) {
    float y = a.splits > 1 ? sums[(u * a.k_warps * n + i) * STRIDE + r] : own_sum(u, r, i);
    y = Format::of_weight(y, a.stored, member);
    const u16* bias = of(a.bias, member);
    if (bias) y += value(__ldg(bias + at), a.half);
    if (Format::ROUNDS_INPUT) y = Format::rounded_to_8(rounded(y, a.half), Format::static_scale(of(a.stored.offset, member), 1));
    const LoraEntry entry = lora[member * COLUMNS + i];
    if (entry.rank) {
      const float* low = lows + (i * a.members + member) * a.low_width;
      float product = 0.f;
      if (early >= 0 && is_early(entry)) {
        const float4* b = early ? first_B[1] : first_B[0];
        if (q * 4 < entry.rank) product = dot_4(b[0], *((const float4*)low + q), 0.f);
        if ((q + (1 << shift)) * 4 < entry.rank) product = dot_4(b[1], *((const float4*)low + q + (1 << shift)), product);
        if (entry.rank > 8 << shift) product = lora_product(entry.B + (size_t)at * entry.rank, low, entry.rank, q + (2 << shift), shift, product);
      } else {
        product = lora_product(entry.B + (size_t)at * entry.rank, low, entry.rank, q, shift, 0.f);
      }
      if (shift) {
#pragma unroll
        for (int d = 1; d < 8; d *= 2) product += __shfl_xor_sync(0xffu << (lane & 24), product, d);
      }
      const float change = entry.scale * product;
      y = rounded(y, a.half) + (Format::ROUNDS_CHANGE ? rounded(change, a.half) : change);
    }
    return rounded(y, a.half);
  };
  EACH_OUTPUT(first_output, threads >> shift)
    float y = 0.f, up = 0.f;
    int at_out = at + (unit.member > 0 ? a.rows[0] : 0) + (unit.member > 1 ? a.rows[1] : 0);
    if (a.gate == MULTIPLY) up = e == first_output ? first_other : value(__ldcg(a.other + (size_t)i * a.other_stride + at), a.half);
    if (a.gate == PAIR) up = finished(unit.member + 1, u + 1, r, at, i, e == first_output ? 1 : -1);
    y = finished(unit.member, u, r, at, i, e == first_output ? 0 : -1);
    if (a.gate) {
      y = rounded(activated(y, a.kind), a.half) * up;
      at_out = at;
    }
    if (q == 0) a.out[(size_t)i * a.out_stride + at_out] = stored(y, a.half);
  }
}

#define PARAMETERS                                                                                                \
  const u16 *x, int x_stride, int n, int blocks, u16 *out, int out_stride, const u8 *w0, const u8 *w1,            \
  const u8 *w2, const void *s0, const void *s1, const void *s2, const void *t0, const void *t1,                   \
  const void *t2, const float *f0, const float *f1, const float *f2, const u16 *b0, const u16 *b1,               \
  const u16 *b2, int r0, int r1, int r2, const u32 *table, const float *nested_code, const i64 *lora_A,           \
  int lora_A_stride, const i64 *lora_B, int lora_B_stride, const int *lora_rank, int lora_rank_stride,            \
  const float *lora_scale, int lora_scale_stride, const int *slots, float *low, int low_row, int low_member,      \
  int low_width, int makers, int low_room, int members, int gate, int kind, const u16 *other, int other_stride,   \
  float *parts, int units, int k_warps, int groups, int chunk_blocks, int piece_blocks,                           \
  int stages, int splits, int grid, int all_units, const u16 *residual, int residual_stride, const u16 *post,     \
  const u16 *next, const u16 *scalar, u16 *h, int h_stride, float eps, AHEAD_PARAMETERS
#define GIVEN(n, blocks, members, gate, units, k_warps, groups, chunk_blocks, piece_blocks, stages, splits)       \
  {x, x_stride, n, blocks, blocks * 64, out, out_stride, HALF, {w0, w1, w2}, {{s0, s1, s2}, {t0, t1, t2}, {f0,    \
  f1, f2}, nested_code}, {b0, b1, b2}, {r0, r1, r2}, table, lora_A, lora_B, lora_A_stride, lora_B_stride,          \
  lora_rank, lora_rank_stride, lora_scale, lora_scale_stride, slots, low, low_row, low_member, low_width,         \
  makers, low_room, members, gate, kind, other, other_stride, parts, units, k_warps, groups,                      \
  chunk_blocks, piece_blocks, stages, splits, grid, all_units, residual, post, next, scalar, residual_stride, h,  \
  h_stride, eps, AHEAD_GIVEN}
#if HELD
#define GATHER const Matvec a = GIVEN(ROWS, BLOCKS, LAYERS, PAIRED ? PAIR : gate, UNITS, K_WARPS, UNITS, CHUNK, CHUNK, 0, SPLITS);
#else
#define GATHER \
  const Matvec a = GIVEN(n, blocks, members, gate, units, k_warps, groups, chunk_blocks, piece_blocks, stages, splits);
#endif

#if HELD
extern "C" __global__ void __launch_bounds__(THREADS, THREADS > 256 ? 1 : 2) matvec_held(PARAMETERS) {
  extern __shared__ __align__(16) u8 shared[];
  GATHER
  matvec<(ROWS > Format::FEW_ROWS ? 1 : Format::SCALES == 2 && ROWS <= 2 ? 4 : 2)>(a, shared);
}
#else
extern "C" __global__ void __launch_bounds__(768, 1) matvec_4(PARAMETERS) {
  extern __shared__ __align__(16) u8 shared[];
  GATHER
  if constexpr (Format::SCALES == 2)
    if (a.n <= 2) return matvec<4>(a, shared);
  matvec<(Format::FEW_ROWS ? 2 : 1)>(a, shared);
}
extern "C" __global__ void __launch_bounds__(768, 1) matvec_8(PARAMETERS) {
  extern __shared__ __align__(16) u8 shared[];
  GATHER
  matvec<1>(a, shared);
}
#endif
#endif

// Where a block's shared memory begins, which the compiler is told next time: behind what the system keeps.
extern "C" __global__ void where_shared(int* to) {
  extern __shared__ __align__(16) u8 shared[];
  if (threadIdx.x == 0) *to = (int)shared_address(shared);
}

// Adapters of a layer that is not 4-bit --------------------------------------------------------------------------------

#define LORA_THREADS 256
#define LORA_OUTPUTS (LORA_THREADS / 4)  // of a block: four threads have one
#define LORA_AHEAD 8                     // values of A, by four, that a thread asks for at once, the first before x is there
#define LORA_OWN 4                       // values of B, by four: ranks up to 64

// y += scale B low of one layer, and before that, in the first `makers` blocks, low = A x of it and of the layers behind it in the
// tables, `members` in all, over the same x. As in a product, `low` is full of EMPTY then and a value says itself that it is
// there; 2^shift threads make one. makers 0: `low` was made by a launch in front. Grid: [blocks of outputs, n], blocks enough for
// the makers. round_change: as over a quantized layer. What does not depend on the kernel in front is asked for before it ends.
extern "C" __global__ void __launch_bounds__(LORA_THREADS, 2) lora_add(
    const u16* x, int x_stride, int n, int columns, int half, u16* y, int y_stride, int rows, int round_change,
    const i64* lora_A, int lora_A_stride, const i64* lora_B, const int* lora_rank, int lora_rank_stride, const float* lora_scale,
    const int* slots, float* low, int low_row, int low_member, int members, int makers, int shift) {
  extern __shared__ __align__(16) u8 shared[];  // low of this block's row
  __shared__ float sums[2 * LORA_THREADS / 32];
  float* lows = (float*)shared;
  const int tid = threadIdx.x, lane = tid & 31, i = blockIdx.y, index = i * gridDim.x + blockIdx.x;
  const int both = n * members, fours = columns / 4, group = tid >> shift, place = tid & ((1 << shift) - 1);
  const bool makes = index < makers;
  let_next_start();
  // Lane 8 m + i of every warp has the adapter of row i for member m; all lanes that of this block's own row.
  const int lane_slot = lane % COLUMNS < n ? __ldcg(slots + lane % COLUMNS) : -1, slot = __shfl_sync(ALL, lane_slot, i);
  int rank = 0, lane_rank = 0;
  float scale = 0.f;
  const float* B = nullptr;
  u64 lane_A = 0;
  if (makes && lane_slot >= 0 && lane / COLUMNS < members) {
    lane_rank = __ldcg(lora_rank + (size_t)(lane / COLUMNS) * lora_rank_stride + lane_slot);
    lane_A = __ldcg((const u64*)lora_A + (size_t)(lane / COLUMNS) * lora_A_stride + lane_slot);
  }
  if (slot >= 0) {
    rank = __ldcg(lora_rank + slot);
    B = (const float*)__ldcg(lora_B + slot);
    scale = __ldcg(lora_scale + slot);
  }
  int dots = lane_rank;  // one of each row and member, then the next of each: those beyond a rank are left out
#pragma unroll
  for (int d = 16; d; d /= 2) dots = max(dots, __shfl_xor_sync(ALL, dots, d));
  dots *= both;
  const float inverse = __fdividef(1.f, (float)both);
  const auto dot_of = [&](int number) {  // the same for a warp
    Dot dot = {nullptr, 0, 0, quotient(number, inverse)};
    const int which = number - dot.j * both;
    dot.m = which >= n ? which >= 2 * n ? 2 : 1 : 0;
    dot.i = which - dot.m * n;
    const float* A = (const float*)__shfl_sync(ALL, lane_A, dot.m * COLUMNS + dot.i);
    const int most = __shfl_sync(ALL, lane_rank, dot.m * COLUMNS + dot.i);
    if (dot.j < most) dot.A = A + (size_t)dot.j * columns;
    return dot;
  };
  const auto is_by_four = [&](const Dot& dot) {
    return (((size_t)dot.A & 15) | ((size_t)(x + (size_t)dot.i * x_stride) & 7) | (columns & 3)) == 0;
  };
  Dot dot = {nullptr, 0, 0, 0};
  float4 some_A[LORA_AHEAD];
  const auto ask = [&](int from) {
#pragma unroll
    for (int k = 0; k < LORA_AHEAD; k++)
      if (from + (k << shift) < fours) some_A[k] = __ldg((const float4*)dot.A + from + (k << shift));
  };
  if (makes) {
    dot = dot_of(index + group * makers);
    if (dot.A && is_by_four(dot)) {
      ask(place);
      for (int from = place + (LORA_AHEAD << shift); from < fours; from += 1 << shift)
        if (lane % 8 == 0) prefetch((const float4*)dot.A + from);
    }
  }
  const int q = tid & 3, at = blockIdx.x * LORA_OUTPUTS + tid / 4;
  const bool is_there = rank && at < rows, has_fours = ((rank & 3) | ((size_t)B & 15)) == 0;
  const float* own = B + (size_t)at * rank;
  float4 own_B[LORA_OWN];
  if (is_there && has_fours)
#pragma unroll
    for (int k = 0; k < LORA_OWN; k++)
      if ((k * 4 + q) * 4 < rank) own_B[k] = __ldg((const float4*)own + k * 4 + q);
  wait_for_previous();
  u16* to = y + (size_t)i * y_stride + at;
  const float before = is_there && q == 0 ? value(*to, half) : 0.f;
  int turn_of_sums = 0;
#pragma unroll 1
  for (int first = index; makes && first < dots; first += makers * (LORA_THREADS >> shift)) {
    const bool is_first = first == index;
    if (!is_first) dot = dot_of(first + group * makers);
    float sum = 0.f;
    if (dot.A) {
      const u16* row = x + (size_t)dot.i * x_stride;
      const auto x_4 = [&](uint2 v) {
        return make_float4(low_value(v.x, half), high_value(v.x, half), low_value(v.y, half), high_value(v.y, half));
      };
      if (is_by_four(dot)) {
#pragma unroll 1
        for (int from = place; from < fours; from += LORA_AHEAD << shift) {
          if (!is_first || from != place) ask(from);
          uint2 v[LORA_AHEAD];
#pragma unroll
          for (int k = 0; k < LORA_AHEAD; k++)
            if (from + (k << shift) < fours) v[k] = __ldcg((const uint2*)row + from + (k << shift));
#pragma unroll
          for (int k = 0; k < LORA_AHEAD; k++)
            if (from + (k << shift) < fours) sum = dot_4(some_A[k], x_4(v[k]), sum);
        }
      } else {
        for (int k = place; k < columns; k += 1 << shift) sum = fmaf(__ldg(dot.A + k), value(__ldcg(row + k), half), sum);
      }
    }
    sum = warp_sum(sum);
    float* warps = sums + LORA_THREADS / 32 * turn_of_sums;
    turn_of_sums ^= 1;
    if (lane == 0) warps[tid >> 5] = sum;
    __syncthreads();
    if (dot.A && place == 0) {
      float all = 0.f;
      for (int w = 0; w < 1 << shift >> 5; w++) all += warps[(tid >> 5) + w];
      const u32 bits = __float_as_uint(all);
      publish((u32*)low + (size_t)dot.i * low_row + (size_t)dot.m * low_member + dot.j, not_empty(bits));
    }
  }
  if (!rank || blockIdx.x * LORA_OUTPUTS >= rows) return;  // so for all threads of the block
  for (int j = tid; j < rank; j += LORA_THREADS) {
    const u32* from = (const u32*)low + (size_t)i * low_row + j;
    u32 bits = look(from);
    for (int turns = SPINS; bits == EMPTY; bits = look(from))
      if (!turns--) __trap();
    lows[j] = __uint_as_float(bits);
  }
  __syncthreads();
  float sum = 0.f;
  if (is_there && has_fours) {
#pragma unroll
    for (int k = 0; k < LORA_OWN; k++)
      if ((k * 4 + q) * 4 < rank) sum = dot_4(own_B[k], *((const float4*)lows + k * 4 + q), sum);
    for (int j = LORA_OWN * 4 + q; j < rank / 4; j += 4) sum = dot_4(__ldg((const float4*)own + j), *((const float4*)lows + j), sum);
  } else if (is_there) {
    for (int j = q; j < rank; j += 4) sum = fmaf(__ldg(own + j), lows[j], sum);
  }
  sum += __shfl_xor_sync(ALL, sum, 1);
  sum += __shfl_xor_sync(ALL, sum, 2);
  const float change = scale * sum;
  if (is_there && q == 0) *to = stored(before + (round_change ? rounded(change, half) : change), half);
}
