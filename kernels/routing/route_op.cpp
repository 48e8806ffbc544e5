#include "../../torch-ext/torch_binding.h"
#include "../common/tensors.h"
#include "routing.h"

using torch::headeronly::ScalarType;

std::tuple<Tensor, Tensor, Tensor, Tensor> route_rows_op(const Tensor &ids, int64_t num_experts, int64_t num_rows,
                                                         int64_t block_m, int64_t schedule_size) try {
  const ScalarType id_type = ids.scalar_type();
  STD_TORCH_CHECK(ids.is_contiguous() && (id_type == ScalarType::Long || id_type == ScalarType::Int),
                  "route_rows: expected contiguous ids, int32 or int64");
  STD_TORCH_CHECK(fits_schedule(num_experts, num_rows, block_m, schedule_size) && (block_m & (block_m - 1)) == 0 &&
                      ids.numel() <= MAX_ROWS,
                  "route_rows: expected 1 to 1024 experts, up to 2^31 - 129 slots and rows, tiles of a power of two up "
                  "to 128 and a schedule with room for them");
  const int32_t device = ids.get_device_index();
  RouteArgs a{};
  a.num_slots = static_cast<int>(ids.numel());
  a.num_experts = static_cast<int>(num_experts);
  a.num_rows = static_cast<int>(num_rows);
  a.block_m = static_cast<int>(block_m);
  a.wide_ids = id_type == ScalarType::Long;
  const OnDevice guard(device);
  RoutePlan plan;
  if (!plan_route(a.num_slots, a.num_experts, capability_of(device), &plan))
    return {Tensor(), Tensor(), Tensor(), Tensor()};
  const int32_t int32 = aoti_torch_dtype_int32();
  const Scratch counts(sizeof(int) * plan.scratch(a.num_experts));
  Tensor schedule = empty({schedule_size}, int32, device), row_to_slot = empty({num_rows}, int32, device);
  Tensor slot_to_row = empty({a.num_slots}, int32, device);
  Tensor num_routed = empty({num_rows < a.num_slots ? 1 : 0}, int32, device);
  a.ids = ids.data_ptr();
  a.stride_it = a.top_k = 1;  // as slots of tokens with one each
  a.counts = static_cast<int *>(counts.get());
  a.schedule = static_cast<int *>(schedule.data_ptr());
  a.row_to_slot = static_cast<int *>(row_to_slot.data_ptr());
  a.slot_to_row = static_cast<int *>(slot_to_row.data_ptr());
  a.num_routed = num_rows < a.num_slots ? static_cast<int *>(num_routed.data_ptr()) : nullptr;
  const cudaError_t error = route_slots(a, plan, current_stream(device));
  if (error == cudaErrorCooperativeLaunchTooLarge) {  // where others limit the multiprocessors of this process
    cudaGetLastError();
    return {Tensor(), Tensor(), Tensor(), Tensor()};
  }
  check_launch("route_rows", error);
  return {schedule, row_to_slot, slot_to_row, num_routed};
} catch (const NoMemory &) {
  return {Tensor(), Tensor(), Tensor(), Tensor()};
}
