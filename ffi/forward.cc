// The forward call.

#include <algorithm>

#include "error.h"
#include "launch.h"
#include "launch_steps.h"
#include "tensor_map.h"

namespace jgg {
namespace {

const Kernel& Prologue(Weights weights, const Where& where) {
  const Kind kind = weights == Weights::kTuple ? MAPS_BY_VALUE : MAPS_FROM_MEMORY;
  const Kernel* prologue = FindPrologue(where.kernel->arch, kind);
  if (prologue == nullptr) {
    FailedPrecondition("this build has no prologue that writes tensor maps; ", where.Describe(),
                       "; rebuild the library");
  }
  return *prologue;
}

void CheckForwardKernel(const Kernel& kernel, const ForwardProblem& problem) {
  CheckKernel(kernel, problem);
  auto mismatch = [&kernel](const char* what) { DoesNotFit(kernel, what); };
  if (kernel.b_major != problem.b_major) mismatch("read b in this b_major");
  if (kernel.c_element == NONE && problem.c_element != NONE) mismatch("write c");
  if (kernel.c_element != NONE && problem.c_element == NONE) mismatch("leave c out");
  if (!Writes(kernel.c_element, problem.c_element)) mismatch("write c in this dtype");
  if (kernel.Takes(PTR_MAPS) != (problem.weights != Weights::kDense)) {
    mismatch("take weights in this form");
  }
  if (problem.prob != 0 && !kernel.Takes(PTR_PROB)) mismatch("scale by prob");
  if (problem.bias != 0 && !kernel.Takes(PTR_BIAS)) mismatch("add bias");
  // Only kernels with C do without: there, whether prob scales the product or the bias is decided
  // at run time.
  if (problem.bias == 0 && kernel.Takes(PTR_BIAS) && kernel.c_element == NONE) {
    mismatch("leave bias out");
  }
}

void CheckForwardProblem(const ForwardProblem& problem) {
  CheckProblem(problem, problem.ScratchBytes());
  CheckAddress("a", problem.a, 16);
  if (problem.prob != 0) CheckAddress("prob", problem.prob, 4);
  CheckOptional("bias", problem.bias, problem.bias_element, ElementBytes(problem.bias_element));
  CheckOptional("c", problem.c, problem.c_element, 16);
  switch (problem.weights) {
    case Weights::kDense:
      CheckAddress("b", problem.b, 16);
      break;
    case Weights::kPointers:
      CheckAddress("b_ptrs", problem.b, 8);
      break;
    case Weights::kTuple:
      if (problem.weight_addresses == nullptr) {
        InvalidArgument("b must have ", problem.l, " weight addresses; got none; pass them");
      }
      for (int64_t i = 0; i < problem.l; ++i) {
        CheckAddress("each of b's arrays", problem.weight_addresses[i], 16);
      }
      break;
  }
}

// One CTA per tile would depend on the offsets, which only the device knows: persistent CTAs, no
// more of them than there can be tiles.
int64_t Clusters(const StreamCall& call, const ForwardProblem& problem) {
  const Kernel& kernel = call.kernel();
  const int64_t rows = int64_t{kernel.tile.m} * kernel.cluster.m;
  const int64_t columns = kernel.tile.n;
  const int64_t tiles =
      (CeilDiv(problem.m, rows) + problem.groups + 1) * CeilDiv(problem.n, columns);
  return std::min(tiles, call.FittingClusters(problem.overlap_margin));
}

// Writes the L tensor maps of B to scratch, ahead of the forward kernel on the same stream.
void EnqueuePrologue(const StreamCall& call, const ForwardProblem& problem,
                     const FieldValues& call_values) {
  const Kernel& prologue = Prologue(problem.weights, call.where());
  const int64_t batch = problem.weights == Weights::kTuple
                            ? static_cast<int64_t>(prologue.AddressCount())
                            : problem.l;
  FieldValues values = call_values;
  for (int64_t first = 0; first < problem.l; first += batch) {
    const int64_t count = std::min(batch, problem.l - first);
    values.first = static_cast<int32_t>(first);
    values.count = static_cast<int32_t>(count);
    if (problem.weights == Weights::kTuple) values.addresses = problem.weight_addresses + first;
    call.Enqueue(prologue, CeilDiv(count, prologue.threads), values);
  }
}

FieldValues Values(const StreamCall& call, const ForwardProblem& problem) {
  const Kernel& kernel = call.kernel();
  const Driver& driver = call.driver();
  const Where& where = call.where();
  FieldValues values(problem);
  const bool cut = kernel.Takes(DIM_LOAD_ROWS);
  Encode(driver, cut ? ViewRaggedA(problem) : ViewA(problem), *kernel.FindMap(MAP_A), where,
         &values.map_a);
  values.load_rows = static_cast<int32_t>(problem.m + 1);
  Encode(driver, ViewB(problem), *kernel.FindMap(MAP_B), where, &values.map_b);
  if (const MapSpec* map_d = kernel.FindMap(MAP_D)) {
    const uint32_t box_rows = map_d->box[1];
    Encode(driver, ViewRaggedD(problem, box_rows), *map_d, where, &values.map_d);
    values.d_rows = static_cast<int32_t>(problem.m + box_rows);
  }
  if (const MapSpec* map_c = kernel.FindMap(MAP_C)) {
    Encode(driver, ViewRaggedC(problem, map_c->box[1]), *map_c, where, &values.map_c);
  }
  values.maps = problem.scratch;
  values.pointers = problem.b;
  if (problem.dynamic) values.counter = problem.scratch + problem.MapsBytes();
  values.prob = problem.prob;
  values.bias = problem.bias;
  values.type_bias = problem.bias_element;
  values.type_c = problem.c_element;
  values.type_d = problem.d_element;
  return values;
}

}  // namespace

void LoadForward(const CallKernels& kernels, Weights weights, CUstream stream) {
  const StreamCall call(kernels, stream);
  call.Load(call.kernel());
  if (weights != Weights::kDense) call.Load(Prologue(weights, call.where()));
}

void LaunchForward(const CallKernels& kernels, const ForwardProblem& problem, CUstream stream) {
  if (problem.m == 0 || problem.n == 0) return;  // D has no elements
  CheckForwardProblem(problem);
  const StreamCall call(kernels, stream);
  CheckForwardKernel(call.kernel(), problem);
  const int64_t clusters = Clusters(call, problem);
  const FieldValues values = Values(call, problem);
  call.ResetCounter(values.counter);
  if (problem.weights != Weights::kDense) EnqueuePrologue(call, problem, values);
  call.Enqueue(call.kernel(), clusters, values);
  call.Count();
}

}  // namespace jgg
