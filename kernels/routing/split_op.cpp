#include "../../torch-ext/torch_binding.h"
#include "../common/tensors.h"
#include "routing.h"
#include "splits.h"

using torch::headeronly::ScalarType;

Tensor split_rows_op(const Tensor &splits, int64_t num_groups, int64_t num_rows, int64_t block_m,
                     int64_t schedule_size) try {
  const ScalarType type = splits.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Long || type == ScalarType::Int, "split_rows: expected splits of int32 or int64");
  STD_TORCH_CHECK(fits_schedule(num_groups, num_rows, block_m, schedule_size) && splits.dim() == 1 &&
                      (splits.size(0) == num_groups || splits.size(0) == num_groups + 1),
                  "split_rows: expected sizes or offsets of 1 to 1024 groups, up to 2^31 - 129 rows, tiles of up to "
                  "128 and a schedule with room for them");
  const int32_t device = splits.get_device_index();
  const OnDevice guard(device);
  Tensor schedule = empty({schedule_size}, aoti_torch_dtype_int32(), device);
  SplitArgs a{};
  a.splits = splits.data_ptr();
  a.stride = splits.stride(0);
  a.schedule = static_cast<int *>(schedule.data_ptr());
  a.num_groups = static_cast<int>(num_groups);
  a.num_rows = static_cast<int>(num_rows);
  a.block_m = static_cast<int>(block_m);
  a.are_sizes = splits.size(0) == num_groups;
  a.wide = type == ScalarType::Long;
  check_launch("split_rows", schedule_rows(a, capability_of(device) >= 9, current_stream(device)));
  return schedule;
} catch (const NoMemory &) {
  return Tensor();
}
