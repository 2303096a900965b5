#pragma once

#include <vector>

#include "optim/cuda_batch.h"
#include "optim/table.h"

namespace gpumode::optim {

class CudaTable final : public Table {
 public:
  CudaTable(const Rule& rule, at::Device device) : Table(rule), device_(device) {}

  GradSums grad_sums(const Scale& scale, bool needs_each) override;
  at::Tensor start(const Scale& scale) override;
  void finish(const Scale& scale, const at::Tensor& sums) override;
  bool was_recorded() const override;

 private:
  // Where the sums of a pass go.
  struct Sums {
    at::Tensor each, total, is_bad;
  };

  Batch& batch_of(size_t i);
  void assemble();
  void collect(bool with_state);
  // What a look at some of the parameters has found.
  struct Found {
    bool has_any = false, grads_are_new[kNumKinds] = {};
    std::vector<size_t> changed;
  };
  void look_at_all(size_t begin, size_t end, bool with_state, Found* found);
  void* address_of(const at::Tensor& grad, size_t i, bool with_state) const;
  // Where a parameter's tensors lie, of which each step must see that they are still there. Of
  // thousands of parameters that is more than caches hold, so it is little, and fetched ahead.
  struct Look {
    struct Part {
      const c10::TensorImpl* tensor;
      const c10::StorageImpl* storage;
      const void* memory;  // of the storage
      int64_t offset;      // in it
    };
    static constexpr int kMaxParts = 2 + kMaxStates;

    const void* grad_slot = nullptr;  // a hint
    int64_t numel = 0;
    at::ScalarType grad_dtype = at::ScalarType::Undefined;
    bool is_plain = false;  // all is contiguous
    int num_parts = 0;
    Part parts[kMaxParts];
  };

  void fetch_ahead(size_t i, size_t end) const;
  bool is_as_seen(size_t i, const at::Tensor& grad) const;
  void look_at(const Param& param, const at::Tensor& grad, const Operands& tensors, Look* look);
  void renew(size_t i, const at::Tensor& grad);
  void bump_versions(size_t begin, size_t end);
  void run(const Pass& pass, const Scale& scale, bool is_last, const Sums& sums);
  Launch launch_of(Batch& batch, const Scale& scale);

  const at::Device device_;
  Batch batches_[kNumKinds];
  struct At {
    Kind kind;
    uint32_t row;
  };
  // Of each parameter:
  std::vector<At> where_;
  std::vector<Look> looks_;
};

}  // namespace gpumode::optim
