#include "function.h"

#include <string.h>

#include "log.h"
#include "nccl_layout.h"

namespace standin {

namespace {

constexpr const char* kTypes[] = {"i8", "u8", "i32", "u32", "i64", "u64", "f16", "f32", "f64", "bf16"};
constexpr const char* kOperators[] = {"Sum", "Prod", "MinMax", "PreMulSum", "SumPostDiv"};
constexpr const char* kProtocolNames[] = {"LL", "LL128", "Simple"};
constexpr const char* kAlgorithms[] = {"Tree", "Ring", "PAT"};
constexpr const char* kCollectives[] = {"SendRecv", "AllGather", "Broadcast", "AllReduce", "Reduce", "ReduceScatter", "AllGatherV"};

template <size_t N>
int index_of(const char* const (&names)[N], const char* name) {
  for (size_t i = 0; i < N; i++)
    if (strcmp(names[i], name) == 0) return static_cast<int>(i);
  return -1;
}

}  // namespace

size_t size_of(Type type) {
  static constexpr size_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return kSizes[static_cast<int>(type)];
}

Function find_function(unsigned id) {
  if (id >= sizeof kDeviceFunctions / sizeof *kDeviceFunctions) unsupported("device function %u, which libnccl's table does not hold", id);
  const DeviceFunctionName& name = kDeviceFunctions[id];
  const int collective = index_of(kCollectives, name.collective);
  const int reduction = index_of(kOperators, name.reduction);
  const int type = index_of(kTypes, name.type);
  const int algorithm = index_of(kAlgorithms, name.algorithm);
  const int protocol = index_of(kProtocolNames, name.protocol);
  if (collective < 0 || reduction < 0 || type < 0 || algorithm < 0 || protocol < 0)
    unsupported("%s %s %s with algorithm %s and protocol %s (only Ring, Tree and PAT: NCCL_ALGO=Ring,Tree,PAT)", name.collective, name.reduction,
                name.type, name.algorithm, name.protocol);
  return {static_cast<Collective>(collective), static_cast<Operator>(reduction), static_cast<Type>(type),
          static_cast<Algorithm>(algorithm), static_cast<Protocol>(protocol)};
}

}  // namespace standin
