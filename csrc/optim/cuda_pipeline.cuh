#pragma once

#include <cstdint>

// Copies from global to shared memory that go on while their block computes, and the barriers which
// say that they have arrived: Hopper's bulk copies, or what Ampere has. PTX ISA, "mbarrier" and
// "cp.async".
namespace gpumode::optim {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define GPUMODE_HAS_BULK_COPIES 1
#else
#define GPUMODE_HAS_BULK_COPIES 0
#endif

constexpr int kLanes = 32;

__device__ inline uint32_t in_shared(const void* address) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(address));
}

// A barrier in shared memory. Each of its phases ends when all have arrived, and all the bytes that
// were announced.
class Barrier {
 public:
  // By one thread, before a barrier of the block.
  __device__ void init(uint32_t num_arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(in_shared(&word_)), "r"(num_arrivals));
#if GPUMODE_HAS_BULK_COPIES
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  }

  __device__ void arrive() {
    asm volatile(
        "{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(in_shared(&word_))
        : "memory");
  }

  // Until phases 0, 2, 4, ... (`parity` 0) or 1, 3, ... have ended; phase -1 has.
  __device__ void wait(uint32_t parity) {
    while (!has_ended(parity)) {
    }
  }

 private:
  friend class Loads;

  __device__ bool has_ended(uint32_t parity) {
    uint32_t ended;
#if GPUMODE_HAS_BULK_COPIES
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(ended)
        : "r"(in_shared(&word_)), "r"(parity)
        : "memory");
#else
    asm volatile(
        "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(ended)
        : "r"(in_shared(&word_)), "r"(parity)
        : "memory");
#endif
    return ended != 0;
  }

  uint64_t word_;
};

// The loads of one warp, all lanes of which make the same calls, with the same arguments. They
// arrive at a barrier for kLoadArrivals arrivals.
constexpr uint32_t kLoadArrivals = GPUMODE_HAS_BULK_COPIES ? 1 : kLanes + 1;

class Loads {
 public:
  __device__ explicit Loads(Barrier* barrier) : barrier_(barrier) {}

  // `nbytes` is a multiple of 16, both addresses are aligned to 16 bytes.
  __device__ void add(void* shared, const void* global, uint32_t nbytes) {
    const uint32_t to = in_shared(shared);
    const uint32_t lane = threadIdx.x % kLanes;
#if GPUMODE_HAS_BULK_COPIES
    if (lane != 0 || nbytes == 0) return;
    asm volatile(
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(in_shared(barrier_)),
        "r"(nbytes)
        : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(to),
        "l"(global), "r"(nbytes), "r"(in_shared(barrier_))
        : "memory");
#else
    for (uint32_t at = lane * 16; at < nbytes; at += kLanes * 16) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + at),
                   "l"(static_cast<const char*>(global) + at)
                   : "memory");
    }
#endif
  }

  // After the last: those who wait see them, and what this warp has written to shared memory.
  __device__ void arrive() {
#if !GPUMODE_HAS_BULK_COPIES
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(in_shared(barrier_))
                 : "memory");
#endif
    __syncwarp();
    if (threadIdx.x % kLanes == 0) barrier_->arrive();
  }

 private:
  Barrier* const barrier_;
};

// Copies of a few bytes, by single threads; and a wait for those that were committed, not for any
// Loads since.
template <int kBytes>
__device__ void copy_async(void* shared, const void* global) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(in_shared(shared)), "l"(global)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(in_shared(shared)), "l"(global),
                 "n"(kBytes)
                 : "memory");
  }
}

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

__device__ inline void wait_for_copies() {
  asm volatile("cp.async.commit_group; cp.async.wait_group 1;" ::: "memory");
  __syncwarp();
}

// Where a user of a ring of `num_stages` stages is.
struct Turn {
  uint32_t stage = 0, phase = 0;

  __device__ void next(uint32_t num_stages) {
    if (++stage == num_stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

}  // namespace gpumode::optim
