// The experts block for tokens that are few and yet share experts: an expert's weights are read once for several rows.
#pragma once

#include "../routing/routing.h"
#include "decode.h"

constexpr int TILE_ROWS = 8;

// A call with its rows. Rows are routed slots sorted by expert, as `route_slots` has them; a tile is up to TILE_ROWS of
// one expert. By slot there is no schedule: each slot is a row and a tile, and that of a sentinel stays unwritten.
struct GroupedArgs : DecodeArgs {
  int *schedule, *row_to_slot, *slot_to_row;  // scratch, as of RouteArgs; null by slot
  void *y;                                    // (S, H), scratch, as is act: the first rows are written
  int max_tiles;                              // there are no more than these
};

// How a call is made and how much scratch it takes.
struct GroupedPlan {
  bool by_slot;
  RoutePlan route;  // unless by_slot
  int max_tiles;
  bool dependent;  // whether the device has dependent launches
  uint64_t bytes;
};

// The plan for a call on the current device that is complete but for act, z and out; false if it has too many slots,
// rows so far apart that 32 bits do not count the pieces between them, or parts with scales of their own that a tile
// would straddle. capability: the major one.
bool plan_grouped(const DecodeArgs &args, bool by_slot, int capability, GroupedPlan *plan);

// As `decode_experts`, in three launches, one more for routing unless by slot, and one for each low-rank pair, with act
// and z in scratch. S up to 65535.
cudaError_t grouped_experts(const DecodeArgs &args, const GroupedPlan &plan, void *scratch, cudaStream_t stream);

// The three launches, in this order, of plain weights, of those with scales or of those that lie transposed.
// Routing comes before, unless by slot.
cudaError_t launch_grouped_up_proj(const GroupedArgs &args, bool dependent, cudaStream_t stream);
cudaError_t launch_grouped_down_proj(const GroupedArgs &args, bool dependent, cudaStream_t stream);
cudaError_t launch_scaled_grouped_up_proj(const GroupedArgs &args, bool dependent, cudaStream_t stream);
cudaError_t launch_scaled_grouped_down_proj(const GroupedArgs &args, bool dependent, cudaStream_t stream);
cudaError_t launch_transposed_grouped_up_proj(const GroupedArgs &args, bool dependent, cudaStream_t stream);
cudaError_t launch_transposed_grouped_down_proj(const GroupedArgs &args, bool dependent, cudaStream_t stream);
cudaError_t launch_combine(const GroupedArgs &args, bool dependent, cudaStream_t stream);
