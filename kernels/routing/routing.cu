#include "routing.cuh"

#include "../common/launch.cuh"

namespace {

constexpr int MAX_THREADS = MAX_WARPS * WARP, MAX_CLUSTER = 8;

// Powers of two.
constexpr int most_rounds(Reach reach) { return reach == Reach::block ? 1 : reach == Reach::cluster ? 2 : 8; }

int up_to(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

template <Reach REACH, int ROUNDS>
cudaError_t launch_kernel(const RouteArgs &a, const RoutePlan &plan, cudaStream_t stream) {
  const auto kernel = route_kernel<REACH, ROUNDS>;
  const size_t bytes = RouteMemory::bytes(a.num_experts, plan.threads / WARP);
  if (bytes > 48 * 1024) {  // more has to be asked for
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
    if (error != cudaSuccess) return error;
  }
  LaunchOptions options;
  options.dependent = REACH != Reach::grid;
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

}  // namespace

bool plan_route(int num_slots, int num_experts, int num_sms, int capability, RoutePlan *plan) {
  const int threads = max(min(up_to(max(num_slots, 1), WARP), MAX_THREADS), up_to(num_experts, WARP));
  const auto fits = [&](Reach reach, int most_blocks) {
    for (int rounds = 1; rounds <= most_rounds(reach); rounds *= 2) {
      const int blocks = max(1, (num_slots + rounds * threads - 1) / (rounds * threads));
      if (blocks > most_blocks) continue;
      *plan = {reach, blocks, threads, rounds};
      return true;
    }
    return false;
  };
  return fits(Reach::block, 1) || (capability >= 9 && fits(Reach::cluster, MAX_CLUSTER)) ||
         fits(Reach::grid, num_sms);
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
