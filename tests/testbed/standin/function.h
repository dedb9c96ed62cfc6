// Which collective, reduction, type, algorithm and protocol a device function id stands for.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <string>

namespace standin {

enum class Collective { kSendRecv, kAllGather, kBroadcast, kAllReduce, kReduce, kReduceScatter, kAllGatherV, kOther };
enum class Operator { kSum, kProd, kMinMax, kPreMulSum, kSumPostDiv };
enum class Type { kInt8, kUint8, kInt32, kUint32, kInt64, kUint64, kFloat16, kFloat32, kFloat64, kBfloat16 };

// In NCCL's order: a protocol is an index into a connection's buffers.
enum class Protocol { kLL, kLL128, kSimple };
constexpr int kProtocols = 3;
enum class Algorithm { kTree, kRing, kPat };

size_t size_of(Type type);

struct Function {
  Collective collective;
  Operator reduction;
  Type type;
  Algorithm algorithm;
  Protocol protocol;
};

// The function with this id. Ends the process, naming what was asked for, if it is none of the algorithms that are played.
Function find_function(unsigned id);

}  // namespace standin
