// Checks everything that a tensor map was encoded from.

#ifndef JGG_TESTS_CHECK_MAP_H_
#define JGG_TESTS_CHECK_MAP_H_

#include "check.h"
#include "fake_driver.h"

namespace jgg {

using U64 = std::vector<uint64_t>;
using U32 = std::vector<uint32_t>;

inline void CheckMap(const EncodedMap& map, CUtensorMapDataType type, uint64_t address,
                     const U64& dims, const U64& strides, const U32& box,
                     CUtensorMapSwizzle swizzle) {
  CHECK_EQ(map.type, type);
  CHECK_EQ(map.address, address);
  CHECK_EQ(map.dims, dims);
  CHECK_EQ(map.strides, strides);
  CHECK_EQ(map.box, box);
  CHECK_EQ(map.swizzle, swizzle);
  CHECK_EQ(map.element_strides, U32(dims.size(), 1));
  CHECK_EQ(map.interleave, CU_TENSOR_MAP_INTERLEAVE_NONE);
  CHECK_EQ(map.l2_promotion, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  CHECK_EQ(map.fill, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

}  // namespace jgg

#endif  // JGG_TESTS_CHECK_MAP_H_
