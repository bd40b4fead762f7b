#include "launch.h"

#include <algorithm>
#include <atomic>
#include <limits>

#include "error.h"
#include "launch_config.h"
#include "module_cache.h"
#include "parameters.h"
#include "tensor_map.h"

namespace jgg {
namespace {

// The kernels count in int32, and a tile may reach past the end of an extent.
constexpr int64_t kExtentLimit = std::numeric_limits<int32_t>::max() - 1024;

std::atomic<bool> counting{false};
std::atomic<int64_t> launches{0};
std::atomic<int64_t> captured{0};

const Kernel* FindForward(std::string_view name, int32_t arch) {
  if (name.empty()) return nullptr;
  const Kernel* kernel = FindKernel(name);
  if (kernel == nullptr || kernel->kind != FORWARD || kernel->arch != arch) {
    FailedPrecondition("this build has no forward kernel '", name, "' for sm_", arch,
                       ": the program was lowered for another build; trace it again with the "
                       "installed jax_grouped_gemm");
  }
  return kernel;
}

const Kernel& Prologue(Weights weights, const Where& where) {
  const Kind kind = weights == Weights::kTuple ? MAPS_BY_VALUE : MAPS_FROM_MEMORY;
  const Kernel* prologue = FindPrologue(where.kernel->arch, kind);
  if (prologue == nullptr) {
    FailedPrecondition("this build has no prologue that writes tensor maps; ", where.Describe(),
                       "; rebuild the library");
  }
  return *prologue;
}

void CheckAddress(const char* name, Address address, uint64_t alignment) {
  if (address == 0) InvalidArgument(name, " must be a device address; got null; pass the operand");
  if (address % alignment != 0) {
    InvalidArgument(name, " must be aligned to ", alignment, " bytes; got address 0x", std::hex,
                    address, "; pass a buffer that starts at an aligned address");
  }
}

// An operand that may be missing has both a dtype and an address, or neither.
void CheckOptional(const char* name, Address address, Element element, uint64_t alignment) {
  if (element != NONE) {
    CheckAddress(name, address, alignment);
  } else if (address != 0) {
    InvalidArgument(name, " must be null where ", name, "_dtype is missing; got address 0x",
                    std::hex, address, "; pass both, or neither");
  }
}

void CheckExtent(const char* name, int64_t extent, int64_t multiple) {
  if (extent < 1 || extent > kExtentLimit) {
    InvalidArgument(name, " must be between 1 and ", kExtentLimit, "; got ", extent,
                    extent < 1 ? "; an empty product needs no launch" : "; split the operand");
  }
  if (extent % multiple != 0) {
    InvalidArgument(name, " must be a multiple of ", multiple, " (16-byte rows); got ", extent,
                    "; pad the operands to ", (extent + multiple - 1) / multiple * multiple);
  }
}

// A kernel that does not fit the problem would compute something else, silently.
void CheckKernel(const Kernel& kernel, const Problem& problem) {
  auto mismatch = [&](const char* what) {
    InvalidArgument("kernel ", kernel.name, " does not ", what,
                    "; name the kernel that config.py picks for this call");
  };
  if (kernel.b_major != problem.b_major) mismatch("read b in this b_major");
  auto writes = [](Element of_kernel, Element of_call) {
    return of_kernel == ANY16 ? of_call == BF16 || of_call == F16 : of_kernel == of_call;
  };
  if (!writes(kernel.d_element, problem.d_element)) mismatch("write d in this dtype");
  if (kernel.c_element == NONE && problem.c_element != NONE) mismatch("write c");
  if (kernel.c_element != NONE && problem.c_element == NONE) mismatch("leave c out");
  if (!writes(kernel.c_element, problem.c_element)) mismatch("write c in this dtype");
  if (kernel.Takes(PTR_MAPS) != (problem.weights != Weights::kDense)) {
    mismatch("take weights in this form");
  }
  if (problem.alpha != 0 && !kernel.Takes(PTR_ALPHA)) mismatch("scale by alpha");
  if (problem.prob != 0 && !kernel.Takes(PTR_PROB)) mismatch("scale by prob");
  if (problem.bias != 0 && !kernel.Takes(PTR_BIAS)) mismatch("add bias");
  // Only kernels with C do without: there, whether prob scales the product or the bias is decided
  // at run time.
  if (problem.bias == 0 && kernel.Takes(PTR_BIAS) && kernel.c_element == NONE) {
    mismatch("leave bias out");
  }
  if (problem.dynamic && !kernel.Takes(PTR_COUNTER)) mismatch("schedule its tiles dynamically");
}

void CheckProblem(const Problem& problem) {
  CheckExtent("m", problem.m, 1);
  CheckExtent("n", problem.n, 8);
  CheckExtent("k", problem.k, 8);
  CheckExtent("l", problem.l, 1);
  CheckAddress("a", problem.a, 16);
  CheckAddress("offsets", problem.offsets, 4);
  if (problem.alpha != 0) CheckAddress("alpha", problem.alpha, 4);
  if (problem.prob != 0) CheckAddress("prob", problem.prob, 4);
  CheckOptional("bias", problem.bias, problem.bias_element, ElementBytes(problem.bias_element));
  CheckAddress("d", problem.d, 16);
  CheckOptional("c", problem.c, problem.c_element, 16);
  if (problem.ScratchBytes() != 0) CheckAddress("scratch", problem.scratch, 128);
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

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One CTA per tile would depend on the offsets, which only the device knows: persistent CTAs, no
// more of them than there can be tiles.
int64_t Clusters(const Problem& problem, int max_clusters, const Where& where) {
  const Kernel& kernel = *where.kernel;
  const int64_t cluster = int64_t{kernel.cluster.m} * kernel.cluster.n;
  const int64_t limit = (max_clusters - 1) * cluster;  // one cluster must remain
  if (problem.overlap_margin < 0 || problem.overlap_margin > limit) {
    InvalidArgument("overlap_margin must be between 0 and ", limit, " SMs, where the device runs ",
                    max_clusters, " clusters of ", cluster, " CTAs at once; got ",
                    problem.overlap_margin, "; ", where.Describe(),
                    "; pass 0 to use every SM, or a number in that range");
  }
  const int64_t fit = (max_clusters * cluster - problem.overlap_margin) / cluster;
  const int64_t rows = int64_t{kernel.tile.m} * kernel.cluster.m;
  const int64_t columns = int64_t{kernel.tile.n} * kernel.cluster.n;
  const int64_t tiles = (CeilDiv(problem.m, rows) + problem.l + 1) * CeilDiv(problem.n, columns);
  return std::min(tiles, fit);
}

void Enqueue(const Driver& driver, const Kernel& kernel, int64_t clusters,
             const FieldValues& values, CUstream stream, Where where) {
  where.kernel = &kernel;
  const LoadedKernel& loaded = Modules().Get(where);
  Parameters parameters(kernel, values);
  const LaunchConfig launch(kernel, clusters, stream);
  Check(driver,
        driver.cuLaunchKernelEx_(&launch.config, loaded.function, parameters.pointers(), nullptr),
        "cuLaunchKernelEx", where);
}

// Writes the L tensor maps of B to scratch, ahead of the forward kernel on the same stream.
void EnqueuePrologue(const Driver& driver, const Problem& problem, const FieldValues& call_values,
                     CUstream stream, const Where& where) {
  const Kernel& prologue = Prologue(problem.weights, where);
  const int64_t batch = problem.weights == Weights::kTuple
                            ? static_cast<int64_t>(prologue.AddressCount())
                            : problem.l;
  FieldValues values = call_values;
  for (int64_t first = 0; first < problem.l; first += batch) {
    const int64_t count = std::min(batch, problem.l - first);
    values.first = static_cast<int32_t>(first);
    values.count = static_cast<int32_t>(count);
    if (problem.weights == Weights::kTuple) values.addresses = problem.weight_addresses + first;
    Enqueue(driver, prologue, CeilDiv(count, prologue.threads), values, stream, where);
  }
}

FieldValues Values(const Driver& driver, const Problem& problem, const Where& where) {
  const Kernel& kernel = *where.kernel;
  FieldValues values;
  Encode(driver, ViewA(problem), *kernel.FindMap(MAP_A), where, &values.map_a);
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
  values.offsets = problem.offsets;
  if (problem.dynamic) values.counter = problem.scratch + problem.MapsBytes();
  values.alpha = problem.alpha;
  values.prob = problem.prob;
  values.bias = problem.bias;
  values.m = static_cast<int32_t>(problem.m);
  values.n = static_cast<int32_t>(problem.n);
  values.k = static_cast<int32_t>(problem.k);
  values.l = static_cast<int32_t>(problem.l);
  values.type_bias = problem.bias_element;
  values.type_c = problem.c_element;
  values.type_d = problem.d_element;
  return values;
}

bool IsCapturing(const Driver& driver, CUstream stream, const Where& where) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  Check(driver, driver.cuStreamIsCapturing_(stream, &status), "cuStreamIsCapturing", where);
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

}  // namespace

ForwardKernels FindForwardKernels(std::string_view sm90, std::string_view sm100) {
  if (sm90.empty() && sm100.empty()) {
    InvalidArgument(
        "sm90 or sm100 must name a forward kernel; got neither; name the kernel that config.py "
        "picks for this call");
  }
  return {FindForward(sm90, 90), FindForward(sm100, 100)};
}

void LoadForward(const ForwardKernels& kernels, Weights weights, CUstream stream) {
  const Driver& driver = GetDriver();
  Where where{kernels};
  const ContextScope scope(driver, stream, where);
  where.device = &Modules().DeviceOf(driver, scope, where);
  auto load = [&](const Kernel& kernel) {
    where.kernel = &kernel;
    if (Modules().Find(where) != nullptr) return;
    if (IsCapturing(driver, stream, where)) {
      FailedPrecondition("kernels cannot be loaded while the stream is being captured; ",
                         where.Describe(), "; make the call once before the capture");
    }
    Modules().Load(driver, where);
  };
  load(kernels.For(*where.device));
  if (weights != Weights::kDense) load(Prologue(weights, where));
}

void LaunchForward(const ForwardKernels& kernels, const Problem& problem, CUstream stream) {
  if (problem.m == 0 || problem.n == 0) return;  // D has no elements
  CheckProblem(problem);
  const Driver& driver = GetDriver();
  Where where{kernels};
  const ContextScope scope(driver, stream, where);
  where.device = &Modules().DeviceOf(driver, scope, where);
  const Kernel& kernel = kernels.For(*where.device);
  where.kernel = &kernel;
  CheckKernel(kernel, problem);
  const int max_clusters = Modules().Get(where).max_clusters;

  const int64_t clusters = Clusters(problem, max_clusters, where);
  const FieldValues values = Values(driver, problem, where);
  if (problem.dynamic) {
    // Part of the call, and of a graph that captures it: a replay starts from zero again.
    Check(driver, driver.cuMemsetD32Async_(values.counter, 0, 1, stream), "cuMemsetD32Async",
          where);
  }
  if (problem.weights != Weights::kDense) {
    EnqueuePrologue(driver, problem, values, stream, where);
  }
  Enqueue(driver, kernel, clusters, values, stream, where);

  if (counting.load(std::memory_order_relaxed)) {
    launches += 1;
    captured += IsCapturing(driver, stream, where);
  }
}

void CountLaunches(bool on) {
  counting = on;
  launches = 0;
  captured = 0;
}

LaunchCounts GetLaunchCounts() { return {launches, captured}; }

}  // namespace jgg
