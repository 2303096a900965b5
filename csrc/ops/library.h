#pragma once

namespace gpumode::ops {

// Defines torch.ops.gpumode: the schemas, and which function serves which device. Each rule that
// can have an op has one; torch_gpumode/ops.py says what they do. To be called once.
void define_all();

}  // namespace gpumode::ops
