#include "routing.cuh"

#include <atomic>

#include "../common/launch.cuh"

namespace {

constexpr int PORTABLE_CLUSTER = 8, MAX_CLUSTER = 16;

// Slots of a thread, powers of two.
constexpr int most_rounds(Reach reach) { return reach == Reach::grid ? 8 : 1; }

int up_to(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

template <Reach REACH, int ROUNDS>
cudaError_t launch_kernel(const RouteArgs &a, const RoutePlan &plan, cudaStream_t stream) {
  const auto kernel = route_kernel<REACH, ROUNDS>;
  const size_t bytes = RouteMemory::bytes(a.num_experts, plan.threads / WARP);
  constexpr size_t PARTIAL = 2 * MAX_WARPS * sizeof(int);  // what the kernel has besides
  if (bytes + PARTIAL > 48 * 1024) {  // more has to be asked for: as much in each call, as all threads have one limit
    constexpr auto LIMIT = cudaFuncAttributeMaxDynamicSharedMemorySize;
    const cudaError_t error = cudaFuncSetAttribute(kernel, LIMIT, int(RouteMemory::bytes(MAX_EXPERTS, MAX_WARPS)));
    if (error != cudaSuccess) return error;
  }
  LaunchOptions options;
  options.dependent = plan.dependent;
  options.cluster = REACH == Reach::cluster ? plan.blocks : 0;
  options.cooperative = REACH == Reach::grid;
  return launch(kernel, dim3(plan.blocks), plan.threads, bytes, stream, options, a);
}

template <Reach REACH, int ROUNDS>
cudaError_t choose_rounds(const RouteArgs &a, const RoutePlan &plan, cudaStream_t stream) {
  if (plan.rounds == ROUNDS) return launch_kernel<REACH, ROUNDS>(a, plan, stream);
  if constexpr (ROUNDS < most_rounds(REACH)) return choose_rounds<REACH, 2 * ROUNDS>(a, plan, stream);
  return cudaErrorInvalidValue;
}

// The most blocks of a cluster on the current device: 16 where it has them, which programs have to ask for, else 8.
int largest_cluster() {
  constexpr int MAX_DEVICES = 64;
  static std::atomic<int> known[MAX_DEVICES];  // 0: not asked yet
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= MAX_DEVICES) return PORTABLE_CLUSTER;
  int blocks = known[device].load(std::memory_order_relaxed);
  if (blocks) return blocks;
  blocks = PORTABLE_CLUSTER;
  const auto kernel = route_kernel<Reach::cluster, 1>;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {MAX_CLUSTER, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(MAX_CLUSTER);
  config.blockDim = dim3(MAX_WARPS * WARP);
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) != cudaSuccess ||
      cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess)
    cudaGetLastError();  // the answer is no: nobody else is to find the error
  else if (clusters > 0)
    blocks = MAX_CLUSTER;
  known[device].store(blocks, std::memory_order_relaxed);
  return blocks;
}

// Those of the current device; 0, which is room for nothing, if it does not say.
int count_multiprocessors() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
    cudaGetLastError();  // nobody else is to find the error
  return count;
}

}  // namespace

// As measured on an H100: one block alone is fastest, then those of one cluster. Each block adds up the counts of all
// blocks for every expert, so that with many experts fewer blocks of more warps and rounds win.
bool plan_route(int num_slots, int num_experts, int capability, RoutePlan *plan) {
  constexpr int MAX_THREADS = MAX_WARPS * WARP;
  const int slots = max(num_slots, 1);
  const auto fits = [&](Reach reach, int threads, int rounds, int most_blocks) {
    threads = max(threads, up_to(num_experts, WARP));
    const int64_t blocks = (int64_t{slots} + rounds * threads - 1) / (rounds * threads);
    if (blocks > most_blocks) return false;
    *plan = {reach, static_cast<int>(blocks), threads, rounds, capability >= 9 && reach != Reach::grid};
    return true;
  };
  if (fits(Reach::block, up_to(min(slots, 512), WARP), 1, 1)) return true;
  if (capability >= 9) {
    if (fits(Reach::cluster, 256, 1, PORTABLE_CLUSTER)) return true;
    if (fits(Reach::cluster, 512, 1, PORTABLE_CLUSTER)) return true;
    if (slots <= MAX_CLUSTER * MAX_THREADS) {
      const int most_blocks = largest_cluster();
      if (num_experts <= 256 && fits(Reach::cluster, 512, 1, most_blocks)) return true;
      if (num_experts > 64 && fits(Reach::cluster, MAX_THREADS, 1, most_blocks)) return true;
    }
  }
  const int num_sms = count_multiprocessors();
  if (fits(Reach::grid, 512, 1, min(num_sms, num_experts <= 64 ? 64 : 32))) return true;
  for (int rounds = 1; rounds <= most_rounds(Reach::grid); rounds *= 2) {
    const bool takes_all = num_experts <= 128 || rounds == most_rounds(Reach::grid);
    if (fits(Reach::grid, MAX_THREADS, rounds, takes_all ? num_sms : min(num_sms, 64))) return true;
  }
  return false;
}

cudaError_t route_slots(const RouteArgs &a, const RoutePlan &plan, cudaStream_t stream) {
  switch (plan.reach) {
    case Reach::block:
      return choose_rounds<Reach::block, 1>(a, plan, stream);
    case Reach::cluster:
      return choose_rounds<Reach::cluster, 1>(a, plan, stream);
    default:
      return choose_rounds<Reach::grid, 1>(a, plan, stream);
  }
}
