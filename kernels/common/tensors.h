// What ops need of tensors besides the stable ABI's own wrapper. Throws like it.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>

// As the shim declares them where USE_CUDA is defined, which not every build does.
extern "C" {
AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void **ret_stream);
AOTITorchError aoti_torch_cuda_caching_allocator_raw_alloc(uint64_t nbytes, void **ret_ptr);
AOTITorchError aoti_torch_cuda_caching_allocator_raw_delete(void *ptr);
}

using torch::stable::Tensor;

inline cudaStream_t current_stream(int32_t device) {
  void *stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

// Makes a device the current one, where it is not, while it lives.
class OnDevice {
 public:
  explicit OnDevice(int32_t device) {
    if (torch::stable::accelerator::getCurrentDeviceIndex() != device) guard_.emplace(device);
  }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

// PyTorch's allocator refused: there is no memory, or CUDA has failed for good. The stable ABI does not say which and
// would raise a RuntimeError. An op that catches this hands the call over, and PyTorch raises its own error there.
struct NoMemory {};

// Memory for kernels of the current stream of the current device, from PyTorch's allocator. May throw `NoMemory`.
class Scratch {
 public:
  explicit Scratch(uint64_t bytes) {
    if (bytes && aoti_torch_cuda_caching_allocator_raw_alloc(bytes, &memory_) != AOTI_TORCH_SUCCESS) throw NoMemory();
  }
  ~Scratch() {
    if (memory_) aoti_torch_cuda_caching_allocator_raw_delete(memory_);
  }
  Scratch(const Scratch &) = delete;
  Scratch &operator=(const Scratch &) = delete;
  void *get() const { return memory_; }

 private:
  void *memory_ = nullptr;
};

// What kernels are told of a tensor, asked once. `scalar_type` of Tensor asks up to twenty times, and throws for dtypes
// that the stable ABI has no name for.
struct Operand {
  void *data;
  int64_t dim;
  const int64_t *sizes, *strides;  // those of the tensor
  int32_t dtype, device;

  Operand(const Tensor &tensor) {
    int64_t *all_sizes, *all_strides;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor.get(), &data));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor.get(), &dim));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor.get(), &all_sizes));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor.get(), &all_strides));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &device));
    sizes = all_sizes;
    strides = all_strides;
  }
};

// An uninitialized, contiguous tensor of one or two dimensions. May throw `NoMemory`.
inline Tensor empty(std::initializer_list<int64_t> sizes, int32_t dtype, int32_t device) {
  const int64_t strides[] = {*(sizes.end() - 1), 1};
  AtenTensorHandle made;
  if (aoti_torch_empty_strided(sizes.size(), sizes.begin(), strides + 2 - sizes.size(), dtype,
                               aoti_torch_device_type_cuda(), device, &made) != AOTI_TORCH_SUCCESS)
    throw NoMemory();
  return Tensor(made);
}

// Throws with the error's message; the runtime forgets the error, which others would find and throw again.
inline void check_launch(const char *op, cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, op, ": ", cudaGetErrorString(error));
}

// The major compute capability. From 9 on devices have dependent launches and clusters.
inline int capability_of(int32_t device) {
  int major = 0;
  check_launch("cudaDeviceGetAttribute", cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  return major;
}
