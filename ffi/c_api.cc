#include "c_api.h"

#include <string>
#include <string_view>

#include "driver.h"
#include "error.h"
#include "kernel_table.h"
#include "launch.h"

namespace jgg {
namespace {

std::string_view View(const char* text) { return text == nullptr ? "" : text; }

ForwardProblem ProblemOf(const jgg_call& call) {
  ForwardProblem problem;
  problem.weights = ParseWeights(View(call.weights));
  problem.b_major = ParseMajor(View(call.b_major));
  problem.d_element = ParseElement("d_dtype", View(call.d_dtype));
  if (call.c_dtype != nullptr) problem.c_element = ParseElement("c_dtype", call.c_dtype);
  if (call.bias_dtype != nullptr) {
    problem.bias_element = ParseElement("bias_dtype", call.bias_dtype);
  }
  if (call.dynamic != 0 && call.dynamic != 1) {
    InvalidArgument("dynamic must be 0 or 1; got ", call.dynamic,
                    "; pass 1 for a dynamic schedule");
  }
  problem.dynamic = call.dynamic == 1;
  problem.overlap_margin = call.overlap_margin;
  problem.m = call.m;
  problem.n = call.n;
  problem.k = call.k;
  problem.l = call.l;
  problem.groups = call.groups;
  problem.a = call.a;
  problem.b = call.b;
  problem.weight_addresses = call.weight_addresses;
  problem.offsets = call.offsets;
  problem.experts = call.experts;
  problem.alpha = call.alpha;
  problem.prob = call.prob;
  problem.bias = call.bias;
  problem.d = call.d;
  problem.c = call.c;
  problem.scratch = call.scratch;
  return problem;
}

void Forward(const jgg_call* call) {
  if (call == nullptr || call->struct_size != sizeof(jgg_call)) {
    InvalidArgument("jgg_call must have struct_size ", sizeof(jgg_call), "; got ",
                    call == nullptr ? 0 : call->struct_size,
                    "; use the header of the installed library");
  }
  const CallKernels kernels = FindKernels(FORWARD, View(call->sm90), View(call->sm100));
  const ForwardProblem problem = ProblemOf(*call);
  const auto stream = reinterpret_cast<CUstream>(call->stream);
  LoadForward(kernels, problem.weights, stream);
  LaunchForward(kernels, problem, stream);
}

}  // namespace
}  // namespace jgg

const char* jgg_build_id() { return jgg::BuildId().data(); }

int jgg_kernel_count() { return static_cast<int>(jgg::Kernels().size()); }

const char* jgg_kernel_name(int index) {
  const auto& kernels = jgg::Kernels();
  if (index < 0 || static_cast<size_t>(index) >= kernels.size()) return nullptr;
  return kernels[index].name.data();
}

const char* jgg_driver_status() { return jgg::DriverStatus(); }

const char* jgg_forward(const jgg_call* call) {
  thread_local std::string error;
  try {
    jgg::Forward(call);
    return nullptr;
  } catch (const std::exception& e) {
    error = e.what();
    return error.c_str();
  }
}

void jgg_count_launches(int on) { jgg::CountLaunches(on != 0); }

void jgg_launch_counts(int64_t* launches, int64_t* captured) {
  const jgg::LaunchCounts counts = jgg::GetLaunchCounts();
  *launches = counts.launches;
  *captured = counts.captured;
}
