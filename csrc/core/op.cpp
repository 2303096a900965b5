#include "core/op.h"

namespace gpumode {

const char* name(Collective collective) {
  switch (collective) {
    case Collective::Broadcast:
      return "broadcast";
    case Collective::AllReduce:
      return "all_reduce";
    case Collective::Reduce:
      return "reduce";
    case Collective::AllGather:
      return "all_gather";
    case Collective::ReduceScatter:
      return "reduce_scatter";
    case Collective::Gather:
      return "gather";
    case Collective::Scatter:
      return "scatter";
    case Collective::AllToAll:
      return "all_to_all";
    case Collective::Barrier:
      return "barrier";
    case Collective::Send:
      return "send";
    case Collective::Recv:
      return "recv";
    case Collective::AllReduceSparse:
      return "all_reduce_sparse";
  }
  return "?";
}

const char* name(DType dtype) {
  switch (dtype) {
    case DType::F16:
      return "float16";
    case DType::BF16:
      return "bfloat16";
    case DType::F32:
      return "float32";
    case DType::F64:
      return "float64";
    case DType::I8:
      return "int8";
    case DType::U8:
      return "uint8";
    case DType::I16:
      return "int16";
    case DType::U16:
      return "uint16";
    case DType::I32:
      return "int32";
    case DType::U32:
      return "uint32";
    case DType::I64:
      return "int64";
    case DType::U64:
      return "uint64";
    case DType::Bool:
      return "bool";
    case DType::C64:
      return "complex64";
    case DType::C128:
      return "complex128";
    case DType::C32:
      return "complex32";
    case DType::F8E4M3FN:
      return "float8_e4m3fn";
    case DType::F8E4M3FNUZ:
      return "float8_e4m3fnuz";
    case DType::F8E5M2:
      return "float8_e5m2";
    case DType::F8E5M2FNUZ:
      return "float8_e5m2fnuz";
    case DType::F8E8M0FNU:
      return "float8_e8m0fnu";
    case DType::F4E2M1FNx2:
      return "float4_e2m1fn_x2";
  }
  return "?";
}

const char* name(ReduceOp op) {
  switch (op) {
    case ReduceOp::Sum:
      return "sum";
    case ReduceOp::Avg:
      return "avg";
    case ReduceOp::Product:
      return "product";
    case ReduceOp::Min:
      return "min";
    case ReduceOp::Max:
      return "max";
    case ReduceOp::BAnd:
      return "band";
    case ReduceOp::BOr:
      return "bor";
    case ReduceOp::BXor:
      return "bxor";
    case ReduceOp::PreMulSum:
      return "premul_sum";
  }
  return "?";
}

size_t itemsize(DType dtype) {
  switch (dtype) {
    case DType::I8:
    case DType::U8:
    case DType::Bool:
    case DType::F8E4M3FN:
    case DType::F8E4M3FNUZ:
    case DType::F8E5M2:
    case DType::F8E5M2FNUZ:
    case DType::F8E8M0FNU:
    case DType::F4E2M1FNx2:
      return 1;
    case DType::F16:
    case DType::BF16:
    case DType::I16:
    case DType::U16:
      return 2;
    case DType::F32:
    case DType::I32:
    case DType::U32:
    case DType::C32:
      return 4;
    case DType::F64:
    case DType::I64:
    case DType::U64:
    case DType::C64:
      return 8;
    case DType::C128:
      return 16;
  }
  return 1;
}

bool is_p2p(Collective collective) {
  return collective == Collective::Send || collective == Collective::Recv;
}

bool has_root(Collective collective) {
  return collective == Collective::Broadcast || collective == Collective::Reduce ||
         collective == Collective::Gather || collective == Collective::Scatter;
}

bool is_reduction(Collective collective) {
  return collective == Collective::AllReduce || collective == Collective::Reduce ||
         collective == Collective::ReduceScatter;
}

bool is_reducible(DType dtype) { return dtype <= DType::C128; }

bool supports(ReduceOp op, DType dtype) {
  if (!is_reducible(dtype)) return false;
  const bool is_bool = dtype == DType::Bool;
  const bool is_complex = dtype == DType::C64 || dtype == DType::C128;
  const bool is_float =
      dtype == DType::F16 || dtype == DType::BF16 || dtype == DType::F32 || dtype == DType::F64;
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Product:
      return true;
    case ReduceOp::Avg:
      return !is_bool;
    case ReduceOp::Min:
    case ReduceOp::Max:
      return !is_complex;
    case ReduceOp::BAnd:
    case ReduceOp::BOr:
    case ReduceOp::BXor:
      return !is_complex && !is_float;
    case ReduceOp::PreMulSum:
      return is_float;
  }
  return false;
}

}  // namespace gpumode
