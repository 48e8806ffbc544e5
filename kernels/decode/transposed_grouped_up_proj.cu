#include "../common/launch.cuh"
#include "choose.cuh"
#include "transposed_grouped_up_proj.cuh"

cudaError_t launch_transposed_grouped_up_proj(const GroupedArgs &a, bool dependent, cudaStream_t stream) {
  const auto launch_halves = [&](auto element, auto gated, auto halves) {
    const int columns = gated && halves == 1 ? 2 * a.intermediate : a.intermediate;
    const dim3 grid((columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS, a.max_tiles);
    return choose_shape<halves>(a.hidden, [&](auto shape) {
      using Shape = decltype(shape);
      const auto kernel = transposed_grouped_up_proj_kernel<decltype(element), decltype(gated)::value, Shape>;
      return launch(kernel, grid, Shape::THREADS, 0, stream, {dependent}, a);
    });
  };
  return choose_gated(a, [&](auto element, auto gated) {
    if constexpr (gated)
      if (!a.interleaved) return launch_halves(element, gated, Int<2>());
    return launch_halves(element, gated, Int<1>());
  });
}
