// Tensor maps: the 128 bytes that the driver writes and the copy engine reads.
//
// The layout is not documented. It was read off what a driver (580) wrote for 400 random maps; the
// test of the layout on a GPU compares again. The last 64 bytes hold nothing.

#ifndef MODEL_TENSOR_MAP_H_
#define MODEL_TENSOR_MAP_H_

#include <cstdint>

namespace model {

enum class ElementType {
  kFloat16 = 6,
  kFloat32 = 7,
  kBfloat16 = 10
};  // as they stand in the bytes

struct TensorMap {
  uint64_t address;
  int rank;  // 1 to 5; dimensions innermost first
  ElementType type;
  uint32_t element_bytes;
  int swizzle;       // 0: none, 1: 32 bytes, 2: 64, 3: 128
  int l2_promotion;  // a hint
  uint64_t dims[5];
  uint64_t strides[5];  // bytes; strides[0] is the element's size
  uint32_t box[5];
};

constexpr int kMapBytes = 128;

// Throws Fault("unknown") for what is not modelled.
TensorMap DecodeTensorMap(const uint8_t* bytes);
void EncodeTensorMap(const TensorMap& map, uint8_t* bytes);

// PTX ISA 5.5.7, swizzling modes: 16-byte chunks change places within a row, by address bits.
inline uint32_t Swizzled(uint32_t address, int mode) {
  return address ^ ((address >> 7 & ((1u << mode) - 1)) << 4);
}

}  // namespace model

#endif  // MODEL_TENSOR_MAP_H_
