#include "symm/copy.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "gpu/status.h"

namespace gpumode {
namespace {

// 1024 threads with 4 vectors of 16 bytes each in flight are 64 KiB per multiprocessor: more than
// latency times bandwidth, for local memory and for NVLink.
constexpr int kThreads = 1024;
constexpr int kUnroll = 4;
constexpr int64_t kVec = sizeof(uint4);
constexpr int64_t kLine = 128;  // bytes that a store of eight threads should fill

// How the bytes are dealt out. The middle is stored as 16-byte vectors from the start of a cache
// line on; what is left at either end, at most 142 bytes each, is copied byte by byte.
//
// Loads are aligned to 16 bytes too. Where source and destination are aligned differently, each
// vector is put together from the two aligned source vectors that it straddles, so the middle
// begins and ends where both of them lie inside the source: nothing outside of it is ever read.
struct Plan {
  int64_t head;      // bytes before the middle
  int64_t num_vecs;  // vectors in the middle
  int shift;         // bytes by which the middle's source is past 16-byte alignment
};

Plan make_plan(uintptr_t dst, uintptr_t src, int64_t nbytes) {
  int64_t head = (kLine - static_cast<int64_t>(dst % kLine)) % kLine;
  const auto shift = static_cast<int64_t>((src + head) % kVec);
  if (shift > head) head += kLine;
  // The last vector's second source vector ends kVec - shift bytes after it.
  const int64_t overhang = shift == 0 ? 0 : kVec - shift;
  const int64_t num_vecs = (nbytes - head - overhang) / kVec;
  if (num_vecs <= 0) return {nbytes, 0, 0};
  return {head, num_vecs, static_cast<int>(shift)};
}

// The vector that begins kWords words and `bits` bits into the pair (low, high).
template <int kWords>
__device__ uint4 straddle(uint4 low, uint4 high, int bits) {
  const unsigned words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  return make_uint4(__funnelshift_r(words[kWords + 0], words[kWords + 1], bits),
                    __funnelshift_r(words[kWords + 1], words[kWords + 2], bits),
                    __funnelshift_r(words[kWords + 2], words[kWords + 3], bits),
                    __funnelshift_r(words[kWords + 3], words[kWords + 4], bits));
}

template <bool kAligned, int kWords>
__device__ uint4 load(const uint4* src, int64_t i, int bits) {
  if constexpr (kAligned) return src[i];
  // The second load is the neighbouring thread's first: it comes from L1.
  return straddle<kWords>(src[i], src[i + 1], bits);
}

template <bool kAligned, int kWords>
__global__ void __launch_bounds__(kThreads)
    copy_kernel(char* __restrict__ dst, const char* __restrict__ src, int64_t nbytes, Plan plan) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t num_threads = static_cast<int64_t>(gridDim.x) * kThreads;

  auto* dst_vecs = reinterpret_cast<uint4*>(dst + plan.head);
  const auto* src_vecs = reinterpret_cast<const uint4*>(src + plan.head - plan.shift);
  const int bits = plan.shift % 4 * 8;
  int64_t i = thread;
  for (; i + (kUnroll - 1) * num_threads < plan.num_vecs; i += kUnroll * num_threads) {
    uint4 vecs[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      vecs[u] = load<kAligned, kWords>(src_vecs, i + u * num_threads, bits);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) dst_vecs[i + u * num_threads] = vecs[u];
  }
  for (; i < plan.num_vecs; i += num_threads) {
    dst_vecs[i] = load<kAligned, kWords>(src_vecs, i, bits);
  }

  for (int64_t b = thread; b < plan.head; b += num_threads) dst[b] = src[b];
  const int64_t tail = plan.head + plan.num_vecs * kVec;
  for (int64_t b = tail + thread; b < nbytes; b += num_threads) dst[b] = src[b];
}

using Kernel = void (*)(char*, const char*, int64_t, Plan);

Kernel select_kernel(int shift) {
  if (shift == 0) return copy_kernel<true, 0>;
  constexpr Kernel by_word[] = {copy_kernel<false, 0>, copy_kernel<false, 1>, copy_kernel<false, 2>,
                                copy_kernel<false, 3>};
  return by_word[shift / 4];
}

}  // namespace

Status copy(void* dst, const void* src, int64_t nbytes, int num_sms, void* stream) {
  if (nbytes < 0) return {Code::InvalidArgument, "nbytes is negative"};
  if (num_sms < 0) return {Code::InvalidArgument, "num_sms is negative"};
  if (nbytes == 0) return {};
  if (dst == nullptr) return {Code::InvalidArgument, "dst is null"};
  if (src == nullptr) return {Code::InvalidArgument, "src is null"};

  int device = 0, num_sms_there = 0;
  Status status = from_cuda("cudaGetDevice", cudaGetDevice(&device));
  if (!status.ok()) return status;
  status =
      from_cuda("cudaDeviceGetAttribute",
                cudaDeviceGetAttribute(&num_sms_there, cudaDevAttrMultiProcessorCount, device));
  if (!status.ok()) return status;

  const Plan plan =
      make_plan(reinterpret_cast<uintptr_t>(dst), reinterpret_cast<uintptr_t>(src), nbytes);
  const int64_t num_useful = std::max<int64_t>(1, (plan.num_vecs + kThreads - 1) / kThreads);
  // Blocks go to idle multiprocessors first, so one for each keeps the limit; two gain nothing.
  const int64_t num_allowed = num_sms == 0 ? num_sms_there : std::min(num_sms, num_sms_there);
  const auto num_blocks = static_cast<unsigned>(std::min(num_useful, num_allowed));
  select_kernel(plan.shift)<<<num_blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<char*>(dst), static_cast<const char*>(src), nbytes, plan);
  return from_cuda("the copy kernel", cudaGetLastError());
}

}  // namespace gpumode
