// Experts in host memory, some of them near: in slots on the card. Read engine/tiers/near_experts.py first. experts_many.cu stands in
// front of it. `experts_assign` gives a step's chosen experts slots, those used longest ago, and `experts_fetch` copies what is new there.
// Experts without a slot are read over the link where they are.
#define ASSIGN_THREADS 1024
#define FETCH_THREADS 256

// where [count]: an expert's slot, -1 without; owner [slots]: its expert, -1 while empty; used [slots]: the step of its last use, 0 of none, -1 while empty; clock
// [1]: steps so far; counts [2]: how many experts steps chose, and how many of them had no slot. fetched [1 + 2 pairs]: how many experts are new, then of each its number and slot, by numbers. Slots go to new
// experts in the order of their last use, empty ones first. Shared: 2 count + 2 slots ints. Grid: [1].
extern "C" __global__ void __launch_bounds__(ASSIGN_THREADS) experts_assign(
    const i64* index, int pairs, int count, int* where, int* owner, int* used, int* clock, i64* counts, int slots, int* fetched) {
  extern __shared__ __align__(16) int marks[];
  int *missing = marks + count, *last = missing + count, *busy = last + slots;
  __shared__ int news, chosen;
  const int tid = threadIdx.x, step = blockDim.x;
  let_next_start();
  for (int e = tid; e < count; e += step) marks[e] = 0;
  if (tid == 0) news = chosen = 0;
  wait_for_previous();
  __syncthreads();
  const int now = __ldcg(clock) + 1;
  for (int pair = tid; pair < pairs; pair += step) {
    const i64 number = __ldcg(index + pair);
    if (number >= 0 && number < count) marks[number] = 1;
  }
  for (int s = tid; s < slots; s += step) last[s] = __ldcg(used + s);
  __syncthreads();
  for (int s = tid; s < slots; s += step) {
    const int e = __ldcg(owner + s);
    busy[s] = e >= 0 && marks[e] == 1;
    if (busy[s]) used[s] = now;
  }
  for (int e = tid; e < count; e += step) {
    missing[e] = marks[e] && __ldcg(where + e) < 0;
    if (marks[e]) atomicAdd(&chosen, 1);
  }
  __syncthreads();
  // The n-th new expert gets the n-th slot that is free.
  for (int e = tid; e < count; e += step) {
    if (!missing[e]) continue;
    int rank = 0;
    for (int other = 0; other < e; other++) rank += missing[other];
    marks[rank] = e;  // no longer read as a mark
    atomicAdd(&news, 1);
  }
  __syncthreads();
  for (int s = tid; s < slots; s += step) {
    if (busy[s]) continue;
    int rank = 0;
    for (int other = 0; other < slots && rank < news; other++)
      rank += !busy[other] && (last[other] < last[s] || (last[other] == last[s] && other < s));
    if (rank >= news) continue;
    const int before = __ldcg(owner + s), e = marks[rank];
    if (before >= 0) where[before] = -1;
    where[e] = s, owner[s] = e, used[s] = now;
    fetched[1 + 2 * rank] = e, fetched[2 + 2 * rank] = s;
  }
  __syncthreads();
  if (tid) return;
  int free = 0;
  for (int s = 0; s < slots; s++) free += !busy[s];
  fetched[0] = min(news, free), clock[0] = now, counts[0] += chosen, counts[1] += news;
}

