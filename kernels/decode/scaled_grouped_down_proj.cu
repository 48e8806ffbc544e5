#include "../common/launch.cuh"
#include "scaled_grouped_down_proj.cuh"

namespace {

using Shape = TileShape<2, 2, 10>;  // one block of scales of each row under way, in many blocks

template <typename Element>
cudaError_t launch_kernel(const GroupedArgs &a, bool dependent, cudaStream_t stream) {
  constexpr int COLUMNS = 2 * FRAGMENT;
  const dim3 grid((a.hidden + COLUMNS - 1) / COLUMNS, a.max_tiles);
  const auto kernel = a.down_lora.rank ? scaled_grouped_down_proj_kernel<Element, true, Shape>
                                       : scaled_grouped_down_proj_kernel<Element, false, Shape>;
  return launch(kernel, grid, Shape::THREADS, 0, stream, {dependent}, a);
}

}  // namespace

cudaError_t launch_scaled_grouped_down_proj(const GroupedArgs &a, bool dependent, cudaStream_t stream) {
  return a.dtype == Scalar::bfloat16 ? launch_kernel<__nv_bfloat16>(a, dependent, stream)
                                     : launch_kernel<__half>(a, dependent, stream);
}
