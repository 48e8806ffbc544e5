#include "../common/launch.cuh"
#include "transposed_grouped_up_proj.cuh"

namespace {

template <typename Element, bool GATED, int HALVES>
cudaError_t choose_shape(const GroupedArgs &a, bool dependent, cudaStream_t stream) {
  const int columns = GATED && HALVES == 1 ? 2 * a.intermediate : a.intermediate;
  const dim3 grid((columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS, a.max_tiles);
  return launch_shape<HALVES>(a.hidden, [&](auto shape) {
    using Shape = decltype(shape);
    const auto kernel = transposed_grouped_up_proj_kernel<Element, GATED, Shape>;
    return launch(kernel, grid, Shape::THREADS, 0, stream, {dependent}, a);
  });
}

template <typename Element>
cudaError_t choose_halves(const GroupedArgs &a, bool dependent, cudaStream_t stream) {
  if (!a.gated) return choose_shape<Element, false, 1>(a, dependent, stream);
  return a.interleaved ? choose_shape<Element, true, 1>(a, dependent, stream)
                       : choose_shape<Element, true, 2>(a, dependent, stream);
}

}  // namespace

cudaError_t launch_transposed_grouped_up_proj(const GroupedArgs &a, bool dependent, cudaStream_t stream) {
  return a.dtype == Scalar::bfloat16 ? choose_halves<__nv_bfloat16>(a, dependent, stream)
                                     : choose_halves<__half>(a, dependent, stream);
}
