// The two ends of a decode step: rows of tables in front of the first layer, each layer's own input, and behind the head
// the scores in float32 with the likeliest token. Read engine/kernels/embed_and_logits.py first: it says what each kernel computes and in which
// shapes. n rows, one token each. values.cuh stands in front of this. `rounded` stands where transformers' modules round.

// Row `id` of up to two tables times the table's scale, the norm of the first one's row, and each row's place in a ring. A
// thread is 8 values, block 0 the first table's row. in_order: row i is table row i. A table without such a row gives values
// that are not numbers. form: where the norm rounds (values.cuh). Grid: [1 + blocks of the second table, n].
extern "C" __global__ void __launch_bounds__(1024) rows(
    const i64* ids, const u16* table0, int count0, int width0, float scale0, int in_order0, u16* out0, const u16* table1,
    int count1, int width1, float scale1, int in_order1, u16* out1, const u16* weight, float eps, u16* normed,
    const i64* positions, int ring, i64* places, int form, int half) {
  __shared__ float sums[32];
  const bool first = blockIdx.x == 0;
  const int row = blockIdx.y, width = first ? width0 : width1;
  const int at = ((first ? 0 : blockIdx.x - 1) * blockDim.x + threadIdx.x) * 8;
  const bool live = at < width;
  float v[8] = {}, w[8];
  let_next_start();
  // Weights do not come from the kernel in front.
#pragma unroll
  for (int i = 0; i < 8; i++) w[i] = form == 2 ? 0.f : 1.f;
  if (first && live && normed && weight) load<8>(w, weight + at, half);
  wait_for_previous();
  const i64 id = (first ? in_order0 : in_order1) ? row : __ldcg(ids + row);
  const size_t to = (size_t)row * width + at;
  if (live) {
    const bool known = id >= 0 && id < (first ? count0 : count1);
    const float scale = first ? scale0 : scale1;
    if (known) load<8>(v, (first ? table0 : table1) + (size_t)id * width + at, half);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = known ? rounded(v[i] * scale, half) : __uint_as_float(0x7fc00000);
    store<8>((first ? out0 : out1) + to, v, half);
  }
  if (!first) return;
  if (places && threadIdx.x == 0) {
    const i64 place = __ldcg(positions + row) % ring;
    places[row] = place < 0 ? place + ring : place;
  }
  if (!normed) return;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) sum = fmaf(v[i], v[i], sum);
  const float r = rsqrtf(block_sum(sum, sums) / width + eps);
  if (!live) return;
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = weighted(v[i] * r, w[i], form, half);
  store<8>(normed + to, v, half);
}

// out = (norm(product scale) weight + own) factor. A warp is one layer of one row, a lane 8 of its values, so that a layer has
// up to 256. Grid: [layers / 4, n].
extern "C" __global__ void __launch_bounds__(128) per_layer(
    const u16* product, int product_stride, const u16* own, int own_stride, const u16* weight, float eps, float scale,
    float factor, u16* out, int layers, int width, int half) {
  const int layer = blockIdx.x * 4 + (threadIdx.x >> 5), row = blockIdx.y, at = (threadIdx.x & 31) * 8;
  const bool live = layer < layers && at < width;
  const size_t place = (size_t)layer * width + at;
  float v[8] = {}, o[8], w[8], sum = 0.f;
  let_next_start();
  // Weights do not come from the kernel in front.
#pragma unroll
  for (int i = 0; i < 8; i++) w[i] = 1.f;
  if (live && weight) load<8>(w, weight + at, half);
  wait_for_previous();
  if (live) {
    load<8>(v, product + (size_t)row * product_stride + place, half);
    load<8>(o, own + (size_t)row * own_stride + place, half);
  }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    v[i] = rounded(v[i] * scale, half);
    sum = fmaf(v[i], v[i], sum);
  }
  const float r = rsqrtf(warp_sum(sum) / width + eps);
  if (!live) return;
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = rounded(rounded(v[i] * r * w[i], half) + o[i], half) * factor;
  store<8>(out + (size_t)row * layers * width + place, v, half);
}

