#include "values.h"

#include <math.h>
#include <string.h>

#include <algorithm>

#include "half.h"

namespace job {

namespace {

bool is_signed(ncclDataType_t type) { return type != ncclUint8 && type != ncclUint32 && type != ncclUint64; }

template <class T>
void put(void* to, size_t index, double value) {
  const T narrow = static_cast<T>(value);
  memcpy(static_cast<char*>(to) + index * sizeof narrow, &narrow, sizeof narrow);
}

template <class T>
double get(const void* from, size_t index) {
  T narrow;
  memcpy(&narrow, static_cast<const char*>(from) + index * sizeof narrow, sizeof narrow);
  return static_cast<double>(narrow);
}

void write_element(ncclDataType_t type, void* to, size_t index, double value) {
  switch (type) {
    case ncclInt8: return put<signed char>(to, index, value);
    case ncclUint8: return put<unsigned char>(to, index, value);
    case ncclInt32: return put<int>(to, index, value);
    case ncclUint32: return put<unsigned>(to, index, value);
    case ncclInt64: return put<long>(to, index, value);
    case ncclUint64: return put<unsigned long>(to, index, value);
    case ncclFloat16: return put<Half>(to, index, value);
    case ncclFloat32: return put<float>(to, index, value);
    case ncclFloat64: return put<double>(to, index, value);
    default: {  // bfloat16: the upper half of a float
      const float wide = static_cast<float>(value);
      unsigned bits;
      memcpy(&bits, &wide, sizeof bits);
      const auto upper = static_cast<unsigned short>(bits >> 16);
      memcpy(static_cast<char*>(to) + index * sizeof upper, &upper, sizeof upper);
    }
  }
}

}  // namespace

size_t bytes_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8: return 1;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64: return 8;
    default: return 4;
  }
}

double value_of(ncclDataType_t type, const ReductionKind& reduction, int rank, size_t index, long salt) {
  const size_t mixed = index * 3 + static_cast<size_t>(rank) * 5 + static_cast<size_t>(salt);
  if (reduction.op == ncclProd && !reduction.premul) return mixed % 5 == 0 ? 2 : 1;  // products of 16 ranks stay below 128
  return is_signed(type) ? static_cast<double>(mixed % 7) - 3 : static_cast<double>(mixed % 5) + 1;
}

double reduced_value(ncclDataType_t type, const ReductionKind& reduction, int ranks, size_t index, long salt) {
  double result = value_of(type, reduction, 0, index, salt);
  for (int rank = 1; rank < ranks; rank++) {
    const double value = value_of(type, reduction, rank, index, salt);
    if (reduction.premul || reduction.op == ncclSum || reduction.op == ncclAvg) result += value;
    else if (reduction.op == ncclProd) result *= value;
    else if (reduction.op == ncclMax) result = std::max(result, value);
    else result = std::min(result, value);
  }
  if (reduction.premul) return 2 * result;
  if (reduction.op != ncclAvg) return result;
  const bool integer = type <= ncclUint64;
  return integer ? trunc(result / ranks) : result / ranks;
}

void fill(ncclDataType_t type, void* to, size_t count, const std::function<double(size_t)>& value) {
  const size_t head = std::min(count, kPeriod), element = bytes_of(type);
  for (size_t i = 0; i < head; i++) write_element(type, to, i, value(i));
  for (size_t done = head; done < count;) {  // repeat by doubling, in whole periods
    const size_t more = std::min(done, count - done);
    memcpy(static_cast<char*>(to) + done * element, to, more * element);
    done += more;
  }
}

double read_element(ncclDataType_t type, const void* data, size_t index) {
  switch (type) {
    case ncclInt8: return get<signed char>(data, index);
    case ncclUint8: return get<unsigned char>(data, index);
    case ncclInt32: return get<int>(data, index);
    case ncclUint32: return get<unsigned>(data, index);
    case ncclInt64: return get<long>(data, index);
    case ncclUint64: return get<unsigned long>(data, index);
    case ncclFloat16: return get<Half>(data, index);
    case ncclFloat32: return get<float>(data, index);
    case ncclFloat64: return get<double>(data, index);
    default: {
      unsigned short upper;
      memcpy(&upper, static_cast<const char*>(data) + index * sizeof upper, sizeof upper);
      const unsigned bits = static_cast<unsigned>(upper) << 16;
      float wide;
      memcpy(&wide, &bits, sizeof wide);
      return wide;
    }
  }
}

size_t count_wrong(ncclDataType_t type, const void* data, size_t count, const std::function<double(size_t)>& expected, bool exact,
                   size_t* first) {
  std::vector<double> values(kPeriod);
  for (size_t i = 0; i < kPeriod; i++) values[i] = expected(i);
  // Averages of floating-point types multiply by 1/ranks, which is rounded.
  const double tolerance = exact ? 0 : type == ncclBfloat16 ? 0.1 : type == ncclFloat16 ? 0.02 : 1e-4;
  size_t wrong = 0;
  for (size_t i = 0; i < count; i++) {
    if (fabs(read_element(type, data, i) - values[i % kPeriod]) <= tolerance) continue;
    if (wrong++ == 0) *first = i;
  }
  return wrong;
}

}  // namespace job
