// Numbers as the machine rounds them.

#ifndef MODEL_FLOATS_H_
#define MODEL_FLOATS_H_

#include <cmath>
#include <cstdint>
#include <cstring>

namespace model {

inline uint32_t BitsOfFloat(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
inline float FloatOfBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Single-precision instructions return this NaN; seen on an H200, PTX ISA 9.7.3 leaves it open.
inline float Canonical(float value) { return std::isnan(value) ? FloatOfBits(0x7fffffff) : value; }

inline float FromBfloat16(uint16_t bits) { return FloatOfBits(uint32_t{bits} << 16); }

// To nearest, ties to even.
inline uint16_t ToBfloat16(float value) {
  if (std::isnan(value)) return 0x7fff;
  const uint32_t bits = BitsOfFloat(value);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline uint16_t ToFloat16(float value) {
  const uint32_t bits = BitsOfFloat(value);
  const uint16_t sign = bits >> 16 & 0x8000;
  if (std::isnan(value)) return 0x7fff;
  const float magnitude = std::fabs(value);
  if (magnitude >= 65520.0f) return sign | 0x7c00;
  if (magnitude < 0x1p-14f) {  // subnormal: a multiple of 2^-24
    return static_cast<uint16_t>(sign |
                                 static_cast<uint16_t>(std::nearbyintf(magnitude * 0x1p24f)));
  }
  const uint32_t rounded = (bits & 0x7fffffff) + 0xfff + (bits >> 13 & 1);
  return static_cast<uint16_t>(sign | ((rounded >> 13) - (112 << 10)));
}

inline float FromFloat16(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16, exponent = bits >> 10 & 31,
                 fraction = bits & 0x3ff;
  if (exponent == 31) return FloatOfBits(fraction ? 0x7fffffff : sign | 0x7f800000);
  if (exponent == 0) return std::copysign(fraction * 0x1p-24f, FloatOfBits(sign));
  return FloatOfBits(sign | (exponent + 112) << 23 | fraction << 13);
}

}  // namespace model

#endif  // MODEL_FLOATS_H_
