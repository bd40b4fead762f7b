// The custom call "jax_grouped_gemm_gather_weights": the reference's way to raw pointers on a CPU.

#include <algorithm>
#include <cstring>

#include "c_api.h"
#include "xla_border.h"

namespace jgg {
namespace {

namespace ffi = xla::ffi;

// b_ptrs: host addresses of L matrices (N, K). ends: S32 (L,) ends of the groups of m rows.
// weights: BF16 (L, N, K), zeros for experts without rows, whose addresses nothing reads, here or
// on a GPU.
ffi::Error GatherWeights(ffi::AnyBuffer b_ptrs, ffi::AnyBuffer ends,
                         ffi::Result<ffi::AnyBuffer> weights, int64_t m) {
  return AtBorder([&] {
    const auto dims = weights->dimensions();
    if (weights->element_type() != ffi::BF16 || dims.size() != 3) {
      Mismatch(*weights, "the result", "BF16 (L, N, K)");
    }
    const auto* addresses = reinterpret_cast<const unsigned char*>(ExpectPointers(b_ptrs, dims[0]));
    const auto* end =
        reinterpret_cast<const int32_t*>(Expect(ends, "offsets", ffi::S32, "(L,)", {dims[0]}));
    const size_t expert_bytes = static_cast<size_t>(dims[1]) * static_cast<size_t>(dims[2]) * 2;
    auto* destination = static_cast<unsigned char*>(weights->untyped_data());
    int64_t rows = 0;  // of the experts so far
    for (int64_t i = 0; i < dims[0]; ++i, destination += expert_bytes) {
      const int64_t last = std::min<int64_t>(end[i], m);
      if (last <= rows) {
        std::memset(destination, 0, expert_bytes);
        continue;
      }
      rows = last;
      Address source = 0;  // the bytes may be unaligned
      std::memcpy(&source, addresses + 8 * i, sizeof(source));
      if (source == 0) {
        InvalidArgument("b_ptrs[", i, "] must be the address of expert ", i,
                        "'s weights; got null; pass an address for every expert that has rows");
      }
      std::memcpy(destination, reinterpret_cast<const void*>(source), expert_bytes);
    }
  });
}

}  // namespace
}  // namespace jgg

XLA_FFI_DEFINE_HANDLER_SYMBOL(jgg_gather_weights, jgg::GatherWeights,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<int64_t>("m"));
