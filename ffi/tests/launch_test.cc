// What is encoded, packed and launched for a call.

#include "launch.h"

#include <algorithm>

#include "check.h"
#include "fake_driver.h"
#include "problems.h"

namespace jgg {

namespace {

using U64 = std::vector<uint64_t>;
using U32 = std::vector<uint32_t>;

void Run(const ForwardKernels& kernels, const Problem& problem, CUstream stream) {
  LoadForward(kernels, problem.weights, stream);
  LaunchForward(kernels, problem, stream);
}

void CheckMap(const EncodedMap& map, CUtensorMapDataType type, uint64_t address, const U64& dims,
              const U64& strides, const U32& box, CUtensorMapSwizzle swizzle) {
  CHECK_EQ(map.type, type);
  CHECK_EQ(map.address, address);
  CHECK_EQ(map.dims, dims);
  CHECK_EQ(map.strides, strides);
  CHECK_EQ(map.box, box);
  CHECK_EQ(map.swizzle, swizzle);
  CHECK_EQ(map.element_strides, U32(dims.size(), 1));
  CHECK_EQ(map.interleave, CU_TENSOR_MAP_INTERLEAVE_NONE);
  CHECK_EQ(map.l2_promotion, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
  CHECK_EQ(map.fill, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

TEST(DenseKMajor) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  const Problem p = DenseProblem(1000, 512, 256, 8);
  Run(DenseKernels(), p, stream);

  CHECK_EQ(fake.launched.size(), 1u);
  const Launched& launch = fake.launched[0];
  CHECK_EQ(launch.kernel->name, "sm90_dense_bk_bf16_plain");
  CHECK_EQ(launch.stream, stream);
  CHECK_EQ(launch.block, 384u);
  CHECK_EQ(launch.shared_bytes, 200000u);
  CHECK_EQ(launch.cluster, 2u);
  // (ceil(1000 / 256) + 8 + 1) * ceil(512 / 256) = 26 clusters of 2.
  CHECK_EQ(launch.grid, 52u);
  CheckMap(fake.MapIn(launch, MAP_A), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kA, {256, 1000}, {512},
           {64, 128}, CU_TENSOR_MAP_SWIZZLE_128B);
  CheckMap(fake.MapIn(launch, MAP_B), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kB, {256, 512, 8},
           {512, 262144}, {64, 256, 1}, CU_TENSOR_MAP_SWIZZLE_128B);
  CheckMap(fake.MapIn(launch, MAP_D), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kD - 64 * 1024,
           {512, 64, 1064}, {1024, 1024}, {64, 64, 1}, CU_TENSOR_MAP_SWIZZLE_128B);
  CHECK_EQ(launch.Value<uint64_t>(PTR_OFFSETS), kOffsets);
  CHECK_EQ(launch.Value<int32_t>(DIM_M), 1000);
  CHECK_EQ(launch.Value<int32_t>(DIM_N), 512);
  CHECK_EQ(launch.Value<int32_t>(DIM_K), 256);
  CHECK_EQ(launch.Value<int32_t>(DIM_L), 8);
  CHECK_EQ(launch.Value<int32_t>(DIM_ONE), 1);
  CHECK_EQ(launch.Value<int32_t>(DIM_D_ROWS), 1064);
  // The rest of a map is packed too, not only its first bytes.
  CHECK_EQ(launch.At<unsigned char>(127), 0xee);
  CHECK_EQ(launch.At<unsigned char>(383), 0xee);
}

TEST(DenseNMajorScaledF32) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  Problem p = DenseProblem(640, 384, 128, 4);
  p.b_major = N_MAJOR;
  p.d_element = F32;
  p.alpha = kAlpha;
  Run(ScaledKernels(), p, stream);

  const Launched& launch = fake.launched.at(0);
  CheckMap(fake.MapIn(launch, MAP_B), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kB, {384, 128, 4},
           {768, 98304}, {64, 64, 1}, CU_TENSOR_MAP_SWIZZLE_128B);
  CheckMap(fake.MapIn(launch, MAP_D), CU_TENSOR_MAP_DATA_TYPE_FLOAT32, kD - 32 * 1536,
           {384, 32, 672}, {1536, 1536}, {32, 32, 1}, CU_TENSOR_MAP_SWIZZLE_64B);
  CHECK_EQ(launch.Value<uint64_t>(PTR_ALPHA), kAlpha);
  CHECK_EQ(launch.Value<uint64_t>(PTR_PROB), 0u);

  p.alpha = 0;
  p.prob = kProb;
  LaunchForward(ScaledKernels(), p, stream);
  CHECK_EQ(fake.launched.at(1).Value<uint64_t>(PTR_ALPHA), 0u);
  CHECK_EQ(fake.launched.at(1).Value<uint64_t>(PTR_PROB), kProb);
}

TEST(Pointers) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  const Problem p = PointerProblem(512, 256, 128, 300);
  Run(PointerKernels(), p, stream);

  CHECK_EQ(fake.launched.size(), 2u);
  const Launched& prologue = fake.launched.at(0);
  CHECK_EQ(prologue.kernel->name, "sm90_maps_from_memory");
  CHECK_EQ(prologue.grid, 3u);  // 300 experts, 128 threads
  CHECK_EQ(prologue.block, 128u);
  CHECK_EQ(prologue.cluster, 1u);
  CHECK_EQ(prologue.stream, stream);
  // The template: one expert, the forward kernel's box, A's address for the time being.
  CheckMap(fake.MapIn(prologue, MAP_B), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kA, {128, 256, 1},
           {256, 65536}, {64, 128, 1}, CU_TENSOR_MAP_SWIZZLE_128B);
  CHECK_EQ(prologue.Value<uint64_t>(PTR_MAPS), kScratch);
  CHECK_EQ(prologue.Value<uint64_t>(PTR_POINTERS), kB);
  CHECK_EQ(prologue.Value<int32_t>(FIRST), 0);
  CHECK_EQ(prologue.Value<int32_t>(COUNT), 300);

  const Launched& forward = fake.launched.at(1);
  CHECK_EQ(forward.kernel->name, "sm90_pointers_bk_f16_scaled");
  CHECK_EQ(forward.Value<uint64_t>(PTR_MAPS), kScratch);
  CHECK_EQ(forward.cluster, 1u);
  CHECK_EQ(forward.grid, 60u);  // the device holds no more
  CHECK_EQ(fake.MapIn(forward, MAP_D).type, CU_TENSOR_MAP_DATA_TYPE_FLOAT16);
  CHECK_EQ(fake.MapIn(forward, MAP_D).swizzle, CU_TENSOR_MAP_SWIZZLE_32B);
}

TEST(TupleInBatches) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  for (int64_t l : {1, 3, 4, 5, 8, 11}) {
    fake.launched.clear();
    std::vector<Address> addresses(l);
    for (int64_t i = 0; i < l; ++i) addresses[i] = kB + 4096 * i;
    Problem p = PointerProblem(512, 256, 128, l);
    p.weights = Weights::kTuple;
    p.b = 0;
    p.weight_addresses = addresses.data();
    Run(PointerKernels(), p, stream);

    // The fake prologue takes 4 addresses.
    const int64_t batches = (l + 3) / 4;
    CHECK_EQ(static_cast<int64_t>(fake.launched.size()), batches + 1);
    for (int64_t batch = 0; batch < batches; ++batch) {
      const Launched& prologue = fake.launched.at(batch);
      CHECK_EQ(prologue.kernel->name, "sm90_maps_by_value");
      CHECK_EQ(prologue.Value<int32_t>(FIRST), 4 * batch);
      CHECK_EQ(prologue.Value<int32_t>(COUNT), std::min<int64_t>(4, l - 4 * batch));
      CHECK_EQ(prologue.Value<uint64_t>(PTR_MAPS), kScratch);
      CHECK_EQ(prologue.grid, 1u);
      for (int64_t i = 0; i < 4; ++i) {
        const int64_t expert = 4 * batch + i;
        CHECK_EQ(prologue.Value<uint64_t>(ADDRESS(i)), expert < l ? addresses[expert] : 0u);
      }
    }
    CHECK_EQ(fake.launched.back().kernel->kind, FORWARD);
  }
}

TEST(Blackwell) {
  for (int minor : {0, 3}) {
    FakeDriver fake;
    const CUstream stream = fake.AddDevice(10, minor);
    Run(DenseKernels(), DenseProblem(1000, 512, 256, 8), stream);
    const Launched& launch = fake.launched.at(0);
    CHECK_EQ(launch.kernel->name, "sm100_dense_bk_bf16_plain");
    CHECK_EQ(launch.cluster, 4u);
    CHECK_EQ(launch.grid, 4u * (4 + 9) * 1);  // a cluster covers 256 rows and 512 columns
    CHECK_EQ(fake.MapIn(launch, MAP_D).swizzle, CU_TENSOR_MAP_SWIZZLE_NONE);
  }
}

// Every shape against the formulas of docs/architecture.md, with arithmetic of its own.
TEST(ManyShapes) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  LoadForward(DenseKernels(), Weights::kDense, stream);
  uint64_t random = 1;
  auto pick = [&random](uint64_t limit) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    return static_cast<int64_t>((random >> 33) % limit) + 1;
  };
  for (int i = 0; i < 2000; ++i) {
    const int64_t m = pick(i % 2 ? 300 : 2'000'000'000), n = 8 * pick(4000), k = 8 * pick(4000);
    const int64_t l = pick(i % 3 ? 16 : 1024);
    fake.encoded.clear();
    fake.launched.clear();
    LaunchForward(DenseKernels(), DenseProblem(m, n, k, l), stream);
    const Launched& launch = fake.launched.at(0);
    const __int128 ld = 2 * n, tiles = ((__int128{m} + 255) / 256 + l + 1) * ((n + 255) / 256);
    CHECK_EQ(launch.grid, tiles < 60 ? unsigned(2 * tiles) : 120u);
    CHECK_EQ(fake.MapIn(launch, MAP_A).dims, (U64{uint64_t(k), uint64_t(m)}));
    CHECK_EQ(fake.MapIn(launch, MAP_B).strides, (U64{2 * uint64_t(k), 2 * uint64_t(n) * k}));
    const EncodedMap& d = fake.MapIn(launch, MAP_D);
    CHECK_EQ(d.dims, (U64{uint64_t(n), 64, uint64_t(m) + 64}));
    // Row r is at x + y = r + X: the last row's address, seen from the shifted base.
    CHECK(__int128{d.address} + (m - 1 + 64) * ld == kD + (m - 1) * ld);
    CHECK_EQ(launch.Value<int32_t>(DIM_D_ROWS), m + 64);
  }
}