// The experts of a prompt take turns: first those that are near, then the others in `turning` slots, those used longest ago. first
// [count + 1]: as `experts_sort` has it. turn [count]: of an expert, -1 of one that no token uses; at [count]: its slot then, -1: it is
// read where it is. lists [turns - 1][1 + 2 turning]: as `fetched`, of each turn but the first. where, owner: what is left behind; it
// counts as not used, so the next prompt takes the same slots. Shared: 2 count + 2 slots ints. Grid: [1].
extern "C" __global__ void __launch_bounds__(ASSIGN_THREADS) experts_turns(
    const int* first, int count, int* where, int* owner, int* used, int slots, int turning, int turns, int* turn, int* at, int* lists) {
  extern __shared__ __align__(16) int marks[];
  int *missing = marks + count, *last = missing + count, *taken = last + slots;
  __shared__ int news;
  const int tid = threadIdx.x, step = blockDim.x, stride = 1 + 2 * turning;
  let_next_start();
  if (tid == 0) news = 0;
  wait_for_previous();
  __syncthreads();
  for (int e = tid; e < count; e += step) {
    marks[e] = __ldcg(first + e + 1) > __ldcg(first + e);
    missing[e] = marks[e] && __ldcg(where + e) < 0;
  }
  for (int s = tid; s < slots; s += step) last[s] = __ldcg(used + s);
  __syncthreads();
  // taken [turning]: the slots, the one used longest ago first.
  for (int s = tid; s < slots; s += step) {
    int rank = 0;
    for (int other = 0; other < slots; other++) rank += last[other] < last[s] || (last[other] == last[s] && other < s);
    if (rank < turning) taken[rank] = s;
  }
  __syncthreads();
  for (int e = tid; e < count; e += step) {
    if (!missing[e]) {
      turn[e] = marks[e] ? 0 : -1, at[e] = __ldcg(where + e);
      continue;
    }
    int rank = 0;
    for (int other = 0; other < e; other++) rank += missing[other];
    const int own = 1 + rank / turning, slot = taken[rank % turning];
    atomicAdd(&news, 1);
    turn[e] = own < turns ? own : 0, at[e] = own < turns ? slot : -1;
    if (own < turns) {
      int* list = lists + (size_t)(own - 1) * stride + 1 + 2 * (rank % turning);
      list[0] = e, list[1] = slot;
    }
  }
  __syncthreads();
  for (int k = tid; k + 1 < turns; k += step) lists[(size_t)k * stride] = max(0, min(turning, news - k * turning));
  const int placed = min(news, turning * (turns - 1));
  for (int j = tid; j < min(turning, placed); j += step) {
    const int s = taken[j], before = __ldcg(owner + s);
    if (before >= 0) where[before] = -1;
  }
  __syncthreads();
  // The last one in each slot stays there.
  for (int e = tid; e < count; e += step) {
    if (!missing[e] || at[e] < 0) continue;
    int rank = 0;
    for (int other = 0; other < e; other++) rank += missing[other];
    if (rank + turning < placed) continue;
    where[e] = at[e], owner[at[e]] = e, used[at[e]] = max(last[at[e]], 0);
  }
}

template <typename Word>
__device__ __forceinline__ void copy_words(const u8* from, u8* to, int bytes) {
  const int words = bytes / (int)sizeof(Word), stride = gridDim.x * FETCH_THREADS;
  int at = blockIdx.x * FETCH_THREADS + threadIdx.x;
#pragma unroll 1
  for (; at + 3 * stride < words; at += 4 * stride) {
    Word v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = __ldcs((const Word*)from + at + i * stride);
#pragma unroll
    for (int i = 0; i < 4; i++) ((Word*)to)[at + i * stride] = v[i];
  }
  for (; at < words; at += stride) ((Word*)to)[at] = __ldcs((const Word*)from + at);
}

// Copy the new experts' parts of one stack from the host to their slots. *_bytes: of one expert. Grid: [blocks, new experts at most].
extern "C" __global__ void __launch_bounds__(FETCH_THREADS) experts_fetch(
    const int* fetched, const u8* weight, u8* near_weight, int weight_bytes, const u8* scale, u8* near_scale, int scale_bytes,
    const u8* second, u8* near_second, int second_bytes) {
  let_next_start();
  wait_for_previous();
  if ((int)blockIdx.y >= __ldcg(fetched)) return;
  const int expert = __ldcg(fetched + 1 + 2 * blockIdx.y), slot = __ldcg(fetched + 2 + 2 * blockIdx.y);
  const auto part = [&](const u8* from, u8* to, int bytes) {
    if (!to) return;
    from += (size_t)bytes * expert, to += (size_t)bytes * slot;
    if (bytes % 16 == 0) copy_words<uint4>(from, to, bytes);
    else if (bytes % 4 == 0) copy_words<u32>(from, to, bytes);
    else copy_words<u8>(from, to, bytes);
  };
  part(weight, near_weight, weight_bytes), part(scale, near_scale, scale_bytes), part(second, near_second, second_bytes);
}
