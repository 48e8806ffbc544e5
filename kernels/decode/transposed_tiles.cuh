// A tile of rows of one expert times its weights, which lie transposed, (E, K, N).
#pragma once

#include "tile_ranks.cuh"

constexpr int BLOCK_COLUMNS = 64;        // a piece for each g of a warp's lanes 4 g + t
constexpr int ROWS_OF_K = PIECE;         // that a lane has of 32: those of its piece of a token
constexpr int COLUMN_PAIRS = PIECE / 2;  // of a lane

// What a block makes: 64 columns of N, or with two HALVES as many of each half of N, by SPLITS warps that share K. A
// lane has 16 pieces under way at once. BLOCKS of them have room on a multiprocessor: that bounds their registers.
template <int HALVES_, int SPLITS_, int BLOCKS_>
struct TransposedShape {
  static constexpr int HALVES = HALVES_, SPLITS = SPLITS_, BLOCKS = BLOCKS_, BATCHES = 2 / HALVES;
  static constexpr int THREADS = SPLITS * WARP, ROUND = SPLITS * BATCHES * QUAD * ROWS_OF_K;  // rows of K at once
  static constexpr bool ALWAYS_ROUTED = false;
};

// call(shape), with eight warps to a block, or with five where fewer lanes are then idle in the last round over
// K: 2880 rows are 9 rounds of 320, but 5.6 of 512.
template <int HALVES, typename Call>
cudaError_t choose_shape(int k, const Call &call) {
  using Eight = TransposedShape<HALVES, 8, 2>;
  using Five = TransposedShape<HALVES, 5, 3>;
  const auto padded = [k](int round) { return (k + round - 1) / round * round; };
  return padded(Five::ROUND) < padded(Eight::ROUND) ? call(Five()) : call(Eight());
}

// acc[i] += the product of columns 2 i and 2 i + 1 of each lane's piece with the tile, 32 deep. rows: those of K that
// the lane has. The instruction takes pairs of neighbours along K, which are of two rows here.
template <typename Element>
__device__ __forceinline__ void multiply_rows(const uint4 (&rows)[ROWS_OF_K], const uint4 &token,
                                              float (&acc)[COLUMN_PAIRS][4]) {
  constexpr unsigned LOW_HALVES = 0x5410, HIGH_HALVES = 0x7632;
  const unsigned tokens[] = {token.x, token.y, token.z, token.w};
#pragma unroll
  for (int k = 0; k < ROWS_OF_K; k += 4) {
    const unsigned words[4][COLUMN_PAIRS] = {{rows[k].x, rows[k].y, rows[k].z, rows[k].w},
                                             {rows[k + 1].x, rows[k + 1].y, rows[k + 1].z, rows[k + 1].w},
                                             {rows[k + 2].x, rows[k + 2].y, rows[k + 2].z, rows[k + 2].w},
                                             {rows[k + 3].x, rows[k + 3].y, rows[k + 3].z, rows[k + 3].w}};
#pragma unroll
    for (int i = 0; i < COLUMN_PAIRS; ++i)
      multiply_pairs<Element>(__byte_perm(words[0][i], words[1][i], LOW_HALVES),
                              __byte_perm(words[0][i], words[1][i], HIGH_HALVES),
                              __byte_perm(words[2][i], words[3][i], LOW_HALVES),
                              __byte_perm(words[2][i], words[3][i], HIGH_HALVES), tokens[k / 2], tokens[k / 2 + 1],
                              acc[i]);
  }
}

// acc[h] += half h times the tile, over the warp's share of K, of `length` pieces of tokens in all: every SPLITS-th run
// of 32 BATCHES rows. w: a lane's piece in row 0 of the first half, `to_half` pieces before that of the second, read
// only if wanted; rows of K are `to_row` pieces apart. tokens, locate: as of `multiply_tile`.
template <typename Element, typename Shape, typename Locate>
__device__ __forceinline__ void multiply_transposed(const uint4 *w, int to_row, int to_half, bool wanted,
                                                    const uint4 *tokens, int length, const Locate &locate,
                                                    float (&acc)[Shape::HALVES][COLUMN_PAIRS][4]) {
  constexpr int HALVES = Shape::HALVES, BATCHES = Shape::BATCHES;
  int row = 0;
  bool located = false;
  for (int start = threadIdx.x / WARP * BATCHES * QUAD; start < length; start += Shape::SPLITS * BATCHES * QUAD) {
    const int mine = start + threadIdx.x % QUAD;
    uint4 pieces[BATCHES][HALVES][ROWS_OF_K], v[BATCHES];
#pragma unroll
    for (int b = 0; b < BATCHES; ++b)
#pragma unroll
      for (int k = 0; k < ROWS_OF_K; ++k)
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
          const int at = mine + b * QUAD;
          pieces[b][h][k] = load_once(w + (at * ROWS_OF_K + k) * to_row + h * to_half, wanted && at < length);
        }
    if (!located) row = locate();
    located = true;
    load_tokens(tokens, row, mine, length, v);
    let_next_start();  // here, where it keeps loads and sums apart as well
#pragma unroll
    for (int b = 0; b < BATCHES; ++b)
#pragma unroll
      for (int h = 0; h < HALVES; ++h) multiply_rows<Element>(pieces[b][h], v[b], acc[h]);
  }
  if (!located) locate();
}

// Adds up what the warps have, in order, and calls store(n, row, sums) for each row of the tile: of column n of both
// halves, or with one half of columns n and n + 1, n even. All threads of the block call it.
template <typename Shape, typename Store>
__device__ __forceinline__ void add_up_columns(const float (&acc)[Shape::HALVES][COLUMN_PAIRS][4], int rows,
                                               const Store &store) {
  constexpr int HALVES = Shape::HALVES, SPLITS = Shape::SPLITS, STEP = 2 / HALVES;
  __shared__ float parts[SPLITS][HALVES][COLUMN_PAIRS][4][WARP + 1];
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
  for (int h = 0; h < HALVES; ++h)
#pragma unroll
    for (int i = 0; i < COLUMN_PAIRS; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) parts[warp][h][i][c][lane] = acc[h][i][c];
  __syncthreads();
  for (int at = threadIdx.x; at < rows * (BLOCK_COLUMNS / STEP); at += Shape::THREADS) {
    // Sum c of lane 4 g + t and its pair i is that of column 8 g + 2 i + c / 2 and row 2 t + c % 2 of the tile.
    const int n = at % (BLOCK_COLUMNS / STEP) * STEP, row = at / (BLOCK_COLUMNS / STEP);
    const int owner = n / PIECE * QUAD + row / 2, pair = n % PIECE / 2;
    float sums[2] = {};
#pragma unroll
    for (int s = 0; s < SPLITS; ++s)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int c = (HALVES == 1 ? j : n % 2) * 2 + row % 2;
        sums[j] += parts[s][HALVES == 1 ? 0 : j][pair][c][owner];
      }
    store(n, row, sums);
  }
}

// Adds to acc a warp's part of what a pair adds to a lane's piece of columns, from n on, which all are wanted or none.
template <typename Shape>
__device__ __forceinline__ void add_ranks_of_columns(const GroupedArgs &a, const LowRank &pair, const Tile &tile, int n,
                                                     bool wanted, float (&acc)[COLUMN_PAIRS][4]) {
  bool each[COLUMN_PAIRS][2];
#pragma unroll
  for (int i = 0; i < COLUMN_PAIRS; ++i) each[i][0] = each[i][1] = wanted;
  add_ranks_of_tile<Shape>(a, pair, tile, each, n, 1, 2, threadIdx.x / WARP, acc);
}
