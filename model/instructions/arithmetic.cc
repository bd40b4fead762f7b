// Integer, logic, comparison, data movement between registers, conversion: PTX ISA 9.7.1, 9.7.6
// to 9.7.9.

#include <algorithm>
#include <limits>

#include "../decode.h"
#include "../floats.h"

namespace model {
namespace {

template <typename T>
using Unsigned = std::make_unsigned_t<T>;
template <typename T>
using Wide =
    std::conditional_t<sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>,
                       std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>;

// Wraps around, as the machine does.
template <typename T, typename F>
auto Wrapping(F f) {
  return [f](auto... operands) { return static_cast<T>(f(static_cast<Unsigned<T>>(operands)...)); };
}

template <typename F>
Execute Integer(Decoder& d, F f) {
  return WithInteger(d, d.Next(), [&](auto type) -> Execute {
    using T = typename decltype(type)::type;
    return Lanewise<T>(d.Dest(0), d.Source(1), d.Source(2),
                       [f](T a, T b) { return static_cast<T>(f(a, b)); });
  });
}

INSTRUCTION(Add, "add", "9.7.1.1 add") {
  return Integer(d, [](auto a, auto b) {
    using T = decltype(a);
    return Wrapping<T>([](auto x, auto y) { return x + y; })(a, b);
  });
}

INSTRUCTION(Sub, "sub", "9.7.1.2 sub") {
  return Integer(d, [](auto a, auto b) {
    using T = decltype(a);
    return Wrapping<T>([](auto x, auto y) { return x - y; })(a, b);
  });
}

INSTRUCTION(Min, "min", "9.7.1 min") {
  return Integer(d, [](auto a, auto b) { return std::min(a, b); });
}

INSTRUCTION(Max, "max", "9.7.1 max") {
  return Integer(d, [](auto a, auto b) { return std::max(a, b); });
}

INSTRUCTION(Neg, "neg.s32", "9.7.1 neg") {
  return Lanewise<uint32_t>(d.Dest(0), d.Source(1), [](uint32_t a) { return 0 - a; });
}

INSTRUCTION(Popc, "popc.b32", "9.7.1.14 popc") {
  return Lanewise<uint32_t>(d.Dest(0), d.Source(1),
                            [](uint32_t a) { return uint32_t(__builtin_popcount(a)); });
}

INSTRUCTION(Div, "div.s32", "9.7.1.8 div") {
  return Lanewise<int32_t>(d.Dest(0), d.Source(1), d.Source(2), [](int32_t a, int32_t b) {
    // The machine gives some value; a kernel that relies on it is wrong.
    if (b == 0) Raise("bounds", "division by zero");
    return static_cast<int32_t>(int64_t{a} / b);
  });
}

// mul and mad: the low half, the high half, or all of the product.
template <typename F>
Execute Multiply(Decoder& d, F with_type) {
  const std::string half = d.Next();
  return WithInteger(d, d.Next(), [&](auto type) { return with_type(half, type); });
}

INSTRUCTION(AddF32, "add.f32", "9.7.3.3 add") {
  return Lanewise<float>(d.Dest(0), d.Source(1), d.Source(2),
                         [](float a, float b) { return Canonical(a + b); });
}

INSTRUCTION(MulF32, "mul.f32", "9.7.3.5 mul") {
  return Lanewise<float>(d.Dest(0), d.Source(1), d.Source(2),
                         [](float a, float b) { return Canonical(a * b); });
}

// Both halves of a 64-bit register.
INSTRUCTION(MulF32x2, "mul.rn.f32x2", "9.7.3.5 mul") {
  return Lanewise<uint64_t>(d.Dest(0), d.Source(1), d.Source(2), [](uint64_t a, uint64_t b) {
    const float low = As<float>(a) * As<float>(b), high = As<float>(a >> 32) * As<float>(b >> 32);
    return Bits(Canonical(low)) | Bits(Canonical(high)) << 32;
  });
}

INSTRUCTION(Mul, "mul", "9.7.1.3 mul") {
  return Multiply(d, [&](const std::string& half, auto type) -> Execute {
    using T = typename decltype(type)::type;
    const Register out = d.Dest(0), a = d.Source(1), b = d.Source(2);
    if (half == "lo") {
      return Lanewise<T>(out, a, b, Wrapping<T>([](auto x, auto y) { return uint64_t{x} * y; }));
    }
    if constexpr (sizeof(T) <= 4) {
      if (half == "wide")
        return Lanewise<T>(out, a, b, [](T x, T y) { return Wide<T>{x} * Wide<T>{y}; });
      if (half == "hi") {
        return Lanewise<T>(out, a, b, [](T x, T y) {
          return static_cast<T>(Wide<T>{x} * Wide<T>{y} >> 8 * sizeof(T));
        });
      }
    }
    d.Unknown("mul." + half);
  });
}

INSTRUCTION(Mad, "mad", "9.7.1.4 mad") {
  return Multiply(d, [&](const std::string& half, auto type) -> Execute {
    using T = typename decltype(type)::type;
    if (half != "lo") d.Unknown("mad." + half);
    return Lanewise<T>(d.Dest(0), d.Source(1), d.Source(2), d.Source(3),
                       Wrapping<T>([](auto x, auto y, auto z) { return uint64_t{x} * y + z; }));
  });
}

INSTRUCTION(FmaF32, "fma.rn.f32", "9.7.3.6 fma") {
  return Lanewise<float>(d.Dest(0), d.Source(1), d.Source(2), d.Source(3),
                         [](float a, float b, float c) { return Canonical(std::fmaf(a, b, c)); });
}

// --- logic and shifts: 9.7.8 ---

template <typename F>
Execute Logic(Decoder& d, F f) {
  const std::string type = d.Next();
  if (type == "pred") {
    return Lanewise<uint8_t>(d.Dest(0), d.Source(1), d.Source(2),
                             [f](uint8_t a, uint8_t b) { return uint8_t(f(a, b) & 1); });
  }
  return WithInteger(d, type, [&](auto t) -> Execute {
    using T = typename decltype(t)::type;
    return Lanewise<T>(d.Dest(0), d.Source(1), d.Source(2),
                       [f](T a, T b) { return static_cast<T>(f(a, b)); });
  });
}

INSTRUCTION(And, "and", "9.7.8.1 and") {
  return Logic(d, [](auto a, auto b) { return a & b; });
}
INSTRUCTION(Or, "or", "9.7.8.2 or") {
  return Logic(d, [](auto a, auto b) { return a | b; });
}
INSTRUCTION(Xor, "xor", "9.7.8.3 xor") {
  return Logic(d, [](auto a, auto b) { return a ^ b; });
}
INSTRUCTION(NotPred, "not.pred", "9.7.8.4 not") {
  return Lanewise<uint8_t>(d.Dest(0), d.Source(1), [](uint8_t a) { return uint8_t(~a & 1); });
}
INSTRUCTION(NotB32, "not.b32", "9.7.8.4 not") {
  return Lanewise<uint32_t>(d.Dest(0), d.Source(1), [](uint32_t a) { return ~a; });
}

// The amount is an unsigned 32-bit number, clamped to the width.
template <typename F>
Execute Shift(Decoder& d, F f) {
  return WithInteger(d, d.Next(), [&](auto type) -> Execute {
    using T = typename decltype(type)::type;
    return Lanewise<uint64_t>(
        d.Dest(0), d.Source(1), d.Source(2), [f](uint64_t a, uint64_t amount) {
          return f(As<T>(a), std::min<uint32_t>(static_cast<uint32_t>(amount), 8 * sizeof(T)));
        });
  });
}
INSTRUCTION(Shl, "shl", "9.7.8.8 shl") {
  return Shift(d, [](auto a, uint32_t n) {
    using T = decltype(a);
    return n == 8 * sizeof(T) ? T{0} : static_cast<T>(static_cast<Unsigned<T>>(a) << n);
  });
}
INSTRUCTION(Shr, "shr", "9.7.8.9 shr") {
  return Shift(d, [](auto a, uint32_t n) {
    using T = decltype(a);
    if (n == 8 * sizeof(T)) return static_cast<T>(a < 0 ? -1 : 0);
    return static_cast<T>(a >> n);
  });
}

// --- comparison and selection: 9.7.6 ---

INSTRUCTION(Setp, "setp", "9.7.6.2 setp") {
  const std::string comparison = d.Next();
  return WithInteger(d, d.Next(), [&](auto type) -> Execute {
    using T = typename decltype(type)::type;
    const Register out = d.Dest(0), a = d.Source(1), b = d.Source(2);
    if (comparison == "eq") return Lanewise<T>(out, a, b, [](T x, T y) { return x == y; });
    if (comparison == "ne") return Lanewise<T>(out, a, b, [](T x, T y) { return x != y; });
    if (comparison == "lt") return Lanewise<T>(out, a, b, [](T x, T y) { return x < y; });
    if (comparison == "le") return Lanewise<T>(out, a, b, [](T x, T y) { return x <= y; });
    if (comparison == "gt") return Lanewise<T>(out, a, b, [](T x, T y) { return x > y; });
    if (comparison == "ge") return Lanewise<T>(out, a, b, [](T x, T y) { return x >= y; });
    d.Unknown("setp." + comparison);
  });
}

INSTRUCTION(Selp, "selp", "9.7.6.4 selp") {
  const uint32_t bytes = BytesOf(d, d.Next());
  const uint64_t width = bytes == 8 ? ~uint64_t{0} : (uint64_t{1} << 8 * bytes) - 1;
  return Lanewise<uint64_t>(
      d.Dest(0), d.Source(1), d.Source(2), d.Source(3),
      [=](uint64_t a, uint64_t b, uint64_t p) { return (p & 1 ? a : b) & width; });
}

// --- movement and conversion: 9.7.9 ---

INSTRUCTION(Mov, "mov", "9.7.9.2, 9.7.9.3 mov") {
  const std::string type = d.Next();
  const uint32_t bits = type == "pred" ? 1 : 8 * BytesOf(d, type);
  const uint64_t width = bits >= 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1;
  if (bits > 64) d.Unknown("mov." + type);
  if (d.Text(0)[0] == '{') {  // unpack: the first is the lowest
    const std::vector<Register> parts = d.Dests(0);
    const Register from = d.Source(1);
    if (parts.size() != 2 && parts.size() != 4) d.Unknown("a vector of this size");
    const uint32_t each = bits / parts.size();
    return [=](Warp& w, Mask m) {
      Lanes value;
      std::copy_n(w.Read(from, m), kLanes, value.begin());
      for (size_t i = 0; i < parts.size(); ++i) {
        uint64_t* z = w.Write(parts[i], m);
        ForLanes(m,
                 [&](uint32_t l) { z[l] = value[l] >> (i * each) & ((uint64_t{1} << each) - 1); });
      }
      return Outcome::kNext;
    };
  }
  if (d.Text(1)[0] == '{') {  // pack
    const std::vector<Register> parts = d.Sources(1);
    const Register out = d.Dest(0);
    if (parts.size() != 2 && parts.size() != 4) d.Unknown("a vector of this size");
    const uint32_t each = bits / parts.size();
    return [=](Warp& w, Mask m) {
      Lanes value{};
      for (size_t i = 0; i < parts.size(); ++i) {
        const uint64_t* x = w.Read(parts[i], m);
        ForLanes(
            m, [&](uint32_t l) { value[l] |= (x[l] & ((uint64_t{1} << each) - 1)) << (i * each); });
      }
      uint64_t* z = w.Write(out, m);
      ForLanes(m, [&](uint32_t l) { z[l] = value[l]; });
      return Outcome::kNext;
    };
  }
  return Lanewise<uint64_t>(d.Dest(0), d.Source(1), [=](uint64_t a) { return a & width; });
}

INSTRUCTION(CvtBf16x2, "cvt.rn.bf16x2.f32", "9.7.9.21 cvt: the first source is the upper half") {
  return Lanewise<float>(d.Dest(0), d.Source(1), d.Source(2), [](float a, float b) {
    return uint32_t{ToBfloat16(a)} << 16 | ToBfloat16(b);
  });
}
INSTRUCTION(CvtF16x2, "cvt.rn.f16x2.f32", "9.7.9.21 cvt: the first source is the upper half") {
  return Lanewise<float>(d.Dest(0), d.Source(1), d.Source(2), [](float a, float b) {
    return uint32_t{ToFloat16(a)} << 16 | ToFloat16(b);
  });
}
INSTRUCTION(CvtF32F16, "cvt.f32.f16", "9.7.9.21 cvt") {
  return Lanewise<uint16_t>(d.Dest(0), d.Source(1), [](uint16_t a) { return FromFloat16(a); });
}

// Between integers: cut off, or extended as the source's type says.
INSTRUCTION(Cvt, "cvt", "9.7.9.21 cvt") {
  const std::string to = d.Next(), from = d.Next();
  if (to[0] == 'f' || from[0] == 'f') d.Unknown("cvt." + to + "." + from);
  return WithInteger(d, from, [&](auto from_type) {
    return WithInteger(d, to, [&](auto to_type) -> Execute {
      using From = typename decltype(from_type)::type;
      using To = typename decltype(to_type)::type;
      return Lanewise<From>(d.Dest(0), d.Source(1), [](From a) { return static_cast<To>(a); });
    });
  });
}

// Parameters and global memory have the generic address that they have anyway; shared memory has a
// window.
INSTRUCTION(CvtaParam, "cvta.param.u64", "9.7.9.20 cvta") {
  return Lanewise<uint64_t>(d.Dest(0), d.Source(1), [](uint64_t a) { return a; });
}
INSTRUCTION(CvtaGlobal, "cvta.global.u64", "9.7.9.20 cvta") {
  return Lanewise<uint64_t>(d.Dest(0), d.Source(1), [](uint64_t a) { return a; });
}
INSTRUCTION(CvtaShared, "cvta.shared.u64", "9.7.9.20 cvta") {
  return Lanewise<uint64_t>(d.Dest(0), d.Source(1), [](uint64_t a) { return a + kSharedGeneric; });
}
INSTRUCTION(CvtaToSharedCluster, "cvta.to.shared::cluster.u64", "9.7.9.20 cvta") {
  return Lanewise<uint64_t>(d.Dest(0), d.Source(1), [](uint64_t a) { return a - kSharedGeneric; });
}

INSTRUCTION(Mapa, "mapa.shared::cluster.u32", "9.7.9.23 mapa") {
  return Lanewise<uint32_t>(d.Dest(0), d.Source(1), d.Source(2),
                            [](uint32_t a, uint32_t rank) { return (a & 0xffffff) | rank << 24; });
}

}  // namespace
}  // namespace model
