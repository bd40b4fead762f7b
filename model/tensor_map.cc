#include "tensor_map.h"

#include <cstring>

#include "fault.h"

namespace model {

// Words of 32 bits: 0, 1 address; 2 flags; 3 to 6 strides / 16, their upper 4 bits in word 7; 8 to
// 12 extents - 1; bytes 55 to 59 box - 1.
namespace {
constexpr int kRankBit = 4, kTypeBit = 7, kSwizzleBit = 13, kPromotionBit = 17;
// The CuTe DSL's host code encodes maps itself, and sets bit 1 always, bit 21 where a tensor has
// 128 KiB or more. Its maps mean the same as the driver's without.
constexpr uint32_t kFlagsOfTheDsl = 1u << 1 | 1u << 21;
constexpr uint32_t kKnownFlags =
    7u << kRankBit | 15u << kTypeBit | 3u << kSwizzleBit | 3u << kPromotionBit | kFlagsOfTheDsl;
constexpr int kBoxByte = 55;
}  // namespace

TensorMap DecodeTensorMap(const uint8_t* bytes) {
  uint32_t words[16];
  std::memcpy(words, bytes, sizeof(words));
  TensorMap map{};
  map.address = words[0] | uint64_t{words[1]} << 32;
  if (words[2] & ~kKnownFlags) Raise("unknown", "a tensor map with flags 0x", std::hex, words[2]);
  map.rank = (words[2] >> kRankBit & 7) + 1;
  map.type = static_cast<ElementType>(words[2] >> kTypeBit & 15);
  switch (map.type) {
    case ElementType::kFloat16:
    case ElementType::kBfloat16:
      map.element_bytes = 2;
      break;
    case ElementType::kFloat32:
      map.element_bytes = 4;
      break;
    default:
      Raise("unknown", "a tensor map of element type ", words[2] >> kTypeBit & 15);
  }
  map.swizzle = words[2] >> kSwizzleBit & 3;
  map.l2_promotion = words[2] >> kPromotionBit & 3;
  map.strides[0] = map.element_bytes;
  for (int i = 1; i < map.rank; ++i) {
    map.strides[i] = (words[2 + i] | uint64_t{words[7] >> (4 * (i - 1)) & 15} << 32) << 4;
  }
  for (int i = 0; i < map.rank; ++i) {
    map.dims[i] = uint64_t{words[8 + i]} + 1;
    map.box[i] = bytes[kBoxByte + i] + 1u;
  }
  return map;
}

void EncodeTensorMap(const TensorMap& map, uint8_t* bytes) {
  uint32_t words[kMapBytes / 4] = {};
  words[0] = static_cast<uint32_t>(map.address);
  words[1] = static_cast<uint32_t>(map.address >> 32);
  words[2] = (map.rank - 1u) << kRankBit | static_cast<uint32_t>(map.type) << kTypeBit |
             static_cast<uint32_t>(map.swizzle) << kSwizzleBit |
             static_cast<uint32_t>(map.l2_promotion) << kPromotionBit;
  for (int i = 1; i < map.rank; ++i) {
    words[2 + i] = static_cast<uint32_t>(map.strides[i] >> 4);
    words[7] |= static_cast<uint32_t>(map.strides[i] >> 36 & 15) << (4 * (i - 1));
  }
  for (int i = 0; i < map.rank; ++i) words[8 + i] = static_cast<uint32_t>(map.dims[i] - 1);
  std::memcpy(bytes, words, sizeof(words));
  for (int i = 0; i < map.rank; ++i) bytes[kBoxByte + i] = static_cast<uint8_t>(map.box[i] - 1);
}

}  // namespace model
