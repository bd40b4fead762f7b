// Every failure says what failed, where, and what to do; and leaves nothing behind.

#include <functional>
#include <limits>

#include "c_api.h"
#include "check.h"
#include "error.h"
#include "fake_driver.h"
#include "launch.h"
#include "problems.h"

namespace jgg {
namespace {

TEST(EveryDriverCallInLoad) {
  for (const char* call :
       {"cuStreamGetCtx", "cuCtxGetId", "cuCtxPushCurrent", "cuCtxGetDevice",
        "cuDeviceGetAttribute", "cuDeviceGetName", "cuModuleLoadData", "cuModuleGetFunction",
        "cuFuncGetParamInfo", "cuFuncSetAttribute", "cuFuncLoad", "cuOccupancyMaxActiveClusters"}) {
    FakeDriver fake;
    const CUstream stream = fake.AddDevice(9, 0, "Fake H200");
    fake.FailAt(call, CUDA_ERROR_UNKNOWN);
    const std::string error =
        check::Thrown([&] { LoadForward(DenseKernels(), Weights::kDense, stream); });
    CHECK_CONTAINS(error, std::string(call) + " failed: CUDA_ERROR_FAKE 999 (as the test wished)");
    CHECK_CONTAINS(error, "kernel sm90_dense_bk_bf16_plain");
    const bool known = fake.calls.count("cuModuleLoadData") != 0;
    CHECK_CONTAINS(error, known ? "device 0 (Fake H200, compute capability 9.0)"
                                : "device of the given stream");
    CHECK(fake.live_modules.empty());
    CHECK_EQ(ContextDepth(), 0u);

    // Nothing half-done stays: the next try loads as if it were the first.
    fake.FailAt("");
    LoadForward(DenseKernels(), Weights::kDense, stream);
    LaunchForward(DenseKernels(), DenseProblem(64, 64, 64, 2), stream);
    CHECK_EQ(fake.live_modules.size(), 1u);
    CHECK_EQ(fake.launched.size(), 1u);
  }
}

TEST(LoadErrorsNameTheCubin) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  fake.FailAt("cuModuleLoadData");
  CHECK_CONTAINS(check::Thrown([&] { LoadForward(DenseKernels(), Weights::kDense, stream); }),
                 "cubin of 25 bytes for sm_90");
}

TEST(EveryDriverCallInExecute) {
  for (const char* call : {"cuStreamGetCtx", "cuCtxGetId", "cuCtxPushCurrent",
                           "cuTensorMapEncodeTiled", "cuLaunchKernelEx", "cuStreamIsCapturing"}) {
    FakeDriver fake;
    const CUstream stream = fake.AddDevice(10, 0, "Fake B200");
    LoadForward(DenseKernels(), Weights::kDense, stream);
    CountLaunches(true);
    fake.FailAt(call);
    const std::string error =
        check::Thrown([&] { LaunchForward(DenseKernels(), DenseProblem(64, 64, 64, 2), stream); });
    CHECK_CONTAINS(error, std::string(call) + " failed: CUDA_ERROR_FAKE");
    CHECK_CONTAINS(error, "sm100_dense_bk_bf16_plain");
    CHECK_CONTAINS(error, "device ");
    CHECK_EQ(ContextDepth(), 0u);
    CountLaunches(false);
  }
}

TEST(PrologueLaunchIsNamed) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  LoadForward(PointerKernels(), Weights::kPointers, stream);
  fake.FailAt("cuLaunchKernelEx");
  const std::string error = check::Thrown(
      [&] { LaunchForward(PointerKernels(), PointerProblem(64, 64, 64, 2), stream); });
  CHECK_CONTAINS(error, "kernel sm90_maps_from_memory");
}

