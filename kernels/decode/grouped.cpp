#include "grouped.h"

#include <algorithm>
#include <limits>

#include "launches.h"

namespace {

// Gives parts of scratch away, each at a multiple of 256 bytes. With no memory it counts their bytes.
class Parts {
 public:
  explicit Parts(void *memory) : memory_(static_cast<char *>(memory)) {}
  template <typename T>
  T *take(uint64_t count, uint64_t size) {
    char *part = memory_ ? memory_ + bytes_ : nullptr;
    bytes_ += (count * size + 255) / 256 * 256;
    return reinterpret_cast<T *>(part);
  }
  uint64_t bytes() const { return bytes_; }

 private:
  char *memory_;
  uint64_t bytes_ = 0;
};

// The bytes of scratch, all parts of which it puts into the arguments.
uint64_t lay_out(const GroupedPlan &plan, void *scratch, GroupedArgs *a, RouteArgs *r) {
  constexpr uint64_t ELEMENT = 2;
  const uint64_t slots = a->num_tokens * a->top_k, experts = a->num_experts;
  Parts parts(scratch);
  if (!plan.by_slot) {
    a->schedule = r->schedule = parts.take<int>(2 * (experts + 1) + plan.max_tiles, sizeof(int));
    a->row_to_slot = r->row_to_slot = parts.take<int>(slots, sizeof(int));
    a->slot_to_row = r->slot_to_row = parts.take<int>(slots, sizeof(int));
    r->counts = parts.take<int>(plan.route.scratch(a->num_experts), sizeof(int));
  }
  a->act = parts.take<void>(slots * a->intermediate, ELEMENT);
  a->y = parts.take<void>(slots * a->hidden, ELEMENT);
  a->z = parts.take<float>(slots * std::max(a->up_lora.rank, a->down_lora.rank), sizeof(float));
  return parts.bytes();
}

// Whether kernels may count pieces in 32 bits, from row to row of x and act and within the weights of an expert.
bool has_near_rows(const DecodeArgs &a) {
  constexpr int64_t MOST = std::numeric_limits<int>::max();
  const int64_t slots = a.num_tokens * a.top_k;
  const int64_t up_rows = a.transposed ? a.hidden : std::max(2 * int64_t{a.intermediate}, int64_t{16});
  const int64_t down_rows = a.transposed ? a.intermediate : 16;
  return slots * a.intermediate / PIECE <= MOST && a.num_tokens * (a.stride_xt / PIECE) <= MOST &&
         up_rows * (a.stride_un / PIECE) <= MOST && down_rows * (a.stride_dn / PIECE) <= MOST;
}

// Whether the weight rows of a fragment, 16 in a row or every other one of 32, never lie in two parts.
bool divides_parts(const DecodeArgs &a) {
  return !a.up_scales.data || a.up_scales.part_rows % (a.interleaved ? 32 : 16) == 0;
}

}  // namespace

bool plan_grouped(const DecodeArgs &args, bool by_slot, int capability, GroupedPlan *plan) {
  const int slots = args.num_tokens * args.top_k, with_rows = std::min(slots, args.num_experts);
  if (!divides_parts(args) || !has_near_rows(args)) return false;
  if (!by_slot && !plan_route(slots, args.num_experts, capability, &plan->route)) return false;
  plan->by_slot = by_slot;
  // The last tile of an expert is not full.
  plan->max_tiles = by_slot ? slots : (slots + with_rows * (TILE_ROWS - 1)) / TILE_ROWS;
  plan->dependent = capability >= 9;
  GroupedArgs a{args};
  RouteArgs r{};
  plan->bytes = lay_out(*plan, nullptr, &a, &r);
  return true;
}

cudaError_t grouped_experts(const DecodeArgs &args, const GroupedPlan &plan, void *scratch, cudaStream_t stream) {
  GroupedArgs a{args};
  RouteArgs r{};
  lay_out(plan, scratch, &a, &r);
  a.max_tiles = plan.max_tiles;
  r.block_m = TILE_ROWS;
  r.ids = a.ids;
  r.stride_it = a.stride_it;
  r.stride_ik = a.stride_ik;
  r.top_k = a.top_k;
  r.num_slots = r.num_rows = a.num_tokens * a.top_k;
  r.num_experts = a.num_experts;
  r.wide_ids = a.wide_ids;
  cudaError_t error = plan.by_slot ? cudaSuccess : route_slots(r, plan.route, stream);
  const bool scaled = a.up_scales.data;
  const auto up_proj = scaled         ? launch_scaled_grouped_up_proj
                       : a.transposed ? launch_transposed_grouped_up_proj
                                      : launch_grouped_up_proj;
  const auto down_proj = scaled         ? launch_scaled_grouped_down_proj
                         : a.transposed ? launch_transposed_grouped_down_proj
                                        : launch_grouped_down_proj;
  if (error == cudaSuccess) error = launch_project_tokens(a, plan.dependent, stream);
  if (error == cudaSuccess) error = up_proj(a, plan.dependent, stream);
  if (error == cudaSuccess) error = launch_project_act(a, a.slot_to_row, plan.dependent, stream);
  if (error == cudaSuccess) error = down_proj(a, plan.dependent, stream);
  if (error == cudaSuccess) error = launch_combine(a, plan.dependent, stream);
  return error;
}
