#include "reduce.h"

#include <string.h>

#include <type_traits>

#include "half.h"
#include "nccl_layout.h"

namespace standin {

namespace {

struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

float widen(Bfloat16 value) {
  const uint32_t bits = uint32_t{value.bits} << 16;
  float wide;
  memcpy(&wide, &bits, sizeof wide);
  return wide;
}
float widen(Float16 value) {
  Half half;
  memcpy(&half, &value, sizeof half);
  return static_cast<float>(half);
}
template <class T>
T widen(T value) {
  return value;
}

template <class T>
struct Narrow {
  template <class V>
  static T from(V value) {
    return static_cast<T>(value);
  }
};
template <>
struct Narrow<Bfloat16> {
  static Bfloat16 from(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits += 0x7fff + (bits >> 16 & 1);  // round to nearest even
    return {static_cast<uint16_t>(bits >> 16)};
  }
};
template <>
struct Narrow<Float16> {
  static Float16 from(float value) {
    const auto half = static_cast<Half>(value);
    Float16 narrow;
    memcpy(&narrow, &half, sizeof narrow);
    return narrow;
  }
};

// NCCL maps Min and Max to one function: integers are compared after XOR with the argument, floats by its lowest bit (0 = Min).
template <class T, class W>
W min_max(W left, W right, uint64_t argument) {
  if constexpr (std::is_integral<W>::value) {
    using Unsigned = typename std::make_unsigned<T>::type;
    const auto mask = static_cast<Unsigned>(argument);
    return (static_cast<Unsigned>(left) ^ mask) < (static_cast<Unsigned>(right) ^ mask) ? left : right;
  } else {
    return (argument & 1) == 0 ? (left < right ? left : right) : (left > right ? left : right);
  }
}

// Where signed and unsigned types share a function, the argument is the divisor times two plus a bit for signed.
template <class T, class W>
W divide(W sum, uint64_t argument) {
  if constexpr (!std::is_integral<W>::value) {
    return sum;  // floating-point averages are PreMulSum
  } else if (kSignedAverageIsUnsigned) {
    const auto divisor = argument >> 1;
    if (argument & 1) {
      using Signed = typename std::make_signed<T>::type;
      return static_cast<W>(static_cast<Signed>(sum) / static_cast<Signed>(divisor));
    }
    return static_cast<W>(sum / static_cast<T>(divisor));
  } else {
    return static_cast<W>(sum / static_cast<T>(argument));
  }
}

template <class T>
void reduce_typed(const Reduction& reduction, void* to_, const void* own_, const void* received_, size_t count, bool last) {
  T* to = static_cast<T*>(to_);
  const T* own = static_cast<const T*>(own_);
  const T* received = static_cast<const T*>(received_);
  if (reduction.op == Operator::kSum && received && std::is_arithmetic<T>::value) {
    for (size_t i = 0; i < count; i++) to[i] = Narrow<T>::from(widen(own[i]) + widen(received[i]));
    return;
  }
  T factor;
  memcpy(&factor, &reduction.argument, sizeof factor);
  for (size_t i = 0; i < count; i++) {
    auto value = widen(own[i]);
    if (reduction.op == Operator::kPreMulSum) value = value * widen(factor);
    if (received) {
      const auto other = widen(received[i]);
      switch (reduction.op) {
        case Operator::kProd: value = value * other; break;
        case Operator::kMinMax: value = min_max<T>(value, other, reduction.argument); break;
        default: value = value + other;
      }
    }
    if (last && reduction.op == Operator::kSumPostDiv) value = divide<T>(value, reduction.argument);
    to[i] = Narrow<T>::from(value);
  }
}

}  // namespace

void reduce(const Reduction& reduction, void* to, const void* own, const void* received, size_t count, bool last) {
  switch (reduction.type) {
    case Type::kInt8: return reduce_typed<int8_t>(reduction, to, own, received, count, last);
    case Type::kUint8: return reduce_typed<uint8_t>(reduction, to, own, received, count, last);
    case Type::kInt32: return reduce_typed<int32_t>(reduction, to, own, received, count, last);
    case Type::kUint32: return reduce_typed<uint32_t>(reduction, to, own, received, count, last);
    case Type::kInt64: return reduce_typed<int64_t>(reduction, to, own, received, count, last);
    case Type::kUint64: return reduce_typed<uint64_t>(reduction, to, own, received, count, last);
    case Type::kFloat16: return reduce_typed<Float16>(reduction, to, own, received, count, last);
    case Type::kFloat32: return reduce_typed<float>(reduction, to, own, received, count, last);
    case Type::kFloat64: return reduce_typed<double>(reduction, to, own, received, count, last);
    case Type::kBfloat16: return reduce_typed<Bfloat16>(reduction, to, own, received, count, last);
  }
}

}  // namespace standin
