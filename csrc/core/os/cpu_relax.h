#pragma once

namespace gpumode::os {

// Tells the core that this is a spin.
inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

}  // namespace gpumode::os