TEST(UnsupportedDevices) {
  for (auto [major, minor] : {std::pair{8, 0}, {8, 9}, {9, 1}, {10, 1}, {11, 0}, {12, 0}}) {
    FakeDriver fake;
    const CUstream stream = fake.AddDevice(major, minor, "Fake Other");
    const std::string error =
        check::Thrown([&] { LoadForward(DenseKernels(), Weights::kDense, stream); });
    CHECK_CONTAINS(error, "Fake Other, compute capability " + std::to_string(major) + "." +
                              std::to_string(minor));
    CHECK_CONTAINS(error, "9.0 (Hopper), 10.0 and 10.3 (Blackwell)");
    CHECK_CONTAINS(error, "implementation=\"reference\"");
    CHECK_EQ(fake.loads.size(), 0u);
  }
}

TEST(Operands) {
  struct Case {
    std::function<void(Problem&)> spoil;
    std::vector<const char*> parts;
  };
  const int64_t limit = std::numeric_limits<int32_t>::max() - 1024;
  const std::vector<Case> cases = {
      {[](Problem& p) { p.a = 0; }, {"a must be a device address; got null"}},
      {[](Problem& p) { p.a += 8; }, {"a must be aligned to 16 bytes", "0x7f0000000108"}},
      {[](Problem& p) { p.b += 2; }, {"b must be aligned to 16 bytes"}},
      {[](Problem& p) { p.b = 0; }, {"b must be a device address"}},
      {[](Problem& p) { p.d += 8; }, {"d must be aligned to 16 bytes"}},
      {[](Problem& p) { p.d = 0; }, {"d must be a device address"}},
      {[](Problem& p) { p.offsets = 0; }, {"offsets must be a device address"}},
      {[](Problem& p) { p.offsets += 2; }, {"offsets must be aligned to 4 bytes"}},
      {[](Problem& p) { p.alpha = 2; }, {"alpha must be aligned to 4 bytes"}},
      {[](Problem& p) { p.prob = 2; }, {"prob must be aligned to 4 bytes"}},
      {[](Problem& p) { p.k = 12; }, {"k must be a multiple of 8", "got 12", "pad", "16"}},
      {[](Problem& p) { p.n = 60; }, {"n must be a multiple of 8", "got 60", "pad", "64"}},
      {[](Problem& p) { p.k = 0; }, {"k must be between 1 and 2147482623; got 0"}},
      {[](Problem& p) { p.l = 0; }, {"l must be between 1 and"}},
      {[](Problem& p) { p.m = -1; }, {"m must be between 1 and", "got -1"}},
      {[=](Problem& p) { p.m = limit + 1; }, {"m must be between 1 and", "2147482624", "split"}},
      {[](Problem& p) { p.n = p.k = int64_t{1} << 20; },
       {"b: the copy engine needs strides", "split"}},
      {[](Problem& p) { p.b_major = N_MAJOR; }, {"does not read b in this b_major"}},
      {[](Problem& p) { p.d_element = F32; }, {"does not write d in this dtype"}},
      {[](Problem& p) { p.alpha = kAlpha; }, {"does not scale by alpha"}},
      {[](Problem& p) { p.prob = kProb; }, {"does not scale by prob"}},
      {[](Problem& p) {
         p.weights = Weights::kPointers;
         p.scratch = kScratch;
       },
       {"does not take weights in this form"}},
  };
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  LoadForward(DenseKernels(), Weights::kDense, stream);
  for (const Case& c : cases) {
    Problem p = DenseProblem(64, 64, 64, 2);
    c.spoil(p);
    const std::string error = check::Thrown([&] { LaunchForward(DenseKernels(), p, stream); });
    for (const char* part : c.parts) CHECK_CONTAINS(error, part);
    CHECK_EQ(ContextDepth(), 0u);
  }
  CHECK_EQ(fake.launched.size(), 0u);
}