// A score and its place as one number: the larger score is the larger number, of equal scores the one that comes first. What
// is not a number is larger than every score; no score gives 0.
__device__ __forceinline__ u64 ranked(float v, int at) {
  u32 bits = __float_as_uint(v);
  if ((bits & 0x7fffffffu) == 0) bits = 0;  // -0 is 0
  const u32 order = (bits & 0x7fffffffu) > 0x7f800000u ? 0xffffffffu : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return (u64)order << 32 | (u32)~at;
}
__device__ __forceinline__ u64 larger(u64 a, u64 b) { return a > b ? a : b; }

// Whether the largest score of a row is neither infinite nor NaN.
__device__ __forceinline__ bool is_finite(u64 most) {
  const u32 order = (u32)(most >> 32);
  return order > 0x007fffffu && order < 0xff800000u;  // the ranks of -inf and inf
}

// scores = cap tanh(logits / cap), cap 0: logits; greedy = the likeliest token of a row, -1 where that score is not finite;
// following (may be null) = greedy, 0 for -1. The block of a row that arrives last reads what the row's blocks found in
// `best`, and leaves it and the counter at zero. Grid: [blocks of 256 V values, n].
template <int V>
__device__ __forceinline__ void likeliest(
    const u16* logits, int stride, float cap, float inverse, float* scores, i64* greedy, i64* following,
    int following_stride, u64* best, u32* arrived, int width, int half) {
  __shared__ u64 found[8];
  const int row = blockIdx.y, at = (blockIdx.x * 256 + threadIdx.x) * V, lane = threadIdx.x & 31;
  u64 most = 0;
  float v[V];
  let_next_start();
  wait_for_previous();
  if (at < width) {
    load<V>(v, logits + (size_t)row * stride + at, half);
    if (cap > 0.f) {
      // A quotient by a plain number is a product with its inverse on a GPU, in torch too.
#pragma unroll
      for (int i = 0; i < V; i++) v[i] = rounded(rounded(tanhf(rounded(v[i] * inverse, half)), half) * cap, half);
    }
#pragma unroll
    for (int i = 0; i < V; i++) most = larger(most, ranked(v[i], at + i));
  }
#pragma unroll
  for (int d = 16; d; d /= 2) most = larger(most, __shfl_xor_sync(ALL, most, d));
  if (lane == 0) found[threadIdx.x >> 5] = most;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < 8; w++) most = larger(most, found[w]);
    atomicMax(best + row, most);
    __threadfence();
    if (atomicAdd(arrived + row, 1u) == gridDim.x - 1) {
      __threadfence();
      most = atomicExch(best + row, (u64)0);
      arrived[row] = 0;
      const i64 token = is_finite(most) ? (i64)(u32)~(u32)most : -1;
      greedy[row] = token;
      if (following) following[(size_t)row * following_stride] = token < 0 ? 0 : token;
    }
  }
  // Not earlier: the fence would wait for them.
  if (at >= width) return;
  float* to = scores + (size_t)row * width + at;
  if constexpr (V == 8) {
    *(float4*)to = make_float4(v[0], v[1], v[2], v[3]);
    *(float4*)(to + 4) = make_float4(v[4], v[5], v[6], v[7]);
  } else {
    *to = v[0];
  }
}
#define LIKELIEST(name, V)                                                                                              \
  extern "C" __global__ void __launch_bounds__(256) name(                                                               \
      const u16* logits, int stride, float cap, float inverse, float* scores, i64* greedy, i64* following,              \
      int following_stride, u64* best, u32* arrived, int width, int half) {                                             \
    likeliest<V>(logits, stride, cap, inverse, scores, greedy, following, following_stride, best, arrived, width, half); \
  }
LIKELIEST(likeliest_8, 8)
LIKELIEST(likeliest_1, 1)
