#include "tensor_map.h"

#include "error.h"

namespace jgg {
namespace {

CUtensorMapDataType DataType(Element element) {
  switch (element) {
    case F16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case F32:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    default:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  }
}

CUtensorMapSwizzle Swizzle(uint32_t bytes) {
  switch (bytes) {
    case 32:
      return CU_TENSOR_MAP_SWIZZLE_32B;
    case 64:
      return CU_TENSOR_MAP_SWIZZLE_64B;
    case 128:
      return CU_TENSOR_MAP_SWIZZLE_128B;
    default:
      return CU_TENSOR_MAP_SWIZZLE_NONE;
  }
}

uint64_t U(int64_t extent) { return static_cast<uint64_t>(extent); }

TensorView ViewRagged(const char* name, Element element, Address base, const ForwardProblem& p,
                      uint32_t box_rows) {
  const uint64_t row_bytes = U(p.n) * ElementBytes(element);
  return {name,
          element,
          base - box_rows * row_bytes,
          3,
          {U(p.n), box_rows, U(p.m) + box_rows},
          {row_bytes, row_bytes}};
}

TensorView ViewRaggedLoad(const char* name, Address base, int64_t columns, int64_t rows) {
  constexpr uint64_t kSpan = uint64_t{1} << 30;
  const uint64_t row_bytes = U(columns) * ElementBytes(BF16);
  // kSpan times the last stride is -kSpan * row_bytes, modulo 2^64: it takes back what the second
  // dimension adds.
  return {name,
          BF16,
          base,
          4,
          {U(columns), kSpan, U(rows) + 1, kSpan + 1},
          {row_bytes, row_bytes, (uint64_t{1} << 34) - row_bytes}};
}

}  // namespace

TensorView ViewA(const ForwardProblem& p) {
  return {"a", BF16, p.a, 2, {U(p.k), U(p.m)}, {U(p.k) * 2}};
}

TensorView ViewRaggedA(const ForwardProblem& p) { return ViewRaggedLoad("a", p.a, p.k, p.m); }

TensorView ViewB(const ForwardProblem& p) {
  const bool dense = p.weights == Weights::kDense;
  const uint64_t inner = U(p.b_major == K_MAJOR ? p.k : p.n);
  const uint64_t outer = U(p.b_major == K_MAJOR ? p.n : p.k);
  return {"b",
          BF16,
          dense ? p.b : p.a,
          3,
          {inner, outer, dense ? U(p.l) : 1},
          {inner * 2, inner * outer * 2}};
}

TensorView ViewRaggedD(const ForwardProblem& p, uint32_t box_rows) {
  return ViewRagged("d", p.d_element, p.d, p, box_rows);
}

TensorView ViewRaggedC(const ForwardProblem& p, uint32_t box_rows) {
  return ViewRagged("c", p.c_element, p.c, p, box_rows);
}

TensorView ViewX(const WgradProblem& p) { return ViewRaggedLoad("x", p.x, p.n, p.m); }

TensorView ViewY(const WgradProblem& p) { return ViewRaggedLoad("y", p.y, p.k, p.m); }

TensorView ViewGradients(const WgradProblem& p) {
  const uint64_t row_bytes = U(p.k) * ElementBytes(p.d_element);
  return {"d", p.d_element, p.d, 3, {U(p.k), U(p.n), U(p.l)}, {row_bytes, U(p.n) * row_bytes}};
}

void Encode(const Driver& driver, const TensorView& view, const MapSpec& spec, const Where& where,
            CUtensorMap* map) {
  constexpr uint64_t kStrideLimit = uint64_t{1} << 40;
  for (uint32_t i = 0; i + 1 < view.rank; ++i) {
    if (view.strides[i] >= kStrideLimit) {
      InvalidArgument(view.name, ": the copy engine needs strides below 2^40 bytes; got ",
                      view.strides[i], "; split n or k");
    }
  }
  constexpr uint32_t kElementStrides[5] = {1, 1, 1, 1, 1};
  Check(driver,
        driver.cuTensorMapEncodeTiled_(
            map, DataType(view.element), view.rank, reinterpret_cast<void*>(view.base), view.dims,
            view.strides, spec.box, kElementStrides, CU_TENSOR_MAP_INTERLEAVE_NONE,
            Swizzle(spec.swizzle_bytes), CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        "cuTensorMapEncodeTiled", where);
}

}  // namespace jgg
