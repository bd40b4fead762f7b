// The call for weight gradients.

#include <algorithm>

#include "launch.h"
#include "launch_steps.h"
#include "tensor_map.h"

namespace jgg {
namespace {

void CheckWgradProblem(const WgradProblem& problem) {
  CheckProblem(problem, problem.ScratchBytes());
  CheckAddress("x", problem.x, 16);
  CheckAddress("y", problem.y, 16);
}

void CheckWgradKernel(const Kernel& kernel, const WgradProblem& problem) {
  CheckKernel(kernel, problem);
  if (problem.accumulate && !kernel.accumulates) DoesNotFit(kernel, "add to what d holds");
  if (!problem.accumulate && kernel.accumulates) DoesNotFit(kernel, "overwrite d");
}

// Persistent CTAs, no more of them than there are tiles.
int64_t Clusters(const StreamCall& call, const WgradProblem& problem) {
  const Kernel& kernel = call.kernel();
  const int64_t fit = call.FittingClusters(problem.overlap_margin);
  const int64_t rows = int64_t{kernel.tile.m} * kernel.cluster.m;
  const int64_t columns = kernel.tile.n;
  const int64_t tiles = CeilDiv(problem.n, rows) * CeilDiv(problem.k, columns);
  // The product of three extents may be more than an int64 holds, that of two is not.
  return std::min(problem.l * std::min(tiles, fit), fit);
}

FieldValues Values(const StreamCall& call, const WgradProblem& problem) {
  const Kernel& kernel = call.kernel();
  FieldValues values(problem);
  auto encode = [&](const TensorView& view, Field field, CUtensorMap* map) {
    Encode(call.driver(), view, *kernel.FindMap(field), call.where(), map);
  };
  encode(ViewX(problem), MAP_A, &values.map_a);
  encode(ViewY(problem), MAP_B, &values.map_b);
  encode(ViewGradients(problem), MAP_D, &values.map_d);
  values.load_rows = static_cast<int32_t>(problem.m + 1);
  if (problem.dynamic) values.counter = problem.scratch;
  return values;
}

}  // namespace

void LoadWgrad(const CallKernels& kernels, CUstream stream) {
  const StreamCall call(kernels, stream);
  call.Load(call.kernel());
}

void LaunchWgrad(const CallKernels& kernels, const WgradProblem& problem, CUstream stream) {
  if (problem.n == 0 || problem.k == 0 || problem.l == 0) return;  // D has no elements
  CheckWgradProblem(problem);
  const StreamCall call(kernels, stream);
  CheckWgradKernel(call.kernel(), problem);
  const int64_t clusters = Clusters(call, problem);
  const FieldValues values = Values(call, problem);
  call.ResetCounter(values.counter);
  call.Enqueue(call.kernel(), clusters, values);
  call.Count();
}

}  // namespace jgg