TEST(SizesPastThirtyTwoBits) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  Run(DenseKernels(), DenseProblem(1'000'000, 14336, 4096, 64), stream);
  const Launched& launch = fake.launched.at(0);
  CHECK_EQ(fake.MapIn(launch, MAP_B).dims, (U64{4096, 14336, 64}));
  CHECK_EQ(fake.MapIn(launch, MAP_B).strides, (U64{8192, 117440512}));
  // M * N = 1.4e10 elements.
  CHECK_EQ(fake.MapIn(launch, MAP_D).dims, (U64{14336, 64, 1'000'064}));
  CHECK_EQ(launch.grid, 120u);
}

TEST(NothingToDo) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  LaunchForward(DenseKernels(), DenseProblem(0, 512, 256, 8), stream);
  LaunchForward(DenseKernels(), DenseProblem(1000, 0, 256, 8), stream);
  CHECK_EQ(fake.calls.size(), 0u);
}

TEST(CaptureIsCounted) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  const CUstream other = fake.AddStream(stream);
  const Problem p = DenseProblem(1000, 512, 256, 8);
  LoadForward(DenseKernels(), Weights::kDense, stream);
  fake.calls.clear();
  LaunchForward(DenseKernels(), p, stream);  // not counted: off
  CHECK_EQ(fake.calls["cuStreamIsCapturing"], 0);
  CountLaunches(true);
  LaunchForward(DenseKernels(), p, stream);
  fake.capturing.insert(other);
  LaunchForward(DenseKernels(), p, other);
  LaunchForward(DenseKernels(), p, other);
  CHECK_EQ(GetLaunchCounts().launches, 3);
  CHECK_EQ(GetLaunchCounts().captured, 2);
  CHECK(fake.illegal_under_capture.empty());
  CountLaunches(false);
  CHECK_EQ(GetLaunchCounts().launches, 0);
}

TEST(TableIsConsistent) {
  for (const Kernel& kernel : Kernels()) CHECK_EQ(Inconsistency(kernel), "");
  Kernel kernel = *FindKernel("sm90_dense_bk_bf16_plain");
  kernel.fields[3].size = 4;
  CHECK_CONTAINS(Inconsistency(kernel), "has 4 bytes, expected 8");
  kernel = *FindKernel("sm90_dense_bk_bf16_plain");
  kernel.fields[3].offset = 412;
  CHECK_CONTAINS(Inconsistency(kernel), "lies outside the parameters");
  kernel = *FindKernel("sm90_dense_bk_bf16_plain");
  kernel.param_bytes = 400;
  CHECK_CONTAINS(Inconsistency(kernel), "ends past 400");
  kernel = *FindKernel("sm90_dense_bk_bf16_plain");
  kernel.maps.pop_back();
  CHECK_CONTAINS(Inconsistency(kernel), "no map of rank 3 for field 2");
}

}  // namespace
}  // namespace jgg

TEST_MAIN