TEST(PointerOperands) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  LoadForward(PointerKernels(), Weights::kPointers, stream);
  auto error = [&](const Problem& p) {
    return check::Thrown([&] { LaunchForward(PointerKernels(), p, stream); });
  };
  Problem p = PointerProblem(64, 64, 64, 2);
  p.scratch += 64;
  CHECK_CONTAINS(error(p), "scratch must be aligned to 128 bytes");
  p = PointerProblem(64, 64, 64, 2);
  p.b += 4;
  CHECK_CONTAINS(error(p), "b_ptrs must be aligned to 8 bytes");
  p = PointerProblem(64, 64, 64, 2);
  p.weights = Weights::kTuple;
  CHECK_CONTAINS(error(p), "weight addresses");
  const Address addresses[] = {kB, kB + 8};
  p.weight_addresses = addresses;
  CHECK_CONTAINS(error(p), "b's arrays must be aligned to 16 bytes");
}

TEST(UnknownKernels) {
  CHECK_CONTAINS(check::Thrown([] { FindForwardKernels("sm90_nothing", "sm100_nothing"); }),
                 "no forward kernel 'sm90_nothing' for sm_90");
  CHECK_CONTAINS(check::Thrown([] {
                   FindForwardKernels("sm90_dense_bk_bf16_plain", "sm90_dense_bk_bf16_plain");
                 }),
                 "for sm_100");
  CHECK_CONTAINS(
      check::Thrown([] { FindForwardKernels("sm90_maps_by_value", "sm100_dense_bk_bf16_plain"); }),
      "no forward kernel 'sm90_maps_by_value'");
}

TEST(NoDriver) {
  if (DriverStatus() == nullptr) return;  // this machine has one
  CHECK_CONTAINS(DriverStatus(), "libcuda.so.1");
  CHECK_CONTAINS(check::Thrown([] { GetDriver(); }), "implementation=\"reference\"");
}

jgg_call CCall(CUstream stream) {
  jgg_call call = {};
  call.struct_size = sizeof(call);
  call.sm90 = "sm90_dense_bk_bf16_plain";
  call.sm100 = "sm100_dense_bk_bf16_plain";
  call.weights = "dense";
  call.b_major = "k";
  call.d_dtype = "bfloat16";
  call.m = call.n = call.k = 64;
  call.l = 2;
  call.a = kA;
  call.offsets = kOffsets;
  call.b = kB;
  call.d = kD;
  call.stream = reinterpret_cast<uint64_t>(stream);
  return call;
}

TEST(CEntry) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  jgg_call call = CCall(stream);
  CHECK(jgg_forward(&call) == nullptr);
  CHECK(jgg_forward(&call) == nullptr);
  CHECK_EQ(fake.launched.size(), 2u);
  CHECK_EQ(fake.loads.size(), 1u);

  call.weights = "sparse";
  CHECK_CONTAINS(jgg_forward(&call),
                 "weights must be 'dense', 'pointers' or 'tuple'; got 'sparse'");
  call = CCall(stream);
  call.b_major = nullptr;
  CHECK_CONTAINS(jgg_forward(&call), "b_major must be 'k' or 'n'; got ''");
  call = CCall(stream);
  call.d_dtype = "int8";
  CHECK_CONTAINS(jgg_forward(&call), "d_dtype must be");
  call = CCall(stream);
  call.struct_size = 8;
  CHECK_CONTAINS(jgg_forward(&call), "struct_size");
  CHECK_CONTAINS(jgg_forward(nullptr), "struct_size");
  CHECK_EQ(fake.launched.size(), 2u);
}

TEST(CEntryDoesNotLoadUnderCapture) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  jgg_call call = CCall(stream);
  fake.capturing.insert(stream);
  CHECK_CONTAINS(jgg_forward(&call), "make the call once before the capture");
  CHECK_EQ(fake.loads.size(), 0u);
  fake.capturing.clear();
  CHECK(jgg_forward(&call) == nullptr);
  fake.capturing.insert(stream);
  CHECK(jgg_forward(&call) == nullptr);
  CHECK(fake.illegal_under_capture.empty());
}

}  // namespace
}  // namespace jgg

TEST_MAIN
