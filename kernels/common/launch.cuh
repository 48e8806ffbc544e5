#pragma once

#include <cuda_runtime.h>

// What a launch may ask for besides a grid: to start while the kernel before it runs, clusters of so many blocks, or
// all blocks at once. A kernel that starts early may read before `wait_for_stream` what was complete when the one
// before it let it start; it writes nothing before.
struct LaunchOptions {
  bool dependent = false;
  int cluster = 0;
  bool cooperative = false;
};

template <typename... Parameters>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared_bytes, cudaStream_t stream,
                   const LaunchOptions &options, const Parameters &...parameters) {
  cudaLaunchAttribute attributes[3] = {};
  unsigned count = 0;
  if (options.dependent) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (options.cluster) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = options.cluster;
    attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  if (options.cooperative) {
    attributes[count].id = cudaLaunchAttributeCooperative;
    attributes[count++].val.cooperative = 1;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, parameters...);
}
