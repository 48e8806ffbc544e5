#include "routing.cuh"

#include "../common/launch.cuh"

namespace {

constexpr int MAX_CLUSTER = 8;

// Slots of a thread, powers of two.
constexpr int most_rounds(Reach reach) { return reach == Reach::grid ? 8 : 1; }

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

}  // namespace

// A block has ranked its slots the sooner, the fewer warps it has; blocks have met the sooner, the fewer they are.
bool plan_route(int num_slots, int num_experts, int num_sms, int capability, RoutePlan *plan) {
  const int slots = max(num_slots, 1);
  const auto fits = [&](Reach reach, int threads, int rounds, int most_blocks) {
    threads = max(threads, up_to(num_experts, WARP));
    const int64_t blocks = (int64_t{slots} + rounds * threads - 1) / (rounds * threads);
    if (blocks > most_blocks) return false;
    *plan = {reach, static_cast<int>(blocks), threads, rounds, capability >= 9 && reach != Reach::grid};
    return true;
  };
  if (fits(Reach::block, min(up_to(slots, WARP), 128), 1, 1)) return true;
  const int of_cluster = up_to(slots / MAX_CLUSTER + (slots % MAX_CLUSTER != 0), WARP);
  if (capability >= 9 && fits(Reach::cluster, min(of_cluster, 512), 1, MAX_CLUSTER)) return true;
  if (fits(Reach::grid, 512, 1, min(num_sms, 32))) return true;
  for (int rounds = 1; rounds <= most_rounds(Reach::grid); rounds *= 2)
    if (fits(Reach::grid, MAX_WARPS * WARP, rounds, num_sms)) return true;
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
