// The custom call "jax_grouped_gemm_wgrad": one function per stage. Operands, results and
// attributes are listed in docs/architecture.md.

#include <string_view>

#include "c_api.h"
#include "launch.h"
#include "xla_border.h"

namespace jgg {

namespace ffi = xla::ffi;

struct WgradAttributes {
  std::string_view sm90;
  std::string_view sm100;
  bool has_experts;
  bool has_alpha;
  bool accumulate;
  bool dynamic;
  int64_t overlap_margin;
  std::string_view build_id;
};

namespace {

WgradProblem Decode(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                    const WgradAttributes& attributes) {
  ExpectCount("operands", args.size(),
              3 + attributes.has_experts + attributes.has_alpha + attributes.accumulate);
  ExpectCount("results", rets.size(), 1 + attributes.dynamic);

  const ffi::AnyBuffer x = Operand(args, 0);
  const ffi::AnyBuffer y = Operand(args, 1);
  const ffi::AnyBuffer offsets = Operand(args, 2);
  const ffi::AnyBuffer d = ResultOf(rets, 0);
  // Without experts, group g is expert g's.
  const char* per_group = attributes.has_experts ? "(G,)" : "(L,)";
  if (x.dimensions().size() != 2) Mismatch(x, "x", "BF16 (M, N)");
  if (y.dimensions().size() != 2) Mismatch(y, "y", "BF16 (M, K)");
  if (offsets.dimensions().size() != 1) Mismatch(offsets, "offsets", Text("S32 ", per_group));
  if (d.dimensions().size() != 3) Mismatch(d, "d", "BF16 or F32 (L, N, K)");

  WgradProblem p;
  p.accumulate = attributes.accumulate;
  p.dynamic = attributes.dynamic;
  p.overlap_margin = attributes.overlap_margin;
  p.m = x.dimensions()[0];
  p.n = x.dimensions()[1];
  p.k = y.dimensions()[1];
  p.l = d.dimensions()[0];
  p.groups = attributes.has_experts ? offsets.dimensions()[0] : p.l;

  p.x = Expect(x, "x", ffi::BF16, "(M, N)", {p.m, p.n});
  p.y = Expect(y, "y", ffi::BF16, "(M, K)", {p.m, p.k});
  p.d = ExpectOneOf(d, "d", {ffi::BF16, ffi::F32}, "(L, N, K)", {p.l, p.n, p.k}, &p.d_element);
  p.offsets = Expect(offsets, "offsets", ffi::S32, per_group, {p.groups});
  size_t next = 3;
  if (attributes.has_experts) {
    p.experts = Expect(Operand(args, next++), "experts", ffi::S32, per_group, {p.groups});
  }
  if (attributes.has_alpha) {
    p.alpha = Expect(Operand(args, next++), "alpha", ffi::F32, per_group, {p.groups});
  }
  if (attributes.accumulate) {
    const Address total =
        Expect(Operand(args, next), "total", ffi::F32, "(L, N, K)", {p.l, p.n, p.k});
    // The kernel adds to D in place, and is told of no other buffer.
    if (total != p.d) {
      InvalidArgument(
          "total must be d's own buffer, which the kernel adds to: the call must be "
          "aliased; got total at 0x",
          std::hex, total, " and d at 0x", p.d,
          "; call it through jax_grouped_gemm, which aliases them");
    }
  }
  if (p.dynamic) {
    p.scratch = Expect(ResultOf(rets, 1), "scratch", ffi::U8, "(128,)", {p.ScratchBytes()});
  }
  return p;
}

CallKernels KernelsOf(const WgradAttributes& attributes) {
  return FindKernels(WGRAD, attributes.sm90, attributes.sm100);
}

ffi::Error Instantiate(ffi::RemainingArgs, ffi::RemainingRets, WgradAttributes attributes) {
  return AtBorder([&] {
    ExpectBuild(attributes.build_id);
    KernelsOf(attributes);
  });
}

ffi::Error Initialize(CUstream stream, ffi::RemainingArgs, ffi::RemainingRets,
                      WgradAttributes attributes) {
  return AtBorder([&] { LoadWgrad(KernelsOf(attributes), stream); });
}

ffi::Error Execute(CUstream stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   WgradAttributes attributes) {
  return AtBorder(
      [&] { LaunchWgrad(KernelsOf(attributes), Decode(args, rets, attributes), stream); });
}

}  // namespace
}  // namespace jgg

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    jgg::WgradAttributes, xla::ffi::StructMember<std::string_view>("sm90"),
    xla::ffi::StructMember<std::string_view>("sm100"), xla::ffi::StructMember<bool>("has_experts"),
    xla::ffi::StructMember<bool>("has_alpha"), xla::ffi::StructMember<bool>("accumulate"),
    xla::ffi::StructMember<bool>("dynamic"), xla::ffi::StructMember<int64_t>("overlap_margin"),
    xla::ffi::StructMember<std::string_view>("build_id"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jgg_wgrad_instantiate, jgg::Instantiate,
                              jgg::BindInstantiate<jgg::WgradAttributes>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jgg_wgrad_initialize, jgg::Initialize,
    (jgg::BindOnStream<jgg::WgradAttributes, xla::ffi::ExecutionStage::kInitialize>()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jgg_wgrad_execute, jgg::Execute,
    (jgg::BindOnStream<jgg::WgradAttributes, xla::ffi::ExecutionStage::kExecute>()),
    {xla::ffi::Traits::kCmdBufferCompatible});
