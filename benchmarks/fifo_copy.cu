// The memory traffic of nvlink_two_sided without flags (benchmarks/fifo_copy.py).
//
// A warp takes every so-many-th record. Each has FIFOs of its own, two slots each, and takes out of
// them what it put in a record ago: so nothing is waited for, and what is taken out is known.
// Loads and stores bypass L1, as those of rows that another multiprocessor wrote must.

constexpr int kVectors = 4;  // of 16 bytes, of each lane: a record is 2 KiB
constexpr int kRecord = kVectors * 32;
constexpr int kSlots = 2;

struct Vectors {
  uint4 of[kVectors];
};

__device__ Vectors load(const uint4* record) {
  Vectors vectors;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) vectors.of[k] = __ldcg(record + k * 32 + threadIdx.x % 32);
  return vectors;
}
__device__ void store(uint4* record, const Vectors& vectors) {
#pragma unroll
  for (int k = 0; k < kVectors; ++k) __stcg(record + k * 32 + threadIdx.x % 32, vectors.of[k]);
}

struct Warp {
  long long first;  // record
  long long step;
  uint4* slots;

  __device__ Warp(uint4* all_slots, int destinations) {
    const int warps = blockDim.x / 32;
    first = static_cast<long long>(blockIdx.x) * warps + threadIdx.x / 32;
    step = static_cast<long long>(gridDim.x) * warps;
    slots = all_slots + first * (destinations - 1) * kSlots * kRecord;
  }
  __device__ uint4* slot(int peer, long long turn) const {
    return slots + ((peer - 1) * kSlots + turn % kSlots) * kRecord;
  }
};

// source: [records], rows: [destinations][records]; of records.
extern "C" __global__ void __launch_bounds__(256, 3)
    send(const uint4* source, uint4* rows, uint4* slots, int records, int destinations) {
  const Warp warp(slots, destinations);
  long long turn = 0;
  for (long long i = warp.first; i < records + warp.step; i += warp.step, ++turn) {
    if (i < records) {
      const Vectors sent = load(source + i * kRecord);
      for (int peer = 1; peer < destinations; ++peer) store(warp.slot(peer, turn), sent);
      store(rows + i * kRecord, sent);
    }
    const long long before = i - warp.step;
    if (before < 0) continue;
    for (int peer = 1; peer < destinations; ++peer) {
      const Vectors came = load(warp.slot(peer, turn - 1));
      store(rows + (peer * static_cast<long long>(records) + before) * kRecord, came);
    }
  }
}

// rows: [destinations][records], sums: [records].
extern "C" __global__ void __launch_bounds__(256, 3)
    sum(const uint4* rows, uint4* sums, uint4* slots, int records, int destinations) {
  const Warp warp(slots, destinations);
  long long turn = 0;
  for (long long i = warp.first; i < records + warp.step; i += warp.step, ++turn) {
    for (int peer = 1; i < records && peer < destinations; ++peer) {
      store(warp.slot(peer, turn),
            load(rows + (peer * static_cast<long long>(records) + i) * kRecord));
    }
    const long long before = i - warp.step;
    if (before < 0) continue;
    Vectors total = load(rows + before * kRecord);
    for (int peer = 1; peer < destinations; ++peer) {
      const Vectors came = load(warp.slot(peer, turn - 1));
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        total.of[k].x += came.of[k].x;
        total.of[k].y += came.of[k].y;
        total.of[k].z += came.of[k].z;
        total.of[k].w += came.of[k].w;
      }
    }
    store(sums + before * kRecord, total);
  }
}
