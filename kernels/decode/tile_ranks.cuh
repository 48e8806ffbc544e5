#pragma once

#include "low_rank.cuh"
#include "tiles.cuh"

// Adds to acc a warp's part, every SPLITS-th rank, of what a pair adds to the rows of a tile. Lane 4 g + t has weight
// rows n + half * to_half + f * to_fragment, which are wanted[f][half], and rows 2 t and 2 t + 1 of the tile, as in
// `multiply_pairs`. Waits for z.
template <typename Shape, int FRAGMENTS>
__device__ __forceinline__ void add_ranks_of_tile(const GroupedArgs &a, const LowRank &pair, const Tile &tile,
                                                  const bool (&wanted)[FRAGMENTS][2], int n, int to_half,
                                                  int to_fragment, int split, float (&acc)[FRAGMENTS][4]) {
  wait_for_stream();
  const char *z[2], *b[2];
  bool adapted[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int row = threadIdx.x % QUAD * 2 + j;
    const int slot = find_slot<Shape>(a, tile, row);
    const int adapter = slot < 0 ? -1 : load_adapter(a, slot / a.top_k);
    adapted[j] = adapter >= 0;
    z[j] = reinterpret_cast<const char *>(a.z + int64_t(slot) * pair.rank);
    b[j] = factor_at(pair.b, adapter, tile.expert) + n * pair.b.stride_n;
  }
#pragma unroll 2
  for (int k = split; k < pair.rank; k += Shape::SPLITS) {
    unsigned rows[2];
    FactorBits bits[2][FRAGMENTS][2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      rows[j] = load_bits<4>(z[j] + k * sizeof(float), adapted[j]);
#pragma unroll
      for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int64_t at = (half * to_half + f * to_fragment) * pair.b.stride_n + k * pair.b.stride_k;
          bits[j][f][half] = load_factor(pair.b, b[j] + at, adapted[j] && wanted[f][half]);
        }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float &sum = acc[f][2 * half + j];
          sum = fmaf(__uint_as_float(rows[j]), to_float(pair.b, bits[j][f][half]), sum);
        }
  }
}
