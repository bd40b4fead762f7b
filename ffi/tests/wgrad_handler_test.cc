// The custom call for weight gradients as XLA makes it: stages, operands, attributes, traits.

#include "c_api.h"
#include "check.h"
#include "fake_driver.h"
#include "fake_xla.h"
#include "problems.h"

namespace jgg {
namespace {

// M = 1000, N = 512, K = 264, L = 3.
FakeCall MinimalCall(CUstream stream) {
  return {stream,
          {{kBf16, {1000, 512}, kX}, {kBf16, {1000, 264}, kY}, {kS32, {3}, kOffsets}},
          {{kBf16, {3, 512, 264}, kD}},
          {{"sm90", std::string("sm90_wgrad_bf16")},
           {"sm100", std::string("sm100_wgrad_bf16")},
           {"has_experts", false},
           {"has_alpha", false},
           {"accumulate", false},
           {"dynamic", false},
           {"overlap_margin", int64_t{0}},
           {"build_id", std::string("fake-build")}}};
}

// With every operand and result: experts of G = 5 groups, alpha, total; d, scratch.
FakeCall FullCall(CUstream stream) {
  FakeCall call = MinimalCall(stream);
  call.attributes["sm90"] = std::string("sm90_wgrad_f32_accumulate");
  call.attributes["sm100"] = std::string("");
  for (const char* flag : {"has_experts", "has_alpha", "accumulate", "dynamic"}) {
    call.attributes[flag] = true;
  }
  call.args[2].dims = {5};
  call.args.push_back({kS32, {5}, kExperts});
  call.args.push_back({kF32, {5}, kAlpha});
  call.args.push_back({kF32, {3, 512, 264}, kD});
  call.rets = {{kF32, {3, 512, 264}, kD}, {kU8, {128}, kScratch}};
  return call;
}

// A call before execute has its attributes; operands may be missing or not there yet.
std::string Initialize(FakeCall call) {
  call.args.clear();
  call.rets.clear();
  return Call(jgg_wgrad_initialize, kInitialize, call);
}

TEST(ACallThroughItsStages) {
  FakeDriver fake;
  const FakeCall call = MinimalCall(fake.AddDevice(9, 0));
  CHECK_EQ(Call(jgg_wgrad_instantiate, kInstantiate, call), "");
  CHECK_EQ(fake.calls.size(), 0u);  // instantiate touches no device
  CHECK_EQ(Initialize(call), "");
  CHECK_EQ(fake.loads.size(), 1u);
  fake.capturing.insert(call.stream);
  CHECK_EQ(Call(jgg_wgrad_execute, kExecute, call), "");
  CHECK(fake.illegal_under_capture.empty());
  CHECK_EQ(fake.loads.size(), 1u);
  const Launched& launch = fake.launched.at(0);
  CHECK_EQ(launch.stream, call.stream);
  CHECK_EQ(launch.Value<int32_t>(DIM_M), 1000);
  CHECK_EQ(launch.Value<int32_t>(DIM_N), 512);
  CHECK_EQ(launch.Value<int32_t>(DIM_K), 264);
  CHECK_EQ(launch.Value<int32_t>(DIM_L), 3);
  CHECK_EQ(launch.Value<int32_t>(DIM_GROUPS), 3);
  CHECK_EQ(launch.Value<uint64_t>(PTR_OFFSETS), kOffsets);
  CHECK_EQ(launch.Value<uint64_t>(PTR_EXPERTS), 0u);
  CHECK_EQ(launch.Value<uint64_t>(PTR_ALPHA), 0u);
  CHECK_EQ(launch.Value<uint64_t>(PTR_COUNTER), 0u);
  CHECK_EQ(fake.MapIn(launch, MAP_A).address, kX);
  CHECK_EQ(fake.MapIn(launch, MAP_B).address, kY);
  CHECK_EQ(fake.MapIn(launch, MAP_D).address, kD);
}

TEST(ACallWithEveryOperand) {
  FakeDriver fake;
  const FakeCall call = FullCall(fake.AddDevice(9, 0));
  CHECK_EQ(Call(jgg_wgrad_instantiate, kInstantiate, call), "");
  CHECK_EQ(Initialize(call), "");
  CHECK_EQ(Call(jgg_wgrad_execute, kExecute, call), "");
  const Launched& launch = fake.launched.at(0);
  CHECK_EQ(launch.kernel->name, "sm90_wgrad_f32_accumulate");
  CHECK_EQ(launch.Value<int32_t>(DIM_L), 3);
  CHECK_EQ(launch.Value<int32_t>(DIM_GROUPS), 5);
  CHECK_EQ(launch.Value<uint64_t>(PTR_EXPERTS), kExperts);
  CHECK_EQ(launch.Value<uint64_t>(PTR_ALPHA), kAlpha);
  CHECK_EQ(launch.Value<uint64_t>(PTR_COUNTER), kScratch);
  CHECK_EQ(fake.memsets.at(0).address, kScratch);
  CHECK_EQ(fake.MapIn(launch, MAP_D).type, CU_TENSOR_MAP_DATA_TYPE_FLOAT32);
}

TEST(MarginOfACall) {
  FakeDriver fake;
  fake.max_clusters = 10;
  FakeCall call = MinimalCall(fake.AddDevice(9, 0));
  CHECK_EQ(Initialize(call), "");
  call.attributes["overlap_margin"] = int64_t{7};
  CHECK_EQ(Call(jgg_wgrad_execute, kExecute, call), "");
  CHECK_EQ(fake.launched.at(0).grid, 12u);
}

TEST(EmptyResults) {
  FakeDriver fake;
  FakeCall call = MinimalCall(fake.AddDevice(9, 0));
  call.args[1] = {kBf16, {1000, 0}, 0};
  call.rets[0] = {kBf16, {3, 512, 0}, 0};
  CHECK_EQ(Call(jgg_wgrad_execute, kExecute, call), "");
  CHECK_EQ(fake.launched.size(), 0u);
}

TEST(InstantiateRefuses) {
  const std::vector<Refusal> cases = {
      {[](FakeCall& c) { c.attributes["build_id"] = std::string("older-build"); },
       "9: jax_grouped_gemm: the program was lowered for build older-build, this library is build "
       "fake-build"},
      {[](FakeCall& c) { c.attributes["sm90"] = std::string("sm90_gone"); },
       "9: jax_grouped_gemm: this build has no wgrad kernel 'sm90_gone' for sm_90: the program "
       "was"},
      {[](FakeCall& c) { c.attributes["sm100"] = std::string("sm100_dense_bk_bf16_plain"); },
       "no wgrad kernel 'sm100_dense_bk_bf16_plain' for sm_100"},
      {[](FakeCall& c) {
         c.attributes["sm90"] = std::string("");
         c.attributes["sm100"] = std::string("");
       },
       "sm90 or sm100 must name a wgrad kernel; got neither"},
      {[](FakeCall& c) { c.attributes["accumulate"] = int64_t{1}; }, "Wrong scalar data type"},
      {[](FakeCall& c) { c.attributes.erase("dynamic"); }, "Wrong number of attributes"},
  };
  CheckRefusals(jgg_wgrad_instantiate, kInstantiate, MinimalCall(nullptr), cases);
}

TEST(InitializeRefuses) {
  FakeDriver fake;
  FakeCall call = FullCall(fake.AddDevice(10, 0));
  CHECK_CONTAINS(Initialize(call), "9: jax_grouped_gemm: the program has no kernel for device 0");
  call = MinimalCall(fake.AddDevice(9, 0));
  fake.capturing.insert(call.stream);
  CHECK_CONTAINS(Initialize(call), "kernels cannot be loaded while the stream is being captured");
  fake.capturing.clear();
  fake.FailAt("cuModuleLoadData");
  CHECK_CONTAINS(Initialize(call), "13: jax_grouped_gemm: cuModuleLoadData failed");
}

TEST(WrongOperands) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  CHECK_EQ(Initialize(MinimalCall(stream)), "");
  CHECK_EQ(Initialize(FullCall(stream)), "");
  const std::vector<Refusal> minimal = {
      {[](FakeCall& c) { c.args[0].dtype = kF32; },
       "3: jax_grouped_gemm: x must be BF16 (M, N) = (1000, 512); got F32 (1000, 512)"},
      {[](FakeCall& c) { c.args[0].dims = {1000}; }, "x must be BF16 (M, N); got BF16 (1000)"},
      {[](FakeCall& c) { c.args[1].dtype = kF16; },
       "y must be BF16 (M, K) = (1000, 264); got F16 (1000, 264)"},
      {[](FakeCall& c) { c.args[1].dims = {999, 264}; },
       "y must be BF16 (M, K) = (1000, 264); got BF16 (999, 264)"},
      {[](FakeCall& c) { c.args[1].dims = {264}; }, "y must be BF16 (M, K); got BF16 (264)"},
      {[](FakeCall& c) { c.args[2].dtype = kS64; }, "offsets must be S32 (L,) = (3); got S64 (3)"},
      {[](FakeCall& c) { c.args[2].dims = {4}; }, "offsets must be S32 (L,) = (3); got S32 (4)"},
      {[](FakeCall& c) { c.args[2].dims = {1, 3}; }, "offsets must be S32 (L,); got S32 (1, 3)"},
      {[](FakeCall& c) { c.rets[0].dims = {3, 264, 512}; },
       "d must be BF16 (L, N, K) = (3, 512, 264); got BF16 (3, 264, 512)"},
      {[](FakeCall& c) { c.rets[0].dims = {512, 264}; },
       "d must be BF16 or F32 (L, N, K); got BF16 (512, 264)"},
      {[](FakeCall& c) { c.rets[0].dtype = kF16; },
       "d must be BF16 or F32 (L, N, K); got F16 (3, 512, 264)"},
      {[](FakeCall& c) { c.rets[0].dtype = kF32; }, "does not write d in this dtype"},
      {[](FakeCall& c) { c.args.pop_back(); }, "must have 3 operands for its attributes; got 2"},
      {[](FakeCall& c) { c.args.push_back(c.args[0]); }, "must have 3 operands"},
      {[](FakeCall& c) { c.attributes["has_alpha"] = true; }, "must have 4 operands"},
      {[](FakeCall& c) { c.rets.clear(); }, "must have 1 results for its attributes; got 0"},
      {[](FakeCall& c) { c.attributes["dynamic"] = true; }, "must have 2 results"},
  };
  CheckRefusals(jgg_wgrad_execute, kExecute, MinimalCall(stream), minimal);
  const std::vector<Refusal> full = {
      {[](FakeCall& c) { c.args[2].dtype = kS64; }, "offsets must be S32 (G,) = (5); got S64 (5)"},
      {[](FakeCall& c) { c.args[3].dims = {3}; }, "experts must be S32 (G,) = (5); got S32 (3)"},
      {[](FakeCall& c) { c.args[3].dtype = kF32; }, "experts must be S32 (G,) = (5); got F32 (5)"},
      {[](FakeCall& c) { c.args[4].dims = {3}; }, "alpha must be F32 (G,) = (5); got F32 (3)"},
      {[](FakeCall& c) { c.args[5].dtype = kBf16; },
       "total must be F32 (L, N, K) = (3, 512, 264); got BF16 (3, 512, 264)"},
      {[](FakeCall& c) { c.args[5].dims = {512, 264}; },
       "total must be F32 (L, N, K) = (3, 512, 264); got F32 (512, 264)"},
      {[](FakeCall& c) { c.args[5].address = kC; },
       "3: jax_grouped_gemm: total must be d's own buffer, which the kernel adds to: the call must "
       "be aliased; got total at 0x7f9000000100 and d at 0x7f8000000100; call it through"},
      {[](FakeCall& c) { c.args.pop_back(); }, "must have 6 operands for its attributes; got 5"},
      {[](FakeCall& c) {
         c.attributes["accumulate"] = false;
         c.args.pop_back();
       },
       "kernel sm90_wgrad_f32_accumulate does not overwrite d"},
      {[](FakeCall& c) { c.rets[0].dtype = kBf16; }, "does not write d in this dtype"},
      {[](FakeCall& c) { c.rets[1].dims = {512}; },
       "scratch must be U8 (128,) = (128); got U8 (512)"},
      {[](FakeCall& c) { c.attributes["dynamic"] = false; }, "must have 1 results"},
  };
  CheckRefusals(jgg_wgrad_execute, kExecute, FullCall(stream), full);
  CHECK_EQ(fake.launched.size(), 0u);
}

TEST(Traits) {
  CHECK_EQ(MetadataOf(jgg_wgrad_execute).traits, XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE);
}

}  // namespace
}  // namespace jgg

TEST_MAIN
