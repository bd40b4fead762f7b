#include "launch.h"

#include <atomic>
#include <limits>

#include "error.h"
#include "launch_config.h"
#include "launch_steps.h"
#include "module_cache.h"

namespace jgg {
namespace {

// The kernels count in int32, and a tile may reach past the end of an extent.
constexpr int64_t kExtentLimit = std::numeric_limits<int32_t>::max() - 1024;

std::atomic<bool> counting{false};
std::atomic<int64_t> launches{0};
std::atomic<int64_t> captured{0};

const char* NameOf(Kind kind) {
  switch (kind) {
    case FORWARD:
      return "forward";
    case WGRAD:
      return "wgrad";
    case MAPS_FROM_MEMORY:
    case MAPS_BY_VALUE:
      break;
  }
  return "prologue";
}

const Kernel* FindNamed(Kind kind, std::string_view name, int32_t arch) {
  if (name.empty()) return nullptr;
  const Kernel* kernel = FindKernel(name);
  if (kernel == nullptr || kernel->kind != kind || kernel->arch != arch) {
    FailedPrecondition("this build has no ", NameOf(kind), " kernel '", name, "' for sm_", arch,
                       ": the program was lowered for another build; trace it again with the "
                       "installed jax_grouped_gemm");
  }
  return kernel;
}

void CheckExtent(const char* name, int64_t extent, int64_t multiple) {
  if (extent < 1 || extent > kExtentLimit) {
    InvalidArgument(
        name, " must be between 1 and ", kExtentLimit, "; got ", extent,
        extent < 1 ? "; an empty product is zeros, and needs no launch" : "; split the operand");
  }
  if (extent % multiple != 0) {
    InvalidArgument(name, " must be a multiple of ", multiple, " (16-byte rows); got ", extent,
                    "; pad the operands to ", (extent + multiple - 1) / multiple * multiple);
  }
}

}  // namespace

CallKernels FindKernels(Kind kind, std::string_view sm90, std::string_view sm100) {
  if (sm90.empty() && sm100.empty()) {
    InvalidArgument("sm90 or sm100 must name a ", NameOf(kind),
                    " kernel; got neither; name the kernel that config.py picks for this call");
  }
  return {FindNamed(kind, sm90, 90), FindNamed(kind, sm100, 100)};
}

// --- a call on its stream -----------------------------------------------------------------------

StreamCall::StreamCall(const CallKernels& kernels, CUstream stream)
    : driver_(GetDriver()), stream_(stream), where_{kernels}, scope_(driver_, stream, where_) {
  where_.device = &Modules().DeviceOf(driver_, scope_, where_);
  where_.kernel = &kernels.For(*where_.device);
}

void StreamCall::Load(const Kernel& kernel) const {
  Where where = where_;
  where.kernel = &kernel;
  if (Modules().Find(where) != nullptr) return;
  if (IsCapturing()) {
    FailedPrecondition("kernels cannot be loaded while the stream is being captured; ",
                       where.Describe(), "; make the call once before the capture");
  }
  Modules().Load(driver_, where);
}

int64_t StreamCall::FittingClusters(int64_t overlap_margin) const {
  const int64_t max_clusters = Modules().Get(where_).max_clusters;
  const int64_t cluster = int64_t{kernel().cluster.m} * kernel().cluster.n;
  const int64_t limit = (max_clusters - 1) * cluster;  // one cluster must remain
  if (overlap_margin < 0 || overlap_margin > limit) {
    InvalidArgument("overlap_margin must be between 0 and ", limit, " SMs, where the device runs ",
                    max_clusters, " clusters of ", cluster, " CTAs at once; got ", overlap_margin,
                    "; ", where_.Describe(), "; pass 0 to use every SM, or a number in that range");
  }
  return (max_clusters * cluster - overlap_margin) / cluster;
}

void StreamCall::ResetCounter(Address counter) const {
  if (counter == 0) return;
  Check(driver_, driver_.cuMemsetD32Async_(counter, 0, 1, stream_), "cuMemsetD32Async", where_);
}

void StreamCall::Enqueue(const Kernel& kernel, int64_t clusters, const FieldValues& values) const {
  Where where = where_;
  where.kernel = &kernel;
  const LoadedKernel& loaded = Modules().Get(where);
  Parameters parameters(kernel, values);
  const LaunchConfig launch(kernel, clusters, stream_);
  Check(driver_,
        driver_.cuLaunchKernelEx_(&launch.config, loaded.function, parameters.pointers(), nullptr),
        "cuLaunchKernelEx", where);
}

void StreamCall::Count() const {
  if (!counting.load(std::memory_order_relaxed)) return;
  launches += 1;
  captured += IsCapturing();
}

bool StreamCall::IsCapturing() const {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  Check(driver_, driver_.cuStreamIsCapturing_(stream_, &status), "cuStreamIsCapturing", where_);
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

void CountLaunches(bool on) {
  counting = on;
  launches = 0;
  captured = 0;
}

LaunchCounts GetLaunchCounts() { return {launches, captured}; }

// --- checks -------------------------------------------------------------------------------------

void CheckAddress(const char* name, Address address, uint64_t alignment) {
  if (address == 0) InvalidArgument(name, " must be a device address; got null; pass the operand");
  if (address % alignment != 0) {
    InvalidArgument(name, " must be aligned to ", alignment, " bytes; got address 0x", std::hex,
                    address, "; pass a buffer that starts at an aligned address");
  }
}

void CheckOptional(const char* name, Address address, Element element, uint64_t alignment) {
  if (element != NONE) {
    CheckAddress(name, address, alignment);
  } else if (address != 0) {
    InvalidArgument(name, " must be null where ", name, "_dtype is missing; got address 0x",
                    std::hex, address, "; pass both, or neither");
  }
}

void CheckProblem(const Problem& problem, int64_t scratch_bytes) {
  CheckExtent("m", problem.m, 1);
  CheckExtent("n", problem.n, 8);
  CheckExtent("k", problem.k, 8);
  CheckExtent("l", problem.l, 1);
  CheckExtent("groups", problem.groups, 1);
  if (problem.experts != 0) {
    CheckAddress("experts", problem.experts, 4);
  } else if (problem.groups != problem.l) {
    InvalidArgument("groups must be l = ", problem.l, " where experts is null; got ",
                    problem.groups, "; pass the experts of the groups, or one group per expert");
  }
  CheckAddress("offsets", problem.offsets, 4);
  if (problem.alpha != 0) CheckAddress("alpha", problem.alpha, 4);
  CheckAddress("d", problem.d, 16);
  if (scratch_bytes != 0) CheckAddress("scratch", problem.scratch, 128);
}

void CheckKernel(const Kernel& kernel, const Problem& problem) {
  if (!Writes(kernel.d_element, problem.d_element)) DoesNotFit(kernel, "write d in this dtype");
  // Group g is expert g's in a kernel without.
  if (problem.experts != 0 && !kernel.Takes(PTR_EXPERTS)) {
    DoesNotFit(kernel, "map groups to experts");
  }
  if (problem.alpha != 0 && !kernel.Takes(PTR_ALPHA)) DoesNotFit(kernel, "scale by alpha");
  if (problem.dynamic && !kernel.Takes(PTR_COUNTER)) {
    DoesNotFit(kernel, "schedule its tiles dynamically");
  }
}

void DoesNotFit(const Kernel& kernel, const char* what) {
  InvalidArgument("kernel ", kernel.name, " does not ", what,
                  "; name the kernel that config.py picks for this call");
}

bool Writes(Element of_kernel, Element of_call) {
  return of_kernel == ANY16 ? of_call == BF16 || of_call == F16 : of_kernel == of_call;
}

}  // namespace jgg
