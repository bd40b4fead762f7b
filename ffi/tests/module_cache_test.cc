// Where and how often kernels are loaded.

#include "module_cache.h"

#include <thread>

#include "check.h"
#include "fake_driver.h"
#include "launch.h"
#include "problems.h"

namespace jgg {
namespace {

TEST(LoadedOncePerContext) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  const CUstream sibling = fake.AddStream(stream);
  for (int i = 0; i < 3; ++i) LoadForward(DenseKernels(), Weights::kDense, i ? sibling : stream);
  CHECK_EQ(fake.loads.size(), 1u);
  CHECK_EQ(fake.loads[0].cubin, "sm90_dense_bk_bf16_plain");
  LaunchForward(DenseKernels(), DenseProblem(64, 64, 64, 2), stream);
  LaunchForward(DenseKernels(), DenseProblem(64, 64, 64, 2), sibling);
  CHECK_EQ(fake.loads.size(), 1u);
  CHECK_EQ(fake.calls["cuFuncLoad"], 1);
  CHECK_EQ(ContextDepth(), 0u);
}

TEST(ProloguesLoadWithTheirMode) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(10, 0);
  LoadForward(PointerKernels(), Weights::kPointers, stream);
  CHECK_EQ(fake.loads.size(), 2u);
  CHECK_EQ(fake.loads.at(1).cubin, "sm100_maps_from_memory");
  LoadForward(PointerKernels(), Weights::kTuple, stream);
  CHECK_EQ(fake.loads.size(), 3u);
  CHECK_EQ(fake.loads.at(2).cubin, "sm100_maps_by_value");
}

TEST(EachDeviceHasItsOwn) {
  FakeDriver fake;
  const CUstream first = fake.AddDevice(9, 0), second = fake.AddDevice(9, 0);
  const CUstream blackwell = fake.AddDevice(10, 0);
  for (CUstream stream : {first, second, blackwell}) {
    LoadForward(DenseKernels(), Weights::kDense, stream);
  }
  CHECK_EQ(fake.loads.size(), 3u);
  for (CUstream stream : {second, blackwell, first}) {
    fake.launched.clear();
    LaunchForward(DenseKernels(), DenseProblem(64, 64, 64, 2), stream);
    // The stand-in refuses a function of another context.
    CHECK_EQ(fake.launched.at(0).context, fake.ContextOf(stream));
    CHECK_EQ(fake.launched.at(0).stream, stream);
  }
  CHECK_EQ(fake.loads.at(2).cubin, "sm100_dense_bk_bf16_plain");
}

TEST(RacingThreads) {
  constexpr int kThreads = 8;
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  fake.load_barrier = kThreads;  // all of them are in the load at once
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([stream] {
      LoadForward(DenseKernels(), Weights::kDense, stream);
      LaunchForward(DenseKernels(), DenseProblem(64, 64, 64, 2), stream);
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(fake.loads.size(), size_t{kThreads});
  CHECK_EQ(fake.live_modules.size(), 1u);  // the losers unloaded theirs
  CHECK_EQ(fake.calls["cuModuleUnload"], kThreads - 1);
  CHECK_EQ(fake.launched.size(), size_t{kThreads});
}

TEST(ExecuteNeverLoads) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  const std::string error =
      check::Thrown([&] { LaunchForward(DenseKernels(), DenseProblem(64, 64, 64, 2), stream); });
  CHECK_CONTAINS(error, "not loaded");
  CHECK_CONTAINS(error, "kernel sm90_dense_bk_bf16_plain");
  CHECK_CONTAINS(error, "register the handler with all its stages");
  LoadForward(PointerKernels(), Weights::kPointers, stream);
  ForwardProblem tuple = PointerProblem(64, 64, 64, 1);
  tuple.weights = Weights::kTuple;
  tuple.weight_addresses = &kB;
  CHECK_CONTAINS(check::Thrown([&] { LaunchForward(PointerKernels(), tuple, stream); }),
                 "kernel sm90_maps_by_value");
  CHECK_EQ(fake.loads.size(), 2u);
  CHECK_EQ(fake.launched.size(), 0u);
}

TEST(LayoutMismatch) {
  for (int extra : {0, 1}) {
    FakeDriver fake;
    const CUstream stream = fake.AddDevice(9, 0);
    fake.extra_params = extra;
    fake.second_param_shift = extra ? 0 : 8;
    const std::string error =
        check::Thrown([&] { LoadForward(DenseKernels(), Weights::kDense, stream); });
    CHECK_CONTAINS(error, extra ? "more than the table's 8 parameters"
                                : "parameter 1 is at offset 136 with 128 bytes in the cubin");
    CHECK_CONTAINS(error, "sm90_dense_bk_bf16_plain");
    CHECK_CONTAINS(error, "rebuild");
    CHECK(fake.live_modules.empty());
  }
}

TEST(PaddingBeforeTheFirstParameterIsNoMismatch) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  fake.param_padding = 48;
  LoadForward(DenseKernels(), Weights::kDense, stream);
  CHECK_EQ(fake.live_modules.size(), 1u);
}

TEST(NoClusterFits) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  fake.max_clusters = 0;
  const std::string error =
      check::Thrown([&] { LoadForward(DenseKernels(), Weights::kDense, stream); });
  CHECK_CONTAINS(error, "no cluster of 2 CTAs with 200000 bytes");
  CHECK(fake.live_modules.empty());
}

}  // namespace
}  // namespace jgg

TEST_MAIN
